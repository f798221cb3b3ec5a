"""Checks of `hf-cp doctor --launch`: do the processes that were started really do together what is asked of them?

All processes make the same checks in the same order. After each one they tell each other how it went, so a failure of
one rank is everyone's, with that rank's name, and nobody waits longer than the time limit. A check that loses a peer
ends the launched part: nothing after it could be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from hf_cp._compat import forget_accelerate_state
from hf_cp.attention.kernels.flash3 import flash_attn_3_is_installed
from hf_cp.config import IGNORE_INDEX
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import CommunicationError, Communicator
from hf_cp.distributed.host import agree, gather_objects, sum_over_world
from hf_cp.environment import versions
from hf_cp.tools.doctor.check import (
    STATUSES,
    UNREADABLE,
    Check,
    Finding,
    NotGiven,
    Result,
    examine,
    fail,
    ok,
    skip,
)
from hf_cp.tools.doctor.data import num_targets
from hf_cp.tools.doctor.probes import check_collectives
from hf_cp.tools.doctor.subject import Subject
from hf_cp.training.checks import Launch, refuse
from hf_cp.training.plugin import ContextParallelPlugin

STEPS = 2  # micro-steps of the loader


@dataclass(frozen=True)
class Launched:
    """The processes of the launch, joined as a run would join them."""

    subject: Subject
    accelerator: Accelerator
    comm: Communicator
    time_limit: float  # seconds of every collective

    @classmethod
    def join(cls, subject: Subject, time_limit: float) -> Launched:
        """By [`ContextParallelPlugin`], with the precision and accumulation of the recipe.

        Raises:
            ValueError, RuntimeError: other processes run than were launched, or they do not fit the recipe.
        """
        args = subject.training if subject.has_train else None
        forget_accelerate_state()  # TrainingArguments has made one of one process
        plugin = ContextParallelPlugin(replace(subject.cp, timeout_seconds=float(time_limit)))
        accelerator = plugin.accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=time_limit))],
            gradient_accumulation_steps=args.gradient_accumulation_steps if args else 1,
            mixed_precision="bf16" if args and args.bf16 else "fp16" if args and args.fp16 else None,
        )
        return cls(subject, accelerator, Communicator(plugin.mesh), time_limit)


def examine_launched(subject: Subject, local: Sequence[Result], time_limit: float) -> list[Result]:
    """The worst of each local check over all processes, then the checks of this module, which are alike on all."""
    joined: list[Launched] = []

    def join(subject: Subject) -> Finding:
        joined.append(Launched.join(subject, time_limit))
        mesh, accelerator = joined[0].comm.mesh, joined[0].accelerator
        return ok(
            f"processes: {mesh.world_size}, {accelerator.distributed_type.value}, device {accelerator.device.type}, "
            f"mesh dp {mesh.dp_size} x ring {mesh.ring_size} x ulysses {mesh.ulysses_size}"
        )

    joining = examine([Check("Launched", "joining", join)], subject)
    if not joined:
        return [*local, *joining, *(Result(c.group, c.name, *_not_joined()) for c in CHECKS)]
    (launched,) = joined
    worst = worst_by_check(local, launched.comm)
    together, is_lost = examine_together(CHECKS, launched)
    if not is_lost:
        launched.accelerator.end_training()  # leaves the process group in order
    return [*worst, *joining, *together]


def examine_together(checks: Sequence[Check], launched: Launched) -> tuple[list[Result], bool]:
    """The results, alike on all processes, and whether a peer is lost; an error of one rank is the failure of all."""
    lost: list[CommunicationError] = []

    def run(check: Check, launched: Launched) -> Finding:
        if lost:
            return _not_joined()
        try:
            return _run_together(check, launched)
        except CommunicationError as error:
            lost.append(error)
            raise

    return examine([check._replace(run=partial(run, check)) for check in checks], launched), bool(lost)


def _run_together(check: Check, launched: Launched) -> Finding | None:
    finding, failure = None, None
    try:
        finding = check.run(launched)
    except CommunicationError:
        raise
    except Exception as error:
        failure = error
    agree(check.name, comm=launched.comm, error=failure, scope="world")  # raises where there is one
    return finding


def _not_joined() -> Finding:
    return skip("the processes are not joined")


def worst_by_check(results: Sequence[Result], comm: Communicator) -> list[Result]:
    """Each check's worst result over all processes; one that is not rank 0's says whose it is."""
    worst = []
    for by_rank in zip(*gather_objects(results, comm=comm), strict=True):
        rank = max(range(len(by_rank)), key=lambda r: (STATUSES.index(by_rank[r].status), -r))
        found = by_rank[rank]
        worst.append(found if rank == 0 else found._replace(detail=f"rank {rank}: {found.detail}"))
    return worst


def check_world(launched: Launched) -> Finding:
    """As many processes as the recipe starts."""
    subject, running = launched.subject, launched.comm.mesh.world_size
    if not subject.has_recipe:
        return ok(f"processes: {running}")
    wanted = subject.accelerate.num_processes
    if wanted != running:
        return fail(f"{running} processes run, accelerate.yaml has {wanted}", "Start with its accelerate.yaml.")
    return ok(f"processes: {running}, as in accelerate.yaml")


def check_alike(launched: Launched) -> Finding:
    """Versions, kernels that can be imported, and seeds of all processes."""
    args = launched.subject.training if launched.subject.has_train else None
    facts = versions() | {"flash_attn_interface": flash_attn_3_is_installed()}
    facts |= {name: getattr(args, name, None) for name in ("seed", "data_seed")}
    everyones = gather_objects(facts, comm=launched.comm)
    for rank, theirs in enumerate(everyones):
        pairs = [(name, everyones[0][name], theirs[name]) for name in facts]
        different = [f"{name} {first} / {other}" for name, first, other in pairs if first != other]
        if different:
            return fail(f"rank 0 and rank {rank} differ: {', '.join(different)}", "Give all machines one environment.")
    return ok(f"versions and seeds are the same on all {len(everyones)} processes")


def check_backend(launched: Launched) -> Finding:
    """The backend and the ZeRO stage that the recipe asks for."""
    subject, accelerator = launched.subject, launched.accelerator
    running = accelerator.distributed_type.value
    if not subject.has_recipe:
        return ok(f"backend {running} (no recipe to compare with)")
    wanted = {f"wants_{name.lower()}": subject.backend == name for name in ("DEEPSPEED", "FSDP")}
    refuse(Launch.of(accelerator, cp_size=subject.cp.cp_size, **wanted))
    if running != "DEEPSPEED":
        return ok(f"backend {running}")
    stage = accelerator.state.deepspeed_plugin.zero_stage
    if stage != subject.zero_stage:
        return fail(f"ZeRO stage {stage} runs, the recipe has {subject.zero_stage}", "Start with its accelerate.yaml.")
    return ok(f"DeepSpeed with ZeRO stage {stage}, {accelerator.mixed_precision}")


def check_values(launched: Launched) -> Finding:
    """One collective of each kind over every axis, with known values."""
    done = check_collectives(launched.comm)
    return ok(f"values arrive, within {launched.time_limit:g} s: {', '.join(done)}")


def check_samples(launched: Launched) -> Finding:
    """The loader's batches: the same sample inside a group, others in other groups, every target once."""
    subject, comm = launched.subject, launched.comm
    try:
        features = [subject.features[index] for index in range(min(100, len(subject.features)))]
    except (NotGiven, *UNREADABLE):
        features = list(subject.made_up.documents)
    loader = ContextParallelDataLoader(features, collator=replace(subject.collator, cp_rank=None), comm=comm)
    steps, order, batches = min(STEPS, len(loader)), loader.order.samples(0), iter(loader)
    found = expected = 0
    for step in range(steps):
        found += int((next(batches)["shift_labels"] != IGNORE_INDEX).sum())  # peers' samples are compared in here
        drawn = order[step * comm.mesh.dp_size : (step + 1) * comm.mesh.dp_size]
        expected += sum(num_targets(loader.packed[index]) for index in drawn if index >= 0)
    (total,) = sum_over_world([found], comm=comm)
    if total != expected:
        raise RuntimeError(f"{steps} micro-steps have {expected:,} targets, all ranks have {total:,}.\n  Report it.")
    return ok(f"targets of {steps} micro-step(s): {total:,} over all ranks, as in the documents; groups agree on them")


