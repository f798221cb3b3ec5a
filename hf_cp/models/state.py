"""What a patched model remembers, and where it is found through the wrappers of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh

# transformers takes other code paths for names with "flash", "sdpa", "flex" or "/" in them
ATTENTION_NAME = "hf_cp_usp"
STATE_NAME = "_hf_cp_state"  # attribute of the causal LM and of its attention layers


@dataclass(frozen=True)
class ContextParallelState:
    """What a patched model remembers.

    Args:
        config (`ContextParallelConfig`): the settings.
        comm (`Communicator`): the processes, and what has been sent between them.
        attn_implementation (`str`): before the patch.
        forward (`Callable`): before the patch.
        patched (`Callable`): the function in place of `forward`.
        rotaries (`tuple`): those modules whose frequencies depend on the length of a sample.
        active (`bool`): inside of [`context_parallel_disabled`] the model carries a copy that is not.
    """

    config: ContextParallelConfig
    comm: Communicator
    attn_implementation: str
    forward: Callable
    patched: Callable
    rotaries: tuple[nn.Module, ...] = ()
    active: bool = True

    @property
    def mesh(self) -> ContextParallelMesh:
        return self.comm.mesh


def context_parallel_state(model: nn.Module) -> ContextParallelState | None:
    """The state of a patched model, through PEFT, DDP and DeepSpeed wrappers; `None` if it is not patched."""
    return next((vars(m)[STATE_NAME] for m in model.modules() if STATE_NAME in vars(m)), None)


def base_causal_lm(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM inside of PEFT or other wrappers.

    Raises:
        ValueError: there is none.
    """
    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} holds no Hugging Face PreTrainedModel. Pass a causal LM, such as Llama or Qwen3."
        )
    return found


@contextmanager
def context_parallel_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the patched model is the original one: whole samples, one process, its own attention and loss."""
    state = context_parallel_state(model)
    if state is None or not state.active:
        yield model
        return
    base = base_causal_lm(model)
    try:
        setattr(base, STATE_NAME, replace(state, active=False))
        base.set_attn_implementation(state.attn_implementation)
        yield model
    finally:
        setattr(base, STATE_NAME, state)
        base.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def running_as(model: nn.Module, config: ContextParallelConfig, mesh: ContextParallelMesh) -> Iterator[nn.Module]:
    """Inside, the patched model runs with other settings on other processes; the same state comes back afterwards.

    Raises ValueError for other MLP chunks. The state is exchanged, not written into, and the patch stays, so whatever
    stands around `forward` stays too.
    """
    holders, state = [m for m in model.modules() if STATE_NAME in vars(m)], context_parallel_state(model)
    if config.mlp_chunk_tokens != state.config.mlp_chunk_tokens:  # the replaced MLPs know their own
        raise ValueError(
            f"mlp_chunk_tokens={config.mlp_chunk_tokens}, but the model was patched with "
            f"{state.config.mlp_chunk_tokens}. Give the same."
        )
    other = replace(state, config=config, comm=Communicator(mesh))
    try:
        for module in holders:
            setattr(module, STATE_NAME, other)
        yield model
    finally:
        for module in holders:
            setattr(module, STATE_NAME, state)
