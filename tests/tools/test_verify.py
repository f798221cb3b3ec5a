"""The proof of the quickstart: it passes on correct runs, fails on planted faults, and puts the model back."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from hf_cp.attention import exchange, gather, ring
from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import PackedRow
from hf_cp.models import patch
from hf_cp.models.patch import apply_context_parallel
from hf_cp.parallel.mesh import ContextParallelMesh
from hf_cp.tools import verify as verify_module
from hf_cp.tools.verify import VerifyReport, verify_context_parallel
from tests.models.tiny import VOCAB_SIZE, tiny_model

RING2 = ContextParallelConfig(ring_degree=2)
ULYSSES2 = ContextParallelConfig(ulysses_degree=2)
LENGTHS = (19, 3, 1, 30)


def documents(lengths=LENGTHS) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()} for n in lengths]


def lora_model(config: ContextParallelConfig, dtype: torch.dtype, family: str = "llama") -> torch.nn.Module:
    model = apply_context_parallel(tiny_model(family, dtype=dtype), config)
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5, target_modules="all-linear")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


# Planted faults: what goes wrong on some or all ranks while the split run is computed


@contextmanager
def scaled_loss() -> Iterator[None]:
    """The classic: the local sum over the local number of targets, here cp_size times too large."""
    original = patch.reduce_losses

    def reduce_losses(losses, shift_labels, mesh, **kwargs):
        return original(losses, shift_labels, mesh, **kwargs) * mesh.cp_size

    with mock.patch.object(patch, "reduce_losses", reduce_losses):
        yield


@contextmanager
def changed_batch(change: Callable[[dict], None]) -> Iterator[None]:
    """Rank 1 works on a batch that `change` has altered."""
    original = PackedRow.local_batch

    def local_batch(self, cp_rank, **kwargs):
        batch = original(self, cp_rank, **kwargs)
        if cp_rank == 1:
            change(batch)
        return batch

    with mock.patch.object(PackedRow, "local_batch", local_batch):
        yield


def one_wrong_position() -> contextmanager:
    return changed_batch(lambda batch: batch["position_ids"][0, 5].add_(3))


def lost_target() -> contextmanager:
    return changed_batch(lambda batch: batch["shift_labels"][0, 2].fill_(-100))


@contextmanager
def dropped_remote_gradients() -> Iterator[None]:
    """dK and dV that other ranks found do not come home: the forward pass, and so the first loss, is right.

    Planted in all three engines; they send gradients from `backward` itself, and keys and values from a helper.
    """

    def planted(original: Callable) -> Callable:
        def start(tensor: torch.Tensor, mesh, **kwargs):
            is_gradient = kwargs.get("tag", ring.GRAD_TAG) == ring.GRAD_TAG
            is_gradient &= sys._getframe(1).f_code.co_name == "backward"
            return original(torch.zeros_like(tensor) if is_gradient else tensor, mesh, **kwargs)

        return start

    with (
        mock.patch.object(ring, "start_hop", planted(ring.start_hop)),
        mock.patch.object(exchange, "start_exchange", planted(exchange.start_exchange)),
        mock.patch.object(gather, "start_exchange", planted(gather.start_exchange)),
    ):
        yield


@contextmanager
def wrong_sum_on_one_rank() -> Iterator[None]:
    """Only rank 1 gets a wrong sum of gradients, so only rank 1 can see it."""
    original = verify_module.sum_over_cp

    def sum_over_cp(tensor, mesh):
        return original(tensor, mesh) * (1.01 if mesh.rank == 1 and tensor.ndim else 1.0)

    with mock.patch.object(verify_module, "sum_over_cp", sum_over_cp):
        yield


def verify(config: ContextParallelConfig, dtype: torch.dtype, *, family: str = "llama", fault=None) -> VerifyReport:
    model = lora_model(config, dtype, family)
    with fault() if fault else nullcontext():
        return verify_context_parallel(model, documents())


def snapshot(model: torch.nn.Module) -> dict:
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "dropout": [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)],
        "attention": model.config._attn_implementation,
    }


def model_before_and_after() -> tuple[dict, dict, bool]:
    model = lora_model(RING2, torch.float32).eval()
    model.get_submodule("base_model.model.model.layers.0").train()  # a mixed state, to see that it comes back
    kept = next(p for p in model.parameters() if p.requires_grad)
    kept.grad = torch.ones_like(kept)
    before = snapshot(model)
    verify_context_parallel(model, documents())
    others = [p.grad for p in model.parameters() if p is not kept]
    grads_are_back = bool((kept.grad == 1).all()) and all(grad is None for grad in others)
    return before, snapshot(model), grads_are_back


@pytest.mark.distributed
@pytest.mark.parametrize("config", [RING2, ULYSSES2], ids=["ring", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_passes_on_a_correct_run(world2, config, dtype):
    for report in world2.run(verify, config, dtype):
        assert report.passed, report.table()
        assert report.cp_size == 2
        assert report.num_targets_cp1 == report.num_targets_cpN == sum(LENGTHS) - len(LENGTHS)
        assert report.num_parameters == 28  # A and B of 7 linear layers in 2 blocks: nothing was left out
        # Hugging Face's loss is fp32, so the gradients agree to fp32 also in an fp64 model.
        assert report.worst_gradient_relative_error < 1e-5
        assert len(set(report.step_losses_cp1)) == 3  # the steps did move the model
        assert json.loads(report.to_json())["passed"] is True


@pytest.mark.distributed
def test_passes_on_four_ranks_of_qwen3(world4):
    config = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
    assert all(report.passed for report in world4.run(verify, config, torch.float32, family="qwen3"))


@pytest.mark.distributed
def test_puts_everything_back(world2):
    for before, after, grads_are_back in world2.run(model_before_and_after):
        assert grads_are_back
        lora_b = [tensor for name, tensor in after["state"].items() if "lora_B" in name]
        assert len(lora_b) == 14 and not any(tensor.any() for tensor in lora_b)
        assert before["state"].keys() == after["state"].keys()
        assert all(torch.equal(tensor, after["state"][name]) for name, tensor in before["state"].items())
        assert all(before[key] == after[key] for key in ("training", "dropout", "attention"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (scaled_loss, "cp_size times too large"),
        (one_wrong_position, "positions"),
        (lost_target, "Targets were lost"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fails_on_a_planted_fault(world2, fault, message):
    for report in world2.run(verify, RING2, torch.float32, fault=fault):
        assert not report.passed
        assert "FAILED" in report.table() and message in report.table()
        assert report.worst_gradient_relative_error > 10 * report.gradient_tolerance


@pytest.mark.distributed
@pytest.mark.parametrize("ring_comm", ["p2p", "exchange", "allgather"])
def test_fails_where_gradients_do_not_come_home(world2, ring_comm):
    config = dataclasses.replace(RING2, ring_comm=ring_comm)
    for report in world2.run(verify, config, torch.float32, fault=dropped_remote_gradients):
        assert not report.passed and "backward pass" in report.table()
        assert report.worst_gradient_relative_error > 10 * report.gradient_tolerance
        assert report.loss_cpN == pytest.approx(report.loss_cp1, rel=1e-6)  # only gradients can show it


@pytest.mark.distributed
def test_all_processes_reach_the_same_verdict(world4):
    """One of two groups has a fault, on one of its processes: all four fail, with the same numbers."""
    first, *others = world4.run(verify, RING2, torch.float32, fault=wrong_sum_on_one_rank)
    assert not first.passed and first.worst_gradient_relative_error == pytest.approx(0.01, rel=1e-3)
    assert others == [first] * 3


def report(**changes) -> VerifyReport:
    plain = VerifyReport(
        cp_size=2,
        ring_degree=2,
        ulysses_degree=1,
        dtype="float32",
        document_lengths=(4,),
        num_parameters=1,
        num_targets_cp1=3,
        num_targets_cpN=3,
        loss_cp1=1.0,
        loss_cpN=1.0,
        grad_norm_cp1=1.0,
        grad_norm_cpN=1.0,
        worst_gradient_relative_error=0.0,
        worst_gradient_name="w",
        step_losses_cp1=(1.0, 0.9),
        step_losses_cpN=(1.0, 0.9),
        worst_update_relative_error=0.0,
        worst_update_name="w",
        loss_tolerance=1e-5,
        gradient_tolerance=1e-4,
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_targets_cpN": 4},
        {"grad_norm_cpN": 1.001},
        {"grad_norm_cpN": math.nan},
        {"worst_gradient_relative_error": 2e-4},
        {"worst_update_relative_error": math.inf},
        {"step_losses_cpN": (1.0, 0.90002)},
        {"step_losses_cpN": (math.nan, 0.9)},
    ],
    ids=str,
)
def test_every_number_can_fail_the_report(changes):
    assert report().passed
    assert not report(**changes).passed


# Refusals


def different_weights() -> VerifyReport:
    model = lora_model(RING2, torch.float32)
    if dist.get_rank() == 1:
        model.get_input_embeddings().weight.data *= 1.1
    return verify_context_parallel(model, documents())


@pytest.mark.distributed
def test_refuses_ranks_with_different_weights(world2):
    for error in world2.run(different_weights, expect_error=True):
        assert error.type_name == "RuntimeError" and "do not hold the same model" in error.message


def equal_start(*losses: float) -> None:
    mesh = ContextParallelMesh(RING2)
    verify_module._check_equal_start(losses[mesh.rank], mesh, 1e-5)


@pytest.mark.distributed
def test_start_is_judged_alike_on_all_processes(world2, world4):
    """The second loss differs from the first by a little more than is allowed, and from the mean by half of that."""
    assert world2.run(equal_start, 1.0, 1 + 0.9e-5) == [None, None]
    assert world4.run(equal_start, 1.0, 1.0, 2.0, 2.0) == [None] * 4  # each group has a row of its own
    cases = [(world2, (1.0, 1 + 2.00001e-5)), (world2, (1.0, math.nan)), (world4, (1.0, 1.0, 1.0, 1.1))]
    for world, losses in cases:
        errors = world.run(equal_start, *losses, expect_error=True)
        assert all("do not hold the same model" in error.message for error in errors)


def test_refuses_what_it_cannot_compare():
    forced = ContextParallelConfig(force=True)
    with pytest.raises(ValueError, match="needs a patched model"):
        verify_context_parallel(tiny_model(dtype=torch.float32), documents())
    frozen = apply_context_parallel(tiny_model(dtype=torch.float32), forced).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        verify_context_parallel(frozen, documents())
    half = apply_context_parallel(tiny_model(dtype=torch.bfloat16), forced)
    with pytest.raises(ValueError, match="bfloat16"):
        verify_context_parallel(half, documents())
    whole = apply_context_parallel(tiny_model(dtype=torch.float32), forced)
    with pytest.raises(ValueError, match="None of the 2 documents has a target"):
        verify_context_parallel(whole, documents((1, 1)))


def test_one_process_with_our_kernels_passes():
    """force=True at cp_size 1: our attention and loss against the untouched model, all parameters trained."""
    model = apply_context_parallel(tiny_model(dtype=torch.float32), ContextParallelConfig(force=True))
    found = verify_context_parallel(model, documents())
    assert found.passed, found.table()
    assert found.num_parameters == len(list(model.parameters()))
