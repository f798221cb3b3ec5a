"""The package is quiet, light, and layered: what an import costs, and who may import whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_cp"

# Imports point downwards only: a part may import itself and what stands in its row.
BASE = {"config", "environment", "output"}
MAY_IMPORT = {
    "_compat": set(),
    "config": set(),
    "environment": set(),
    "output": set(),
    "sequence": {"config"},
    "distributed": {"config", "sequence"},
    "attention": {"config", "sequence", "distributed"},
    "models": {"config", "sequence", "distributed", "attention"},
    "data": {"config", "sequence", "distributed"},
    "planning": {"config", "sequence", "data"},
    "training": {"config", "environment", "sequence", "planning", "distributed", "models", "data"},
    "verify": {*BASE, "sequence", "distributed", "attention", "models", "data", "training"},
    "recipes": {*BASE, "sequence", "planning", "distributed", "models", "data", "training", "verify"},
    "tools": {
        *BASE,
        *("sequence", "planning", "distributed", "attention", "models", "data", "training", "verify", "recipes"),
    },
}
# Beside `distributed`: what takes the place of its calls for a measurement, and what tries them out.
CALL_TORCH_DISTRIBUTED = {"hf_cp.tools.bench.local_copies", "hf_cp.tools.doctor.probes"}
OPTIONAL = ("bitsandbytes", "datasets", "deepspeed", "flash_attn", "matplotlib", "pandas", "peft", "pytest", "trl")

IMPORT_PROBE = """
import json, os, sys, time
import torch, transformers  # their cost and their settings are not ours
before = dict(os.environ)
began = time.perf_counter()
import hf_cp
seconds = time.perf_counter() - began
changed = sorted(set(before.items()) ^ set(os.environ.items()))
sys.stderr.write(json.dumps({"seconds": seconds, "changed": changed, "modules": sorted(sys.modules)}))
"""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The part of the package that a module belongs to; the package itself and __main__ stand above all parts."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "hf_cp"


def own_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every hf_cp module that the source names in an import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hf_cp")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                names = module.split(".")
                above = names[: len(names) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            if base == "hf_cp":  # `from hf_cp import sequence`
                yield from (f"hf_cp.{alias.name}" for alias in node.names)
            elif base.startswith("hf_cp."):
                yield base


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    part = part_of(module)
    if part not in MAY_IMPORT:  # hf_cp/__init__.py and hf_cp/__main__.py
        return []
    allowed = MAY_IMPORT[part] | {part, "_compat"}
    found = own_imports(ast.parse(source), module, is_package)
    return [name for name in found if part_of(name) in MAY_IMPORT and part_of(name) not in allowed]


class _DistributedUses(ast.NodeVisitor):
    """Line numbers where torch.distributed is imported or reached as an attribute, type checking aside."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_If(self, node: ast.If) -> None:
        name = node.test.attr if isinstance(node.test, ast.Attribute) else getattr(node.test, "id", None)
        if name == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._note(node, any(alias.name.startswith("torch.distributed") for alias in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        from_torch = node.module == "torch" and any(alias.name == "distributed" for alias in node.names)
        self._note(node, from_torch or (node.module or "").startswith("torch.distributed"))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        self._note(node, is_torch and node.attr == "distributed")
        self.generic_visit(node)

    def _note(self, node: ast.AST, found: bool) -> None:
        if found:
            self.lines.append(node.lineno)


def distributed_uses(source: str) -> list[int]:
    visitor = _DistributedUses()
    visitor.visit(ast.parse(source))
    return visitor.lines


@pytest.fixture(scope="module")
def fresh_import() -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )


def test_import_prints_nothing_and_sets_no_environment(fresh_import: subprocess.CompletedProcess) -> None:
    assert fresh_import.stdout == ""
    assert json.loads(fresh_import.stderr)["changed"] == []  # fails too when anything else is written there


def test_import_is_quick_and_leaves_optional_packages_alone(fresh_import: subprocess.CompletedProcess) -> None:
    found = json.loads(fresh_import.stderr)
    loaded = {name.split(".")[0] for name in found["modules"]}
    assert sorted(loaded & set(OPTIONAL)) == []
    assert found["seconds"] < 5.0  # about 0.1 s on an idle machine


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards_only(path: Path) -> None:
    assert part_of(module_name(path)) in {*MAY_IMPORT, "hf_cp", "__main__"}, "add the new part to MAY_IMPORT"
    wrong = wrong_imports(path.read_text(), module_name(path), path.name == "__init__.py")
    assert wrong == [], f"hf_cp.{part_of(module_name(path))} may not import {wrong}"


def import_circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, type checking and imports inside of functions included."""
    graph = networkx.DiGraph()
    for module, source in sources.items():
        for name in own_imports(ast.parse(source), module, is_package=False):
            if name in sources and name != module:
                graph.add_edge(module, name)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_there_are_no_circles() -> None:
    sources = {module_name(path): path.read_text() for path in modules() if path.name != "__init__.py"}
    assert import_circles(sources) == []
    planted = {"hf_cp.a": "if TYPE_CHECKING:\n    from hf_cp.b import B", "hf_cp.b": "def f():\n    import hf_cp.a"}
    assert import_circles(planted) == [["hf_cp.a", "hf_cp.b"]]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_distributed_calls_torch_distributed(path: Path) -> None:
    if part_of(module_name(path)) != "distributed" and module_name(path) not in CALL_TORCH_DISTRIBUTED:
        assert distributed_uses(path.read_text()) == []


def test_the_import_check_sees_every_form() -> None:
    module = "hf_cp.sequence.layout"
    for source in (
        "import hf_cp.models.patch",
        "from hf_cp.models import patch",
        "from hf_cp import models",
        "from ..models.patch import apply",
        "def f():\n    from hf_cp.models import patch",
    ):
        assert wrong_imports(source, module) != [], source
    assert wrong_imports("from .. import models", "hf_cp.sequence", is_package=True) != []
    assert wrong_imports("from .layout import X", "hf_cp.sequence", is_package=True) == []
    assert wrong_imports("from hf_cp.config import X\nfrom .plan import Y\nimport torch", module) == []


def test_the_torch_distributed_check_sees_every_form() -> None:
    for source in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch\ntorch.distributed.barrier()",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torch.distributed",
    ):
        assert distributed_uses(source) != [], source
    assert distributed_uses("if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup") == []
