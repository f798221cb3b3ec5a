"""What a run says about itself, against what it must be: tokens and padding from the manifest, bytes from the cost
formulas, work from the attention plan, and who is slow from who was made slow."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.data.manifest import PackingManifest
from hf_cp.distributed.clock import Clock
from hf_cp.distributed.communicator import CommunicationError, Communicator, named_range
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.planning.flops import training_flops
from hf_cp.planning.model_shape import ModelShape
from hf_cp.sequence.costs import AttentionShape, choose_engine, ring_bytes, ulysses_bytes
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.tools.cli import main
from hf_cp.training.telemetry.callback import ContextParallelCallback
from hf_cp.training.telemetry.meter import StepMeter
from hf_cp.training.telemetry.records import RecordWriter, RunInfo, RunRecords, StepRecord, read_run
from tests.training.telemetry_cases import LENGTHS, SLEEP, Observed, observe, observe_pairs, observe_two_pairs
from tests.training.tiny import REF, STOCK, make_documents, make_model, make_trainer

pytestmark = pytest.mark.distributed

LAYERS = 2
SHAPE = AttentionShape(4, 2, 8, itemsize=8, grad_itemsize=8)  # of the tiny model in fp64


@pytest.fixture(scope="module")
def pairs(world2, tmp_path_factory) -> tuple[Path, list[list[Observed]]]:
    folder = tmp_path_factory.mktemp("pairs")
    return folder, world2.run(observe_pairs, str(folder))


@pytest.fixture(scope="module")
def two_pairs(world4, tmp_path_factory) -> tuple[Path, list[Observed]]:
    folder = tmp_path_factory.mktemp("two_pairs")
    return folder, world4.run(observe_two_pairs, str(folder))


def plans_of(manifest: PackingManifest, rows: list[int], config: ContextParallelConfig) -> list[AttentionPlan]:
    lengths = [[manifest.lengths[document] for document in manifest.samples[row]] for row in rows]
    return [AttentionPlan(SequenceLayout(row, config)) for row in lengths]


def test_ring_run_against_manifest_plan_and_formulas(pairs):
    """5 rows in windows of 2, 2 and 1; the evaluation after every step adds nothing."""
    folder, results = pairs
    config, run = ContextParallelConfig(ring_degree=2, ring_comm="p2p"), results[0][0]
    recorded = read_run(folder / "ring").ranks
    assert len(run.logs) == 3
    for step, log in enumerate(run.logs):
        plans = plans_of(run.manifest, run.order[2 * step : 2 * step + 2], config)
        tokens = sum(plan.layout.num_tokens for plan in plans)
        slots = sum(plan.layout.local_length * 2 for plan in plans)
        areas = [LAYERS * sum(plan.area(rank) for plan in plans) for rank in range(2)]
        sent = [LAYERS * sum(sum(ring_bytes(SHAPE, plan, rank, "p2p")) for plan in plans) for rank in range(2)]
        assert log["cp/tokens"] == tokens
        assert log["cp/padding"] == pytest.approx(1 - tokens / slots, abs=1e-6)
        assert log["cp/work_max_over_mean"] == pytest.approx(max(areas) / (sum(areas) / 2), abs=1e-4)
        assert log["cp/ring_bytes"] == sum(sent) / 2 > 0
        assert "cp/ulysses_bytes" not in log and "cp/mfu" not in log
        assert [ranks[step].ring_bytes for ranks in recorded] == sent
        assert [ranks[step].area for ranks in recorded] == areas
        assert log["cp/tokens_per_second"] == pytest.approx(tokens / max(r[step].seconds for r in recorded), rel=1e-2)
    assert all(result[0].clock_is_off for result in results)


def test_targets_are_those_of_the_documents(pairs):
    """The sum over a whole epoch; a document's first token is never a target."""
    run = pairs[1][0][0]
    expected = sum(label != -100 for document in make_documents(LENGTHS) for label in document["labels"][1:])
    assert sum(log["cp/targets"] for log in run.logs) == expected > 0


