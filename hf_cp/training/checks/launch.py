"""Is what was asked for really running?

Some switches make accelerate silently start something else: with `ACCELERATE_USE_CPU=true` a DeepSpeed run becomes
DDP, and `accelerate launch` with a MULTI_CPU config starts one process instead of two. Such a run trains, with other
numbers. Here the request is compared with what stands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.training.checks.table import Check, Problem


def is_asked_for(backend: str) -> bool:
    """Whether `accelerate launch` (or an Accelerator of this process) asks for "DEEPSPEED" or "FSDP"."""
    return os.environ.get(f"ACCELERATE_USE_{backend}", "false").lower() == "true"


@dataclass(frozen=True)
class OtherParallelism:
    """accelerate's own sequence, context and tensor parallelism.

    It would cut the already sharded batch a second time, and transformers would divide the target count by its size.

    Args:
        sizes (`Mapping[str, int]`): where a size is set -> the size.
    """

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, parallelism_config: Any) -> OtherParallelism:
        """Of accelerate's `ParallelismConfig`, or of none."""
        names = () if parallelism_config is None else ("cp_size", "sp_size", "tp_size")
        return cls({name: getattr(parallelism_config, name) for name in names})


def _other_parallelism(subject: OtherParallelism) -> Problem | None:
    wrong = [f"{name}={size}" for name, size in subject.sizes.items() if size > 1]
    if not wrong:
        return None
    return Problem(
        f"accelerate's ParallelismConfig is on ({', '.join(wrong)}) together with hf_cp: every sample would be cut "
        "twice.",
        "Leave these sizes at 1 (unset PARALLELISM_CONFIG_CP_SIZE, ..._SP_SIZE, ..._TP_SIZE) and give the degrees to "
        "ContextParallelConfig.",
    )


@dataclass(frozen=True)
class DataLoading:
    """How accelerate cuts batches or sends them out (`DataLoaderConfiguration`, `accelerator_config`)."""

    split_batches: bool | None
    dispatch_batches: bool | None

    @classmethod
    def of(cls, loading: Any) -> DataLoading:
        return cls(loading.split_batches, loading.dispatch_batches)


def _data_loading(subject: DataLoading) -> Problem | None:
    if not subject.split_batches and not subject.dispatch_batches:
        return None
    return Problem(
        f"accelerate is told split_batches={subject.split_batches}, dispatch_batches={subject.dispatch_batches}, but "
        "every rank makes its own shard of a sample.",
        "Leave both unset.",
    )


@dataclass(frozen=True)
class PreparedLoader:
    """A user's own loader that accelerate is to prepare: it then deals batch after batch to rank after rank."""

    loader: Any


def _prepared_loader(subject: PreparedLoader) -> Problem | None:
    collator = getattr(subject.loader, "collate_fn", None)
    if not isinstance(collator, DataCollatorForContextParallel) or collator.config.cp_size == 1:
        return None
    return Problem(
        f"accelerate would give every rank other batches of this {type(subject.loader).__name__}, but the "
        f"cp_size={collator.config.cp_size} ranks of a sample must shard the same documents.",
        "Use plugin.data_loader(documents, max_tokens=...), which deals samples to groups. A loader of your own that "
        "gives the same documents to all ranks of a group works if it is not prepared.",
    )


@dataclass(frozen=True)
class Launch:
    """The processes, the backend and the precision that run, beside those that were asked for.

    Args:
        cp_size (`int`): processes that share one sample.
        launched (`int`): processes that the launcher started.
        running (`int`): processes that accelerate runs.
        backend (`str`): accelerate's distributed type.
        wants_deepspeed, wants_fsdp (`bool`): whether the caller asked for them.
        mixed_precision (`str`): that runs.
        wants_mixed_precision (`str`, *optional*): that the caller asked for.
    """

    cp_size: int
    launched: int
    running: int
    backend: str
    wants_deepspeed: bool
    wants_fsdp: bool
    mixed_precision: str = "no"
    wants_mixed_precision: str | None = None

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        *,
        cp_size: int,
        wants_deepspeed: bool,
        wants_fsdp: bool,
        wants_mixed_precision: str | None = None,
    ) -> Launch:
        """Of an Accelerator as it was built."""
        return cls(
            cp_size,
            launched=int(os.environ.get("WORLD_SIZE", "1")),
            running=accelerator.num_processes,
            backend=accelerator.distributed_type.value,
            wants_deepspeed=wants_deepspeed,
            wants_fsdp=wants_fsdp,
            mixed_precision=accelerator.mixed_precision,
            wants_mixed_precision=wants_mixed_precision,
        )


def _processes(subject: Launch) -> Problem | None:
    if subject.running == subject.launched:
        return None
    return Problem(
        f"The launcher started {subject.launched} processes, but accelerate runs {subject.running}: each would train "
        "alone.",
        "On CPU pass use_cpu=True to TrainingArguments, or create the Accelerator with the plugin.",
        RuntimeError,
    )


def _groups(subject: Launch) -> Problem | None:
    size = subject.cp_size
    if subject.running % size == 0:
        return None
    return Problem(
        f"{subject.running} processes cannot be split into groups of cp_size={size}.",
        f"Start a multiple of {size} processes, or choose ring_degree * ulysses_degree so that it divides "
        f"{subject.running}. (`accelerate launch` with a MULTI_CPU config starts only one: use torchrun "
        "--nproc_per_node.)",
    )


def _deepspeed_runs(subject: Launch) -> Problem | None:
    if not subject.wants_deepspeed or subject.backend == DistributedType.DEEPSPEED.value:
        return None
    value = os.environ.get("ACCELERATE_USE_CPU", "")
    fix = "Do not pass cpu=True, and start with torchrun or `accelerate launch --use_deepspeed` (they set LOCAL_RANK)."
    if value.lower() in ("1", "true", "yes", "y", "t", "on"):
        fix = f"ACCELERATE_USE_CPU={value} switches DeepSpeed off: unset it (DeepSpeed finds the CPU by itself)."
    return Problem(
        f"DeepSpeed was asked for, but accelerate runs {subject.backend} with {subject.running} process(es).",
        fix,
        RuntimeError,
    )


def _fsdp_runs(subject: Launch) -> Problem | None:
    if not subject.wants_fsdp or subject.running == 1 or subject.backend == DistributedType.FSDP.value:
        return None
    return Problem(
        f"FSDP was asked for, but accelerate runs {subject.backend} with {subject.running} process(es).",
        "accelerate runs FSDP only on several GPUs: start one process per GPU with torchrun, or leave fsdp_plugin "
        "(TrainingArguments: fsdp) out.",
        RuntimeError,
    )


def _mixed_precision(subject: Launch) -> Problem | None:
    wanted = subject.wants_mixed_precision
    if wanted is None or wanted == subject.mixed_precision:
        return None
    return Problem(
        f"mixed_precision={wanted!r} was asked for, accelerate runs {subject.mixed_precision!r}.",
        "Set bf16.enabled and fp16.enabled in the DeepSpeed config to 'auto', or drop them.",
        RuntimeError,
    )


CHECKS = (
    Check("other parallelism", OtherParallelism, _other_parallelism),
    Check("data loading", DataLoading, _data_loading),
    Check("own loader", PreparedLoader, _prepared_loader),
    Check("processes", Launch, _processes),
    Check("groups", Launch, _groups),
    Check("DeepSpeed runs", Launch, _deepspeed_runs),
    Check("FSDP runs", Launch, _fsdp_runs),
    Check("mixed precision", Launch, _mixed_precision),
)
