"""Gradients of weights that are used once per chunk of a shard, summed in fp32.

Autograd adds up the gradients of all uses of a weight in the type of that use. In 16 bits the sum is then rounded once
per chunk, where a single product over all tokens is rounded once in all. Here each use gets its own node between the
weight and the linear layer; the nodes add up in fp32 and hand the weight one gradient.

That holds for weights of 16 bits, and for others under autocast, which would use one 16-bit copy for all chunks.
Invariant: a weight's values are untouched, and outside of a call its module is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hf_cp import _compat
from hf_cp.attention.merge import accumulator_dtype

Forward = Callable[[torch.Tensor], torch.Tensor]


def summed_over_chunks(module: nn.Module, forward: Forward, num_chunks: int) -> Forward:
    """`forward`, to be called once per chunk and in recomputations of these calls.

    Args:
        module (`nn.Module`): whose linear layers `forward` uses.
        forward (`Callable`): the module itself, or its `forward`.
        num_chunks (`int`): calls whose gradients a backward pass computes, all of them or none.
    """
    if num_chunks == 1 or not torch.is_grad_enabled():
        return forward
    linears = [linear for linear in module.modules() if isinstance(linear, nn.Linear)]
    layers = [_Layer(linear, num_chunks) for linear in linears if any(map(_is_rounded, linear.parameters(False)))]

    def call(hidden: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(layer.in_place())
            return forward(hidden)

    return call if layers else forward


def _is_rounded(weight: torch.Tensor) -> bool:
    """Whether autograd would sum the gradients of its uses in less than fp32."""
    used = torch.get_autocast_dtype(weight.device.type) if _is_autocast(weight) else weight.dtype
    return weight.requires_grad and accumulator_dtype(used) != used


def _is_autocast(weight: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32


class _Layer:
    """A linear layer whose parameters are replaced while its `forward` runs.

    Not earlier: parameters that are gathered from other ranks are there only after the hooks before `forward`.
    """

    def __init__(self, linear: nn.Linear, num_chunks: int):
        self._linear = linear
        rounded = [name for name, parameter in linear.named_parameters(recurse=False) if _is_rounded(parameter)]
        self._sums = {name: _Sum(num_chunks) for name in rounded}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        own = vars(self._linear).get("forward")
        original = self._linear.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self._tapped():
                return original(*args, **kwargs)

        self._linear.forward = forward
        try:
            yield
        finally:
            del self._linear.forward
            if own is not None:
                self._linear.forward = own

    @contextmanager
    def _tapped(self) -> Iterator[None]:
        parameters = _compat.parameters_of(self._linear)
        whole = {name: parameters[name] for name in self._sums}
        parameters.update({name: _Tap.apply(parameters[name], total) for name, total in self._sums.items()})
        try:
            yield
        finally:
            parameters.update(whole)


class _Sum:
    """What the nodes of one weight have added up, and how many are still to come."""

    def __init__(self, num_chunks: int):
        self._num_chunks, self._left = num_chunks, num_chunks
        self._total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The sum in the type of `grad` with the last gradient; before, nothing."""
        if self._total is None:
            self._total = grad.to(accumulator_dtype(grad.dtype), copy=True)  # `grad` may be somebody else's memory
        else:
            self._total += grad
        self._left -= 1
        if self._left:
            return None
        total, self._total, self._left = self._total, None, self._num_chunks
        return total.to(grad.dtype)


class _Tap(torch.autograd.Function):
    """The identity in the forward pass."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.total.add(grad), None
