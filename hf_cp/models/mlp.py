"""The feed-forward part of every layer in chunks of tokens, each recomputed in the backward pass.

Its activations (three times the intermediate size per token, in a gated one) exist for one chunk at a time; kept is
only its input. The modules are called as they are, so LoRA and parameter gathering work. The number of chunks comes
from the row's `lockstep_length`, so all ranks make the same module calls.

Inside a checkpointed layer (not the re-entrant kind) nothing is computed three times: all inputs are saved before the
first chunk is computed, so the recomputation of the layer ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_cp.models.chunk_gradients import Forward, summed_over_chunks
from hf_cp.models.methods import rebound


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


def tile_mlps(layers: Iterable[nn.Module], num_chunks: Callable[[nn.Module], int]) -> None:
    """Replaces the `forward` of every layer's `mlp`; `num_chunks` of the `mlp` is asked in every call."""
    for layer in layers:
        layer.mlp.forward = MethodType(_tiled(layer.mlp.forward, num_chunks), layer.mlp)


def untile_mlps(layers: Iterable[nn.Module]) -> None:
    """Undoes [`tile_mlps`]."""
    for layer in layers:
        original = layer.mlp.forward.__func__.original
        if getattr(original, "__func__", None) is type(layer.mlp).forward:
            del layer.mlp.forward
        else:
            layer.mlp.forward = rebound(original, layer.mlp)


def _tiled(
    original: Forward, num_chunks: Callable[[nn.Module], int]
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:  # [1, n, hidden_size] both
        return forward_in_chunks(self, hidden, original, num_chunks)

    forward.original = original
    return forward


@torch.compiler.disable  # the number of chunks changes from row to row
def forward_in_chunks(
    mlp: nn.Module, hidden: torch.Tensor, original: Forward, num_chunks: Callable[[nn.Module], int]
) -> torch.Tensor:
    """`original` of `mlp` (which may be a copy of the module that it was taken from) in chunks of `hidden`."""
    chunks, whole = num_chunks(mlp), rebound(original, mlp)
    return whole(hidden) if chunks == 1 else in_chunks(summed_over_chunks(mlp, whole, chunks), hidden, chunks)


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
