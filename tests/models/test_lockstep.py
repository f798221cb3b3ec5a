"""Rows that come straight from the collator, where every module call gathers weights from the whole world (ZeRO-3)."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hf_cp import ContextParallelConfig, apply_context_parallel
from hf_cp.models.patch import context_parallel_state
from hf_cp.sequence.layout import SequenceLayout
from tests.models.tiny import Row, tiny_model

RING2 = ContextParallelConfig(ring_degree=2, loss_chunk_tokens=5, mlp_chunk_tokens=7)
LENGTHS = ((13, 9), (30, 11))  # of the two groups' rows: 11 and 21 slots on each rank


def module_calls(is_partitioned: bool, wrong_rank: int | None = None) -> tuple[int, int]:
    """Calls of the head and of the first gate in a step of this group's row."""
    model = apply_context_parallel(tiny_model(), RING2)
    if is_partitioned:
        next(model.parameters()).ds_id = 0  # as DeepSpeed marks them
    mesh, counts = context_parallel_state(model).mesh, [0, 0]
    for place, module in enumerate((model.lm_head, model.model.layers[0].mlp.gate_proj)):
        module.register_forward_hook(lambda *_, place=place: counts.__setitem__(place, counts[place] + 1))
    lengths = LENGTHS[mesh.dp_rank]
    batch = Row(lengths).local_batch(SequenceLayout(lengths, RING2), mesh.cp_rank)
    if dist.get_rank() == wrong_rank:
        batch["shift_labels"] = batch["shift_labels"][:, :-1]
    model(**batch).loss.backward()
    return tuple(counts)


@pytest.mark.distributed
def test_groups_of_unequal_rows_call_modules_equally_often(world4):
    """21 slots: 5 chunks of the head, 3 of the MLP; all are called again in the backward pass."""
    assert world4.run(module_calls, True) == [(10, 6)] * 4
    assert world4.run(module_calls, False) == [(6, 4)] * 2 + [(10, 6)] * 2  # 11 slots: 3 and 2


@pytest.mark.distributed
def test_a_bad_batch_ends_all_groups(world4):
    for error in world4.run(module_calls, True, 3, expect_error=True):
        assert "1 of 4 ranks could not make their sample" in error.message and "rank 3: ValueError" in error.message
