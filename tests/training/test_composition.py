"""One Trainer: who overrides what can be read in one file."""

from __future__ import annotations

from collections import Counter
from types import FunctionType

from transformers import Trainer

from hf_cp.training import ContextParallelTrainer, ContextParallelTrainerMixin


def own_methods(owner: type) -> list[str]:
    return [name for name, value in vars(owner).items() if isinstance(value, FunctionType | property)]


def test_every_method_is_overridden_once():
    """By the mixin alone; no helper stands in the method resolution order."""
    ours = [owner for owner in ContextParallelTrainer.__mro__ if owner.__module__.startswith("hf_cp.")]
    counts = Counter(name for owner in ours for name in own_methods(owner))
    assert [name for name, count in counts.items() if count > 1] == []
    overridden = [name for name in counts if hasattr(Trainer, name)]
    assert set(overridden) <= set(own_methods(ContextParallelTrainerMixin)) and len(overridden) > 14
    assert {owner.__module__ for owner in ours} == {"hf_cp.training.trainer"}
