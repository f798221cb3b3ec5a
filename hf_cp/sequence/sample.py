"""What travels with a batch: which packed sample it is a part of, and what its ranks have agreed on.

>>> from hf_cp.config import ContextParallelConfig
>>> sample = PackedSample(SequenceLayout([5, 3], ContextParallelConfig(ring_degree=2)))
>>> sample.common_length, sample.attention_plan() is replace(sample, is_agreed=True).attention_plan()
(4, True)
"""

from __future__ import annotations

from typing import Any

from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan

SAMPLE_KEY = "hf_cp_sample"  # in a batch, and as the keyword argument on its way through a model

__all__ = ["SAMPLE_KEY", "PackedSample", "replace"]


class PackedSample:
    """One packed sample, as every rank that holds a part of it knows it; the tensors of the batch are one rank's part.

    It is frozen: a loader that learns more makes a new value ([`replace`]), which shares the plans of the old one. It
    is not a dataclass, since FSDP copies those, field by field, on their way into every module: the plans would be
    copied, too.

    Args:
        layout (`SequenceLayout`): which token is on which rank.
        cp_rank (`int`, *optional*): whose part the batch is; `None` if it was made by hand.
        digest (`int`, *optional*): hash of the sample's content, signed, 64 bits; `None` if it was made by hand.
        max_position (`int`, *optional*): the largest position id of the sample, also where documents bring positions
            of their own.
        micro_step (`int`, *optional*): number of the micro-step in the epoch.
        common_length (`int`, *optional*): slots of the rank that has most of them, over the whole world where
            data-parallel replicas have samples of other lengths; by default the layout's `local_length`. What is done
            in chunks takes its number of chunks from it, so that all ranks make the same module calls (ZeRO-3 and
            FSDP gather parameters in every one).
        is_agreed (`bool`): all ranks of the context-parallel group are known to hold the same sample.
        plans (`dict`): the attention plans made so far, by (causal, window): all layers, the backward pass and the
            copies of this value share them, and they go with the batch.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        cp_rank: int | None = None,
        digest: int | None = None,
        max_position: int | None = None,
        micro_step: int | None = None,
        common_length: int | None = None,
        is_agreed: bool = False,
        plans: dict[tuple[bool, int | None], AttentionPlan] | None = None,
    ):
        vars(self).update(
            layout=layout,
            cp_rank=cp_rank,
            digest=digest,
            max_position=max_position,
            micro_step=micro_step,
            common_length=layout.local_length if common_length is None else common_length,
            is_agreed=is_agreed,
            plans={} if plans is None else plans,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A PackedSample is frozen: make another one with replace(sample, {name}=...).")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedSample) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.layout, self.digest, self.micro_step))

    def __repr__(self) -> str:
        return f"PackedSample({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "plans"}

    def attention_plan(self, *, causal: bool = True, window: int | None = None) -> AttentionPlan:
        """The attention plan of the sample, made once."""
        key = (causal, window)
        if key not in self.plans:
            self.plans[key] = AttentionPlan(self.layout, causal=causal, window=window)
        return self.plans[key]

    def num_chunks(self, chunk_tokens: int) -> int:
        """Chunks of at most `chunk_tokens` slots on the longest rank: the same number on all ranks.

        >>> from hf_cp.config import ContextParallelConfig
        >>> PackedSample(SequenceLayout([9], ContextParallelConfig())).num_chunks(4)
        3
        """
        return -(-self.common_length // chunk_tokens)


def replace(sample: PackedSample, **changes: Any) -> PackedSample:
    """A copy with other values, which shares the plans."""
    return PackedSample(**vars(sample) | changes)
