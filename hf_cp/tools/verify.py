"""`hf-cp verify`: does the split run compute what one process computes, on your model and data?

    torchrun --nproc_per_node 4 -m hf_cp verify --model DIR --data FILE.jsonl --ring-degree 2 --ulysses-degree 2

`accelerate launch` with a recipe's accelerate.yaml does as well; on CPU too, if that is a DeepSpeed one. Exit status
of every process: 0 if all comparisons pass, 1 if one fails, 2 if the settings do not fit (a launcher turns both into
its own). Invariant: rank 0 alone prints, and an error of one process ends all of them.
"""

from __future__ import annotations

import argparse
import atexit
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

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
    from hf_cp.distributed.mesh import ContextParallelMesh
    from hf_cp.verify.baseline import Baseline, Recipe

DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp verify`."""
    parser.add_argument("--model", required=True, help="model folder, or a config.json for random weights")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="FILE", help="JSONL with input_ids, text, prompt/completion or messages")
    source.add_argument("--random-lengths", metavar="N,N,...", type=_lengths, help="random documents instead")
    source.add_argument("--baseline", metavar="FILE", help="replay a baseline: its documents, type, layers and seed")
    parser.add_argument("--max-tokens", type=_positive, default=4096, help="tokens taken from --data (default: 4096)")
    parser.add_argument("--layers", type=_positive, help="keep only the first layers of the model")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: float32)")
    parser.add_argument("--lora", type=_positive, metavar="R", help="train adapters of this rank on all linear layers")
    parser.add_argument("--steps", type=_positive, help="optimizer steps to compare (default: 3)")
    parser.add_argument("--seed", type=int, help="of random weights, documents and adapters (default: 0)")
    parser.add_argument("--save-baseline", metavar="FILE", help="keep the numbers of one process (start only one)")
    parser.add_argument("--json", metavar="PATH", help='write the report as JSON; "-" is standard output')
    parser.add_argument("--output", metavar="FILE", help="write the report with a time stamp, for hf-cp doctor")
    add_context_parallel_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compares and prints; returns the exit status. Every process of a launch must call it."""
    import torch
    from accelerate import PartialState

    from hf_cp.distributed.mesh import ContextParallelMesh

    try:
        state = PartialState(cpu=not torch.cuda.is_available())  # joins the launched processes
        atexit.register(state.destroy_process_group)
        mesh = ContextParallelMesh(config_from_arguments(args))
        return _run(args, mesh)
    except _Refused as error:
        return print_usage_error(error)
    except (ValueError, OSError, ImportError) as error:
        return print_usage_error(error)


class _Refused(RuntimeError):
    """Some process could not make its model or its documents."""


def _run(args: argparse.Namespace, mesh: ContextParallelMesh) -> int:
    _check(args, mesh)
    from hf_cp.distributed.status import exchange_status
    from hf_cp.verify.fingerprint import documents_digest

    subject, error = None, None
    try:
        subject = _Subject(args, mesh)
    except (ValueError, OSError, ImportError, RuntimeError) as found:
        error = found
    digest = 0 if subject is None else int(documents_digest(subject.documents)[:15], 16)
    try:
        exchange_status("model and documents", mesh=mesh, error=error, digest=digest, scope="world")
    except RuntimeError as found:
        raise _Refused(str(found)) from found
    if args.save_baseline:
        return _save(args, subject)
    return _replay(args, subject, mesh) if args.baseline else _verify(args, subject, mesh)


class _Subject:
    """Model, tokenizer and documents, as the options or the baseline say."""

    def __init__(self, args: argparse.Namespace, mesh: ContextParallelMesh):
        from hf_cp.models.patch import base_causal_lm
        from hf_cp.verify.baseline import Baseline
        from hf_cp.verify.inputs import load_tokenizer, make_model, random_documents, read_documents

        self.baseline: Baseline | None = Baseline.load(args.baseline) if args.baseline else None
        self.recipe: Recipe = _recipe(args, self.baseline)
        progress(f"Loading {args.model} in {self.recipe.dtype}")
        _quiet()
        self.tokenizer = load_tokenizer(args.model)
        self.model = make_model(args.model, self.recipe, _device(mesh))
        if self.baseline is not None:
            self.documents = self.baseline.documents
        elif args.data:
            self.documents, what = read_documents(args.data, tokenizer=self.tokenizer, max_tokens=args.max_tokens)
            progress(what)
        else:
            vocab_size = base_causal_lm(self.model).config.vocab_size
            self.documents = random_documents(args.random_lengths, vocab_size=vocab_size, seed=self.recipe.seed)


def _verify(args: argparse.Namespace, subject: _Subject, mesh: ContextParallelMesh) -> int:
    from hf_cp.models.patch import apply_context_parallel
    from hf_cp.verify import verify_context_parallel
    from hf_cp.verify.fingerprint import Fingerprint

    model, recipe = apply_context_parallel(subject.model, mesh), subject.recipe
    try:
        report = verify_context_parallel(
            model, subject.documents, steps=recipe.steps, seed=recipe.seed, progress=progress
        )
    except RuntimeError as error:  # on every process alike: they do not hold the same model
        Verdict(PROBLEM, str(error)).print()
        return PROBLEM
    content = {"report": report, "passed": report.passed, "recipe": recipe}
    if args.json or args.output:
        content["fingerprint"] = Fingerprint.of(model, subject.documents, tokenizer=subject.tokenizer)
    return _finish(args, [report.comparison()], report.verdict, content)


def _save(args: argparse.Namespace, subject: _Subject) -> int:
    from hf_cp.verify.baseline import make_baseline

    baseline = make_baseline(
        subject.model, subject.documents, subject.recipe, created=_now(), tokenizer=subject.tokenizer
    )
    baseline.save(args.save_baseline)
    rows = [(f"loss, step {number}", f"{loss:.7f}") for number, loss in enumerate(baseline.numbers.losses, 1)]
    rows += [("gradient norm", f"{baseline.numbers.grad_norm:.7f}"), ("targets", f"{baseline.numbers.num_targets:,}")]
    table = Table("The untouched model in 1 process", ("", "value"), rows)
    verdict = Verdict(OK, f"baseline of {len(baseline.numbers.gradients)} gradients saved in {args.save_baseline}.")
    return _finish(args, [table], verdict, {"baseline": args.save_baseline, "numbers": dict(rows), "passed": True})


def _replay(args: argparse.Namespace, subject: _Subject, mesh: ContextParallelMesh) -> int:
    from hf_cp.models.patch import apply_context_parallel
    from hf_cp.verify.baseline import replay_baseline

    model = apply_context_parallel(subject.model, mesh)
    report = replay_baseline(model, subject.baseline, tokenizer=subject.tokenizer)
    return _finish(args, report.tables(), report.verdict, {"report": report, "passed": report.passed})


def _finish(args: argparse.Namespace, tables: list[Table], verdict: Verdict, content: dict[str, Any]) -> int:
    """Prints and writes; with `--json -` standard output is JSON alone."""
    content = {"command": "verify", "created": _now(), "model": args.model, "verdict": str(verdict)} | content
    if args.json != "-":
        for table in tables:
            table.print()
        verdict.print()
    for path in (args.json, args.output):
        if path:
            print_json(content, path)
    return verdict.status


def _check(args: argparse.Namespace, mesh: ContextParallelMesh) -> None:
    """Raises ValueError where options do not fit each other; asks no other process."""
    if not (args.data or args.random_lengths or args.baseline):
        raise ValueError("there are no documents. Give --data FILE.jsonl, --random-lengths 300,200,77 or --baseline.")
    if args.save_baseline:
        if mesh.world_size > 1 or mesh.config.enabled:
            raise ValueError(
                f"a baseline is what one process computes with the untouched model, but {mesh.world_size} processes "
                f"run with {mesh.config}.\n  Start one process, without degrees and without --force."
            )
        if args.baseline:
            raise ValueError("--save-baseline and --baseline exclude each other. Save first, replay later.")
    elif not args.baseline and not mesh.config.enabled:
        raise ValueError(
            f"nothing is split: cp_size is 1 ({mesh.world_size} processes).\n"
            "  Set --ring-degree or --ulysses-degree, or --force to compare our kernels in one process."
        )


def _recipe(args: argparse.Namespace, baseline: Baseline | None) -> Recipe:
    """The options; with a baseline its own, which options may repeat but not contradict."""
    from hf_cp.verify.baseline import Recipe

    names = ("dtype", "layers", "lora", "seed", "steps")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if baseline is None:
        return Recipe(**{"dtype": "float32"} | given)
    wrong = [f"--{name} {value}" for name, value in given.items() if value != getattr(baseline.recipe, name)]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} contradicts the baseline, which was made with {baseline.recipe}.\n"
            "  Leave these options out, or save another baseline with them."
        )
    return baseline.recipe


def _quiet() -> None:
    """No progress bars of loading; what it has to warn of comes from rank 0 only."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not is_main_process():
        logging.set_verbosity_error()


def _device(mesh: ContextParallelMesh) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]
