"""`hf-cp recipes`: complete runs to start from. List them, read one, copy one with its training script.

Recipes are found beside the package in a clone, and where pip has put them for an installed package. Invariant: a
copied folder is complete. It holds the recipe's files and its scripts, and the paths in them lead to the copy, so
that its launch lines run as they stand from the folder in which it was copied.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from hf_cp.output import OK, Table, Verdict, print_json, print_usage_error
from hf_cp.recipes.readme import shell_word
from hf_cp.recipes.writer import README, write_files

MARK = Path("recipes") / "quickstart-cpu" / "train.yaml"  # tells our folder from another one of that name
SCRIPT = "finetune.py"
SCRIPTS = (SCRIPT, "prepare_quickstart.py")  # in the folder examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which recipe."""
    actions = parser.add_subparsers(title="actions", dest="action", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    names = actions.add_parser("list", aliases=["ls"], help="names and what they train", parents=[common])
    names.set_defaults(action="list")
    words = "print the README of a recipe, or another file of it"
    show = actions.add_parser("show", help=words, parents=[common])
    show.add_argument("name", help="as in `hf-cp recipes list`")
    show.add_argument("file", nargs="?", default=README, help=f"default: {README}")
    show.set_defaults(action="show")
    words = "write a recipe and its training script into a new folder"
    copy = actions.add_parser("copy", aliases=["cp"], help=words, parents=[common])
    copy.add_argument("name", help="as in `hf-cp recipes list`")
    copy.add_argument("folder", type=Path, help="new folder; runs start in the current one")
    copy.set_defaults(action="copy")


def run(args: argparse.Namespace) -> int:
    """Does it; the status is 2 for a recipe or a file that does not exist, or a folder that is not new."""
    try:
        content, shown, verdict = {"list": _list, "show": _show, "copy": _copy}[args.action](args)
    except (ValueError, OSError) as error:
        return print_usage_error(error)
    if args.json:
        print_json({"command": "recipes", "action": args.action, "verdict": str(verdict)} | content, args.json)
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
    verdict = Verdict(OK, f"{len(found)} recipes; `hf-cp recipes show NAME` prints one, `copy NAME DIR` writes it.")
    content = {"recipes": [{"name": name, "what": what} for name, what in found]}
    return content, Table("Recipes", ("name", "what"), found), verdict


def _show(args: argparse.Namespace) -> tuple[dict[str, Any], str, Verdict]:
    text = read_file(args.name, args.file)
    return {"name": args.name, "file": args.file, "text": text}, text, Verdict(OK, f"{args.file} of {args.name}.")


def _copy(args: argparse.Namespace) -> tuple[dict[str, Any], Table, Verdict]:
    files = copy_recipe(args.name, args.folder)
    table = Table(f"Files in {args.folder}", ("name", "lines"), [(name, str(n)) for name, n in files.items()])
    verdict = Verdict(OK, "set model and documents in train.yaml; README.md has the launch lines.")
    return {"name": args.name, "folder": args.folder, "files": list(files)}, table, verdict


def data_root() -> Path:
    """The folder that holds `recipes` and `examples`.

    Raises:
        FileNotFoundError: there is none: the package was copied by hand.
    """
    clone = Path(__file__).resolve().parents[2]
    if (clone / MARK).is_file():
        return clone
    try:
        files = distribution("hf-cp").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-len(MARK.parts) :] == MARK.parts:
            return Path(str(file.locate())).resolve().parents[len(MARK.parts) - 1]
    raise FileNotFoundError(
        f"The recipes are not installed: there is no {MARK} in {clone} nor among the files of the package.\n"
        "  Install with pip (pip install hf-cp, or pip install -e . in a clone)."
    )


def list_recipes() -> list[tuple[str, str]]:
    """Name and title of every recipe, by name."""
    folders = sorted(path.parent for path in (data_root() / "recipes").glob(f"*/{README}"))
    return [(folder.name, title_of((folder / README).read_text(encoding="utf-8"))) for folder in folders]


def title_of(readme: str) -> str:
    """The first line, without the recipe's name in front.

    >>> title_of("# quickstart-cpu: LoRA on two CPU processes\\n\\nText")
    'LoRA on two CPU processes'
    """
    title = readme.splitlines()[0].lstrip("# ")
    name, _, rest = title.partition(": ")
    return rest if rest and " " not in name else title


def read_file(name: str, file: str = README) -> str:
    """Text of a recipe's file.

    Raises:
        ValueError: there is no such recipe, or no such file in it.
    """
    folder = _folder_of(name)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if file not in names:
        raise ValueError(f"{name} has no file {file!r}. Choose one of {', '.join(names)}.")
    return (folder / file).read_text(encoding="utf-8")


def training_script(name: str = SCRIPT) -> str:
    """Text of the script that the recipes run, or of another one in `SCRIPTS`."""
    return (data_root() / "examples" / name).read_text(encoding="utf-8")


def copy_recipe(name: str, folder: Path) -> dict[str, int]:
    """Writes the recipe and the scripts that it names into `folder`, with paths that lead there.

    Args:
        name (`str`): of the recipe.
        folder (`Path`): new, or without files of these names. Its path counts from the current folder.

    Returns:
        `dict[str, int]`: the files and their lines.

    Raises:
        ValueError: there is no such recipe, or the folder's name cannot stand in a command line.
        FileExistsError: a file is there already.
    """
    texts = {path.name: path.read_text(encoding="utf-8") for path in _folder_of(name).iterdir() if path.is_file()}
    used = [script for script in SCRIPTS if any(f"examples/{script}" in text for text in texts.values())]
    files = {file: _moved(text, name, file, folder) for file, text in texts.items()}
    files |= {script: training_script(script) for script in used}
    write_files(folder, files)
    return {name: len(files[name].splitlines()) for name in sorted(files)}


def _moved(text: str, name: str, file: str, folder: Path) -> str:
    """A file of the recipe with paths to the copy, quoted where they are part of a command line."""
    where = shell_word(folder.as_posix()) if file == README else folder.as_posix()
    text = text.replace(f"recipes/{name}", where)
    for script in SCRIPTS:
        text = text.replace(f"examples/{script}", f"{where}/{script}")
    return text


def _folder_of(name: str) -> Path:
    root = data_root() / "recipes"
    names = [known for known, _ in list_recipes()]
    if name not in names:
        raise ValueError(f"There is no recipe {name!r}. Choose one of {', '.join(names)}.")
    return root / name
