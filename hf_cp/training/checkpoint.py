"""`hf_cp.json`: how a checkpoint was trained, kept beside it and compared when a run goes on.

A checkpoint holds whole tensors (or ZeRO's parts of them), and samples are counted over all dp ranks, so another
cp_size continues it exactly. What would continue it wrongly, or fail deep inside a library, is refused here by name,
on every rank and before anything is loaded: other samples per optimizer step, other documents or another order, a ZeRO
checkpoint for another number of processes. Differences that do no harm are logged.

One process writes the file, whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_cp.config import ContextParallelConfig
from hf_cp.data.order import LoaderPosition, with_todays_names
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.environment import version_of, versions
from hf_cp.training.deepspeed import is_universal

logger = logging.getLogger(__name__)
accelerate_logger = get_logger(__name__)

FILE_NAME = "hf_cp.json"
FORMAT = 1
SHARDED = (DistributedType.DEEPSPEED.value, DistributedType.FSDP.value)


@dataclass(frozen=True)
class CheckpointRecord:
    """How the run that wrote a checkpoint was laid out.

    Args:
        config (`dict`): the fields of its [`ContextParallelConfig`].
        world_size, dp_size (`int`): processes; groups of them that have samples of their own.
        backend (`str`): accelerate's distributed type.
        zero_stage (`int`, *optional*): with DeepSpeed.
        samples_per_step (`int`): samples of an optimizer step, over all dp ranks.
        position (`LoaderPosition`, *optional*): of the training samples.
        versions (`dict`): of the packages that matter.
    """

    config: dict[str, Any]
    world_size: int
    dp_size: int
    backend: str
    zero_stage: int | None
    samples_per_step: int
    position: LoaderPosition | None
    versions: dict[str, str | None]

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        mesh: ContextParallelMesh,
        config: ContextParallelConfig,
        *,
        samples_per_step: int,
        position: LoaderPosition | None = None,
    ) -> CheckpointRecord:
        """Of the run in this process."""
        uses_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        return cls(
            config=asdict(config),
            world_size=mesh.world_size,
            dp_size=mesh.dp_size,
            backend=accelerator.distributed_type.value,
            zero_stage=accelerator.state.deepspeed_plugin.zero_stage if uses_deepspeed else None,
            samples_per_step=samples_per_step,
            position=position,
            versions=versions(),
        )

    @property
    def sharding(self) -> str:
        """Who holds which part of the optimizer's state: "ZeRO stage 2", "FSDP", or "whole" on every process."""
        if self.zero_stage:
            return f"ZeRO stage {self.zero_stage}"
        return self.backend if self.backend in SHARDED else "whole"

    def __str__(self) -> str:
        ring, ulysses = self.config["ring_degree"], self.config["ulysses_degree"]
        return (
            f"{self.world_size} processes: cp_size={ring * ulysses} (ring_degree={ring}, ulysses_degree={ulysses}), "
            f"dp_size={self.dp_size}; {self.samples_per_step} samples per step; optimizer state: {self.sharding}"
        )

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `folder/hf_cp.json`, complete or not at all. Call it on one process."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
        draft.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> CheckpointRecord | None:
        """Reads `folder/hf_cp.json`; `None` if there is none.

        Raises:
            ValueError: another version of hf_cp wrote it.
        """
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return None
        data = with_todays_names(json.loads(path.read_text(encoding="utf-8")))
        names = {field.name for field in dataclasses.fields(cls)}
        if data.get("format") != FORMAT or names != data.keys() - {"format"}:
            raise ValueError(
                f"{path} has format {data.get('format')}, this hf_cp ({version_of('hf-cp')}) reads format {FORMAT}."
                f"\n  Resume with the version that wrote it: {data.get('versions')}."
            )
        del data["format"]
        position = data["position"] and LoaderPosition.load(data["position"])
        return cls(**data | {"position": position})


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The folder that the Trainer resumes from: what is named, or the last complete one in `output_dir` for `True`.

    The Trainer writes its state last: a checkpoint without it was being written when the run ended.

    Raises:
        ValueError: there is none, or the one that is named is incomplete.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        return _last_complete(output_dir)
    folder = Path(resume_from_checkpoint)
    if not (folder / TRAINER_STATE_NAME).is_file():
        complete = [path.name for path in _complete_checkpoints(folder.parent)]
        raise ValueError(
            f"{folder} is not a complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing.\n"
            f"  Resume from another one (complete beside it: {', '.join(complete) or 'none'}) and delete it."
        )
    return str(folder)


def _last_complete(output_dir: str) -> str:
    newest, complete = get_last_checkpoint(output_dir), _complete_checkpoints(Path(output_dir))
    if not complete:
        incomplete = "" if newest is None else f" ({newest} is incomplete: it has no {TRAINER_STATE_NAME})"
        raise ValueError(
            f"There is no checkpoint in {output_dir} to resume from{incomplete}.\n"
            "  Pass the folder of one, or begin anew."
        )
    if Path(newest) != complete[-1]:
        logger.warning("%s was not written to its end; going on from %s.", newest, complete[-1])
    return str(complete[-1])