def test_ulysses_run_with_recomputed_layers(pairs):
    """Rows 0, 1 and 2, one a step; the log at step 2 is the mean of two. A recomputed layer trades three times."""
    folder, results = pairs
    run, (log,) = results[0][1], results[0][1].logs
    plans = plans_of(run.manifest, run.order[:3], ContextParallelConfig(ulysses_degree=2))
    sent = [3 * LAYERS * ulysses_bytes(SHAPE, local_length=p.layout.local_length, ulysses_degree=2) for p in plans]
    assert log["cp/ulysses_bytes"] == sum(sent[:2]) / 2
    assert log["cp/tokens"] == sum(plan.layout.num_tokens for plan in plans[:2]) / 2
    assert log["cp/work_max_over_mean"] == 1 and "cp/ring_bytes" not in log
    assert 0 < log["cp/exposed"] <= 1 and 0 < log["cp/flight_seconds"]
    assert log["cp/peak_memory_gib_max"] >= log["cp/peak_memory_gib_min"] > 0.01
    records = read_run(folder / "ulysses").ranks[0]
    assert [record.step for record in records] == [1, 2, 3]  # what comes after the last log is written as well
    assert [record.ulysses_bytes for record in records] == sent
    seconds = sum(max(r[step].seconds for r in read_run(folder / "ulysses").ranks) for step in range(2))
    shape = ModelShape.from_config(make_model().config)
    flops = sum(
        training_flops(shape, tokens=p.layout.num_tokens, area=LAYERS * p.area(0)) for p in plans[:2]
    )  # of all heads
    assert log["cp/mfu"] == pytest.approx(flops / (2 * 1e9 * seconds), rel=0.05)


def test_records_add_up(pairs, two_pairs):
    """The parts of a step are no more than the step, and waiting is no more than what is in flight."""
    for folder in (pairs[0] / "ring", pairs[0] / "ulysses", two_pairs[0]):
        for record in (record for steps in read_run(folder).ranks for record in steps):
            assert record.busy_seconds > 0 and record.wait_seconds > 0
            assert record.busy_seconds + record.wait_seconds <= record.seconds * (1 + 1e-6) + 1e-4
            assert record.ring_wait_seconds <= record.ring_flight_seconds
            assert record.ulysses_wait_seconds <= record.ulysses_flight_seconds


def test_a_planted_sleep_is_found(two_pairs):
    """Rank 3 sleeps. Rank 2, in its ring, waits for it in attention; ranks 0 and 1 in the reduction of gradients."""
    folder, results = two_pairs
    ranks = read_run(folder).ranks
    for result in results:
        (log,) = result.logs
        assert log["cp/slowest_rank"] == 3 and log["cp/slowest_over_mean"] > 1.5
    waited = [sum(record.ring_wait_seconds for record in steps) for steps in ranks]
    busy = [sum(record.busy_seconds for record in steps) for steps in ranks]
    assert busy[3] > 3 * SLEEP and waited[2] > 0.7 * 3 * SLEEP
    assert max(busy[:3]) < busy[3] - 0.5 * 3 * SLEEP


def test_a_row_that_stands_in_has_no_tokens(two_pairs):
    """5 rows for 2 x 3 micro-steps: the sixth is a stand-in, its slots are padding."""
    folder, results = two_pairs
    (log,), config = results[0].logs, ContextParallelConfig(ring_degree=2)
    plans = plans_of(results[0].manifest, [row for row in results[0].order if row >= 0], config)
    assert len(plans) == 5
    tokens = sum(plan.layout.num_tokens for plan in plans)
    assert log["cp/tokens"] * 3 == pytest.approx(tokens, abs=0.01) and tokens == sum(LENGTHS)
    assert log["cp/padding"] == pytest.approx(1 - tokens / (sum(2 * p.layout.local_length for p in plans) + 2))


