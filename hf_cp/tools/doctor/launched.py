"""Checks of `hf-cp doctor --launch`: do the processes that were started really do together what is asked of them?

All processes make the same checks in the same order. After each one they tell each other how it went
([`agree`]), so a failure of one rank is everyone's, with that rank's name, and nobody waits longer than the
time limit. A check that loses a peer ends the launched part: nothing after it could be trusted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch

from hf_cp.config import IGNORE_INDEX
from hf_cp.distributed.communicator import CommunicationError, Communicator
from hf_cp.distributed.host import agree, sum_over_world
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.rows import gather_rows
from hf_cp.tools.doctor.check import STATUSES, Check, Finding, NotGiven, Result, examine, fail, ok, skip
from hf_cp.tools.doctor.data import num_targets
from hf_cp.tools.doctor.subject import Subject

__all__ = ["LAUNCHED_CHECKS", "Launched", "examine_launched", "gather_json", "worst_by_check"]

STEPS = 2  # micro-steps of the loader


class Launched:
    """The processes of the launch, joined as [`ContextParallelPlugin`] joins them.

    Args:
        subject (`Subject`): the recipe.
        time_limit (`float`): seconds of every collective.

    Attributes:
        accelerator (`accelerate.Accelerator`), mesh (`ContextParallelMesh`): as a run would have them.

    Raises:
        ValueError, RuntimeError: other processes run than were launched, or they do not fit the recipe.
    """

    def __init__(self, subject: Subject, time_limit: float):
        from accelerate.state import AcceleratorState
        from accelerate.utils import InitProcessGroupKwargs

        from hf_cp.training.plugin import ContextParallelPlugin

        self.subject = subject
        AcceleratorState._reset_state(reset_partial_state=True)  # TrainingArguments has made one of one process
        self.num_accumulated = self.argument("gradient_accumulation_steps", 1)
        precision = next((name for name in ("bf16", "fp16") if self.argument(name, False)), None)
        plugin = ContextParallelPlugin(replace(subject.cp, timeout_seconds=float(time_limit)))
        self.accelerator = plugin.accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=time_limit))],
            gradient_accumulation_steps=self.num_accumulated,
            mixed_precision=precision,
        )
        self.mesh: ContextParallelMesh = plugin.mesh

    def argument(self, name: str, default: Any) -> Any:
        """A training argument; the default without train.yaml."""
        with contextlib.suppress(NotGiven):
            return getattr(self.subject.training, name)
        return default

    def end(self) -> None:
        """Leaves the process group in order."""
        self.accelerator.end_training()


def examine_launched(subject: Subject, time_limit: float) -> Iterator[tuple[Result, Launched | None]]:
    """The checks of this module, one after another; every process must go on with the iterator."""
    joined: list[Launched] = []

    def join(subject: Subject) -> Finding:
        joined.append(Launched(subject, time_limit))
        mesh, accelerator = joined[0].mesh, joined[0].accelerator
        return ok(
            f"processes: {mesh.world_size}, {accelerator.distributed_type.value}, device {accelerator.device.type}, "
            f"mesh dp {mesh.dp_size} x ring {mesh.ring_size} x ulysses {mesh.ulysses_size}"
        )

    yield examine(Check("Launched", "joining", join), subject), (joined or [None])[0]
    lost = not joined
    for check in LAUNCHED_CHECKS:
        if lost:
            yield Result("Launched", check.name, "skip", "the processes are not joined"), None
            continue
        result, lost = _examine_together(check, joined[0])
        yield result, None if lost else joined[0]


def _examine_together(check: Check, launched: Launched) -> tuple[Result, bool]:
    """The result, and whether a peer is lost; an error of one rank is the failure of all."""

    def run(launched: Launched) -> Finding:
        finding, failure = None, None
        try:
            finding = check.run(launched)
        except CommunicationError:
            raise
        except Exception as error:
            failure = error
        agree(check.name, comm=Communicator(launched.mesh), error=failure, scope="world")
        return finding

    lost: list[bool] = []

    def watch(launched: Launched) -> Finding:
        try:
            return run(launched)
        except CommunicationError:
            lost.append(True)
            raise

    return examine(check._replace(run=watch), launched), bool(lost)


def check_backend(launched: Launched) -> Finding:
    """The backend and the ZeRO stage that the recipe asks for."""
    from accelerate.utils import DistributedType

    from hf_cp.training.checks import Launch, refuse

    subject, accelerator = launched.subject, launched.accelerator
    running = accelerator.distributed_type
    if subject.args.recipe is None:
        return ok(f"backend {running.value} (no recipe to compare with)")
    wanted = subject.accelerate.distributed_type.value
    refuse(
        Launch.of(
            accelerator,
            cp_size=subject.cp.cp_size,
            wants_deepspeed=wanted == "DEEPSPEED",
            wants_fsdp=wanted == "FSDP",
        )
    )
    if running != DistributedType.DEEPSPEED:
        return ok(f"backend {running.value}")
    stage = accelerator.state.deepspeed_plugin.zero_stage
    if stage != subject.zero_stage:
        return fail(f"ZeRO stage {stage} runs, the recipe has {subject.zero_stage}", "Start with its accelerate.yaml.")
    return ok(f"DeepSpeed with ZeRO stage {stage}, {accelerator.mixed_precision}")


def check_world(launched: Launched) -> Finding:
    """As many processes as the recipe starts."""
    subject, running = launched.subject, launched.mesh.world_size
    if subject.args.recipe is None:
        return ok(f"processes: {running}")
    wanted = subject.accelerate.num_processes
    if wanted != running:
        return fail(f"{running} processes run, accelerate.yaml has {wanted}", "Start with its accelerate.yaml.")
    return ok(f"processes: {running}, as in accelerate.yaml")


def check_alike(launched: Launched) -> Finding:
    """Versions, kernels that can be imported, and seeds of all processes."""
    from hf_cp.attention.kernels.flash3 import flash_attn_3_is_installed
    from hf_cp.environment import collect_environment

    facts = {name: version or "none" for name, version in collect_environment({}).packages.items()}
    facts["flash_attn_interface"] = str(flash_attn_3_is_installed())
    facts |= {name: str(launched.argument(name, None)) for name in ("seed", "data_seed")}
    everyones = gather_json(facts, launched.mesh)
    for rank, others in enumerate(everyones):
        different = [
            f"{name} {everyones[0][name]} / {others[name]}" for name in facts if others[name] != everyones[0][name]
        ]
        if different:
            return fail(f"rank 0 and rank {rank} differ: {', '.join(different)}", "Give all machines one environment.")
    return ok(f"versions and seeds are the same on all {len(everyones)} processes")


def check_wires(launched: Launched) -> Finding:
    """One collective of each kind over every axis, with known values."""
    from hf_cp.tools.doctor.probes import check_collectives

    done = check_collectives(launched.mesh)
    limit = launched.mesh.timeout.total_seconds()
    return ok(f"values arrive, within {limit:g} s: {', '.join(done)}")


def check_rows(launched: Launched) -> Finding:
    """The loader's batches: the same row inside a group, other rows in other groups, every target once."""
    from hf_cp.data.loader import ContextParallelDataLoader

    subject, mesh = launched.subject, launched.mesh
    try:
        features = subject.features
        features = [features[index] for index in range(min(100, len(features)))]
    except (NotGiven, ValueError, OSError, ImportError):
        features = list(subject.synthetic.documents)
    collator = replace(subject.collator, config=mesh.config, cp_rank=None)
    loader = ContextParallelDataLoader(features, collator=collator, mesh=mesh)
    found, expected, batches = 0, 0, iter(loader)
    steps = min(STEPS, len(loader))
    order = loader.order.rows(0)
    for step in range(steps):
        found += int((next(batches)["shift_labels"] != IGNORE_INDEX).sum())  # peers' rows are compared in here
        rows = [row for row in order[step * mesh.dp_size : (step + 1) * mesh.dp_size] if row >= 0]
        expected += sum(num_targets(loader.packed[row]) for row in rows)
    (total,) = sum_over_world([found], comm=Communicator(mesh))
    if total != expected:
        raise RuntimeError(f"{steps} micro-steps have {expected:,} targets, all ranks have {total:,}.\n  Report it.")
    return ok(f"targets of {steps} micro-step(s): {total:,} over all ranks, as in the documents; groups agree on rows")


