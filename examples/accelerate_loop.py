"""Context parallelism in a custom loop with Accelerate: the plugin, a packed loader, exact accumulation windows.

On two CPU processes, with plain data parallelism around them or with DeepSpeed ZeRO-2:

    torchrun --nproc_per_node 2 examples/accelerate_loop.py
    accelerate launch --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
        --use_deepspeed --zero_stage 2 examples/accelerate_loop.py

Both print the losses of one process, which needs no launcher:

    python examples/accelerate_loop.py --ring_degree 1
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cp import ContextParallelConfig, ContextParallelPlugin, apply_context_parallel


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


def make_documents(count: int = 24) -> list[dict[str, list[int]]]:
    """Counting sequences of uneven lengths, as token ids."""
    return [{"input_ids": [(7 * n + i) % 64 for i in range(20 + 37 * n % 101)]} for n in range(1, count + 1)]


def train(options: argparse.Namespace) -> None:
    plugin = ContextParallelPlugin(ContextParallelConfig(ring_degree=options.ring_degree))
    accelerator = plugin.accelerator(gradient_accumulation_steps=options.accumulation)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    # documents are packed into rows of at most 256 tokens; every process gets its part of a row, ready to use
    loader = plugin.data_loader(make_documents(), max_tokens=256, seed=0)
    kind = accelerator.distributed_type.value
    accelerator.print(f"{kind}, {plugin.mesh}: {len(loader.packed)} rows, {plugin.samples_per_step} a step")
    plugin.seed_dropout(0)  # with dropout, the processes of a row must not drop the same units
    step = 0
    for epoch in range(options.epochs):
        loader.set_epoch(epoch)
        for batches, num_items in plugin.accumulation_windows(loader):  # one window: one optimizer step
            window_loss = torch.zeros((), device=accelerator.device)
            for batch in batches:
                loss = plugin.loss(model, batch, num_items=num_items)
                accelerator.backward(loss)
                window_loss += loss.detach() / accelerator.gradient_accumulation_steps
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            # each process holds a part of the sum: their mean is the mean loss over all targets of the window
            mean_loss = accelerator.reduce(window_loss, reduction="mean")
            accelerator.print(f"step {step}: loss {mean_loss.item():.5f} over {num_items} targets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ring_degree", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    try:
        train(parser.parse_args())
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
