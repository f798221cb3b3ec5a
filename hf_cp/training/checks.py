"""Is what was asked for really running?

Some switches make accelerate silently start something else: with `ACCELERATE_USE_CPU=true` a DeepSpeed run becomes
DDP, and `accelerate launch` with a MULTI_CPU config starts one process instead of two. Such a run trains, with other
numbers. Here the request is compared with what stands, on every rank and before anything is communicated or written.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_cp.data.collator import DataCollatorForContextParallel


def check_parallelism_config(parallelism_config: Any) -> None:
    """Refuses accelerate's own sequence, context and tensor parallelism beside ours.

    They would cut the already sharded batch a second time, and transformers would divide the target count by their
    size.

    Raises:
        ValueError: `cp_size`, `sp_size` or `tp_size` of accelerate's `ParallelismConfig` is larger than 1.
    """
    if parallelism_config is None:
        return
    sizes = {name: getattr(parallelism_config, name) for name in ("cp_size", "sp_size", "tp_size")}
    if any(size > 1 for size in sizes.values()):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"accelerate's ParallelismConfig is on ({shown}) together with hf_cp: every row would be cut twice.\n"
            "  Leave these sizes at 1 (unset PARALLELISM_CONFIG_CP_SIZE, ..._SP_SIZE, ..._TP_SIZE) and give the "
            "degrees to ContextParallelConfig."
        )


def check_data_loading(accelerator: Accelerator) -> None:
    """Refuses accelerate's ways of cutting batches or sending them out.

    Raises:
        ValueError: `split_batches` or `dispatch_batches` is set.
    """
    loading = accelerator.dataloader_config
    if loading.split_batches or loading.dispatch_batches:
        raise ValueError(
            f"DataLoaderConfiguration has split_batches={loading.split_batches}, "
            f"dispatch_batches={loading.dispatch_batches}, but every rank makes its own shard of a row.\n"
            "  Leave both unset."
        )


def check_own_loader(data_loader: Any) -> None:
    """Refuses to prepare a user's own loader of shards: accelerate deals batch after batch to rank after rank.

    Raises:
        ValueError: its collator cuts a row for several ranks.
    """
    collator = getattr(data_loader, "collate_fn", None)
    if isinstance(collator, DataCollatorForContextParallel) and collator.config.cp_size > 1:
        raise ValueError(
            f"accelerate would give every rank other batches of this {type(data_loader).__name__}, but the "
            f"cp_size={collator.config.cp_size} ranks of a row must shard the same documents.\n"
            "  Use plugin.data_loader(documents, max_tokens=...), which deals rows to groups. A loader of your own "
            "that gives the same documents to all ranks of a group works if it is not prepared."
        )


def is_fsdp_launched() -> bool:
    """Whether `accelerate launch` (or an Accelerator of this process that was given a plugin) asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_launch(
    accelerator: Accelerator,
    *,
    cp_size: int,
    deepspeed_requested: bool,
    fsdp_requested: bool,
    mixed_precision: str | None = None,
) -> None:
    """Compares the processes, the backend and the precision that `accelerator` runs with what was asked.

    Args:
        accelerator (`Accelerator`): as built.
        cp_size (`int`): processes that share one row; must divide the number of processes.
        deepspeed_requested, fsdp_requested (`bool`): whether the caller asked for DeepSpeed or FSDP.
        mixed_precision (`str`, *optional*): the precision that the caller asked for.

    Raises:
        ValueError: the number of processes is not a multiple of `cp_size`.
        RuntimeError: the launcher started another number of processes, DeepSpeed or FSDP is off although it was asked
            for, or the precision is another one.
    """
    running, launched = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1"))
    if running != launched:
        raise RuntimeError(
            f"The launcher started {launched} processes, but accelerate runs {running}: each would train alone.\n"
            "  On CPU pass use_cpu=True to TrainingArguments, or create the Accelerator with the plugin."
        )
    if running % cp_size:
        raise ValueError(
            f"{running} processes cannot be split into groups of cp_size={cp_size}.\n"
            f"  Start a multiple of {cp_size} processes, or choose ring_degree * ulysses_degree so that it divides "
            f"{running}. (`accelerate launch` with a MULTI_CPU config starts only one: use torchrun --nproc_per_node.)"
        )
    if deepspeed_requested and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise RuntimeError(
            f"DeepSpeed was asked for, but accelerate runs {accelerator.distributed_type.value} with {running} "
            "process(es).\n"
            f"  {_deepspeed_hint()}"
        )
    if fsdp_requested and running > 1 and accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(
            f"FSDP was asked for, but accelerate runs {accelerator.distributed_type.value} with {running} "
            "process(es).\n"
            "  accelerate runs FSDP only on several GPUs: start one process per GPU with torchrun, or leave "
            "fsdp_plugin (TrainingArguments: fsdp) out."
        )
    if mixed_precision is not None and accelerator.mixed_precision != mixed_precision:
        raise RuntimeError(
            f"mixed_precision={mixed_precision!r} was asked for, accelerate runs {accelerator.mixed_precision!r}.\n"
            "  Set bf16.enabled and fp16.enabled in the DeepSpeed config to 'auto', or drop them."
        )


def _deepspeed_hint() -> str:
    value = os.environ.get("ACCELERATE_USE_CPU")
    if value is not None and value.lower() in ("1", "true", "yes", "y", "t", "on"):
        return f"ACCELERATE_USE_CPU={value} switches DeepSpeed off: unset it (DeepSpeed finds the CPU by itself)."
    return (
        "Do not pass cpu=True, and start with torchrun or `accelerate launch --use_deepspeed` (they set LOCAL_RANK)."
    )
