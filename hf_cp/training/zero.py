"""DeepSpeed configs in which context-parallel ranks are ordinary data-parallel ranks.

DeepSpeed gets no mpu and no sequence_parallel_size: told about sequence parallelism, its gradient scale depends on the
ZeRO stage. Not told, every stage averages the gradients over all W = dp x cp processes, which the loss counts on
(plugin.py). Its train_batch_size is then micro x GA x W: bookkeeping that DeepSpeed checks against the world. The rows
of a step are micro x GA x dp.

The gradients of the ranks of one row are parts of one sum, so they are reduced in fp32 (DeepSpeed would take bf16 in a
bf16 run). DeepSpeed clips to 1.0 where a config says nothing, so clipping is always written out.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

ZERO_STAGES = (0, 1, 2, 3)

GATHER_WEIGHTS = "stage3_gather_16bit_weights_on_model_save"

_SEQUENCE_KEYS = ("sequence_parallel_size", "data_parallel_size")


def make_zero_config(
    zero_stage: int, *, gradient_clipping: float, config: dict[str, Any] | str | Path | None = None
) -> dict[str, Any]:
    """A DeepSpeed config for `zero_stage`, on top of the caller's own one.

    Args:
        zero_stage (`int`): 0, 1, 2 or 3.
        gradient_clipping (`float`): largest gradient norm; 0 turns clipping off.
        config (`dict` or path, *optional*): more DeepSpeed settings; not changed.

    Raises:
        ValueError: the stage is unknown, or `config` says something else than the arguments, or tells DeepSpeed about
            sequence parallelism.
    """
    if zero_stage not in ZERO_STAGES:
        raise ValueError(
            f"zero_stage={zero_stage!r} is not supported. Choose one of {', '.join(map(str, ZERO_STAGES))}."
        )
    result = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else copy.deepcopy(config or {})
    zero = result.setdefault("zero_optimization", {})
    _set(zero, "stage", zero_stage, name="zero_optimization.stage")
    _set(result, "gradient_clipping", float(gradient_clipping))
    result.setdefault("gradient_accumulation_steps", "auto")
    complete_zero_config(result, micro_batch_size=1, gradient_clipping=gradient_clipping)
    return result


def keep_grad_norm(engine: Any) -> None:
    """Lets a stage-0 engine without mixed precision know its gradient norm, from before clipping, as the others do.

    Its optimizer is the user's own, which has no norm to ask for; the Trainer would log none.

    Args:
        engine (`deepspeed.DeepSpeedEngine`): nothing is done to one that knows its norm.
    """
    from deepspeed.runtime.utils import clip_grad_norm_

    optimizer, clipping = engine.optimizer, engine.gradient_clipping()
    if engine.zero_optimization_stage() or hasattr(optimizer, "_global_grad_norm"):
        return
    optimizer._global_grad_norm = None  # where the engine looks after a step

    def clip() -> None:
        parameters = engine.module.parameters()
        optimizer._global_grad_norm = float(clip_grad_norm_(parameters, max_norm=clipping, mpu=engine.mpu))

    def measure(*_: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        optimizer._global_grad_norm = float(torch.nn.utils.get_total_norm(gradients))

    if clipping > 0:
        engine.clip_fp32_gradients = clip
    else:
        optimizer.register_step_pre_hook(measure)


def complete_zero_config(config: dict[str, Any], *, micro_batch_size: int, gradient_clipping: float) -> list[str]:
    """Writes into `config`, in place, what DeepSpeed would otherwise fill with a default that is wrong here.

    Args:
        config (`dict`): a DeepSpeed config.
        micro_batch_size (`int`): rows (or features) of a micro-step; nobody else can tell DeepSpeed, since our loaders
            are not prepared by accelerate.
        gradient_clipping (`float`): used where the config has none (accelerate would clip to 1.0).

    Returns:
        `list[str]`: the settings that were added, as `key=value`.

    Raises:
        ValueError: the config tells DeepSpeed about sequence or tensor parallelism, or reduces gradients in 16 bits.
    """
    for key in _SEQUENCE_KEYS:
        if config.get(key, 1) not in (1, "auto"):
            raise ValueError(
                f"The DeepSpeed config has {key}={config[key]}, which makes the scale of gradients depend on "
                "the ZeRO stage.\n  Remove it; give the degrees to ContextParallelConfig."
            )
    tensor_degree = config.get("tensor_parallel", {}).get("autotp_size", 0)
    if tensor_degree > 1:
        raise ValueError(
            f"The DeepSpeed config has tensor_parallel.autotp_size={tensor_degree}, which is not supported.\n"
            "  Remove it, or set it to 1."
        )
    _check_reduction_dtype(config)
    defaults = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": float(gradient_clipping),
        "communication_data_type": "fp32",
    }
    added = {key: value for key, value in defaults.items() if config.get(key, "auto") == "auto"}
    config.update(added)
    config.setdefault("train_batch_size", "auto")  # accelerate fills in micro x GA x W
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and zero.get(GATHER_WEIGHTS, "auto") == "auto":
        zero[GATHER_WEIGHTS] = added[GATHER_WEIGHTS] = True  # else a saved model has no weights
    return [f"{key}={value}" for key, value in added.items()]


def _check_reduction_dtype(config: dict[str, Any]) -> None:
    """Refuses what lets DeepSpeed add up parts of a gradient in less than fp32."""
    zero, dtype = config.get("zero_optimization", {}), config.get("communication_data_type", "auto")
    settings = {  # torch_autocast reduces the gradients of linear layers in its own type, whatever else is set
        f"communication_data_type={dtype!r}": dtype not in ("auto", "fp32"),
        "torch_autocast.enabled=true": config.get("torch_autocast", {}).get("enabled", False),
        "zero_optimization.zero_quantized_gradients=true": zero.get("zero_quantized_gradients", False),
    }
    found = [setting for setting, is_set in settings.items() if is_set]
    if found:
        raise ValueError(
            f"The DeepSpeed config has {' and '.join(found)}, but the ranks of a row hold parts of one gradient, "
            "which are summed in fp32.\n  Remove it (communication_data_type may be 'fp32'); for bf16 use DeepSpeed's "
            "bf16 section."
        )


def check_batch_sizes(
    config: dict[str, Any], *, micro_batch_size: int, gradient_accumulation_steps: int, world_size: int
) -> None:
    """Refuses explicit batch sizes that contradict the run; 'auto' fits always.

    DeepSpeed's train_batch_size counts every process, those that share a row too: micro x GA x W.

    Raises:
        ValueError: with both numbers.
    """
    expected = {
        "train_micro_batch_size_per_gpu": (micro_batch_size, "one row per micro-step"),
        "gradient_accumulation_steps": (gradient_accumulation_steps, "the Accelerator's"),
        "train_batch_size": (
            micro_batch_size * gradient_accumulation_steps * world_size,
            f"{micro_batch_size} x {gradient_accumulation_steps} accumulation steps x {world_size} processes",
        ),
    }
    for key, (value, meaning) in expected.items():
        given = config.get(key, "auto")
        if given != "auto" and given != value:
            raise ValueError(
                f"The DeepSpeed config has {key}={given}, but this run has {value} ({meaning}).\n"
                f"  Set {key} to 'auto' in the DeepSpeed config."
            )


def check_saved_weights(config: dict[str, Any], *, is_adapter: bool) -> None:
    """Refuses a ZeRO-3 run whose saved models would have no weights.

    Args:
        config (`dict`): a DeepSpeed config, after [`complete_zero_config`].
        is_adapter (`bool`): the model is a `PeftModel`, whose adapters are always gathered and saved.

    Raises:
        ValueError: DeepSpeed is told not to gather weights.
    """
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get(GATHER_WEIGHTS) and not is_adapter:
        raise ValueError(
            f"The DeepSpeed config has ZeRO stage 3 and {GATHER_WEIGHTS}={zero.get(GATHER_WEIGHTS)}: save_model would "
            "write a model without weights.\n"
            f"  Set {GATHER_WEIGHTS} to true in the file (accelerate takes 'auto' for false), or start "
            "`accelerate launch` with --zero3_save_16bit_model true."
        )


def check_precision(config: dict[str, Any], *, mixed_precision: str) -> None:
    """Refuses what DeepSpeed does not compute the same way in every stage.

    Raises:
        ValueError: bf16 without ZeRO: DeepSpeed's stage 0 optimizer then follows another trajectory than stages 1 to
            3.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == 0 and mixed_precision == "bf16":
        raise ValueError(
            "zero_stage=0 with bf16 trains differently from stages 1 to 3 and from DDP.\n"
            "  Choose zero_stage 1, 2 or 3, or run without DeepSpeed."
        )


def _set(config: dict[str, Any], key: str, value: Any, *, name: str | None = None) -> None:
    """Sets `key`, unless the config already says something else."""
    given = config.get(key, "auto")
    if given not in ("auto", value):
        raise ValueError(
            f"The DeepSpeed config has {name or key}={given}, but {value} was asked for. Remove one of the two."
        )
    config[key] = value
