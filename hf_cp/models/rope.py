"""RoPE whose frequencies depend on the length of a sample: every rank takes the length of the whole row.

`dynamic` (NTK-aware scaling) and `longrope` (LongRoPE, arXiv:2402.13753) choose their frequencies by the largest
position that a call sees; `dynamic` keeps those of the longest row so far until a row is shorter than the original
context. One process sees the whole row. A rank sees its shard, and would choose others than its peers.

So, while a patched model runs, one more slot is put behind the local positions. It holds the largest position of the
row, and is cut off the result. The frequencies are still chosen by transformers' own code, from the same numbers in
the same order of rows as in one process: so what it remembers is the same too, in training, evaluation and
recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import gather_over_cp
from hf_cp.sequence.sample import PackedSample

FIXED = ("default", "linear", "llama3", "yarn")  # frequencies are a function of the config alone
BY_LENGTH = ("dynamic", "longrope")


def rope_types(config: Any) -> set[str]:
    """The RoPE types of a Hugging Face model config: one, or one per kind of layer.

    >>> from transformers import LlamaConfig
    >>> rope_types(LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    {'linear'}
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return {found.get("rope_type", "default") for found in per_layer or [parameters]}


def set_rope_parameters(config: Any, rope_parameters: Mapping[str, Any]) -> None:
    """Gives a model's config other RoPE parameters, and the context that follows from their factor, in place.

    Args:
        config: of a Hugging Face model with one RoPE for all layers, before the model is made.
        rope_parameters (`Mapping`): `rope_type`, `factor` and what else the type takes, as in transformers.
            `rope_theta` is kept unless it is given; the original context is the config's unless
            `original_max_position_embeddings` is given.

    Raises:
        ValueError: there is no type or no factor of at least 1, or transformers misses a parameter of the type.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(max_position_embeddings=2048)
    >>> set_rope_parameters(config, {"rope_type": "yarn", "factor": 4.0})
    >>> config.max_position_embeddings, config.rope_parameters["original_max_position_embeddings"]
    (8192, 2048)
    """
    rope_type, factor = rope_parameters.get("rope_type"), rope_parameters.get("factor")
    if rope_type is None or not isinstance(factor, int | float) or factor < 1:
        raise ValueError(
            f"rope_parameters={dict(rope_parameters)} needs a rope_type and a factor of at least 1.\n"
            "  For YaRN: {rope_type: yarn, factor: 4.0}"
        )
    original = rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    kept = {"rope_theta": config.rope_parameters["rope_theta"]}
    if rope_type in ("yarn", "llama3", "longrope"):
        kept["original_max_position_embeddings"] = original
    if rope_type != "dynamic":  # its rule starts from the original context, so there the number stays
        config.max_position_embeddings = int(original * factor)
    config.rope_parameters = kept | dict(rope_parameters)
    try:
        config.validate_rope()
    except KeyError as error:
        raise ValueError(f"rope_parameters={dict(rope_parameters)}: {error.args[0]}. Add what is missing.") from None


def rotaries_by_length(model: nn.Module) -> tuple[nn.Module, ...]:
    """The rotary embeddings inside `model` whose frequencies depend on the length of a sample."""

    def types(module: nn.Module) -> set[str]:
        found = getattr(module, "rope_type", None)
        return set(found.values()) if isinstance(found, dict) else {found}

    return tuple(module for module in model.modules() if types(module) & set(BY_LENGTH))


@contextmanager
def frequencies_of_the_sample(
    rotaries: tuple[nn.Module, ...], sample: PackedSample, position_ids: torch.Tensor, *, comm: Communicator
) -> Iterator[None]:
    """Inside, `rotaries` choose their frequencies by the largest position of the whole sample.

    Args:
        rotaries: from [`rotaries_by_length`]; with none of them nothing is done.
        sample (`PackedSample`): the collator has noted its largest position; for a batch that was made by hand the
            ranks of the group tell each other theirs.
        position_ids (`torch.Tensor`): int64 [1, n], the local ones; 0 in padding.
    """
    if not rotaries:
        yield
        return
    longest = sample.max_position
    if longest is None:
        longest = max(peer for (peer,) in gather_over_cp([int(position_ids.max())], comm=comm))
    with ExitStack() as hooks:
        for rotary in rotaries:
            hooks.enter_context(_extra_position(rotary, longest))
        yield


@contextmanager
def _extra_position(rotary: nn.Module, position: int) -> Iterator[None]:
    """Inside, `rotary` gets `position` behind its other ones, and its result ends before it."""

    def append(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        x, local, *rest = (*args, kwargs["position_ids"]) if "position_ids" in kwargs else args
        kwargs.pop("position_ids", None)
        return (x, torch.cat([local, local.new_full((*local.shape[:-1], 1), position)], dim=-1), *rest), kwargs

    def cut(module: nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(table[..., :-1, :] for table in output)  # cos, sin: [1, n + 1, D] -> [1, n, D]

    handles = [
        rotary.register_forward_pre_hook(append, with_kwargs=True),
        rotary.register_forward_hook(cut, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
