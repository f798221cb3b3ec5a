"""What training.py measures, on every process: one step on a long row, after a warm-up step on a short one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fresh import peak_bytes
from torch.distributed.tensor import DTensor
from training_runs import RUNS, Run, Untouched

from hf_cp.planning.model_names import load_config

WARM_UP_TOKENS = 256
LORA_RANK = 8

Gradients = dict[str, torch.Tensor]  # by the parameters' names


class Case(NamedTuple):
    """What is trained ("full" or "lora"), on rows of how many tokens, and how often it is measured."""

    method: str
    tokens: int
    rounds: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """From method:tokens:rounds.

        Raises:
            ValueError: it is something else.
        """
        method, tokens, rounds = text.split(":")
        if method not in ("full", "lora") or int(tokens) < 2 or int(rounds) < 1:
            raise ValueError(text)
        return cls(method, int(tokens), int(rounds))


class Sizes(NamedTuple):
    """Layers, query and K/V heads, and vocabulary; the rest is SmolLM2-135M's."""

    layers: int
    heads: tuple[int, int] = (9, 3)
    vocabulary: int = 49_152


class Measured(NamedTuple):
    """Of one process: seconds of the timed step, bytes kept and ever held, and the first step's gradients.

    What was not asked for, or cannot be known, is `None`. `error` is the largest relative difference of a tensor's
    gradient from the exact one, `norm` the norm of all gradients over the exact norm: 2 where all are twice as large.
    """

    seconds: float
    kept: int | None
    peak: int
    error: float | None
    norm: float | None

    @classmethod
    def of_all(cls, ranks: list[Measured]) -> Measured:
        """The slowest process, the fullest, the worst gradient."""
        return cls(*(None if None in values else max(values) for values in zip(*ranks, strict=True)))


def measured_step(name: str, case: Case, sizes: Sizes, with_error: bool) -> Measured:
    """Warms up, then times a step; every process of the run must call it.

    Args:
        name (`str`): a key of `RUNS`.
        case, sizes (`Case`, `Sizes`): what is trained.
        with_error (`bool`): whether the first step's gradients are compared with the untouched model's in fp64.
    """
    rows = make_rows(case, sizes)
    # first: DeepSpeed replaces attention for every model of the process
    exact = exact_gradients(rows[0], case, sizes) if with_error else None
    run = start(name, case, sizes)
    error, norm = warm_up(run, rows[0], exact)
    if dist.is_initialized():
        dist.barrier()
    kept: dict[int, int] = {}
    began = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: counted(tensor, kept), lambda tensor: tensor):
        loss = run.forward(rows[1])
    run.backward(loss)
    run.update()
    seconds = time.perf_counter() - began
    return Measured(seconds, without_weights(kept, run.model), peak_bytes(), error, norm)


def busy_step(name: str, case: Case, sizes: Sizes) -> Callable[[], None]:
    """A step on the long row, to be made again and again: what keeps another core busy."""
    run, row = start(name, case, sizes), make_rows(case, sizes)[1]

    def step() -> None:
        run.backward(run.forward(row))
        run.update()

    return step


def start(name: str, case: Case, sizes: Sizes) -> Run:
    return RUNS[name](make_model(case, sizes))


def make_model(case: Case, sizes: Sizes) -> Any:
    """Random weights, the same on every process."""
    from transformers import AutoModelForCausalLM

    config = load_config("smollm2-135m")
    config.num_hidden_layers, config.vocab_size = sizes.layers, sizes.vocabulary
    config.num_attention_heads, config.num_key_value_heads = sizes.heads
    config.max_position_embeddings = max(config.max_position_embeddings, case.tokens)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def make_rows(case: Case, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, int64 [tokens], of the warm-up and of the timed step."""
    generator = torch.Generator().manual_seed(1)
    lengths = (WARM_UP_TOKENS, case.tokens)
    short, row = (torch.randint(0, sizes.vocabulary, (n,), generator=generator) for n in lengths)
    return short, row


def warm_up(run: Run, row: torch.Tensor, exact: Gradients | None) -> tuple[float | None, float | None]:
    """A step; (error, norm) of its gradients, if there is something to compare them with."""
    run.backward(run.forward(row))
    found = (None, None) if exact is None else compare(run.gradients(), exact)
    run.update()
    return found


def exact_gradients(row: torch.Tensor, case: Case, sizes: Sizes) -> Gradients:
    """Of the untouched model, in fp64."""
    exact = Untouched(make_model(case, sizes).double())
    exact.backward(exact.forward(row))
    return exact.gradients()


def compare(gradients: Gradients, exact: Gradients) -> tuple[float, float]:
    """(worst relative difference of a tensor, norm of all over the exact norm)."""
    assert sorted(gradients) == sorted(exact)
    errors = [float((gradients[name].double() - g).norm() / g.norm()) for name, g in exact.items()]
    norms = [sum(float(g.double().norm()) ** 2 for g in some.values()) ** 0.5 for some in (gradients, exact)]
    return max(errors), norms[0] / norms[1]


def without_weights(kept: dict[int, int], model: torch.nn.Module) -> int | None:
    """Bytes that are no weights; `None` under FSDP, whose gathered weights cannot be told apart."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for place, size in kept.items() if place not in weights)


def counted(tensor: torch.Tensor, kept: dict[int, int]) -> torch.Tensor:
    """Notes the storage that autograd keeps; as often as it is kept, it is the same one."""
    with torch.no_grad():
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    kept[storage.data_ptr()] = storage.nbytes()
    return tensor
