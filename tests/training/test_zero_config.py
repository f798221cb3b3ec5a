"""DeepSpeed configs: what is filled in, and what is refused. (What they do is tested in test_zero.py.)"""

from __future__ import annotations

import copy

import pytest

from hf_cp.training.checks import ZeroRun, refuse
from hf_cp.training.deepspeed import (
    GATHER_WEIGHTS,
    complete_zero_config,
    make_zero_config,
)


def run_of(config: dict, *, must_gather: bool = True) -> ZeroRun:
    return ZeroRun(config, 1, 2, world_size=4, mixed_precision="no", must_gather=must_gather)


def test_zero_config():
    config = make_zero_config(2, gradient_clipping=0.0, config={"zero_optimization": {"overlap_comm": False}})
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["communication_data_type"] == "fp32" and config["gradient_clipping"] == 0.0
    assert config["train_batch_size"] == config["gradient_accumulation_steps"] == "auto"
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert not {"mpu", "sequence_parallel_size", "data_parallel_size"} & set(config)


def test_zero_3_saves_whole_weights():
    """Unless it is told not to: that is refused, since a saved model would be empty."""
    for given in ({}, {GATHER_WEIGHTS: "auto"}, {GATHER_WEIGHTS: True}):
        config = make_zero_config(3, gradient_clipping=0.0, config={"zero_optimization": given})
        assert config["zero_optimization"][GATHER_WEIGHTS] is True
        refuse(run_of(config))
    config = make_zero_config(3, gradient_clipping=0.0, config={"zero_optimization": {GATHER_WEIGHTS: False}})
    refuse(run_of(config, must_gather=False))
    with pytest.raises(ValueError, match=rf"(?s){GATHER_WEIGHTS}=False.*to true.*--zero3_save_16bit_model true"):
        refuse(run_of(config))


def test_zero_config_from_file_is_not_changed(tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}')
    assert make_zero_config(3, gradient_clipping=0.5, config=path)["gradient_clipping"] == 0.5
    given = {"zero_optimization": {}}
    before = copy.deepcopy(given)
    make_zero_config(1, gradient_clipping=0.5, config=given)
    assert given == before


@pytest.mark.parametrize(
    ("stage", "config", "message"),
    [
        (4, {}, "zero_stage=4"),
        (2, {"zero_optimization": {"stage": 3}}, r"stage=3, but 2"),
        (2, {"gradient_clipping": 1.0}, r"gradient_clipping=1.0, but 0.0"),
        (2, {"sequence_parallel_size": 2}, "sequence_parallel_size=2"),
        (2, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2"),
        (2, {"communication_data_type": "bf16"}, "communication_data_type='bf16'"),
        (3, {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=true"),
        (3, {"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients=true"),
    ],
)
def test_zero_config_refuses(stage, config, message):
    with pytest.raises(ValueError, match=message):
        make_zero_config(stage, gradient_clipping=0.0, config=config)


def test_batch_sizes():
    """W 4, GA 2: DeepSpeed's own number is 8; others are refused with both numbers."""
    config: dict = {}
    complete_zero_config(config, micro_batch_size=1, gradient_clipping=0.0)
    refuse(run_of(config))
    refuse(run_of({"train_batch_size": 8, "gradient_accumulation_steps": 2}))
    for key, given, expected in (
        ("train_batch_size", 4, 8),
        ("gradient_accumulation_steps", 1, 2),
        ("train_micro_batch_size_per_gpu", 2, 1),
    ):
        with pytest.raises(ValueError, match=rf"{key}={given}, but this run has {expected}"):
            refuse(run_of({key: given}))
