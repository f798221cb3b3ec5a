"""`hf-cp plan`: degrees, memory and step time for a model and a number of GPUs, before anything runs.

Invariant: a number that was not measured is called assumed, and standard output holds one JSON document or tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from hf_cp.data.files import read_lengths
from hf_cp.output import OK, PROBLEM, Table, Verdict, print_json, print_usage_error, progress
from hf_cp.planning.devices import GIB, Device
from hf_cp.planning.memory import CHECKPOINTING, Training
from hf_cp.planning.model_names import known_models, load_config
from hf_cp.planning.search import ERROR, MEMORY_SHARE, SPARE, SPEED_STEP, Candidate, Plan, plan_context_parallel

__all__ = ["add_arguments", "plan_context_parallel", "run"]

MEMORY_ROWS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer states"),
    ("activations", "kept for the backward pass"),
    ("recomputed", "one layer recomputed"),
    ("logits", "logits of a chunk (earlier, but added)"),
    ("buffers", "ZeRO and attention buffers"),
    ("overhead", "CUDA, NCCL, allocator (assumed)"),
)
PLACEMENT_LINES = 10  # of the placement; in larger worlds some groups are left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp plan`."""
    parser.add_argument(
        "model", help=f"folder or config.json of a model, or one of {', '.join(known_models())}", metavar="MODEL"
    )
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of the longest packed sample")
    parser.add_argument("--gpus", type=int, required=True, help="processes in all")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200, b200, ... or a JSON file (default: h100)")
    parser.add_argument("--cp", type=int, default=None, help="only groups of this size")
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage; 3 for FSDP2")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="LoRA rank; 0 trains all weights")
    parser.add_argument(
        "--checkpointing", default="keep_attention", choices=CHECKPOINTING, help="default: keep_attention"
    )
    parser.add_argument("--loss-chunk-tokens", type=int, default=1024)
    parser.add_argument("--mlp-chunk-tokens", type=int, default=None)
    parser.add_argument("--optimizer-offload", action="store_true", help="optimizer states on the host")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"), help="weights and activations")
    parser.add_argument("--lengths", type=Path, default=None, help="document lengths: JSON, .npy, or one a line")
    parser.add_argument("--measured", type=Path, default=None, help="bench.json of `hf-cp bench`")
    parser.add_argument("--top", type=int, default=8, help="rows of the table (default: 8)")
    parser.add_argument("--json", default=None, metavar="FILE", help="write everything as JSON; - for standard output")
    parser.add_argument("--write", type=Path, default=None, metavar="DIR", help="write a recipe for the first choice")
    parser.add_argument("--data", default=None, metavar="FILE", help="documents, for the recipe that --write writes")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; the status is `PROBLEM` if nothing fits. What is written is said beside JSON on stderr."""
    try:
        plan = make_plan(args)
    except (ValueError, OSError) as error:
        return print_usage_error(error)
    if args.json is not None:
        print_json(as_json(plan), args.json)
    if args.json != "-":
        for table in tables(plan, args):
            table.print()
            print()
    verdict = judge(plan)
    if args.json != "-":
        verdict.print()
    if args.write is None:
        return verdict.status
    if plan.recommended is None:
        _say(args, f"Nothing was written to {args.write}: there is no split that fits.")
        return verdict.status
    return write(args, plan)


def write(args: argparse.Namespace, plan: Plan) -> int:
    """The recipe of the first choice, into `args.write`."""
    from hf_cp.recipes.writer import write_planned

    try:
        start = write_planned(args.write, plan, model=args.model, command=command_line(args), data=args.data)
    except (ValueError, OSError) as error:
        return print_usage_error(error)
    first = "" if args.data else " Set dataset in its train.yaml first."
    _say(args, f"Recipe: {args.write}.{first} Start: {start}")
    return OK


def _say(args: argparse.Namespace, text: str) -> None:
    (progress if args.json == "-" else print)(text)


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        ValueError, OSError: the model, the lengths or the sizes cannot be used.
    """
    training = Training(
        zero_stage=args.zero,
        lora_r=args.lora,
        checkpointing=args.checkpointing,
        itemsize={"bf16": 2, "fp32": 4}[args.dtype],
        loss_chunk_tokens=args.loss_chunk_tokens,
        mlp_chunk_tokens=args.mlp_chunk_tokens,
        optimizer_offload=args.optimizer_offload,
    )
    return plan_context_parallel(
        load_config(args.model),
        seq_len=args.seq_len,
        num_gpus=args.gpus,
        gpus_per_node=args.gpus_per_node,
        gpu=args.gpu,
        training=training,
        lengths=None if args.lengths is None else read_lengths(args.lengths),
        cp_size=args.cp,
        measured=args.measured,
    )


