"""Loaders that are not this package's: exact where all ranks of a row get the same documents, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from hf_cp.config import ContextParallelConfig
from hf_cp.data import DataCollatorForContextParallel
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelPlugin
from tests.training.tiny import REF, STOCK, make_documents, make_model, make_trainer, relative

RING2 = ContextParallelConfig(ring_degree=2)
LENGTHS = (13, 6, 9, 17, 4, 8)


def own_loader(collator: DataCollatorForContextParallel) -> DataLoader:
    """Three rows of two documents."""
    return DataLoader(make_documents(LENGTHS), batch_size=2, collate_fn=collator)


def train_on_own_loader(config: ContextParallelConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a window of two rows and one of one row; the loader is not prepared."""
    plugin = ContextParallelPlugin(config)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    losses = []
    loader = own_loader(DataCollatorForContextParallel(plugin.config, cp_rank=plugin.mesh.cp_rank))
    for batches, num_items in plugin.accumulation_windows(loader):
        losses.append(0.0)
        for batch in batches:
            loss = plugin.loss(wrapped, batch, num_items=num_items)
            accelerator.backward(loss)
            losses[-1] += float(loss.detach()) / accelerator.gradient_accumulation_steps
        optimizer.step()
        optimizer.zero_grad()
    totals = sum_over_world(losses, comm=Communicator(plugin.mesh))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return [total / plugin.mesh.world_size for total in totals], weights


@pytest.mark.distributed
def test_an_own_loader_of_equal_documents_is_exact(world2):
    losses, weights = train_on_own_loader(REF)
    start = dict(make_model().named_parameters())
    for found_losses, found in world2.run(train_on_own_loader, RING2):
        assert len(losses) == 2 and found_losses == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            assert relative(found[name] - start[name], weight - start[name]) < 1e-10


def prepare_own_loader(config: ContextParallelConfig) -> int:
    """Batches of this rank."""
    plugin = ContextParallelPlugin(config)
    accelerator = plugin.accelerator(cpu=True)
    return len(
        accelerator.prepare(own_loader(DataCollatorForContextParallel(plugin.config, cp_rank=plugin.mesh.cp_rank)))
    )


def set_up(**loading: bool) -> None:
    ContextParallelPlugin(RING2).accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loading))


def step_without_the_plugin() -> None:
    """Rank r gets batch r of accelerate."""
    model = apply_context_parallel(make_model(), RING2)
    wrapped, loader = Accelerator(cpu=True).prepare(model, own_loader(DataCollatorForContextParallel(RING2)))
    wrapped(**next(iter(loader)))


@pytest.mark.distributed
def test_batches_that_accelerate_deals_to_ranks_are_refused(world2):
    """With the plugin before training; in a bare loop, which it does not see, by the first forward pass."""
    for error in world2.run(prepare_own_loader, RING2, expect_error=True):
        assert error.type_name == "ValueError" and "every rank other batches of this DataLoader" in error.message
        assert "cp_size=2 ranks of a sample" in error.message and "plugin.data_loader" in error.message
    for error in world2.run(step_without_the_plugin, expect_error=True):
        assert error.type_name == "ValueError" and "hold different samples" in error.message
        assert "accelerator.prepare deals other batches" in error.message
    assert world2.run(prepare_own_loader, STOCK) == [2, 2]  # whole rows may be dealt: 3 of them, one twice


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_batches_that_accelerate_would_cut_are_refused(world2, name):
    for error in world2.run(set_up, **{name: True}, expect_error=True):
        assert error.type_name == "ValueError" and f"{name}=True" in error.message
        assert "its own shard of a sample" in error.message
    with pytest.raises(ValueError, match=f"{name}=True.*its own shard of a sample"):
        make_trainer(make_model(), REF, make_documents(LENGTHS), accelerator_config={name: True})
