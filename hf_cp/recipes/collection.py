"""The recipes that come with the package: the repository's folder `recipes`, one folder with three short files each.

setup.cfg maps that folder to the package `hf_cp.recipes.shipped`: in a wheel it lies inside of hf_cp, in a checkout,
which is also what an editable install imports, beside it. Invariant: whichever it is, the same files are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

__all__ = [
    "ACCELERATE",
    "DEEPSPEED",
    "README",
    "TRAINING",
    "copy_recipe",
    "launch_line",
    "list_recipes",
    "read_file",
    "write_files",
]

README = "README.md"  # one for all
ACCELERATE, DEEPSPEED, TRAINING = "accelerate.yaml", "deepspeed.json", "train.yaml"  # of each
MANY_NODES = "--machine_rank $NODE_RANK --main_process_ip $HEAD_NODE --main_process_port 29500"


def recipes_folder() -> Traversable:
    """The folder with the README and a folder for each recipe.

    Raises:
        FileNotFoundError: there is none, because the package was copied by hand.
    """
    package = files("hf_cp")
    places = (package / "recipes" / "shipped", package / ".." / "recipes")
    for place in places:
        if (place / README).is_file():
            return place
    raise FileNotFoundError(
        f"The recipes are not installed: there is no {README} in {' nor in '.join(map(str, places))}.\n"
        "  Install with pip (pip install hf-cp, or pip install -e . in a clone)."
    )


def list_recipes() -> dict[str, str]:
    """Name and title of every recipe, by name."""
    found = {path.name: path / TRAINING for path in recipes_folder().iterdir() if path.is_dir()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(found.items()) if path.is_file()}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}


def read_file(name: str | None = None, file: str = TRAINING) -> str:
    """Text of a recipe's file, or without a name of the README.

    Raises:
        ValueError: there is no such recipe, or no such file in it.
    """
    if name is None:
        return (recipes_folder() / README).read_text(encoding="utf-8")
    texts = _texts(name)
    if file not in texts:
        raise ValueError(f"{name} has no file {file!r}. Choose one of {', '.join(texts)}.")
    return texts[file]


def copy_recipe(name: str, folder: Path) -> tuple[dict[str, int], str]:
    """Writes the recipe into `folder`; its accelerate.yaml takes the DeepSpeed config from there.

    Args:
        name (`str`): of the recipe.
        folder (`Path`): new, or without files of these names. Its path counts from the current folder.

    Returns:
        `dict[str, int]`, `str`: the files and their lines; the command that starts the copy.

    Raises:
        ValueError: there is no such recipe.
        FileExistsError: a file is there already.
    """
    texts = _texts(name)
    texts[ACCELERATE] = _moved(texts[ACCELERATE], folder)
    write_files(folder, texts)
    machines = yaml.safe_load(texts[ACCELERATE])["num_machines"]
    return {file: len(text.splitlines()) for file, text in texts.items()}, launch_line(folder, machines)


def _texts(name: str) -> dict[str, str]:
    """Every file of a recipe, by name."""
    names = list_recipes()
    if name not in names:
        raise ValueError(f"There is no recipe {name!r}. Choose one of {', '.join(names)}.")
    found = sorted(
        (path for path in (recipes_folder() / name).iterdir() if path.is_file()), key=lambda path: path.name
    )
    return {path.name: path.read_text(encoding="utf-8") for path in found}


def _moved(accelerate: str, folder: Path) -> str:
    """An accelerate.yaml that takes the DeepSpeed config of another folder; its first line, a comment, stays."""
    comment, settings = accelerate.partition("\n")[0], yaml.safe_load(accelerate)
    if "deepspeed_config" in settings:
        settings["deepspeed_config"]["deepspeed_config_file"] = (folder / DEEPSPEED).as_posix()
    return f"{comment}\n{yaml.safe_dump(settings, sort_keys=False)}"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes new files; a folder that has one of them already is left as it is.

    Raises:
        FileExistsError: a file is there already.
    """
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise FileExistsError(f"{folder} has {', '.join(there)} already. Give another folder, or remove them.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def launch_line(folder: Path, num_machines: int = 1) -> str:
    """The command that starts a recipe; on several machines it is given on each, with the variables of README.md.

    >>> print(launch_line(Path("my runs")))
    accelerate launch --config_file 'my runs/accelerate.yaml' -m hf_cp train 'my runs/train.yaml'
    """
    start, train = (shlex.quote((folder / name).as_posix()) for name in (ACCELERATE, TRAINING))
    nodes = f" {MANY_NODES}" if num_machines > 1 else ""
    return f"accelerate launch --config_file {start}{nodes} -m hf_cp train {train}"
