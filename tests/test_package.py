"""What is shipped: the wheel is built as an installer would and looked into; the command line answers."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_cp
from hf_cp.tools.cli import main
from hf_cp.tools.recipes import SCRIPTS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline from a copy of the sources (building leaves folders behind)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = [ROOT / name for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")]
    files += [ROOT / "examples" / name for name in SCRIPTS]
    files += [path for part in ("hf_cp", "recipes") for path in (ROOT / part).rglob("*") if path.is_file()]
    for path in files:
        if path.exists() and "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, capture_output=True, text=True, timeout=100)
    (built,) = folder.glob("hf_cp-*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"hf_cp-{hf_cp.__version__}.dist-info/{name}").decode()


def test_the_wheel_has_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_cp").rglob("*.py")} | {"hf_cp/py.typed"}
    assert expected <= set(wheel.namelist())
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"hf_cp"}  # no tests, no examples


def test_the_wheel_has_every_recipe(wheel: zipfile.ZipFile) -> None:
    prefix = f"hf_cp-{hf_cp.__version__}.data/data/share/hf_cp/"
    shipped = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    recipes = {
        str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*/*") if "__pycache__" not in path.parts
    }
    scripts = {f"examples/{name}" for name in SCRIPTS}
    assert recipes and shipped == recipes | scripts, "list each recipe folder under [options.data_files] in setup.cfg"


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
