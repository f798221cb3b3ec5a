"""DeepSpeed: configs in which context-parallel ranks are ordinary data-parallel ranks; checkpoints for other worlds.

DeepSpeed gets no mpu and no sequence_parallel_size: told about sequence parallelism, its gradient scale depends on the
ZeRO stage. Not told, every stage averages the gradients over all W = dp x cp processes, which the loss counts on
(plugin.py). Its train_batch_size is then micro x GA x W: bookkeeping that DeepSpeed checks against the world. The
samples of a step are micro x GA x dp.

The gradients of the ranks of one sample are parts of one sum, so they are reduced in fp32 (DeepSpeed would take bf16
in a bf16 run). DeepSpeed clips to 1.0 where a config says nothing, so clipping is always written out. What a config
must not say is in checks/zero.py.

ZeRO cuts the optimizer's state into one part per process. `make_universal` joins the parts beside the checkpoint, one
file per parameter; from then on any number of processes can resume. DeepSpeed's ZeRO-3 loader then needs two repairs
(0.19.8): it gives all parameter groups one shared step counter, which torch's optimizers increase once per group, and
the settings (weight decay, learning rate) of the first group. Both are set right from the same files.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

import torch

from hf_cp import _compat
from hf_cp.training.checks import ZeroConfig, refuse
from hf_cp.training.checks.zero import GATHER_WEIGHTS

ZERO_STAGES = (0, 1, 2, 3)
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"  # DeepSpeed's names


def make_zero_config(
    zero_stage: int, *, gradient_clipping: float, config: dict[str, Any] | str | Path | None = None
) -> dict[str, Any]:
    """A DeepSpeed config for `zero_stage`, on top of the caller's own one.

    Args:
        zero_stage (`int`): 0, 1, 2 or 3.
        gradient_clipping (`float`): largest gradient norm; 0 turns clipping off.
        config (`dict` or path, *optional*): more DeepSpeed settings; not changed.

    Raises:
        ValueError: the stage is unknown, or `config` says something else than the arguments, or what
            [`ZeroConfig`] refuses.
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
    refuse(ZeroConfig(result))
    complete_zero_config(result, micro_batch_size=1, gradient_clipping=gradient_clipping)
    return result


def _set(config: dict[str, Any], key: str, value: Any, *, name: str | None = None) -> None:
    """Sets `key`, unless the config already says something else."""
    given = config.get(key, "auto")
    if given not in ("auto", value):
        raise ValueError(
            f"The DeepSpeed config has {name or key}={given}, but {value} was asked for. Remove one of the two."
        )
    config[key] = value


def complete_zero_config(config: dict[str, Any], *, micro_batch_size: int, gradient_clipping: float) -> list[str]:
    """Writes into `config`, in place, what DeepSpeed would otherwise fill with a default that is wrong here.

    Args:
        config (`dict`): a DeepSpeed config.
        micro_batch_size (`int`): samples (or features) of a micro-step; nobody else can tell DeepSpeed, since our
            loaders are not prepared by accelerate.
        gradient_clipping (`float`): used where the config has none (accelerate would clip to 1.0).

    Returns:
        `list[str]`: the settings that were added, as `key=value`.
    """
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


def keep_grad_norm(engine: Any) -> None:
    """Lets a stage-0 engine without mixed precision know its gradient norm, from before clipping, as the others do.

    Its optimizer is the user's own, which has no norm to ask for; the Trainer would log none.

    Args:
        engine (`deepspeed.DeepSpeedEngine`): nothing is done to one that knows its norm.
    """
    from deepspeed.runtime.utils import clip_grad_norm_

    optimizer, clipping = engine.optimizer, engine.gradient_clipping()
    if engine.zero_optimization_stage() or _compat.knows_grad_norm(optimizer):
        return
    _compat.note_grad_norm(optimizer, None)

    def clip() -> None:
        parameters = engine.module.parameters()
        norm = clip_grad_norm_(parameters, max_norm=clipping, mpu=engine.mpu)
        _compat.note_grad_norm(optimizer, float(norm))

    def measure(*_: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        _compat.note_grad_norm(optimizer, float(torch.nn.utils.get_total_norm(gradients)))

    if clipping > 0:
        engine.clip_fp32_gradients = clip
    else:
        optimizer.register_step_pre_hook(measure)


def is_universal(checkpoint: str | os.PathLike) -> bool:
    """Whether [`make_universal`] has converted this Trainer checkpoint."""
    return (Path(checkpoint) / LATEST_UNIVERSAL).is_file()


def make_universal(checkpoint: str | os.PathLike, *, num_workers: int = 1) -> Path:
    """Joins the parts of a ZeRO checkpoint, beside them; needs about as much disk as they take.

    Args:
        checkpoint (path): a folder `checkpoint-<step>` of the Trainer, with ZeRO stage 1, 2 or 3.
        num_workers (`int`, *optional*, defaults to 1): processes that read and write; each holds one part in memory.

    Returns:
        `Path`: the folder of the universal checkpoint, inside `checkpoint`.

    Raises:
        ValueError: it is not a ZeRO checkpoint.
    """
    checkpoint = Path(checkpoint)
    latest = checkpoint / LATEST
    if not latest.is_file():
        raise ValueError(
            f"{checkpoint} is not a ZeRO checkpoint: it has no file {LATEST!r}.\n"
            "  Pass a folder checkpoint-<step> of a run with ZeRO. (Without ZeRO any number of processes can resume.)"
        )
    from deepspeed.checkpoint import ds_to_universal

    source = checkpoint / latest.read_text(encoding="utf-8").strip()
    target = source.with_name(f"{source.name}_universal")
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=num_workers,
            num_merge_workers=num_workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # the note that nothing is tensor parallel, which only Megatron writes
        )
    )
    return target


def repair_optimizer(optimizer: Any, checkpoint: str | os.PathLike) -> None:
    """Gives every group of a ZeRO-3 optimizer its own step counter and its own settings, after a universal load.

    Args:
        optimizer: as the Trainer holds it (wrappers around torch's optimizer have it as `.optimizer`).
        checkpoint (path): what was loaded.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    checkpoint = Path(checkpoint)
    tag = (checkpoint / LATEST_UNIVERSAL).read_text(encoding="utf-8").strip()
    saved = torch.load(checkpoint / tag / "zero" / "optimizer_state.pt", mmap=True, weights_only=False)
    groups = saved["optimizer_state_dict"]["param_groups"]
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
