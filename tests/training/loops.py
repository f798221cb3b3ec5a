"""The custom loop that the plugin is for, as the tests run it: in this process, in a world, or launched with
DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelPlugin
from tests.training.tiny import Record, make_model


def make_optimizer(model: nn.Module, name: str = "sgd", lr: float = 0.2) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trainable, lr=lr) if name == "sgd" else torch.optim.Adam(trainable, lr=lr)


def run_loop(
    plugin: ContextParallelPlugin,
    accelerator: Accelerator,
    documents: list[dict],
    *,
    model: nn.Module | None = None,
    optimizer: str = "sgd",
    lr: float = 0.2,
    epochs: int = 1,
    max_tokens: int = 32,
    **loader_settings: Any,
) -> Record:
    """Trains and returns losses and final parameters (gradients too where this process holds whole ones)."""
    model = apply_context_parallel(make_model() if model is None else model, plugin.config, mesh=plugin.mesh)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, optimizer, lr))
    loader = plugin.data_loader(documents, max_tokens=max_tokens, shuffle=False, **loader_settings)
    losses, gradients = [], []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batches, num_items in plugin.accumulation_windows(loader):
            local_loss = 0.0
            for batch in batches:
                loss = plugin.loss(wrapped, batch, num_items=num_items)
                accelerator.backward(loss)
                local_loss += float(loss.detach()) / accelerator.gradient_accumulation_steps
            (total,) = sum_over_world([local_loss], comm=Communicator(plugin.mesh))
            losses.append(total / plugin.mesh.world_size)
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Record(losses=losses, grad_norms=[], gradients=gradients, parameters=parameters, log_history=[])


def run_ddp_loop(config: ContextParallelConfig, documents: list[dict], accumulation: int, **settings: Any) -> Record:
    plugin = ContextParallelPlugin(config)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    return run_loop(plugin, accelerator, documents, **settings)
