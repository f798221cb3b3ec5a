"""What a backend or a wrapper does to dropout and to 4-bit weights when a row is shared.

Trajectories of DDP and FSDP 2 are in tests/equivalence/test_backends.py, those of ZeRO in test_zero.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cp.config import ContextParallelConfig
from tests.models.tiny import tiny_model
from tests.training.tiny import REF, RecordingTrainer, make_documents, make_trainer, relative, with_adapters

pytestmark = pytest.mark.distributed

RING = ContextParallelConfig(2)


# Dropout


def dropout_masks(use_reentrant: bool) -> list[list[bool]]:
    """What LoRA's dropout in layer 0 drops in one micro-step with checkpointing: in the forward, when recomputed."""
    model = with_adapters(tiny_model(), dropout=0.5)
    dropout = model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"]
    masks = []
    dropout.register_forward_hook(lambda module, args, out: masks.append((out == 0).flatten().tolist()))
    trainer = make_trainer(
        model,
        RING,
        make_documents([32]),
        max_steps=1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant},
        ddp_find_unused_parameters=False,
    )
    trainer.train()
    return masks


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_differs_between_peers_and_not_when_recomputed(world2, use_reentrant):
    first, second = world2.run(dropout_masks, use_reentrant)
    for forward, recomputed in (first, second):
        assert forward == recomputed
        assert 0.3 < sum(forward) / len(forward) < 0.7
    assert first[0] != second[0]


# 4-bit weights (QLoRA)


def load_in_4_bits(folder: str) -> Any:
    """All linear layers of the decoder in nf4, computed in fp32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": "cpu"})


class _AdapterRecorder(RecordingTrainer):
    """Keeps the gradients of the first step; the losses are kept already."""

    gradients: dict[str, torch.Tensor] | None = None

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        named = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients = self.gradients or {name: p.grad.clone() for name, p in named.items()}
        return loss


def train_in_4_bits(config: ContextParallelConfig, folder: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses of three steps, adapters' gradients of the first, and the type of a frozen layer's weight."""
    model = with_adapters(load_in_4_bits(folder))
    trainer = make_trainer(model, config, make_documents([30, 21, 11, 17, 14, 9]), trainer_class=_AdapterRecorder)
    trainer.train()
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    return trainer.step_losses(), trainer.gradients, f"{type(weight).__name__} {weight.dtype}"


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_4_bit_weights(world1, world2, tmp_path: Path):
    """Context parallelism replaces attention and loss only: a quantized model trains as in one process, in fp32."""
    tiny_model(dtype=torch.float32, hidden_size=64).save_pretrained(tmp_path)
    ((losses, gradients, kind),) = world1.run(train_in_4_bits, REF, str(tmp_path))
    assert kind == "Params4bit torch.uint8" and len(gradients) == 28
    for config in (RING, ContextParallelConfig(1, 2)):
        for found_losses, found_gradients, found_kind in world2.run(train_in_4_bits, config, str(tmp_path)):
            assert found_kind == kind
            assert found_losses == pytest.approx(losses, rel=1e-5)
            for name, gradient in gradients.items():
                assert relative(found_gradients[name], gradient) < 1e-4, name
