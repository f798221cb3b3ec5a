"""`hf-cp bench`: how fast is attention here, split in every way, and what can the links and the kernel do?

    torchrun --nproc_per_node 4 -m hf_cp bench --seq-lens 8k,32k --attention gqa,mqa --output bench.json

On CPU too, and with one process. For every packed sample all methods (degrees, engine, layout) take turns: time of
forward and backward pass, the communication alone, what of it nothing hides, peak memory, the error against fp64 in
one process. `--output` keeps everything; `hf-cp plan --measured bench.json` takes links and rates from there. Exit
status: 0, or 1 if a method's error is above its limit, or 2 if the options do not fit. Noisy times are marked, not
left out.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hf_cp.config import LAYOUTS, RING_COMMS, ContextParallelConfig
from hf_cp.data.files import read_lengths
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree, gather_objects
from hf_cp.output import OK, PROBLEM, Verdict, is_main_process, print_json, print_usage_error, progress
from hf_cp.planning.model_names import load_config
from hf_cp.tools.bench.calibration import Calibration, calibrate, calibration_table
from hf_cp.tools.bench.cases import (
    DOCUMENTS,
    HEADS,
    Case,
    Setting,
    heads_of,
    heads_of_model,
    make_cases,
    methods,
    packed_sample,
)
from hf_cp.tools.bench.measure import Communicators, measure
from hf_cp.tools.bench.plot import plot_results
from hf_cp.tools.bench.results import Result, setting_table
from hf_cp.tools.options import add_context_parallel_arguments, config_from_arguments

DTYPES = ("float32", "float64", "bfloat16", "float16")
DEFAULT_TOKENS = {"cpu": (1024, 2048), "cuda": (8192, 32768)}
QUICK_TOKENS = (256,)
CASE_FIELDS = ("ring_degree", "ulysses_degree", "ring_comm", "layout")  # set by the matrix
UNUSED_FIELDS = ("keep_attention", "loss_chunk_tokens", "mlp_chunk_tokens", "force")  # no part of one attention call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp bench`; lists are separated by commas."""
    parser.add_argument("--degrees", type=_list_of(_degrees), metavar="RxU,...", help="ring x ulysses (default: all)")
    engines, layouts = RING_COMMS[1:], LAYOUTS[1:]
    words = f"of a ring: {', '.join(engines)} (default: all)"
    parser.add_argument("--engines", type=_choices(engines), default=engines, metavar="ENGINE,...", help=words)
    words = f"of a ring: {', '.join(layouts)} (default: document)"
    parser.add_argument("--layouts", type=_choices(layouts), default=("document",), metavar="LAYOUT,...", help=words)
    parser.add_argument(
        "--seq-lens", type=_list_of(_tokens), metavar="N,...", help="tokens of a packed sample, as 2048 or 32k"
    )
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--attention", type=_choices(HEADS), metavar="TYPE,...", help="mha, gqa, mqa (default: gqa)")
    heads.add_argument("--model", metavar="MODEL", help="take head counts from this model (see hf-cp plan)")
    parser.add_argument("--num-heads", type=_tokens, default=8, help="query heads for --attention (default: 8)")
    parser.add_argument("--head-dim", type=_tokens, default=64, help="for --attention (default: 64)")
    parser.add_argument("--dtypes", type=_choices(DTYPES), metavar="TYPE,...", help="float32; on CUDA bfloat16")
    parser.add_argument(
        "--checkpointing",
        type=_choices(("off", "on")),
        default=("off",),
        metavar="off,on",
        help="on: attention is computed and communicated again in the backward pass (keep_attention=False)",
    )
    words = "one document, or many (default: both)"
    parser.add_argument("--rows", type=_choices(DOCUMENTS), default=DOCUMENTS, metavar="single,packed", help=words)
    parser.add_argument(
        "--lengths", type=Path, help="document lengths of the packed sample: JSON, .npy, or one a line"
    )
    parser.add_argument("--rounds", type=_tokens, help="rounds that count (default: 7)")
    parser.add_argument("--quick", action="store_true", help="short samples, few rounds: shows that everything works")
    parser.add_argument("--json", metavar="PATH", help='write everything as JSON; "-" is standard output')
    parser.add_argument("--output", metavar="FILE", help="the same, for hf-cp plan --measured FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw a heat map of all times (PNG)")
    add_context_parallel_arguments(parser, exclude=(*CASE_FIELDS, *UNUSED_FIELDS))


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status. Every process of a launch must call it."""
    from accelerate import PartialState

    try:
        state = PartialState(cpu=not torch.cuda.is_available())  # joins the launched processes
        atexit.register(state.destroy_process_group)
        comms = Communicators(state.device.type)
        defaults = {f.name: f.default for f in fields(ContextParallelConfig) if f.name in CASE_FIELDS + UNUSED_FIELDS}
        base = config_from_arguments(args, **defaults)
        comm = comms.of(base)
        per_node = ranks_per_node(comm)
        cases = _agreed_cases(args, base, comm)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        return print_usage_error(error)
    try:
        results = _measure_all(cases, comms, rounds=args.rounds or (2 if args.quick else 7))
    except ValueError as error:  # on every rank alike, before it sends: the kernel cannot do this
        return print_usage_error(error)
    progress("Links and rates")
    # on one document as long as the longest sample, with the first heads and type
    longest = max(case.setting.num_tokens for case in cases)
    setting = replace(cases[0].setting, documents="single", doc_lengths=(longest,), recompute=False)
    calibration = calibrate(setting, comms, base, per_node=per_node, quick=args.quick)
    world = {
        "processes": comm.mesh.world_size,
        "processes_per_node": per_node,
        "device_type": comms.device_type,
        "threads_per_process": torch.get_num_threads(),
        "torch": torch.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return _finish(args, results, calibration, world)


def ranks_per_node(comm: Communicator) -> int:
    """Processes on each node, as the launcher says; all on one where it does not.

    Raises:
        ValueError: on every rank, if nodes differ or the number does not divide the processes.
    """
    world_size = comm.mesh.world_size
    found = sorted(set(gather_objects(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), comm=comm)))
    if len(found) > 1 or world_size % found[0]:
        raise ValueError(
            f"LOCAL_WORLD_SIZE is {' and '.join(map(str, found))} for {world_size} processes.\n"
            "  Start equally many processes on every node."
        )
    return found[0]


def _measure_all(cases: Sequence[Case], comms: Communicators, *, rounds: int) -> list[Result]:
    """Setting by setting; all ranks must call it."""
    results = []
    for setting, group in itertools.groupby(cases, lambda case: case.setting):
        some = list(group)
        progress(f"{setting}: {len(some)} methods")
        results += measure(some, comms, rounds=rounds, warm_up=1)
    return results


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


def _agreed_cases(args: argparse.Namespace, base: ContextParallelConfig, comm: Communicator) -> list[Case]:
    """The cases, the same on all ranks; a rank that cannot make them ends all."""
    cases, error = [], None
    try:
        cases = _cases(args, base, comm)
    except (ValueError, OSError, ImportError) as found:
        error = found
    digest = int(sha256(repr(cases).encode()).hexdigest()[:15], 16)
    agree("list of cases", comm=comm, error=error, digest=digest, scope="world")
    return cases


def _cases(args: argparse.Namespace, base: ContextParallelConfig, comm: Communicator) -> list[Case]:
    """The matrix that the options ask for; asks no other process.

    Raises:
        ValueError, OSError: options do not fit each other or the processes, or a file cannot be read.
    """
    _check_files(args)
    configs = list(methods(base, _all_degrees(args, comm.mesh.world_size), args.engines, args.layouts))
    cases, skipped = make_cases(_settings(args, comm.mesh.device_type), configs)
    for reason in skipped:
        progress(f"Left out: {reason}")
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
    if args.model:
        heads = [heads_of_model(load_config(args.model))]
    else:
        heads = heads_of(args.attention or ("gqa",), num_heads=args.num_heads, head_dim=args.head_dim)
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    tokens = args.seq_lens or (QUICK_TOKENS if args.quick else DEFAULT_TOKENS[device_type])
    dtypes = args.dtypes or (("bfloat16",) if device_type == "cuda" else ("float32",))
    return [
        Setting(kind, (n,) if kind == "single" else packed_sample(n, lengths), head, dtype, checkpointing == "on")
        for head, dtype, checkpointing, n, kind in itertools.product(
            heads, dtypes, args.checkpointing, tokens, args.rows
        )
    ]


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
        plot_results(args.plot, results)
    if args.json != "-":
        settings = itertools.groupby(results, lambda result: result.case.setting)
        for table in (*(setting_table(list(group)) for _, group in settings), calibration_table(calibration)):
            table.print()
            if is_main_process():
                print()
        verdict.print()
    return verdict.status


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
