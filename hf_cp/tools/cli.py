"""The command line `hf-cp`, also `python -m hf_cp`: one module of this folder per command.

A command module has `add_arguments(parser)` and `run(args) -> exit status`; its docstring's first line is its help.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

import hf_cp
from hf_cp.tools import bench, doctor, env, pack, plan, recipes, run_report, universal, verify_command

COMMANDS: dict[str, ModuleType] = {
    "bench": bench,
    "doctor": doctor,
    "env": env,
    "pack": pack,
    "plan": plan,
    "recipes": recipes,
    "report": run_report,
    "universal": universal,
    "verify": verify_command,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` defaults to the arguments of the process; the result is its exit status."""
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-cp", description=(hf_cp.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--version", action="version", version=f"hf-cp {hf_cp.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0].partition(": ")[2]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
