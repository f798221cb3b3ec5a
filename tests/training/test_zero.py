"""Through DeepSpeed, in fp32, launched as a user does: the same updates for every ZeRO stage, and those of one
process.

Measured against one process in fp64: the error of two and of four processes must be that of one process in fp32.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.launch import free_port, run
from tests.training.fixed_loss import make_fixed_loss_model
from tests.training.loops import run_ddp_loop
from tests.training.tiny import REF, STOCK, Record, make_documents, make_model, make_trainer, relative, train
from tests.training.zero_cases import BALANCED, LENGTHS, largest_logit, mean_of_largest
from tests.training.zero_resume import CASES as ZERO_CASES
from tests.training.zero_resume import STOP as ZERO_STOP

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STAGES = (0, 1, 2, 3)


def launch(folder: Path, processes: int, *arguments_of_cases: str) -> list[dict]:
    """Runs zero_cases.py; only what it wrote counts, since DeepSpeed's processes do not always end with status 0."""
    arguments = [
        "--nproc_per_node",
        str(processes),
        "--master_port",
        str(free_port()),
        "-m",
        "tests.training.zero_cases",
    ]
    finished = run(["-m", "torch.distributed.run", *arguments, str(folder), *arguments_of_cases], timeout=400)
    files = [folder / f"rank{rank}.pt" for rank in range(processes)]
    assert all(file.exists() for file in files), finished.output[-6000:]
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deepspeed_extension) -> list[dict]:
    """Results of two processes that share every row; under `folder`, what they saved."""
    folder = tmp_path_factory.mktemp("zero2")
    return [result | {"folder": folder} for result in launch(folder, 2)]


@pytest.fixture(scope="module")
def two_pairs(tmp_path_factory, pair) -> list[dict]:
    """Results of four processes, that share rows in pairs; they also go on from what two processes have saved."""
    return launch(tmp_path_factory.mktemp("zero4"), 4, str(pair[0]["folder"]))


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


def check_run(result: dict, reference: Record, in_fp32: Record, *, lora: bool = False) -> None:
    assert result["losses"] == pytest.approx(reference.losses, rel=1e-5)
    assert result["grad_norms"] == pytest.approx(reference.grad_norms, rel=1e-4)
    error = update_error(result["parameters"], reference, lora)
    assert error < 1e-4
    assert error < 1.5 * update_error(in_fp32.parameters, reference, lora) + 1e-7


def test_stages_agree(pair):
    """Gradients 1 and 2 on two ranks, 3 targets, SGD with lr 1: w falls by exactly 1 in every stage."""
    for result in pair:
        for stage in STAGES:
            assert torch.equal(result["line"][stage], torch.ones(4)), stage


def test_plugin_loop(pair):
    reference = run_ddp_loop(REF, make_documents(LENGTHS), 2)
    in_fp32 = run_ddp_loop(REF, make_documents(LENGTHS), 2, model=make_model(dtype=torch.float32))
    for result in pair:
        for stage in STAGES:
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


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trainer_on_one_shared_row(pair, lora):
    for result in pair:
        run = result["trainer_lora" if lora else "trainer"]
        check_run(run, trained(lora), trained(lora, dtype=torch.float32), lora=lora)
        assert run["type"] == "DeepSpeedEngine"
        before, after = run["trainable"]
        assert before == after and len(before) > 10


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_trainer_in_other_stages(pair, stage):
    for result in pair:
        check_run(result["trainer_stages"][stage], trained(), trained(dtype=torch.float32))


def test_trainer_on_two_rows(two_pairs):
    """DeepSpeed counts 1 x 2 x 4 samples a step, we count 1 x 2 x 2 rows."""
    for result in two_pairs:
        check_run(result["trainer"], trained(accumulation=4), trained(accumulation=4, dtype=torch.float32))
        assert result["trainer"]["train_batch_size"] == 8
        assert result["trainer"]["rows_per_step"] == 4


