"""Floating-point operations that a training step needs, without what is recomputed: the numerator of MFU.

Dimensions: n = tokens, h = hidden size, V = vocabulary. A product of an [n, a] and an [a, b] matrix has 2 n a b
operations.
"""

from __future__ import annotations

from hf_cp.planning.model_shape import ModelShape
from hf_cp.sequence.costs import AttentionShape, attention_flops


def training_flops(model: ModelShape, *, tokens: float, area: float, trains_weights: bool = True) -> float:
    """Forward and backward pass of linear layers, output head and attention.

    Linear layers: one product forward, one backward for the inputs, one for the weights if they are trained: 6 (or 4)
    operations for each weight and token. Adapters are left out; with a small rank they are about a percent. Attention:
    two products forward, four backward. (A flash kernel makes a fifth, the scores once more; it is not needed.)

    Args:
        model (`ModelShape`): dense layers only; experts that are not chosen would be counted.
        tokens (`float`): n, all through the model.
        area (`float`): visible (query, key) pairs, over all layers.
        trains_weights (`bool`): `False` where only adapters are trained.
    """
    per_weight = 6.0 if trains_weights else 4.0
    weights = model.linear_parameters + model.vocab_size * model.hidden_size
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim)
    forward, _ = attention_flops(shape, area)
    return per_weight * weights * tokens + 3 * forward
