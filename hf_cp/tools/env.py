"""`hf-cp env`: what is installed and set here, as a block to paste into a bug report."""

from __future__ import annotations

import argparse
import sys

from hf_cp.environment import collect_environment
from hf_cp.output import OK, Verdict, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-cp env`."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it as JSON; - or nothing for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit status. Only the block goes to standard output, so that it can be piped."""
    report = collect_environment()
    if args.json:
        print_json(report, args.json)
    if args.json != "-":
        print(report.to_text(), flush=True)
        Verdict(OK, "paste this block into the report.").print(sys.stderr)
    return OK
