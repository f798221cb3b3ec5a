"""DeepSpeed configs: what they must not say, alone ([`ZeroConfig`]) and in a run ([`ZeroRun`]).

What they must say is filled in by hf_cp/training/deepspeed.py, which also has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_cp.training.checks.table import Check

GATHER_WEIGHTS = "stage3_gather_16bit_weights_on_model_save"


@dataclass(frozen=True)
class ZeroConfig:
    """A DeepSpeed config, as it was given or completed."""

    config: Mapping[str, Any]

    @property
    def zero(self) -> Mapping[str, Any]:
        return self.config.get("zero_optimization", {})

    def sequence_keys(self) -> str:
        keys = ("sequence_parallel_size", "data_parallel_size")
        return ", ".join(f"{key}={self.config[key]}" for key in keys if self.config.get(key, 1) not in (1, "auto"))

    def tensor_degree(self) -> int:
        degree = self.config.get("tensor_parallel", {}).get("autotp_size", 0)
        return degree if degree > 1 else 0

    def low_precision_sums(self) -> str:
        """What lets DeepSpeed add up parts of a gradient in less than fp32."""
        dtype = self.config.get("communication_data_type", "auto")
        settings = {  # torch_autocast reduces the gradients of linear layers in its own type, whatever else is set
            f"communication_data_type={dtype!r}": dtype not in ("auto", "fp32"),
            "torch_autocast.enabled=true": self.config.get("torch_autocast", {}).get("enabled", False),
            "zero_optimization.zero_quantized_gradients=true": self.zero.get("zero_quantized_gradients", False),
        }
        return " and ".join(setting for setting, is_set in settings.items() if is_set)


class OtherSize(NamedTuple):
    """A batch size of a DeepSpeed config that is not that of the run."""

    key: str
    given: int
    expected: int
    meaning: str


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

    @property
    def gathers(self) -> Any:
        return self.zero.get(GATHER_WEIGHTS, "auto")  # "auto" is completed to true

    def other_size(self) -> OtherSize | None:
        """DeepSpeed's train_batch_size counts every process, those that share a sample too: micro x GA x W."""
        micro, steps, world = self.micro_batch_size, self.gradient_accumulation_steps, self.world_size
        product = f"{micro} x {steps} accumulation steps x {world} processes"
        for key, value, meaning in (
            ("train_micro_batch_size_per_gpu", micro, "one sample per micro-step"),
            ("gradient_accumulation_steps", steps, "the Accelerator's"),
            ("train_batch_size", micro * steps * world, product),
        ):
            if self.config.get(key, "auto") not in ("auto", value):
                return OtherSize(key, self.config[key], value, meaning)
        return None


CHECKS = (
    Check(
        "DeepSpeed: sequence parallelism",
        ZeroConfig,
        ZeroConfig.sequence_keys,
        "The DeepSpeed config has {found}, which makes the scale of gradients depend on the ZeRO stage.",
        "Remove it; give the degrees to ContextParallelConfig.",
    ),
    Check(
        "DeepSpeed: tensor parallelism",
        ZeroConfig,
        ZeroConfig.tensor_degree,
        "The DeepSpeed config has tensor_parallel.autotp_size={found}, which is not supported.",
        "Remove it, or set it to 1.",
    ),
    Check(
        "DeepSpeed: gradient sums",
        ZeroConfig,
        ZeroConfig.low_precision_sums,
        "The DeepSpeed config has {found}, but the ranks of a sample hold parts of one gradient, which are summed in "
        "fp32.",
        "Remove it (communication_data_type may be 'fp32'); for bf16 use DeepSpeed's bf16 section.",
    ),
    Check(
        "DeepSpeed: batch sizes",
        ZeroRun,
        ZeroRun.other_size,
        "The DeepSpeed config has {found.key}={found.given}, but this run has {found.expected} ({found.meaning}).",
        "Set {found.key} to 'auto' in the DeepSpeed config.",
    ),
    Check(
        "DeepSpeed: stage 0 in bf16",  # its optimizer follows another trajectory than those of stages 1 to 3
        ZeroRun,
        lambda s: s.zero.get("stage", 0) == 0 and s.mixed_precision == "bf16",
        "zero_stage=0 with bf16 trains differently from stages 1 to 3 and from DDP.",
        "Choose zero_stage 1, 2 or 3, or run without DeepSpeed.",
    ),
    Check(
        "DeepSpeed: saved weights",
        ZeroRun,
        lambda s: s.zero.get("stage") == 3 and not s.gathers and s.must_gather,
        f"The DeepSpeed config has ZeRO stage 3 and {GATHER_WEIGHTS}={{s.gathers}}: save_model would write a model "
        "without weights.",
        f"Set {GATHER_WEIGHTS} to true in the file (accelerate takes 'auto' for false), or start `accelerate launch` "
        "with --zero3_save_16bit_model true.",
    ),
)
