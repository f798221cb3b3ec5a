"""Checks of `hf-cp doctor` about documents and batches, a checkpoint to resume from, and the last `hf-cp verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_cp.config import IGNORE_INDEX
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.documents import Document
from hf_cp.data.order import LoaderPosition, SampleOrder, attention_areas
from hf_cp.environment import versions
from hf_cp.planning.model_names import is_same_model
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.tools.doctor.check import UNREADABLE, Check, Finding, NotGiven, fail, finding_of, missing, ok, skip, warn
from hf_cp.tools.doctor.subject import FIRST, Subject
from hf_cp.training.checkpoint import (
    CheckpointRecord,
    check_states,
    check_steps,
    find_checkpoint,
    harmless_differences,
)
from hf_cp.training.deepspeed import is_universal

COMPARED = 2  # samples that are collated for every rank
OLD_DAYS = 30
PROOF = "verify.json"  # beside the recipe


def check_documents(subject: Subject) -> Finding:
    """The first documents, read and packed as the run will do it."""
    try:
        count = len(subject.features)
    except (NotGiven, *UNREADABLE) as error:
        if subject.args.data is not None:
            raise
        text = f"{str(error).splitlines()[0].rstrip('.')}; made-up documents take their place"
        if isinstance(error, NotGiven):
            return skip(text, "Give them with --data FILE.")
        return missing(subject, text, "Set dataset in train.yaml (from where the run starts), or try --data FILE.")
    manifest = subject.packed.manifest
    text = f"documents: {manifest}" + (f" (the first {FIRST:,} of {count:,})" if count > FIRST else "")
    if manifest.counts.dropped or manifest.counts.truncated:
        return warn(text, "Raise max_tokens, or choose overflow: split, if these tokens matter.")
    return ok(text)


def samples_of(subject: Subject) -> PackedDataset:
    """Of the first documents, or of made-up ones where these cannot be read."""
    try:
        return subject.packed
    except (NotGiven, *UNREADABLE):
        return subject.made_up


def num_targets(documents: Sequence[Document]) -> int:
    """Targets of a sample, counted from its documents: the first token of a document is nobody's target."""
    return sum(int((np.asarray(document.labels[1:]) != IGNORE_INDEX).sum()) for document in documents)


def check_batches(subject: Subject) -> Finding:
    """The batches of a group's ranks together are the sample: every token, position and target, once."""
    samples, size = samples_of(subject), subject.cp.cp_size
    count, tokens, targets, slots = min(COMPARED, len(samples)), 0, 0, 0
    for documents in (samples[index] for index in range(count)):
        made = [dataclasses.replace(subject.collator, cp_rank=rank).collate(documents) for rank in range(size)]
        batches, digests = [batch for batch, _ in made], {digest for _, digest in made}
        _compare(batches, digests, documents)
        tokens += sum(len(document) for document in documents)
        targets += num_targets(documents)
        slots += size * batches[0]["input_ids"].shape[1]
    return ok(
        f"tokens of {count} sample(s): {tokens:,}, targets {targets:,}, all on exactly one of {size} rank(s); "
        f"padding {slots - tokens}"
    )


def _compare(batches: list[dict[str, Any]], digests: set[int], documents: Sequence[Document]) -> None:
    """Raises RuntimeError if what the ranks get is not what the documents hold."""
    tensors = [tensor for batch in batches for tensor in batch.values() if isinstance(tensor, torch.Tensor)]
    shapes = {tuple(tensor.shape) for tensor in tensors if tensor.ndim == 2}
    if len(shapes) != 1 or len(digests) != 1:
        raise RuntimeError(f"The ranks of a sample have shapes {shapes} and {len(digests)} digests.\n  Report it.")
    found = sum(int((batch["shift_labels"] != IGNORE_INDEX).sum()) for batch in batches)
    if found != num_targets(documents):
        raise RuntimeError(
            f"A sample has {num_targets(documents):,} targets, its ranks together {found:,}.\n  Report it."
        )
    held = {"input_ids": [d.input_ids for d in documents], "position_ids": [d.positions for d in documents]}
    for name, arrays in held.items():
        if not torch.equal(_whole(batches, name), torch.from_numpy(np.concatenate(arrays).astype(np.int64))):
            raise RuntimeError(f"The {name} of the ranks together are not those of the documents.\n  Report it.")


