"""Bytes on one GPU, by part: states, saved activations, logits, buffers.

Everything follows from counting the tensors that Hugging Face's decoder layers keep for their backward pass;
tests/planning compares with what autograd really saves. "Uniform" precision is assumed: weights, adapters and
activations in one type, as with DeepSpeed's bf16.

Dimensions: n = local tokens, h = hidden size, I = intermediate size, H and G = query and K/V heads, D = head size, V =
vocabulary, r = LoRA rank, b = bytes of an element, W = processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hf_cp.planning.model_shape import ModelShape

FP32 = 4
BUCKET_ELEMENTS = 5e8  # DeepSpeed's default reduce and all-gather buckets
OVERHEAD_BYTES = 2.5e9  # CUDA context, NCCL, cuBLAS workspaces, allocator slack: an assumption

CHECKPOINTING = ("none", "full", "keep_attention", "offload")
KEEPS_ATTENTION = ("keep_attention", "offload")  # what `ContextParallelConfig.keep_attention` says; or all is kept


@dataclass(frozen=True)
class Training:
    """How the model is trained, as far as memory and time depend on it.

    Args:
        zero_stage (`int`): 0 to 3; FSDP2 counts as 3.
        lora_r (`int`): rank of adapters on all linear layers; 0 trains all weights.
        checkpointing (`str`): "none", "full" (a layer's input is kept), "keep_attention" (and attention's output), or
            "offload" (the same two, in host memory).
        itemsize (`int`): bytes of weights and activations.
        loss_chunk_tokens (`int`): tokens whose logits exist at the same time.
        mlp_chunk_tokens (`int`, *optional*): tokens of a feed-forward chunk.
        optimizer_offload (`bool`): fp32 weights and Adam's moments on the host.
    """

    zero_stage: int = 3
    lora_r: int = 0
    checkpointing: str = "keep_attention"
    itemsize: int = 2
    loss_chunk_tokens: int = 1024
    mlp_chunk_tokens: int | None = None
    optimizer_offload: bool = False

    def __post_init__(self):
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage} does not exist. Choose 0, 1, 2 or 3.")
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(f"checkpointing={self.checkpointing!r}. Choose one of {', '.join(CHECKPOINTING)}.")


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float
    logits: float
    buffers: float
    overhead: float

    @property
    def total(self) -> float:
        """All parts, as if they were alive together; logits go before a layer is recomputed, so rather too much."""
        return sum(vars(self).values())

    @property
    def states(self) -> float:
        """What does not depend on the tokens."""
        return self.weights + self.gradients + self.optimizer


def trainable_parameters(model: ModelShape, lora_r: int) -> int:
    """LoRA has an [r, in] and an [out, r] matrix for every linear layer."""
    return lora_r * model.num_adapted if lora_r else model.num_parameters


def state_bytes(model: ModelShape, training: Training, *, world_size: int) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of one GPU.

    Stage 1 divides optimizer states by W, stage 2 gradients too, stage 3 weights too. 16-bit training keeps fp32
    weights and two fp32 moments (12 bytes), fp32 training two moments, and under ZeRO DeepSpeed's fp32 copy.
    """
    stage, b = training.zero_stage, training.itemsize
    trained = trainable_parameters(model, training.lora_r)
    frozen = model.num_parameters if training.lora_r else 0
    masters = FP32 if b < FP32 or stage else 0
    optimizer = trained * (masters + 2 * FP32) / (world_size if stage >= 1 else 1)
    weights = b * (frozen + trained) / (world_size if stage == 3 else 1)
    gradients = b * trained / (world_size if stage >= 2 else 1)
    return weights, gradients, 0.0 if training.optimizer_offload else optimizer


def attention_bytes(model: ModelShape, itemsize: int) -> int:
    """Kept per token by one attention call: q and out, k and v, and an fp32 log-sum-exp per head."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return (2 * q + 2 * kv) * itemsize + FP32 * model.num_heads


def layer_bytes(model: ModelShape, training: Training) -> int:
    """Kept per token by one decoder layer without checkpointing.

    Feed-forward: gate, its activation, up, their product (4 I). Two norms and what they put out. Attention: see
    [`attention_bytes`]; with norms of q and k, these too. LoRA: r elements behind each A matrix.
    """
    b, h = training.itemsize, model.hidden_size
    heads = model.num_heads + model.num_kv_heads if model.has_qk_norm else 0
    norms = 2 * (norm_bytes(training, h) + b * h) + heads * norm_bytes(training, model.head_dim)
    adapters = training.lora_r * model.num_linear * b
    return mlp_bytes(model, training) + norms + attention_bytes(model, b) + adapters


def norm_bytes(training: Training, size: int) -> int:
    """Kept per token by an RMS norm of `size`: the input in fp32, a factor, and the normalised input if trained."""
    return FP32 * size + FP32 + (0 if training.lora_r else training.itemsize * size)


def saved_bytes(model: ModelShape, training: Training, *, local_tokens: int, ulysses_degree: int = 1) -> float:
    """What the forward pass keeps on the device for the backward pass.

    With checkpointing a layer keeps its input, and maybe what [`kept_attention_bytes`] says; without it, everything
    but the inside of a tiled feed-forward. At the end: the final norm, and cos and sin of the positions.
    """
    b, h = training.itemsize, model.hidden_size
    ends = norm_bytes(training, h) + b * h + 2 * b * model.head_dim + 16
    if training.checkpointing == "none":
        frozen_start = FP32 * h if training.lora_r else 0  # nothing before the first norm is trained: no input is kept
        layer = layer_bytes(model, training) + ulysses_extra_bytes(model, training, ulysses_degree)
        if training.mlp_chunk_tokens:
            layer -= mlp_bytes(model, training)
        return local_tokens * (model.num_layers * layer + ends - frozen_start)
    if training.checkpointing == "offload":
        return local_tokens * ends
    kept = kept_attention_bytes(model, training, ulysses_degree) if training.checkpointing in KEEPS_ATTENTION else 0
    return local_tokens * (model.num_layers * (b * h + kept) + ends)


def mlp_bytes(model: ModelShape, training: Training) -> int:
    """Kept per token by the inside of a feed-forward part: gate, its activation, up, their product."""
    return 4 * model.intermediate_size * training.itemsize


def kept_attention_bytes(model: ModelShape, training: Training, ulysses_degree: int) -> int:
    """Kept per token of a checkpointed layer's attention: out and log-sum-exp; under Ulysses all that it saves."""
    if ulysses_degree > 1:
        extra = ulysses_extra_bytes(model, training, ulysses_degree)
        return attention_bytes(model, training.itemsize) + extra
    return training.itemsize * model.num_heads * model.head_dim + FP32 * model.num_heads


