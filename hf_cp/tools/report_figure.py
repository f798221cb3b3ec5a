"""The picture of `hf-cp report`: work and time of every rank by step, and where a rank's step goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hf_cp.training.telemetry.records import RunRecords, StepRecord


class Part(NamedTuple):
    """A part of a step: its name in tables and in pictures, its colour, and its seconds."""

    name: str
    label: str
    color: str
    seconds: Callable[[StepRecord], float]


# In the order of the columns and of the stacks. The rest is the reduction of gradients, the update, and what the first
# layer does before its attention.
PARTS = (
    Part("data", "batches", "C7", lambda r: r.data_seconds),
    Part("work", "forward and backward", "C0", lambda r: r.work_seconds),
    Part("ring wait", "wait: ring", "C3", lambda r: r.ring_wait_seconds),
    Part("ulysses wait", "wait: ulysses", "C1", lambda r: r.ulysses_wait_seconds),
    Part("other wait", "wait: other", "C6", lambda r: r.other_wait_seconds),
    Part("rest", "gradients, update", "0.85", lambda r: max(0.0, r.seconds - r.busy_seconds - r.wait_seconds)),
)


def plot_run(path: str | os.PathLike, run: RunRecords) -> None:
    """Draws two heat maps (attention work and own time of each rank and step, over the step's mean), and of one step
    how long each part takes in all.

    The step is the one whose slowest rank needs most time, over the step's mean; of several steps the first is not
    taken.

    Args:
        path (`str` or `os.PathLike`): the PNG file.
        run (`RunRecords`): at least one step.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    work = over_mean(run, lambda record: record.area)
    busy = over_mean(run, lambda record: record.busy_seconds)
    worst = most_uneven_step(busy)
    height = max(2.0, 0.25 * len(run.ranks) + 1.2)
    figure = Figure(figsize=(8.0, 3 * height), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1)
    _heat_map(figure, top, work, run, "attention work of a rank, over the mean of the step")
    _heat_map(figure, middle, busy, run, "time that a rank needed by itself, over the mean of the step")
    _parts_of_step(bottom, [steps[worst] for steps in run.ranks])
    FigureCanvasAgg(figure).print_png(os.fspath(path))


def over_mean(run: RunRecords, value: Callable[[StepRecord], float]) -> np.ndarray:
    """float64 [ranks, steps]: `value` of a record, over the mean of all ranks in that step (1 where that is 0)."""
    values = np.array([[value(record) for record in steps] for steps in run.ranks], dtype=np.float64)
    means = values.mean(axis=0)
    return np.divide(values, means, out=np.ones_like(values), where=means > 0)


def most_uneven_step(ratios: np.ndarray) -> int:
    """Index of the step with the largest ratio; of several steps, not the first."""
    first = 1 if ratios.shape[1] > 1 else 0
    return first + int(ratios[:, first:].max(axis=0).argmax())


def _heat_map(figure: Any, axes: Any, ratios: np.ndarray, run: RunRecords, title: str) -> None:
    steps = [record.step for record in run.ranks[0]]
    spread = max(0.05, float(np.abs(ratios - 1).max()))
    image = axes.imshow(
        ratios,
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=1 - spread,
        vmax=1 + spread,
        extent=(steps[0] - 0.5, steps[0] + len(steps) - 0.5, len(run.ranks) - 0.5, -0.5),
    )
    axes.set(title=title, xlabel="optimizer step", ylabel="rank")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes)


def _parts_of_step(axes: Any, records: list[StepRecord]) -> None:
    """Totals of the parts, stacked: the records say how long each takes in all, not when."""
    left = np.zeros(len(records))
    for part in PARTS:
        width = 1000 * np.array([part.seconds(record) for record in records])
        axes.barh(range(len(records)), width, left=left, color=part.color, label=part.label)
        left += width
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(
        title=f"optimizer step {records[0].step}: totals of its parts, not in time order", xlabel="ms", ylabel="rank"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, fontsize="small", frameon=False)
