"""Gradient checkpointing: exact, and neither attention nor its forward communication runs a second time."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import set_checkpoint_early_stop

from hf_cp import ContextParallelConfig, apply_context_parallel, context_parallel_disabled
from hf_cp.attention.kernels import CpuFlashKernel
from hf_cp.models import checkpointing
from hf_cp.models.checkpointing import KeptAttention
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from tests.attention.reference import relative_error
from tests.models.tiny import Row
from tests.training.tiny import Record, make_documents, make_model, train, worst_difference

pytestmark = pytest.mark.distributed

LENGTHS = (29, 5, 11, 3)
ROWS = (LENGTHS, (17, 9))  # two micro-steps


class Way(NamedTuple):
    """How a model is made context-parallel and checkpointed."""

    ring: int = 2
    ulysses: int = 1
    ring_comm: str = "auto"
    head_chunks: int = 1
    reentrant: bool = False
    keep: bool = True
    family: str = "llama"
    lora: bool = False
    enable_first: bool = False  # checkpointing before apply_context_parallel
    early_stop: bool = True
    every_n_layers: int = 1
    through_ddp: bool = False

    @property
    def config(self) -> ContextParallelConfig:
        return ContextParallelConfig(
            self.ring,
            self.ulysses,
            ring_comm=self.ring_comm,
            head_chunks=self.head_chunks,
            loss_chunk_tokens=5,
            keep_attention=self.keep,
            force=True,
        )


WAYS = [
    Way(ring_comm="p2p"),
    Way(ring_comm="exchange", reentrant=True),
    Way(ring_comm="allgather", lora=True, reentrant=True),
    Way(ring_comm="allgather", head_chunks=2, family="qwen3", enable_first=True),
    Way(1, 2, lora=True, enable_first=True),
    Way(1, 2, reentrant=True, every_n_layers=2, family="qwen2"),
    Way(2, 1, lora=True, through_ddp=True),
    Way(1, 2, early_stop=False, through_ddp=True),
]
WAYS_OF_FOUR = [Way(2, 2, "p2p"), Way(2, 2, "exchange", reentrant=True), Way(1, 4, head_chunks=1), Way(4, 1, "p2p")]


def checkpointed(way: Way) -> nn.Module:
    model = make_model(way.family, lora=way.lora)
    settings = {"use_reentrant": way.reentrant}

    def enable() -> None:
        model.activation_checkpointing_enable(settings, every_n_layers=way.every_n_layers)

    if way.enable_first:
        enable()
    apply_context_parallel(model, way.config)
    if not way.enable_first:
        enable()
    return model.train()


@contextmanager
def counting() -> Iterator[Counter]:
    seen: Counter[str] = Counter()

    def counted(owner: Any, name: str):
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any):
            seen[name] += 1
            return function(*args, **kwargs)

        return patch.object(owner, name, call)

    with (
        counted(dist, "batch_isend_irecv"),
        counted(dist, "all_to_all_single"),
        counted(CpuFlashKernel, "forward"),
        counted(CpuFlashKernel, "backward"),
    ):
        yield seen


def step(model: nn.Module, way: Way, rows: tuple = ROWS) -> dict[str, torch.Tensor]:
    """Gradients of the sum of the rows' losses, averaged over the ranks; all rows are in flight together."""
    mesh = context_parallel_state(model).mesh
    run = DistributedDataParallel(model) if way.through_ddp else model
    losses = []
    for seed, lengths in enumerate(rows):
        batch = Row(lengths, seed=seed).local_batch(SequenceLayout(lengths, way.config), mesh.cp_rank)
        losses.append(run(**batch).loss)
    with set_checkpoint_early_stop(way.early_stop):
        sum(losses).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if not way.through_ddp:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=mesh.cp_group)
            gradient /= mesh.cp_size
    return gradients


