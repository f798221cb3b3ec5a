"""Training on shared samples: a plugin for custom loops with Accelerate, and the Trainer."""

from hf_cp.training.attach import attach_context_parallel
from hf_cp.training.plugin import ContextParallelPlugin
from hf_cp.training.trainer import ContextParallelTrainer, ContextParallelTrainerMixin

__all__ = ["ContextParallelPlugin", "ContextParallelTrainer", "ContextParallelTrainerMixin", "attach_context_parallel"]
