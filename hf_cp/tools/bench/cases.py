"""What `hf-cp bench` measures: the matrix of samples, heads and types, and of the ways to split them.

Invariant: a setting is what attention computes; the methods of a setting differ in how they compute it, so their times
may be compared. The matrix follows from options and files alone: every rank makes the same one.

>>> heads = Heads("gqa", 8, 2, 64)
>>> setting = Setting("single", (2048,), heads, "float32", recompute=False)
>>> configs = methods(ContextParallelConfig(), [(2, 1), (1, 2)], ["p2p"], ["zigzag"])
>>> [Case(setting, config).method for config in configs]
['ring 2, p2p, zigzag', 'ulysses 2']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_cp.config import ContextParallelConfig, check_heads, head_counts, head_size

__all__ = ["DOCUMENTS", "HEADS", "Case", "Heads", "Setting", "heads_of", "make_cases", "methods", "packed_sample"]

DOCUMENTS = ("single", "packed")  # one document, or many
HEADS = ("mha", "gqa", "mqa")
MEDIAN_DOCUMENT = 0.08  # of a packed sample that is drawn: a dozen documents, half of the tokens in a few


@dataclass(frozen=True)
class Heads:
    """Head counts of an attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.name} {self.num_heads}:{self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class Setting:
    """What is computed.

    Args:
        documents (`str`): "single" or "packed".
        doc_lengths (`tuple[int, ...]`): the sample.
        heads (`Heads`): of the layer.
        dtype (`str`): of q, k and v, as torch names it.
        recompute (`bool`): the forward pass is repeated in the backward pass, with its communication, as gradient
            checkpointing does with `keep_attention=False`.
    """

    documents: str
    doc_lengths: tuple[int, ...]
    heads: Heads
    dtype: str
    recompute: bool

    @property
    def num_tokens(self) -> int:
        """Of the whole sample."""
        return sum(self.doc_lengths)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        documents = "one document" if len(self.doc_lengths) == 1 else f"{len(self.doc_lengths)} documents"
        again = ", recomputed in the backward pass" if self.recompute else ""
        return f"{self.num_tokens:,} tokens, {documents}, {self.heads}, {self.dtype}{again}"

    def shortened(self, num_tokens: int) -> Setting:
        """The same kind of sample with at most about `num_tokens` tokens."""
        if self.num_tokens <= num_tokens:
            return self
        lengths = tuple(max(1, n * num_tokens // self.num_tokens) for n in self.doc_lengths)
        return dataclasses.replace(self, doc_lengths=lengths)


@dataclass(frozen=True)
class Case:
    """One method for one setting."""

    setting: Setting
    config: ContextParallelConfig

    @property
    def method(self) -> str:
        """The split in words; the engine and the layout where there is a ring."""
        config = self.config
        parts = [f"ulysses {config.ulysses_degree}"] if config.ulysses_degree > 1 else []
        if config.ring_degree > 1:
            parts += [f"ring {config.ring_degree}", config.ring_comm, config.resolved_layout]
        return ", ".join(parts) or "one process"

    def as_json(self) -> dict[str, Any]:
        """The entry of `bench.json`: setting, config and the method in words."""
        return {"setting": self.setting, "config": self.config, "method": self.method}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """The inverse of [`as_json`], from parsed JSON."""
        setting = dict(values["setting"])
        setting |= {"heads": Heads(**setting["heads"]), "doc_lengths": tuple(setting["doc_lengths"])}
        return cls(Setting(**setting), ContextParallelConfig(**values["config"]))


def heads_of(names: Iterable[str], *, num_heads: int, head_dim: int) -> list[Heads]:
    """`mha`: a K/V head for every query head; `gqa`: one for four; `mqa`: one for all.

    Raises:
        ValueError: there are no such groups.
    """
    if "gqa" in names and num_heads % 4:
        raise ValueError(f"gqa groups 4 query heads, but there are {num_heads}. Set --num-heads to a multiple of 4.")
    kv_heads = {"mha": num_heads, "gqa": num_heads // 4, "mqa": 1}
    return [Heads(name, num_heads, kv_heads[name], head_dim) for name in names]


def heads_of_model(config: Any) -> Heads:
    """The heads of a Hugging Face model config."""
    num_heads, num_kv_heads = head_counts(config)
    return Heads(config.model_type, num_heads, num_kv_heads, head_size(config))


def packed_sample(num_tokens: int, lengths: Sequence[int] | None = None) -> tuple[int, ...]:
    """Documents that fill it, the last one cut: `lengths` again and again, or log-normal ones of a fixed seed."""
    if lengths is None:
        drawn = np.random.default_rng(0).lognormal(np.log(max(1.0, MEDIAN_DOCUMENT * num_tokens)), 1.0, 1000)
        lengths = np.maximum(drawn.astype(int), 1)
    repeats = num_tokens // int(np.sum(lengths)) + 1
    ends = np.minimum(np.cumsum(np.tile(lengths, repeats)), num_tokens)
    return tuple(int(n) for n in np.diff(ends, prepend=0) if n > 0)


def methods(
    base: ContextParallelConfig,
    degrees: Iterable[tuple[int, int]],
    engines: Sequence[str],
    layouts: Sequence[str],
) -> Iterator[ContextParallelConfig]:
    """Every split that a config allows; engines and layouts only where there is a ring."""
    for ring, ulysses in degrees:
        split = dataclasses.replace(base, ring_degree=ring, ulysses_degree=ulysses, force=True)
        if ring == 1:
            yield split
            continue
        for engine in engines:
            if engine == "p2p" and base.grad_comm_dtype == "compute":
                continue  # a ring would round the sums at every hop
            for layout in layouts:
                yield dataclasses.replace(split, ring_comm=engine, layout=layout)


def make_cases(settings: Iterable[Setting], configs: Sequence[ContextParallelConfig]) -> tuple[list[Case], list[str]]:
    """(all cases that the heads allow, why others are left out).

    Raises:
        ValueError: nothing is left.
    """
    cases, skipped = [], {}
    for setting in settings:
        for config in configs:
            try:
                check_heads(setting.heads.num_heads, setting.heads.num_kv_heads, config)
                cases.append(Case(setting, config))
            except ValueError as error:
                skipped[f"{Case(setting, config).method} of {setting.heads}: {str(error).splitlines()[0]}"] = None
    if not cases:
        reasons = "\n  ".join(skipped) or "no engine is left"
        raise ValueError(f"no case is left to measure.\n  {reasons}\n  Choose other --degrees, --engines or heads.")
    return cases, list(skipped)
