"""Models, documents and planted faults for the tests of the verification."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model

from hf_cp.attention import allgather, exchange, ring
from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.models import attention as model_attention
from hf_cp.models.patch import apply_context_parallel, context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample
from hf_cp.verify import VerifyReport, verify_context_parallel
from hf_cp.verify.runs import Sample
from tests.models.tiny import VOCAB_SIZE, tiny_model

RING2 = ContextParallelConfig(ring_degree=2)
ULYSSES2 = ContextParallelConfig(ulysses_degree=2)
LENGTHS = (19, 3, 1, 30)


def documents(lengths=LENGTHS) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()} for n in lengths]


def full_model(config: ContextParallelConfig, dtype: torch.dtype, family: str = "llama") -> torch.nn.Module:
    return apply_context_parallel(tiny_model(family, dtype=dtype), config)


def lora_model(config: ContextParallelConfig, dtype: torch.dtype, family: str = "llama") -> torch.nn.Module:
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5, target_modules="all-linear")
    return get_peft_model(full_model(config, dtype, family), lora, autocast_adapter_dtype=False)


def verify(
    config: ContextParallelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    family: str = "llama",
    lora: bool = True,
    fault: Callable[[torch.nn.Module], AbstractContextManager] = nullcontext,
    lengths: tuple[int, ...] = LENGTHS,
    steps: int = 3,
) -> VerifyReport:
    """Verifies a tiny model; the fault is planted meanwhile."""
    model = (lora_model if lora else full_model)(config, dtype, family)
    with fault(model):
        return verify_context_parallel(model, documents(lengths), steps=steps)


# Planted faults: what goes wrong on some or all ranks while the split run is computed.
#
# Each takes the model and is planted where the package meets the outside: hooks on the model, the collator's batches,
# the layout, what the model calls as attention, and the transfers that the engines start.

Fault = AbstractContextManager


@contextmanager
def _hooked(model: torch.nn.Module, change_output: Callable | None = None, change_input: Callable | None = None):
    """Changes what goes into, or comes out of, the model that the group runs; one process runs the right one."""

    def is_group(kwargs: dict) -> bool:
        is_ours = any(name.startswith("hf_cp") for name in kwargs)
        return is_ours and context_parallel_state(model).mesh.cp_size > 1

    def before(module, args, kwargs):
        return args, kwargs | change_input(kwargs) if change_input and is_group(kwargs) else kwargs

    def after(module, args, kwargs, output):
        if change_output and is_group(kwargs) and "shift_labels" in kwargs:
            output.loss = change_output(output, kwargs["shift_labels"])
        return output

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled_loss(model: torch.nn.Module, factor: Callable) -> Fault:
    """The local sum over a wrong number of targets."""
    return _hooked(model, lambda output, labels: output.loss * factor(context_parallel_state(model).mesh))


def loss_times_cp_size(model) -> Fault:
    return _scaled_loss(model, lambda mesh: mesh.cp_size)


def loss_over_cp_size(model) -> Fault:
    return _scaled_loss(model, lambda mesh: 1 / mesh.cp_size)


def loss_times_world_size(model) -> Fault:
    return _scaled_loss(model, lambda mesh: mesh.world_size)


def loss_times_one_and_a_half(model) -> Fault:
    return _scaled_loss(model, lambda mesh: 1.5)


def loss_times_dp_size(model) -> Fault:
    return _scaled_loss(model, lambda mesh: mesh.dp_size)


def wrong_from_the_second_step_on(model) -> Fault:
    calls = itertools.count()
    return _scaled_loss(model, lambda mesh: 1.5 if next(calls) else 1.0)


def local_means(model) -> Fault:
    """Every rank divides by its own targets, then the means are averaged."""

    def mean(output, shift_labels):
        num_targets = (shift_labels != -100).sum().clamp(min=1)
        return output.token_losses.sum() / num_targets / context_parallel_state(model).mesh.cp_size

    return _hooked(model, mean)


def constant_ids(model) -> Fault:
    """The model computes the same ids whatever it is given, as a captured graph whose input is never filled anew."""
    return _hooked(model, change_input=lambda kwargs: {"input_ids": torch.full_like(kwargs["input_ids"], 5)})


@contextmanager
def _changed_batch(change: Callable[[dict], None], *, cp_rank: int | None = 1) -> Iterator[None]:
    """Rank 1, or every rank, works on a batch that `change` has altered; one process works on the right one."""
    original = DataCollatorForContextParallel.__call__

    def collate(self, features, **kwargs):
        batch = original(self, features, **kwargs)
        if self.config.cp_size > 1 and cp_rank in (None, self.cp_rank):
            change(batch)
        return batch

    with mock.patch.object(DataCollatorForContextParallel, "__call__", collate):
        yield


def local_positions(model) -> Fault:
    """What a model does that is given no position_ids: it counts the slots of its shard."""
    return _changed_batch(
        lambda batch: batch.update(position_ids=torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)), cp_rank=None
    )


def one_wrong_position(model) -> Fault:
    return _changed_batch(lambda batch: batch["position_ids"][0, 5].add_(3))


def lost_target(model) -> Fault:
    return _changed_batch(lambda batch: batch["shift_labels"][0, 2].fill_(-100))


def wrong_label(model) -> Fault:
    return _changed_batch(lambda batch: batch["shift_labels"][0, 2].add_(1))


def wrong_token(model) -> Fault:
    return _changed_batch(lambda batch: batch["input_ids"][0, 2].add_(1))


def labels_shifted_after_sharding(model) -> Fault:
    """Each rank shifts the labels of its shard: the last token of every piece gets the label of another place."""

    def shift(batch: dict) -> None:
        labels, ends = batch["labels"][0], batch["shift_labels"][0] == -100
        shifted = torch.cat([labels[1:], labels.new_tensor([-100])])
        inside = batch["position_ids"][0].roll(-1) > batch["position_ids"][0]
        batch["shift_labels"] = shifted.masked_fill(ends & ~inside, -100).unsqueeze(0)

    return _changed_batch(shift, cp_rank=None)


def token_on_two_ranks(model) -> Fault:
    """Rank 1 holds a token of rank 0 in place of its own first one."""
    original = SequenceLayout.indices

    def indices(self, cp_rank: int) -> torch.Tensor:
        found = original(self, cp_rank).clone()
        if self.cp_size > 1 and cp_rank == 1:
            found[0] = original(self, 0)[0]
        return found

    return mock.patch.object(SequenceLayout, "indices", indices)


def _attention(change: Callable, *, in_one_process: bool = False) -> Fault:
    """Attention of the patched model is `change(attention, q, k, v, **arguments)`, in the group at least."""
    original = model_attention.usp_attention

    def attention(q, k, v, *, comm, **kwargs):
        if comm.mesh.cp_size == 1 and not in_one_process:
            return original(q, k, v, comm=comm, **kwargs)
        return change(original, q, k, v, comm=comm, **kwargs)

    return mock.patch.object(model_attention, "usp_attention", attention)


def one_document(model) -> Fault:
    """Attention takes the sample for one document (the borders are lost); the layout is contiguous, so slots stay."""

    def change(attention, q, k, v, *, sample, config, **kwargs):
        whole = SequenceLayout([sample.layout.num_tokens], replace(config, layout="contiguous"))
        return attention(q, k, v, sample=PackedSample(whole), config=config, **kwargs)

    return _attention(change)


def not_causal(model) -> Fault:
    return _attention(lambda attention, q, k, v, **kwargs: attention(q, k, v, **kwargs | {"causal": False}))


def wrong_scale(model) -> Fault:
    """The kernel is called with a wrong scale, also in one process."""
    return _attention(_with_wrong_scale, in_one_process=True)


def wrong_scale_in_the_group(model) -> Fault:
    return _attention(_with_wrong_scale)


def _with_wrong_scale(attention, q, k, v, *, scale, **kwargs):
    return attention(q, k, v, scale=scale * 1.1, **kwargs)


def lost_last_slot(model) -> Fault:
    """The last of the two layers loses attention's output in the last slot of every shard."""
    calls = itertools.count()

    def change(attention, q, k, v, **kwargs):
        out = attention(q, k, v, **kwargs)
        return torch.cat([out[:-1], torch.zeros_like(out[-1:])]) if next(calls) % 2 else out

    return _attention(change)


