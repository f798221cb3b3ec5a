"""The feed-forward part of every layer in chunks of tokens, each recomputed in the backward pass.

Its activations (three times the intermediate size per token, in a gated one) exist for one chunk at a time; kept is
only its input. The modules are called as they are, so LoRA and parameter gathering work. The number of chunks comes
from the packed sample's `common_length`, so all ranks make the same module calls.

Inside a checkpointed layer (not the re-entrant kind) nothing is computed three times: all inputs are saved before the
first chunk is computed, so the recomputation of the layer ends there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_cp import _compat
from hf_cp.models.chunk_gradients import Forward, summed_over_chunks
from hf_cp.sequence.sample import SAMPLE_KEY, PackedSample


def check_mlps(layers: Iterable[nn.Module], chunk_tokens: int) -> None:
    """Raises ValueError unless every layer's feed-forward part works on each token by itself."""
    for number, layer in enumerate(layers):
        mlp = getattr(layer, "mlp", None)
        if mlp is None or hasattr(mlp, "experts") or not hasattr(mlp, "down_proj"):
            raise ValueError(
                f"mlp_chunk_tokens={chunk_tokens}, but the feed-forward part of layer {number} of "
                f"{type(layer).__name__} is {type(mlp).__name__}, not a dense one (experts get tokens by routing).\n"
                "  Set mlp_chunk_tokens=None."
            )


def tile_mlps(layers: Iterable[nn.Module], chunk_tokens: int) -> None:
    """Replaces the `forward` of every layer, which knows its sample, and of its `mlp`, which is told how to cut it."""
    for layer in layers:
        layer.forward = MethodType(_telling(layer.forward, chunk_tokens), layer)
        layer.mlp.forward = MethodType(_tiled(layer.mlp.forward), layer.mlp)


def untile_mlps(layers: Iterable[nn.Module]) -> None:
    """Undoes [`tile_mlps`]."""
    for module in (module for layer in layers for module in (layer, layer.mlp)):
        original = module.forward.__func__.original
        if getattr(original, "__func__", None) is type(module).forward:
            del module.forward
        else:
            module.forward = rebound(original, module)


@torch.compiler.disable  # dynamo cannot bind methods
def rebound(method: Callable, module: nn.Module) -> Callable:
    """A method of `module`, or of the module that `module` is a copy of, as that of `module`; others as they are.

    A copy (`copy.deepcopy`: a reference model, an average of weights) shares a replacing function with its original.
    What that function calls must then be the copy's: a method that was bound before would run on the original's
    weights.
    """
    if isinstance(method, MethodType) and type(method.__self__) is type(module):
        return MethodType(method.__func__, module)
    return method


# From a layer's forward pass to its MLP's, which transformers calls with hidden states only. It is set for the length
# of that call, in the thread that runs it; where checkpointing runs the layer again, it is set again.
_num_chunks: ContextVar[int] = ContextVar("hf_cp_num_mlp_chunks", default=1)


def _telling(original: Callable, chunk_tokens: int) -> Callable:
    @functools.partial(torch.compiler.disable, recursive=False)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sample: PackedSample | None = kwargs.get(SAMPLE_KEY)
        tell = functools.partial(_told, 1 if sample is None else sample.num_chunks(chunk_tokens))
        # transformers checkpoints inside of a layer's own forward: what it runs again is told as well
        with _compat.checkpointed_through(self, lambda run: functools.partial(tell, run)):
            return tell(rebound(original, self), *args, **kwargs)

    forward.original = original
    return forward


@functools.partial(torch.compiler.disable, recursive=False)
def _told(num_chunks: int, run: Callable, *args: Any, **kwargs: Any) -> Any:
    token = _num_chunks.set(num_chunks)
    try:
        return run(*args, **kwargs)
    finally:
        _num_chunks.reset(token)


def _tiled(original: Forward) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    @torch.compiler.disable  # the number of chunks changes from sample to sample
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:  # [1, n, hidden_size] both
        chunks, whole = _num_chunks.get(), rebound(original, self)
        return whole(hidden) if chunks == 1 else in_chunks(summed_over_chunks(self, whole, chunks), hidden, chunks)

    forward.original = original
    return forward


def in_chunks(forward: Forward, hidden: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """`forward` of `hidden` [1, n, hidden_size], with the activations of about n / num_chunks tokens at a time.

    It is called `num_chunks` times, also if there are fewer tokens.
    """
    chunks = hidden.tensor_split(num_chunks, dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([forward(chunk) for chunk in chunks], dim=1)
    if not hidden.requires_grad:
        return torch.cat([checkpoint(forward, chunk, use_reentrant=False) for chunk in chunks], dim=1)
    saved = [_Saved.apply(chunk) for chunk in chunks]  # all of them before the first `forward`
    return torch.cat([_recomputed(forward, chunk) for chunk in saved], dim=1)


class _Saved(torch.autograd.Function):
    """The identity; its node saves the tensor."""

    @staticmethod
    def forward(ctx, chunk: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(chunk)
        return chunk.detach()  # a view could have other strides, and matmul choose another way than for the saved one

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _recomputed(forward: Forward, chunk: torch.Tensor) -> torch.Tensor:
    """Checkpoints `forward(chunk)` without saving `chunk` once more: its value is that of the `_Saved` node."""
    node, live = chunk.grad_fn, [chunk]

    def run(devices: list[torch.Tensor]) -> torch.Tensor:
        # of a recomputed node it comes detached, and some operations go other ways for inputs without gradient
        return forward(live.pop() if live else node.saved_tensors[0].detach().requires_grad_())

    # The checkpoint keeps the random state of the devices of its arguments, and saves tensors that are no list.
    return checkpoint(run, [chunk.new_empty(0)], use_reentrant=False)
