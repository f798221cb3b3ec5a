"""Models, documents and planted faults for the tests of the verification."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model

from hf_cp.attention import allgather, exchange, ring, ulysses
from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import PackedRow
from hf_cp.models import patch
from hf_cp.models.patch import apply_context_parallel
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.verify import VerifyReport, verify_context_parallel
from hf_cp.verify import runs as verify_runs
from tests.models.tiny import VOCAB_SIZE, tiny_model

RING2 = ContextParallelConfig(ring_degree=2)
ULYSSES2 = ContextParallelConfig(ulysses_degree=2)
SENDS_GRADIENTS = ("backward", "_send_home", "_start_home")
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
    fault: Callable[[], AbstractContextManager] = nullcontext,
    lengths: tuple[int, ...] = LENGTHS,
    steps: int = 3,
) -> VerifyReport:
    """Verifies a tiny model; the fault is planted meanwhile."""
    model = (lora_model if lora else full_model)(config, dtype, family)
    with fault():
        return verify_context_parallel(model, documents(lengths), steps=steps)


# Planted faults: what goes wrong on some or all ranks while the split run is computed


def _scaled_loss(factor: Callable) -> AbstractContextManager:
    """The local sum over a wrong number of targets; our code in one process is not touched."""
    original = patch.reduce_losses

    def reduce_losses(losses, shift_labels, mesh, **kwargs):
        return original(losses, shift_labels, mesh, **kwargs) * (factor(mesh) if mesh.cp_size > 1 else 1.0)

    return mock.patch.object(patch, "reduce_losses", reduce_losses)


def loss_times_cp_size() -> AbstractContextManager:
    return _scaled_loss(lambda mesh: mesh.cp_size)


def loss_over_cp_size() -> AbstractContextManager:
    return _scaled_loss(lambda mesh: 1 / mesh.cp_size)


def loss_times_world_size() -> AbstractContextManager:
    return _scaled_loss(lambda mesh: mesh.world_size)


def loss_times_one_and_a_half() -> AbstractContextManager:
    return _scaled_loss(lambda mesh: 1.5)


def loss_times_dp_size() -> AbstractContextManager:
    return _scaled_loss(lambda mesh: mesh.dp_size)


def wrong_from_the_second_step_on() -> AbstractContextManager:
    calls = itertools.count()
    return _scaled_loss(lambda mesh: 1.5 if next(calls) else 1.0)


def local_means() -> AbstractContextManager:
    """Every rank divides by its own targets, then the means are averaged."""
    original = patch.reduce_losses

    def reduce_losses(losses, shift_labels, mesh, **kwargs):
        if mesh.cp_size == 1:
            return original(losses, shift_labels, mesh, **kwargs)
        return losses.sum() / (shift_labels != -100).sum().clamp(min=1) / mesh.cp_size

    return mock.patch.object(patch, "reduce_losses", reduce_losses)


@contextmanager
def _changed_batch(change: Callable[[dict], None], *, cp_rank: int | None = 1) -> Iterator[None]:
    """Rank 1, or every rank, works on a batch that `change` has altered; one process works on the right one."""
    original = PackedRow.local_batch

    def local_batch(self, rank, **kwargs):
        batch = original(self, rank, **kwargs)
        if self.layout.cp_size > 1 and cp_rank in (None, rank):
            change(batch)
        return batch

    with mock.patch.object(PackedRow, "local_batch", local_batch):
        yield


def local_positions() -> AbstractContextManager:
    """What a model does that is given no position_ids: it counts the slots of its shard."""
    return _changed_batch(
        lambda batch: batch.update(position_ids=torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)), cp_rank=None
    )


def one_wrong_position() -> AbstractContextManager:
    return _changed_batch(lambda batch: batch["position_ids"][0, 5].add_(3))


def lost_target() -> AbstractContextManager:
    return _changed_batch(lambda batch: batch["shift_labels"][0, 2].fill_(-100))


def wrong_label() -> AbstractContextManager:
    return _changed_batch(lambda batch: batch["shift_labels"][0, 2].add_(1))


def wrong_token() -> AbstractContextManager:
    return _changed_batch(lambda batch: batch["input_ids"][0, 2].add_(1))


def token_on_two_ranks() -> AbstractContextManager:
    """Rank 1 holds a token of rank 0 in place of its own first one."""
    original = SequenceLayout.indices

    def indices(self, cp_rank: int) -> torch.Tensor:
        found = original(self, cp_rank)
        if self.cp_size > 1 and cp_rank == 1:
            found[0] = original(self, 0)[0]
        return found

    return mock.patch.object(SequenceLayout, "indices", indices)


def constant_ids() -> AbstractContextManager:
    """The model computes the same ids whatever it is given, as a captured graph whose input is never filled anew."""
    original = patch.check_batch

    def check_batch(tokens, *others, **kwargs):
        if others[-1].cp_size > 1:
            tokens.fill_(5)
        return original(tokens, *others, **kwargs)

    return mock.patch.object(patch, "check_batch", check_batch)


def labels_shifted_after_sharding() -> AbstractContextManager:
    """Each rank shifts the labels of its shard: the last token of every piece gets the label of another place."""

    def shift(batch: dict) -> None:
        labels, ends = batch["labels"][0], batch["shift_labels"][0] == -100
        shifted = torch.cat([labels[1:], labels.new_tensor([-100])])
        inside = batch["position_ids"][0].roll(-1) > batch["position_ids"][0]
        batch["shift_labels"] = shifted.masked_fill(ends & ~inside, -100).unsqueeze(0)

    return _changed_batch(shift, cp_rank=None)


def one_document() -> AbstractContextManager:
    """Attention takes the row for one document (the borders are lost); the layout is contiguous, so slots stay."""
    original = patch.context_parallel_attention

    def attention(q, k, v, *, mesh, layout, **kwargs):
        if mesh.cp_size > 1:
            config = ContextParallelConfig(
                ring_degree=mesh.ring_size, ulysses_degree=mesh.ulysses_size, layout="contiguous"
            )
            layout = SequenceLayout([layout.num_tokens], config)
        return original(q, k, v, mesh=mesh, layout=layout, **kwargs)

    return mock.patch.object(patch, "context_parallel_attention", attention)


def not_causal() -> AbstractContextManager:
    original = patch.context_parallel_attention
    return mock.patch.object(
        patch,
        "context_parallel_attention",
        lambda q, k, v, *, mesh, **kwargs: original(q, k, v, mesh=mesh, causal=mesh.cp_size == 1, **kwargs),
    )


def wrong_scale() -> AbstractContextManager:
    """The kernel is called with a wrong scale, also in one process."""
    original = patch.context_parallel_attention

    def attention(q, k, v, *, scale, **kwargs):
        return original(q, k, v, scale=scale * 1.1, **kwargs)

    return mock.patch.object(patch, "context_parallel_attention", attention)


def wrong_scale_in_the_group() -> AbstractContextManager:
    original = patch.context_parallel_attention

    def attention(q, k, v, *, mesh, scale, **kwargs):
        return original(q, k, v, mesh=mesh, scale=scale * (1.1 if mesh.cp_size > 1 else 1.0), **kwargs)

    return mock.patch.object(patch, "context_parallel_attention", attention)


def lost_last_slot() -> AbstractContextManager:
    """The last of the two layers loses attention's output in the last slot of every shard."""
    original, calls = patch.context_parallel_attention, itertools.count()

    def attention(q, k, v, *, mesh, **kwargs):
        out = original(q, k, v, mesh=mesh, **kwargs)
        is_last_layer = mesh.cp_size > 1 and next(calls) % 2 == 1
        return torch.cat([out[:-1], torch.zeros_like(out[-1:])]) if is_last_layer else out

    return mock.patch.object(patch, "context_parallel_attention", attention)


