"""The picture of `hf-cp pack`: documents by length, and what every ring rank computes and sends under every layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hf_cp.planning.packing_preview import LayoutPreview, PackPreview

__all__ = ["draw_preview", "plot_preview"]


def plot_preview(path: str | os.PathLike, preview: PackPreview) -> None:
    """Writes the picture into the PNG file `path`.

    Raises:
        ImportError: matplotlib is not installed (extra `plot`).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(draw_preview(preview)).print_png(os.fspath(path))


def draw_preview(preview: PackPreview) -> Any:
    """A matplotlib figure: the lengths, and where samples are cut over a ring, the ring ranks."""
    from matplotlib.figure import Figure

    layouts = preview.layouts if preview.layouts[0].traffic else ()
    figure = Figure(figsize=(11.0 if layouts else 4.6, 3.8), layout="constrained")
    left, *others = figure.subplots(1, 3 if layouts else 1, squeeze=False)[0]
    _draw_lengths(left, preview)
    if layouts:
        _draw_ranks(*others, layouts)
    return figure


def _draw_lengths(axes: Any, preview: PackPreview) -> None:
    names = [f"{part.low:,}" for part in preview.histogram]
    shares = {
        "documents": [part.documents / preview.num_documents for part in preview.histogram],
        "tokens": [part.tokens / preview.num_tokens for part in preview.histogram],
    }
    for offset, (label, values) in zip((-0.2, 0.2), shares.items(), strict=True):
        axes.bar([place + offset for place in range(len(names))], values, width=0.4, label=label)
    axes.set_xticks(range(len(names)), names, rotation=60)
    axes.set(title="share of documents and tokens", xlabel="tokens of a document, at least")
    axes.legend()


def _draw_ranks(areas: Any, sent: Any, layouts: Sequence[LayoutPreview]) -> None:
    """Means over samples, whose ups and downs may cancel: balance, in the legend, is that of single ones."""
    width = 0.8 / len(layouts)
    for number, layout in enumerate(layouts):
        places = [rank + (number + 0.5) * width - 0.4 for rank in range(len(layout.areas))]
        mean = sum(layout.areas) / len(layout.areas)
        balance = f"{layout.layout} (balance {layout.balance:.3f})"
        areas.bar(places, [area / mean for area in layout.areas], width, label=balance)
        engines = f"{layout.layout} ({', '.join(layout.auto)})"
        sent.bar(places, layout.traffic[-1].tokens_by_rank, width, label=engines)
    areas.set(title="attention area, over the mean", xlabel="ring rank")
    sent.set(title="K/V tokens sent in a layer and pass", xlabel="ring rank")
    for axes in (areas, sent):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small", frameon=False)
