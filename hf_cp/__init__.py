"""Exact context parallelism for Hugging Face fine-tuning: one long sample, split over processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hf_cp.config import ContextParallelConfig

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_cp.attention.usp import context_parallel_attention
    from hf_cp.data.collator import DataCollatorForContextParallel
    from hf_cp.distributed.mesh import ContextParallelMesh
    from hf_cp.models.patch import apply_context_parallel, context_parallel_disabled, remove_context_parallel
    from hf_cp.planning.search import plan_context_parallel
    from hf_cp.sequence.layout import SequenceLayout
    from hf_cp.sequence.packing import pack_documents
    from hf_cp.sequence.plan import AttentionPlan
    from hf_cp.training.attach import attach_context_parallel
    from hf_cp.training.plugin import ContextParallelPlugin
    from hf_cp.training.telemetry.callback import ContextParallelCallback
    from hf_cp.training.trainer import ContextParallelTrainer, ContextParallelTrainerMixin
    from hf_cp.verify import verify_context_parallel

_MODULES = {
    "AttentionPlan": "hf_cp.sequence.plan",
    "ContextParallelCallback": "hf_cp.training.telemetry.callback",
    "ContextParallelMesh": "hf_cp.distributed.mesh",
    "ContextParallelPlugin": "hf_cp.training.plugin",
    "ContextParallelTrainer": "hf_cp.training.trainer",
    "ContextParallelTrainerMixin": "hf_cp.training.trainer",
    "DataCollatorForContextParallel": "hf_cp.data.collator",
    "SequenceLayout": "hf_cp.sequence.layout",
    "apply_context_parallel": "hf_cp.models.patch",
    "attach_context_parallel": "hf_cp.training.attach",
    "context_parallel_attention": "hf_cp.attention.usp",
    "context_parallel_disabled": "hf_cp.models.patch",
    "pack_documents": "hf_cp.sequence.packing",
    "plan_context_parallel": "hf_cp.planning.search",
    "remove_context_parallel": "hf_cp.models.patch",
    "verify_context_parallel": "hf_cp.verify",
}

__all__ = [
    "AttentionPlan",
    "ContextParallelCallback",
    "ContextParallelConfig",
    "ContextParallelMesh",
    "ContextParallelPlugin",
    "ContextParallelTrainer",
    "ContextParallelTrainerMixin",
    "DataCollatorForContextParallel",
    "SequenceLayout",
    "apply_context_parallel",
    "attach_context_parallel",
    "context_parallel_attention",
    "context_parallel_disabled",
    "pack_documents",
    "plan_context_parallel",
    "remove_context_parallel",
    "verify_context_parallel",
]


def __getattr__(name: str):
    """Loads a public name when it is first used, so that `import hf_cp` costs nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_cp' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
