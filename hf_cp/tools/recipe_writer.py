"""A runnable folder from a plan: how processes start, what DeepSpeed does, what is trained, and how to launch it.

The recipes that come with the package are written by this module too, so that a written one and a shipped one have the
same files with the same keys.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_cp.planning.search import Candidate, Plan
from hf_cp.tools.plan import judge, memory_table, placement_table, ranking_table

PLAN_ROWS = 5  # of the ranking, in a README


@dataclass(frozen=True)
class Recipe:
    """What a folder says beside the plan.

    Args:
        title (`str`): first line of its README.
        command (`str`): the `hf-cp plan` command that gives the plan.
        model_name_or_path, dataset (`str`): as the training script takes them.
        lora_r (`int`): rank of the adapters; 0 trains all weights.
        backend (`str`): "deepspeed" or "fsdp2".
        layer_class (`str`): the decoder layer's class, for FSDP2.
        script (`str`): the training script, from the folder where runs start.
        training (mapping): more keys of train.yaml; they win.
    """

    title: str
    command: str
    model_name_or_path: str
    dataset: str = "data/train.jsonl"
    lora_r: int = 0
    backend: str = "deepspeed"
    layer_class: str = "LlamaDecoderLayer"
    script: str = "finetune.py"
    training: Mapping[str, Any] = field(default_factory=dict)


def write_recipe(folder: Path, plan: Plan, recipe: Recipe) -> None:
    """Writes accelerate.yaml, deepspeed.json (with DeepSpeed), train.yaml and README.md for the plan's first choice.

    Args:
        folder (`Path`): made if needed; runs start in its parent's parent, as with the recipes of a clone, if the
            folder's name is given as `recipes/NAME`, else in the current folder.
        plan (`Plan`): with a recommended candidate.
        recipe (`Recipe`): the rest.

    Raises:
        ValueError: nothing in the plan fits.
        FileExistsError: a file is there already.
    """
    choice = plan.recommended
    if choice is None:
        raise ValueError("Nothing in the plan fits, so there is nothing to write. " + judge(plan).text)
    files = {
        "accelerate.yaml": accelerate_file(folder, plan, recipe),
        "train.yaml": training_file(plan, choice, recipe),
        "README.md": readme_file(folder, plan, choice, recipe),
    }
    if recipe.backend == "deepspeed":
        files["deepspeed.json"] = deepspeed_file(plan)
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise FileExistsError(f"{folder} has {', '.join(there)} already. Give another folder, or remove them.")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def accelerate_file(folder: Path, plan: Plan, recipe: Recipe) -> str:
    """For `accelerate launch --config_file`."""
    cluster = plan.cluster
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    if recipe.backend == "deepspeed":
        settings["distributed_type"] = "DEEPSPEED"
        settings["deepspeed_config"] = {
            "deepspeed_config_file": (folder / "deepspeed.json").as_posix(),
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.training.zero_stage == 3,
        }
    else:
        settings["distributed_type"] = "FSDP"
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": recipe.layer_class,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
        }
        settings["mixed_precision"] = "bf16"
    settings |= {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_gpus,
        "use_cpu": False,
    }
    nodes = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs" if cluster.num_nodes > 1 else (
        f"one node, {cluster.num_gpus} GPUs"
    )  # fmt: skip
    name = "DeepSpeed" if recipe.backend == "deepspeed" else "FSDP2"
    head = f"# How the processes start: {nodes}, with {name}. Paths count from the folder where the run starts.\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def deepspeed_file(plan: Plan) -> str:
    """ZeRO; gradients of the ranks of a row are parts of one gradient, so they are added up in fp32."""
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


def training_file(plan: Plan, choice: Candidate, recipe: Recipe) -> str:
    """For the training script: its arguments, `ContextParallelConfig` and `transformers.TrainingArguments`."""
    config, training = choice.config, plan.training
    is_fp32_trained = recipe.backend == "fsdp2" or not recipe.lora_r
    sections: dict[str, dict[str, Any]] = {
        "model and documents": {
            "model_name_or_path": recipe.model_name_or_path,
            "dataset": recipe.dataset,
            "model_dtype": "float32" if is_fp32_trained and recipe.backend == "fsdp2" else "bfloat16",
            "max_tokens": plan.seq_len,
            "overflow": "truncate",
        },
        "context parallelism": {
            "ring_degree": config.ring_degree,
            "ulysses_degree": config.ulysses_degree,
            "ring_comm": "auto",
            "layout": "auto",
            "expected_processes": plan.cluster.num_gpus,
            **({"expected_zero_stage": training.zero_stage} if recipe.backend == "deepspeed" else {}),
            "loss_chunk_tokens": training.loss_chunk_tokens,
            **({"mlp_chunk_tokens": training.mlp_chunk_tokens} if training.mlp_chunk_tokens else {}),
            "keep_attention": training.checkpointing == "keep_attention",
            "timeout_seconds": 1800,
        },
        "what is trained": {"lora_r": recipe.lora_r, **({"lora_alpha": 2 * recipe.lora_r} if recipe.lora_r else {})},
        "training (transformers.TrainingArguments)": {
            "output_dir": f"outputs/{plan.model.name}-{plan.seq_len}",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "num_train_epochs": 1,
            "learning_rate": 2.0e-4 if recipe.lora_r else 1.0e-5,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 10,
            "max_grad_norm": 1.0,
            "bf16": True,
            **_checkpointing(training.checkpointing),
            "seed": 0,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 200,
            "report_to": "none",
        },
    }
    for name, value in recipe.training.items():
        section = next(
            (keys for keys in sections.values() if name in keys), sections["training (transformers.TrainingArguments)"]
        )
        section[name] = value
    head = "# What is trained, on what, and how one row is split. Any key is an option of the script: --max_steps 20\n"
    return head + "\n".join(f"# -- {name}\n{yaml.safe_dump(keys, sort_keys=False)}" for name, keys in sections.items())


def _checkpointing(kind: str) -> dict[str, Any]:
    if kind == "none":
        return {}
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "offload":
        options["offload"] = True
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}


def readme_file(folder: Path, plan: Plan, choice: Candidate, recipe: Recipe) -> str:
    """What it is, the plan, how to launch it, and what to check first."""
    cluster, where = plan.cluster, folder.as_posix()
    tables = [memory_table(plan, choice), ranking_table(plan, PLAN_ROWS), placement_table(plan, choice)]
    output = "\n\n".join([*(table.text() for table in tables), str(judge(plan))])
    names = ["accelerate.yaml", *(["deepspeed.json"] if recipe.backend == "deepspeed" else []), "train.yaml"]
    rows = cluster.num_gpus // choice.config.cp_size
    return f"""# {recipe.title}