def command_line(args: argparse.Namespace) -> str:
    """The command that gives this plan, without what only says where to write it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["hf-cp", "plan", args.model]
    for name, value in vars(args).items():
        if name in ("model", "json", "write", "data", "top") or value in (None, parser.get_default(name)):
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def tables(plan: Plan, args: argparse.Namespace) -> list[Table]:
    """Memory of the first choice, the ranking, and where the processes are."""
    best = plan.candidates[0]
    parts = [memory_table(plan, best), ranking_table(plan, args.top)]
    if plan.recommended is not None:
        parts.append(placement_table(plan, best))
    return parts


def memory_table(plan: Plan, candidate: Candidate) -> Table:
    """What takes the memory of a GPU under `candidate`, below the headline."""
    device, memory = plan.cluster.device, candidate.memory
    local = -(-plan.seq_len // candidate.config.cp_size)
    rows = [(text, f"{getattr(memory, name) / GIB:.1f}") for name, text in MEMORY_ROWS]
    rows.append(
        (
            f"total ({MEMORY_SHARE:.0%} of {device.memory_gib:.1f} may be used)",
            f"{memory.total / GIB:.1f} of {device.memory_gib * MEMORY_SHARE:.1f}",
        )
    )
    rows.append(("longest document that fits (best split)", f"{plan.longest_document:,} tokens"))
    return Table(f"{headline(plan)}\n\nMemory of a GPU, {split(candidate)}, {local:,} local tokens", ("", "GiB"), rows)


def headline(plan: Plan) -> str:
    """What is planned, in two lines."""
    model, cluster, training = plan.model, plan.cluster, plan.training
    device = cluster.device
    trained = f"LoRA {training.lora_r}" if training.lora_r else "all weights"
    samples = (
        f"{plan.num_documents:,} documents in {plan.num_samples:,} samples of up to {plan.seq_len:,} tokens"
        if plan.num_documents > 1
        else f"samples of one document of {plan.seq_len:,} tokens"
    )
    return (
        f"{model.name}: {model.num_parameters / 1e9:.2f} B parameters, {model.num_layers} layers, {model.num_heads} "
        f"heads over {model.num_kv_heads} K/V heads; {trained}, ZeRO-{training.zero_stage}, checkpointing "
        f"{training.checkpointing}\n"
        f"{cluster.num_gpus} x {device.name}, {cluster.gpus_per_node} a node; {samples}\n"
        f"{rates(device, num_nodes=cluster.num_nodes)}"
    )


def rates(device: Device, *, num_nodes: int) -> str:
    """The numbers that the plan rests on, and which of them were measured."""
    named = {
        "attention_tflops": "attention {} TFLOP/s",
        "matmul_tflops": "linear layers {} TFLOP/s",
        "intra_gbs": "links in a node {} GB/s",
        "inter_gbs": "between nodes {} GB/s",
        "memory_gib": "memory {} GiB",
    }
    if num_nodes == 1:
        del named["inter_gbs"]
    is_measured = {name: device.is_field_measured(name) for name in named}
    texts = [text.format(digits(getattr(device, name))) for name, text in named.items()]
    if not any(is_measured.values()):
        return f"{', '.join(texts)} (all assumed; measure with hf-cp bench)"
    sources = ["measured" if measured else "assumed" for measured in is_measured.values()]
    return ", ".join(f"{text} ({source})" for text, source in zip(texts, sources, strict=True))


def digits(value: float) -> str:
    """Three significant ones, in plain notation.

    >>> digits(0.06587), digits(45.0), digits(1350.4)
    ('0.0659', '45.0', '1,350')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def ranking_table(plan: Plan, top: int) -> Table:
    """The first splits: what they send, how long a micro-step takes, what they need."""
    columns = ("dp x ring x ulysses", "engine", "a2a GiB", "ring GiB", "exposed s", "step s", "tokens/s/GPU", "GiB")
    rows = [
        (
            split(candidate),
            engine(candidate),
            f"{candidate.step.ulysses_bytes / GIB:.1f}",
            f"{candidate.step.ring_bytes / GIB:.1f}",
            f"{candidate.step.exposed:.3f}",
            digits(candidate.step.seconds),
            digits(candidate.tokens_per_second),
            f"{candidate.memory.total / GIB:.1f}",
            f"{candidate.longest_document:,}",
            note(candidate, plan),
        )
        for candidate in plan.candidates[:top]
    ]
    layout = plan.candidates[0].config.resolved_layout
    title = (
        f"Splits, best first (layout {layout}; bytes of one GPU in one micro-step; seconds +- {ERROR:.0%}; speeds\n"
        f"within {SPEED_STEP:.0%} are not told apart: then memory to spare, Ulysses in a node, small groups, few ring "
        "steps)"
    )
    return Table(title, (*columns, "longest document", "note"), rows)


