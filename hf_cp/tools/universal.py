"""`hf-cp universal`: lets a ZeRO checkpoint go on with another number of processes.

Converts it to DeepSpeed's universal format, beside its own files; resuming then works as always, with any number of
processes whose step has as many rows. Run it once, in one process, when no training uses the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from hf_cp.output import OK, Table, Verdict, print_json, print_usage_error
from hf_cp.training.deepspeed import make_universal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, and how many processes work on it."""
    parser.add_argument("checkpoint", help="a folder checkpoint-<step> of a Trainer with ZeRO stage 1, 2 or 3")
    parser.add_argument(
        "--num-workers", type=int, default=1, help="processes that read and write; each holds one part in memory"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    """Converts; 0 if it worked, 2 if there is no ZeRO checkpoint. What DeepSpeed prints goes to standard error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            folder = make_universal(args.checkpoint, num_workers=args.num_workers)
    except ValueError as error:
        return print_usage_error(error)
    verdict = Verdict(OK, f"ready for any number of processes. Resume from {args.checkpoint}.")
    if args.json:
        content = {"command": "universal", "checkpoint": args.checkpoint, "folder": folder, "verdict": str(verdict)}
        print_json(content, args.json)
    if args.json != "-":
        Table("", ("", ""), (("checkpoint", args.checkpoint), ("universal", str(folder)))).print()
        verdict.print()
    return OK