def _whole(batches: list[dict[str, Any]], name: str) -> torch.Tensor:
    sample = batches[0].get(SAMPLE_KEY)
    if sample is None:  # nothing is split
        return batches[0][name][0]
    return sample.layout.unshard([batch[name][0] for batch in batches])


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
    compared = "documents compared" if current.position is not None else "documents not compared"
    differences = ", ".join(harmless_differences(saved, current))
    return ok(f"{folder}: {saved}; {compared}" + (f"; differs without harm: {differences}" if differences else ""))


def _record(subject: Subject, saved: CheckpointRecord) -> CheckpointRecord:
    """What a run of this recipe would write; without a recipe, the backend is taken to be the same."""
    args, backend, stage = subject.training, saved.backend, saved.zero_stage
    if subject.has_recipe:
        backend = subject.backend
        stage = subject.zero_stage if backend == "DEEPSPEED" else None
    return CheckpointRecord(
        config=dataclasses.asdict(subject.cp),
        world_size=subject.world_size,
        dp_size=subject.dp_size,
        backend=backend,
        zero_stage=stage,
        samples_per_step=args.per_device_train_batch_size * args.gradient_accumulation_steps * subject.dp_size,
        position=position_of(subject),
        versions=versions(),
    )


def position_of(subject: Subject) -> LoaderPosition | None:
    """Of the first sample, where all documents were read: it holds their digest and their order."""
    try:
        packed = subject.packed
    except (NotGiven, *UNREADABLE):
        return None
    if len(subject.features) > FIRST or packed.manifest.max_tokens is None:
        return None
    args = subject.training
    order = SampleOrder(
        attention_areas(packed.manifest),
        dp_size=subject.dp_size,
        samples_per_step=args.gradient_accumulation_steps * subject.dp_size,
        shuffle=args.train_sampling_strategy != "sequential",
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
        group_by_cost=args.train_sampling_strategy == "group_by_length",
    )
    return LoaderPosition.of(order, data_digest=packed.digest, epoch=0, step=0)


def check_verify_report(subject: Subject) -> Finding:
    """The last proof: whether it passed, of what, and how old it is. It is looked for beside the recipe too."""
    beside = (subject.args.recipe or (subject.args.config or Path()).parent) / PROOF
    path = subject.args.verify_report or (beside if beside.is_file() else None)
    if path is None:
        return skip(f"no proof is named, and there is no {beside}", f"Run `hf-cp verify ... --output {beside}`.")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("command") != "verify" or "report" not in content:
        return fail(f"{path} is not a report of hf-cp verify", "Write one with `hf-cp verify ... --output FILE`.")
    age = datetime.now(UTC) - datetime.fromisoformat(content["created"])
    text = f"{content['verdict']} ({content['model']}, {age.days} days old)"
    if not content["passed"]:
        return fail(text, "Do not train before it passes: `hf-cp verify` names the likely cause.")
    changed = _changes_since(content, subject)
    if changed:
        return warn(f"{text}; not the same now: {', '.join(changed)}", "Run `hf-cp verify` again.")
    if age.days > OLD_DAYS:
        return warn(text, "Run `hf-cp verify` again: it takes minutes.")
    return ok(text)


def _changes_since(content: dict[str, Any], subject: Subject) -> list[str]:
    """Degrees, model and versions that are not those of the proof."""
    proven = content["report"] | content.get("versions", {})
    now = {name: getattr(subject.cp, name) for name in ("ring_degree", "ulysses_degree")} | versions()
    pairs = [(name, proven[name], value) for name, value in now.items() if name in proven]
    with contextlib.suppress(NotGiven):
        if not is_same_model(content["model"], subject.loaded_name):
            pairs.append(("model", content["model"], subject.loaded_name))
    return [f"{name} {was} -> {value}" for name, was, value in pairs if was != value]


CHECKS = (
    Check("Data", "documents", check_documents),
    Check("Data", "batches", check_batches),
    Check("State", "checkpoint", check_checkpoint),
    Check("State", "proof", check_verify_report),
)
