"""The plugin in a custom loop without DeepSpeed: exact for every split, also in a short last window."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import sum_over_world
from hf_cp.models.patch import apply_context_parallel
from hf_cp.training import ContextParallelPlugin
from hf_cp.training.backend import reduce_fsdp_in_fp32
from tests.training.fixed_loss import LOSS_2, LOSS_4, make_document, make_fixed_loss_model
from tests.training.loops import run_ddp_loop
from tests.training.tiny import REF, STOCK, make_documents, make_model, relative

RING2 = ContextParallelConfig(ring_degree=2)
LENGTHS = (30, 21, 11, 17, 14, 9, 20, 3, 8, 2, 1, 6, 5)  # 5 rows of 32 tokens


def by_hand(documents: list[dict], windows: list[list[int]], lr: float = 0.2) -> tuple[list[float], dict]:
    """SGD on the token mean of each window, one document at a time, with nothing but torch and the untouched model."""
    model, losses = make_model(), []
    for window in windows:
        count = sum(sum(label != -100 for label in documents[i]["labels"][1:]) for i in window)
        total = torch.zeros((), dtype=torch.float64)
        for i in window:
            ids, labels = torch.tensor([documents[i]["input_ids"]]), torch.tensor(documents[i]["labels"])
            logits = model(ids).logits[0]
            if len(labels) > 1:
                total = total + cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        (total / count).backward()
        losses.append(float(total.detach()) / count)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        model.zero_grad()
    return losses, dict(model.named_parameters())


def windows_of(documents: list[dict], samples_per_step: int) -> list[list[int]]:
    """The documents of every optimizer step, from the packing manifest."""
    plugin = ContextParallelPlugin(REF)
    plugin.accelerator(cpu=True)
    rows = plugin.data_loader(documents, max_tokens=32, shuffle=False).manifest.samples
    assert len(rows) == 5
    return [sum(map(list, rows[start : start + samples_per_step]), []) for start in range(0, 5, samples_per_step)]


@pytest.mark.parametrize("config", [REF, STOCK], ids=["our loss", "stock model"])
def test_one_process_equals_single_documents(config):
    """Packing and chunked loss change nothing; every other exactness test builds on this one."""
    documents = make_documents(LENGTHS)
    losses, parameters = by_hand(documents, windows_of(documents, 2))
    record = run_ddp_loop(config, documents, 2)
    tolerance = 1e-12 if config is REF else 1e-6
    assert len(losses) == 3 and record.losses == pytest.approx(losses, rel=tolerance)
    start = dict(make_model().named_parameters())
    for name, parameter in parameters.items():
        assert relative(record.parameters[name] - start[name], parameter - start[name]) < tolerance * 10


SPLITS = [
    ("world2", RING2),
    ("world2", ContextParallelConfig(ulysses_degree=2)),
    ("world4", ContextParallelConfig(ring_degree=2, ulysses_degree=2)),
    ("world4", RING2),
    ("world2", STOCK),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "config"), SPLITS, ids=["ring2", "ulysses2", "usp2x2", "dp2-ring2", "dp2"])
def test_split_equals_one_process(request, world, config):
    documents = make_documents(LENGTHS)
    dp_size = int(world[-1]) // config.cp_size
    reference = run_ddp_loop(REF, documents, 2 * dp_size, epochs=2)
    tolerance = 1e-6 if config == STOCK else 1e-10
    for record in request.getfixturevalue(world).run(run_ddp_loop, config, documents, 2, epochs=2):
        assert record.losses == pytest.approx(reference.losses, rel=tolerance)
        for name, gradient in reference.gradients[-1].items():
            assert relative(record.gradients[-1][name], gradient) < tolerance
        for name, parameter in reference.parameters.items():
            assert relative(record.parameters[name], parameter) < tolerance


def two_micro_steps(config: ContextParallelConfig) -> tuple[list[float], int]:
    documents = [
        make_document([LOSS_2] * 16, [True] * 6 + [False] * 10),
        make_document([LOSS_4] * 16, [True] * 2 + [False] * 14),
    ]
    plugin = ContextParallelPlugin(config)
    plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = plugin.data_loader(documents, max_tokens=16, shuffle=False)
    model = apply_context_parallel(make_fixed_loss_model(), plugin.config, mesh=plugin.mesh)
    ((batches, num_items),) = plugin.accumulation_windows(loader)
    return [
        float(plugin.loss(model, batch, num_items=num_items).detach()) for batch in batches
    ], plugin.samples_per_step


@pytest.mark.distributed
def test_unequal_micro_steps(world2):
    """6 targets of loss 2 and 2 of loss 4: 2.5, as the mean over ranks and micro-steps."""
    results = world2.run(two_micro_steps, RING2)
    assert sum(sum(losses) for losses, _ in results) / 4 == pytest.approx(2.5, rel=1e-12)
    assert [rows for _, rows in results] == [2, 2]


def windows(config: ContextParallelConfig) -> tuple[list[int], list[list[bool]], int]:
    documents = make_documents([8] * 6, masked=0.0)
    for document, count in zip(documents, (7, 5, 3, 1, 0, 0), strict=True):
        document["labels"] = [label if i <= count else -100 for i, label in enumerate(document["labels"])]
    plugin = ContextParallelPlugin(config)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = plugin.data_loader(documents, max_tokens=8, shuffle=False)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    counts, synced = [], []
    for batches, num_items in plugin.accumulation_windows(loader):
        counts.append(num_items)
        synced.append([])
        for batch in batches:
            synced[-1].append(accelerator.sync_gradients)
            loss = plugin.loss(model, batch, num_items=num_items)
            assert loss.requires_grad and bool(torch.isfinite(loss))
    return counts, synced, plugin.samples_per_step


@pytest.mark.distributed
def test_windows(world4):
    """Targets are counted once; a short last window synchronises; a window without targets has a finite loss."""
    for counts, synced, samples_per_step in world4.run(windows, RING2):
        assert counts == [16, 0]
        assert synced == [[False, True], [True]]
        assert samples_per_step == 4


def communicated_steps() -> list[int]:
    """How many gradient buckets DDP reduces in each micro-step."""
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh))
    reduced = []

    def hook(state, bucket):
        reduced[-1] += 1
        return torch.futures.collect_all([]).then(lambda _: bucket.buffer())

    model.register_comm_hook(None, hook)
    loader = plugin.data_loader(make_documents([16] * 4), max_tokens=16)
    for batches, num_items in plugin.accumulation_windows(loader):
        for batch in batches:
            reduced.append(0)
            accelerator.backward(plugin.loss(model, batch, num_items=num_items))
    return reduced


@pytest.mark.distributed
def test_ddp_reduces_once_per_window(world2):
    for reduced in world2.run(communicated_steps):
        assert [count > 0 for count in reduced] == [False, False, True, True]


def learning_rates() -> list[float]:
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(cpu=True)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for batches, num_items in plugin.accumulation_windows(plugin.data_loader(make_documents([16] * 3), max_tokens=16)):
        for batch in batches:
            accelerator.backward(plugin.loss(model, batch, num_items=num_items))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates += scheduler.get_last_lr()
    return rates


@pytest.mark.distributed
def test_schedulers_step_once_per_optimizer_step(world2):
    """accelerate would step a prepared scheduler once per process."""
    assert world2.run(learning_rates) == [[1 / 2, 1 / 3, 1 / 4]] * 2


def interrupted_loop(folder: str, stop: int | None, resumed: bool) -> tuple[list[list[int]], dict]:
    """The documented loop over two epochs of 5 rows; saves and ends after `stop` steps. What it saw, its weights."""
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
    model = apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = plugin.data_loader(make_documents([16] * 5), max_tokens=16, seed=3)
    if resumed:
        accelerator.load_state(folder)
    seen, steps = [], 0
    for epoch in range(loader.epoch, 2):
        loader.set_epoch(epoch)
        for batches, num_items in plugin.accumulation_windows(loader):
            for batch in batches:
                seen.append(batch["input_ids"][0].tolist())
                accelerator.backward(plugin.loss(wrapped, batch, num_items=num_items))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == stop:
                accelerator.save_state(folder)
                return seen, {}
    return seen, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize("stop", [2, 4], ids=["in epoch 0", "in epoch 1"])
def test_loop_resumes_where_it_was_saved(world2, tmp_path, stop):
    whole = world2.run(interrupted_loop, str(tmp_path), None, False)
    before = world2.run(interrupted_loop, str(tmp_path), stop, False)
    after = world2.run(interrupted_loop, str(tmp_path), None, True)
    for (rows, parameters), (first, _), (rest, resumed) in zip(whole, before, after, strict=True):
        assert len(rows) == 10 and 0 < len(first) < 10
        assert first + rest == rows
        assert all(torch.equal(resumed[name], parameter) for name, parameter in parameters.items())


def save_inside_a_window(folder: str) -> None:
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped = accelerator.prepare(apply_context_parallel(make_model(), plugin.config, mesh=plugin.mesh))
    loader = plugin.data_loader(make_documents([16] * 4), max_tokens=16)
    for batches, num_items in plugin.accumulation_windows(loader):
        for batch in batches:
            accelerator.backward(plugin.loss(wrapped, batch, num_items=num_items))
            accelerator.save_state(folder)


@pytest.mark.distributed
def test_half_a_window_is_not_saved(world2, tmp_path):
    for error in world2.run(save_inside_a_window, str(tmp_path), expect_error=True):
        assert error.type_name == "RuntimeError" and "between the micro-batches of an optimizer step" in error.message


def unwrapped_loss_output(mixed_precision: str) -> tuple[bool, bool]:
    """Whether the model that accelerate has unwrapped scores its shard, and its forward still has a signature."""
    plugin = ContextParallelPlugin(RING2)
    accelerator = plugin.accelerator(cpu=True, mixed_precision=mixed_precision)
    wrapped = accelerator.prepare(
        apply_context_parallel(make_model(dtype=torch.float32), plugin.config, mesh=plugin.mesh)
    )
    model = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    batch = next(iter(plugin.data_loader(make_documents([16]), max_tokens=16)))
    output = model(**batch)
    return output.token_losses is not None, "input_ids" in inspect.signature(model.forward).parameters


@pytest.mark.distributed
def test_an_unwrapped_model_is_still_patched(world2):
    assert world2.run(unwrapped_loss_output, "bf16") == [(True, True)] * 2
    assert world2.run(unwrapped_loss_output, "no") == [(True, True)] * 2


def dropped_units(seeded: bool) -> list[bool]:
    """What dropout drops of 64 units after one seed on every rank."""
    plugin = ContextParallelPlugin(RING2)
    plugin.accelerator(cpu=True)
    torch.manual_seed(0)
    if seeded:
        plugin.seed_dropout(0)
    return (torch.nn.functional.dropout(torch.ones(64), 0.5) == 0).tolist()


@pytest.mark.distributed
def test_seed_dropout(world4):
    assert len(set(map(tuple, world4.run(dropped_units, False)))) == 1  # so it is needed
    first, second, third, fourth = world4.run(dropped_units, True)
    assert first != second and (first, second) == (third, fourth)


# Gradients are reduced in fp32


def sixteen_bit_step(config: ContextParallelConfig, trainable: torch.dtype, comm_hook: str = "no") -> bool:
    """A step of adapters on a frozen bf16 model under DDP; whether they got gradients."""
    plugin = ContextParallelPlugin(config)
    ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(comm_hook))
    accelerator = plugin.accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[ddp])
    model = make_model(lora=True, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trainable)
    wrapped = accelerator.prepare(apply_context_parallel(model, plugin.config, mesh=plugin.mesh))
    loader = plugin.data_loader(make_documents([16, 16]), max_tokens=16)
    ((batches, num_items),) = list(plugin.accumulation_windows(loader))[:1]
    for batch in batches:
        accelerator.backward(plugin.loss(wrapped, batch, num_items=num_items))
    return all(bool(p.grad.any()) for p in model.parameters() if p.requires_grad)


@pytest.mark.distributed
def test_ddp_of_16_bit_weights(world2):
    """Refused if they are trained on shared rows; frozen ones, and whole rows, are fine."""
    for error in world2.run(sixteen_bit_step, RING2, torch.bfloat16, expect_error=True):
        assert error.type_name == "ValueError"
        assert "28 trainable parameters are in 16 bits" in error.message and "cp_size=2" in error.message
    for error in world2.run(sixteen_bit_step, RING2, torch.float32, "bf16", expect_error=True):
        assert error.type_name == "ValueError" and "comm_hook='bf16'" in error.message
    assert world2.run(sixteen_bit_step, RING2, torch.float32) == [True, True]
    assert world2.run(sixteen_bit_step, STOCK, torch.bfloat16) == [True, True]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32", None])
def test_fsdp_policy(version, policy):
    """accelerate makes a policy that reduces and returns in the compute type; the compute type itself stays."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    if policy is None:
        assert reduce_fsdp_in_fp32(plugin) == [] and plugin.mixed_precision_policy is None
        return
    plugin.set_mixed_precision(policy)
    compute = plugin.mixed_precision_policy.param_dtype
    assert plugin.mixed_precision_policy.reduce_dtype == compute
    changed = ["reduce_dtype=torch.float32"] + ["output_dtype=None"] * (version == 2)
    assert reduce_fsdp_in_fp32(plugin) == (changed if compute.itemsize == 2 else [])
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    assert plugin.mixed_precision_policy.param_dtype == compute
    plugin.validate_mixed_precision_policy()  # it is still one of accelerate's


