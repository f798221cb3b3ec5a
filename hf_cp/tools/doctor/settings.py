"""Checks of `hf-cp doctor` about how processes start and what is trained: accelerate.yaml, deepspeed.json, train.yaml.

What a run would refuse is asked of the table that refuses it (hf_cp/training/checks), with the numbers of the recipe.
Here are the settings that the Trainer cannot see, and those that two files must say alike.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any

from accelerate.utils import str_to_bool

from hf_cp.data.files import load_features
from hf_cp.recipes.settings import train_keys
from hf_cp.tools.doctor.check import Check, Finding, fail, finding_of, missing, ok, refusals, skip, warn
from hf_cp.tools.doctor.subject import FIRST, NEEDS_TRAIN, Subject
from hf_cp.training.checks import (
    Arguments,
    DataLoading,
    GradientSums,
    Launch,
    OtherParallelism,
    ZeroRun,
    sixteen_bit_weights,
)
from hf_cp.training.deepspeed import complete_zero_config

LONGEST, SHORTEST = 3600, 120  # seconds of a time limit
SAME = "Set both to the same."


def check_processes(subject: Subject) -> Finding:
    """How many start, and whether they divide into groups that share a sample."""
    world, machines, size = subject.world_size, subject.num_machines, subject.cp.cp_size
    if world % machines:
        return fail(f"num_processes={world} over num_machines={machines}", "num_processes counts all machines.")
    expected = subject.train.get("expected_processes", world)
    if expected != world:
        return fail(f"accelerate.yaml starts {world} processes, train.yaml has expected_processes={expected}", SAME)
    return refusals(
        Launch(size, world, world, backend="", wants_deepspeed=False, wants_fsdp=False),
        otherwise=f"processes: {world} on {machines} machine(s); {size} share a sample, dp {world // size}",
    )


def check_launcher(subject: Subject) -> Finding:
    """Settings that silently start something else."""
    kind, world = subject.backend, subject.accelerate.num_processes
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
    if kind == "DEEPSPEED" and str_to_bool(variable):
        return fail(f"ACCELERATE_USE_CPU={variable} switches DeepSpeed off: DDP would run instead", "Unset it.")
    if subject.accelerate.use_cpu and not subject.train.get("use_cpu", True):
        return fail("accelerate.yaml has use_cpu, train.yaml has use_cpu: false", SAME)
    return ok(f"distributed_type {kind}")


def check_parallelism(subject: Subject) -> Finding:
    """accelerate's own sizes must be 1, in the environment and in accelerate.yaml."""
    found: dict[str, Any] = {}
    for name in ("cp_size", "sp_size", "tp_size"):
        variable, key = f"PARALLELISM_CONFIG_{name.upper()}", f"parallelism_config_{name}"
        found[variable] = subject.environment.get(variable, 1)
        if subject.has_recipe:
            found[f"{key} in accelerate.yaml"] = subject.accelerate.parallelism_config.get(key, 1)
    sizes = OtherParallelism({name: int(size) for name, size in found.items()})
    return refusals(sizes, otherwise="accelerate's own cp_size, sp_size and tp_size are 1")


def check_zero_config(subject: Subject) -> Finding:
    """Nothing about sequences, gradients summed in fp32, batch sizes of this run."""
    config, args, stage = copy.deepcopy(subject.deepspeed), subject.training, subject.zero_stage
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", args.max_grad_norm):
        return fail(
            f"the DeepSpeed config has gradient_clipping={clipping}, train.yaml max_grad_norm={args.max_grad_norm}",
            "Set gradient_clipping to 'auto'.",
        )
    expected = subject.train.get("expected_zero_stage", stage)
    if expected != stage:
        return fail(
            f"the DeepSpeed config has ZeRO stage {stage}, train.yaml has expected_zero_stage={expected}", SAME
        )
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    complete_zero_config(config, micro_batch_size=micro, gradient_clipping=args.max_grad_norm)
    reduced = config["communication_data_type"]
    return refusals(
        ZeroRun(config, micro, steps, subject.world_size, "no", must_gather=not subject.train.get("lora_r")),
        otherwise=f"ZeRO stage {stage}, communication_data_type {reduced}, no sequence parallelism",
    )


def check_precision(subject: Subject) -> Finding:
    """Who says bf16, and whether they say the same."""
    args = subject.training
    chosen = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    launcher = (subject.accelerate.mixed_precision if subject.has_recipe else None) or "no"
    if launcher not in ("no", chosen):
        return fail(
            f"accelerate.yaml has mixed_precision {launcher}, train.yaml asks for {chosen}",
            "Leave mixed_precision out of accelerate.yaml.",
        )
    text = f"mixed precision {chosen}, weights {subject.weights_dtype}"
    if not subject.has_recipe or subject.backend != "DEEPSPEED":
        return ok(text)
    for name in ("bf16", "fp16"):
        enabled = subject.deepspeed.get(name, {}).get("enabled", "auto")
        if enabled not in ("auto", chosen == name):
            return fail(
                f"the DeepSpeed config has {name}.enabled={enabled}, train.yaml asks for {chosen}",
                f"Set {name}.enabled to 'auto'.",
            )
    stage = {"zero_optimization": {"stage": subject.zero_stage}}  # the rest has a check of its own
    return refusals(ZeroRun(stage, 1, 1, 1, chosen, must_gather=False), otherwise=text)