def check_average(launched: Launched) -> Finding:
    """The mean over all W processes that the loss counts on, through the real backend (DDP or a ZeRO engine).

    Rank r's loss is x_r w with x_r = (r + 1) / 4W. One SGD step of size 1 from w = 0 leaves w = -mean(x) =
    -(W + 1) / 8W, if and only if gradients are averaged over all ranks.
    """
    accelerator, mesh = launched.accelerator, launched.comm.mesh
    world = mesh.world_size
    if accelerator.distributed_type.value == "FSDP":
        return skip("not made under FSDP, which wraps layers of the real model only")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    own = torch.full((1, 1), (mesh.rank + 1) / (4 * world), device=accelerator.device)
    for _ in range(accelerator.gradient_accumulation_steps):  # backward divides by it
        with accelerator.accumulate(model):
            accelerator.backward(_output(model, own).sum())
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = float(_output(model, torch.ones_like(own)))
    expected = -(world + 1) / (8 * world)
    if abs(found - expected) > 0.01 * abs(expected):  # bf16 has 8 bits
        raise RuntimeError(
            f"A step of size 1 moved a weight by {found:.5f}, the mean gradient of {world} ranks is {expected:.5f}.\n"
            "  The backend does not average over all processes: look for clipping below 0.5, mpu and batch "
            "sizes in the DeepSpeed config."
        )
    return ok(f"{type(model).__name__}: a step follows the mean gradient of all {world} processes")


def _output(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In the type that the backend has given the weights."""
    return model(x.to(next(model.parameters()).dtype)).float()


CHECKS = (
    Check("Launched", "number", check_world),
    Check("Launched", "alike", check_alike),
    Check("Launched", "backend", check_backend),
    Check("Launched", "collectives", check_values),
    Check("Launched", "samples", check_samples),
    Check("Launched", "average of gradients", check_average),
)
