"""`hf-cp doctor`: is everything in place for a run? Software, model, recipe, data, checkpoint, launched processes.

    hf-cp doctor --recipe recipes/quickstart-cpu
    accelerate launch --config_file recipes/quickstart-cpu/accelerate.yaml -m hf_cp doctor --recipe ... --launch

Nothing is trained and nothing is written (but `--json FILE`). Without `--launch` one process without a GPU does it,
and whatever launched it is ignored. Exit status: 0 if no check fails (warnings do not count), 1 if one does, 2 if the
options do not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from hf_cp.output import print_json, print_usage_error
from hf_cp.tools.options import add_context_parallel_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp doctor`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recipe", type=Path, metavar="FOLDER", help="with accelerate.yaml and train.yaml")
    source.add_argument("--config", type=Path, metavar="FILE", help="a train.yaml alone")
    parser.add_argument("--model", metavar="MODEL", help="folder, config.json or known name (default: the recipe's)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="documents (default: the recipe's)")
    parser.add_argument("--tokenizer", metavar="DIR", help="for documents of text (default: the model's)")
    parser.add_argument("--max-tokens", type=int, help="tokens of a packed sample (default: the recipe's)")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="to go on from (default: in output_dir)")
    parser.add_argument("--verify-report", type=Path, metavar="FILE", help="default: verify.json of the recipe")
    parser.add_argument("--launch", action="store_true", help="also check the processes that were launched with this")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of a collective with --launch (60)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    add_context_parallel_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Makes all checks and prints them; with --launch every process must call it."""
    problem = _wrong_use(args)
    if problem:
        return print_usage_error(problem)
    from hf_cp.tools.doctor import check, data, launched, model, settings  # seconds; not for --help
    from hf_cp.tools.doctor.subject import Subject, as_one_process

    subject = Subject(args)
    with as_one_process():
        results = check.examine((*model.CHECKS, *settings.CHECKS, *data.CHECKS), subject)
    if args.launch:
        results = launched.examine_launched(subject, results, args.time_limit)
    verdict = check.judge(results)
    content = {"command": "doctor", "verdict": str(verdict), "counts": Counter(r.status for r in results)}
    if args.json:
        print_json(content | {"checks": results}, args.json)
    if args.json != "-":
        for table in check.tables(results):
            table.print()
        verdict.print()
    return verdict.status


def _wrong_use(args: argparse.Namespace) -> str:
    """Why the options cannot be followed; empty if they can."""
    for name in ("recipe", "config", "checkpoint", "data", "verify_report"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            option = name.replace("_", "-")
            return f"--{option} {path} does not exist.\n  Give a path as it is seen from {Path.cwd()}."
    if args.recipe is not None and not (args.recipe / "accelerate.yaml").exists():
        names = sorted(path.name for path in args.recipe.iterdir()) if args.recipe.is_dir() else []
        return f"--recipe {args.recipe} has no accelerate.yaml, but {names}.\n  Give the folder of a recipe."
    if args.recipe is None and args.config is None and args.model is None:
        return "there is nothing to look at.\n  Give --recipe FOLDER, --config train.yaml or --model MODEL."
    if args.launch and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return (
            f"--launch needs the processes of a launcher, WORLD_SIZE is {os.environ.get('WORLD_SIZE', 'not set')}.\n"
            f"  accelerate launch --config_file .../accelerate.yaml -m hf_cp {' '.join(sys.argv[1:])}"
        )
    if args.time_limit <= 0:
        return f"--time-limit {args.time_limit} is not a time. Use a positive number of seconds."
    return ""
