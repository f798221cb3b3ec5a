"""The processes as a mesh of named axes, outermost first: `dp`, `ring`, `ulysses`.

Consecutive ranks share a Ulysses group, so that its all-to-all stays inside a node; the ring may cross nodes; data
parallelism is outermost. With 8 ranks, ring 2 and Ulysses 2 the context-parallel groups are {0, 1, 2, 3} and
{4, 5, 6, 7}, and rank 6 is ring rank 1, Ulysses rank 0 of the second one. To everybody else (DDP, ZeRO, FSDP2) all
ranks are data-parallel ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from hf_cp.config import ContextParallelConfig
from hf_cp.distributed.faults import Place, Watched
from hf_cp.distributed.traffic import Traffic
from hf_cp.distributed.wire import Wire

AXES = ("dp", "ring", "ulysses")


class ContextParallelMesh:
    """Process groups and ranks of this process.

    Args:
        config (`ContextParallelConfig`): gives `ring_degree` and `ulysses_degree`; the rest of the world is `dp`.
        device_type (`str`, *optional*): "cpu" or "cuda", where the tensors live; the current accelerator by default.
        ranks (nested sequence of `int`, *optional*): global ranks as [dp, ring, ulysses], for another placement than
            the consecutive one.

    Attributes:
        rank, world_size (`int`): of the whole world.
        dp_rank, ring_rank, ulysses_rank, cp_rank (`int`): `cp_rank = ring_rank * ulysses_degree + ulysses_rank`.
        dp_size, ring_size, ulysses_size, cp_size (`int`): sizes of the axes.
        dp_group, ring_group, ulysses_group, cp_group (`torch.distributed.ProcessGroup`): `None` where cp_size is
            1 (but `dp_group` is then the world, if there is one).
        status_group (`torch.distributed.ProcessGroup`): gloo over the world, for small host-side exchanges.
        traffic (`Traffic`): bytes that this process has sent, per axis.
        place (`Place`): what this process is working on, for messages.
        wire (`Wire`): what carries attention's tensors; see [`hf_cp.distributed.wire.local_copies`].
        timeout (`timedelta`, *optional*): time limit of a collective in the groups; `None` without groups.

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
        self.config = config
        self.rank, self.world_size = _rank_and_world(config)
        self.ranks = self._place(ranks)
        self.traffic, self.place, self.wire = Traffic(), Place(), Wire()
        self.timeout: timedelta | None = None
        self.dp_size, self.ring_size, self.ulysses_size = self.ranks.shape
        self.cp_size = config.cp_size
        self.dp_rank, self.ring_rank, self.ulysses_rank = (int(i[0]) for i in np.nonzero(self.ranks == self.rank))
        self.cp_rank = self.ring_rank * self.ulysses_size + self.ulysses_rank
        self.device_type = device_type or _default_device_type()
        self.dp_group = self.ring_group = self.ulysses_group = self.cp_group = self.status_group = None
        if dist.is_available() and dist.is_initialized():
            self.timeout = self._timeout()
            with Watched(self, "world", "the making of the process groups", during="the set-up"):
                self._make_groups()

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

    def _place(self, ranks: Sequence | None) -> np.ndarray:
        """Global ranks as int64 [dp, ring, ulysses]."""
        config, world = self.config, self.world_size
        shape = (world // config.cp_size, config.ring_degree, config.ulysses_degree)
        placed = np.arange(world).reshape(shape) if ranks is None else np.asarray(ranks)
        if placed.shape != shape or sorted(placed.flat) != list(range(world)):
            raise ValueError(
                f"ranks has shape {placed.shape} and holds {sorted(placed.flat)}; it must be [dp, ring, ulysses] = "
                f"{list(shape)} and hold each of the {world} ranks once."
            )
        return placed

    def _make_groups(self) -> None:
        """All groups, in the same order on every rank, each warmed up.

        NCCL needs all ranks of a group in its first call; later a rank may have nothing to send.
        """
        timeout = self.timeout
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
            self.status_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="hf_cp_status")

    def _timeout(self) -> timedelta:
        """The user's time limit: from the config, else the one that the world's group was made with."""
        if self.config.timeout_seconds is not None:
            return timedelta(seconds=self.config.timeout_seconds)
        return dist.group.WORLD._get_backend(torch.device(self.device_type)).options._timeout

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
