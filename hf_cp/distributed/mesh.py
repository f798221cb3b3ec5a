"""The processes as a mesh of named axes, outermost first: `dp`, `ring`, `ulysses`.

Consecutive ranks share a Ulysses group, so that its all-to-all stays inside a node; the ring may cross nodes; data
parallelism is outermost. With 8 ranks, ring 2 and Ulysses 2 the context-parallel groups are {0, 1, 2, 3} and
{4, 5, 6, 7}, and rank 6 is ring rank 1, Ulysses rank 0 of the second one. To everybody else (DDP, ZeRO, FSDP2) all
ranks are data-parallel ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from hf_cp import _compat
from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.communicator import PeerCall
from hf_cp.sequence.layout import SequenceLayout

AXES = ("dp", "ring", "ulysses")


class ContextParallelMesh:
    """Process groups and ranks of this process; a value that nothing changes.

    Args:
        config (`ContextParallelConfig`): gives `ring_degree`, `ulysses_degree` and the time limit of the groups; the
            rest of the world is `dp`. Other settings stay with the config: pass both where they matter, as in
            `apply_context_parallel(model, config, mesh=mesh)`.
        device_type (`str`, *optional*): "cpu" or "cuda", where the tensors live; the current accelerator by default.
        ranks (nested sequence of `int`, *optional*): global ranks as [dp, ring, ulysses], for another placement than
            the consecutive one.

    Attributes:
        rank, world_size (`int`): of the whole world.
        ranks (`np.ndarray`): global ranks, int64 [dp, ring, ulysses].
        dp_rank, ring_rank, ulysses_rank, cp_rank (`int`): `cp_rank = ring_rank * ulysses_degree + ulysses_rank`.
        dp_size, ring_size, ulysses_size, cp_size (`int`): sizes of the axes.
        dp_group, ring_group, ulysses_group, cp_group (`torch.distributed.ProcessGroup`): `None` where cp_size is
            1 (but `dp_group` is then the world, if there is one).
        host_group (`torch.distributed.ProcessGroup`): gloo over the world, for small exchanges on the host.
        other_settings (`tuple[str, ...]`): settings of the config that are not the default and that a mesh does not
            carry, so that a mesh in place of its config cannot drop them silently.

    Raises:
        ValueError: the world does not divide by `cp_size`, or `ranks` has another shape or other ranks.
        RuntimeError: `torch.distributed` is not initialised although more than one process is needed.
    """

    def __init__(
        self,
        config: ContextParallelConfig,
        device_type: str | None = None,
        *,
        ranks: Sequence[Sequence[Sequence[int]]] | None = None,
    ):
        self.rank, self.world_size = _rank_and_world(config)
        self.ranks = _placed(ranks, config, self.world_size)
        self.dp_size, self.ring_size, self.ulysses_size = self.ranks.shape
        self.cp_size = self.ring_size * self.ulysses_size
        self.dp_rank, self.ring_rank, self.ulysses_rank = (int(i[0]) for i in np.nonzero(self.ranks == self.rank))
        self.cp_rank = self.ring_rank * self.ulysses_size + self.ulysses_rank
        self.device_type = device_type or _default_device_type()
        self.other_settings = _settings_beside_degrees(config)
        self.dp_group = self.ring_group = self.ulysses_group = self.cp_group = self.host_group = None
        if dist.is_available() and dist.is_initialized():
            limit = self.time_limit if config.timeout_seconds is None else timedelta(seconds=config.timeout_seconds)
            with PeerCall(self, "world", "the making of the process groups", during="the set-up"):
                self._make_groups(limit)

    @property
    def time_limit(self) -> timedelta | None:
        """Of a collective in the groups: the config's, else that of the world's group; `None` without processes."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return _compat.group_time_limit(self.cp_group or dist.group.WORLD, self.device_type)

    @property
    def name(self) -> str:
        """This process, for messages: "rank 5 of 8 (dp 1, ring 0, ulysses 1)"."""
        return (
            f"rank {self.rank} of {self.world_size} (dp {self.dp_rank}, ring {self.ring_rank}, "
            f"ulysses {self.ulysses_rank})"
        )

    def peers(self, axis: str) -> list[int]:
        """Global ranks of this process's group along `axis` ("dp", "ring", "ulysses", "cp" or "world"), itself too."""
        own = self.dp_rank, self.ring_rank, self.ulysses_rank
        index = {
            "dp": (slice(None), *own[1:]),
            "ring": (own[0], slice(None), own[2]),
            "ulysses": (*own[:2], slice(None)),
            "cp": (own[0],),
            "world": (),
        }
        return self.ranks[index[axis]].flatten().tolist()

    def degrees_fault(self, split: SequenceLayout | ContextParallelConfig, name: str) -> str | None:
        """What is wrong if `split`, called `name` in the message, is for other degrees than this mesh."""
        degrees = (split.ring_degree, split.ulysses_degree)
        if degrees == (self.ring_size, self.ulysses_size):
            return None
        return (
            f"{name} was made for ring x ulysses = {degrees[0]} x {degrees[1]}, the mesh is {self.ring_size} x "
            f"{self.ulysses_size}. Make both from one config."
        )

    def _make_groups(self, timeout: timedelta) -> None:
        """All groups, in the same order on every rank, each warmed up.

        NCCL needs all ranks of a group in its first call; later a rank may have nothing to send.
        """
        dp, ring, ulysses = self.ranks.shape
        if self.cp_size == 1:
            self.dp_group = dist.group.WORLD
        else:
            self.cp_group = _own_group(self.ranks.reshape(dp, -1), timeout, "hf_cp_cp")
            self.dp_group = _own_group(self.ranks.reshape(dp, -1).T, timeout, "hf_cp_dp")
            by_ring = self.ranks.transpose(0, 2, 1).reshape(-1, ring)
            self.ring_group = self.cp_group if ulysses == 1 else _own_group(by_ring, timeout, "hf_cp_ring")
            by_ulysses = self.ranks.reshape(-1, ulysses)
            self.ulysses_group = self.cp_group if ring == 1 else _own_group(by_ulysses, timeout, "hf_cp_ulysses")
            for group in (self.cp_group, self.dp_group, self.ring_group, self.ulysses_group):
                dist.all_reduce(torch.zeros(1, device=self.device_type), group=group)
        if self.world_size > 1:
            self.host_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="hf_cp_host")

    def __deepcopy__(self, memo: dict) -> ContextParallelMesh:
        return self  # process groups cannot be copied, and a copied model belongs to the same processes

    def __reduce__(self):
        raise TypeError(
            "A ContextParallelMesh cannot be pickled: process groups belong to the running processes.\n"
            "  Save the model with save_pretrained(), or call remove_context_parallel(model) first."
        )

    def __repr__(self) -> str:
        sizes = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, self.ranks.shape, strict=True))
        return f"ContextParallelMesh({sizes}, rank {self.rank} of {self.world_size})"


