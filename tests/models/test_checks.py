"""Models that cannot be split along the sequence are refused by name."""

from __future__ import annotations

import pytest
from transformers.distributed import DistributedConfig

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.models.patch import context_parallel_state
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"pp_size": 2}, "pp_size=2"),
        ({"fsdp_size": 2}, "fsdp_size=2"),
        ({"ep_size": 2, "fsdp_size": 2}, "ep_size=2, fsdp_size=2"),
    ],
)
def test_split_by_a_distributed_config(sizes, named):
    model = tiny_model()
    model.config.distributed_config = DistributedConfig(**sizes)
    with pytest.raises(ValueError, match=rf"LlamaForCausalLM was split .*\({named}\)"):
        apply_context_parallel(model, ContextParallelConfig(force=True))


def test_tensor_parallel():
    model = tiny_model()
    model._tp_size = 2
    with pytest.raises(ValueError, match=r"\(tp_size=2\)"):
        apply_context_parallel(model, ContextParallelConfig(force=True))


def test_a_distributed_config_of_ones_is_fine():
    model = tiny_model()
    model.config.distributed_config = DistributedConfig(tp_size=1)
    assert context_parallel_state(apply_context_parallel(model, ContextParallelConfig(force=True))) is not None
