"""Checks of `hf-cp doctor` about how processes start and what is trained: accelerate.yaml, deepspeed.json, train.yaml.

They ask the same functions that would refuse the run, with the numbers of the recipe.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any

from hf_cp.tools.doctor.check import Check, Finding, NotGiven, fail, finding_of, missing, ok, skip, warn
from hf_cp.tools.doctor.subject import CP_FIELDS, Subject

__all__ = ["LAUNCH_CHECKS", "TRAINING_CHECKS"]

_LONG, _SHORT = 3600, 120  # seconds


def check_processes(subject: Subject) -> Finding:
    """How many start, and whether they divide into groups that share a row."""
    world, machines, size = subject.world_size, subject.num_machines, subject.cp.cp_size
    if world % machines:
        return fail(f"num_processes={world} over num_machines={machines}", "num_processes counts all machines.")
    if world % size:
        legal = list(range(size, world + size + 1, size))
        return fail(
            f"num_processes={world} cannot be split into groups of cp_size={size}",
            f"Start {' or '.join(map(str, legal[-2:]))}, or choose degrees whose product divides {world}.",
        )
    expected = _train(subject).get("expected_processes")
    if expected not in (None, world):
        return fail(
            f"accelerate.yaml starts {world} processes, train.yaml has expected_processes={expected}",
            "Set both to the same number.",
        )
    return ok(f"processes: {world} on {machines} machine(s); {size} share a row, dp {world // size}")


def check_launcher(subject: Subject) -> Finding:
    """Settings that silently start something else."""
    kind, world = subject.accelerate.distributed_type.value, subject.accelerate.num_processes
    if kind == "MULTI_CPU" or (kind == "NO" and world > 1):
        return fail(
            f"distributed_type {kind} with num_processes={world}: `accelerate launch` starts one process",
            "Use distributed_type DEEPSPEED, or start with torchrun --nproc_per_node.",
        )
    if kind not in ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP"):
        return fail(f"distributed_type {kind} is not supported", "Use DEEPSPEED, FSDP or MULTI_GPU.")
    if kind == "FSDP" and subject.accelerate.use_cpu:
        return fail("FSDP with use_cpu: accelerate runs FSDP on GPUs only", "Use DEEPSPEED on CPU.")
    variable = subject.environment.get("ACCELERATE_USE_CPU", "false")
    if kind == "DEEPSPEED" and variable.lower() in ("1", "true", "yes", "y", "t", "on"):
        return fail(f"ACCELERATE_USE_CPU={variable} switches DeepSpeed off: DDP would run instead", "Unset it.")
    if subject.accelerate.use_cpu and not _train(subject).get("use_cpu", True):
        return fail("accelerate.yaml has use_cpu, train.yaml has use_cpu: false", "Set both to the same.")
    return ok(f"distributed_type {kind}")


def check_parallelism(subject: Subject) -> Finding:
    """accelerate's own sizes must be 1: they would cut every row a second time."""
    prefix, found = "parallelism_config_", {}
    for name in ("cp_size", "sp_size", "tp_size"):
        variable = f"PARALLELISM_CONFIG_{name.upper()}"
        found[variable] = subject.environment.get(variable, 1)
        if subject.args.recipe is not None:
            found[f"{prefix}{name} in accelerate.yaml"] = subject.accelerate.parallelism_config.get(prefix + name, 1)
    wrong = [f"{name}={value}" for name, value in found.items() if int(value) > 1]
    if wrong:
        return fail(
            f"{', '.join(wrong)}: accelerate would cut every row a second time",
            "Leave these sizes at 1; the degrees belong into train.yaml (ContextParallelConfig).",
        )
    return ok("accelerate's own cp_size, sp_size and tp_size are 1")


def check_zero_config(subject: Subject) -> Finding:
    """Nothing about sequences, gradients summed in fp32, batch sizes of this run."""
    from hf_cp.training.checks import ZeroRun, refuse
    from hf_cp.training.deepspeed import complete_zero_config

    config, args = copy.deepcopy(subject.deepspeed), subject.training
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", args.max_grad_norm):
        return fail(
            f"the DeepSpeed config has gradient_clipping={clipping}, train.yaml max_grad_norm={args.max_grad_norm}",
            "Set gradient_clipping to 'auto'.",
        )
    stage = subject.zero_stage
    expected = _train(subject).get("expected_zero_stage", stage)
    if expected != stage:
        return fail(
            f"the DeepSpeed config has ZeRO stage {stage}, train.yaml has expected_zero_stage={expected}",
            "Set both to the same stage.",
        )
    micro = args.per_device_train_batch_size
    complete_zero_config(config, micro_batch_size=micro, gradient_clipping=args.max_grad_norm)
    steps, must_gather = args.gradient_accumulation_steps, not _train(subject).get("lora_r")
    refuse(ZeroRun(config, micro, steps, subject.world_size, mixed_precision="no", must_gather=must_gather))
    return ok(
        f"ZeRO stage {stage}, communication_data_type {config['communication_data_type']}, no sequence parallelism"
    )


