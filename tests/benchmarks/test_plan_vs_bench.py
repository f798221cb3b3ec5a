"""benchmarks/plan_vs_bench.py: what the planner expects of measured cases, and which pairs it is judged by."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import plan_vs_bench
import pytest
from prices import Priced, compare, estimate, price_all

from hf_cp.config import ContextParallelConfig
from hf_cp.planning.devices import Cluster, find_device
from hf_cp.tools.bench.cases import Case, Heads, Setting
from hf_cp.tools.bench.results import Spread

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "bench-cpu.json"
SETTING = Setting("packed", (40, 9, 15), Heads("gqa", 4, 2, 8), "float64", recompute=False)
RING, ULYSSES = (ContextParallelConfig(ring_degree=2), ContextParallelConfig(ulysses_degree=2))


def priced(method: ContextParallelConfig, measured: float, estimated: float, width: float = 0.0) -> Priced:
    spread = Spread(measured, measured * (1 - width / 2), measured * (1 + width / 2))
    return Priced(Case(SETTING, method), spread, estimated)


def test_only_clear_differences_are_compared_with_the_plan():
    fast, slow = priced(RING, 1.0, 3.0), priced(ULYSSES, 1.2, 2.0)
    (pair,) = compare([fast, slow])
    assert pair.faster is fast and not pair.agrees and pair.ratios == (pytest.approx(1.2), pytest.approx(2 / 3))
    assert compare([slow, fast._replace(estimated=1.0)])[0].agrees
    assert compare([fast, priced(ULYSSES, 1.05, 2.0)]) == []  # within 10 %
    assert compare([fast, priced(ULYSSES, 1.2, 2.0, width=0.5)]) == []  # noise
    elsewhere = dataclasses.replace(SETTING, documents="single")
    assert compare([fast, slow._replace(case=Case(elsewhere, ULYSSES))]) == []  # other samples do not compare
    assert "0 of 1 pairs" in str(plan_vs_bench.judge([pair]))
    agreed = compare([slow, fast._replace(estimated=1.0)])
    assert [plan_vs_bench.judge(pairs).status for pairs in ([pair], agreed, [])] == [1, 0, 1]


def test_estimates_follow_the_planner():
    setting = dataclasses.replace(SETTING, documents="single", doc_lengths=(2**17,), dtype="bfloat16")
    device = find_device("h100")
    fast, slow = (Cluster(dataclasses.replace(device, intra_gbs=gbs), 2, 2) for gbs in (1000.0, 0.1))
    alone = estimate(Case(setting, ContextParallelConfig()), fast)
    for method in (RING, ULYSSES):
        case = Case(setting, dataclasses.replace(method, ring_comm="exchange"))
        assert 0.49 * alone < estimate(case, fast) < 0.8 * alone < estimate(case, slow)
    again = estimate(Case(dataclasses.replace(setting, recompute=True), ContextParallelConfig()), fast)
    assert again == pytest.approx(alone * 4.5 / 3.5)  # 1 + 1 + 2.5 instead of 1 + 2.5


def test_a_file_of_the_command_is_priced():
    content = json.loads(MEASURED.read_text())
    prices = price_all(content, find_device("h100", measured=MEASURED))
    assert [p.case.method for p in prices] == [values["method"] for values in content["cases"]]
    assert all(
        p.estimated > 0 and p.measured.median == values["seconds"]["median"]
        for p, values in zip(prices, content["cases"], strict=True)
    )
    assert len(plan_vs_bench.order_table(prices[:4]).rows) == 4
    assert "clearly differ by more than 10%" in str(plan_vs_bench.judge(compare(prices)))
