"""A model whose token losses are known: the loss of a target depends only on its input token.

Layers add nothing (their output projections are zero), embeddings are one-hot, and the head gives token `t` the logits
for which the cross-entropy of target `TARGET` is `LOSSES[t]`.
"""

from __future__ import annotations

import math

import torch

from tests.models.tiny import VOCAB_SIZE
from tests.training.tiny import make_model

TARGET = 1
LOSS_2, LOSS_4 = 2, 3  # token ids with a loss of 2 and of 4
LOSSES = {LOSS_2: 2.0, LOSS_4: 4.0}


def make_fixed_loss_model(dtype: torch.dtype = torch.float64):
    model = make_model(
        hidden_size=VOCAB_SIZE, num_hidden_layers=1, num_attention_heads=4, rms_norm_eps=0.0, dtype=dtype
    )
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE))
        model.lm_head.weight.zero_()
        scale = math.sqrt(VOCAB_SIZE)  # what the last norm makes of a one-hot vector
        for token, loss in LOSSES.items():
            # loss = log(1 + (V - 1) exp(-x)), where x is the target's logit and the others are 0
            model.lm_head.weight[TARGET, token] = -math.log((math.exp(loss) - 1) / (VOCAB_SIZE - 1)) / scale
    return model


def make_document(tokens: list[int], targets: list[bool]) -> dict[str, list[int]]:
    """`targets[i]`: whether the slot of `tokens[i]` has a target (the last one cannot)."""
    labels = [-100] + [TARGET if is_target else -100 for is_target in targets[:-1]]
    return {"input_ids": tokens, "labels": labels}
