"""A runnable folder from a plan: how processes start, what DeepSpeed does, what is trained, and how to launch it.

The recipes that come with the package are written by this module too (recipes/write_recipes.py), so a written one and
a shipped one have the same files with the same keys. Invariant: every path in a folder counts from the folder where
the run starts, and nothing outside the arguments decides what is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_cp.planning.memory import KEEPS_ATTENTION
from hf_cp.planning.model_names import loadable_name
from hf_cp.planning.search import Candidate, Plan
from hf_cp.recipes.readme import readme_file
from hf_cp.tools.plan import judge, memory_table, placement_table, ranking_table

PLAN_ROWS = 5  # of the ranking, in a README
ACCELERATE, DEEPSPEED, TRAINING, README = "accelerate.yaml", "deepspeed.json", "train.yaml", "README.md"
DATASET = "data/train.jsonl"  # where none is named

# Comments of train.yaml.
COMMENTS = {
    "model_name_or_path": "folder or hub name",
    "dataset": "JSONL, a folder of text files, or a saved Hugging Face dataset",
    "max_tokens": "tokens in one row; whole documents are packed into rows",
    "overflow": "longer documents: error, truncate, split or drop",
    "rope_parameters": "for documents longer than the model's context",
    "ulysses_degree": "ring_degree x ulysses_degree processes share one row",
    "expected_processes": "stop if the launcher started another number",
    "expected_zero_stage": "stop if DeepSpeed is not really on",
    "keep_attention": "true: checkpointing keeps attention's output; false: it is computed and sent again",
    "mlp_chunk_tokens": "tokens in a feed-forward layer at the same time",
    "timeout_seconds": "of every collective of hf_cp",
    "ddp_timeout": "of every other collective",
}


@dataclass(frozen=True)
class Recipe:
    """What a folder says beside the plan.

    Args:
        title (`str`): first line of its README.
        command (`str`): the `hf-cp plan` command that gives the plan.
        model_name_or_path, dataset (`str`): as the training script takes them.
        script (`str`): the training script, from the folder where runs start.
        lora_r (`int`): rank of the adapters; 0 trains all weights.
        backend (`str`): "deepspeed" or "fsdp2".
        layer_class (`str`): the decoder layer's class, for FSDP2.
        notes (sequence of `str`): paragraphs below the title of the README.
        training (mapping): more keys of train.yaml; they win.
    """

    title: str
    command: str
    model_name_or_path: str
    script: str
    dataset: str = DATASET
    lora_r: int = 0
    backend: str = "deepspeed"
    layer_class: str = "LlamaDecoderLayer"
    notes: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)


def recipe_files(where: str, plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Name and text of every file of a recipe for the plan's first choice.

    Args:
        where (`str`): the recipe's folder, from the folder where runs start.
        plan (`Plan`): with a recommended candidate.
        recipe (`Recipe`): the rest.

    Raises:
        ValueError: nothing in the plan fits.
    """
    choice = plan.recommended
    if choice is None:
        raise ValueError("Nothing in the plan fits, so there is nothing to write. " + judge(plan).text)
    files = {ACCELERATE: accelerate_file(where, plan, recipe)}
    if recipe.backend == "deepspeed":
        files[DEEPSPEED] = deepspeed_file(plan)
    files[TRAINING] = training_file(Path(where).name, plan, choice, recipe)
    files[README] = readme_file(where, plan, choice, recipe, list(files), plan_output(plan, choice))
    return files


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes new files; a folder that has one of them already is left as it is.

    Raises:
        FileExistsError: a file is there already.
    """
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise FileExistsError(f"{folder} has {', '.join(there)} already. Give another folder, or remove them.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_planned(folder: Path, plan: Plan, *, model: str, command: str, script: str, data: str | None = None) -> None:
    """What `hf-cp plan --write` does: the recipe of the plan's first choice, and the training script.

    Args:
        folder (`Path`): new, or without files of these names. Runs start in the current folder.
        plan (`Plan`): with a recommended candidate.
        model (`str`): as it was named to the command; train.yaml gets the hub name of a known model, the folder of a
            config.json.
        command (`str`): the `hf-cp plan` command.
        script (`str`): text of the training script.
        data (`str`, *optional*): the documents.

    Raises:
        ValueError: nothing in the plan fits, or a name cannot stand in a command line.
        FileExistsError: a file is there already.
    """
    cluster, where = plan.cluster, folder.as_posix()
    recipe = Recipe(
        title=f"{model}, rows of {plan.seq_len:,} tokens, on {cluster.num_gpus} x {cluster.device.name}",
        command=command,
        model_name_or_path=loadable_name(model),
        script=f"{where}/finetune.py",
        dataset=data or DATASET,
        lora_r=plan.training.lora_r,
        notes=() if data else ("Set `dataset` in `train.yaml` first.",),
    )
    write_files(folder, recipe_files(where, plan, recipe) | {"finetune.py": script})


def plan_output(plan: Plan, choice: Candidate) -> str:
    """What `hf-cp plan` prints, with a shorter ranking."""
    tables = [memory_table(plan, choice), ranking_table(plan, PLAN_ROWS), placement_table(plan, choice)]
    return "\n\n".join([*(table.text() for table in tables), str(judge(plan))])


def accelerate_file(where: str, plan: Plan, recipe: Recipe) -> str:
    """For `accelerate launch --config_file`."""
    cluster = plan.cluster
    nodes = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs" if cluster.num_nodes > 1 else (
        f"{cluster.num_gpus} GPUs of one node"
    )  # fmt: skip
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    if recipe.backend == "deepspeed":
        name = "DeepSpeed"
        settings["distributed_type"] = "DEEPSPEED"
        settings["deepspeed_config"] = {
            "deepspeed_config_file": f"{where}/{DEEPSPEED}",
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.training.zero_stage == 3,
        }
    else:
        name = "FSDP2"
        settings |= {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": fsdp_settings(recipe)}
    settings |= {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_gpus,
        "use_cpu": False,
    }
    head = f"# How the processes start: {nodes}, with {name}. Paths count from the folder where the run starts.\n"
    return head + yaml.safe_dump(settings, sort_keys=False)


def fsdp_settings(recipe: Recipe) -> dict[str, Any]:
    """One unit per decoder layer. Whole state dicts, or the Trainer would not save a model at the end."""
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": recipe.layer_class,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
    }


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


def training_file(name: str, plan: Plan, choice: Candidate, recipe: Recipe) -> str:
    """For the training script: its arguments, `ContextParallelConfig` and `transformers.TrainingArguments`."""
    sections = {
        "model and documents": _data_settings(plan, recipe),
        "context parallelism": _parallel_settings(plan, choice, recipe),
        "what is trained": {"lora_r": recipe.lora_r}
        | ({"lora_alpha": 2 * recipe.lora_r, "lora_dropout": 0.0} if recipe.lora_r else {}),
        "training (transformers.TrainingArguments)": _trainer_settings(name, plan, recipe),
    }
    *_, last = sections
    for key, value in recipe.training.items():
        next((keys for keys in sections.values() if key in keys), sections[last])[key] = value
    head = "# What is trained, on what, and how one row is split. Any key is an option of the script: --max_steps 20\n"
    return head + "\n".join(
        f"# -- {title}\n{''.join(_line(key, value) for key, value in keys.items())}"
        for title, keys in sections.items()
    )


def _line(key: str, value: Any) -> str:
    """One key in YAML's short form, with its comment."""
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    text = f"{key}: {dumped.removesuffix('...' + chr(10)).strip()}"
    return (f"{text:<34}  # {COMMENTS[key]}" if key in COMMENTS else text) + "\n"


