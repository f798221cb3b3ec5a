"""FSDP 2 through the Trainer, on CPU.

accelerate runs FSDP on accelerators only: on CPU it would silently run DDP, which this package refuses. For tests it
is told, between the arguments and the Trainer, that its processes are those of another kind of device; the collectives
stay gloo's and everything after that is accelerate's own path.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import TrainerCallback, TrainingArguments

from hf_cp.config import ContextParallelConfig
from tests.training.tiny import Record, make_arguments, make_model, make_trainer

FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


class _WholeGradients(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})


def fsdp2_arguments(
    *, replicas: int = 1, state_dict_type: str = "FULL_STATE_DICT", **arguments: Any
) -> TrainingArguments:
    """For `make_trainer(arguments_from=...)`; `replicas` > 1 is HSDP, sharded over W / replicas processes."""
    _clear_sharding_prop_cache()  # a pool's process may know an equal mesh, whose groups are gone
    if replicas > 1:
        size = torch.distributed.get_world_size()
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=size // replicas)
    args = make_arguments(fsdp=True, fsdp_config=FSDP | {"state_dict_type": state_dict_type}, **arguments)
    assert args.device.type == "cpu"  # this makes the state
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    return args


def train_with_fsdp2(
    config: ContextParallelConfig,
    documents: list[dict],
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> Record:
    """Trains a tiny Llama."""
    recorder, model = _WholeGradients(), make_model(dtype=dtype)
    settings = {"replicas": replicas, **arguments}
    trainer = make_trainer(model, config, documents, callbacks=[recorder], arguments_from=fsdp2_arguments, **settings)
    trainer.train()
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    shards = {p.device_mesh.shape for p in model.parameters()}
    size = trainer.cp_mesh.world_size
    assert shards == {(size,) if replicas == 1 else (replicas, size // replicas)}, shards
    log = trainer.state.log_history
    return Record(
        losses=trainer.step_losses(),
        grad_norms=[float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        gradients=recorder.gradients,
        parameters=whole_parameters(model),
        log_history=log,
    )
