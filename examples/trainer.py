"""Context parallelism with the Hugging Face Trainer: patch the model, pass our collator, use ContextParallelTrainer.

On two CPU processes, with plain data parallelism around them or with DeepSpeed ZeRO-2:

    torchrun --nproc_per_node 2 examples/trainer.py
    accelerate launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
        --use_deepspeed --zero_stage 2 examples/trainer.py

Both print the losses of one process, which needs no launcher:

    python examples/trainer.py --ring_degree 1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_cp import (
    ContextParallelConfig,
    ContextParallelTrainer,
    DataCollatorForContextParallel,
    apply_context_parallel,
)


@dataclass
class Options:
    """What this script asks."""

    ring_degree: int = field(default=2, metadata={"help": "Processes that share a row of tokens."})
    max_tokens: int = field(default=256, metadata={"help": "Tokens of a packed sample."})
    max_steps: int = field(default=6, metadata={"help": "Optimizer steps."})
    output_dir: str = field(default="outputs/trainer", metadata={"help": "Where the model is saved."})


def make_model() -> LlamaForCausalLM:
    """A tiny Llama with the same random weights in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def make_documents(first: int, last: int) -> list[dict[str, list[int]]]:
    """Counting sequences of uneven lengths, as token ids."""
    return [{"input_ids": [(7 * n + i) % 64 for i in range(20 + 37 * n % 101)]} for n in range(first, last)]


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    args = TrainingArguments(
        output_dir=options.output_dir,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,  # a micro-step is one packed sample
        gradient_accumulation_steps=2,
        max_steps=options.max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=options.max_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    config = ContextParallelConfig(ring_degree=options.ring_degree)
    trainer = ContextParallelTrainer(
        model=apply_context_parallel(make_model(), config),
        args=args,
        train_dataset=make_documents(1, 33),
        eval_dataset=make_documents(33, 42),
        data_collator=DataCollatorForContextParallel(config, max_tokens=options.max_tokens),
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.accelerator.print(
        f"{trainer.accelerator.distributed_type.value}, {trainer.cp_mesh}: evaluation loss "
        f"{losses[0]:.4f} -> {losses[-1]:.4f}; model in {options.output_dir}",
        flush=True,
    )
    trainer.end()


if __name__ == "__main__":
    main()