def _data_settings(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    # Frozen weights stay in 16 bits. DeepSpeed keeps fp32 copies of trained ones by itself; FSDP2 trains the weights
    # that it is given, so without adapters these are fp32.
    is_fp32 = plan.training.itemsize == 4 or (recipe.backend == "fsdp2" and not recipe.lora_r)
    return {
        "model_name_or_path": recipe.model_name_or_path,
        "dataset": recipe.dataset,
        "model_dtype": "float32" if is_fp32 else "bfloat16",
        "max_tokens": plan.seq_len,
        "overflow": "error",
        **({"rope_parameters": recipe.training["rope_parameters"]} if "rope_parameters" in recipe.training else {}),
    }


def _parallel_settings(plan: Plan, choice: Candidate, recipe: Recipe) -> dict[str, Any]:
    config, training = choice.config, plan.training
    return {
        "ring_degree": config.ring_degree,
        "ulysses_degree": config.ulysses_degree,
        **({"ring_comm": config.ring_comm} if config.ring_degree > 1 else {}),
        "expected_processes": plan.cluster.num_gpus,
        **({"expected_zero_stage": training.zero_stage} if recipe.backend == "deepspeed" else {}),
        "loss_chunk_tokens": training.loss_chunk_tokens,
        **({"mlp_chunk_tokens": training.mlp_chunk_tokens} if training.mlp_chunk_tokens else {}),
        "keep_attention": training.checkpointing in KEEPS_ATTENTION,
        "timeout_seconds": 1800,
    }


def _trainer_settings(name: str, plan: Plan, recipe: Recipe) -> dict[str, Any]:
    return {
        "output_dir": f"outputs/{name}",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 2.0e-4 if recipe.lora_r else 1.0e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
        "bf16": plan.training.itemsize == 2,
        **_checkpointing(plan.training.checkpointing),
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
