"""An Accelerator that has been built: does it run what was asked for, and does it add up gradients in fp32?

Used by the Trainer and by the plugin, before the model is prepared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from transformers import Trainer

from hf_cp import _compat
from hf_cp.training.checks import (
    DataLoading,
    GradientSums,
    Launch,
    OtherParallelism,
    ZeroRun,
    is_asked_for,
    refuse,
)
from hf_cp.training.checks.gradients import SIXTEEN_BITS
from hf_cp.training.deepspeed import complete_zero_config

logger = get_logger(__name__)


def check_trainer(trainer: Trainer) -> None:
    """[`check_and_complete`] for a Trainer, once it has built its Accelerator."""
    args = trainer.args
    launch = Launch.of(
        trainer.accelerator,
        cp_size=trainer.cp_config.cp_size,
        wants_deepspeed=args.deepspeed_plugin is not None,
        wants_fsdp=args.fsdp_plugin_args is not None or is_asked_for("FSDP"),
    )
    check_and_complete(
        trainer.accelerator,
        launch,
        micro_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_clipping=args.max_grad_norm,
        must_gather=not hasattr(trainer.model, "get_base_model"),
    )


def prepare_to_train(trainer: Trainer) -> None:
    """Before every training run of a Trainer."""
    mesh = trainer.cp_mesh
    if trainer.model_wrapped is trainer.model and mesh.world_size > 1 and not trainer.is_fsdp_enabled:
        # An earlier evaluate() has marked the model as prepared: accelerate would then never wrap it in DDP, and every
        # rank would follow its own part of the gradient.
        _compat.forget_prepared(trainer.model)
    if mesh.cp_size > 1:
        # The ranks of a sample must not drop the same units of different tokens. Adapters are initialised by now.
        torch.manual_seed(trainer.args.seed + mesh.cp_rank)


def check_and_complete(
    accelerator: Accelerator,
    launch: Launch,
    *,
    micro_batch_size: int = 1,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float = 0.0,
    must_gather: bool = False,
) -> None:
    """Checks what runs, and tells DeepSpeed and FSDP what they must know; in place.

    Args:
        accelerator (`Accelerator`): as built. A DeepSpeed config may come from a file of `accelerate launch`.
        launch (`Launch`): of it, with what was asked for.
        micro_batch_size (`int`, *optional*, defaults to 1): samples (or features) of a micro-step.
        gradient_accumulation_steps (`int`, *optional*): those of the run; by default the Accelerator's.
        gradient_clipping (`float`, *optional*, defaults to 0.0): used where a DeepSpeed config has none.
        must_gather (`bool`, *optional*, defaults to `False`): see [`ZeroRun`].

    Raises:
        ValueError, RuntimeError: see [`CHECKS`].
    """
    refuse(
        OtherParallelism.of(accelerator.parallelism_config),
        DataLoading.of(accelerator.dataloader_config),
        launch,
        GradientSums.of_accelerator(accelerator, cp_size=launch.cp_size),
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        steps = gradient_accumulation_steps or accelerator.gradient_accumulation_steps
        precision = accelerator.mixed_precision
        refuse(ZeroRun(config, micro_batch_size, steps, accelerator.num_processes, precision, must_gather))
        added = complete_zero_config(config, micro_batch_size=micro_batch_size, gradient_clipping=gradient_clipping)
        _log("DeepSpeed config completed with", added)
    if accelerator.distributed_type == DistributedType.FSDP:
        _log("FSDP mixed precision policy changed:", reduce_fsdp_in_fp32(accelerator.state.fsdp_plugin))


def _log(what: str, changes: list[str]) -> None:
    if changes:
        logger.info(f"{what} {', '.join(changes)}.")


def reduce_fsdp_in_fp32(fsdp_plugin: Any) -> list[str]:
    """Lets FSDP 1 or 2 sum gradients in fp32, and FSDP 2 hand out the loss in fp32; in place.

    accelerate makes the policy of a bf16 run reduce in bf16, and round what the model returns to bf16: the loss, and
    with it the factor that scales every gradient. Call it before the model is prepared. Without a policy FSDP reduces
    in the type of the weights, which [`GradientSums`] looks at.

    Args:
        fsdp_plugin (`accelerate.FullyShardedDataParallelPlugin`): of the Accelerator's state.

    Returns:
        `list[str]`: the settings that were changed, as `key=value`.
    """
    policy, changes = fsdp_plugin.mixed_precision_policy, {}
    if policy is None:
        return []
    if (policy.reduce_dtype or policy.param_dtype) in SIXTEEN_BITS:
        changes["reduce_dtype"] = torch.float32
    if getattr(policy, "output_dtype", None) in SIXTEEN_BITS:
        changes["output_dtype"] = None  # as it was computed
    fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, **changes)
    return [f"{key}={value}" for key, value in changes.items()]
