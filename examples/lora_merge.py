"""LoRA under context parallelism, then the adapter on one process: load, merge, export.

    torchrun --nproc_per_node 2 examples/lora_merge.py --output_dir outputs/lora_merge

Two processes train one adapter on shared rows; the saved adapter is an ordinary PEFT adapter that knows nothing of
them. Rank 0 then does what a user does later, without hf_cp: it loads the base model and the adapter, merges them,
saves the merged model, loads that, and compares its logits with those of the adapter.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_cp import (
    ContextParallelConfig,
    ContextParallelTrainer,
    DataCollatorForContextParallel,
    apply_context_parallel,
)


def make_base() -> LlamaForCausalLM:
    """A tiny Llama with the same random weights in every process."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    )


def make_documents() -> list[dict[str, list[int]]]:
    """Counting sequences of uneven lengths, as token ids."""
    return [{"input_ids": [(7 * i + k) % 256 for k in range(20 + 13 * i)]} for i in range(12)]


def train(output: Path, config: ContextParallelConfig, steps: int) -> ContextParallelTrainer:
    """Trains an adapter on the processes together and saves it; one process writes."""
    arguments = TrainingArguments(  # also starts the process group, which apply_context_parallel needs
        output_dir=str(output / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    model = apply_context_parallel(make_base(), config)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = ContextParallelTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForContextParallel(config, max_tokens=256),
        train_dataset=make_documents(),
    )
    trainer.train()
    trainer.save_model(str(output / "adapter"))
    return trainer


@torch.no_grad()
def merge_and_check(output: Path) -> float:
    """Base model + adapter -> merged model on disk; returns the largest difference of its logits."""
    make_base().save_pretrained(output / "base")
    base = AutoModelForCausalLM.from_pretrained(output / "base")
    ids = torch.tensor([make_documents()[-1]["input_ids"]])
    untrained = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(output / "adapter"))
    expected = adapted(ids).logits
    adapted.merge_and_unload().save_pretrained(output / "merged")
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")(ids).logits
    print(f"adapter changes logits by up to {(expected - untrained).abs().max():.3f}")
    return float((merged - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/lora_merge"))
    parser.add_argument("--ring_degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    trainer = train(options.output_dir, ContextParallelConfig(ring_degree=options.ring_degree), options.steps)
    if trainer.is_world_process_zero():
        difference = merge_and_check(options.output_dir)
        print(f"merged model: {options.output_dir / 'merged'}, logits differ from the adapter's by {difference:.1e}")
        if difference > 1e-4:
            raise SystemExit("The merged model is not the adapted one.")
    trainer.accelerator.wait_for_everyone()  # else the group ends while rank 0 still works
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
