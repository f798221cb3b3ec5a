"""`hf-cp verify`: does the split run compute what one process computes, on your model and data?

    torchrun --nproc_per_node 4 -m hf_cp verify --model DIR --data FILE.jsonl --ring-degree 2 --ulysses-degree 2

`accelerate launch` with a recipe's accelerate.yaml does as well; on CPU too, if that is a DeepSpeed one. Exit status
of every process: 0 if all comparisons pass, 1 if one fails, 2 if the settings do not fit (a launcher turns both into
its own). Invariant: rank 0 alone prints, and an error of one process ends all of them.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import torch
from accelerate import PartialState
from transformers.utils import logging

from hf_cp.config import ContextParallelConfig
from hf_cp.data.files import load_features
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.host import agree
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.environment import collect_environment
from hf_cp.models.patch import apply_context_parallel, base_causal_lm
from hf_cp.output import PROBLEM, Verdict, is_main_process, print_json, print_usage_error, progress
from hf_cp.tools.options import add_context_parallel_arguments, config_from_arguments
from hf_cp.verify import VerifyReport, inputs, verify_context_parallel

DTYPES = ("float32", "float64", "bfloat16", "float16")
RECORDED = ("dtype", "layers", "lora", "seed", "steps")  # options that go into the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp verify`."""
    parser.add_argument("--model", required=True, help="model folder, or a config.json for random weights")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="FILE", help="JSONL with input_ids, text, prompt/completion or messages")
    source.add_argument("--random-lengths", metavar="N,N,...", type=_lengths, help="random documents instead")
    parser.add_argument("--max-tokens", type=_positive, default=4096, help="tokens taken from --data (default: 4096)")
    parser.add_argument("--layers", type=_positive, help="keep only the first layers of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    parser.add_argument("--lora", type=_positive, metavar="R", help="train adapters of this rank on all linear layers")
    parser.add_argument("--steps", type=_positive, default=3, help="optimizer steps to compare (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, documents and adapters (default: 0)")
    parser.add_argument("--json", metavar="PATH", help='write the report as JSON; "-" is standard output')
    parser.add_argument("--output", metavar="FILE", help="write the report with a time stamp, for hf-cp doctor")
    add_context_parallel_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compares and prints; returns the exit status. Every process of a launch must call it."""
    try:
        state = PartialState(cpu=not torch.cuda.is_available())  # joins the launched processes
        atexit.register(state.destroy_process_group)
        config = config_from_arguments(args)
        mesh = ContextParallelMesh(config)
        _check(args, config, mesh)
        model, documents = _load_everywhere(args, config, mesh)
    except (ValueError, OSError, ImportError, _Refused) as error:
        return print_usage_error(error)
    try:
        report = verify_context_parallel(model, documents, steps=args.steps, seed=args.seed, progress=progress)
    except ValueError as error:
        return print_usage_error(error)
    except RuntimeError as error:  # on every process alike: they do not hold the same model
        Verdict(PROBLEM, str(error)).print()
        return PROBLEM
    return _finish(args, report)


class _Refused(RuntimeError):
    """Some process could not make its model or its documents."""


def _check(args: argparse.Namespace, config: ContextParallelConfig, mesh: ContextParallelMesh) -> None:
    """Raises ValueError where options do not fit each other; asks no other process."""
    if not (args.data or args.random_lengths):
        raise ValueError("there are no documents. Give --data FILE.jsonl or --random-lengths 300,200,77.")
    if not config.enabled:
        raise ValueError(
            f"nothing is split: cp_size is 1 ({mesh.world_size} processes).\n"
            "  Set --ring-degree or --ulysses-degree, or --force to compare our kernels in one process."
        )


def _load_everywhere(
    args: argparse.Namespace, config: ContextParallelConfig, mesh: ContextParallelMesh
) -> tuple[torch.nn.Module, list[dict]]:
    """The patched model and the documents, once all processes have the same."""
    model, documents, error = None, [], None
    try:
        model, documents = _load(args)
        apply_context_parallel(model, config, mesh=mesh)
    except (ValueError, OSError, ImportError, RuntimeError) as found:
        error = found
    # 7 bytes fit into a signed integer
    digest = int.from_bytes(hashlib.blake2b(json.dumps(documents).encode(), digest_size=7).digest())
    try:
        agree("model and documents", comm=Communicator(mesh), error=error, digest=digest, scope="world")
    except RuntimeError as found:
        raise _Refused(str(found)) from found
    return model, documents


def _load(args: argparse.Namespace) -> tuple[torch.nn.Module, list[dict[str, list[int]]]]:
    progress(f"Loading {args.model} in {args.dtype}")
    logging.disable_progress_bar()
    if not is_main_process():  # what transformers has to warn of comes from rank 0 only
        logging.set_verbosity_error()
    model = inputs.make_model(args.model, dtype=args.dtype, layers=args.layers, lora=args.lora, seed=args.seed)
    model = model.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
    if args.random_lengths:
        vocab_size = base_causal_lm(model).config.vocab_size
        return model, inputs.random_documents(args.random_lengths, vocab_size=vocab_size, seed=args.seed)
    tokenizer = inputs.load_tokenizer(args.model)
    documents, what = inputs.first_documents(load_features(args.data), tokenizer=tokenizer, max_tokens=args.max_tokens)
    progress(f"{args.data}: {what}")
    return model, documents


def _finish(args: argparse.Namespace, report: VerifyReport) -> int:
    """Prints and writes; with `--json -` standard output is JSON alone."""
    content: dict[str, Any] = {
        "command": "verify",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": args.model,
        "verdict": str(report.verdict),
        "report": report,
        "passed": report.passed,
        "options": {name: getattr(args, name) for name in RECORDED},
        "versions": collect_environment({}).packages,
    }
    if args.json != "-":
        report.comparison().print()
        report.verdict.print()
    for path in (args.json, args.output):
        if path:
            print_json(content, path)
    return report.verdict.status


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]
