"""Methods that are replaced on a module, and what becomes of them when the module is copied.

A copy (`copy.deepcopy`: a reference model, an average of weights) shares the replacing function with its original.
What that function calls must then be the copy's: a method that was bound before would run on the original's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

from torch import nn


def rebound(method: Callable, module: nn.Module) -> Callable:
    """A method of `module`, or of the module that `module` is a copy of, as that of `module`; others as they are."""
    if isinstance(method, MethodType) and type(method.__self__) is type(module):
        return MethodType(method.__func__, module)
    return method
