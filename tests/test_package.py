"""What is shipped: the wheel is built as an installer would and looked into; the command line answers."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hf_cp
from hf_cp.tools.cli import main

ROOT = Path(__file__).resolve().parents[1]

# A process that sees other packages, but hf_cp in no other place than the first argument: neither this clone nor an
# installation into this environment, whose .pth files are not read (-S).
ELSEWHERE = """
import site, sys
sys.path[:0], packages, words = [sys.argv[1]], sys.argv[2], sys.argv[3:]
sys.path.append(packages)
site.addsitedir(sys.argv[1])
import hf_cp
from hf_cp.tools.cli import main
print(hf_cp.__file__)
sys.exit(main(words))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, because building leaves folders behind."""
    source = tmp_path_factory.mktemp("package") / "source"
    files = [ROOT / name for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")]
    files += [path for part in ("hf_cp", "recipes") for path in (ROOT / part).rglob("*") if path.is_file()]
    for path in files:
        if "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    """The wheel, built offline."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["-w", str(source.parent), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    (built,) = source.parent.glob("hf_cp-*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def places(source: Path, wheel: zipfile.ZipFile) -> dict[str, Path]:
    """Folders that a Python gets hf_cp from: a checkout, what `pip install -e` leaves, an installed wheel."""
    editable, installed = source.parent / "editable", source.parent / "installed"
    wheel.extractall(installed)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(source.parent)]
    name = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    zipfile.ZipFile(source.parent / name).extractall(editable)
    return {"checkout": source, "editable": editable, "wheel": installed}


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"hf_cp-{hf_cp.__version__}.dist-info/{name}").decode()


def test_the_wheel_has_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_cp").rglob("*.py")} | {"hf_cp/py.typed"}
    assert expected <= set(wheel.namelist()), "list new packages in setup.cfg"
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"hf_cp"}  # no tests, no examples


def test_the_wheel_has_every_recipe(wheel: zipfile.ZipFile) -> None:
    prefix = "hf_cp/recipes/shipped/"
    shipped = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    recipes = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    assert shipped == {path.as_posix() for path in recipes if "__pycache__" not in path.parts}
    assert "README.md" in shipped and "quickstart-cpu/train.yaml" in shipped


@pytest.mark.parametrize("kind", ["checkout", "editable", "wheel"])
def test_recipes_are_the_same_wherever_the_package_is(kind: str, places: dict[str, Path], tmp_path: Path) -> None:
    def run(*words: str) -> str:
        packages = sysconfig.get_paths()["purelib"]
        command = [sys.executable, "-I", "-S", "-c", ELSEWHERE, str(places[kind]), packages, "recipes", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        where, _, printed = done.stdout.partition("\n")
        home = places["wheel" if kind == "wheel" else "checkout"]
        assert Path(where) == home / "hf_cp" / "__init__.py"
        return printed

    folders = {path.parent.name for path in (ROOT / "recipes").glob("*/train.yaml")}
    assert {line.split()[0] for line in run("list").splitlines()[2:-1]} == folders
    assert run("show") == (ROOT / "recipes" / "README.md").read_text()
    run("copy", "quickstart-cpu", "copy")
    for file in (ROOT / "recipes" / "quickstart-cpu").glob("*.*"):
        copied = (tmp_path / "copy" / file.name).read_text()
        assert copied == file.read_text() or file.name == "accelerate.yaml"


def test_the_wheel_names_its_command_license_and_extras(wheel: zipfile.ZipFile) -> None:
    assert "hf-cp = hf_cp.tools.cli:main" in metadata(wheel, "entry_points.txt")
    text = metadata(wheel, "METADATA")
    assert f"Version: {hf_cp.__version__}\n" in text
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")
    for extra in ("data", "deepspeed", "dev", "flash", "peft", "plot"):
        assert f"Provides-Extra: {extra}\n" in text


def test_constraints_pin_what_is_required() -> None:
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {"torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "pytest", "ruff"} <= pinned


def test_env_prints_versions_as_text_and_json(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CP_RING_DEGREE", "2")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("```\n") and text.endswith("\n```\n")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["hf-cp"] == hf_cp.__version__
    assert report["packages"]["torch"] in text
    assert report["variables"]["HF_CP_RING_DEGREE"] == "2"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hf_cp", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"hf-cp {hf_cp.__version__}\n"


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fly"])
    assert stopped.value.code == 2
    assert "env" in capsys.readouterr().err
