"""What a run writes about itself: `run.json`, `rank<r>.jsonl` with a line per optimizer step, and traces.

A run that goes on from a checkpoint appends to the files; a step that is done again is there twice, and the later line
counts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from hf_cp.training.meter import StepRecord
from hf_cp.training.run_info import RunInfo

RUN_FILE = "run.json"


def rank_file(rank: int) -> str:
    """Name of a rank's file of records."""
    return f"rank{rank}.jsonl"


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
        self._path = self.folder / rank_file(rank)
        if not appends:
            self._path.write_text("")

    def write_info(self, info: RunInfo) -> None:
        """One process must call it."""
        (self.folder / RUN_FILE).write_text(json.dumps(dataclasses.asdict(info), indent=1) + "\n")

    def write(self, records: Sequence[StepRecord]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)


@dataclasses.dataclass(frozen=True)
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
    by_rank = [_read_rank(folder / rank_file(rank)) for rank in range(info.world_size)]
    common = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    if not common:
        raise ValueError(
            f"No optimizer step in {folder} is complete: the ranks have {[len(steps) for steps in by_rank]} steps, "
            "none in common.\n  Records are written when the Trainer logs; wait for the first log (logging_steps)."
        )
    return RunRecords(info, tuple(tuple(steps[step] for step in common) for steps in by_rank))


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
            raise ValueError(f"{path}, line {number}, is no record: {error}. Record the run again.") from error
        steps[record.step] = record
    return steps
