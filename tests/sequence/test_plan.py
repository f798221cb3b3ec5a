from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cp.config import ContextParallelConfig
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.sequence.plan import AttentionPlan, renumber_keys
from hf_cp.sequence.sample import PackedSample
from hf_cp.sequence.tiles import Tile, cut_for_causal_kernel
from tests.attention.reference import visible
from tests.sequence.strategies import configs, doc_lengths

windows = st.one_of(st.none(), st.integers(1, 12))


def band(tile: Tile) -> torch.Tensor:
    """bool [q_len, k_len], spelled out from the definition."""
    offset = torch.arange(tile.k_len) - torch.arange(tile.q_len)[:, None] - (tile.k_len - tile.q_len)
    mask = torch.ones_like(offset, dtype=torch.bool)
    if tile.right is not None:
        mask &= offset <= tile.right
    if tile.left is not None:
        mask &= offset >= -tile.left
    return mask


def ring_shard(layout: SequenceLayout, ring_rank: int) -> torch.Tensor:
    first = ring_rank * layout.ulysses_degree
    return torch.cat([layout.indices(first + u) for u in range(layout.ulysses_degree)])


def covered(layout: SequenceLayout, tiles) -> torch.Tensor:
    """int64 [tokens, tokens]: how often each score is computed; `tiles(q_rank, k_rank)` gives the tiles."""
    count = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int64)
    shards = [ring_shard(layout, rank) for rank in range(layout.ring_degree)]
    for q_rank, queries in enumerate(shards):
        for k_rank, keys in enumerate(shards):
            for tile in tiles(q_rank, k_rank):
                rows, columns = queries[tile.q_slots], keys[tile.k_slots]
                assert (rows >= 0).all() and (columns >= 0).all(), "padding is in the plan"
                count[rows[:, None], columns] += band(tile)
    return count


@given(doc_lengths, configs, st.booleans(), windows)
def test_tiles_cover_every_visible_score_once(lengths, config, causal, window):
    window = window if causal else None
    layout = SequenceLayout(lengths, config)
    plan = AttentionPlan(layout, causal, window)
    expected = visible(lengths, causal, window)
    assert covered(layout, plan.tiles).equal(expected.long())
    area = sum(plan.area(rank) for rank in range(config.ring_degree))
    assert area == int(expected.sum())


@given(doc_lengths, configs, st.booleans(), windows)
def test_tiles_are_trimmed_and_bounds_are_not_negative(lengths, config, causal, window):
    plan = AttentionPlan(SequenceLayout(lengths, config), causal, window if causal else None)
    for q_rank in range(config.ring_degree):
        for k_rank in range(config.ring_degree):
            for tile in plan.tiles(q_rank, k_rank):
                mask = band(tile)
                assert mask.any(0).all() and mask.any(1).all()
                assert tile.area == int(mask.sum())
                assert all(bound is None or bound >= 0 for bound in (tile.left, tile.right))


@given(doc_lengths, configs, st.booleans(), windows)
def test_tiles_cut_for_a_causal_kernel_cover_the_same_scores(lengths, config, causal, window):
    window = window if causal else None
    layout = SequenceLayout(lengths, config)
    plan = AttentionPlan(layout, causal, window)

    def squares(q_rank, k_rank):
        parts = [part for tile in plan.tiles(q_rank, k_rank) for part in cut_for_causal_kernel(tile)]
        assert all(t.is_full or (t.q_len == t.k_len and (t.left, t.right) in ((None, 0), (0, None))) for t in parts)
        return parts

    assert covered(layout, squares).equal(visible(lengths, causal, window).long())


