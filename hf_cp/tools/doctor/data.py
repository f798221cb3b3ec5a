"""Checks of `hf-cp doctor` about documents and batches, a checkpoint to resume from, and the last `hf-cp verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_cp.config import IGNORE_INDEX
from hf_cp.planning.model_names import is_same_model
from hf_cp.tools.doctor.check import Check, Finding, NotGiven, fail, finding_of, missing, ok, skip, warn
from hf_cp.tools.doctor.subject import SAMPLE, Subject

__all__ = ["DATA_CHECKS", "STATE_CHECKS", "num_targets"]

ROWS = 2  # that are collated for every rank
OLD_DAYS = 30
PROOF = "verify.json"  # beside the recipe
_UNREADABLE = (NotGiven, ValueError, OSError, ImportError)


def check_documents(subject: Subject) -> Finding:
    """The first documents, read and packed as the run will do it."""
    try:
        features = subject.features
    except _UNREADABLE as error:
        if subject.args.data is not None:
            raise
        text = f"{str(error).splitlines()[0].rstrip('.')}; made-up documents stand in"
        if isinstance(error, NotGiven):
            return skip(text, "Give them with --data FILE.")
        return missing(subject, text, "Set dataset in train.yaml (from where the run starts), or try --data FILE.")
    manifest = subject.packed.manifest
    counts = manifest.counts
    text = f"documents: {manifest}" + (
        f" (the first {SAMPLE:,} of {len(features):,})" if len(features) > SAMPLE else ""
    )
    if counts.dropped or counts.truncated:
        return warn(f"{text}", "Raise max_tokens, or choose overflow: split, if these tokens matter.")
    return ok(text)


def check_batches(subject: Subject) -> Finding:
    """The batches of all ranks of a row together are the row: every token, position and target, once."""
    rows = _rows(subject)
    checked = [_check_row(subject, rows[index]) for index in range(min(ROWS, len(rows)))]
    tokens, targets, local = (sum(values) for values in zip(*checked, strict=True))
    size = subject.cp.cp_size
    return ok(
        f"tokens of {len(checked)} row(s): {tokens:,}, targets {targets:,}, all on exactly one of {size} rank(s); "
        f"padding {local * size - tokens}"
    )


def num_targets(documents: Any) -> int:
    """Targets of a row, counted from its documents: the first token of a document is nobody's target."""
    return sum(int((np.asarray(document.labels[1:]) != IGNORE_INDEX).sum()) for document in documents)


def _rows(subject: Subject) -> Any:
    try:
        return subject.packed
    except _UNREADABLE:
        return subject.synthetic


def _check_row(subject: Subject, documents: Any) -> tuple[int, int, int]:
    """(tokens, targets, local slots) of a row, after comparing what all ranks get with the documents."""
    size = subject.cp.cp_size
    made = [dataclasses.replace(subject.collator, cp_rank=rank).collate(documents) for rank in range(size)]
    batches, digests = [batch for batch, _ in made], {digest for _, digest in made}
    shapes = {tuple(tensor.shape) for batch in batches for tensor in batch.values() if _is_local(tensor)}
    if len(shapes) != 1 or len(digests) != 1:
        raise RuntimeError(f"The ranks of a row have shapes {shapes} and {len(digests)} digests.\n  Report it.")
    found = sum(int((batch["shift_labels"] != IGNORE_INDEX).sum()) for batch in batches)
    expected = num_targets(documents)
    if found != expected:
        raise RuntimeError(f"A row has {expected:,} targets, its ranks together {found:,}.\n  Report it.")
    row = {"input_ids": [d.input_ids for d in documents], "position_ids": [d.positions for d in documents]}
    for name, arrays in row.items():
        if not torch.equal(_whole(batches, name), torch.from_numpy(np.concatenate(arrays).astype(np.int64))):
            raise RuntimeError(f"The ranks' {name} do not give the row back.\n  Report it.")
    return sum(map(len, documents)), expected, shapes.pop()[1]


