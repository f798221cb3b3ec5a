"""A runnable folder from a plan: how processes start, what DeepSpeed does, what is trained.

The recipes that come with the package have the same files with the same keys (the tests compare them). Invariant:
every path in a folder counts from the folder where the run starts, and nothing outside the arguments decides what is
written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_cp.planning.memory import KEEPS_ATTENTION, Training
from hf_cp.planning.model_names import loadable_name
from hf_cp.planning.search import Candidate, Plan
from hf_cp.recipes.collection import ACCELERATE, DEEPSPEED, TRAINING, launch_line, write_files
from hf_cp.recipes.settings import TrainSettings

__all__ = ["recipe_files", "write_planned"]

DATASET = "data/train.jsonl"  # where none is named

# Comments of keys that are not ours alone; those of `TrainSettings` have their own help.
COMMENTS = {
    "ulysses_degree": "ring_degree x ulysses_degree processes share one sample",
    "keep_attention": "true: checkpointing keeps attention's output; false: it is computed and sent again",
    "mlp_chunk_tokens": "tokens in a feed-forward layer at the same time",
    "timeout_seconds": "of every collective of hf_cp",
    "ddp_timeout": "of every other collective",
}


def write_planned(folder: Path, plan: Plan, *, model: str, command: str, data: str | None = None) -> str:
    """What `hf-cp plan --write` does: the recipe of the plan's first choice; returns the line that starts it.

    Args:
        folder (`Path`): new, or without files of these names. Runs start in the current folder.
        plan (`Plan`): with a recommended candidate.
        model (`str`): as it was named to the command; train.yaml gets the hub name of a known model, the folder of a
            config.json.
        command (`str`): the `hf-cp plan` command.
        data (`str`, *optional*): the documents.

    Raises:
        ValueError: nothing in the plan fits.
        FileExistsError: a file is there already.
    """
    cluster = plan.cluster
    title = f"{model}, samples of {plan.seq_len:,} tokens, on {cluster.num_gpus} x {cluster.device.name}"
    names = {"model_name_or_path": loadable_name(model), "dataset": data or DATASET}
    write_files(folder, recipe_files(folder, plan, title=title, command=command, names=names))
    return launch_line(folder, cluster.num_nodes)


def recipe_files(folder: Path, plan: Plan, *, title: str, command: str, names: Mapping[str, str]) -> dict[str, str]:
    """Name and text of every file of a recipe for the plan's first choice.

    Args:
        folder (`Path`): of the recipe, from the folder where runs start.
        plan (`Plan`): with a recommended candidate.
        title (`str`): first line of train.yaml.
        command (`str`): the `hf-cp plan` command that gives the plan.
        names (`Mapping[str, str]`): `model_name_or_path` and `dataset`.

    Raises:
        ValueError: nothing in the plan fits.
    """
    if plan.recommended is None:
        raise ValueError(
            "Nothing in the plan fits, so there is nothing to write.\n  Use more GPUs, or shorter samples."
        )
    head = (
        f"# {title}\n"
        f"# The first choice of: {command}\n"
        "# Any key is an option of `hf-cp train` too: --max_steps 20. How it is launched: `hf-cp recipes show`.\n"
    )
    settings = _sections(folder.name, plan, plan.recommended, names)
    return {
        ACCELERATE: accelerate_file(folder, plan),
        DEEPSPEED: deepspeed_file(plan),
        TRAINING: head + "\n".join(_section(title, keys) for title, keys in settings.items()),
    }


# How the processes start


def accelerate_file(folder: Path, plan: Plan) -> str:
    """For `accelerate launch --config_file`."""
    cluster = plan.cluster
    nodes = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs"
    if cluster.num_nodes == 1:
        nodes = f"{cluster.num_gpus} GPUs of one node"
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": (folder / DEEPSPEED).as_posix(),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.training.zero_stage == 3,
        },
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_gpus,
        "use_cpu": False,
    }
    head = f"# How the processes start: {nodes}, with DeepSpeed. Paths count from the folder where the run starts.\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def deepspeed_file(plan: Plan) -> str:
    """ZeRO; gradients of the ranks of a sample are parts of one gradient, so they are added up in fp32."""
    zero: dict[str, Any] = {"stage": plan.training.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if plan.training.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if plan.training.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings = {
        "zero_optimization": zero,
        "communication_data_type": "fp32",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return json.dumps(settings, indent=2) + "\n"


# What is trained


def _sections(name: str, plan: Plan, choice: Candidate, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The keys of train.yaml under their headings."""
    config, training = choice.config, plan.training
    lora = {"lora_alpha": 2 * training.lora_r, "lora_dropout": 0.0} if training.lora_r else {}
    return {
        "model and documents": {
            **names,
            # DeepSpeed keeps fp32 copies of what is trained by itself.
            "model_dtype": "float32" if training.itemsize == 4 else "bfloat16",
            "max_tokens": plan.seq_len,
            "overflow": "error",
        },
        "context parallelism": {
            "ring_degree": config.ring_degree,
            "ulysses_degree": config.ulysses_degree,
            **({"ring_comm": config.ring_comm} if config.ring_degree > 1 else {}),
            "expected_processes": plan.cluster.num_gpus,
            "expected_zero_stage": training.zero_stage,
            "loss_chunk_tokens": training.loss_chunk_tokens,
            **({"mlp_chunk_tokens": training.mlp_chunk_tokens} if training.mlp_chunk_tokens else {}),
            "keep_attention": training.checkpointing in KEEPS_ATTENTION,
            "timeout_seconds": 1800,
        },
        "what is trained": {"lora_r": training.lora_r} | lora,
        "training (transformers.TrainingArguments)": _trainer_keys(name, training),
    }


def _trainer_keys(name: str, training: Training) -> dict[str, Any]:
    """One sample a process and micro-step; what the plan does not decide is a usual value to start from."""
    return {
        "output_dir": f"outputs/{name}",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 2.0e-4 if training.lora_r else 1.0e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
        "bf16": training.itemsize == 2,
        **_checkpointing(training.checkpointing),
        "seed": 0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 200,
        "ddp_timeout": 1800,
        "report_to": "none",
    }


def _checkpointing(kind: str) -> dict[str, Any]:
    """`keep_attention` and "full" differ in `ContextParallelConfig`."""
    if kind == "none":
        return {}
    options = {"use_reentrant": False} | ({"offload": True} if kind == "offload" else {})
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}


def _section(title: str, keys: Mapping[str, Any]) -> str:
    """In YAML's short form; a key that has a comment has it behind its value."""
    comments, lines = _comments(), [f"# -- {title}"]
    for key, value in keys.items():
        dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
        line = f"{key}: {dumped.removesuffix('...' + chr(10)).strip()}"
        lines.append(f"{line:<34}  # {comments[key]}" if key in comments else line)
    return "\n".join(lines) + "\n"


def _comments() -> dict[str, str]:
    """What is said of a key: the help of ours, in the middle of a line."""
    helps = {field.name: field.metadata["help"].removesuffix(".") for field in dataclasses.fields(TrainSettings)}
    return {key: text[0].lower() + text[1:] if text[1].islower() else text for key, text in helps.items()} | COMMENTS
