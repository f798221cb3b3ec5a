"""What is compared: one packed sample, computed in three ways from the same parameters.

    untouched   the Hugging Face model with its own attention and loss, the whole sample, in every process
    alone       our attention and loss, the whole sample, in every process (what `force=True` runs)
    group       our attention and loss, each process on its share; losses and gradients are summed over the group

`untouched` shares no code with what is tested: its batch is built here, from the documents, with a few lines.
Invariant: whatever a run changes (parameters, gradients, modes, dropout, precision, the patch) is put back exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.distributed.collectives import sum_over_cp
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.models.state import context_parallel_disabled, context_parallel_state, running_as
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import SAMPLE_KEY
from hf_cp.verify.inputs import count_targets, to_device, trainable_parameters, whole_sample

ZERO_INIT_STD = 0.02  # spread of the random numbers that replace all-zero trainable parameters
FP16_LOSS_SCALE = 1024.0
LOW_PRECISION = (torch.bfloat16, torch.float16)

Gradients = dict[str, torch.Tensor]
Step = Callable[[], tuple[float, Gradients]]  # one forward and backward pass: loss and gradients


class Alone(NamedTuple):
    """What our code computes in one process: loss, gradients and logits [num_tokens, vocabulary]."""

    loss: float
    gradients: Gradients
    logits: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One packed sample, ready to be computed: `whole` by the untouched model, `unsplit` and `share` by ours.

    Args:
        model (`torch.nn.Module`): patched.
        parameters (`dict`): name -> trainable parameter.
        whole (`dict`): the sample as the untouched model takes it, int64 [1, num_tokens] each.
        num_targets (`int`): of the whole sample.
        unsplit, share (`dict`): the collator's batch for one process, and that of this process in the group.
        unsplit_config (`ContextParallelConfig`): the settings of the group, for one process.
    """

    model: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    whole: dict[str, torch.Tensor]
    num_targets: int
    unsplit: dict[str, Any]
    share: dict[str, Any]
    unsplit_config: ContextParallelConfig

    @classmethod
    def of(cls, model: torch.nn.Module, documents: Sequence[Mapping[str, Sequence[int]]]) -> Sample:
        """All documents in one sample. All processes must call it.

        Raises:
            ValueError: the model is not patched, is wrapped or has nothing to train, or the documents hold no target.
        """
        state, features = context_parallel_state(model), [dict(document) for document in documents]
        if state is None:
            raise ValueError(
                f"The comparison needs a patched model, but {type(model).__name__} is not context-parallel.\n"
                "  Call apply_context_parallel(model, config) first; with cp_size 1 use a config with force=True."
            )
        parameters = trainable_parameters(model)
        device = next(iter(parameters.values())).device
        whole = whole_sample(documents)
        num_targets = int(count_targets(whole))
        if not num_targets:
            raise ValueError(
                f"None of the {len(documents)} documents has a target.\n"
                "  Give documents of at least two tokens, with labels that are not all -100."
            )
        config = dataclasses.replace(state.config, ring_degree=1, ulysses_degree=1, force=True)
        unsplit = DataCollatorForContextParallel(config, cp_rank=0)(features)
        share = DataCollatorForContextParallel(state.config, cp_rank=state.mesh.cp_rank)(features)
        whole, unsplit, share = (to_device(batch, device) for batch in (whole, unsplit, share))
        return cls(model, parameters, whole, num_targets, unsplit, share, config)

    @property
    def dtype(self) -> torch.dtype:
        """The least precise type among the model's weights."""
        found = {p.dtype for p in self.model.parameters()}
        return next((d for d in (*LOW_PRECISION, torch.float32) if d in found), torch.float64)

    @property
    def is_low(self) -> bool:
        """Whether some weights have 16 bits."""
        return self.dtype in LOW_PRECISION

    @property
    def layout(self) -> SequenceLayout:
        """Of the group."""
        return self.share[SAMPLE_KEY].layout

    @property
    def comm(self) -> Communicator:
        """Of the group, and of the world around it."""
        return context_parallel_state(self.model).comm

    @property
    def mesh(self) -> ContextParallelMesh:
        """Of the group."""
        return self.comm.mesh

    @property
    def targets(self) -> torch.Tensor:
        """int64 [num_tokens]: the next token of each, -100 where there is no target."""
        return self.whole["shift_labels"][0]

    def untouched(self) -> tuple[float, Gradients]:
        """Loss and gradients of the untouched model on the whole sample."""
        with context_parallel_disabled(self.model):
            loss = self.model(**self.whole, num_items_in_batch=self.num_targets, use_cache=False).loss
            return float(loss.detach()), self._gradients(loss)

    @torch.no_grad()
    def untouched_logits(self) -> torch.Tensor:
        """[num_tokens, vocabulary]"""
        inputs = {name: self.whole[name] for name in ("input_ids", "position_ids")}
        with context_parallel_disabled(self.model):
            return self.model(**inputs, use_cache=False).logits[0]

    def alone(self) -> Alone:
        """Our attention and loss on the whole sample, in one process, which holds it in its order."""
        mesh = ContextParallelMesh(self.unsplit_config, self.mesh.device_type)
        with running_as(self.model, self.unsplit_config, mesh):
            loss = self.model(**self.unsplit, num_items_in_batch=self.num_targets).loss
            gradients = self._gradients(loss)
            with torch.no_grad():
                logits = self.model(**_inputs(self.unsplit)).logits[0][: self.layout.num_tokens]
        return Alone(float(loss.detach()), gradients, logits)

    def group(self) -> tuple[float, Gradients]:
        """Loss and gradients of the group: every process computes its part of the sums, and the parts are added up."""
        part = self.model(**self.share, num_items_in_batch=self.num_targets).loss
        gradients = {name: self.sum_over_group(g) for name, g in self._gradients(part).items()}
        return float(self.sum_over_group(part.double())), gradients

    @torch.no_grad()
    def group_logits(self, **changes: torch.Tensor) -> torch.Tensor:
        """[local slots, vocabulary], of this process's share; `changes` replace tensors of the batch."""
        return self.model(**(_inputs(self.share) | changes)).logits[0]

    @torch.no_grad()
    def group_token_losses(self) -> torch.Tensor:
        """[local slots]"""
        return self.model(**self.share, num_items_in_batch=self.num_targets).token_losses

    def sum_over_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the processes that share the sample."""
        return sum_over_cp(tensor, self.comm)

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [local slots] of all processes of the group as fp64 [num_tokens], in the order of the sample.

        A token that several processes hold is added up, one that none holds is 0; padding is dropped.
        """
        slots = self.layout.indices(self.mesh.cp_rank).to(values.device)
        total = torch.zeros(self.layout.num_tokens + 1, dtype=torch.float64, device=values.device)
        # padding has the index -1: it goes to the last place, which is cut off
        total.index_add_(0, slots.where(slots >= 0, self.layout.num_tokens), values.double())
        return self.sum_over_group(total)[:-1]

    def _gradients(self, loss: torch.Tensor) -> Gradients:
        """The gradients of one backward pass, in fp32 or better: parts of one gradient are summed in fp32.

        The loss of an fp16 model is scaled meanwhile, as in every fp16 training: small gradients would become zero.
        """
        scale = FP16_LOSS_SCALE if self.dtype == torch.float16 else 1.0
        for p in self.parameters.values():
            p.grad = None
        (loss * scale).backward()
        found = {}
        for name, p in self.parameters.items():
            wide = torch.promote_types(p.dtype, torch.float32)
            found[name] = torch.zeros_like(p, dtype=wide) if p.grad is None else p.grad.to(wide) / scale
            p.grad = None
        return found