def one_process_gradients(way: Way) -> dict[str, torch.Tensor]:
    """On whole rows, nothing checkpointed, through our loss (transformers' rounds the logits to fp32)."""
    model = apply_context_parallel(make_model(way.family, lora=way.lora), ContextParallelConfig(force=True))
    for seed, lengths in enumerate(ROWS):
        row = Row(lengths, seed=seed)
        model(**row.local_batch(SequenceLayout(lengths, ContextParallelConfig()), 0)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


class Compared(NamedTuple):
    """A checkpointed step on this rank."""

    error: float  # the worst of a gradient, against one process
    calls: Counter
    plain_calls: Counter  # of a step without checkpointing


def compare(way: Way) -> Compared:
    with counting() as kept_counts:
        gradients = step(checkpointed(way), way)
    model = apply_context_parallel(make_model(way.family, lora=way.lora), way.config)
    with counting() as plain_counts:
        step(model, way)
    expected = one_process_gradients(way)
    assert gradients.keys() == expected.keys() and len(gradients) > 10
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    worst = max(relative_error(gradients[name], value) for name, value in expected.items())
    return Compared(worst, kept_counts, plain_counts)


def compare_all(ways: list[Way]) -> list[Compared]:
    return [compare(way) for way in ways]


def check(ways: list[Way], ranks: list[list[Compared]]) -> None:
    for rank in ranks:
        for way, compared in zip(ways, rank, strict=True):
            assert compared.error < 1e-10, way
            assert compared.calls == compared.plain_calls, way
            transfers = compared.calls["batch_isend_irecv"] + compared.calls["all_to_all_single"]
            assert compared.calls["forward"] > 0 and transfers > 0, way


def test_exact_and_nothing_is_done_twice(world2):
    check(WAYS, world2.run(compare_all, WAYS, timeout=120))


def test_exact_and_nothing_is_done_twice_on_four_ranks(world4):
    check(WAYS_OF_FOUR, world4.run(compare_all, WAYS_OF_FOUR, timeout=120))


def test_without_keeping_attention_runs_again(world2):
    ways = [Way(ring_comm="exchange", keep=False), Way(1, 2, keep=False, reentrant=True)]
    for ring, ulysses in world2.run(compare_all, ways):
        assert ring.error < 1e-10 and ulysses.error < 1e-10
        assert ring.calls["forward"] == 2 * ring.plain_calls["forward"]
        # forward, recomputation and 2 exchanges backward instead of 1 + 2; 2 trades each instead of 2 + 2
        assert ring.calls["all_to_all_single"] * 3 == ring.plain_calls["all_to_all_single"] * 4
        assert ulysses.calls["all_to_all_single"] * 2 == ulysses.plain_calls["all_to_all_single"] * 3


def kept_objects() -> list[KeptAttention]:
    return [x for x in gc.get_objects() if isinstance(x, KeptAttention)]


def held_tensors(kept: KeptAttention) -> list[torch.Tensor]:
    return [x for layer in kept._kept.values() for tensors in layer for x in tensors]


def lifetime(way: Way) -> dict[str, Any]:
    """What is held after the forward pass, after a backward pass that keeps the graph, and after the last one."""
    model = checkpointed(way)
    layout = SequenceLayout(LENGTHS, way.config)
    batch = Row(LENGTHS).local_batch(layout, context_parallel_state(model).mesh.cp_rank)
    gc.collect()
    gc.disable()  # references alone must free everything
    try:
        loss = model(**batch).loss
        (kept,) = kept_objects()
        tensors = held_tensors(kept)
        numbers, pointers = sum(x.numel() for x in tensors), [weakref.ref(x) for x in tensors]
        has_graph = any(x.requires_grad for x in tensors)
        del tensors
        loss.backward(retain_graph=not way.reentrant)
        emptied = not held_tensors(kept) and all(pointer() is None for pointer in pointers)
        once = [p.grad.clone() for p in model.parameters()]
        if not way.reentrant:
            loss.backward()
            again = max(relative_error(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))
        else:
            again = 0.0
        del kept, loss
        left = len(kept_objects())
        unused = model(**batch).loss
        del unused
        left_without_backward = len(kept_objects())
        with patch.object(KeptAttention, "__init__", side_effect=AssertionError("made outside of training")):
            with torch.no_grad():
                model(**batch)
            assert model.eval()(**batch).loss.requires_grad
            with context_parallel_disabled(model.train()):
                assert model(**Row(LENGTHS).whole_batch()).loss.requires_grad
    finally:
        gc.enable()
    return {
        "slots": layout.local_length,
        "numbers": numbers,
        "has_graph": has_graph,
        "emptied": emptied,
        "again": again,
        "left": (left, left_without_backward),
    }


def test_what_is_kept_and_for_how_long(world2):
    """2 layers, n slots, 4 heads over 2 of size 8. Ring: out, lse. Ulysses: q, k, v of all slots and half the heads,
    out and lse of these, and out of the own slots."""
    ring, ulysses = 2 * (4 * 8 + 4), 2 * ((4 + 2 + 2) * 8 + (4 * 8 + 4) + 4 * 8)
    for way, per_slot in ((Way(), ring), (Way(reentrant=True), ring), (Way(1, 2), ulysses)):
        for seen in world2.run(lifetime, way):
            assert seen["numbers"] == per_slot * seen["slots"]
            assert not seen["has_graph"] and seen["emptied"]
            assert seen["again"] < 1e-12
            assert seen["left"] == (0, 0)


def dropped_gradients(checkpointing: bool | None) -> list[torch.Tensor]:
    """With dropout in the adapters, from one seed."""
    from peft import LoraConfig, get_peft_model

    way = Way(1, 2)
    torch.manual_seed(3)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(make_model(), adapters).double()
    apply_context_parallel(model, way.config)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    torch.manual_seed(4 + dist.get_rank())
    return list(step(model.train(), way).values())


def test_random_masks_are_those_of_the_first_run(world2):
    plain = world2.run(dropped_gradients, None)[0]
    for use_reentrant in (False, True):
        for gradients in world2.run(dropped_gradients, use_reentrant):
            assert all(relative_error(a, b) < 1e-12 for a, b in zip(gradients, plain, strict=True))


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Stands in for save_on_cpu, which needs an accelerator for pinned memory: packs a copy, counts."""

    packed: Counter[str] = Counter()

    def __init__(self, owner: str, pin_memory: bool, device_type: str) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
            OnHost.packed[owner] += 1
            return (tensor.detach().clone(),)

        super().__init__(pack, lambda packed: packed[0])


@contextmanager
def on_host() -> Iterator[Counter[str]]:
    """Counts what is offloaded inside, by owner."""
    OnHost.packed.clear()
    with (
        patch("transformers.modeling_utils.save_on_cpu", partial(OnHost, "transformers")),
        patch.object(checkpointing, "save_on_cpu", partial(OnHost, "hf_cp")),
    ):
        yield OnHost.packed


def offloaded(use_reentrant: bool) -> dict[str, Any]:
    way = Way(1, 2, reentrant=use_reentrant)
    model = apply_context_parallel(make_model(), way.config)
    expected = {name: gradient.clone() for name, gradient in step(model, way).items()}
    model.zero_grad()
    with on_host() as packed:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant}, offload=True)
        with counting() as calls:
            gradients = step(model.train(), way)
    worst = max(relative_error(gradients[name], value) for name, value in expected.items())
    return {"error": worst, "packed": dict(packed), "trades": calls["all_to_all_single"]}


def test_what_is_kept_follows_the_saved_inputs_to_the_host(world2):
    """2 rows of 2 layers: transformers packs each layer's input, we q, k, v, out, lse and the local out: 4 tensors."""
    for use_reentrant in (False, True):
        for seen in world2.run(offloaded, use_reentrant):
            assert seen["error"] < 1e-12
            assert seen["packed"]["transformers"] >= 4 and seen["packed"]["hf_cp"] == 4 * 4
            assert seen["trades"] == 2 * 2 * 4


def trained(**arguments: Any) -> tuple[Record, dict[str, int]]:
    """A run of 2 steps, and how often each owner has packed a tensor for the host."""
    with on_host() as packed:
        record = train(ContextParallelConfig(2), make_documents(LENGTHS), lora=True, max_steps=2, **arguments)
    return record, dict(packed)


def test_through_the_trainer(world2):
    """The last one is what `hf-cp plan --checkpointing offload --write` puts into train.yaml."""
    start = make_model(lora=True).state_dict()
    plain = world2.run(trained)
    for kwargs in (
        {"use_reentrant": False},
        {"use_reentrant": True, "every_n_layers": 2},
        {"use_reentrant": False, "offload": True},
    ):
        arguments = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
        if kwargs["use_reentrant"]:
            arguments["ddp_find_unused_parameters"] = False
        for (record, packed), (expected, _) in zip(world2.run(trained, **arguments), plain, strict=True):
            difference = worst_difference(record, expected, start)
            assert max(difference.loss, difference.gradient, difference.update) < 1e-10
            # 2 steps, 2 layers, out and lse of a ring; transformers' own inputs beside them
            assert packed.get("hf_cp", 0) == (8 if "offload" in kwargs else 0)
            assert (packed.get("transformers", 0) >= 4) == ("offload" in kwargs)
