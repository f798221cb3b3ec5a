"""Training steps as a user would run them, for training.py: this package, the untouched model, and two peers.

A `Run` is one way to train: it takes a whole row of token ids on every process and knows which part is its own. All of
them use AdamW and, except for the untouched model, accelerate.

The peers are made to run on the CPU, as little as it takes: DeepSpeed's communication is started before accelerate
asks for it, accelerate is told that its processes may run FSDP, and PyTorch's context parallelism is given the CPU's
attention operator.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.tensor import DTensor

from hf_cp import ContextParallelConfig, ContextParallelPlugin, DataCollatorForContextParallel, apply_context_parallel

LEARNING_RATE = 1e-5


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE, fused=True)


class Run(ABC):
    """A model that is ready to train; `forward`, `backward` and `update` are one step."""

    model: torch.nn.Module

    @abstractmethod
    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """The loss to go backward from; `row` is int64 [tokens], all of it on every process."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None: ...

    @abstractmethod
    def update(self) -> None: ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by the names of the bare model; every process must ask."""
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}


class Untouched(Run):
    """The Hugging Face model in one process."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.optimizer = model, adamw(model)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=row.unsqueeze(0), labels=row.unsqueeze(0)).loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accelerated(Run):
    """What accelerate prepared: DDP, FSDP2, or an engine of DeepSpeed, which steps its own optimizer."""

    def prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        self.accelerator, self.model = accelerator, model
        self.wrapped, self.optimizer = accelerator.prepare(model, adamw(model))
        self.is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED

    def backward(self, loss: torch.Tensor) -> None:
        # Accelerator.backward would also step the engine, and the gradients were gone
        (self.wrapped.backward if self.is_deepspeed else self.accelerator.backward)(loss)

    def update(self) -> None:
        if self.is_deepspeed:
            self.wrapped.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        if not self.is_deepspeed:
            return super().gradients()
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p) for name, p in self.model.named_parameters() if p.requires_grad}


class Ours(Accelerated):
    """This package's plugin and collator; `backend` is "ddp", "zero2" or "fsdp2"."""

    def __init__(self, model: torch.nn.Module, config: ContextParallelConfig, backend: str = "ddp"):
        plugin, settings = ContextParallelPlugin(config), {}
        if backend == "zero2":
            settings["deepspeed_plugin"] = plugin.deepspeed_plugin(zero_stage=2)
        elif backend == "fsdp2":
            allow_fsdp()
            settings["fsdp_plugin"] = fsdp2_plugin()
        else:
            settings["cpu"] = True
        accelerator = plugin.accelerator(**settings)
        self.plugin, self.collator = plugin, DataCollatorForContextParallel(config, cp_rank=plugin.mesh.cp_rank)
        self.prepare(accelerator, apply_context_parallel(model, plugin.config, mesh=plugin.mesh))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        batch = self.collator([{"input_ids": row}])
        return self.plugin.loss(self.wrapped, batch, num_items=len(row) - 1)


class DeepSpeedUlysses(Accelerated):
    """DeepSpeed's Ulysses through accelerate, with ZeRO-2 and the loss that accelerate's guide writes."""

    def __init__(self, model: torch.nn.Module):
        from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig
        from deepspeed import init_distributed

        from hf_cp.training.deepspeed import make_zero_config

        init_distributed("gloo", verbose=False)
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_zero_config(2, gradient_clipping=0.0)),
            parallelism_config=ParallelismConfig(sp_size=self.size, sp_backend="deepspeed", sp_handler=handler),
        )
        self.prepare(accelerator, model)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        part = slice(*(len(row) * edge // self.size for edge in (self.rank, self.rank + 1)))
        targets = torch.nn.functional.pad(row[1:], (0, 1), value=-100).unsqueeze(0)[:, part]
        positions = torch.arange(len(row)).unsqueeze(0)[:, part]
        logits = self.wrapped(input_ids=row.unsqueeze(0)[:, part], position_ids=positions, use_cache=False).logits
        loss = self.model.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=self.model.config.vocab_size
        )
        losses = torch.distributed.nn.functional.all_gather(loss)
        counts = torch.distributed.nn.functional.all_gather((targets != -100).sum())
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


class TorchContextParallel(Accelerated):
    """PyTorch's context parallelism with FSDP2 through accelerate."""

    def __init__(self, model: torch.nn.Module):
        from peers import register_cpu_flash

        register_cpu_flash()
        allow_fsdp()
        accelerator = Accelerator(
            fsdp_plugin=fsdp2_plugin(), parallelism_config=ParallelismConfig(cp_size=dist.get_world_size())
        )
        self.prepare(accelerator, model)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        ids, positions = row.clone().unsqueeze(0), torch.arange(len(row)).unsqueeze(0)
        targets = torch.nn.functional.pad(row[1:], (0, 1), value=-100).unsqueeze(0)
        buffers = [ids, positions, targets]
        # the context has to last until the backward pass is over; `backward` leaves it
        self.context = self.accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        )
        self.context.__enter__()
        logits = self.wrapped(input_ids=ids, position_ids=positions, use_cache=False).logits
        # FSDP averages over the processes: each one's sum times W over all targets
        scale = self.accelerator.num_processes / (len(row) - 1)
        return torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="sum") * scale

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self.context.__exit__(None, None, None)


def find_deepspeed_extension() -> None:
    """DeepSpeed compiles its CPU communication once, with this environment's ninja; `make` keeps it in .cache."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).resolve().parents[1] / ".cache/torch_extensions"))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def allow_fsdp() -> None:
    """accelerate runs FSDP on accelerators only; this names its processes those of another kind of device."""
    assert PartialState(cpu=True).device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def fsdp2_plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def one_process(model: torch.nn.Module) -> Run:
    return Ours(model, ContextParallelConfig(force=True))


def ring(model: torch.nn.Module) -> Run:
    return Ours(model, ContextParallelConfig(ring_degree=2))


def ring_fsdp2(model: torch.nn.Module) -> Run:
    return Ours(model, ContextParallelConfig(ring_degree=2), "fsdp2")


def ulysses_zero2(model: torch.nn.Module) -> Run:
    find_deepspeed_extension()
    return Ours(model, ContextParallelConfig(ulysses_degree=2), "zero2")


def deepspeed_ulysses(model: torch.nn.Module) -> Run:
    find_deepspeed_extension()
    return DeepSpeedUlysses(model)


RUNS: dict[str, Any] = {
    "one process": one_process,
    "untouched model": Untouched,
    "ring 2": ring,
    "ulysses 2, ZeRO-2": ulysses_zero2,
    "ring 2, FSDP2": ring_fsdp2,
    "DeepSpeed Ulysses, ZeRO-2": deepspeed_ulysses,
    "PyTorch context parallel, FSDP2": TorchContextParallel,
}
