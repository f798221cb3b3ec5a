"""`hf-cp bench`: how fast is attention here, split in every way, and what can the links and the kernel do?

    torchrun --nproc_per_node 4 -m hf_cp bench --seq-lens 8k,32k --attention gqa,mqa --output bench.json

On CPU too, and with one process. For every row all methods (degrees, engine, layout) take turns: time of forward and
backward pass, the communication alone, what of it nothing hides, peak memory, the error against fp64 in one process.
`--output` keeps everything; `hf-cp plan --measured bench.json` takes links and rates from there. Exit status: 0, or 1
if a method's error is above its limit, or 2 if the options do not fit. Noisy times are marked, not left out.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_cp.config import LAYOUTS, RING_COMMS, ContextParallelConfig
from hf_cp.output import (
    OK,
    PROBLEM,
    Table,
    Verdict,
    is_main_process,
    print_json,
    print_usage_error,
    progress,
)
from hf_cp.tools.options import add_context_parallel_arguments, config_from_arguments

if TYPE_CHECKING:
    from hf_cp.distributed.communicator import Communicator
    from hf_cp.distributed.mesh import ContextParallelMesh
    from hf_cp.tools.bench.calibration import Calibration
    from hf_cp.tools.bench.cases import Case, Setting
    from hf_cp.tools.bench.measure import Meshes, Result

ATTENTION_TYPES = ("mha", "gqa", "mqa")
DTYPES = ("float32", "float64", "bfloat16", "float16")
CHECKPOINTING = {"off": False, "on": True}
ROWS = ("single", "packed")
DEFAULT_TOKENS = {"cpu": (1024, 2048), "cuda": (8192, 32768)}
QUICK_TOKENS = (256,)
CASE_FIELDS = ("ring_degree", "ulysses_degree", "ring_comm", "layout")  # set by the matrix
UNUSED_FIELDS = ("keep_attention", "loss_chunk_tokens", "mlp_chunk_tokens", "force")  # no part of one attention call
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp bench`; lists are separated by commas."""
    parser.add_argument("--degrees", type=_list_of(_degrees), metavar="RxU,...", help="ring x ulysses (default: all)")
    engines, layouts = RING_COMMS[1:], LAYOUTS[1:]
    words = f"of a ring: {', '.join(engines)} (default: all)"
    parser.add_argument("--engines", type=_choices(engines), default=engines, metavar="ENGINE,...", help=words)
    words = f"of a ring: {', '.join(layouts)} (default: document)"
    parser.add_argument("--layouts", type=_choices(layouts), default=("document",), metavar="LAYOUT,...", help=words)
    parser.add_argument("--seq-lens", type=_list_of(_tokens), metavar="N,...", help="tokens of a row, as 2048 or 32k")
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument(
        "--attention", type=_choices(ATTENTION_TYPES), metavar="TYPE,...", help="mha, gqa, mqa (default: gqa)"
    )
    heads.add_argument("--model", metavar="MODEL", help="take head counts from this model (see hf-cp plan)")
    parser.add_argument("--num-heads", type=_tokens, default=8, help="query heads for --attention (default: 8)")
    parser.add_argument("--head-dim", type=_tokens, default=64, help="for --attention (default: 64)")
    parser.add_argument("--dtypes", type=_choices(DTYPES), metavar="TYPE,...", help="float32; on CUDA bfloat16")
    parser.add_argument(
        "--checkpointing",
        type=_choices(tuple(CHECKPOINTING)),
        default=("off",),
        metavar="off,on",
        help="on: attention is computed and communicated again in the backward pass (keep_attention=False)",
    )
    words = "one document, or many (default: both)"
    parser.add_argument("--rows", type=_choices(ROWS), default=ROWS, metavar="single,packed", help=words)
    parser.add_argument("--lengths", type=Path, help="document lengths of the packed row: JSON, .npy, or one a line")
    parser.add_argument("--rounds", type=_tokens, help="rounds that count (default: 7)")
    parser.add_argument("--quick", action="store_true", help="short rows, few rounds: shows that everything works")
    parser.add_argument("--json", metavar="PATH", help='write everything as JSON; "-" is standard output')
    parser.add_argument("--output", metavar="FILE", help="the same, for hf-cp plan --measured FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw a heat map of all times (PNG)")
    add_context_parallel_arguments(parser, exclude=(*CASE_FIELDS, *UNUSED_FIELDS))


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status. Every process of a launch must call it."""
    import torch
    from accelerate import PartialState

    from hf_cp.tools.bench.measure import Meshes

    try:
        state = PartialState(cpu=not torch.cuda.is_available())  # joins the launched processes
        atexit.register(state.destroy_process_group)
        meshes = Meshes(state.device.type)
        base = config_from_arguments(args, **{name: _default(name) for name in CASE_FIELDS + UNUSED_FIELDS})
        mesh = meshes.of(base)
        per_node = ranks_per_node(mesh)
        cases = _agreed_cases(args, base, mesh)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        return print_usage_error(error)
    try:
        results = measure_all(cases, meshes, rounds=args.rounds or (2 if args.quick else 7), warm_up=1)
    except ValueError as error:  # on every rank alike, before it sends: the kernel cannot do this
        return print_usage_error(error)
    progress("Links and rates")
    calibration = _calibrate(cases, meshes, base, per_node, args.quick)
    return _finish(args, results, calibration, _world(mesh, per_node, results))


def ranks_per_node(mesh: ContextParallelMesh) -> int:
    """Processes on each node, as the launcher says; all on one where it does not.

    Raises:
        ValueError: on every rank, if nodes differ or the number does not divide the processes.
    """
    from hf_cp.tools.bench.measure import by_rank

    found = sorted({int(n) for n in by_rank(int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)), mesh)})
    if len(found) > 1 or mesh.world_size % found[0]:
        raise ValueError(
            f"LOCAL_WORLD_SIZE is {' and '.join(map(str, found))} for {mesh.world_size} processes.\n"
            "  Start equally many processes on every node."
        )
    return found[0]


def make_cases(args: argparse.Namespace, base: ContextParallelConfig, mesh: ContextParallelMesh) -> list[Case]:
    """The matrix that the options ask for; asks no other process.

    Raises:
        ValueError, OSError: options do not fit each other or the processes, or a file cannot be read.
    """
    from hf_cp.tools.bench import cases as bench_cases

    _check_files(args)
    configs = list(bench_cases.methods(base, _all_degrees(args, mesh.world_size), args.engines, args.layouts))
    cases, skipped = bench_cases.make_cases(_settings(args, mesh.device_type), configs)
    for reason in skipped:
        progress(f"Left out: {reason}")
    return cases


def measure_all(cases: Sequence[Case], meshes: Meshes, *, rounds: int, warm_up: int) -> list[Result]:
    """Setting by setting; all ranks must call it."""
    from hf_cp.tools.bench.measure import measure

    results = []
    for setting, group in _by_setting(cases, lambda case: case.setting):
        progress(f"{setting}: {len(group)} methods")
        results += measure(group, meshes, rounds=rounds, warm_up=warm_up)
    return results


def tables(results: Sequence[Result], calibration: Calibration) -> list[Table]:
    """One per setting, and one of links and rates."""
    groups = _by_setting(results, lambda result: result.case.setting)
    return [*(_setting_table(setting, group) for setting, group in groups), _calibration_table(calibration)]


def judge(results: Sequence[Result], calibration: Calibration) -> Verdict:
    """Wrong values are a failure; noise is said."""
    wrong = [result for result in results if not result.is_exact]
    if wrong:
        worst = max(wrong, key=lambda result: result.error)
        return Verdict(
            PROBLEM,
            f"{len(wrong)} of {len(results)} cases are not exact; {worst.case.method} for {worst.case.setting} is "
            f"{worst.error:.1e} away from fp64. Run hf-cp verify, and hf-cp doctor for the network.",
        )
    noisy = [f"{sum(result.is_noisy for result in results)} of them"] * any(result.is_noisy for result in results)
    noisy += ["links or rates"] * calibration.is_noisy
    advice = f"; noisy: {' and '.join(noisy)}, repeat on a quiet machine or with more --rounds" if noisy else ""
    return Verdict(OK, f"{len(results)} cases measured, all exact{advice}.")


def _agreed_cases(args: argparse.Namespace, base: ContextParallelConfig, mesh: ContextParallelMesh) -> list[Case]:
    """The cases, the same on all ranks; a rank that cannot make them ends all."""
    from hashlib import sha256

    from hf_cp.distributed.host import agree

    cases, error = [], None
    try:
        cases = make_cases(args, base, mesh)
    except (ValueError, OSError, ImportError) as found:
        error = found
    digest = int(sha256(repr(cases).encode()).hexdigest()[:15], 16)
    agree("list of cases", comm=Communicator(mesh), error=error, digest=digest, scope="world")
    return cases


def _check_files(args: argparse.Namespace) -> None:
    """What would fail after everything has been measured fails now."""
    if args.plot:
        import matplotlib  # noqa: F401 (extra `plot`)
    for path in (args.output, args.plot, args.json if args.json != "-" else None):
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{path} cannot be written: its folder does not exist. Make it first.")


def _all_degrees(args: argparse.Namespace, world_size: int) -> list[tuple[int, int]]:
    if args.degrees is None:
        return [(world_size // u, u) for u in range(1, world_size + 1) if world_size % u == 0]
    for ring, ulysses in args.degrees:
        if world_size % (ring * ulysses):
            raise ValueError(
                f"--degrees {ring}x{ulysses} needs a multiple of {ring * ulysses} processes, not {world_size}.\n"
                "  Choose degrees whose product divides the processes, or start others."
            )
    return args.degrees


def _settings(args: argparse.Namespace, device_type: str) -> list[Setting]:
    from hf_cp.data.files import read_lengths
    from hf_cp.planning.model_names import load_config
    from hf_cp.tools.bench.cases import Setting, heads_of, heads_of_model, packed_row

    if args.model:
        heads = [heads_of_model(load_config(args.model))]
    else:
        heads = heads_of(args.attention or ("gqa",), num_heads=args.num_heads, head_dim=args.head_dim)
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    tokens = args.seq_lens or (QUICK_TOKENS if args.quick else DEFAULT_TOKENS[device_type])
    dtypes = args.dtypes or (("bfloat16",) if device_type == "cuda" else ("float32",))
    axes = itertools.product(heads, dtypes, args.checkpointing, tokens, args.rows)
    return [
        Setting(row, (n,) if row == "single" else packed_row(n, lengths), head, dtype, CHECKPOINTING[checkpointing])
        for head, dtype, checkpointing, n, row in axes
    ]


def _calibrate(
    cases: Sequence[Case], meshes: Meshes, base: ContextParallelConfig, per_node: int, quick: bool
) -> Calibration:
    """On one document as long as the longest row, with the first heads and type."""
    from dataclasses import replace

    from hf_cp.tools.bench.calibration import calibrate

    longest = max(case.setting.num_tokens for case in cases)
    setting = replace(cases[0].setting, row="single", doc_lengths=(longest,), recompute=False)
    return calibrate(setting, meshes, base, per_node=per_node, quick=quick)


def _world(mesh: ContextParallelMesh, per_node: int, results: Sequence[Result]) -> dict[str, Any]:
    """Where the numbers come from."""
    import torch

    return {
        "processes": mesh.world_size,
        "processes_per_node": per_node,
        "device_type": mesh.device_type,
        "threads_per_process": torch.get_num_threads(),
        "torch": torch.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _finish(
    args: argparse.Namespace, results: Sequence[Result], calibration: Calibration, world: dict[str, Any]
) -> int:
    verdict = judge(results, calibration)
    content = {
        "command": "bench",
        "verdict": str(verdict),
        "world": world,
        "device": calibration.device,
        "calibration": {name: value for name, value in vars(calibration).items() if name != "device"},
        "cases": [result.as_json() for result in results],
    }
    for path in (args.json, args.output):
        if path:
            print_json(content, path)
    if args.plot and is_main_process():
        from hf_cp.tools.bench.plot import plot_results

        plot_results(args.plot, results)
    if args.json != "-":
        for table in tables(results, calibration):
            table.print()
            if is_main_process():
                print()
        verdict.print()
    return verdict.status


def _setting_table(setting: Setting, results: Sequence[Result]) -> Table:
    columns = ("method", "ms (p10-p90)", "wire ms", "exposed ms", "hidden", "slowest rank", "GB/s", "peak MiB")
    fastest = min(result.seconds.median for result in results)
    rows = [_cells(result, fastest) for result in results]
    return Table(f"{setting}; forward + backward", (*columns, "error", "tokens/s", "vs best", "note"), rows)


def _cells(result: Result, fastest: float) -> tuple[str, ...]:
    seconds, is_split = result.seconds, result.sent_bytes > 0
    notes = ["noisy"] * result.is_noisy + ["NOT EXACT"] * (not result.is_exact)
    return (
        result.case.method,
        f"{seconds.median * 1e3:.2f} ({seconds.p10 * 1e3:.2f}-{seconds.p90 * 1e3:.2f})",
        f"{result.communication.median * 1e3:.2f}" if is_split else "-",
        f"{result.exposed.median * 1e3:.2f}" if is_split else "-",
        f"{result.overlap:.0%}" if is_split else "-",
        f"{result.slowest_rank} ({result.imbalance:.2f}x)",
        f"{result.gigabytes_per_second:.2f}" if is_split else "-",
        f"{result.peak_bytes / MIB:.1f}",
        f"{result.error:.0e}",
        f"{result.tokens_per_second:,.0f}",
        f"{seconds.median / fastest:.2f}x",
        ", ".join(notes),
    )


def _calibration_table(calibration: Calibration) -> Table:
    rows = [
        (
            f"{link.kind} over {link.ranks} ranks, {'inside a node' if link.in_node else 'between nodes'}",
            f"{link.bytes_per_second / 1e9:.2f} GB/s",
            f"{link.latency * 1e6:.1f} us",
            "-" if link.overlap is None else f"{link.overlap:.0%}",
            *_variation(link.residual),
        )
        for link in calibration.links
    ]
    for name, tflops, spread in (
        ("attention kernel, long document", calibration.attention_tflops, calibration.attention),
        ("matrix product", calibration.matmul_tflops, calibration.matmul),
    ):
        rows.append((name, f"{tflops:.3f} TFLOP/s", "-", "-", *_variation(spread.width)))
    return Table("Links and rates", ("", "rate", "latency", "hidden", "fit error or spread", "note"), rows)


def _variation(value: float) -> tuple[str, str]:
    from hf_cp.tools.bench.measure import NOISE

    return f"{value:.0%}", "noisy" if value > NOISE else ""


def _by_setting(items: Sequence[Any], setting_of: Callable[[Any], Setting]) -> list[tuple[Setting, list[Any]]]:
    return [(setting, list(group)) for setting, group in itertools.groupby(items, setting_of)]


def _default(name: str) -> Any:
    return ContextParallelConfig.__dataclass_fields__[name].default


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))

    return parse


def _choices(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def choose(word: str) -> str:
        if word not in choices:
            raise argparse.ArgumentTypeError(f"{word!r} does not exist, choose from {', '.join(choices)}")
        return word

    return _list_of(choose)


def _degrees(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not ring x ulysses, as in 2x4")
    return int(found[1]), int(found[2])


def _tokens(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([kKmM]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number, as in 4096 or 128k")
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]
