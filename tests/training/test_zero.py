"""Through DeepSpeed, in fp32: the same updates for every ZeRO stage, and those of one process.

Measured against one process in fp64: the error of two and of four processes must be that of one process in fp32.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hf_cp.training.deepspeed import ZERO_STAGES
from tests.models.test_generate import generate
from tests.training.fixed_loss import make_fixed_loss_model
from tests.training.loops import run_ddp_loop
from tests.training.tiny import REF, STOCK, Record, make_documents, make_model, make_trainer, relative, train
from tests.training.zero_cases import BALANCED, LENGTHS, TrainerRun, largest_logit, mean_of_largest

BF16_ROUNDING = 2**-8  # relative distance of neighbouring numbers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@cache
def trained(
    lora: bool = False,
    accumulation: int = 2,
    dtype: torch.dtype = torch.float64,
    max_grad_norm: float = 0.0,
    max_steps: int = 3,
):
    return train(
        REF,
        make_documents(LENGTHS),
        lora=lora,
        gradient_accumulation_steps=accumulation,
        dtype=dtype,
        max_grad_norm=max_grad_norm,
        max_steps=max_steps,
    )


def update_error(parameters: dict[str, torch.Tensor], reference: Record, lora: bool = False) -> float:
    start = make_model(lora=lora).state_dict()
    return max(
        relative(parameters[name].double() - start[name], reference.parameters[name] - start[name])
        for name in reference.gradients[0]
    )


def check_run(result: TrainerRun, reference: Record, in_fp32: Record, *, lora: bool = False) -> None:
    for losses in (result.losses, result.logged):
        assert losses == pytest.approx(reference.losses, rel=1e-5)
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
    error = update_error(result.parameters, reference, lora)
    assert error < 1e-4
    assert error < 1.5 * update_error(in_fp32.parameters, reference, lora) + 1e-7


def test_stages_agree(pair):
    """Gradients 1 and 2 on two ranks, 3 targets, SGD with lr 1: w falls by exactly 1 in every stage."""
    for result in pair:
        for stage in ZERO_STAGES:
            assert torch.equal(result["line"][stage], torch.ones(4)), stage


def test_plugin_loop(pair):
    reference = run_ddp_loop(REF, make_documents(LENGTHS), 2)
    in_fp32 = run_ddp_loop(REF, make_documents(LENGTHS), 2, model=make_model(dtype=torch.float32))
    for result in pair:
        for stage in ZERO_STAGES:
            record = result["plugin"][stage]
            assert record.losses == pytest.approx(reference.losses, rel=1e-5)
            error = update_error(record.parameters, reference)
            assert error < 1.5 * update_error(in_fp32.parameters, reference) + 1e-7
            assert error < 1e-4


def test_unequal_micro_steps(pair):
    """The step is that of one row with both documents: a mean of 2.5 over 8 targets."""
    start = make_fixed_loss_model(torch.float32).lm_head.weight
    for result in pair:
        for loss, weight in result["unequal"].values():
            assert loss == pytest.approx(2.5, rel=1e-6)
            assert relative(weight - start, result["unequal"][2][1] - start) < 1e-5


def test_parameters_stay_equal(pair):
    """After three Adam steps, bit for bit, in stages 0 and 2."""
    for stage in (0, 2):
        first, second = (result["adam"][stage].parameters for result in pair)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", ["trainer", "trainer_lora", "trainer_lora3"])
def test_trainer_on_one_shared_row(pair, case):
    lora = "lora" in case
    for result in pair:
        run = result[case]
        check_run(run, trained(lora), trained(lora, dtype=torch.float32), lora=lora)
        assert run.engine == "DeepSpeedEngine"
        before, after = run.trainable
        assert before == after and len(before) > 10


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_trainer_in_other_stages(pair, stage):
    for result in pair:
        check_run(result["trainer_stages"][stage], trained(), trained(dtype=torch.float32))


def test_trainer_on_two_rows(two_pairs):
    """DeepSpeed counts 1 x 2 x 4 samples a step, we count 1 x 2 x 2 rows."""
    for result in two_pairs:
        check_run(result["trainer"], trained(accumulation=4), trained(accumulation=4, dtype=torch.float32))
        assert result["trainer"].train_batch_size == 8
        assert result["trainer"].samples_per_step == 4


def test_stage_3_gathers_in_step(two_pairs):
    """Every parameter is sharded, rows have other lengths on other ranks, one of them has no targets."""
    for result in two_pairs:
        check_run(result["sharded"], trained(), trained(dtype=torch.float32))
        assert result["sharded"].eval_losses == two_pairs[0]["sharded"].eval_losses


def test_stage_3_shards_over_all_processes(pair, two_pairs):
    """Over dp x cp, and where every process has rows of its own (cp 1)."""
    runs = [(2, result["bf16"][3][name]) for result in pair for name in ("shared", "whole")]
    for processes, run in [*runs, *((4, result["sharded"]) for result in two_pairs)]:
        assert len(run.shards) == len(run.parameters)
        assert all(held == -(-whole // processes) for whole, held in run.shards)


def test_stage_3_generates(pair, two_pairs):
    """In the middle of training, with the weights of that time; how training goes on is tested above."""
    first = generate(make_model(dtype=torch.float32))
    for run in [result["sharded"] for result in two_pairs] + [result["trainer_lora3"] for result in pair]:
        copy = make_model(lora="lora_A" in str(list(run.parameters)), dtype=torch.float32)
        copy.load_state_dict(run.spoken["parameters"])
        expected = generate(copy)
        assert torch.equal(run.spoken["text"], expected) and not torch.equal(first, expected)


def test_checkpointing_and_chunked_mlp_in_stage_3(two_pairs):
    """Recomputed layers and chunks gather their parameters again, equally often on all ranks."""
    for result in two_pairs:
        check_run(result["sharded_saving"], trained(), trained(dtype=torch.float32))


def test_experts_in_stage_3(two_pairs):
    """Fused expert weights are gathered in step, whichever experts a rank's tokens choose; with balanced routers."""
    settings = {"family": "mixtral", "model_changes": BALANCED, "gradient_accumulation_steps": 2}
    reference, in_fp32 = (
        train(REF, make_documents(LENGTHS), dtype=t, **settings) for t in (torch.float64, torch.float32)
    )
    start = make_model("mixtral", **BALANCED).state_dict()

    def error(parameters: dict[str, torch.Tensor]) -> float:
        updates = {name: p - start[name] for name, p in reference.parameters.items()}
        return max(relative(parameters[name].double() - start[name], update) for name, update in updates.items())

    for result in two_pairs:
        run = result["experts"]
        assert run.losses == pytest.approx(reference.losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
        assert error(run.parameters) < min(1e-4, 2 * error(in_fp32.parameters) + 1e-7)


def test_clipping(two_pairs):
    reference = trained(accumulation=4, max_grad_norm=0.1)
    assert min(reference.grad_norms) > 0.2
    for result in two_pairs:
        for case in ("clipped", "clipped_sharded", "clipped_stage0"):
            assert result[case].grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
            # a clipped update is small against the parameters: fp32 rounds it
            assert update_error(result[case].parameters, reference) < 1e-3


def test_the_time_limit_of_an_own_loop_reaches_the_groups(pair):
    """InitProcessGroupKwargs, also where the processes are joined before the Accelerator is made."""
    assert [result["time_limit"] for result in pair] == [777.0] * 2


VARIANTS = [f"{name}{stage}" for name in ("offload", "no_reduce_scatter") for stage in (2, 3)]


def mean_residual(losses: list[float], exact: list[float]) -> float:
    """Signed: rounding goes both ways, a wrong scale drifts to one side."""
    return sum(a / b - 1 for a, b in zip(losses, exact, strict=True)) / len(exact)


@pytest.mark.parametrize("case", VARIANTS)
def test_same_trajectory(pair, case):
    """Six steps: optimizer states in host memory, buckets that are all-reduced whole."""
    exact, in_fp32 = trained(max_steps=6), trained(dtype=torch.float32, max_steps=6)
    drift = abs(mean_residual(in_fp32.losses, exact.losses))
    for result in pair:
        run = result["variants"][case]
        assert run.offloads == case.startswith("offload")
        assert run.reduce_scatters == case.startswith("offload")
        check_run(run, exact, in_fp32)
        assert abs(mean_residual(run.losses, exact.losses)) < 3 * drift + 1e-7


def distance(run: dict, exact: Record, part: str = "") -> float:
    """Of all updates together, or of those whose names hold `part`, over the length of the exact ones."""
    start = make_model().state_dict()
    exact_updates = {name: p - start[name] for name, p in exact.parameters.items() if part in name}
    errors = [run.parameters[name] - start[name] - update for name, update in exact_updates.items()]
    norms = [torch.nn.utils.get_total_norm(list(tensors)) for tensors in (errors, exact_updates.values())]
    return float(norms[0] / norms[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16(pair, stage):
    """Against whole rows under the same ZeRO: at most twice the error, and losses that do not drift further."""
    exact = trained(max_steps=6)
    for result in pair:
        shared, whole = (result["bf16"][stage][name] for name in ("shared", "whole"))
        assert 1e-3 < distance(whole, exact) < 0.1  # it did compute in bf16
        assert distance(shared, exact) < 2 * distance(whole, exact)
        drift = abs(mean_residual(whole.losses, exact.losses))
        assert abs(mean_residual(shared.losses, exact.losses)) < 2 * drift + 1e-3


@pytest.mark.parametrize("part", ["lm_head", "mlp"])
def test_bf16_in_many_chunks(pair, part):
    """The gradients of weights that are used once per chunk: summed in bf16 they would be off by several roundings."""
    start = make_model().state_dict()
    for result in pair:
        many, one = (result["bf16_chunks"][name].parameters for name in ("many", "one"))
        for name in [name for name in one if part in name]:
            error, update = many[name] - one[name], one[name] - start[name]
            assert error.norm() < BF16_ROUNDING * update.norm(), name


def test_numbers_of_the_run(pair):
    """Rows of 2, 2 and 1 in 3 steps, whatever the stage: all tokens, and bytes of fp32 rows."""
    for result in pair:
        logs = [case.run_numbers for case in (result["trainer"], *result["trainer_stages"].values())]
        for log in logs:
            assert sum(entry["cp/tokens"] for entry in log) == sum(LENGTHS)
            for name in ("cp/tokens", "cp/targets", "cp/ring_bytes", "cp/work_max_over_mean"):
                assert [entry[name] for entry in log] == [entry[name] for entry in logs[0]]
            assert all(entry["cp/ring_bytes"] > 0 and entry["cp/tokens_per_second"] > 0 for entry in log)
            assert all(entry["cp/slowest_rank"] in (0, 1) for entry in log)


def test_evaluation_inside_training(pair):
    """eval_on_start measures the first weights, evaluate() after training the last ones; equal on both ranks."""
    documents = make_documents(LENGTHS)
    trainer = make_trainer(make_model(), REF, documents, eval_dataset=documents[:5])
    first = trainer.evaluate()["eval_loss"]
    for result in pair:
        assert result["trainer"].eval_losses == pair[0]["trainer"].eval_losses
        assert result["trainer"].eval_losses[0] == pytest.approx(first, rel=1e-6)
        assert result["trainer"].eval_loss < first


def test_metrics_and_predictions_inside_training(pair, two_pairs):
    """Of every stage, also where all parameters are sharded and a pair has run out of rows."""
    documents = make_documents(LENGTHS)
    settings = {"eval_dataset": documents[:5], "gradient_accumulation_steps": 2}
    trainer = make_trainer(make_model(), REF, documents, **settings)
    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = largest_logit, mean_of_largest
    trainer.train()
    metrics, predictions = trainer.evaluate(), trainer.predict(documents).predictions
    runs = [found for result in pair for found in (result["trainer"], *result["trainer_stages"].values())]
    for found in runs + [result["sharded"] for result in two_pairs]:
        assert found.largest == pytest.approx(metrics["eval_largest"], rel=1e-5)
        assert found.predictions.shape == (len(LENGTHS), max(LENGTHS))
        assert relative(torch.from_numpy(found.predictions), torch.from_numpy(predictions)) < 1e-5


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("contradiction", ("ValueError", "train_batch_size=1", "this run has 2")),
        ("plugin_contradiction", ("ValueError", "train_batch_size=1", "this run has 2")),
        ("bf16_without_zero", ("ValueError", "zero_stage=0", "bf16")),
        ("evaluate_first", ("RuntimeError", "ZeRO stage 2", "eval_on_start=True")),
        ("silently_ddp", ("RuntimeError", "MULTI_CPU", "ACCELERATE_USE_CPU=true switches DeepSpeed off")),
        ("trainer_silently_ddp", ("RuntimeError", "MULTI_CPU", "ACCELERATE_USE_CPU=true switches DeepSpeed off")),
        ("weights_that_are_not_gathered", ("ValueError", "gather_16bit_weights_on_model_save=False", "to true")),
    ],
)
def test_refusals(pair, case, words):
    for result in pair:
        message = result["refusals"][case]
        assert all(word in message for word in words), message


def test_stock_model_in_fp32_agrees():
    """The reference of this file against the untouched model."""
    stock = train(STOCK, make_documents(LENGTHS), gradient_accumulation_steps=2)
    assert trained().losses == pytest.approx(stock.losses, rel=1e-6)