def wrong_query_gradients() -> AbstractContextManager:
    """The forward pass is right; dQ is 10 percent too large."""
    original = patch.context_parallel_attention

    def attention(q, k, v, *, mesh, **kwargs):
        if mesh.cp_size > 1 and q.requires_grad:
            q.register_hook(lambda gradient: gradient * 1.1)
        return original(q, k, v, mesh=mesh, **kwargs)

    return mock.patch.object(patch, "context_parallel_attention", attention)


def _in_transfers(planted: Callable[[Callable], Callable]) -> AbstractContextManager:
    """Replaces what starts a transfer, in all three engines."""

    @contextmanager
    def replaced() -> Iterator[None]:
        with (
            mock.patch.object(ring, "start_hop", planted(ring.start_hop)),
            mock.patch.object(exchange, "start_exchange", planted(exchange.start_exchange)),
            mock.patch.object(allgather, "start_return", planted(allgather.start_return)),
        ):
            yield

    return replaced()


def dropped_remote_gradients() -> AbstractContextManager:
    """dK and dV that other ranks found do not come home: the forward pass, and so the first loss, is right.

    The engines send gradients from these functions, and keys and values from others.
    """

    def planted(original: Callable) -> Callable:
        def start(tensor: torch.Tensor, mesh, **kwargs):
            is_gradient = kwargs.get("tag", ring.GRAD_TAG) == ring.GRAD_TAG
            is_gradient &= sys._getframe(1).f_code.co_name in SENDS_GRADIENTS
            return original(torch.zeros_like(tensor) if is_gradient else tensor, mesh, **kwargs)

        return start

    return _in_transfers(planted)


def dropped_remote_keys() -> AbstractContextManager:
    """K/V of other ranks arrive as zeros: documents that are cut are wrong, the others right."""

    def planted(original: Callable) -> Callable:
        def start(tensor: torch.Tensor, mesh, **kwargs):
            is_gradient = sys._getframe(1).f_code.co_name in SENDS_GRADIENTS
            return original(tensor if is_gradient else torch.zeros_like(tensor), mesh, **kwargs)

        return start

    return _in_transfers(planted)


def replicas_not_summed() -> AbstractContextManager:
    """Only the first replica of a K/V head sends its gradient back."""
    original = torch.Tensor.repeat_interleave

    def repeat_interleave(x: torch.Tensor, repeats, dim=None, **kwargs):
        out = original(x, repeats, dim=dim, **kwargs)
        if sys._getframe(1).f_globals["__name__"] != ulysses.__name__:
            return out
        is_first = (torch.arange(out.shape[1]) % repeats == 0).view(1, -1, 1)
        return torch.where(is_first, out, out.detach())

    return mock.patch.object(torch.Tensor, "repeat_interleave", repeat_interleave)


def wrong_sum_on_one_rank() -> AbstractContextManager:
    """Only rank 1 gets a wrong sum of gradients, so only rank 1 can see it."""
    original = verify_runs.sum_over_cp

    def sum_over_cp(tensor, mesh):
        callers = (sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name)  # a <dictcomp> may be between
        is_gradient = "group" in callers
        return original(tensor, mesh) * (1.01 if mesh.rank == 1 and is_gradient and tensor.ndim else 1.0)

    return mock.patch.object(verify_runs, "sum_over_cp", sum_over_cp)