def check_average(launched: Launched) -> Finding:
    """The mean over all W processes that the loss counts on, through the real backend (DDP or a ZeRO engine).

    Rank r's loss is x_r w with x_r = (r + 1) / 4W. One SGD step of size 1 from w = 0 leaves w = -mean(x) =
    -(W + 1) / 8W, if and only if gradients are averaged over all ranks.
    """
    accelerator, world = launched.accelerator, launched.mesh.world_size
    if accelerator.distributed_type.value == "FSDP":
        return skip("not made under FSDP, which wraps layers of the real model only")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    own = torch.full((1, 1), (launched.mesh.rank + 1) / (4 * world), device=accelerator.device)
    for _ in range(launched.num_accumulated):  # backward divides by it
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
    kind = type(model).__name__
    return ok(f"{kind}: a step follows the mean gradient of all {world} processes")


def _output(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In the type that the backend has given the weights."""
    return model(x.to(next(model.parameters()).dtype)).float()


def gather_json(value: Any, mesh: ContextParallelMesh) -> list[Any]:
    """`value` of every process, by rank."""
    content = json.dumps(value).encode()
    lengths = sum_over_world(
        [len(content) if r == mesh.rank else 0 for r in range(mesh.world_size)], comm=Communicator(mesh)
    )
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).unsqueeze(1)
    return [json.loads(bytes(part.flatten().tolist())) for part in gather_rows(rows, mesh=mesh, lengths=lengths)]


def worst_by_check(results: list[Result], mesh: ContextParallelMesh) -> list[Result]:
    """Each check's worst result over all processes; one that is not rank 0's says whose it is."""
    everyones = [[Result(**fields) for fields in part] for part in gather_json([asdict(r) for r in results], mesh)]
    worst = []
    for by_rank in zip(*everyones, strict=True):
        rank = max(range(len(by_rank)), key=lambda r: (STATUSES.index(by_rank[r].status), -r))
        found = by_rank[rank]
        worst.append(found if rank == 0 else replace(found, detail=f"rank {rank}: {found.detail}"))
    return worst


LAUNCHED_CHECKS = (
    Check("Launched", "number", check_world),
    Check("Launched", "alike", check_alike),
    Check("Launched", "backend", check_backend),
    Check("Launched", "collectives", check_wires),
    Check("Launched", "rows", check_rows),
    Check("Launched", "average of gradients", check_average),
)
