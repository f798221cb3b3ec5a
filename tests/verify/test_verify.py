"""The verification passes on correct runs, fails on planted faults with their cause, and puts the model back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import apply_context_parallel, context_parallel_state
from hf_cp.verify import VerifyReport, verify_context_parallel
from hf_cp.verify.report import Check
from tests.models.tiny import tiny_model
from tests.verify import verify_cases as cases
from tests.verify.verify_cases import LENGTHS, RING2, ULYSSES2, documents, full_model, lora_model, verify

GRID = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def check(report: VerifyReport, name: str) -> Check:
    """The only check whose name begins like that."""
    (found,) = (check for check in report.checks if check.name.startswith(name))
    return found


class Verified(NamedTuple):
    """A report, and what the model was before and after."""

    report: VerifyReport
    before: dict
    after: dict
    grads_are_back: bool


def verified(config: ContextParallelConfig, dtype: torch.dtype, lora: bool) -> Verified:
    model = (lora_model if lora else full_model)(config, dtype).eval()
    next(m for name, m in model.named_modules() if name.endswith("layers.0")).train()  # a mixed state, to be put back
    kept = next(p for p in model.parameters() if p.requires_grad)
    kept.grad = torch.ones_like(kept)
    before = snapshot(model)
    report = verify_context_parallel(model, documents(), steps=3 if dtype == torch.float64 else 2)
    others = [p.grad for p in model.parameters() if p is not kept]
    grads_are_back = bool((kept.grad == 1).all()) and all(grad is None for grad in others)
    return Verified(report, before, snapshot(model), grads_are_back)


def snapshot(model: torch.nn.Module) -> dict:
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "dropout": [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)],
        "attention": model.config._attn_implementation,
        "patch": id(context_parallel_state(model)),
    }


def verified_in_all_dtypes(config: ContextParallelConfig, lora: bool) -> list[Verified]:
    return [verified(config, dtype, lora) for dtype in DTYPES]


@pytest.fixture(scope="module", params=[(RING2, True), (ULYSSES2, False)], ids=["ring-lora", "ulysses-full"])
def correct_runs(request, world2) -> tuple[bool, list[dict[torch.dtype, Verified]]]:
    """Whether there are adapters, and by rank what was found in each dtype."""
    config, lora = request.param
    by_rank = world2.run(verified_in_all_dtypes, config, lora)
    return lora, [dict(zip(DTYPES, found, strict=True)) for found in by_rank]


@pytest.mark.distributed
def test_passes_on_a_correct_run(correct_runs):
    lora, by_rank = correct_runs
    for found in by_rank:
        for dtype, largest in DTYPES.items():
            report = found[dtype].report
            assert report.passed and not report.cause, report.table()
            assert report.cp_size == 2 and report.dtype == str(dtype).removeprefix("torch.")
            assert report.num_targets_cp1 == report.num_targets_cpN == sum(LENGTHS) - len(LENGTHS)
            assert report.num_parameters == (28 if lora else 21)  # nothing was left out
            assert check(report, "logits").difference < largest
            # Hugging Face's loss is fp32, so against it the gradients of an fp64 model agree to fp32 only
            assert report.worst_gradient_relative_error < max(largest, 1e-5)
            assert len(set(report.step_losses_cp1)) > 1  # the steps did move the model
            assert json.loads(report.to_json())["passed"] is True
        exact = found[torch.float64].report
        assert len(exact.step_losses_cp1) == len(exact.step_losses_cpN) == 3
        assert check(exact, "our code, split: gradients").difference < 1e-12
        assert check(exact, "our code, split: gradients").allowed == 1e-10
        narrow = found[torch.bfloat16].report  # twice the untouched model's own error, which is not zero
        assert narrow.worst_gradient_relative_error > 1e-4 and check(narrow, "logits").allowed < 0.1


@pytest.mark.distributed
def test_puts_everything_back(correct_runs):
    lora, by_rank = correct_runs
    for found in by_rank:
        for dtype, (_, before, after, grads_are_back) in found.items():
            assert grads_are_back
            lora_b = [tensor for name, tensor in after["weights"].items() if "lora_B" in name]
            assert len(lora_b) == 14 * lora and not any(tensor.any() for tensor in lora_b)
            assert before["weights"].keys() == after["weights"].keys()
            assert all(torch.equal(tensor, after["weights"][name]) for name, tensor in before["weights"].items())
            assert {tensor.dtype for tensor in after["weights"].values()} == {dtype}
            assert all(before[key] == after[key] for key in ("training", "dropout", "attention", "patch"))
            assert 0 < sum(after["training"]) < len(after["training"])


@pytest.mark.distributed
def test_passes_on_four_ranks_of_qwen3(world4):
    assert all(report.passed for report in world4.run(verify, GRID, torch.float64, family="qwen3"))


def test_one_process_with_our_kernels_passes():
    """force=True at cp_size 1: our attention and loss against the untouched model, all parameters trained."""
    found = verify(ContextParallelConfig(force=True), lora=False)
    assert found.passed, found.table()
    assert found.num_parameters == 21


# Planted faults: every one fails, with its cause

CONTIGUOUS2 = dataclasses.replace(RING2, layout="contiguous")


def with_comm(ring_comm: str) -> ContextParallelConfig:
    return dataclasses.replace(RING2, ring_comm=ring_comm)


FAULTS = [
    # world, config, fault, full or LoRA, cause, words of the message
    (2, RING2, cases.loss_times_cp_size, True, "loss_scale", "cp_size times too large (by 2)"),
    (2, RING2, cases.loss_over_cp_size, False, "loss_scale", "1/cp_size times too large (by 0.5)"),
    (2, RING2, cases.loss_times_one_and_a_half, True, "loss_scale", "1.5 times the right ones"),
    (4, RING2, cases.loss_times_dp_size, True, "loss_scale", "cp_size or the data-parallel size times too large"),
    (4, RING2, cases.loss_times_world_size, True, "loss_scale", "the number of processes times too large (by 4)"),
    (2, RING2, cases.local_means, True, "loss_reduction", "unequal weights"),
    (2, RING2, cases.local_means, False, "loss_reduction", "unequal weights"),
    (2, CONTIGUOUS2, cases.local_positions, True, "positions", "RoPE"),
    (2, RING2, cases.one_wrong_position, True, "positions", "position_ids"),
    (2, RING2, cases.lost_target, True, "targets", "49 in the sample, 48 in the group"),
    (2, RING2, cases.wrong_label, True, "labels", "the losses of 1 tokens are not"),
    (2, ULYSSES2, cases.labels_shifted_after_sharding, True, "labels_at_edges", "shifted after sharding"),
    (2, RING2, cases.labels_shifted_after_sharding, True, "labels_at_edges", "shifted after sharding"),
    (2, RING2, cases.token_on_two_ranks, True, "layout", "2 of 53 tokens are not on exactly one process"),
    (2, RING2, cases.constant_ids, True, "blind", "nothing at all: the model does not see its input_ids"),
    (2, RING2, cases.wrong_token, True, "document", "document"),
    (2, CONTIGUOUS2, cases.one_document, True, "leak", "documents see each other"),
    (2, RING2, cases.not_causal, True, "future", "not causal"),
    (2, RING2, cases.wrong_scale, True, "kernel", "also in one process"),
    (2, CONTIGUOUS2, cases.lost_last_slot, True, "edges", "Logits of 1 of 53 tokens are wrong, all of them the last"),
    (2, RING2, cases.wrong_query_gradients, False, "attention_backward", "wrong from layer 1 down"),
    (2, ULYSSES2, cases.wrong_query_gradients, True, "attention_backward", "wrong from layer 1 down"),
    (2, RING2, cases.wrong_from_the_second_step_on, True, "steps", "The first step is right"),
    (2, ULYSSES2, cases.wrong_scale_in_the_group, True, "attention", "though one process with the same kernel"),
    (4, ContextParallelConfig(ulysses_degree=4), cases.replicas_not_summed, True, "kv_gradients", "replicated"),
    (4, RING2, cases.wrong_sum_on_one_rank, True, "ranks_apart", "drift apart"),
]


CUT = (64, 8, 8)  # the layout cuts the long document and keeps the short ones whole
MORE_FAULTS = [  # the same for other engines, documents and types: name, config, fault, dtype, document lengths
    ("cut", RING2, cases.dropped_remote_keys, torch.float32, CUT),
    ("p2p", RING2, cases.dropped_remote_gradients, torch.float32, LENGTHS),
    ("exchange", with_comm("exchange"), cases.dropped_remote_gradients, torch.float32, LENGTHS),
    ("allgather", with_comm("allgather"), cases.dropped_remote_gradients, torch.float32, LENGTHS),
    ("bf16 scale", CONTIGUOUS2, cases.loss_times_cp_size, torch.bfloat16, LENGTHS),
    ("bf16 positions", CONTIGUOUS2, cases.local_positions, torch.bfloat16, LENGTHS),
    ("bf16 gradients", CONTIGUOUS2, cases.dropped_remote_gradients, torch.bfloat16, LENGTHS),
]


def planted(faults: list[tuple]) -> list[VerifyReport]:
    """Only the fault that begins with the second step needs two."""
    late = cases.wrong_from_the_second_step_on
    return [verify(c, fault=f, lora=not is_full, steps=2 if f is late else 1) for c, f, is_full in faults]


def planted_elsewhere() -> list[VerifyReport]:
    return [
        verify(config, dtype, fault=fault, lora=fault is cases.dropped_remote_keys, lengths=lengths, steps=1)
        for _, config, fault, dtype, lengths in MORE_FAULTS
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_names_the_cause_of_a_planted_fault(request, size):
    chosen = [fault for fault in FAULTS if fault[0] == size]
    world = request.getfixturevalue(f"world{size}")
    first, *others = world.run(planted, [fault[1:4] for fault in chosen], timeout=100)
    assert others == [first] * (size - 1)  # all processes say the same, also where one of two groups has the fault
    for report, (_, _, fault, _, cause, words) in zip(first, chosen, strict=True):
        assert not report.passed, fault.__name__
        assert (report.cause, words in report.diagnosis) == (cause, True), f"{fault.__name__}:\n{report.table()}"
        assert str(report.verdict).startswith("FAILED: ") and report.diagnosis in report.table()
        if fault is cases.wrong_sum_on_one_rank:  # the numbers are those of the process that has it
            assert report.worst_gradient_relative_error == pytest.approx(0.01, rel=1e-3)
            assert report.update_drift == pytest.approx(0.01, rel=1e-3)


@pytest.mark.distributed
def test_names_causes_with_every_engine_and_in_bf16(world2):
    for reports in world2.run(planted_elsewhere, timeout=100):
        found = {name: report for (name, *_), report in zip(MORE_FAULTS, reports, strict=True)}
        # K/V of others matter to the long document only
        cut = found["cut"]
        assert cut.cause == "cut_documents" and "documents 0, exactly the ones" in cut.diagnosis, cut.table()
        for ring_comm in ("p2p", "exchange", "allgather"):
            lost = found[ring_comm]
            assert lost.cause == "kv_gradients" and "must come home" in lost.table(), lost.table()
            assert lost.worst_gradient_relative_error > 10 * 1e-4
            assert lost.loss_cpN == pytest.approx(lost.loss_cp1, rel=1e-6)  # only gradients can show it
            assert check(lost, "logits").ok and not check(lost, "worst of").ok
        narrow = [found[f"bf16 {name}"].cause for name in ("scale", "positions", "gradients")]
        assert narrow == ["loss_scale", "positions", "kv_gradients"]


# The report


def report(*checks: Check) -> VerifyReport:
    return VerifyReport(
        cp_size=2,
        ring_degree=2,
        ulysses_degree=1,
        world_size=2,
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
        loss_drift=0.0,
        worst_update_relative_error=0.0,
        worst_update_name="w",
        update_drift=0.0,
        checks=checks,
    )


@pytest.mark.parametrize(
    ("difference", "allowed", "passes"),
    [(0.0, 0.0, True), (1.0, 1.0, True), (1e-9, 0.0, False), (1.1, 1.0, False), (math.nan, 1.0, False)],
)
def test_every_check_can_fail_the_report(difference, allowed, passes):
    fine = Check("a", "1", "1", 0.0, 0.0)
    found = report(fine, Check("b", "", "", difference, allowed))
    assert found.passed is passes and found.verdict.status == (0 if passes else 1)
    assert ("1 of 2 comparisons (b)" in found.table()) is not passes


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
        assert "embed_tokens.weight differs most" in error.message


def nan_everywhere() -> VerifyReport:
    model = lora_model(RING2, torch.float32)
    model.get_input_embeddings().weight.data *= math.nan
    return verify_context_parallel(model, documents())


@pytest.mark.distributed
def test_refuses_a_loss_that_is_nan_in_every_process(world2):
    for error in world2.run(nan_everywhere, expect_error=True):
        assert error.type_name == "RuntimeError" and "same model" not in error.message
        assert "has the loss nan on this sample, in each of ranks [0, 1]" in error.message


def test_refuses_what_it_cannot_compare():
    forced = ContextParallelConfig(force=True)
    with pytest.raises(ValueError, match="needs a patched model"):
        verify_context_parallel(tiny_model(dtype=torch.float32), documents())
    frozen = apply_context_parallel(tiny_model(dtype=torch.float32), forced).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        verify_context_parallel(frozen, documents())
    whole = apply_context_parallel(tiny_model(dtype=torch.float32), forced)
    with pytest.raises(ValueError, match="None of the 2 documents has a target"):
        verify_context_parallel(whole, documents((1, 1)))