def check_precision(subject: Subject) -> Finding:
    """Who says bf16, and whether they say the same."""
    from hf_cp.training.checks import ZeroRun, refuse

    args = subject.training
    chosen = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    launcher = "no"
    if subject.args.recipe is not None:
        launcher = subject.accelerate.mixed_precision or "no"
        if launcher not in ("no", chosen):
            return fail(
                f"accelerate.yaml has mixed_precision {launcher}, train.yaml asks for {chosen}",
                "Leave mixed_precision out of accelerate.yaml.",
            )
        if subject.uses_deepspeed:
            refuse(ZeroRun({"zero_optimization": {"stage": subject.zero_stage}}, 1, 1, 1, chosen, must_gather=False))
            for name in ("bf16", "fp16"):
                enabled = subject.deepspeed.get(name, {}).get("enabled", "auto")
                if enabled not in ("auto", chosen == name):
                    return fail(
                        f"the DeepSpeed config has {name}.enabled={enabled}, train.yaml asks for {chosen}",
                        f"Set {name}.enabled to 'auto'.",
                    )
    return ok(f"mixed precision {chosen}, weights {_train(subject).get('model_dtype', 'float32')}")


def check_gradient_sums(subject: Subject) -> Finding:
    """The ranks of a row hold parts of one gradient: they must be added up in fp32."""
    from hf_cp.training.checks import sixteen_bit_weights

    kind = subject.accelerate.distributed_type.value
    if kind == "DEEPSPEED":
        return ok("ZeRO is told to reduce gradients in fp32")
    if kind == "FSDP" and (subject.training.bf16 or subject.training.fp16):
        return ok("FSDP is told to reduce gradients in fp32")
    if _train(subject).get("lora_r"):
        return ok("adapters are trained in fp32")
    names = sixteen_bit_weights(subject.meta_model)
    if names and subject.cp.cp_size > 1:
        return fail(
            f"{kind} would add up the gradients of {len(names)} weights in 16 bits, cp_size={subject.cp.cp_size}",
            "Set model_dtype: float32 and bf16: true, or use DeepSpeed.",
        )
    return ok("trained weights are in fp32")


def check_batch(subject: Subject) -> Finding:
    """What one optimizer step sees; the ranks of a row do not count twice."""
    args = subject.training
    micro, steps, dp = args.per_device_train_batch_size, args.gradient_accumulation_steps, subject.dp_size
    rows, most = micro * steps * dp, subject.collator.max_tokens
    unit = "rows" if most else "features"
    tokens = f" of up to {most:,} tokens, {rows * most:,} tokens a step" if most else ""
    return ok(
        f"{unit} of a step: micro {micro} x accumulation {steps} x dp {dp} = {rows}{tokens} "
        f"(DeepSpeed's train_batch_size is {micro * steps * subject.world_size}: it counts processes)"
    )


def check_placement(subject: Subject) -> Finding:
    """A Ulysses group's all-to-all belongs inside a node; consecutive ranks share a group."""
    degree, per_node = subject.cp.ulysses_degree, subject.ranks_per_node
    if subject.num_machines > 1 and per_node % degree:
        return warn(
            f"ulysses_degree={degree} does not divide the {per_node} processes of a machine: some all-to-alls cross "
            "machines",
            f"Use a ulysses_degree that divides {per_node}, and give the rest to the ring.",
        )
    return ok(f"every Ulysses group ({degree}) is inside a machine ({per_node} processes)")


def check_time_limit(subject: Subject) -> Finding:
    """How long the others wait for a process that is lost: in collectives of this package, and in all others."""
    limits = {"timeout_seconds": subject.cp.timeout_seconds, "ddp_timeout": subject.training.ddp_timeout}
    text = ", ".join(f"{name}={seconds:,.0f} s" for name, seconds in limits.items() if seconds is not None)
    wrong = {name: seconds for name, seconds in limits.items() if seconds and not _SHORT <= seconds <= _LONG}
    if any(seconds > _LONG for seconds in wrong.values()):
        return warn(f"{text}: a lost process holds the others that long", f"Set {', '.join(wrong)} to 1800.")
    if wrong:
        return warn(f"{text}: a slow first step or checkpoint may end the run", f"Set {', '.join(wrong)} to 1800.")
    return ok(text)