def _rank_and_world(config: ContextParallelConfig) -> tuple[int, int]:
    """Checks that the launched processes can hold the config; asks nobody."""
    ready = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if ready else (0, int(os.environ.get("WORLD_SIZE", 1)))
    if world % config.cp_size:
        raise ValueError(
            f"cp_size={config.cp_size} (ring_degree={config.ring_degree} x ulysses_degree={config.ulysses_degree}) "
            f"does not divide the {world} launched processes.\n"
            f"  Launch a multiple of {config.cp_size} (accelerate launch --num_processes ...), or choose degrees "
            f"whose product divides {world}."
        )
    if world > 1 and not ready:
        raise RuntimeError(
            f"{world} processes are launched (WORLD_SIZE), but torch.distributed is not initialised yet.\n"
            "  Create the Accelerator or the TrainingArguments first, or call torch.distributed.init_process_group()."
        )
    return rank, world


def _placed(ranks: Sequence | None, config: ContextParallelConfig, world_size: int) -> np.ndarray:
    """Global ranks as int64 [dp, ring, ulysses].

    8 ranks, ring 2 x Ulysses 2:   dp 0: [[0 1]     dp 1: [[4 5]     a line is a Ulysses group, a column a ring,
                                          [2 3]]           [6 7]]    a square a context-parallel group.
    """
    shape = (world_size // config.cp_size, config.ring_degree, config.ulysses_degree)
    placed = np.arange(world_size).reshape(shape) if ranks is None else np.asarray(ranks)
    if placed.shape != shape or sorted(placed.flat) != list(range(world_size)):
        raise ValueError(
            f"ranks has shape {placed.shape} and holds {sorted(placed.flat)}; it must be [dp, ring, ulysses] = "
            f"{list(shape)} and hold each of the {world_size} ranks once."
        )
    return placed


def _settings_beside_degrees(config: ContextParallelConfig) -> tuple[str, ...]:
    carried = ("ring_degree", "ulysses_degree", "timeout_seconds")
    return tuple(f.name for f in fields(config) if f.name not in carried and getattr(config, f.name) != f.default)


def config_of(
    config_or_mesh: ContextParallelConfig | ContextParallelMesh, *, used: Collection[str] | None = None
) -> ContextParallelConfig:
    """The config that a public function was given; of a mesh, the defaults with its degrees.

    Args:
        used (collection of `str`, *optional*): the settings that the function reads; by default all.

    Raises:
        ValueError: the mesh was made from a config with other settings, which would be lost.
    """
    if isinstance(config_or_mesh, ContextParallelConfig):
        return config_or_mesh
    mesh = config_or_mesh
    lost = [name for name in mesh.other_settings if used is None or name in used]
    if lost:
        raise ValueError(
            f"{mesh} was made from a config that sets {', '.join(lost)}, but a mesh carries groups and ranks only.\n"
            "  Pass the config, and the mesh beside it: mesh=..., of a collator cp_rank=mesh.cp_rank."
        )
    return ContextParallelConfig(ring_degree=mesh.ring_size, ulysses_degree=mesh.ulysses_size)


def _own_group(rank_lists: np.ndarray, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Makes a group for every row of `rank_lists` [num_groups, group_size]; returns the one with this process.

    A rank's place in the row is its rank in the group, also where global ranks do not rise along an axis.
    """
    groups = [
        dist.new_group(ranks, timeout=timeout, group_desc=name, sort_ranks=False) for ranks in rank_lists.tolist()
    ]
    (own,) = (group for ranks, group in zip(rank_lists, groups, strict=True) if dist.get_rank() in ranks)
    return own


def _default_device_type() -> str:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        return "cpu"
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
