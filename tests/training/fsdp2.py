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
from transformers import TrainerCallback

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.models.patch import apply_context_parallel
from tests.training.tiny import Record, RecordingTrainer, make_arguments, make_model

FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class _WholeGradients(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})


def train_with_fsdp2(
    config: ContextParallelConfig,
    documents: list[dict],
    *,
    replicas: int = 1,
    max_tokens: int = 32,
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> Record:
    """Trains a tiny Llama; with `replicas` > 1 as HSDP, sharded over W / replicas processes."""
    _clear_sharding_prop_cache()  # a pool's process may know an equal mesh, whose groups are gone
    if replicas > 1:
        size = torch.distributed.get_world_size()
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=size // replicas)
    args = make_arguments(fsdp=True, fsdp_config=dict(FSDP), **arguments)
    assert args.device.type == "cpu"  # this makes the state
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    recorder, model = _WholeGradients(), make_model(dtype=dtype)
    trainer = RecordingTrainer(
        model=apply_context_parallel(model, config),
        args=args,
        train_dataset=documents,
        data_collator=DataCollatorForContextParallel(config, max_tokens=max_tokens),
        callbacks=[recorder],
    )
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
        parameters={name: whole(parameter) for name, parameter in model.named_parameters()},
        log_history=log,
    )
