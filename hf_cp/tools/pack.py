"""`hf-cp pack`: what packing and splitting will do to your documents, before training.

    hf-cp pack --data train.jsonl --tokenizer DIR --max-tokens 131072 --cp 8 --ulysses 2 --model llama-3.1-8b

Prints how full packed samples are and what is cut or dropped, the documents by length, and for every layout how even
attention is and how many K/V tokens (with `--model`, bytes) the busiest rank sends by each engine; of the layout that
training takes, also what every ring rank computes and sends. Nothing is written but what `--json` and `--plot` name.
Exit status: 0, or 2 if the documents cannot be read or packed as asked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hf_cp.config import LAYOUTS, ContextParallelConfig, check_heads, head_counts, head_size
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.files import documents_of_lengths, load_features, read_lengths
from hf_cp.output import OK, Table, Verdict, print_json, print_usage_error, progress
from hf_cp.planning.model_names import load_config
from hf_cp.planning.model_shape import layer_windows
from hf_cp.planning.packing_preview import (
    ModelAttention,
    PackPreview,
    length_histogram,
    preview_layout,
    replica_balance,
    spread_samples,
)
from hf_cp.sequence.costs import AttentionShape
from hf_cp.tools.options import add_context_parallel_arguments, config_from_arguments
from hf_cp.tools.pack_plot import plot_preview

CONCRETE_LAYOUTS = tuple(name for name in LAYOUTS if name != "auto")
OVERFLOW_CHOICES = ("error", "truncate", "split", "drop")
MOST_SAMPLES = 64
BAR = 40  # characters of the longest bar
MIB = 1024**2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp pack`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="FILE", help="JSONL, saved dataset, or folder of text files")
    source.add_argument("--lengths", type=Path, metavar="FILE", help="only lengths: JSON, .npy, or one a line")
    parser.add_argument("--max-tokens", type=int, required=True, help="tokens of a packed sample")
    parser.add_argument("--tokenizer", metavar="DIR", help="for documents of text and chats")
    parser.add_argument("--overflow", default="error", choices=OVERFLOW_CHOICES, help="of longer documents (error)")
    parser.add_argument("--cp", type=int, metavar="P", help="processes of a sample; the ring takes what is left")
    parser.add_argument("--ring", "--ring-degree", dest="ring_degree", type=int, help="ring shards of a sample")
    parser.add_argument("--ulysses", "--ulysses-degree", dest="ulysses_degree", type=int, help="default: 1")
    parser.add_argument("--layouts", type=_layouts, default=CONCRETE_LAYOUTS, metavar="NAME,...", help="default: all")
    parser.add_argument("--model", metavar="MODEL", help="folder, config.json or known name: counts bytes")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks: how evenly samples fall on them")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-steps of an optimizer step")
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples (with --dp)")
    parser.add_argument(
        "--samples",
        "--rows",
        type=int,
        default=MOST_SAMPLES,
        metavar="N",
        help=f"samples that are split ({MOST_SAMPLES})",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw lengths and ranks (needs matplotlib)")
    add_context_parallel_arguments(parser, exclude=("ring_degree", "ulysses_degree", "layout"))


def run(args: argparse.Namespace) -> int:
    """Prints the preview."""
    try:
        preview, config = make_preview(args)
        if args.plot is not None:
            plot_preview(args.plot, preview)
    except (ValueError, OSError, ImportError) as error:
        return print_usage_error(error)
    if args.json:
        print_json({"command": "pack", "config": config, "preview": preview}, args.json)
    if args.json != "-":
        for table in tables(preview, config):
            table.print()
            print()
        judge(preview).print()
    return OK


def make_preview(args: argparse.Namespace) -> tuple[PackPreview, ContextParallelConfig]:
    """Reads, packs, splits.

    Raises:
        ValueError, OSError: the documents cannot be read, or not be packed as asked; or the degrees do not fit.
    """
    for name in ("max_tokens", "dp", "accumulation", "samples"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is not positive. Use 1 or more.")
    config = degrees(args)
    attention = model_attention(args, config)
    packed = read_packed(args, config)
    manifest, replicas, layouts = packed.manifest, None, []
    samples = spread_samples(manifest, args.samples)
    for name in args.layouts:
        progress(f"Splitting {len(samples)} of {len(manifest.samples)} samples: {name}")
        layouts.append(preview_layout(samples, config, attention, layout=name))
    if args.dp > 1:
        replicas = replica_balance(packed, dp_size=args.dp, num_accumulated=args.accumulation, seed=args.seed)
    preview = PackPreview(
        num_features=packed.num_features,
        num_documents=len(manifest.lengths),
        num_tokens=manifest.num_tokens,
        num_samples=len(manifest.samples),
        longest=max(manifest.lengths),
        max_tokens=args.max_tokens,
        fill=manifest.fill,
        counts={name: getattr(manifest.counts, name) for name in ("empty", "truncated", "split", "dropped")},
        histogram=length_histogram(manifest.lengths),
        looked_at=len(samples),
        layouts=sorted(layouts, key=lambda found: (found.layout != config.resolved_layout, -found.balance)),
        replicas=replicas,
    )
    return preview, config


def degrees(args: argparse.Namespace) -> ContextParallelConfig:
    """`--cp` with what is given of ring and Ulysses; the ring takes what is left."""
    ring, ulysses, size = args.ring_degree, args.ulysses_degree, args.cp
    if size is not None:
        ulysses = ulysses or (size // ring if ring and size % ring == 0 else 1)
        ring = ring or (size // ulysses if size % ulysses == 0 else 1)
        if ring * ulysses != size:
            raise ValueError(f"--cp {size} is not ring {ring} x Ulysses {ulysses}. Give degrees whose product it is.")
    given = {"ring_degree": ring, "ulysses_degree": ulysses}
    return config_from_arguments(args, **{name: value for name, value in given.items() if value is not None})


def model_attention(args: argparse.Namespace, config: ContextParallelConfig) -> ModelAttention:
    """Sizes and windows of the model's attention; without a model, one layer of full attention without sizes."""
    if args.model is None:
        return ModelAttention()
    model = load_config(args.model)
    heads, kv_heads = head_counts(model)
    check_heads(heads, kv_heads, config)
    grad_itemsize = 2 if config.grad_comm_dtype == "compute" else 4
    shape = AttentionShape(heads, kv_heads, head_size(model), 2, grad_itemsize)
    return ModelAttention(shape, tuple(Counter(layer_windows(model)).items()))