def test_stage_3_gathers_in_step(two_pairs):
    """Every parameter is sharded, rows have other lengths on other ranks, one of them has no targets."""
    for result in two_pairs:
        check_run(result["sharded"], trained(), trained(dtype=torch.float32))
        assert result["sharded"]["eval_losses"] == two_pairs[0]["sharded"]["eval_losses"]


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
        assert run["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert run["grad_norms"] == pytest.approx(reference.grad_norms, rel=1e-4)
        assert error(run["parameters"]) < min(1e-4, 2 * error(in_fp32.parameters) + 1e-7)


def test_clipping(two_pairs):
    reference = trained(accumulation=4, max_grad_norm=0.1)
    assert min(reference.grad_norms) > 0.2
    for result in two_pairs:
        for case in ("clipped", "clipped_sharded", "clipped_stage0"):
            assert result[case]["grad_norms"] == pytest.approx(reference.grad_norms, rel=1e-4)
            # a clipped update is small against the parameters: fp32 rounds it
            assert update_error(result[case]["parameters"], reference) < 1e-3


def test_the_time_limit_of_an_own_loop_reaches_the_groups(pair):
    """InitProcessGroupKwargs, also where the processes are joined before the Accelerator is made."""
    assert [result["time_limit"] for result in pair] == [777.0] * 2


VARIANTS = [f"{name}{stage}" for name in ("plain", "offload", "no_reduce_scatter") for stage in (2, 3)]


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
        assert run["offloads"] == case.startswith("offload")
        assert run["reduce_scatters"] == (not case.startswith("no_reduce_scatter"))
        check_run(run, exact, in_fp32)
        assert abs(mean_residual(run["losses"], exact.losses)) < 3 * drift + 1e-7


def test_bf16(pair):
    """Against whole rows under the same ZeRO: at most twice the error, and losses that do not drift further."""
    exact, start = trained(max_steps=6), make_model().state_dict()

    def error(run: dict) -> float:
        distance = sum(float((run["parameters"][n] - p).square().sum()) for n, p in exact.parameters.items())
        return (distance / sum(float((p - start[n]).square().sum()) for n, p in exact.parameters.items())) ** 0.5

    for result in pair:
        shared, whole = (result["bf16"][name] for name in ("shared", "whole"))
        assert 1e-3 < error(whole) < 0.1  # it did compute in bf16
        assert error(shared) < 2 * error(whole)
        drift = abs(mean_residual(whole["losses"], exact.losses))
        assert abs(mean_residual(shared["losses"], exact.losses)) < 2 * drift + 1e-3


def test_numbers_of_the_run(pair):
    """Rows of 2, 2 and 1 in 3 steps, whatever the stage: all tokens, and bytes of fp32 rows."""
    for result in pair:
        logs = [case["run_numbers"] for case in (result["trainer"], *result["trainer_stages"].values())]
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
        assert result["trainer"]["eval_losses"] == pair[0]["trainer"]["eval_losses"]
        assert result["trainer"]["eval_losses"][0] == pytest.approx(first, rel=1e-6)
        assert result["trainer"]["eval_loss"] < first


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
        assert found["largest"] == pytest.approx(metrics["eval_largest"], rel=1e-5)
        assert found["predictions"].shape == (len(LENGTHS), max(LENGTHS))
        assert relative(torch.from_numpy(found["predictions"]), torch.from_numpy(predictions)) < 1e-5


def test_saved_adapter_is_complete_and_written_once(pair):
    """From ZeRO-2: all 28 tensors, with the values that were trained, and no file of the base model."""
    folder = pair[0]["folder"] / "lora"
    tensors = load_file(folder / "adapter_model.safetensors")
    parameters = pair[0]["trainer_lora"]["parameters"]
    assert len(tensors) == 28
    for name, tensor in tensors.items():
        assert torch.equal(
            tensor, parameters[name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")]
        )
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any(name.startswith(("model", "pytorch_model", "global_step", "rank")) for name in names)


def test_saved_model_is_complete(pair):
    tensors = load_file(pair[0]["folder"] / "full" / "model.safetensors")
    parameters = pair[0]["trainer"]["parameters"]
    assert all(torch.equal(tensors[name], parameter) for name, parameter in parameters.items())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("contradiction", ("ValueError", "train_batch_size=1", "this run has 2")),
        ("plugin_contradiction", ("ValueError", "train_batch_size=1", "this run has 2")),
        ("bf16_without_zero", ("ValueError", "zero_stage=0", "bf16")),
        ("evaluate_first", ("RuntimeError", "ZeRO stage 2", "eval_on_start=True")),
        ("silently_ddp", ("RuntimeError", "MULTI_CPU", "ACCELERATE_USE_CPU=true switches DeepSpeed off")),
        ("trainer_silently_ddp", ("RuntimeError", "MULTI_CPU", "ACCELERATE_USE_CPU=true switches DeepSpeed off")),
    ],
)
def test_refusals(pair, case, words):
    for result in pair:
        message = result["refusals"][case]
        assert all(word in message for word in words), message


def same_end(run: dict, whole: dict, lora: bool) -> None:
    """The steps after the stop, the learning rates of all steps, and the weights, of which LoRA trains a part."""
    assert run["losses"][ZERO_STOP:] == pytest.approx(whole["losses"][ZERO_STOP:], rel=1e-5)
    assert run["rates"] == pytest.approx(whole["rates"], rel=1e-6)
    start = make_model(lora=lora, dtype=torch.float32).state_dict()
    for name, parameter in whole["parameters"].items():
        if not lora or "lora_" in name:
            assert relative(run["parameters"][name] - start[name], parameter - start[name]) < 1e-4, name


def test_zero_goes_on_with_another_cp_size(pair):
    """Two processes shared a row, then have one each; ZeRO's parts stay as they are."""
    for result in pair:
        same_end(result["resume"]["own_rows"], result["resume"]["whole"]["2"], lora=False)


@pytest.mark.parametrize("case", ZERO_CASES)
def test_zero_goes_on_with_more_processes(pair, two_pairs, case):
    """Two processes, then four, through the universal format; weight decay differs between the parameter groups."""
    for result in two_pairs:
        run = result["resume"][case]
        same_end(run, pair[0]["resume"]["whole"][case], lora=ZERO_CASES[case][1])
        assert run["world_size"] == 4  # what it saves is of four again


def test_zero_of_another_world_is_refused_by_name(two_pairs):
    for result in two_pairs:
        for case in result["resume"].values():
            words = ("ValueError: ZeRO has cut", "into 2 parts", "has 4 processes", "hf-cp universal")
            assert all(word in case["refused"] for word in words), case["refused"]
            assert "load_best_model_at_end=True does not work" in case["best"], case["best"]


def test_stock_model_in_fp32_agrees():
    """The reference of this file against the untouched model."""
    stock = train(STOCK, make_documents(LENGTHS), gradient_accumulation_steps=2)
    assert trained().losses == pytest.approx(stock.losses, rel=1e-6)