Files: {", ".join(f"`{name}`" for name in names)}. One optimizer step sees {rows} row{"s" if rows > 1 else ""} of up to
{plan.seq_len:,} tokens. Set `model_name_or_path` and `dataset` in `train.yaml`.

```
{launch_lines(where, plan, recipe)}
```

Before the first long run:

```
hf-cp doctor --recipe {where}
hf-cp pack --data {recipe.dataset} --max-tokens {plan.seq_len} --cp {choice.config.cp_size}
```

## The plan

```
$ {recipe.command}
{output}
```

It is an estimate. `hf-cp bench` measures links and kernels, `hf-cp plan --measured bench.json` uses them.

## Environment

```
{environment_lines(cluster.num_nodes)}
```

`timeout_seconds` in `train.yaml` limits every collective; a lost process ends the run on all others within it.
"""


def launch_lines(where: str, plan: Plan, recipe: Recipe) -> str:
    """One command on one node; on several, one per node, or SLURM."""
    cluster = plan.cluster
    single = f"accelerate launch --config_file {where}/accelerate.yaml {recipe.script} {where}/train.yaml"
    if cluster.num_nodes == 1:
        return single
    options = "--machine_rank $NODE_RANK --main_process_ip $HEAD_NODE --main_process_port 29500"
    script = f"{recipe.script} {where}/train.yaml"
    launch = f"accelerate launch --config_file {where}/accelerate.yaml \\\n    {options} \\\n    {script}"
    slurm = (
        f"srun --nodes {cluster.num_nodes} --ntasks-per-node 1 --gpus-per-node {cluster.gpus_per_node} bash -c '\n"
        "    export HEAD_NODE=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) NODE_RANK=$SLURM_NODEID\n"
        f"    accelerate launch --config_file {where}/accelerate.yaml \\\n      {options} \\\n"
        f"      {script}'"
    )
    return f"# on every node, NODE_RANK from 0 to {cluster.num_nodes - 1}\n{launch}\n\n# or with SLURM\n{slurm}"


def environment_lines(num_nodes: int) -> str:
    lines = ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "export TOKENIZERS_PARALLELISM=false"]
    if num_nodes > 1:
        lines += [
            "export NCCL_SOCKET_IFNAME=eth0        # the interface that all nodes share",
            "export NCCL_IB_HCA=mlx5               # InfiniBand adapters, if there are any",
            "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        ]
    return "\n".join(lines)


def recipe_of(plan: Plan, model: str, folder: Path, command: str) -> Recipe:
    """The recipe of `hf-cp plan --write`: the model as it was named, the plan's own training."""
    return Recipe(
        title=f"{os.path.basename(folder)}: {plan.model.name} on {plan.cluster.num_gpus} {plan.cluster.device.name}",
        command=command,
        model_name_or_path=model,
        lora_r=plan.training.lora_r,
    )
