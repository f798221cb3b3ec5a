"""DeepSpeed configs: what they must not say, alone ([`ZeroConfig`]) and in a run ([`ZeroRun`]).

What they must say is filled in by hf_cp/training/deepspeed.py, which also has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_cp.training.checks.table import Check, Problem

GATHER_WEIGHTS = "stage3_gather_16bit_weights_on_model_save"

_SEQUENCE_KEYS = ("sequence_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class ZeroConfig:
    """A DeepSpeed config, as it was given or completed."""

    config: Mapping[str, Any]


def _sequence(subject: ZeroConfig) -> Problem | None:
    wrong = [f"{key}={subject.config[key]}" for key in _SEQUENCE_KEYS if subject.config.get(key, 1) not in (1, "auto")]
    if not wrong:
        return None
    return Problem(
        f"The DeepSpeed config has {', '.join(wrong)}, which makes the scale of gradients depend on the ZeRO stage.",
        "Remove it; give the degrees to ContextParallelConfig.",
    )


def _tensor(subject: ZeroConfig) -> Problem | None:
    degree = subject.config.get("tensor_parallel", {}).get("autotp_size", 0)
    if degree <= 1:
        return None
    return Problem(
        f"The DeepSpeed config has tensor_parallel.autotp_size={degree}, which is not supported.",
        "Remove it, or set it to 1.",
    )


def _reduction_dtype(subject: ZeroConfig) -> Problem | None:
    """What lets DeepSpeed add up parts of a gradient in less than fp32."""
    config = subject.config
    zero, dtype = config.get("zero_optimization", {}), config.get("communication_data_type", "auto")
    settings = {  # torch_autocast reduces the gradients of linear layers in its own type, whatever else is set
        f"communication_data_type={dtype!r}": dtype not in ("auto", "fp32"),
        "torch_autocast.enabled=true": config.get("torch_autocast", {}).get("enabled", False),
        "zero_optimization.zero_quantized_gradients=true": zero.get("zero_quantized_gradients", False),
    }
    found = [setting for setting, is_set in settings.items() if is_set]
    if not found:
        return None
    return Problem(
        f"The DeepSpeed config has {' and '.join(found)}, but the ranks of a sample hold parts of one gradient, which "
        "are summed in fp32.",
        "Remove it (communication_data_type may be 'fp32'); for bf16 use DeepSpeed's bf16 section.",
    )


@dataclass(frozen=True)
class ZeroRun(ZeroConfig):
    """A DeepSpeed config and the run that it is for.

    Args:
        micro_batch_size (`int`): samples (or features) of a micro-step.
        gradient_accumulation_steps (`int`): of the run.
        world_size (`int`): processes.
        mixed_precision (`str`): of the run.
        must_gather (`bool`): saved models need all weights from DeepSpeed (adapters are always gathered).
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    mixed_precision: str
    must_gather: bool


def _batch_sizes(subject: ZeroRun) -> Problem | None:
    """DeepSpeed's train_batch_size counts every process, those that share a sample too: micro x GA x W."""
    micro, steps, world = subject.micro_batch_size, subject.gradient_accumulation_steps, subject.world_size
    expected = {
        "train_micro_batch_size_per_gpu": (micro, "one sample per micro-step"),
        "gradient_accumulation_steps": (steps, "the Accelerator's"),
        "train_batch_size": (micro * steps * world, f"{micro} x {steps} accumulation steps x {world} processes"),
    }
    for key, (value, meaning) in expected.items():
        given = subject.config.get(key, "auto")
        if given not in ("auto", value):
            return Problem(
                f"The DeepSpeed config has {key}={given}, but this run has {value} ({meaning}).",
                f"Set {key} to 'auto' in the DeepSpeed config.",
            )
    return None


def _stage_0(subject: ZeroRun) -> Problem | None:
    """DeepSpeed's optimizer for stage 0 in bf16 follows another trajectory than that of stages 1 to 3."""
    stage = subject.config.get("zero_optimization", {}).get("stage", 0)
    if stage or subject.mixed_precision != "bf16":
        return None
    return Problem(
        "zero_stage=0 with bf16 trains differently from stages 1 to 3 and from DDP.",
        "Choose zero_stage 1, 2 or 3, or run without DeepSpeed.",
    )


def _saved_weights(subject: ZeroRun) -> Problem | None:
    zero = subject.config.get("zero_optimization", {})
    given = zero.get(GATHER_WEIGHTS, "auto")  # "auto" is completed to true
    if zero.get("stage") != 3 or given or not subject.must_gather:
        return None
    return Problem(
        f"The DeepSpeed config has ZeRO stage 3 and {GATHER_WEIGHTS}={given}: save_model would write a model without "
        "weights.",
        f"Set {GATHER_WEIGHTS} to true in the file (accelerate takes 'auto' for false), or start `accelerate launch` "
        "with --zero3_save_16bit_model true.",
    )


CHECKS = (
    Check("DeepSpeed: sequence parallelism", ZeroConfig, _sequence),
    Check("DeepSpeed: tensor parallelism", ZeroConfig, _tensor),
    Check("DeepSpeed: gradient sums", ZeroConfig, _reduction_dtype),
    Check("DeepSpeed: batch sizes", ZeroRun, _batch_sizes),
    Check("DeepSpeed: stage 0 in bf16", ZeroRun, _stage_0),
    Check("DeepSpeed: saved weights", ZeroRun, _saved_weights),
)
