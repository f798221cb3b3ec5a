"""The engines with ranks as threads of one process (benchmarks/loopback.py), as the check on a GPU runs them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.loopback import attention
from hf_cp.attention.kernels import CpuFlashKernel, EagerKernel
from tests.attention.cases import LAYOUTS, RING_COMMS, Case
from tests.attention.reference import Attention, random_row, reference_attention, relative_error, rms_error


@pytest.mark.parametrize("ring_comm", RING_COMMS)
@pytest.mark.parametrize("kernel", [CpuFlashKernel(), EagerKernel()], ids=lambda kernel: kernel.name)
def test_threads_give_the_same_as_one_process(ring_comm, kernel):
    lengths = (5, 1, 7, 30, 2)
    row = random_row(sum(lengths), 4, 2, 8)
    for size, layout, window in ((2, "zigzag", None), (3, "document", 6), (4, "striped", None)):
        expected = reference_attention(*row, lengths, window=window)
        for chunks in (1, 2) if ring_comm == "allgather" else (1,):
            case = Case(lengths, ring_degree=size, layout=layout, ring_comm=ring_comm, head_chunks=chunks)
            found = attention(row, list(lengths), case.config, kernel, window=window)
            assert max(relative_error(a, e) for a, e in zip(found, expected, strict=True)) < 1e-10, case


@pytest.mark.parametrize(
    ("ring_comm", "grad_comm_dtype"),
    [*((comm, "fp32") for comm in RING_COMMS), ("exchange", "compute"), ("allgather", "compute")],
)
def test_bf16_error_does_not_grow_with_eight_ranks(ring_comm, grad_comm_dtype):
    lengths, kernel = (500, 140), CpuFlashKernel()
    row = random_row(sum(lengths), 4, 2, 8, torch.bfloat16)
    exact = reference_attention(*(x.double() for x in row), lengths)

    def errors(case: Case) -> list[float]:
        found = attention(row, list(lengths), case.config, kernel)
        return [rms_error(a.double(), e) for a, e in zip(found, exact, strict=True)]

    single = errors(Case(lengths))
    for layout in LAYOUTS:
        case = Case(lengths, ring_degree=8, layout=layout, ring_comm=ring_comm, grad_comm_dtype=grad_comm_dtype)
        ratios = [error / one for error, one in zip(errors(case), single, strict=True)]
        assert max(ratios) < 1.5, f"{case}: {dict(zip(Attention._fields, ratios, strict=True))}"
