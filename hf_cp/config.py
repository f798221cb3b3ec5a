"""What the user asks for: how many processes share one packed sample, and how.

>>> ContextParallelConfig(ring_degree=2, ulysses_degree=4).cp_size
8
"""

from __future__ import annotations

import dataclasses
import logging
import os
import typing
from dataclasses import dataclass, field
from math import gcd, lcm

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "document", "zigzag", "contiguous", "striped")
RING_COMMS = ("auto", "p2p", "allgather", "exchange")
KERNELS = ("auto", "sdpa", "flash_attn", "flash_attn_3", "eager")
GRAD_COMM_DTYPES = ("fp32", "compute")

ENV_PREFIX = "HF_CP_"
IGNORE_INDEX = -100  # the label of a token without a target, as in PyTorch and transformers


@dataclass(frozen=True)
class ContextParallelConfig:
    """How one packed sample is split over processes.

    The sample is laid out over `ring_degree` ring shards; each ring shard is cut into `ulysses_degree` contiguous
    pieces, so `cp_size = ring_degree * ulysses_degree` processes work on one sample. The fields can be filled by
    [`transformers.HfArgumentParser`], by environment variables ([`ContextParallelConfig.from_env`]) or by
    [`ContextParallelConfig.auto`].

    Raises:
        ValueError: a degree or a size is not a positive integer, or a choice is not in its list.
    """

    ring_degree: int = field(
        default=1,
        metadata={"help": "Number of ring shards of a row; K/V travel around the ring (put it across nodes)."},
    )
    ulysses_degree: int = field(
        default=1,
        metadata={"help": "Processes of an all-to-all inside a ring shard; must divide the query heads."},
    )
    ring_comm: str = field(
        default="auto", metadata={"help": "How K/V move over the ring axis.", "choices": list(RING_COMMS)}
    )
    layout: str = field(
        default="auto",
        metadata={"help": "Which ring shard holds which token; auto is document.", "choices": list(LAYOUTS)},
    )
    kernel: str = field(
        default="auto",
        metadata={
            "help": "Local attention kernel; auto is flash_attn_3 or flash_attn where installed and able, else sdpa.",
            "choices": list(KERNELS),
        },
    )
    grad_comm_dtype: str = field(
        default="fp32",
        metadata={
            "help": "dK/dV on the ring axis: fp32, or the compute dtype (half the bytes, not p2p); summed in fp32.",
            "choices": list(GRAD_COMM_DTYPES),
        },
    )
    head_chunks: int = field(
        default=1,
        metadata={"help": "Groups of heads handled one after another; smaller buffers, next group in flight."},
    )
    loss_chunk_tokens: int = field(
        default=1024, metadata={"help": "Tokens whose logits exist at the same time in the chunked cross-entropy."}
    )
    mlp_chunk_tokens: int | None = field(
        default=None,
        metadata={"help": "Tokens whose feed-forward activations exist at the same time (None: all); recomputed."},
    )
    keep_attention: bool = field(
        default=True,
        metadata={"help": "Gradient checkpointing keeps attention's output; False recomputes and communicates again."},
    )
    timeout_seconds: float | None = field(
        default=None,
        metadata={"help": "Time limit of a collective in every process group made here (torch's default)."},
    )
    force: bool = field(
        default=False, metadata={"help": "Run this package's attention and loss also when cp_size is 1."}
    )

    def __post_init__(self):
        for name in ("ring_degree", "ulysses_degree", "head_chunks", "loss_chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}. Use {name}=1 to leave it unused.")
        tokens = self.mlp_chunk_tokens
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ValueError(
                f"mlp_chunk_tokens must be a positive integer, got {tokens!r}. Use None to handle all tokens at once."
            )
        is_number = isinstance(self.timeout_seconds, int | float) and not isinstance(self.timeout_seconds, bool)
        if self.timeout_seconds is not None and not (is_number and self.timeout_seconds > 0):
            raise ValueError(
                f"timeout_seconds must be positive, got {self.timeout_seconds!r}. Use None for torch's default."
            )
        for name in ("keep_attention", "force"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        choices_of = {
            "layout": LAYOUTS,
            "ring_comm": RING_COMMS,
            "kernel": KERNELS,
            "grad_comm_dtype": GRAD_COMM_DTYPES,
        }
        for name, choices in choices_of.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} does not exist. Choose one of {', '.join(choices)}.")
        if self.ring_comm == "p2p" and self.grad_comm_dtype == "compute":
            raise ValueError(
                "grad_comm_dtype='compute' with ring_comm='p2p' would round the sums of dK/dV at every hop.\n"
                "  Use ring_comm='exchange' or 'allgather', which sum in fp32 at home, or grad_comm_dtype='fp32'."
            )

    @property
    def cp_size(self) -> int:
        """Number of processes that share one packed sample."""
        return self.ring_degree * self.ulysses_degree

    @property
    def enabled(self) -> bool:
        """Whether attention and loss of a model are replaced at all."""
        return self.cp_size > 1 or self.force

    @property
    def resolved_layout(self) -> str:
        """The layout that `auto` stands for."""
        return "document" if self.layout == "auto" else self.layout

    @classmethod
    def from_env(cls, **overrides: typing.Any) -> ContextParallelConfig:
        """Reads `HF_CP_RING_DEGREE`, `HF_CP_ULYSSES_DEGREE`, `HF_CP_LAYOUT`, ... ; keyword arguments win.

        Raises:
            ValueError: an `HF_CP_` variable names no field, or its text does not fit the field's type.
        """
        names = {f"{ENV_PREFIX}{f.name.upper()}": f for f in dataclasses.fields(cls)}
        unknown = sorted(key for key in os.environ if key.startswith(ENV_PREFIX) and key not in names)
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a setting. Known ones: {', '.join(sorted(names))}.")
        values = {f.name: _parse(key, f, os.environ[key]) for key, f in names.items() if key in os.environ}
        return cls(**{**values, **overrides})

    @classmethod
    def auto(
        cls, cp_size: int, model_config: typing.Any, ranks_per_node: int | None = None, **kwargs: typing.Any
    ) -> ContextParallelConfig:
        """Chooses the degrees for `cp_size` processes from the heads of a Hugging Face model config.

        Among the legal Ulysses degrees (they divide `cp_size`, the query heads and, if given, `ranks_per_node`; and
        one of Ulysses degree and K/V heads divides the other) the one with which a rank sends least for one long
        document over a p2p ring; among equals the largest. The ring takes the rest. The choice and its alternatives
        are logged.

        Raises:
            ValueError: `cp_size` is not a positive integer.
        """
        if not isinstance(cp_size, int) or cp_size < 1:
            raise ValueError(f"cp_size must be a positive integer, got {cp_size!r}. Use 1 for no context parallelism.")
        num_heads, num_kv_heads = head_counts(model_config)
        sent = {
            degree: _sent_elements(num_heads, num_kv_heads, cp_size // degree, degree)
            for degree in sensible_ulysses_degrees(gcd(cp_size, ranks_per_node or cp_size), num_heads, num_kv_heads)
        }
        best = min(sent, key=lambda degree: (sent[degree], -degree))
        logger.info(
            "%d query and %d K/V heads over %d processes: ulysses_degree=%d, ring_degree=%d. Elements sent per token "
            "and head dimension, by ulysses_degree: %s.",
            num_heads, num_kv_heads, cp_size, best, cp_size // best, sent,
        )  # fmt: skip
        return cls(ring_degree=cp_size // best, ulysses_degree=best, **kwargs)

    def with_cp_size(
        self, cp_size: int, model_config: typing.Any, ranks_per_node: int | None = None
    ) -> ContextParallelConfig:
        """The same settings for groups of `cp_size` processes; 1 gives every process whole rows.

        Without degrees (both are 1) they are chosen by [`ContextParallelConfig.auto`]. Given ones shrink, the ring
        first: Ulysses keeps gcd(ulysses_degree, cp_size) processes, which divides the heads as before, and the ring
        the rest, which divides ring_degree.

        >>> ContextParallelConfig(ring_degree=2, ulysses_degree=8).with_cp_size(4, None).ulysses_degree
        4

        Raises:
            ValueError: `cp_size` is not a positive integer, or does not divide the product of the given degrees.
        """
        if self.cp_size == 1:
            auto = ContextParallelConfig.auto(cp_size, model_config, ranks_per_node)
            return dataclasses.replace(self, ring_degree=auto.ring_degree, ulysses_degree=auto.ulysses_degree)
        if not isinstance(cp_size, int) or cp_size < 1 or self.cp_size % cp_size:
            raise ValueError(
                f"cp_size={cp_size}, but ring_degree={self.ring_degree} x ulysses_degree={self.ulysses_degree} is "
                f"{self.cp_size}.\n  Give a cp_size that divides it ({', '.join(map(str, divisors(self.cp_size)))}): "
                "the degrees shrink, the ring first. For a larger one give degrees that fit it, or none."
            )
        ulysses_degree = gcd(self.ulysses_degree, cp_size)
        return dataclasses.replace(self, ring_degree=cp_size // ulysses_degree, ulysses_degree=ulysses_degree)


def sensible_ulysses_degrees(num_processes: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Degrees that divide processes and query heads, and of which one of degree and K/V heads divides the other.

    >>> sensible_ulysses_degrees(8, 28, 4)
    [1, 2, 4]
    """
    legal = divisors(gcd(num_processes, num_heads))
    return [degree for degree in legal if num_kv_heads % degree == 0 or degree % num_kv_heads == 0]


def _sent_elements(num_heads: int, num_kv_heads: int, ring_degree: int, ulysses_degree: int) -> float:
    """What a rank sends per local token and head dimension in a forward and backward pass, for one long document.

    Ulysses: 2 passes of (2H + 2L) (u - 1) / u. Ring: R - 1 hops of 2L forward, and of 2L and 4L (fp32 gradients
    counted as two 16-bit elements) backward. H are query heads, L = lcm(K/V heads, u).
    """
    kv_heads = lcm(num_kv_heads, ulysses_degree)
    ulysses = 2 * (2 * num_heads + 2 * kv_heads) * (ulysses_degree - 1) / ulysses_degree
    return ulysses + (ring_degree - 1) * 8 * kv_heads


def head_counts(model_config: typing.Any) -> tuple[int, int]:
    """Query heads and K/V heads of a Hugging Face model config."""
    num_heads = model_config.num_attention_heads
    return num_heads, getattr(model_config, "num_key_value_heads", None) or num_heads


def head_size(model_config: typing.Any) -> int:
    """Elements of one head of a Hugging Face model config."""
    size = getattr(model_config, "head_dim", None)
    return size or model_config.hidden_size // model_config.num_attention_heads


def check_heads(num_heads: int, num_kv_heads: int, config: ContextParallelConfig) -> None:
    """Raises ValueError unless the heads fit the config.

    Every Ulysses rank gets H / u query heads and the lcm(G, u) / u K/V heads that they use, in `head_chunks` groups.
    """
    degree, chunks = config.ulysses_degree, config.head_chunks
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not divide over {num_kv_heads} K/V heads. Check the head counts of the model."
        )
    if num_heads % degree:
        legal = [u for u in divisors(config.cp_size) if num_heads % u == 0]
        raise ValueError(
            f"ulysses_degree={degree} does not divide the {num_heads} query heads (K/V heads: {num_kv_heads}).\n"
            "  The rule: ulysses_degree must divide the query heads; K/V heads are replicated where it does not "
            "divide them.\n"
            f"  With cp_size={config.cp_size} use ulysses_degree in {legal} and ring_degree=cp_size/ulysses_degree, "
            f"or ContextParallelConfig.auto({config.cp_size}, model.config)."
        )
    kv_heads_of_rank = lcm(num_kv_heads, degree) // degree
    if kv_heads_of_rank % chunks:
        raise ValueError(
            f"head_chunks={chunks} does not divide the {kv_heads_of_rank} K/V heads that a rank handles "
            f"({num_kv_heads} K/V heads, ulysses_degree={degree}). Use one of {divisors(kv_heads_of_rank)}."
        )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _parse(key: str, spec: dataclasses.Field, text: str) -> typing.Any:
    """One environment variable as the type of its field."""
    kind = typing.get_type_hints(ContextParallelConfig)[spec.name]
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind in (int, int | None):
            return int(text)
        return float(text) if kind == (float | None) else text
    except (KeyError, ValueError):
        raise ValueError(
            f"{key}={text!r} cannot be read as {getattr(kind, '__name__', kind)}. Fix or unset it."
        ) from None
