"""`hf-cp recipes`: complete runs to start from. List them, read one, copy one.

Invariant: standard output holds a table and its verdict, JSON, or the text of a file and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_cp.output import OK, Table, Verdict, print_json, print_usage_error
from hf_cp.recipes.collection import README, TRAINING, copy_recipe, list_recipes, read_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which recipe."""
    actions = parser.add_subparsers(title="actions", dest="action", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    names = actions.add_parser("list", aliases=["ls"], help="names and what they train", parents=[common])
    names.set_defaults(act=_list)
    show = actions.add_parser("show", help="print a file of a recipe, or how all are launched", parents=[common])
    show.add_argument("name", nargs="?", help=f"as in `hf-cp recipes list`; without it the {README} of all recipes")
    show.add_argument("file", nargs="?", default=TRAINING, help=f"default: {TRAINING}")
    show.set_defaults(act=_show)
    copy = actions.add_parser("copy", aliases=["cp"], help="write a recipe into a new folder", parents=[common])
    copy.add_argument("name", help="as in `hf-cp recipes list`")
    copy.add_argument("folder", type=Path, help="new folder; runs start in the current one")
    copy.set_defaults(act=_copy)


def run(args: argparse.Namespace) -> int:
    """Does it; the status is 2 for a recipe or a file that does not exist, or a folder that is not new."""
    try:
        content, shown, verdict = args.act(args)
    except (ValueError, OSError) as error:
        return print_usage_error(error)
    if args.json:
        print_json({"command": "recipes", "verdict": str(verdict)} | content, args.json)
    if args.json == "-":
        return OK
    if isinstance(shown, Table):
        shown.print()
        verdict.print()
    else:  # standard output is the file
        print(shown, end="", flush=True)
        verdict.print(sys.stderr)
    return OK


def _list(args: argparse.Namespace) -> tuple[dict[str, Any], Table, Verdict]:
    found = list_recipes()
    verdict = Verdict(
        OK, f"{len(found)} recipes; `hf-cp recipes copy NAME DIR` writes one, `show` says how it starts."
    )
    content = {"action": "list", "recipes": [{"name": name, "what": what} for name, what in found.items()]}
    return content, Table("Recipes", ("name", "what"), list(found.items())), verdict


def _show(args: argparse.Namespace) -> tuple[dict[str, Any], str, Verdict]:
    text, file = read_file(args.name, args.file), args.file if args.name else README
    content = {"action": "show", "name": args.name, "file": file, "text": text}
    return content, text, Verdict(OK, f"{file} of {args.name or 'all recipes'}.")


def _copy(args: argparse.Namespace) -> tuple[dict[str, Any], Table, Verdict]:
    files, start = copy_recipe(args.name, args.folder)
    table = Table(f"Files in {args.folder}", ("name", "lines"), [(name, str(n)) for name, n in files.items()])
    content = {"action": "copy", "name": args.name, "folder": args.folder, "files": list(files), "start": start}
    return content, table, Verdict(OK, f"set model and documents in train.yaml, then: {start}")