def engine(candidate: Candidate) -> str:
    """What moves keys and values, and what it stands for."""
    if candidate.config.ring_degree == 1:
        return "-"
    if candidate.config.ring_comm != "auto":
        return candidate.config.ring_comm
    return f"auto: {', '.join(candidate.engines)}"


def split(candidate: Candidate) -> str:
    """The degrees, outermost first."""
    config = candidate.config
    return f"{candidate.dp_size} x {config.ring_degree} x {config.ulysses_degree}"


def note(candidate: Candidate, plan: Plan) -> str:
    """What to know about a split."""
    if not candidate.fits:
        return "does not fit"
    notes = {
        "first choice": candidate is plan.recommended,
        f"under {SPARE:.0%} of the memory free": candidate.is_tight,
        "all-to-all between nodes": not candidate.ulysses_in_node,
        "K/V heads replicated": plan.model.num_kv_heads % candidate.config.ulysses_degree,
    }
    return "; ".join(text for text, holds in notes.items() if holds)


def placement_table(plan: Plan, candidate: Candidate) -> Table:
    """Group by group: ranks that differ in one place only, all on one node; in large worlds the first ones."""
    config, cluster = candidate.config, plan.cluster
    sizes = (candidate.dp_size, config.ring_degree, config.ulysses_degree)
    innermost = next((size for size in reversed(sizes) if size > 1), 1)
    starts = sorted({*range(0, cluster.num_gpus, innermost), *range(0, cluster.num_gpus, cluster.gpus_per_node)})
    rows = []
    for first, end in zip(starts, [*starts[1:], cluster.num_gpus], strict=True):
        ranks = np.arange(first, end)
        places = np.unravel_index(ranks, sizes)
        rows.append((*(_span(values) for values in (ranks, *places)), str(first // cluster.gpus_per_node)))
    if len(rows) > PLACEMENT_LINES:
        rows = [*rows[: PLACEMENT_LINES - 2], ("...", *[""] * 4), rows[-1]]
    title = f"Placement: rank = (dp * {config.ring_degree} + ring) * {config.ulysses_degree} + ulysses"
    return Table(title, ("ranks", "dp", "ring", "ulysses", "node"), rows)


def _span(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low}-{high}"


def judge(plan: Plan) -> Verdict:
    """The first choice, or why there is none."""
    best = plan.recommended
    if best is None:
        smallest = plan.candidates[0]
        longest = plan.longest_document
        shorter = f"shorter samples (up to {longest:,} tokens fit), " if longest else ""
        return Verdict(
            PROBLEM,
            f"nothing fits: the smallest need is {smallest.memory.total / GIB:.1f} GiB ({split(smallest)}), "
            f"{MEMORY_SHARE:.0%} of a GPU's memory are {MEMORY_SHARE * plan.cluster.device.memory_gib:.1f}. "
            f"Use more GPUs, {shorter}"
            "checkpointing, --mlp-chunk-tokens, LoRA, or a higher ZeRO stage.",
        )
    return Verdict(
        OK,
        f"ring_degree={best.config.ring_degree}, ulysses_degree={best.config.ulysses_degree}, dp {best.dp_size}: "
        f"{digits(best.tokens_per_second)} tokens/s per GPU (estimate, +- {ERROR:.0%}), "
        f"{best.memory.total / GIB:.1f} GiB.",
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that the tables show, and more."""
    return {
        "model": plan.model,
        "training": plan.training,
        "cluster": plan.cluster,
        "seq_len": plan.seq_len,
        "num_samples": plan.num_samples,
        "longest_document": plan.longest_document,
        "error": ERROR,
        "recommended": plan.recommended and split(plan.recommended),
        "candidates": [
            {
                **dataclasses.asdict(c),
                "split": split(c),
                "fits": c.fits,
                "seconds": c.step.seconds,
                "total_bytes": c.memory.total,
            }
            for c in plan.candidates
        ],
    }
