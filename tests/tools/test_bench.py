"""`hf-cp bench`: the matrix, what is timed and counted, what the planner takes from it, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_cp.attention.usp import usp_attention
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.planning.devices import find_device
from hf_cp.sequence.costs import AttentionShape, ring_bytes, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.sequence.sample import PackedSample
from hf_cp.tools.bench import measure as bench_measure
from hf_cp.tools.bench import results as bench_results
from hf_cp.tools.bench.cases import Case, Heads, Setting, heads_of, make_cases, methods, packed_sample
from hf_cp.tools.bench.fits import Point, fit
from hf_cp.tools.bench.local_copies import local_copies
from hf_cp.tools.bench.measure import Communicators, measure
from hf_cp.tools.cli import main
from tests.attention.reference import random_row

HEADS = Heads("gqa", 4, 2, 8)
SETTING = Setting("packed", (40, 9, 15), HEADS, "float64", recompute=False)
SLEEP = 0.05


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def call(*options: object) -> Ended:
    """`hf-cp bench options` in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["bench", *map(str, options)])
    return Ended(status, out.getvalue(), err.getvalue())


def config(**values: object) -> ContextParallelConfig:
    return ContextParallelConfig(**{"force": True} | values)


# --- the matrix ---


def test_the_matrix_has_every_method_once():
    engines, layouts = ("p2p", "exchange"), ("document", "zigzag")
    configs = list(methods(ContextParallelConfig(), [(4, 1), (2, 2), (1, 4), (1, 1)], engines, layouts))
    found = [Case(SETTING, config).method for config in configs]
    assert found[:4] == [f"ring 4, {engine}, {layout}" for engine in engines for layout in layouts]
    assert found[4].startswith("ulysses 2, ring 2, p2p") and found[8:] == ["ulysses 4", "one process"]
    rounding = ContextParallelConfig(grad_comm_dtype="compute")  # not with p2p, whose sums would be rounded
    assert {c.ring_comm for c in methods(rounding, [(2, 1)], engines, layouts)} == {"exchange"}


def test_what_the_heads_do_not_allow_is_named():
    settings = [
        dataclasses.replace(SETTING, heads=heads) for heads in heads_of(("mha", "mqa"), num_heads=2, head_dim=8)
    ]
    assert [setting.heads.num_kv_heads for setting in settings] == [2, 1]
    cases, skipped = make_cases(settings, [config(ulysses_degree=4), config(ring_degree=4)])
    assert len(cases) == 2 and len(skipped) == 2 and "does not divide the 2 query heads" in skipped[0]
    with pytest.raises(ValueError, match="no case is left"):
        make_cases(settings, [config(ulysses_degree=4)])


def test_samples_are_full_and_settings_survive_json():
    assert packed_sample(100, [30, 20]) == (30, 20, 30, 20)
    assert packed_sample(90, [30, 20]) == (30, 20, 30, 10)
    drawn = packed_sample(4096)
    assert sum(drawn) == 4096 and len(drawn) > 3 and drawn == packed_sample(4096)
    short = Setting("packed", drawn, HEADS, "float32", recompute=True).shortened(256)
    assert len(short.doc_lengths) == len(drawn) and 200 < short.num_tokens <= 256 + len(drawn)
    case = Case(SETTING, config(ring_degree=2, ring_comm="exchange"))
    assert Case.from_json(json.loads(json.dumps(case.as_json(), default=vars))) == case


# --- links, and the planner ---


def test_a_link_is_found_in_noisy_times():
    sizes = (2**12, 2**16, 2**20, 2**24)
    points = [
        Point(m, n, (m * 2e-5 + n / 5e9) * noise)
        for m in (1, 3)
        for n, noise in zip(sizes, (1, 1.02, 0.98, 1), strict=True)
    ]
    latency, rate, residual = fit(points)
    assert (
        latency == pytest.approx(2e-5, rel=0.05) and rate == pytest.approx(5e9, rel=0.05) and 0.005 < residual < 0.05
    )
    latency, rate, _ = fit([Point(1, 1000, 1e-6), Point(1, 10**6, 1.2e-3)])  # a straight line would start below zero
    assert latency == 0.0 and 8e8 < rate < 1e9


# --- what is measured ---


class Sent(NamedTuple):
    noted: int
    counted: int
    calls: int
    replayed: int
    calls_of_replay: int
    has_error_inside: bool
    error_after: float


def all_replaced_transfers(cases: list[Case]) -> list[Sent]:
    return [replaced_transfers(case) for case in cases]


