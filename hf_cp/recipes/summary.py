"""What a run leaves behind for its reader: memory of every process, the loss curve."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.distributed.peak import GIB, peak_memory_bytes
from hf_cp.distributed.reduce import sum_over_world

__all__ = ["peak_memory_gib", "plot_losses"]


def peak_memory_gib(mesh: ContextParallelMesh) -> list[float]:
    """The most memory that each rank has held so far, in GiB by rank: of its GPU, or of the whole process on CPU.

    All ranks must call it.
    """
    gib = peak_memory_bytes(mesh.device_type) / GIB
    own = [gib if rank == mesh.rank else 0.0 for rank in range(mesh.world_size)]
    return [round(gib, 3) for gib in sum_over_world(own, mesh=mesh)]


def plot_losses(path: str | os.PathLike, *, training: Mapping[int, float], held_out: Mapping[int, float]) -> None:
    """Draws the training loss and the held-out loss by optimizer step into a PNG file.

    Args:
        path (`str` or `os.PathLike`): the file.
        training (`Mapping[int, float]`): step -> loss of the rows of that step (each step has other rows).
        held_out (`Mapping[int, float]`): step -> loss of the same held-out documents every time.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        list(training), list(training.values()), color="0.6", marker=".", label="training rows (other rows each step)"
    )
    axes.plot(
        list(held_out), list(held_out.values()), color="C0", marker="o", label="held-out documents (always the same)"
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean token loss (nats)")
    axes.legend()
    FigureCanvasAgg(figure).print_png(os.fspath(path))
