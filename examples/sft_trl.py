"""Context parallelism with TRL's SFTTrainer: put the mixin before it, patch the model, pass our collator.

On two CPU processes, with plain data parallelism around them or with DeepSpeed ZeRO-2:

    torchrun --nproc_per_node 2 examples/sft_trl.py
    accelerate launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
        --use_deepspeed --zero_stage 2 examples/sft_trl.py

Both print the losses of one process, which needs no launcher:

    python examples/sft_trl.py --ring_degree 1

SFTTrainer prepares the data set as always (here prompts and completions, packed, with loss on the completions only).
With `peft_config=LoraConfig(...)` it trains adapters. A trainer that exists already is made context-parallel by
`hf_cp.attach_context_parallel(trainer, config)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_cp import (
    ContextParallelConfig,
    ContextParallelTrainerMixin,
    DataCollatorForContextParallel,
    apply_context_parallel,
)

WORDS = ["<pad>", "</s>", "<unk>", "count", "from", "up", "down", ":", *map(str, range(100))]


@dataclass
class Options:
    """What this script asks."""

    ring_degree: int = field(default=2, metadata={"help": "Processes that share a row of tokens."})
    max_steps: int = field(default=8, metadata={"help": "Optimizer steps."})
    output_dir: str = field(default="outputs/sft_trl", metadata={"help": "Where the model is saved."})


class ContextParallelSFTTrainer(ContextParallelTrainerMixin, SFTTrainer):
    """SFTTrainer on rows that several processes share."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Splits at spaces; a real script loads that of its model."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("</s>", "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def make_model() -> LlamaForCausalLM:
    """A tiny Llama with the same random weights in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=2, **sizes))


def make_dataset() -> Dataset:
    """Count on from a number, up or down."""

    def example(start: int) -> dict[str, str]:
        step = 1 if start % 2 else -1
        numbers = [str((start + step * i) % 100) for i in range(1, 10 + 7 * start % 40)]
        direction = "up" if step > 0 else "down"
        return {"prompt": f"count {direction} from {start} :", "completion": " " + " ".join(numbers)}

    return Dataset.from_list([example(start) for start in range(64)])


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    args = SFTConfig(
        output_dir=options.output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        packing=True,  # by SFTTrainer, into rows of max_length; each is one micro-step
        max_length=256,
        per_device_train_batch_size=1,
        max_steps=options.max_steps,
        train_sampling_strategy="sequential",  # otherwise the stock trainer permutes rows in its own way
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    config = ContextParallelConfig(ring_degree=options.ring_degree)
    trainer = ContextParallelSFTTrainer(
        model=apply_context_parallel(make_model(), config),
        args=args,
        train_dataset=make_dataset(),
        processing_class=make_tokenizer(),
        data_collator=DataCollatorForContextParallel(config),
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.accelerator.print(
        f"{trainer.accelerator.distributed_type.value}, {trainer.cp_mesh}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; "
        f"model in {options.output_dir}",
        flush=True,
    )
    trainer.end()


if __name__ == "__main__":
    main()