def test_one_line_at_the_start(pairs, two_pairs):
    ring, ulysses = pairs[1][0]
    assert ring.messages == [
        "hf_cp: dp 1 x ring 2 x ulysses 1 | layout document | engine p2p | kernel sdpa | samples of up to 32 tokens "
        "(16 a rank) | 2 samples (up to 64 tokens) per optimizer step"
    ]
    assert len(ulysses.messages) == 1 and "engine none" in ulysses.messages[0]
    first = plans_of(two_pairs[1][0].manifest, [0], ContextParallelConfig(ring_degree=2))[0]
    engine = choose_engine(ContextParallelConfig(ring_degree=2), first)
    assert f"dp 2 x ring 2 x ulysses 1 | layout document | engine {engine} |" in two_pairs[1][0].messages[0]
    others = [*pairs[1][1], *two_pairs[1][1:]]
    assert all(run.messages == [] for run in others)


def test_traces_name_steps_and_transfers(pairs):
    folder = pairs[0]
    for rank in range(2):
        events = json.loads((folder / "ring" / f"trace_step2_rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if event.get("name", "").startswith("hf_cp/")}
        expected = {f"hf_cp/ring/{name}" for name in ("step0", "step1", "grad_step0", "grad_step1")}
        assert expected | {"hf_cp/ring/hop/start", "hf_cp/ring/hop/wait"} <= names
    assert len(list(folder.rglob("trace*"))) == 2


def test_a_range_costs_nothing_without_a_profiler():
    assert named_range("a") is named_range("b")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, named_range("hf_cp/a"):
        pass
    assert [event.key for event in profile.key_averages()] == ["hf_cp/a"]


def test_report_of_the_sleepy_run(two_pairs, tmp_path, capsys):
    folder = two_pairs[0]
    status = main(["report", str(folder), "--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "a.png")])
    report, out = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().out
    assert status == 1 and report["slow_ranks"] == [3]
    assert "FAILED: rank 3 needs" in out and "not its share of the samples" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# One process


def test_whole_rows_of_one_process():
    """Nothing is split, so nothing is said about ranks; work and tokens are counted all the same."""
    for config in (STOCK, REF):
        run = observe(config, {"peak_tflops": 1e-3})
        plans = plans_of(run.manifest, run.order[:3], ContextParallelConfig())
        assert [log["cp/tokens"] for log in run.logs] == [plan.layout.num_tokens for plan in plans]
        assert all(log["cp/padding"] == 0 and log["cp/mfu"] > 0 for log in run.logs)
        names = {name for log in run.logs for name in log if name.startswith("cp/")}
        assert names == {
            "cp/tokens_per_second", "cp/tokens", "cp/targets", "cp/padding", "cp/mfu", "cp/peak_memory_gib_max",
            "cp/peak_memory_gib_min",
        }  # fmt: skip


def test_switched_off_nothing_is_measured():
    trainer = make_trainer(make_model(), REF, make_documents(LENGTHS))
    assert trainer._watch.find_callback() is not None  # by default
    trainer.remove_callback(ContextParallelCallback)
    with patch.object(Clock, "__init__", side_effect=AssertionError):
        trainer.train()
    assert not any(name.startswith("cp/") for log in trainer.state.log_history for name in log)


def test_arguments_and_trainers_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"profile_steps has \[0\]"):
        ContextParallelCallback(record_dir=tmp_path, profile_steps=[0])
    with pytest.raises(ValueError, match="Set record_dir"):
        ContextParallelCallback(profile_steps=[1])
    with pytest.raises(ValueError, match="peak_tflops=-1"):
        ContextParallelCallback(peak_tflops=-1)
    trainer = make_trainer(make_model(), STOCK, make_documents([8]), max_tokens=None)
    with pytest.raises(ValueError, match="another collator"):
        ContextParallelCallback().on_train_begin(trainer.args, trainer.state, trainer.control)


# Clock


class Event:
    """Stands in for torch.cuda.Event: a stream that is at `now` milliseconds."""

    now = 0.0
    delay = 0.0  # by which the device is behind

    def __init__(self, *, enable_timing: bool):
        assert enable_timing
        self.has_come = False

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.has_come = True

    def query(self) -> bool:
        return Event.now >= self.at + Event.delay

    def elapsed_time(self, end: Event) -> float:
        assert end.has_come
        return end.at - self.at


@pytest.fixture
def mesh() -> Iterator[ContextParallelMesh]:
    yield ContextParallelMesh(ContextParallelConfig())


def test_waits_on_a_stream_are_timed_by_events(mesh):
    with patch.object(torch.cuda, "Event", Event):
        comm = Communicator(mesh)
        clock = comm.clock = Clock("cuda")
        started = comm.mark()
        Event.now += 30
        with comm.waiting("ring", "a hop", since=started):
            Event.now += 20
        with comm.waiting("world", "a sum"):  # on the host
            Event.now += 1000
        on_stream, on_host = clock.waits
    assert (on_stream.axis, on_stream.waited, on_stream.in_flight) == ("ring", 0.02, 0.05)
    assert on_host.axis == "world" and on_host.waited < 1


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_marks_are_freed_when_the_device_has_passed_them(device_type):
    """Whether or not a record is asked for; with a device that is one step behind, those of two steps are held."""
    comm = Communicator(SimpleNamespace(device_type=device_type, ring_rank=0, ulysses_size=1))
    meter, clocks = StepMeter(comm, {None: 1}), []
    batch = {"input_ids": torch.ones(1, 4), "shift_labels": torch.tensor([[1, 2, 3, -100]])}
    batch["cu_seq_lens_q"] = torch.tensor([0, 4])
    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(Event, "delay", 5.0),
        patch("hf_cp.training.telemetry.meter.peak_memory_bytes", return_value=0),
    ):
        for step in range(1, 7):
            meter.start()
            clocks.append(weakref.ref(comm.clock))
            meter.fetched()
            meter.start_micro_step(batch, num_tokens=4)
            Event.now += 10
            meter.end_micro_step()
            meter.stop(step)
            assert sum(clock() is not None for clock in clocks) <= (1 if device_type == "cpu" else 2)
        records = meter.take_records()
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record.targets == 3 and record.tokens == 4 for record in records)
    if device_type == "cuda":
        assert [record.seconds for record in records] == [0.01] * 6
    assert meter.take_records() == []


def test_without_a_clock_a_wait_is_only_watched(mesh):
    comm = Communicator(mesh)
    with comm.waiting("ring", "a hop"):
        pass
    assert comm.mark() is None and comm.clock is None
    comm.clock = Clock("cpu")
    with pytest.raises(CommunicationError, match="a hop"), comm.waiting("cp", "a hop"):
        raise RuntimeError("closed")
    assert comm.clock.waits == []


def test_records_of_a_run_that_goes_on(tmp_path):
    """The later line of a step counts, a line that is being written does not."""

    def record(step: int, seconds: float) -> StepRecord:
        zeros = dict.fromkeys(StepRecord.__dataclass_fields__, 0)
        return StepRecord(**zeros | {"step": step, "seconds": seconds})

    info = RunInfo(1, 1, 1, "none", "none", "sdpa", None, 1, 1, "cpu")
    writer = RecordWriter(tmp_path, rank=0, appends=False)
    with pytest.raises(ValueError, match=r"has no run\.json"):
        read_run(tmp_path)
    writer.write_info(info)
    with pytest.raises(ValueError, match="none in common"):
        read_run(tmp_path)
    writer.write([record(1, 1.0), record(2, 1.0)])
    RecordWriter(tmp_path, rank=0, appends=True).write([record(2, 5.0), record(3, 5.0)])
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"step": 4')
    assert read_run(tmp_path) == RunRecords(info, ((record(1, 1.0), record(2, 5.0), record(3, 5.0)),))
    RecordWriter(tmp_path, rank=0, appends=False).write([record(7, 1.0)])
    assert [r.step for r in read_run(tmp_path).ranks[0]] == [7]
    (tmp_path / "rank0.jsonl").write_text("no record\n")
    with pytest.raises(ValueError, match="line 1, is not a record"):
        read_run(tmp_path)
