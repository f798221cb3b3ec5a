"""A heat map of `hf-cp bench`: a row for each setting, a column for each method."""

from __future__ import annotations

import os
from collections.abc import Sequence
from textwrap import fill

import numpy as np

from hf_cp.tools.bench.results import Result

SLOWEST = 2.0  # times the fastest: the end of the colour scale


def plot_results(path: str | os.PathLike, results: Sequence[Result]) -> None:
    """Writes a PNG. A cell is coloured by time over the setting's fastest method, and says ms and exposed ms.

    Args:
        path (`str` or `os.PathLike`): the file.
        results (sequence of `Result`): of any settings and methods; combinations that are missing stay empty.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(str(result.case.setting) for result in results))
    methods = list(dict.fromkeys(result.case.method for result in results))
    seconds = np.full((len(settings), len(methods)), np.nan)
    figure = Figure(figsize=(4.0 + 1.3 * len(methods), 1.8 + 0.75 * len(settings)), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        row, column = settings.index(str(result.case.setting)), methods.index(result.case.method)
        seconds[row, column] = result.seconds.median
        axes.text(column, row, _label(result), ha="center", va="center", fontsize=8)
    relative = seconds / np.nanmin(seconds, axis=1, keepdims=True)
    image = axes.imshow(relative, cmap="YlOrRd", vmin=1.0, vmax=SLOWEST, alpha=0.7, aspect="auto")
    axes.set_xticks(range(len(methods)), [fill(method, 14) for method in methods])
    axes.set_yticks(range(len(settings)), [fill(setting, 34) for setting in settings])
    axes.set_title(
        "attention, forward + backward: ms,\nand ms of communication that nothing hides (~: noisy)", fontsize=10
    )
    figure.colorbar(image, ax=axes, label="time over the fastest method of the row", extend="max")
    FigureCanvasAgg(figure).print_png(os.fspath(path))


def _label(result: Result) -> str:
    noise = "~" if result.is_noisy else ""
    exposed = f"\n+{max(0.0, result.exposed.median) * 1e3:.1f} exposed" if result.sent_bytes else ""
    return f"{noise}{result.seconds.median * 1e3:.1f} ms{exposed}"
