"""A packed sample is a frozen value, which wrappers around a model leave as it is."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors  # how FSDP casts what a module is given

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.sample import PackedSample, replace

SAMPLE = PackedSample(SequenceLayout([5, 3], ContextParallelConfig(ring_degree=2)), cp_rank=1, digest=-7)


def test_nothing_is_written_into_it():
    with pytest.raises(AttributeError, match=r"replace\(sample, micro_step="):
        SAMPLE.micro_step = 3
    later = replace(SAMPLE, micro_step=3)
    assert (SAMPLE.micro_step, later.micro_step, later.digest) == (None, 3, -7)
    assert later != SAMPLE and replace(later, micro_step=None) == SAMPLE
    assert later.attention_plan() is SAMPLE.attention_plan()


def test_it_travels_to_workers_and_through_fsdp():
    assert pickle.loads(pickle.dumps(SAMPLE)) == SAMPLE
    given = {"input_ids": torch.ones(1), "hf_cp_sample": SAMPLE, "hf_cp_layout": SAMPLE.layout}
    cast = _apply_to_tensors(lambda tensor: tensor.double(), given)
    assert cast["hf_cp_sample"] is SAMPLE and cast["hf_cp_layout"] is SAMPLE.layout


def test_a_layout_is_frozen():
    assert (
        SAMPLE.layout
        == SequenceLayout([5, 3], ContextParallelConfig(ring_degree=2))
        != SequenceLayout([5], ContextParallelConfig())
    )
    with pytest.raises(AttributeError, match="frozen, so micro_step cannot be set"):
        SAMPLE.layout.micro_step = 1