def replaced_transfers(case: Case) -> Sent:
    """One pass with local copies, the replay, and a pass afterwards."""
    mesh = ContextParallelMesh(case.config)
    comm, sample = Communicator(mesh), PackedSample(SequenceLayout(case.setting.doc_lengths, case.config))
    *qkv, grad_out = (sample.layout.shard(x, mesh.cp_rank) for x in random_row(case.setting.num_tokens, 4, 2, 8))
    leaves = [x.requires_grad_() for x in qkv]

    def attend() -> torch.Tensor:
        out = usp_attention(*leaves, sample=sample, comm=comm, config=case.config)
        out.backward(grad_out)
        return out.detach()

    expected = attend()
    comm.reset_bytes()
    send, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
    calls = []

    def counted_send(ops):
        calls.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        return send(ops)

    def counted_all_to_all(received, sent, received_lengths=None, sent_lengths=None, **kwargs):
        lengths = sent_lengths or [1] * 2
        calls.append(sent.nbytes * lengths[1 - mesh.rank] // sum(lengths))
        return all_to_all(received, sent, received_lengths, sent_lengths, **kwargs)

    with (
        patch.object(dist, "batch_isend_irecv", counted_send),
        patch.object(dist, "all_to_all_single", counted_all_to_all),
    ):
        with local_copies() as copies:
            inside = attend()
        inside_calls = len(calls)
        copies.replay(comm, copies.buffers("cpu"))
    counted = comm.ring_bytes + comm.ulysses_bytes
    with contextlib.suppress(KeyError), local_copies():
        raise KeyError
    after = float((attend() - expected).abs().max())
    differs = not torch.equal(inside, expected)
    return Sent(copies.sent_bytes, counted, inside_calls, sum(calls), len(calls), differs, after)


def expected_bytes(case: Case, rank: int) -> int:
    """By the formulas of sequence.costs, forward and backward."""
    shape, layout = AttentionShape(4, 2, 8, 8, 8), SequenceLayout(case.setting.doc_lengths, case.config)
    if case.config.ring_degree == 1:
        return 2 * ulysses_bytes(shape, local_length=layout.local_length, ulysses_degree=2)
    return sum(ring_bytes(shape, AttentionPlan(layout), rank, case.config.ring_comm))


def measured_with_faults(cases: list[Case]) -> dict[str, list]:
    """Bytes of each method; exposed communication over a slow network; the slowest rank; a wrong result."""
    comms = Communicators("cpu")
    plain = measure(cases, comms, rounds=2, warm_up=0)
    all_to_all, attend = dist.all_to_all_single, bench_measure._attend

    def slow_network(received, sent, *lengths, **kwargs):
        time.sleep(0 if lengths else SLEEP)  # the replay gives lengths
        return all_to_all(received, sent, *lengths, **kwargs)

    def slow_rank(*args):
        time.sleep(SLEEP * dist.get_rank())
        return attend(*args)

    def wrong(*args):
        out, *grads = attend(*args)
        return out * (1.001 if dist.get_rank() == 1 else 1.0), *grads

    with patch.object(dist, "all_to_all_single", slow_network):
        waiting = measure(cases[-1:], comms, rounds=2, warm_up=0)
        again = Case(dataclasses.replace(SETTING, recompute=True), cases[-1].config)
        waiting += measure([again], comms, rounds=2, warm_up=0)
    with patch.object(bench_measure, "_attend", slow_rank):
        uneven = measure(cases[:1], comms, rounds=2, warm_up=0)
    with patch.object(bench_measure, "_attend", wrong):
        inexact = measure(cases[:1], comms, rounds=1, warm_up=0)
    return {"plain": plain, "waiting": waiting, "uneven": uneven, "inexact": inexact}


ENGINES = ("p2p", "allgather", "exchange")
CASES = [
    *(Case(SETTING, config(ring_degree=2, ring_comm=engine, layout="zigzag")) for engine in ENGINES),
    Case(SETTING, config(ulysses_degree=2)),
]


@pytest.mark.distributed
def test_local_copies_send_nothing_and_the_replay_everything(world2):
    for rank, of_cases in enumerate(world2.run(all_replaced_transfers, CASES)):
        for case, sent in zip(CASES, of_cases, strict=True):
            assert sent.calls == 0 and sent.calls_of_replay > 1 and sent.has_error_inside, case.method
            assert sent.noted == sent.counted == sent.replayed == expected_bytes(case, rank), case.method
            assert sent.error_after == 0.0  # the transfers are back, also after an error


@pytest.mark.distributed
def test_bytes_exposed_time_slow_ranks_and_wrong_values_are_found(world2):
    found, other = world2.run(measured_with_faults, CASES)
    for case, result in zip(CASES, found["plain"], strict=True):
        assert result.sent_bytes == max(expected_bytes(case, rank) for rank in range(2))
        assert result.error < 1e-14 and result.is_exact and len(result.rounds) == 2
        assert result.peak_bytes > 64 // 2 * (3 * 4 + 2 * 2) * 8 * 8  # the output, the gradients of q, k, v and of out
        assert result.gigabytes_per_second > 0 and 0 <= result.overlap <= 1
    waiting, again = found["waiting"]
    assert waiting.exposed.median > 3.5 * SLEEP and waiting.overlap == 0.0  # four all-to-alls
    difference = waiting.seconds.median - waiting.without.median  # of two rounds a median is a mean
    assert waiting.exposed.median == pytest.approx(difference)
    once_more = 64 // 2 * (4 + 2 * 2) * 8 * 8 // 2  # q, k, v of 32 tokens; torch stops before the output would leave
    assert again.sent_bytes == waiting.sent_bytes + once_more
    assert found["uneven"][0].slowest_rank == 1 and found["uneven"][0].imbalance > 1.2
    assert not found["inexact"][0].is_exact and 1e-4 < found["inexact"][0].error < 1e-3
    assert other["inexact"][0].error == found["inexact"][0].error  # all ranks reach the same verdict


# --- the command ---


def two_nodes(*options: object) -> Ended:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return call(*options)


def uneven_nodes(*options: object) -> Ended:
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    return call(*options)


def lose_the_file_on_rank_1(path: Path) -> Ended:
    return call("--quick", "--lengths", path if dist.get_rank() == 0 else path.with_name("missing"))


def broken_values(*options: object) -> Ended:
    limits = dict.fromkeys(bench_results.ERROR_LIMITS, 0.0)
    with patch.object(bench_results, "ERROR_LIMITS", limits):
        return call(*options)


@pytest.mark.distributed
def test_two_processes_write_what_the_planner_reads(world2, tmp_path):
    output, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    ended, other = world2.run(call, "--quick", "--output", output, "--plot", plot, timeout=100)
    assert (ended.status, other.status, other.out) == (0, 0, "") and ended.err.count("4 methods") == 2
    assert "256 tokens, one document, gqa 8:2 heads of 64, float32; forward + backward" in ended.out
    assert ended.out.count("ring 2, exchange, document") == 2 and ended.out.count("PASSED: 8 cases measured") == 1
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    content = json.loads(output.read_text())
    assert content["world"]["processes"] == content["world"]["processes_per_node"] == 2
    device = find_device("h100", measured=output)
    assert device.is_measured and device.name == "CPU" and device.memory_gib == find_device("h100").memory_gib
    assert 0 < device.attention_tflops < 5 and 0 < device.matmul_tflops < 5 and 0 < device.intra_gbs < 100
    assert 0 <= device.intra_overlap <= 1 and "intra_overlap" in content["device"]
    assert 0 < device.intra_trade_gbs < 100 and device.intra_trade_latency >= 0
    assert {"inter_gbs", "inter_overlap", "peak_tflops"} & set(
        content["device"]
    ) == set()  # nothing that was not measured
    assert [Case.from_json(values).method for values in content["cases"]] == [v["method"] for v in content["cases"]]


@pytest.mark.distributed
def test_nodes_errors_and_refusals_on_two_processes(world2, tmp_path):
    small = ("--quick", "--degrees", "1x2", "--rows", "single", "--seq-lens", "64")
    first, _ = world2.run(two_nodes, *small, "--json", "-")
    content = json.loads(first.out)
    assert first.status == 0 and content["world"]["processes_per_node"] == 1
    assert "inter_gbs" in content["device"] and "intra_gbs" not in content["device"]
    assert [link["in_node"] for link in content["calibration"]["links"]] == [False, False]

    wrong = world2.run(broken_values, *small)
    assert [ended.status for ended in wrong] == [1, 1]
    assert "FAILED: 1 of 1 cases are not exact" in wrong[0].out and "NOT EXACT" in wrong[0].out

    lengths = tmp_path / "lengths"
    lengths.write_text("30 20")
    for answers, text in (
        (world2.run(uneven_nodes, *small), "LOCAL_WORLD_SIZE is 1 and 2 for 2 processes"),
        (world2.run(call, "--quick", "--degrees", "3x1"), "needs a multiple of 3 processes, not 2"),
        (world2.run(lose_the_file_on_rank_1, lengths), "rank 1: FileNotFoundError"),
    ):
        assert [ended.status for ended in answers] == [2, 2] and text in answers[0].err, answers[0].err


def test_one_process_measures_rates_and_no_links():
    ended = call("--quick", "--seq-lens", "64", "--rows", "single", "--dtypes", "bfloat16", "--json", "-")
    content = json.loads(ended.out)
    assert ended.status == 0 and [case["method"] for case in content["cases"]] == ["one process"]
    (case,) = content["cases"]
    assert case["sent_bytes"] == 0 and case["overlap"] is None and 1e-4 < case["error"] < 3e-2
    assert content["calibration"]["links"] == [] and "intra_gbs" not in content["device"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--kernel", "flash_attn"), "kernel='flash_attn'"),
        (("--output", "/nowhere/bench.json"), "its folder does not exist"),
        (("--num-heads", "6"), "Set --num-heads to a multiple of 4"),
        (("--attention", "mha", "--head-chunks", "3"), "head_chunks=3 does not divide"),
    ],
)
def test_settings_that_do_not_fit(options, text):
    ended = call("--quick", "--seq-lens", "64", *options)
    assert ended.status == 2 and ended.out == "" and text in ended.err


@pytest.mark.parametrize("option", [("--degrees", "2"), ("--engines", "auto"), ("--seq-lens", "0"), ("--rows", "x")])
def test_options_that_cannot_be_read(option):
    with pytest.raises(SystemExit) as ended:
        call(*option)
    assert ended.value.code == 2
