"""What is in a checkpoint: its record, clean configs, whole tensors; and `save_state` of a custom loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_cp.config import ContextParallelConfig
from hf_cp.models.patch import apply_context_parallel
from hf_cp.tools.cli import main
from hf_cp.training import ContextParallelPlugin
from hf_cp.training.checkpoint import FILE_NAME, CheckpointRecord, check_states, harmless_differences
from hf_cp.training.deepspeed import make_universal
from tests.data.orders import make_order, position
from tests.training.loops import make_optimizer
from tests.training.tiny import REF, make_documents, make_model, make_trainer, relative

RING2, RING4 = ContextParallelConfig(ring_degree=2), ContextParallelConfig(ring_degree=4)


def make_record(**changes) -> CheckpointRecord:
    values = {
        "config": {"ring_degree": 2, "ulysses_degree": 2, "layout": "auto"},
        "world_size": 8,
        "dp_size": 2,
        "backend": "DEEPSPEED",
        "zero_stage": 2,
        "samples_per_step": 8,
        "position": position(make_order([1, 2, 3, 4])),
        "versions": {"torch": "2.0"},
    }
    return CheckpointRecord(**values | changes)


def test_record_survives_the_file(tmp_path):
    for record in (make_record(), make_record(position=None, zero_stage=None)):
        record.save(tmp_path / "new" / "folder")
        assert CheckpointRecord.load(tmp_path / "new" / "folder") == record
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [FILE_NAME]
    assert CheckpointRecord.load(tmp_path) is None


def test_record_of_an_earlier_version(tmp_path):
    """Its samples were called rows."""
    make_record().save(tmp_path)
    path = tmp_path / FILE_NAME
    earlier = path.read_text().replace("samples_per_", "rows_per_")
    assert '"rows_per_step": 8' in earlier and '"rows_per_epoch": 4' in earlier
    path.write_text(earlier)
    assert CheckpointRecord.load(tmp_path) == make_record()


def test_interrupted_write_leaves_the_old_record(tmp_path, monkeypatch):
    make_record().save(tmp_path)
    monkeypatch.setattr("hf_cp.training.checkpoint.os.replace", lambda *args: exec("raise OSError"))
    with pytest.raises(OSError):
        make_record(world_size=4).save(tmp_path)
    assert CheckpointRecord.load(tmp_path) == make_record()


def test_states_that_cannot_be_loaded():
    saved = make_record()
    check_states(saved, make_record(config={"ring_degree": 8, "ulysses_degree": 1}, dp_size=1), change="")
    with pytest.raises(ValueError, match=r"(?s)into 8 parts, this run has 4 processes.*saved: 8 .*here:  4 .*Do this"):
        check_states(saved, make_record(world_size=4, dp_size=1), change="Do this.")
    check_states(saved, make_record(world_size=4), change="", may_differ=True)
    for other in ({"zero_stage": 3}, {"zero_stage": 0}, {"zero_stage": None, "backend": "MULTI_GPU"}):
        with pytest.raises(ValueError, match=r"in another form \(ZeRO stage 2\)"):
            check_states(saved, make_record(**other), change="")
    whole = make_record(zero_stage=None, backend="MULTI_GPU")
    check_states(whole, replace(whole, world_size=1, backend="NO"), change="")  # whole on every process


def test_harmless_differences_are_named():
    now = make_record(
        config={"ring_degree": 4, "ulysses_degree": 2, "layout": "auto"}, dp_size=1, versions={"torch": "3"}
    )
    assert harmless_differences(make_record(), now) == ["ring_degree 2 -> 4", "dp_size 2 -> 1", "torch 2.0 -> 3"]
    assert harmless_differences(make_record(), make_record()) == []


def save_checkpoint(folder: str, lora: bool) -> dict[str, torch.Tensor]:
    """Two steps in which every rank trains; each rank says which files of the folder it has opened for writing."""
    model = make_model(lora=lora)
    trainer = make_trainer(
        model,
        ContextParallelConfig(ring_degree=dist.get_world_size()),
        make_documents([30, 21, 11, 17]),
        output_dir=folder,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    trainer.save_model()
    dist.barrier()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_checkpoint_of_the_trainer(world4, tmp_path, lora):
    """Four processes, one writer: every file once and whole, with a record, and nothing private in the configs."""
    parameters = world4.run(save_checkpoint, str(tmp_path), lora)[0]
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    config = "adapter_config.json" if lora else "config.json"
    for folder in (tmp_path, tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        names = {path.name for path in folder.iterdir() if path.is_file()}
        assert {weights, config, FILE_NAME} <= names
        assert not [name for name in names if ".tmp" in name]
        assert not [path.name for path in folder.glob("*.json") if "hf_cp_usp" in path.read_text()]
        record = CheckpointRecord.load(folder)
        assert (record.world_size, record.dp_size, record.samples_per_step) == (4, 1, 2)
        assert {"hf-cp", "torch", "transformers", "accelerate"} <= record.versions.keys()
        assert all(tensor.numel() > 0 for tensor in load_file(folder / weights).values())
    first, last = (CheckpointRecord.load(tmp_path / f"checkpoint-{step}").position for step in (1, 2))
    assert (first.epoch, first.samples_done) == (0, 2) and last.samples_done == 3  # 3 rows of 32 tokens
    rng = sorted(path.name for path in (tmp_path / "checkpoint-2").glob("rng_state*"))
    assert rng == [f"rng_state_{rank}.pth" for rank in range(4)]
    saved = load_file(tmp_path / weights)
    names = {n.replace(".default.", "."): p for n, p in parameters.items() if "lora_" in n} if lora else parameters
    assert saved.keys() == names.keys()
    assert all(torch.equal(saved[name], parameter) for name, parameter in names.items())
    if not lora:  # transformers alone can read it
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert plain.config._attn_implementation == "sdpa"
        assert all(torch.equal(plain.state_dict()[name], parameter) for name, parameter in parameters.items())


def save_untrained(folder: str) -> None:
    trainer = make_trainer(make_model(), ContextParallelConfig(), make_documents([30, 21]), output_dir=folder)
    trainer.save_model()


@pytest.mark.distributed
def test_a_model_is_saved_before_training(world2, tmp_path):
    """Whole packed rows: nothing has made the process groups yet, which takes all processes."""
    world2.run(save_untrained, str(tmp_path), timeout=30)
    assert CheckpointRecord.load(tmp_path).dp_size == 2


def loop(config: ContextParallelConfig, accumulation: int, folder: str, stop: int, resume: bool) -> dict:
    """Two epochs of 3 steps of a custom loop; saves after `stop` steps, or goes on from there."""
    plugin = ContextParallelPlugin(config)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, "adam", 1e-2))
    loader = plugin.data_loader(make_documents([16, 9, 14, 16, 11, 16, 5, 16, 12, 16, 13, 3, 16, 7]), max_tokens=16)
    step = 0
    if resume:
        accelerator.load_state(folder)
        step = stop
    for epoch in range(loader.epoch, 2):
        loader.set_epoch(epoch)
        for batches, num_items in plugin.accumulation_windows(loader):
            for batch in batches:
                accelerator.backward(plugin.loss(wrapped, batch, num_items=num_items))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop and not resume:
                accelerator.save_state(folder)
    return {"step": step, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


@pytest.mark.distributed
@pytest.mark.parametrize("stop", [2, 3, 5])  # inside an epoch, at its end, inside the second
def test_save_state_goes_on_in_another_layout(world2, world4, tmp_path, stop):
    """Saved on dp 2 x ring 2, 4 rows a step; resumed on ring 4, ring 2 and in one process."""
    whole = loop(REF, 4, str(tmp_path / "whole"), 0, False)
    assert whole["step"] == 6
    folder = str(tmp_path / "saved")
    world4.run(loop, RING2, 2, folder, stop, False)
    assert CheckpointRecord.load(folder).samples_per_step == 4
    start = make_model().state_dict()
    results = [loop(REF, 4, folder, stop, True), *world2.run(loop, RING2, 4, folder, stop, True)]
    for result in results + world4.run(loop, RING4, 4, folder, stop, True):
        assert result["step"] == 6
        for name, parameter in whole["parameters"].items():
            assert relative(result["parameters"][name] - start[name], parameter - start[name]) < 1e-10


@pytest.mark.distributed
def test_save_state_refuses_the_middle_of_a_step(world2, tmp_path):
    world2.run(loop, RING2, 4, str(tmp_path), 2, False)
    state = torch.load(tmp_path / "dl_state_dict.bin", weights_only=True)
    torch.save(state | {"next_step": 5}, tmp_path / "dl_state_dict.bin")
    with pytest.raises(ValueError, match="cannot be continued in this layout: 5 samples of epoch 0"):
        loop(REF, 2, str(tmp_path), 2, True)


def test_only_zero_checkpoints_become_universal(tmp_path, capsys):
    with pytest.raises(ValueError, match="is not a ZeRO checkpoint: it has no file 'latest'"):
        make_universal(tmp_path)
    assert main(["universal", str(tmp_path)]) == 2
    assert "REFUSED: " in (said := capsys.readouterr()).err and "is not a ZeRO checkpoint" in said.err and not said.out


def test_record_is_plain_json(tmp_path):
    """Anybody can read it."""
    make_record().save(tmp_path)
    data = json.loads((Path(tmp_path) / FILE_NAME).read_text())
    assert data["format"] == 1 and data["config"]["ring_degree"] == 2 and data["position"]["seed"] == 0
