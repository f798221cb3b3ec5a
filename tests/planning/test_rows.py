"""What rows cost on average, and how long data-parallel ranks wait, against all rows and against the loader's deal."""

from __future__ import annotations

import numpy as np
import pytest

from hf_cp import ContextParallelConfig
from hf_cp.data.order import RowOrder
from hf_cp.planning.devices import DEVICES
from hf_cp.planning.memory import Training
from hf_cp.planning.rows import SAMPLED_ROWS, Rows
from hf_cp.planning.step_time import Cluster, RowCost, StepTime
from tests.planning.shapes import LLAMA_SHAPE

MAX_TOKENS = 32_768
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.2, 1200).clip(16, MAX_TOKENS).astype(int).tolist()
ROWS = Rows.packed(LENGTHS, MAX_TOKENS)


def priced(rows) -> list[StepTime]:
    config, cluster = ContextParallelConfig(ring_degree=2), Cluster(DEVICES["h100"], 16, 8)
    return [RowCost(row, config, LLAMA_SHAPE, Training(), cluster).step() for row in rows]


@pytest.fixture(scope="module")
def all_steps() -> list[StepTime]:
    return priced(ROWS.doc_lengths)


def test_every_document_is_in_the_rows():
    assert sorted(n for row in ROWS.doc_lengths for n in row) == sorted(LENGTHS)
    assert ROWS.mean_tokens == pytest.approx(sum(LENGTHS) / len(ROWS.doc_lengths))
    assert len(ROWS.sampled) <= SAMPLED_ROWS + 1 < len(ROWS.doc_lengths)
    assert max(map(sum, ROWS.largest)) == max(map(sum, ROWS.doc_lengths))


def test_a_few_rows_tell_the_mean_of_all(all_steps):
    mean = ROWS.micro_step(priced(ROWS.sampled), dp_size=1)
    assert mean.waiting == 0
    for name in ("compute", "seconds", "error"):
        expected = np.mean([getattr(step, name) for step in all_steps])
        assert getattr(mean, name) == pytest.approx(expected, rel=0.02), name


def test_an_almost_empty_last_row_counts_once():
    """10 full rows and one of a single token: the mean is 10/11 of a full row's tokens, a step's time within 10 %."""
    rows = Rows.packed([4096] * 80 + [1], MAX_TOKENS)
    assert len(rows.doc_lengths) == 11 and rows.mean_tokens == pytest.approx((10 * MAX_TOKENS + 1) / 11)
    mean = rows.micro_step(priced(rows.sampled), dp_size=1)
    assert mean.seconds == pytest.approx(priced([rows.doc_lengths[-1]])[0].seconds, rel=0.1)


@pytest.mark.parametrize("dp_size", [2, 8])
def test_ranks_wait_for_the_costliest_row_that_the_loader_deals(dp_size, all_steps):
    costs = [sum(n * (n + 1) // 2 for n in row) for row in ROWS.doc_lengths]
    order = RowOrder(costs, dp_size=dp_size, rows_per_step=dp_size, shuffle=True, seed=0, drop_last=True)
    seconds = np.array([step.seconds for step in all_steps])
    dealt = [seconds[np.reshape(order.rows(epoch), (-1, dp_size))].max(1).mean() for epoch in range(200)]
    step = ROWS.micro_step(priced(ROWS.sampled), dp_size=dp_size)
    assert step.seconds == pytest.approx(np.mean(dealt), rel=0.03)
    assert step.waiting > 0.02 * step.seconds


def test_one_row_waits_for_nobody():
    rows = Rows(((MAX_TOKENS,),))
    assert rows.sampled == [(MAX_TOKENS,)]
    assert rows.micro_step(priced(rows.sampled), dp_size=8).waiting == 0