def _complete_checkpoints(output_dir: Path) -> list[Path]:
    """The oldest first."""
    found = [path.parent for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")]
    numbered = [folder for folder in found if folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdigit()]
    return sorted(numbered, key=lambda folder: int(folder.name.rpartition("-")[2]))


class Found(NamedTuple):
    """A checkpoint to resume from: its folder, its record, and whether it was converted to the universal format."""

    folder: str
    record: CheckpointRecord | None
    is_universal: bool


def find_on_all_ranks(resume_from_checkpoint: str | bool | None, output_dir: str, comm: Communicator) -> Found | None:
    """The checkpoint to resume from, the same on every rank; `None` if nothing is resumed. Call it on every rank.

    Raises:
        ValueError: see [`find_checkpoint`] and [`CheckpointRecord.load`].
        RuntimeError: the ranks see different checkpoints (folders of different hosts), on all ranks.
    """
    found, failure = None, None
    try:
        folder = find_checkpoint(resume_from_checkpoint, output_dir)
        if folder is not None:
            found = Found(folder, CheckpointRecord.load(folder), is_universal(folder))
    except Exception as error:
        failure = error
    seen = None if found is None else (Path(found.folder).name, found.record, found.is_universal)
    digest = int.from_bytes(hashlib.blake2b(repr(seen).encode(), digest_size=8).digest(), "big", signed=True)
    agree("checkpoint", comm=comm, digest=digest, error=failure, scope="world")
    return found


def check_states(saved: CheckpointRecord, current: CheckpointRecord, *, change: str, may_differ: bool = False) -> None:
    """Can weights and optimizer state be loaded at all?

    Args:
        saved, current (`CheckpointRecord`): of the checkpoint and of this run.
        change (`str`): what to do about a ZeRO checkpoint of another number of processes.
        may_differ (`bool`, *optional*, defaults to `False`): another number of processes is fine, since the checkpoint
            was converted to the universal format.

    Raises:
        ValueError: the state is sharded otherwise, or over another number of processes.
    """
    both = f"  saved: {saved}\n  here:  {current}"
    if saved.sharding != current.sharding:
        raise ValueError(
            f"The checkpoint's optimizer state is in another form ({saved.sharding}) than this run's "
            f"({current.sharding}).\n{both}\n  Resume with the same backend and ZeRO stage."
        )
    if saved.zero_stage and saved.world_size != current.world_size and not may_differ:
        raise ValueError(
            f"ZeRO has cut the checkpoint's optimizer state into {saved.world_size} parts, this run has "
            f"{current.world_size} processes.\n{both}\n  {change}"
        )


def check_fsdp_form(folder: str | os.PathLike, state_dict_type: str) -> None:
    """Is FSDP's state in the form that accelerate will look for? Either form fits any number of processes.

    Args:
        folder (`str` or `os.PathLike`): the checkpoint.
        state_dict_type (`str`): this run's, "FULL_STATE_DICT" or "SHARDED_STATE_DICT".

    Raises:
        ValueError: it is in the other form, or there is none.
    """
    files = {"FULL_STATE_DICT": f"{FSDP_MODEL_NAME}.bin", "SHARDED_STATE_DICT": f"{FSDP_MODEL_NAME}_0"}
    saved = next((form for form, name in files.items() if (Path(folder) / name).exists()), None)
    if saved != state_dict_type:
        change = "Resume from a checkpoint that was written under FSDP, without save_only_model."
        raise ValueError(
            f"{folder} holds {saved or 'no state'} of FSDP, this run reads {state_dict_type} "
            f"({files[state_dict_type]}).\n  {f'Set state_dict_type to {saved}.' if saved else change}"
        )


def check_steps(saved: CheckpointRecord, current: CheckpointRecord) -> None:
    """Does step n of the Trainer see the same samples in both runs?

    Raises:
        ValueError: a step has another number of samples, so that the saved number of steps stands for other ones; or
            the documents or their order differ.
    """
    if saved.samples_per_step != current.samples_per_step:
        steps = saved.samples_per_step / current.dp_size
        hint = f"gradient_accumulation_steps={steps:.0f}" if steps == int(steps) else "another number of processes"
        raise ValueError(
            f"An optimizer step had {saved.samples_per_step} samples, here it has {current.samples_per_step}: the "
            "Trainer counts steps, and would go on at another sample and learning rate.\n"
            f"  saved: {saved}\n  here:  {current}\n"
            f"  Resume with {hint}, or set ignore_data_skip=True to begin the epoch anew."
        )
    if saved.position is not None and current.position is not None:
        saved.position.check_same_samples(current.position)


def harmless_differences(saved: CheckpointRecord, current: CheckpointRecord) -> list[str]:
    """What differs without changing the numbers beyond rounding; with dropout, the masks."""
    pairs = [(name, saved.config.get(name), value) for name, value in current.config.items()]
    pairs += [(name, getattr(saved, name), getattr(current, name)) for name in ("world_size", "dp_size", "backend")]
    pairs += [(name, saved.versions.get(name), version) for name, version in current.versions.items()]
    return [f"{name} {was} -> {now}" for name, was, now in pairs if was != now]


def log_differences(saved: CheckpointRecord, current: CheckpointRecord, *, folder: str | os.PathLike) -> None:
    """Says what differs without harm."""
    differences = harmless_differences(saved, current)
    if differences:
        accelerate_logger.info(f"Going on from {folder} with another layout or other versions: {differences}.")
