"""What the planner expects of the cases that `hf-cp bench` has measured, and whether it orders them alike.

Invariant: only methods for the same setting are compared, and only pairs whose measured times differ by more than the
tolerance and more than they vary: others are equal as far as a measurement can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_cp.planning.devices import Cluster, Device
from hf_cp.planning.memory import Training
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.step_time import SampleCost
from hf_cp.tools.bench.cases import Case, Heads
from hf_cp.tools.bench.results import Spread

__all__ = ["Pair", "Priced", "compare", "estimate", "price_all"]

TOLERANCE = 0.1  # measured times that differ by less are equal


class Priced(NamedTuple):
    """A case, its measured and its expected seconds."""

    case: Case
    measured: Spread
    estimated: float


class Pair(NamedTuple):
    """Two methods for one setting, the one that was measured faster first."""

    faster: Priced
    slower: Priced

    @property
    def agrees(self) -> bool:
        """Whether the planner expects the faster one to be faster."""
        return self.faster.estimated < self.slower.estimated

    @property
    def ratios(self) -> tuple[float, float]:
        """The slower one's time over the faster one's: measured, estimated."""
        measured = self.slower.measured.median / self.faster.measured.median
        return measured, self.slower.estimated / self.faster.estimated


def price_all(content: Mapping[str, Any], device: Device) -> list[Priced]:
    """Prices all cases of a parsed `bench.json`.

    Args:
        content: of the file.
        device (`Device`): with the links and rates of the same file, by [`hf_cp.planning.devices.find_device`].
    """
    world = content["world"]
    cluster = Cluster(device, world["processes"], world["processes_per_node"])
    found = [(Case.from_json(values), Spread(**values["seconds"])) for values in content["cases"]]
    return [Priced(case, seconds, estimate(case, cluster)) for case, seconds in found]


def estimate(case: Case, cluster: Cluster) -> float:
    """Seconds of forward and backward pass of one attention layer; recomputation repeats the forward pass."""
    setting = case.setting
    training = Training(itemsize=setting.torch_dtype.itemsize)
    cost = SampleCost.of(setting.doc_lengths, case.config, _layer(setting.heads), training, cluster).layers()
    return (cost.forward * (2 if setting.recompute else 1) + cost.backward).seconds


def compare(priced: Sequence[Priced], *, tolerance: float = TOLERANCE) -> list[Pair]:
    """All pairs of one setting whose medians differ by more than `tolerance` and whose p10 to p90 do not overlap."""
    pairs = []
    for _, group in itertools.groupby(priced, lambda p: p.case.setting):
        for two in itertools.combinations(group, 2):
            faster, slower = sorted(two, key=lambda p: p.measured.median)
            is_clear = slower.measured.p10 > faster.measured.p90
            if is_clear and slower.measured.median > (1 + tolerance) * faster.measured.median:
                pairs.append(Pair(faster, slower))
    return pairs


def _layer(heads: Heads) -> ModelShape:
    """A model of one attention layer: nothing else is priced."""
    counts = dict.fromkeys(ModelShape.__dataclass_fields__, 0)
    named = {"name": heads.name, "num_layers": 1, "has_qk_norm": False, "windows": ((None, 1),)}
    sizes = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    return ModelShape(**counts | named | sizes)