def read_packed(args: argparse.Namespace, config: ContextParallelConfig) -> PackedDataset:
    """The packed samples, by the collator's rules."""
    collator = DataCollatorForContextParallel(config, cp_rank=0, max_tokens=args.max_tokens, overflow=args.overflow)
    if args.tokenizer is not None:
        from transformers import AutoTokenizer  # seconds; only for those who read text

        collator = replace(collator, tokenizer=AutoTokenizer.from_pretrained(args.tokenizer))
    by_length = args.lengths is not None
    features = documents_of_lengths(read_lengths(args.lengths)) if by_length else load_features(args.data)
    progress(f"Packing {len(features):,} features")
    try:
        return PackedDataset(features, collator=collator)
    except ValueError as error:
        reason, _, _ = str(error).partition("\n")
        if args.tokenizer is None and "there is no tokenizer" in reason:
            raise ValueError(f"{reason}\n  Give --tokenizer DIR, a folder with the model's tokenizer.") from None
        raise


def tables(preview: PackPreview, config: ContextParallelConfig) -> list[Table]:
    """Samples, documents by length, layouts, and data-parallel ranks."""
    parts = [packing_table(preview), histogram_table(preview)]
    parts += [layout_table(preview, config)] if config.cp_size > 1 else []
    return parts + ([traffic_table(preview), rank_table(preview)] if config.ring_degree > 1 else [])


def packing_table(preview: PackPreview) -> Table:
    """The data set as it is packed, and how evenly its samples fall on data-parallel ranks."""
    changed = ", ".join(f"{count:,} {name}" for name, count in preview.counts.items() if count) or "none"
    rows = [
        ("documents", f"{preview.num_documents:,} from {preview.num_features:,} features"),
        ("empty, cut or left out", changed),
        ("tokens", f"{preview.num_tokens:,}, the longest document {preview.longest:,}"),
        ("packed samples", f"{preview.num_samples:,} of up to {preview.max_tokens:,} tokens"),
        ("fill", f"{preview.fill:.2%}"),
    ]
    replicas = preview.replicas
    if replicas is not None:
        rows.append(
            (
                f"attention over {replicas.dp_size} dp ranks",
                f"mean/max {replicas.balance:.3f} over {replicas.num_micro_steps:,} micro-steps; "
                f"{replicas.grouped_balance:.3f} with group_by_cost",
            )
        )
    return Table("Packing", ("", ""), rows)


