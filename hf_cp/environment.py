"""What is installed, set and plugged in here: versions, devices and variables, for reports, checkpoints and checks.

Invariant: of the packages that it names only torch is imported (versions come from their metadata), so it also works
where another one is broken.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from hf_cp import __version__

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "flash-attn")
VARIABLE_PREFIXES = ("HF_CP_", "ACCELERATE_")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "RANK",
    "TORCH_EXTENSIONS_DIR",
    "WORLD_SIZE",
)


@dataclass(frozen=True)
class EnvironmentReport:
    """Versions, devices and variables of one process.

    Args:
        python (`str`): version of the interpreter.
        system (`str`): operating system and machine type.
        packages (`dict[str, str | None]`): installed version of each package that matters here, or None.
        device_kind (`str`): `"cpu"`, or the name of the first accelerator.
        device_count (`int`): number of accelerators that this process sees.
        cpu_count (`int`): number of CPU cores.
        variables (`dict[str, str]`): environment variables that change what a run does, where they are set.
    """

    python: str
    system: str
    packages: dict[str, str | None]
    device_kind: str
    device_count: int
    cpu_count: int
    variables: dict[str, str]

    def to_text(self) -> str:
        """The paste block: one fact a line."""
        devices = f"{self.device_count} x {self.device_kind}" if self.device_count else self.device_kind
        lines = [("python", self.python), ("system", self.system)]
        lines += [(name, version or "not installed") for name, version in self.packages.items()]
        lines += [("devices", devices), ("CPU cores", str(self.cpu_count))]
        lines += list(self.variables.items())
        width = max(len(name) for name, _ in lines)
        return "\n".join(["```", *(f"{name:<{width}}  {value}" for name, value in lines), "```"])


def collect_environment(variables: Mapping[str, str] | None = None) -> EnvironmentReport:
    """Look at this process. `variables` defaults to `os.environ`.

    >>> collect_environment({"HF_CP_RING_DEGREE": "2", "HOME": "/root"}).variables
    {'HF_CP_RING_DEGREE': '2'}
    """
    variables = os.environ if variables is None else variables
    device_kind, device_count = _devices()
    return EnvironmentReport(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={"hf-cp": __version__} | {name: _version(name) for name in PACKAGES},
        device_kind=device_kind,
        device_count=device_count,
        cpu_count=os.cpu_count() or 1,
        variables={
            name: value
            for name, value in sorted(variables.items())
            if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
        },
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[str, int]:
    import torch

    if not torch.cuda.is_available():
        return "cpu", 0
    return torch.cuda.get_device_name(0), torch.cuda.device_count()
