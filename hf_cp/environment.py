"""What is installed, set and plugged in here: versions, devices and variables, for reports, checkpoints and checks.

Invariant: of the packages that it names only torch is imported (versions come from their metadata), so it also works
where another one is broken.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from hf_cp import __version__

GIB = 1024**3
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "flash-attn")  # that can change a run
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
    """Versions (`None`: not installed), devices and variables of one process; the fields of `hf-cp env --json`.

    `device_kind` is "cpu", or the name of the first of the `device_count` accelerators that this process sees.
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


def version_of(package: str) -> str | None:
    """Of an installed package; of this one also where it is run from its sources."""
    if package == "hf-cp":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of this package and of those that can change what a run computes; `None` for what is not installed."""
    return {name: version_of(name) for name in ("hf-cp", *PACKAGES)}


def collect_environment(variables: Mapping[str, str] | None = None) -> EnvironmentReport:
    """Look at this process. `variables` defaults to `os.environ`.

    >>> collect_environment({"HF_CP_RING_DEGREE": "2", "HOME": "/root"}).variables
    {'HF_CP_RING_DEGREE': '2'}
    """
    import torch

    found = dict(os.environ if variables is None else variables)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return EnvironmentReport(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=versions(),
        device_kind=torch.cuda.get_device_name(0) if count else "cpu",
        device_count=count,
        cpu_count=os.cpu_count() or 1,
        variables={
            name: found[name] for name in sorted(found) if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
        },
    )


def peak_memory_bytes(device_type: str) -> int:
    """The most memory so far, in bytes: of tensors on the GPU ("cuda"), or of the whole process elsewhere."""
    import torch

    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    # kilobytes everywhere but on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