def fsdp2_step(policy: str | None) -> tuple[torch.dtype, float, dict[str, torch.Tensor]]:
    """FSDP 2 itself, as accelerate calls it on GPUs: type of the loss, its mean over ranks, whole gradients."""
    plugin, fsdp = ContextParallelPlugin(RING2), FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.accelerator(cpu=True)
    if policy is not None:
        fsdp.set_mixed_precision(policy)
        reduce_fsdp_in_fp32(fsdp)
    model = apply_context_parallel(make_model(dtype=torch.float32), plugin.config, mesh=plugin.mesh)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=fsdp.mixed_precision_policy or MixedPrecisionPolicy())
    loader = plugin.data_loader(make_documents([14, 9, 7]), max_tokens=32)
    ((batches, num_items),) = list(plugin.accumulation_windows(loader))
    loss = plugin.loss(model, next(batches), num_items=num_items)
    loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    (total,) = sum_over_world([float(loss.detach())], comm=Communicator(plugin.mesh))
    return loss.dtype, total / 2, gradients


@pytest.mark.distributed
def test_fsdp2_step(world2):
    """Exact in fp32; in bf16 the loss is not rounded to bf16 on its way out."""
    reference = run_ddp_loop(REF, make_documents([14, 9, 7]), 1)
    for dtype, loss, gradients in world2.run(fsdp2_step, None):
        assert dtype == torch.float32 and loss == pytest.approx(reference.losses[0], rel=1e-6)
        for name, gradient in reference.gradients[0].items():
            assert relative(gradients[name].double(), gradient) < 1e-5
    for dtype, loss, _ in world2.run(fsdp2_step, "bf16"):
        assert dtype == torch.float32
        assert 1e-6 < abs(loss / reference.losses[0] - 1) < 1e-2  # it did compute in bf16


def fsdp_on_cpu() -> None:
    """On CPU accelerate would run DDP instead."""
    try:
        ContextParallelPlugin(RING2).accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate has set it


@pytest.mark.distributed
def test_fsdp_that_is_silently_off(world2):
    for error in world2.run(fsdp_on_cpu, expect_error=True):
        assert error.type_name == "RuntimeError" and "FSDP was asked for, but" in error.message


def test_order_of_calls():
    plugin = ContextParallelPlugin(REF)
    for use in (lambda: plugin.mesh, lambda: plugin.samples_per_step, lambda: next(plugin.accumulation_windows([]))):
        with pytest.raises(RuntimeError, match="plugin.accelerator"):
            use()
