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
from hf_cp.training.checks.table import Check


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


@dataclass(frozen=True)
class DataLoading:
    """How accelerate cuts batches or sends them out (`DataLoaderConfiguration`, `accelerator_config`)."""

    split_batches: bool | None
    dispatch_batches: bool | None

    @classmethod
    def of(cls, loading: Any) -> DataLoading:
        return cls(loading.split_batches, loading.dispatch_batches)


@dataclass(frozen=True)
class PreparedLoader:
    """A user's own loader that accelerate is to prepare: it then deals batch after batch to rank after rank."""

    loader: Any

    @property
    def kind(self) -> str:
        return type(self.loader).__name__

    @property
    def cp_size(self) -> int:
        collator = getattr(self.loader, "collate_fn", None)
        return collator.config.cp_size if isinstance(collator, DataCollatorForContextParallel) else 1


@dataclass(frozen=True)
class Launch:
    """The processes, the backend and the precision that run, beside those that were asked for.

    Args:
        cp_size (`int`): processes that share one sample.
        launched, running (`int`): processes that the launcher started, and that accelerate runs.
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
    def of(cls, accelerator: Accelerator, *, cp_size: int, **wants: Any) -> Launch:
        """Of an Accelerator as it was built; `wants` are the fields of what was asked for."""
        return cls(
            cp_size,
            launched=int(os.environ.get("WORLD_SIZE", "1")),
            running=accelerator.num_processes,
            backend=accelerator.distributed_type.value,
            mixed_precision=accelerator.mixed_precision,
            **wants,
        )

    def lacks_deepspeed(self) -> str:
        """What to do about a DeepSpeed that is off; nothing if it is on or not asked for."""
        if not self.wants_deepspeed or self.backend == DistributedType.DEEPSPEED.value:
            return ""
        value = os.environ.get("ACCELERATE_USE_CPU", "")
        if value.lower() in ("1", "true", "yes", "y", "t", "on"):
            return f"ACCELERATE_USE_CPU={value} switches DeepSpeed off: unset it (DeepSpeed finds the CPU by itself)."
        return (
            "Do not pass cpu=True, and start with torchrun or `accelerate launch --use_deepspeed` (they set "
            "LOCAL_RANK)."
        )


CHECKS = (
    Check(
        "other parallelism",
        OtherParallelism,
        lambda s: ", ".join(f"{name}={size}" for name, size in s.sizes.items() if size > 1),
        "accelerate's ParallelismConfig is on ({found}) together with hf_cp: every sample would be cut twice.",
        "Leave these sizes at 1 (unset PARALLELISM_CONFIG_CP_SIZE, ..._SP_SIZE, ..._TP_SIZE) and give the degrees to "
        "ContextParallelConfig.",
    ),
    Check(
        "data loading",
        DataLoading,
        lambda s: s.split_batches or s.dispatch_batches,
        "accelerate is told split_batches={s.split_batches}, dispatch_batches={s.dispatch_batches}, but every rank "
        "makes its own shard of a sample.",
        "Leave both unset.",
    ),
    Check(
        "own loader",
        PreparedLoader,
        lambda s: s.cp_size > 1,
        "accelerate would give every rank other batches of this {s.kind}, but the cp_size={s.cp_size} ranks of a "
        "sample must shard the same documents.",
        "Use plugin.data_loader(documents, max_tokens=...), which deals samples to groups. A loader of your own that "
        "gives the same documents to all ranks of a group works if it is not prepared.",
    ),
    Check(
        "processes",
        Launch,
        lambda s: s.running != s.launched,
        "The launcher started {s.launched} processes, but accelerate runs {s.running}: each would train alone.",
        "On CPU pass use_cpu=True to TrainingArguments, or create the Accelerator with the plugin.",
        RuntimeError,
    ),
    Check(
        "groups",
        Launch,
        lambda s: s.running % s.cp_size,
        "{s.running} processes cannot be split into groups of cp_size={s.cp_size}.",
        "Start a multiple of {s.cp_size} processes, or choose ring_degree * ulysses_degree so that it divides "
        "{s.running}. (`accelerate launch` with a MULTI_CPU config starts only one: use torchrun --nproc_per_node.)",
    ),
    Check(
        "DeepSpeed runs",
        Launch,
        Launch.lacks_deepspeed,
        "DeepSpeed was asked for, but accelerate runs {s.backend} with {s.running} process(es).",
        "{found}",
        RuntimeError,
    ),
    Check(
        "FSDP runs",
        Launch,
        lambda s: s.wants_fsdp and s.running > 1 and s.backend != DistributedType.FSDP.value,
        "FSDP was asked for, but accelerate runs {s.backend} with {s.running} process(es).",
        "accelerate runs FSDP only on several GPUs: start one process per GPU with torchrun, or leave fsdp_plugin "
        "(TrainingArguments: fsdp) out.",
        RuntimeError,
    ),
    Check(
        "mixed precision",
        Launch,
        lambda s: s.wants_mixed_precision not in (None, s.mixed_precision),
        "mixed_precision={s.wants_mixed_precision!r} was asked for, accelerate runs {s.mixed_precision!r}.",
        "Set bf16.enabled and fp16.enabled in the DeepSpeed config to 'auto', or drop them.",
        RuntimeError,
    ),
)