@dataclass(frozen=True)
class Run:
    """Losses of all steps, gradients of the first step, and the total change of every trainable parameter."""

    losses: tuple[float, ...]
    gradients: Gradients
    updates: Gradients

    @property
    def grad_norm(self) -> float:
        """Of all gradients of the first step together."""
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.gradients.values()))


@torch.no_grad()
def run_sgd(step: Step, parameters: dict[str, torch.nn.Parameter], steps: int, learning_rate: float) -> Run:
    """Runs `steps` SGD steps and puts the parameters back to where they were."""
    start = {name: p.clone() for name, p in parameters.items()}
    losses, first, updates = [], {}, {}
    try:
        for _ in range(steps):
            with torch.enable_grad():
                loss, gradients = step()
            losses.append(loss)
            first = first or gradients
            for name, p in parameters.items():
                change = gradients[name] * -learning_rate
                # The total step is summed beside p: p - start would show the rounding of p, not a difference of runs.
                updates[name] = updates[name] + change if name in updates else change
                p.add_(change.to(p.dtype))
    finally:
        for name, p in parameters.items():
            p.copy_(start[name])
    return Run(tuple(losses), first, updates)


@contextlib.contextmanager
def prepared(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], seed: int) -> Iterator[None]:
    """Training mode without dropout and without all-zero parameters; everything is put back afterwards."""
    generator = torch.Generator().manual_seed(seed)
    modes = {module: module.training for module in model.modules()}
    rates = {module: module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    values = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: p.grad for name, p in parameters.items()}
    try:
        model.train()
        for module in rates:
            module.p = 0.0
        for p in parameters.values():
            p.grad = None
            if not p.any():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * ZERO_INIT_STD
                p.data.copy_(noise)
        yield
    finally:
        for name, p in parameters.items():
            p.data.copy_(values[name])
            p.grad = gradients[name]
        for module, rate in rates.items():
            module.p = rate
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def in_fp32(model: torch.nn.Module) -> Iterator[None]:
    """Inside, weights of 16 bits are fp32 with the same values; the very tensors come back afterwards."""
    narrow = {t: t.data for t in (*model.parameters(), *model.buffers()) if t.dtype in LOW_PRECISION}
    try:
        for tensor in narrow:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in narrow.items():
            tensor.grad = None
            tensor.data = data


@contextlib.contextmanager
def without_rope(decoder: torch.nn.Module) -> Iterator[None]:
    """Inside, position embeddings rotate by nothing: only the order of tokens and the mask are left."""

    def standing_still(module: torch.nn.Module, args: tuple, output: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)

    handle = decoder.rotary_emb.register_forward_hook(standing_still)
    try:
        yield
    finally:
        handle.remove()


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward pass without a loss takes."""
    return {name: batch[name] for name in ("input_ids", "position_ids", SAMPLE_KEY)}
