"""What a rank does in the attention tests; run by the process pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_cp.attention.usp import context_parallel_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.sequence.layout import SequenceLayout
from tests.attention.reference import Attention, random_row, reference_attention, relative_error

LAYOUTS = ("document", "zigzag", "contiguous", "striped")
RING_COMMS = ("p2p", "allgather", "exchange")


class Case(NamedTuple):
    """One row and how it is split."""

    doc_lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    ring_degree: int = 1
    ulysses_degree: int = 1
    layout: str = "zigzag"
    kernel: str = "sdpa"
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    ring_comm: str = "p2p"
    head_chunks: int = 1
    grad_comm_dtype: str = "fp32"

    @property
    def config(self) -> ContextParallelConfig:
        return ContextParallelConfig(
            ring_degree=self.ring_degree,
            ulysses_degree=self.ulysses_degree,
            layout=self.layout,
            kernel=self.kernel,
            ring_comm=self.ring_comm,
            head_chunks=self.head_chunks,
            grad_comm_dtype=self.grad_comm_dtype,
            force=True,
        )


class Meshes:
    """Meshes made once per pair of degrees, since the groups are what takes time."""

    def __init__(self):
        self._by_degrees: dict[tuple[int, int], ContextParallelMesh] = {}

    def of(self, case: Case) -> ContextParallelMesh:
        degrees = (case.ring_degree, case.ulysses_degree)
        if degrees not in self._by_degrees:
            self._by_degrees[degrees] = ContextParallelMesh(case.config)
        return self._by_degrees[degrees]


def gather_shards(local: torch.Tensor, mesh: ContextParallelMesh) -> list[torch.Tensor]:
    """Every rank's local tensor, in cp_rank order."""
    if mesh.cp_group is None:
        return [local]
    shards = [torch.empty_like(local) for _ in range(mesh.cp_size)]
    dist.all_gather(shards, local.contiguous(), group=mesh.cp_group)
    return shards


def run_attention(
    row: Sequence[torch.Tensor], layout: SequenceLayout, mesh: ContextParallelMesh, case: Case
) -> tuple[Attention, torch.Tensor]:
    """(whole-row result, this rank's local output), through `context_parallel_attention` on shards."""
    q, k, v, grad_out = (layout.shard(x, mesh.cp_rank) for x in row)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = context_parallel_attention(
        q, k, v, mesh=mesh, layout=layout, causal=case.causal, window=case.window, scale=case.scale, config=case.config
    )
    out.backward(grad_out)
    local = (out.detach(), q.grad, k.grad, v.grad)
    return Attention(*(layout.unshard(gather_shards(x, mesh)) for x in local)), out.detach()


def errors(
    cases: Sequence[Case], dtype: torch.dtype = torch.float64, measure: Callable = relative_error
) -> list[dict[str, float]]:
    """Per case the relative error of the output and each gradient against one process in fp64."""
    meshes, results = Meshes(), []
    for case in cases:
        mesh = meshes.of(case)
        layout = SequenceLayout(case.doc_lengths, case.config)
        row = random_row(layout.num_tokens, case.num_heads, case.num_kv_heads, case.head_dim, dtype)
        expected = reference_attention(
            *(x.double() for x in row), case.doc_lengths, causal=case.causal, window=case.window, scale=case.scale
        )
        actual, local_out = run_attention(row, layout, mesh, case)
        assert actual.out.dtype == actual.grad_q.dtype == dtype
        assert not local_out[layout.indices(mesh.cp_rank) < 0].any(), "padding slots are not zero"
        results.append(
            {n: measure(a.double(), e) for n, a, e in zip(Attention._fields, actual, expected, strict=True)}
        )
    return results