def ulysses_extra_bytes(model: ModelShape, training: Training, ulysses_degree: int) -> int:
    """What a layer keeps per token under Ulysses besides the usual: out before and after the second all-to-all, and
    the copies of K/V heads, L = lcm(G, u) of them in all, where u does not divide them."""
    copies = lcm(model.num_kv_heads, ulysses_degree) - model.num_kv_heads
    out = model.num_heads if ulysses_degree > 1 else 0
    return (out + 2 * copies) * model.head_dim * training.itemsize


def recomputed_bytes(model: ModelShape, training: Training, *, local_tokens: int, ulysses_degree: int = 1) -> float:
    """Activations of the one layer that is being recomputed, without what is kept of it on the device already.

    With offload the layer's input comes back. A tiled feed-forward holds 4 I elements of a chunk only, and the fp32
    sums of its three weights' gradients.
    """
    chunk = min(local_tokens, training.mlp_chunk_tokens or local_tokens)
    num_parts = -(-local_tokens // chunk)
    sums = _sum_bytes(training, 3 * model.hidden_size * model.intermediate_size, num_parts=num_parts)
    mlp = mlp_bytes(model, training)
    if training.checkpointing == "none":
        return chunk * mlp + sums if training.mlp_chunk_tokens else 0.0
    per_token = layer_bytes(model, training) - mlp + ulysses_extra_bytes(model, training, ulysses_degree)
    if training.checkpointing == "keep_attention":
        per_token -= kept_attention_bytes(model, training, ulysses_degree)
    elif training.checkpointing == "offload":
        per_token += training.itemsize * model.hidden_size
    return local_tokens * per_token + chunk * mlp + sums


def logits_bytes(model: ModelShape, training: Training, *, local_tokens: int) -> float:
    """Logits of one chunk, their fp32 copy, the gradients of both, and the fp32 sum of the head's gradient."""
    chunk = min(local_tokens, training.loss_chunk_tokens)
    sums = _sum_bytes(training, model.vocab_size * model.hidden_size, num_parts=-(-local_tokens // chunk))
    return chunk * model.vocab_size * 2 * (training.itemsize + FP32) + sums


def _sum_bytes(training: Training, num_weights: int, *, num_parts: int) -> float:
    """Gradients of 16-bit weights that are used once per chunk are summed in fp32."""
    return FP32 * num_weights if num_parts > 1 and training.itemsize < FP32 and not training.lora_r else 0.0


def zero_buffer_bytes(model: ModelShape, training: Training, *, world_size: int) -> float:
    """Stage 3 holds gathered weights: two layers, and embedding or head. Reductions go through fp32 buckets."""
    if world_size == 1:
        return 0.0
    trained = trainable_parameters(model, training.lora_r)
    bucket = min(BUCKET_ELEMENTS, trained) * FP32
    if training.zero_stage < 3:
        return bucket
    gathered = 2 * model.layer_parameters + model.vocab_size * model.hidden_size
    return bucket + gathered * training.itemsize


def run_memory(
    model: ModelShape,
    training: Training,
    *,
    world_size: int,
    local_tokens: int,
    attention_transients: float = 0.0,
    ulysses_degree: int = 1,
) -> Memory:
    """All parts of one GPU at the moment of the last layer's backward pass.

    Args:
        model (`ModelShape`): what is trained.
        training (`Training`): how.
        world_size (`int`): W, over which ZeRO shards.
        local_tokens (`int`): n, of one row on this GPU.
        attention_transients (`float`): bytes of an attention call's buffers.
        ulysses_degree (`int`): processes of an all-to-all.
    """
    weights, gradients, optimizer = state_bytes(model, training, world_size=world_size)
    buffers = zero_buffer_bytes(model, training, world_size=world_size) + attention_transients
    return Memory(
        weights,
        gradients,
        optimizer,
        saved_bytes(model, training, local_tokens=local_tokens, ulysses_degree=ulysses_degree),
        recomputed_bytes(model, training, local_tokens=local_tokens, ulysses_degree=ulysses_degree),
        logits_bytes(model, training, local_tokens=local_tokens),
        buffers,
        OVERHEAD_BYTES,
    )
