"""Needed operations against what torch counts while a model trains."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_cp.planning.devices import device_of_gpu
from hf_cp.planning.flops import training_flops
from hf_cp.planning.model_shape import ModelShape
from tests.models.tiny import tiny_model

LENGTH = 24


def counted(trains_weights: bool) -> tuple[int, ModelShape]:
    model = tiny_model(dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, 64, (1, LENGTH))
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.requires_grad_(trains_weights)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs, labels=ids).loss.backward()
    return counter.get_total_flops(), ModelShape.from_config(model.config)


@pytest.mark.parametrize("trains_weights", [True, False])
def test_operations_of_a_tiny_model(trains_weights):
    """Exactly; the eager kernel computes hidden scores too."""
    total, shape = counted(trains_weights)
    area = shape.num_layers * LENGTH**2
    assert total == training_flops(shape, tokens=LENGTH, area=area, trains_weights=trains_weights)


@pytest.mark.parametrize(
    ("name", "gigabytes", "device"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H100 PCIe", 85, None),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 85, "a100"),
        ("NVIDIA B200", 190, "b200"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA L40", 48, None),
        ("NVIDIA GeForce RTX 4090", 25, "rtx4090"),
        ("Tesla T4", 16, None),
    ],
)
def test_devices_by_the_name_of_the_gpu(name, gigabytes, device):
    found = device_of_gpu(name, gigabytes * 10**9)
    assert (None if found is None else found.name) == device