def check_gradient_sums(subject: Subject) -> Finding:
    """The ranks of a sample hold parts of one gradient: they must be added up in fp32."""
    kind, args = subject.backend, subject.training
    if kind == "DEEPSPEED" or (kind == "FSDP" and (args.bf16 or args.fp16)):
        return ok(f"{'ZeRO' if kind == 'DEEPSPEED' else kind} is told to reduce gradients in fp32")
    if subject.train.get("lora_r"):
        return ok("adapters are trained in fp32")
    names = sixteen_bit_weights(subject.meta_model)
    sums = GradientSums(subject.cp.cp_size, kind, is_told=False, sixteen_bit=names)
    return refusals(sums, otherwise="trained weights are in fp32")


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
    wrong = {name: seconds for name, seconds in limits.items() if seconds and not SHORTEST <= seconds <= LONGEST}
    if not wrong:
        return ok(text)
    is_long = any(seconds > LONGEST for seconds in wrong.values())
    why = "a lost process holds the others that long" if is_long else "a slow first step or checkpoint may end the run"
    return warn(f"{text}: {why}", f"Set {', '.join(wrong)} to 1800.")


def check_keys(subject: Subject) -> Finding:
    """Keys that `hf-cp train` refuses. Beside a `--config` alone may stand another script, with its own keys."""
    if not subject.has_train:
        return skip(NEEDS_TRAIN)
    known = train_keys()
    unknown = [key for key in subject.train if key not in known]
    near = {key: found[0] for key in unknown if (found := difflib.get_close_matches(key, known, 1, 0.85))}
    if unknown and subject.has_recipe:
        hints = " ".join(f"{key}: {found}?" for key, found in near.items())
        fix = f"Correct or remove: hf-cp train refuses other keys. {hints}".rstrip()
        return fail(f"unknown in train.yaml: {', '.join(unknown)}", fix)
    if near:
        fix = f"Is it {', '.join(near.values())}? Else leave it as it is."
        return warn(f"unknown in train.yaml: {', '.join(near)}", fix)
    return ok(f"keys of train.yaml: {len(subject.train)}, none looks misspelt")


def check_arguments(subject: Subject) -> Finding:
    """What the Trainer's constructor would refuse, evaluation settings too."""
    args = subject.training
    if not subject.cp.enabled and subject.collator.max_tokens is None:
        return ok("nothing is split or packed: the stock Trainer runs")
    return refusals(
        OtherParallelism.of(args.parallelism_config),
        DataLoading.of(args.accelerator_config),
        Arguments(args, is_packed=subject.collator.max_tokens is not None),
        otherwise="the Trainer takes these arguments on shared samples",
    )


def check_batch(subject: Subject) -> Finding:
    """What one optimizer step sees; the ranks of a sample do not count twice."""
    args = subject.training
    micro, steps, dp = args.per_device_train_batch_size, args.gradient_accumulation_steps, subject.dp_size
    count, most = micro * steps * dp, subject.collator.max_tokens
    unit = "samples" if most else "features"
    tokens = f" of up to {most:,} tokens, {count * most:,} tokens a step" if most else ""
    return ok(
        f"{unit} of a step: micro {micro} x accumulation {steps} x dp {dp} = {count}{tokens} "
        f"(DeepSpeed's train_batch_size is {micro * steps * subject.world_size}: it counts processes)"
    )


def check_evaluation(subject: Subject) -> Finding:
    """Held-out documents are read, and fit into a sample, before the training gets to them."""
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
    prepared = subject.collator.prepare(features[i] for i in range(min(FIRST, len(features))))
    changed = f"; {prepared.counts}" if prepared.counts else ""
    return ok(f"held-out documents: {len(features):,}, the longest read has {max(prepared.lengths):,} tokens{changed}")


def check_seeds(subject: Subject) -> Finding:
    """The seed of the samples' order must be one that NumPy takes."""
    args = subject.training
    order = args.seed if args.data_seed is None else args.data_seed
    if order < 0:
        return fail(f"the seed of the samples' order is {order}", "data_seed (or seed) must not be negative.")
    return ok(f"seed={args.seed} for weights and dropout (+ cp_rank), {order} for the order of samples")


CHECKS = (
    Check("Launch", "processes", check_processes),
    Check("Launch", "launcher", check_launcher),
    Check("Launch", "accelerate's own parallelism", check_parallelism),
    Check("Launch", "DeepSpeed config", check_zero_config),
    Check("Launch", "precision", check_precision),
    Check("Launch", "sums of gradients", check_gradient_sums),
    Check("Launch", "placement", check_placement),
    Check("Launch", "time limit", check_time_limit),
    Check("Training", "keys", check_keys),
    Check("Training", "arguments", check_arguments),
    Check("Training", "batch", check_batch),
    Check("Training", "evaluation", check_evaluation),
    Check("Training", "seeds", check_seeds),
)
