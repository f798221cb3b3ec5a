"""The command line `hf-cp`, also `python -m hf_cp`: one module of this folder per command.

A command module has `add_arguments(parser)` and `run(args) -> exit status`; its docstring's first line is its help.
Only the module of the command that runs is imported: some of them take seconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import hf_cp

COMMANDS = {
    "bench": "bench.command",
    "doctor": "doctor.command",
    "env": "env",
    "pack": "pack",
    "plan": "plan",
    "recipes": "recipes",
    "report": "report",
    "train": "train",
    "universal": "universal",
    "verify": "verify",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` defaults to the arguments of the process; the result is its exit status."""
    parser = argparse.ArgumentParser(prog="hf-cp", description=(hf_cp.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--version", action="version", version=f"hf-cp {hf_cp.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name in COMMANDS:
        commands.add_parser(name, help=_summary(name), add_help=False)
    args, options = parser.parse_known_args(argv)
    chosen = command_parser(args.command).parse_args(options)
    try:
        status = _module(args.command).run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 1
    return status


def command_parser(name: str) -> argparse.ArgumentParser:
    """What one command takes."""
    parser = argparse.ArgumentParser(prog=f"hf-cp {name}", description=_summary(name))
    _module(name).add_arguments(parser)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"hf_cp.tools.{COMMANDS[name]}")


def _summary(name: str) -> str:
    """What the first line of the module says, read without importing it."""
    source = (Path(__file__).parent / f"{COMMANDS[name].replace('.', '/')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0].partition(": ")[2]