def _is_local(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.ndim == 2


def _whole(batches: list[dict[str, Any]], name: str) -> torch.Tensor:
    layout = batches[0].get("hf_cp_layout")
    if layout is None:  # nothing is split
        return batches[0][name][0]
    return layout.unshard([batch[name][0] for batch in batches])


def check_checkpoint(subject: Subject) -> Finding:
    """Whether a run of this recipe could go on from it: the one that is named, else the last one in output_dir."""
    if subject.args.checkpoint is not None:
        return _check_resuming(subject, subject.args.checkpoint)
    args = subject.training
    wanted, output = args.resume_from_checkpoint, Path(args.output_dir)
    if wanted and wanted.lower() != "false":
        return _check_resuming(subject, output if wanted.lower() == "true" else Path(wanted))
    if not any(output.glob("checkpoint-*")):
        return skip(f"output_dir {output} has none, and none is named")
    try:
        found = _check_resuming(subject, output)
    except ValueError as error:
        found = finding_of(error)
    if found.status == "fail":
        return warn(f"in output_dir: {found.detail}", f"The run begins anew. {found.fix}")
    return ok(f"{found.detail}; used only with resume_from_checkpoint: true")


def _check_resuming(subject: Subject, path: Path) -> Finding:
    """A folder of a checkpoint, or of several, of which the last one counts."""
    from hf_cp.training.checkpoint import (
        CheckpointRecord,
        check_states,
        check_steps,
        find_checkpoint,
        harmless_differences,
    )
    from hf_cp.training.deepspeed import is_universal

    has_several = not (path / "trainer_state.json").exists() and any(path.glob("checkpoint-*"))
    folder = find_checkpoint(True if has_several else str(path), str(path))
    saved = CheckpointRecord.load(folder)
    if saved is None:
        return fail(f"{folder} has no hf_cp.json: another Trainer wrote it", "Set ignore_data_skip: true to use it.")
    current = _record(subject, saved)
    change = f"Run `hf-cp universal {folder}` once, or start {saved.world_size} processes."
    check_states(saved, current, change=change, may_differ=is_universal(folder))
    if not subject.training.ignore_data_skip:
        check_steps(saved, current)
    differences = harmless_differences(saved, current)
    rows = "documents compared" if current.position is not None else "documents not compared"
    return ok(
        f"{folder}: {saved}; {rows}" + (f"; differs without harm: {', '.join(differences)}" if differences else "")
    )


def _record(subject: Subject, saved: Any) -> Any:
    """What a run of this recipe would write."""
    from hf_cp.environment import versions
    from hf_cp.training.checkpoint import CheckpointRecord

    args = subject.training
    has_zero = subject.args.recipe is not None and subject.uses_deepspeed
    return CheckpointRecord(
        config=dataclasses.asdict(subject.cp),
        world_size=subject.world_size,
        dp_size=subject.dp_size,
        backend=subject.accelerate.distributed_type.value if subject.args.recipe is not None else saved.backend,
        zero_stage=subject.zero_stage if has_zero else None if subject.args.recipe is not None else saved.zero_stage,
        rows_per_step=args.per_device_train_batch_size * args.gradient_accumulation_steps * subject.dp_size,
        position=_position(subject),
        versions=versions(),
    )


def _position(subject: Subject) -> Any:
    """Of the first row, where all documents were read: it holds their digest and their order."""
    from hf_cp.data.order import RowOrder, attention_areas
    from hf_cp.data.position import LoaderPosition

    try:
        packed = subject.packed
    except _UNREADABLE:
        return None
    if len(subject.features) > SAMPLE or packed.manifest.max_tokens is None:
        return None
    args = subject.training
    order = RowOrder(
        attention_areas(packed.manifest),
        dp_size=subject.dp_size,
        rows_per_step=args.gradient_accumulation_steps * subject.dp_size,
        shuffle=args.train_sampling_strategy != "sequential",
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
        group_by_cost=args.train_sampling_strategy == "group_by_length",
    )
    return LoaderPosition.of(order, data_digest=packed.digest, epoch=0, step=0)


def check_verify_report(subject: Subject) -> Finding:
    """The last proof: whether it passed, of what, and how old it is. It is looked for beside the recipe too."""
    from hf_cp.environment import collect_environment

    beside = (subject.args.recipe or (subject.args.config or Path()).parent) / PROOF
    path = subject.args.verify_report or (beside if beside.is_file() else None)
    if path is None:
        return skip(f"no proof is named, and there is no {beside}", f"Run `hf-cp verify ... --output {beside}`.")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("command") != "verify" or "report" not in content:
        return fail(f"{path} is no report of hf-cp verify", "Write one with `hf-cp verify ... --output FILE`.")
    report = content["report"]
    age = datetime.now(UTC) - datetime.fromisoformat(content["created"])
    text = f"{content['verdict']} ({content['model']}, {age.days} days old)"
    if not content["passed"]:
        return fail(text, "Do not train before it passes: `hf-cp verify` names the likely cause.")
    wrong = [
        f"{name} {report[name]} -> {getattr(subject.cp, name)}"
        for name in ("ring_degree", "ulysses_degree")
        if name in report and report[name] != getattr(subject.cp, name)
    ]
    with contextlib.suppress(NotGiven):
        if not is_same_model(content["model"], subject.loaded_name):
            wrong.append(f"model {content['model']} -> {subject.loaded_name}")
    proven, packages = content.get("versions", {}), collect_environment({}).packages
    wrong += [f"{name} {proven[name]} -> {packages[name]}" for name in packages
              if name in proven and proven[name] != packages[name]]  # fmt: skip
    if wrong:
        return warn(f"{text}; not the same now: {', '.join(wrong)}", "Run `hf-cp verify` again.")
    if age.days > OLD_DAYS:
        return warn(text, "Run `hf-cp verify` again: it takes minutes.")
    return ok(text)


DATA_CHECKS = (
    Check("Data", "documents", check_documents),
    Check("Data", "batches", check_batches),
)
STATE_CHECKS = (
    Check("State", "checkpoint", check_checkpoint),
    Check("State", "proof", check_verify_report),
)
