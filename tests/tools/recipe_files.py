"""A small recipe in a folder of its own: model, documents and the three files, which a test may change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_cp.tools.doctor import command, data, model, settings
from hf_cp.tools.doctor.check import Result, examine
from hf_cp.tools.doctor.subject import Subject, as_one_process
from tests.models.tiny import tiny_model

LENGTHS = (70, 20, 9, 100, 41, 33, 8, 64)
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": False},
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": True,
}
DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "communication_data_type": "fp32",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
TRAIN = {
    "max_tokens": 128,
    "ring_degree": 2,
    "expected_processes": 2,
    "expected_zero_stage": 2,
    "output_dir": "out",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": "2e-5",
    "bf16": True,
    "use_cpu": True,
    "save_strategy": "no",
    "seed": 3,
    "report_to": "none",
}


def write_model(folder: Path) -> None:
    """A tiny Llama and, beside it, documents of its vocabulary."""
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    lines = [json.dumps({"input_ids": x, "labels": [-100] + x[1:]}) for x in ids]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def write_recipe(
    folder: Path,
    model_folder: Path,
    *,
    accelerate: Mapping[str, Any] | None = None,
    deepspeed: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> Path:
    """The recipe with these changes; a value of `None` takes the key out."""
    folder.mkdir(exist_ok=True)
    named = {
        "deepspeed_config": {**ACCELERATE["deepspeed_config"], "deepspeed_config_file": str(folder / "deepspeed.json")}
    }
    data = {"model_name_or_path": str(model_folder), "dataset": str(model_folder / "train.jsonl")}
    files = {
        "accelerate.yaml": yaml.safe_dump(_changed(ACCELERATE | named, accelerate)),
        "deepspeed.json": json.dumps(_changed(DEEPSPEED, deepspeed)),
        "train.yaml": yaml.safe_dump(_changed(TRAIN | data, train)),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in {**values, **(changes or {})}.items() if value is not None}


def parse(*options: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(option) for option in options])


def check(name: str, *options: object) -> Result:
    """The result of one check of `hf-cp doctor options`."""
    subject = Subject(parse(*options))
    chosen = [check for check in (*model.CHECKS, *settings.CHECKS, *data.CHECKS) if check.name == name]
    with as_one_process():
        (found,) = examine(chosen, subject)
    return found
