"""What a run says about itself: [`StepRecord`] and [`RunInfo`], and their files.

`run.json` holds the run, `rank<r>.jsonl` a line per optimizer step. A run that goes on from a checkpoint appends to
the files; a step that is done again is there twice, and the later line counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

WHOLE_SAMPLES = "none"  # the layout of a run that splits nothing
RUN_FILE = "run.json"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of one process (or, added up, several).

    Args:
        step (`int`): number of the optimizer step, from 1; of a sum, the last one.
        seconds (`float`): from the taking of the batches to the end of the update.
        data_seconds (`float`): until the batches were there, without waiting for other ranks.
        work_seconds (`float`): forward and backward passes, from the call of the patched model to the backward pass of
            the first layer's attention, and what the loop does before them; without waiting. What is left out waits
            for other ranks in DDP or ZeRO. ZeRO-3 and FSDP also wait inside, where they gather parameters; that counts
            as work. A model that is not patched has all of the micro-step here.
        ring_wait_seconds, ulysses_wait_seconds (`float`): waiting for transfers of attention.
        other_wait_seconds (`float`): waiting for peers in sums and agreements.
        ring_flight_seconds, ulysses_flight_seconds (`float`): from the start of each transfer until it was taken,
            added up; transfers overlap.
        ring_bytes, ulysses_bytes (`int`): sent.
        samples (`int`): samples with targets or without that this rank's group had.
        tokens (`int`): tokens of documents; those of a shared sample are counted on its first rank.
        targets (`int`): tokens with loss on this rank.
        slots (`int`): places for tokens on this rank, padding included.
        area (`float`): visible (query, key) pairs over all layers, for all heads; a rank of u Ulysses ranks has 1 / u
            of its shard's.
        peak_memory_bytes (`int`): the most that the process has held so far.
    """

    step: int
    seconds: float
    data_seconds: float
    work_seconds: float
    ring_wait_seconds: float
    ulysses_wait_seconds: float
    other_wait_seconds: float
    ring_flight_seconds: float
    ulysses_flight_seconds: float
    ring_bytes: int
    ulysses_bytes: int
    samples: int
    tokens: int
    targets: int
    slots: int
    area: float
    peak_memory_bytes: int

    @property
    def busy_seconds(self) -> float:
        """What this process needed by itself: others wait for the rank that has most of it."""
        return self.data_seconds + self.work_seconds

    @property
    def wait_seconds(self) -> float:
        return self.ring_wait_seconds + self.ulysses_wait_seconds + self.other_wait_seconds

    def __add__(self, other: StepRecord) -> StepRecord:
        latest = ("step", "peak_memory_bytes")
        values = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return StepRecord(**{name: max(pair) if name in latest else sum(pair) for name, pair in values.items()})


@dataclass(frozen=True)
class RunInfo:
    """A run, known once its first micro-step has shown which engine and kernel are used; as text, its first line.

    Args:
        dp, ring, ulysses (`int`): the mesh.
        layout, engine, kernel (`str`): how samples are split, how K/V travel over the ring axis in the first sample,
            and what computes; "none" where nothing is split.
        max_tokens (`int`, *optional*): the longest sample; `None` where documents are not packed.
        samples_per_step (`int`): samples (documents, if they are not packed) that an optimizer step sees.
        first_step (`int`): number of the run's first optimizer step, above 1 if it goes on from a checkpoint.
        device (`str`): of rank 0.
    """

    dp: int
    ring: int
    ulysses: int
    layout: str
    engine: str
    kernel: str
    max_tokens: int | None
    samples_per_step: int
    first_step: int
    device: str

    @property
    def world_size(self) -> int:
        return self.dp * self.ring * self.ulysses

    def __str__(self) -> str:
        count, most = self.samples_per_step, self.max_tokens
        plural = "" if count == 1 else "s"
        samples, of_a_step = "samples of any length", f"{count:,} document{plural}"
        if most is not None:
            per_rank = -(-most // (self.ring * self.ulysses))
            samples = f"samples of up to {most:,} tokens ({per_rank:,} a rank)"
            of_a_step = f"{count:,} sample{plural} (up to {count * most:,} tokens)"
        return (
            f"hf_cp: dp {self.dp} x ring {self.ring} x ulysses {self.ulysses} | layout {self.layout} | "
            f"engine {self.engine} | kernel {self.kernel} | {samples} | {of_a_step} per optimizer step"
        )


class RecordWriter:
    """Writes this rank's records as they come; every rank has a file of its own.

    Args:
        folder (`Path`): made if it is not there.
        rank (`int`): of this process.
        appends (`bool`): go on with the file that is there.
    """

    def __init__(self, folder: Path, *, rank: int, appends: bool):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = _rank_file(folder, rank)
        if not appends:
            self._path.write_text("")

    def write_info(self, info: RunInfo) -> None:
        """One process must call it."""
        (self.folder / RUN_FILE).write_text(json.dumps(asdict(info), indent=1) + "\n")

    def write(self, records: Sequence[StepRecord]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


@dataclass(frozen=True)
class RunRecords:
    """What all ranks have written.

    Args:
        info (`RunInfo`): the run.
        ranks (`tuple[tuple[StepRecord, ...], ...]`): by rank, the same optimizer steps for all, in order.
    """

    info: RunInfo
    ranks: tuple[tuple[StepRecord, ...], ...]


def read_run(folder: Path) -> RunRecords:
    """Reads a folder of records; of steps, those that all ranks have.

    Raises:
        ValueError: the folder holds no run, a rank's file is missing, a line cannot be read, or no step is complete.
    """
    try:
        info = RunInfo(**json.loads((folder / RUN_FILE).read_text()))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {RUN_FILE}, so it holds no records of a run.\n"
            "  Train with ContextParallelCallback(record_dir=...) and give that folder."
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / RUN_FILE} cannot be read: {error}. Record the run again.") from error
    by_rank = [_read_rank(_rank_file(folder, rank)) for rank in range(info.world_size)]
    common = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    if not common:
        raise ValueError(
            f"No optimizer step in {folder} is complete: the ranks have {[len(steps) for steps in by_rank]} steps, "
            "none in common.\n  Records are written when the Trainer logs; wait for the first log (logging_steps)."
        )
    return RunRecords(info, tuple(tuple(steps[step] for step in common) for steps in by_rank))


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _read_rank(path: Path) -> dict[int, StepRecord]:
    """Step number -> its last record. A last line without an end is being written; it is left out."""
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, although the run had this rank.\n  Record into a folder that all nodes share, or "
            "bring the files of all ranks together."
        )
    steps = {}
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            record = StepRecord(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}, is not a record: {error}. Record the run again.") from error
        steps[record.step] = record
    return steps