def histogram_table(preview: PackPreview) -> Table:
    """A bar for the number of documents; the share of tokens beside it."""
    most = max(part.documents for part in preview.histogram)
    rows = [
        (
            f"{part.low:,} - {part.high:,}",
            f"{part.documents:,}",
            f"{part.tokens / preview.num_tokens:.1%}",
            "#" * max(bool(part.documents), round(BAR * part.documents / most)),
        )
        for part in preview.histogram
    ]
    return Table("Documents by length", ("tokens", "documents", "of all tokens", ""), rows)


def layout_table(preview: PackPreview, config: ContextParallelConfig) -> Table:
    """Balance, padding and the bytes of Ulysses of every layout."""
    title = (
        f"{preview.looked_at} of {preview.num_samples:,} samples over ring {config.ring_degree} x Ulysses "
        f"{config.ulysses_degree}; balance is mean over largest attention area of a rank"
    )
    columns = ("layout", "balance", "worst sample", "padding", "tokens a rank", "Ulysses MiB")
    rows = [
        (
            layout.layout,
            f"{layout.balance:.3f}",
            f"{layout.worst_balance:.3f}",
            f"{layout.padding:.2%}",
            f"{layout.local_length:,}",
            _mib(layout.ulysses_bytes),
        )
        for layout in preview.layouts
    ]
    return Table(title, columns, rows)


def traffic_table(preview: PackPreview) -> Table:
    """What the ring moves by every layout and engine; by `auto` where it takes several engines."""
    title = "Ring axis: what the busiest rank sends (K/V tokens of a layer and pass; MiB of all layers, both passes)"
    rows = [
        (
            f"{layout.layout} {traffic.engine}",
            f"{traffic.kv_tokens:,.0f}",
            f"{traffic.share:.1%}",
            _mib(traffic.num_bytes),
            f"{layout.auto[traffic.engine]} samples" if traffic.engine in layout.auto else "",
        )
        for layout in preview.layouts
        for traffic in layout.traffic
        if traffic.engine != "auto" or len(layout.auto) > 1
    ]
    return Table(title, ("layout and engine", "K/V tokens", "of a full ring", "MiB", "auto takes it for"), rows)


def rank_table(preview: PackPreview) -> Table:
    """Attention area and K/V tokens of every ring rank under the first layout."""
    layout = preview.layouts[0]
    mean = sum(layout.areas) / len(layout.areas)
    title = (
        f"Ring ranks under {layout.layout}, mean over samples: visible pairs of all layers; K/V tokens sent in a "
        "layer and pass, by engine"
    )
    columns = ("ring rank", "attention area", "over mean", *(traffic.engine for traffic in layout.traffic))
    rows = [
        (
            str(rank),
            f"{area:,.0f}",
            f"{area / mean:.3f}",
            *(f"{traffic.tokens_by_rank[rank]:,.0f}" for traffic in layout.traffic),
        )
        for rank, area in enumerate(layout.areas)
    ]
    return Table(title, columns, rows)


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.1f}"


def judge(preview: PackPreview) -> Verdict:
    """How full samples are, what the layout of training costs with the engine that auto takes, what is lost."""
    layout, split = preview.layouts[0], ""
    if layout.traffic:
        split = (
            f"; {layout.layout} with {' and '.join(layout.auto)}: balance {layout.balance:.3f}, padding "
            f"{layout.padding:.2%}, sends up to {layout.traffic[-1].share:.1%} of a full ring"
        )
    lost = preview.counts["truncated"] + preview.counts["dropped"]
    note = f" {lost:,} documents lose tokens: raise --max-tokens or use --overflow split." if lost else ""
    return Verdict(OK, f"{preview.num_samples:,} samples, {preview.fill:.1%} full{split}.{note}")


def _layouts(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in CONCRETE_LAYOUTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(CONCRETE_LAYOUTS)}")
    return names
