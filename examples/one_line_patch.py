"""Context parallelism in a bare training loop: one line for the model, one collator, nothing else.

    torchrun --nproc_per_node 2 examples/one_line_patch.py

Two processes share every row (`--ring_degree 2`). Each prints the same losses, and they are those of a run with
`--ring_degree 1` on one process:

    python examples/one_line_patch.py --ring_degree 1
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cp import ContextParallelConfig, DataCollatorForContextParallel, apply_context_parallel


def make_model() -> LlamaForCausalLM:
    """A tiny Llama with the same random weights in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,  # with a cache, an untouched model does not tell packed documents apart
        )
    )


def make_documents() -> list[dict[str, list[int]]]:
    """Counting sequences of uneven lengths, as token ids."""
    return [
        {"input_ids": [(start + step * i) % 256 for i in range(n)]} for start, step, n in ((3, 1, 150), (7, 2, 61))
    ]


def average_gradients(model: torch.nn.Module) -> None:
    """What DistributedDataParallel does: the gradient of every parameter becomes the mean over all processes."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ring_degree", type=int, default=2)
    parser.add_argument("--ulysses_degree", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    distributed = "RANK" in os.environ  # set by torchrun
    if distributed:
        dist.init_process_group("gloo")

    config = ContextParallelConfig(ring_degree=options.ring_degree, ulysses_degree=options.ulysses_degree)
    model = apply_context_parallel(make_model(), config)  # the one line
    collator = DataCollatorForContextParallel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for step in range(1, options.steps + 1):
        batch = collator(make_documents())  # this process's share of the row
        loss = model(**batch).loss  # the mean over the whole row, the same in every process
        loss.backward()
        if distributed:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if not distributed or dist.get_rank() == 0:
            tokens = batch["input_ids"].shape[1]
            print(f"step {step}: loss {loss.item():.6f}   ({tokens} of 211 tokens in this process)", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
