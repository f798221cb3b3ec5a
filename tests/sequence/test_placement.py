"""What the `document` layout reaches on rows like those of fine-tuning: balance, padding, traffic."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.placement import CUT, causal_area, place_documents
from hf_cp.sequence.plan import AttentionPlan

TOKENS = 65_536


def row_of(kind: str) -> list[int]:
    """Document lengths of a full row: one document, one half-row beside many, a few long ones, or many short ones."""
    random = np.random.default_rng(0)
    if kind == "single":
        return [TOKENS]
    draw = {
        "heavy": lambda: [TOKENS // 2, *np.clip(random.lognormal(6.3, 0.9, 100), 200, 6000).astype(int)],
        "lognormal": lambda: np.clip(random.lognormal(8.9, 0.9, 40), 300, 14_000).astype(int),
        "short": lambda: random.integers(100, 600, 400),
    }[kind]()
    lengths, left = [], TOKENS
    for length in draw:
        lengths.append(min(int(length), left))
        left -= lengths[-1]
        if left == 0:
            return lengths
    return [*lengths, left]


@pytest.mark.parametrize(
    ("kind", "ring_degree", "balance", "padding", "moved"),
    [
        *(("single", size, 0.999, 0, 0.751) for size in (4, 8, 16)),
        ("short", 4, 0.99, 0.005, 0.01),
        *(("short", size, 0.99, 0.005, 0.04) for size in (8, 16)),
        ("heavy", 4, 0.99, 0.01, 0.62),
        ("heavy", 8, 0.99, 0.01, 0.70),
        *(("lognormal", size, 0.99, 0.005, 0.751) for size in (4, 8, 16)),
    ],
)
def test_balance_padding_and_traffic(kind, ring_degree, balance, padding, moved):
    layout = SequenceLayout(row_of(kind), ContextParallelConfig(ring_degree=ring_degree, layout="document"))
    plan = AttentionPlan(layout)
    areas = [plan.area(rank) for rank in range(ring_degree)]
    assert np.mean(areas) / max(areas) >= balance
    assert layout.ring_shard_length * ring_degree / TOKENS - 1 <= padding
    pairs = [(a, b) for a in range(ring_degree) for b in range(ring_degree) if a != b]
    assert sum(len(plan.kv_slots(*pair)) for pair in pairs) / ((ring_degree - 1) * TOKENS) <= moved


def test_ties_are_broken_by_rule():
    assert place_documents(np.array([5, 5, 5, 5]), 2).tolist() == [0, 1, 0, 1]
    assert place_documents(np.array([9]), 2).tolist() == [CUT]


@pytest.mark.slow
def test_a_million_tokens_over_a_thousand_ranks():
    """2,000 documents, the plan of one rank: about a second, little memory (generous limits: CI is busy)."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(5.5, 1.2, 2000)
    lengths = np.maximum((lengths * 2**20 / lengths.sum()).astype(int), 1)
    lengths[0] += 2**20 - lengths.sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    plan = AttentionPlan(SequenceLayout(lengths.tolist(), ContextParallelConfig(ring_degree=1024, layout="document")))
    assert plan.area(7) > 0
    assert time.process_time() - began < 5
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200


def test_very_many_documents_need_little_memory():
    """Two ranks' documents are compared in pairs, of which there would be 2e9 here: 16 GB for a table of them."""
    lengths = np.array([10_000] * 3 + [10] * 100_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    owners = place_documents(lengths, 2)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 500
    areas = causal_area(lengths.astype(float))
    spread = areas[owners == CUT].sum() / 2
    loads = [areas[owners == rank].sum() + spread for rank in (0, 1)]
    assert min(loads) / max(loads) > 0.98 and (owners == CUT).sum() <= 3


@pytest.mark.parametrize(
    ("lengths", "ring_degree", "num_cut"),
    [([1200] * 54 + [700], 2, 1), ([1200] * 54 + [700], 4, 3), ([300, 700, 1200] * 29, 4, 3)],
)
def test_equal_lengths_need_few_cuts(lengths, ring_degree, num_cut):
    owners = place_documents(np.array(lengths), ring_degree)
    assert (owners == CUT).sum() == num_cut
    areas = np.array(
        [
            AttentionPlan(SequenceLayout(lengths, ContextParallelConfig(ring_degree=ring_degree))).area(r)
            for r in range(ring_degree)
        ]
    )
    assert areas.mean() / areas.max() >= 0.99
