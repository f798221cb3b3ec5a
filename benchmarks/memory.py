"""Bytes of a training step of a small Llama, one process against two, with what saves memory switched on.

    python benchmarks/memory.py [--tokens 8192] [--output docs/benchmarks/memory]

Nothing is timed: tensors are counted as they are made and freed (torch's MemTracker), sends where they leave. Per row,
of the rank that has most, in MiB and without parameters and their gradients:

- kept: alive after the forward pass;
- peak: alive at the same time, in forward and backward pass;
- host: of what is kept, moved to host memory (`offload`); it is not in the first two numbers;
- sent, transfers: by one rank in the step.

The row is 8 documents, each cut over all ranks (zigzag): the bytes of one long document, an eighth of its work.
Offloading needs an accelerator for its pinned memory. Here a stand-in moves the same tensors out of torch's sight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from measure import on_processes
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cp import ContextParallelConfig, SequenceLayout, apply_context_parallel
from hf_cp.models.patch import context_parallel_state
from hf_cp.output import print_json
from hf_cp.sequence.sample import PackedSample

MIB = 2**20
DEGREES = {"one process": (1, 1), "ring 2": (2, 1), "ulysses 2": (1, 2)}
MLP_CHUNK_TOKENS = 512
NUM_DOCUMENTS = 8


class Variant(NamedTuple):
    """What is switched on."""

    checkpointing: bool = False
    keep_attention: bool = True
    offload: bool = False
    chunked_mlp: bool = False


VARIANTS = {
    "plain": Variant(),
    "chunked MLP": Variant(chunked_mlp=True),
    "checkpointing, attention again": Variant(True, keep_attention=False),
    "checkpointing": Variant(True),
    "checkpointing, chunked MLP": Variant(True, chunked_mlp=True),
    "checkpointing, offload": Variant(True, offload=True),
    "checkpointing, offload, chunked MLP": Variant(True, offload=True, chunked_mlp=True),
}


class Measured(NamedTuple):
    """Of one training step; bytes and calls of the rank with most."""

    kept: int
    peak: int
    host: int
    sent: int
    transfers: int


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Stands in for `save_on_cpu`: what is packed is no tensor any more."""

    packed_bytes = 0

    def __init__(self, pin_memory: bool, device_type: str) -> None:
        super().__init__(self.pack, torch.from_numpy)

    @staticmethod
    def pack(tensor: torch.Tensor) -> Any:
        OnHost.packed_bytes += tensor.nbytes
        return tensor.detach().numpy().copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 8")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=None, help="write OUTPUT.json")
    args = parser.parse_args()
    size = (args.tokens, args.hidden_size, args.layers)
    rows = on_processes(1, measure_all, ["one process"], *size) + on_processes(
        2, measure_all, list(DEGREES)[1:], *size
    )
    print(f"{args.tokens} tokens, {args.layers} layers of {args.hidden_size}, fp32; MiB per process")
    print(table(rows))
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        content = {"settings": settings, "mlp_chunk_tokens": MLP_CHUNK_TOKENS, "rows": rows}
        print_json(content, args.output.with_suffix(".json"))


def measure_all(degrees: list[str], num_tokens: int, hidden_size: int, num_layers: int) -> list[dict[str, Any]]:
    model_config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_tokens,
        attn_implementation="sdpa",
    )
    return [
        {"processes": name, "variant": title, **step(model_config, DEGREES[name], variant, num_tokens)._asdict()}
        for name in degrees
        for title, variant in VARIANTS.items()
    ]


def step(model_config: LlamaConfig, degrees: tuple[int, int], variant: Variant, num_tokens: int) -> Measured:
    config = ContextParallelConfig(
        *degrees,
        layout="zigzag",
        force=True,
        keep_attention=variant.keep_attention,
        mlp_chunk_tokens=MLP_CHUNK_TOKENS if variant.chunked_mlp else None,
    )
    torch.manual_seed(0)
    model = apply_context_parallel(LlamaForCausalLM(model_config), config).train()
    comm, layout = (
        context_parallel_state(model).comm,
        SequenceLayout([num_tokens // NUM_DOCUMENTS] * NUM_DOCUMENTS, config),
    )
    ids = layout.shard(torch.randint(0, model_config.vocab_size, (layout.num_tokens,)), comm.mesh.cp_rank).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids, "shift_labels": ids, "hf_cp_sample": PackedSample(layout)}
    with (
        patch("transformers.modeling_utils.save_on_cpu", OnHost),
        patch("hf_cp.models.checkpointing.save_on_cpu", OnHost),
    ):
        if variant.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False}, offload=variant.offload)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        OnHost.packed_bytes = 0
        measured = tracked(model, lambda: model(**batch).loss)
    sent = comm.ring_bytes + comm.ulysses_bytes
    return most(Measured(measured.kept, measured.peak, OnHost.packed_bytes, sent, measured.transfers))


def tracked(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> Measured:
    tracker = MemTracker()
    tracker.track_external(model)
    with counted_transfers() as names, tracker:
        loss = forward()
        kept = activations(tracker, "current")
        loss.backward()
    return Measured(kept, activations(tracker, "peak"), 0, 0, len(names))


def activations(tracker: MemTracker, kind: str) -> int:
    """Bytes of everything but parameters and their gradients."""
    snapshot = tracker.get_tracker_snapshot(kind)[torch.device("cpu")]
    return snapshot["Total"] - sum(size for name, size in snapshot.items() if name in ("Parameter", "Gradient"))


@contextmanager
def counted_transfers() -> Iterator[list[str]]:
    """Names of the attention's calls of torch.distributed, in order."""
    names: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(dist, name)
        return patch.object(dist, name, lambda *args, **kwargs: (names.append(name), function(*args, **kwargs))[1])

    with counted("batch_isend_irecv"), counted("all_to_all_single"):
        yield names


def most(measured: Measured) -> Measured:
    """The largest value over the ranks."""
    values = torch.tensor(measured)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return Measured(*values.tolist())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| | | kept | peak | host | sent | transfers |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sizes = " | ".join(f"{row[name] / MIB:.0f}" for name in ("kept", "peak", "host", "sent"))
        lines.append(f"| {row['processes']} | {row['variant']} | {sizes} | {row['transfers']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