@given(doc_lengths, configs, st.booleans(), windows, st.booleans())
def test_gathered_keys_cover_the_same_scores(lengths, config, causal, window, in_order):
    window = window if causal else None
    layout = SequenceLayout(lengths, config)
    plan = AttentionPlan(layout, causal, window)
    shards = [ring_shard(layout, rank) for rank in range(config.ring_degree)]
    count = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int64)
    for rank, queries in enumerate(shards):
        gathered = plan.gathered(rank, in_order=in_order)
        places = torch.full((config.ring_degree * gathered.slots_per_rank,), -1)
        for other, shard in enumerate(shards):
            rows = plan.shared_slots(other)
            places[other * gathered.slots_per_rank :][: len(rows)] = shard[rows]
        keys = places if gathered.order is None else places[gathered.order]
        for tiles, source in ((gathered.own_tiles, queries), (gathered.tiles, keys)):
            for tile in tiles:
                count[queries[tile.q_slots][:, None], source[tile.k_slots]] += band(tile)
    assert count.equal(visible(lengths, causal, window).long())


def test_keys_in_row_order_need_one_tile_per_run_of_queries():
    plan = AttentionPlan(SequenceLayout([64], ContextParallelConfig(ring_degree=4, layout="zigzag")))
    assert plan.gathered(1, in_order=True).tiles == [Tile(0, 8, 0, 16, None, 0), Tile(8, 8, 0, 56, None, 0)]


@given(doc_lengths, configs)
def test_kv_rows_are_those_that_the_receiver_sees(lengths, config):
    layout = SequenceLayout(lengths, config)
    plan = AttentionPlan(layout)
    mask = visible(lengths)
    for source in range(config.ring_degree):
        for receiver in range(config.ring_degree):
            queries, keys = ring_shard(layout, receiver), ring_shard(layout, source)
            needed = [slot for slot, key in enumerate(keys) if key >= 0 and mask[queries[queries >= 0], key].any()]
            rows = plan.kv_slots(source, receiver)
            assert rows.tolist() == needed
            for tile, moved in zip(
                plan.tiles(receiver, source), renumber_keys(plan.tiles(receiver, source), rows), strict=True
            ):
                assert rows[moved.k_slots].tolist() == list(range(tile.k_start, tile.k_start + tile.k_len))
            if source != receiver:
                assert set(rows) <= set(plan.shared_slots(source))


@pytest.mark.parametrize("ring_degree", [2, 4, 8])
def test_one_zigzag_document_gives_every_rank_the_same_work(ring_degree):
    plan = AttentionPlan(SequenceLayout([8192], ContextParallelConfig(ring_degree=ring_degree)))
    areas = [plan.area(rank) for rank in range(ring_degree)]
    assert max(areas) / min(areas) < 1.01
    assert sum(areas) == 8192 * 8193 // 2


def test_a_zigzag_step_is_one_rectangle():
    plan = AttentionPlan(SequenceLayout([64], ContextParallelConfig(ring_degree=4)))
    assert plan.tiles(2, 2) == [Tile(0, 16, 0, 16, None, 0)]
    assert plan.tiles(2, 1) == [Tile(0, 16, 0, 8, None, None)]
    assert plan.tiles(2, 3) == [Tile(8, 8, 0, 16, None, None)]


def test_a_window_longer_than_every_document_hides_nothing():
    layout = SequenceLayout([8, 5], ContextParallelConfig(ring_degree=2))
    assert AttentionPlan(layout, window=8).window is None
    assert AttentionPlan(layout, window=7).window == 7


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 4)])
def test_impossible_windows_are_refused(causal, window):
    with pytest.raises(ValueError, match=f"window={window}"):
        AttentionPlan(SequenceLayout([8], ContextParallelConfig()), causal, window)


def test_a_layout_keeps_its_plans():
    layout = SequenceLayout([8], ContextParallelConfig(ring_degree=2))
    sample = PackedSample(layout)
    assert sample.attention_plan() is sample.attention_plan()
    assert sample.attention_plan() is not sample.attention_plan(causal=False)


def test_whole_documents_need_no_traffic():
    layout = SequenceLayout([5, 5, 5, 5], ContextParallelConfig(ring_degree=2, layout="document"))
    plan = AttentionPlan(layout)
    assert not plan.needs_traffic and plan.shared_slots(0).size == plan.kv_slots(0, 1).size == 0
    assert AttentionPlan(SequenceLayout([5, 5], ContextParallelConfig(ring_degree=2, layout="zigzag"))).needs_traffic
