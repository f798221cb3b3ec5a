"""benchmarks/training.py: every way to train really is what it says, and the report follows from the numbers."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace

import pytest
import training
from training_step import Case, Measured, Sizes, measured_step

CASE, SIZES = Case("full", 512, 1), Sizes(layers=1, heads=(4, 2), vocabulary=512)
EXACT = 1e-4  # fp32 against fp64


@pytest.mark.distributed
def test_two_processes_train_the_same_and_keep_half(world1, world2):
    (one,) = world1.run(measured_step, "one process", CASE, SIZES, True)
    for name in ("ring 2", "ring 2, FSDP2", "PyTorch context parallel, FSDP2"):
        for measured in world2.run(measured_step, name, CASE, SIZES, True):
            assert measured.error < EXACT and abs(measured.norm - 1) < EXACT, name
            assert measured.seconds > 0 and measured.peak > 0
            if name == "ring 2":
                assert 0.4 < measured.kept / one.kept < 0.6
    assert one.error < EXACT and abs(one.norm - 1) < EXACT


@pytest.mark.distributed
def test_lora_keeps_half(world1, world2):
    case = CASE._replace(method="lora")
    (one,) = world1.run(measured_step, "one process", case, SIZES, False)
    for measured in world2.run(measured_step, "ring 2", case, SIZES, False):
        assert 0.4 < measured.kept / one.kept < 0.6


def test_cases_from_the_command_line():
    assert training.case("lora:8192:3") == Case("lora", 8192, 3)
    for wrong in ("lora", "lora:8192", "lora:x:1", "lora:8192:0", "qlora:8192:1"):
        with pytest.raises(ArgumentTypeError, match="TOKENS:ROUNDS"):
            training.case(wrong)


def test_the_report_follows_from_the_numbers(tmp_path, monkeypatch):
    found = {"one process": Measured(4.0, 800, 2000, 0.0, 1.0), "ring 2": Measured(2.0, 400, 1500, 3e-6, 1.0)}
    monkeypatch.setattr(training, "measure_run", lambda name, *_: found.get(name, found["ring 2"]))
    tables = [training.measure_case(Case("full", 2048, 2), Sizes(2), ("one process", "ring 2"))]
    assert "| full | 2,048 | 4.0 s | 2.0 s | 0.500 [0.500, 0.500] | 0.50 (0.00 GiB) | 0.75" in training.case_table(
        tables
    )
    found["untouched model"] = found["one process"]
    found["DeepSpeed Ulysses, ZeRO-2"] = Measured(3.0, 400, 1000, 1.0, 2.0)
    peers = training.measure_case(CASE, SIZES, training.PEER_RUNS, with_error=True)
    assert "| DeepSpeed Ulysses, ZeRO-2 | 0.750 | 1.0e+00 | 2.000000 |" in training.peer_table(peers)
    output = tmp_path / "training"
    training.save(tables, peers, Namespace(output=output, peer_layers=1, peer_tokens=512))
    assert json.loads(output.with_suffix(".json").read_text())["peers"]["norm"]["DeepSpeed Ulysses, ZeRO-2"] == 2.0
    assert output.with_suffix(".png").stat().st_size > 1000