def wrong_query_gradients(model) -> Fault:
    """The forward pass is right; dQ is 10 percent too large."""

    def change(attention, q, k, v, **kwargs):
        if q.requires_grad:
            q.register_hook(lambda gradient: gradient * 1.1)
        return attention(q, k, v, **kwargs)

    return _attention(change)


def replicas_not_summed(model) -> Fault:
    """Only the first replica of a K/V head sends its gradient back; the heads are repeated here, not in Ulysses."""

    def change(attention, q, k, v, *, comm, **kwargs):
        size, replicas = comm.mesh.ulysses_size, comm.mesh.ulysses_size // k.shape[1]
        is_first = (torch.arange(size) % replicas == 0).view(1, -1, 1)
        k, v = (x.repeat_interleave(replicas, dim=1) for x in (k, v))
        return attention(q, *(torch.where(is_first, x, x.detach()) for x in (k, v)), comm=comm, **kwargs)

    return _attention(change)


@contextmanager
def _zero_transfers(*, gradients: bool) -> Iterator[None]:
    """What ring ranks send each other is zero: gradients of K/V, or K/V themselves.

    Gradients are what `start_return` sends, what hops have `GRAD_TAG`, and what an exchange sends along the lists by
    which the K/V came: `sent` is then the very list that was `received`.
    """
    fetched = []

    def zeroed(start: Callable, is_gradient: Callable[[dict], bool]) -> Callable:
        def planted(tensor: torch.Tensor, *args, **kwargs):
            return start(torch.zeros_like(tensor) if is_gradient(kwargs) is gradients else tensor, *args, **kwargs)

        return planted

    def goes_back(kwargs: dict) -> bool:
        is_back = any(kwargs["sent"] is received for received in fetched)
        if not is_back:
            fetched.append(kwargs["received"])
        return is_back

    with (
        mock.patch.object(ring, "start_hop", zeroed(ring.start_hop, lambda kw: kw.get("tag") == ring.GRAD_TAG)),
        mock.patch.object(exchange, "start_exchange", zeroed(exchange.start_exchange, goes_back)),
        mock.patch.object(allgather, "start_all_gather", zeroed(allgather.start_all_gather, lambda kw: False)),
        mock.patch.object(allgather, "start_return", zeroed(allgather.start_return, lambda kw: True)),
    ):
        yield


def dropped_remote_gradients(model) -> Fault:
    """dK and dV that other ranks found do not come home: the forward pass, and so the first loss, is right."""
    return _zero_transfers(gradients=True)


def dropped_remote_keys(model) -> Fault:
    """K/V of other ranks arrive as zeros: documents that are cut are wrong, the others right."""
    return _zero_transfers(gradients=False)


def wrong_sum_on_one_rank(model) -> Fault:
    """Only rank 1 gets a wrong sum of gradients, so only rank 1 can see it."""
    original = Sample.group

    def group(self):
        loss, gradients = original(self)
        return loss, {name: g * (1.01 if self.mesh.rank == 1 else 1.0) for name, g in gradients.items()}

    return mock.patch.object(Sample, "group", group)
