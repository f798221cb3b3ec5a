"""What DeepSpeed runs leave behind: models that are complete, and checkpoints from which other processes go on."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_cp.training.deepspeed import ZERO_STAGES
from tests.models.test_generate import PROMPTS
from tests.training.tiny import make_model, relative
from tests.training.zero_cases import TrainerRun
from tests.training.zero_resume import CASES, SHRUNK, STOP, STOP_AGAIN

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("case", ["lora", "lora3"])
def test_saved_adapter_is_complete_and_written_once(pair, case):
    """From ZeRO 2 and 3: all 28 tensors, with the values that were trained, and no file of the base model."""
    folder, run = pair[0]["folder"] / case, pair[0][f"trainer_{case}"]
    tensors = load_file(folder / "adapter_model.safetensors")
    parameters = run.parameters
    assert len(tensors) == 28
    for name, tensor in tensors.items():
        assert torch.equal(
            tensor, parameters[name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")]
        )
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any(name.startswith(("model", "pytorch_model", "global_step", "rank")) for name in names)
    from peft import PeftModel

    check_logits(PeftModel.from_pretrained(make_model(dtype=torch.float32), folder), run)


def check_logits(loaded: torch.nn.Module, run: TrainerRun) -> None:
    """Those of the model that was trained and saved."""
    with torch.no_grad():
        assert relative(loaded.eval()(input_ids=PROMPTS).logits, run.logits) < 1e-6


@pytest.mark.parametrize("stage", ZERO_STAGES)
def test_saved_model_is_complete(pair, stage):
    """Written by one process, also where each has only a part of every weight."""
    folder = pair[0]["folder"] / ("full" if stage == 2 else f"full{stage}")
    run = pair[0]["trainer"] if stage == 2 else pair[0]["trainer_stages"][stage]
    tensors, parameters = load_file(folder / "model.safetensors"), run.parameters
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in parameters.items())
    check_logits(AutoModelForCausalLM.from_pretrained(folder), run)


def same_end(run: dict, whole: dict, lora: bool, stop: int = STOP) -> None:
    """The steps after the stop, the learning rates of all steps, and the weights, of which LoRA trains a part."""
    assert not any(run["losses"][:stop]) and all(run["losses"][stop:])  # it did not begin anew
    assert run["losses"][stop:] == pytest.approx(whole["losses"][stop:], rel=1e-5)
    assert run["rates"] == pytest.approx(whole["rates"], rel=1e-6)
    start = make_model(lora=lora, dtype=torch.float32).state_dict()
    for name, parameter in whole["parameters"].items():
        if not lora or "lora_" in name:
            assert relative(run["parameters"][name] - start[name], parameter - start[name]) < 1e-4, name


def test_zero_goes_on_with_another_cp_size(pair):
    """Two processes shared a row, then have one each; ZeRO's parts stay as they are."""
    for result in pair:
        same_end(result["resume"]["own_rows"], result["resume"]["whole"]["2"], lora=False)


@pytest.mark.parametrize("case", CASES)
def test_zero_goes_on_with_more_processes(pair, two_pairs, case):
    """Two processes, then four, through the universal format; weight decay differs between the parameter groups."""
    for result in two_pairs:
        run = result["resume"][case]
        same_end(run, pair[0]["resume"]["whole"][case], lora=CASES[case][1])
        assert run["world_size"] == 4  # what it saves is of four again


@pytest.mark.parametrize("case", SHRUNK)
def test_zero_goes_on_with_fewer_processes(pair, worlds, case):
    """With two processes again, after four: from a checkpoint of a run that went on itself."""
    for result in worlds["pair_again"]:
        same_end(result[case], pair[0]["resume"]["whole"][case], lora=CASES[case][1], stop=STOP_AGAIN)


def test_zero_of_another_world_is_refused_by_name(two_pairs):
    words = ("ValueError: ZeRO has cut", "into 2 parts", "has 4 processes")
    for result in two_pairs:
        for case in CASES:
            run = result["resume"][case]
            assert all(word in run["refused"] for word in (*words, "hf-cp universal")), run["refused"]
            assert "load_best_model_at_end=True does not work" in run["best"], run["best"]
        for message in result["resume"]["own_loops"].values():
            assert all(word in message for word in (*words, "Resume with 2 processes")), message


@pytest.mark.parametrize("stage", [2, 3])
def test_own_loop_goes_on(pair, stage):
    """save_state after two of three steps, load_state in new objects: bit for bit."""
    for result in pair:
        whole, resumed = (result["own_loops"][stage][name] for name in ("whole", "resumed"))
        assert len(whole["losses"]) == 3 and resumed["losses"] == whole["losses"][STOP:]
        assert all(torch.equal(resumed["parameters"][name], p) for name, p in whole["parameters"].items())
    weights = pair[0]["own_loops"][stage]["whole"]["weights"]
    assert all(torch.equal(weights[name], p) for name, p in pair[0]["own_loops"][stage]["whole"]["parameters"].items())