def check_keys(subject: Subject) -> Finding:
    """Keys that the shipped script refuses. Beside a `--config` alone may stand another script, with its own keys."""
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)} | set(CP_FIELDS)
    unknown = [key for key in subject.train if key not in known | SCRIPT_KEYS]
    near = {key: difflib.get_close_matches(key, known | SCRIPT_KEYS, 1, 0.85) for key in unknown}
    if unknown and subject.args.config is None:
        hints = [f"{key}: {found[0]}?" for key, found in near.items() if found]
        return fail(
            f"unknown in train.yaml: {', '.join(unknown)}",
            f"Correct or remove: examples/finetune.py refuses other keys. {' '.join(hints)}".rstrip(),
        )
    wrong = {key: found[0] for key, found in near.items() if found}
    if wrong:
        return warn(
            f"unknown in train.yaml: {', '.join(wrong)}", f"Is it {', '.join(wrong.values())}? Else leave it as it is."
        )
    return ok(f"keys of train.yaml: {len(subject.train)}, none looks misspelt")


# The arguments that examples/finetune.py adds to those of ContextParallelConfig and TrainingArguments.
SCRIPT_KEYS = frozenset(
    "model_name_or_path dataset eval_dataset model_dtype rope_parameters max_tokens overflow cp_size "
    "expected_processes expected_zero_stage lora_r lora_alpha lora_dropout proof_tokens eval_every "
    "required_drop_stderr record_dir profile_steps".split()
)


def check_arguments(subject: Subject) -> Finding:
    """What the Trainer's constructor would refuse, evaluation settings too."""
    from hf_cp.training.checks import Arguments, DataLoading, OtherParallelism, problems

    args = subject.training
    found = problems(
        OtherParallelism.of(args.parallelism_config),
        DataLoading.of(args.accelerator_config),
        Arguments(args, is_packed=subject.collator.max_tokens is not None),
    )
    if found:
        return fail(" ".join(problem.what for problem in found), " ".join(problem.fix for problem in found))
    return ok("the Trainer takes these arguments on shared rows")


def check_evaluation(subject: Subject) -> Finding:
    """Held-out documents are read, and fit into a row, before the training gets to them."""
    from hf_cp.data.files import load_features
    from hf_cp.tools.doctor.subject import SAMPLE

    args, name = subject.training, subject.train.get("eval_dataset")
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if name is None:
        if strategy != "no":
            return fail(f"eval_strategy={strategy} without eval_dataset", "Give eval_dataset, or eval_strategy: no.")
        return skip("no evaluation")
    try:
        features = load_features(name)
    except (ValueError, OSError) as error:
        return missing(subject, f"eval_dataset: {finding_of(error).detail}", "Give its path as it is seen from here.")
    prepared = subject.collator.prepare(features[i] for i in range(min(SAMPLE, len(features))))
    changed = f"; {prepared.counts}" if prepared.counts else ""
    return ok(f"held-out documents: {len(features):,}, the longest read has {max(prepared.lengths):,} tokens{changed}")


def check_seeds(subject: Subject) -> Finding:
    """The seed of the rows' order must be one that NumPy takes."""
    args = subject.training
    order = args.seed if args.data_seed is None else args.data_seed
    if order < 0:
        return fail(f"the seed of the rows' order is {order}", "data_seed (or seed) must not be negative.")
    return ok(f"seed={args.seed} for weights and dropout (+ cp_rank), {order} for the order of rows")


def _train(subject: Subject) -> dict[str, Any]:
    """train.yaml; empty where there is none."""
    try:
        return subject.train
    except NotGiven:
        return {}


LAUNCH_CHECKS = (
    Check("Launch", "processes", check_processes),
    Check("Launch", "launcher", check_launcher),
    Check("Launch", "accelerate's own parallelism", check_parallelism),
    Check("Launch", "DeepSpeed config", check_zero_config),
    Check("Launch", "precision", check_precision),
    Check("Launch", "sums of gradients", check_gradient_sums),
    Check("Launch", "placement", check_placement),
    Check("Launch", "time limit", check_time_limit),
)
TRAINING_CHECKS = (
    Check("Training", "keys", check_keys),
    Check("Training", "arguments", check_arguments),
    Check("Training", "batch", check_batch),
    Check("Training", "evaluation", check_evaluation),
    Check("Training", "seeds", check_seeds),
)
