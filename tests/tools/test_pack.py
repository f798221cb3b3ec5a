"""`hf-cp pack`: its numbers against masks made token by token, the loader's own order, and hand counts."""

from __future__ import annotations

import contextlib
import io
import json
import re

import numpy as np
import pytest

from hf_cp.config import ContextParallelConfig
from hf_cp.data.collator import DataCollatorForContextParallel
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.files import documents_of_lengths
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.distributed.communicator import Communicator
from hf_cp.distributed.mesh import ContextParallelMesh
from hf_cp.planning.packing_preview import (
    EngineTraffic,
    ModelAttention,
    PackPreview,
    length_histogram,
    preview_layout,
    replica_balance,
    spread_samples,
)
from hf_cp.sequence.costs import AttentionShape
from hf_cp.sequence.layout import SequenceLayout
from hf_cp.tools import pack
from hf_cp.tools.cli import main
from hf_cp.tools.pack_plot import draw_preview

ROWS = [(40, 3, 17), (60,), (9, 8, 7, 6, 5, 20), (20, 20, 20)]


def call(*options: object) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["pack", *map(str, options)])
    return status, out.getvalue(), err.getvalue()


def visible(layout: SequenceLayout, window: int | None) -> np.ndarray:
    """bool [ring, shard, ring, shard]: which slots see which, token by token."""
    tokens = np.stack([layout.indices(rank).numpy() for rank in range(layout.cp_size)])
    tokens = tokens.reshape(layout.ring_degree, -1)
    docs = np.where(tokens < 0, -1 - np.arange(tokens.size).reshape(tokens.shape),
                    np.searchsorted(layout.doc_starts, tokens, side="right"))  # fmt: skip
    q, k = tokens[:, :, None, None], tokens[None, None]
    seen = (docs[:, :, None, None] == docs[None, None]) & (k <= q) & (q >= 0)
    return seen if window is None else seen & (q - k < window)


@pytest.mark.parametrize("layout", pack.CONCRETE_LAYOUTS)
@pytest.mark.parametrize("window", [None, 6])
def test_a_layout_is_what_a_mask_says(layout, window):
    config = ContextParallelConfig(ring_degree=3, ulysses_degree=2, layout=layout)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8)
    attention = ModelAttention(shape, ((window, 5),))
    found = preview_layout(ROWS, config, attention, layout=layout)
    areas, sent, moved, slots = [], [], [], 0  # sent [rows, R]
    for row in ROWS:
        split = SequenceLayout(row, config)
        seen = visible(split, window)
        areas.append(seen.sum((1, 2, 3)))
        needed = seen.any(1).transpose(1, 0, 2).sum(2)  # [source, destination]
        np.fill_diagonal(needed, 0)
        sent.append(needed.sum(1))
        # a K/V row: 2 x 8 numbers of each of 2 / 2 heads; K/V travel twice in 2 bytes, dK/dV home once in 4
        moved.append(max(16 * (2 * 2 * needed[r].sum() + 4 * needed[:, r].sum()) for r in range(3)))
        slots += split.local_length * 6
    areas, sent = np.array(areas), np.array(sent)
    exchange = {traffic.engine: traffic for traffic in found.traffic}["exchange"]
    assert found.balance == pytest.approx(areas.mean(1).sum() / areas.max(1).sum())
    assert found.worst_balance == pytest.approx((areas.mean(1) / areas.max(1)).min())
    assert found.padding == pytest.approx(1 - sum(map(sum, ROWS)) / slots)
    assert found.areas == pytest.approx(5 * areas.mean(0))
    assert exchange.tokens_by_rank == pytest.approx(sent.mean(0))
    assert exchange.kv_tokens == pytest.approx(sent.max(1).mean())
    assert exchange.num_bytes == pytest.approx(5 * np.mean(moved))
    *_, auto = found.traffic  # each row by its own engine
    alone = [preview_layout([row], config, attention, layout=layout) for row in ROWS]
    taken = [traffic for one in alone for traffic in one.traffic if traffic.engine in one.auto]
    assert auto.engine == "auto" and sum(found.auto.values()) == len(taken) == len(ROWS)
    assert auto.tokens_by_rank == pytest.approx(np.mean([traffic.tokens_by_rank for traffic in taken], axis=0))
    if layout == "document" and window is None:
        assert found.auto == {"p2p": 3, "exchange": 1}  # three documents on three ranks: nothing travels


def test_a_zigzag_by_hand():
    """8 tokens on 2 ranks: [0, 1, 6, 7] and [2, 3, 4, 5]; 18 scores each."""
    config = ContextParallelConfig(ring_degree=2)
    found = preview_layout([(8,)], config, ModelAttention(), layout="zigzag")
    assert (found.balance, found.padding, found.local_length, found.areas) == (1.0, 0.0, 4, (18.0, 18.0))
    # tokens 6 and 7 see 2 to 5, which see 0 and 1
    assert found.traffic[2] == EngineTraffic("exchange", 4.0, 1.0, None, (2.0, 4.0))
    assert found.auto == {"exchange": 1} and found.ulysses_bytes is None


def test_the_picture_shows_every_rank():
    pytest.importorskip("matplotlib")
    config, lengths = ContextParallelConfig(ring_degree=3), sum(ROWS, ())
    layouts = [preview_layout(ROWS, config, ModelAttention(), layout=name) for name in pack.CONCRETE_LAYOUTS]
    preview = PackPreview(
        num_features=13, num_documents=len(lengths), num_tokens=sum(lengths), num_samples=4, longest=60, max_tokens=60,
        fill=1.0, counts={}, histogram=length_histogram(lengths), looked_at=4, layouts=layouts, replicas=None,
    )  # fmt: skip
    _, areas, sent = draw_preview(preview).axes
    for layout, area, rows in zip(layouts, areas.containers, sent.containers, strict=True):
        assert np.array(area.datavalues) * np.mean(layout.areas) == pytest.approx(layout.areas)
        assert tuple(rows.datavalues) == layout.traffic[-1].tokens_by_rank
        assert f"{layout.layout} (balance {layout.balance:.3f})" == area.get_label()


def test_replicas_wait_for_the_costliest_row():
    """As the loader deals rows, not as this code believes it does."""
    documents = documents_of_lengths([100, 90, 30, 30, 40, 10, 10, 10, 60, 55])
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=100)
    packed = PackedDataset(documents, collator=collator)
    found = replica_balance(packed, dp_size=2, num_accumulated=2, seed=7)
    loader = ContextParallelDataLoader(
        documents, collator=collator, comm=Communicator(ContextParallelMesh(ContextParallelConfig())), shuffle=True,
        seed=7, samples_per_step=4,
    )  # fmt: skip
    assert loader.manifest == packed.manifest
    # one process sees the same windows of 4; two ranks take the two costliest first
    costs = [0 if row < 0 else loader.order.costs[row] for row in loader.order.samples(0)]
    means = maxima = 0.0
    for start in range(0, len(costs), 4):
        window = sorted(costs[start : start + 4], reverse=True)
        for step in range(0, len(window), 2):
            means += sum(window[step : step + 2]) / 2
            maxima += window[step]
    assert found.balance == pytest.approx(means / maxima) and found.balance < 1
    assert found.num_micro_steps == -(-len(packed) // 2)


def test_samples_and_bins():
    lengths = [1, 2, 3, 4, 700, 1024]
    bins = length_histogram(lengths)
    assert sum(part.documents for part in bins) == 6 and sum(part.tokens for part in bins) == sum(lengths)
    assert [(part.low, part.high, part.documents) for part in bins if part.documents] == [
        (1, 1, 1), (2, 3, 2), (4, 7, 1), (512, 1023, 1), (1024, 2047, 1),
    ]  # fmt: skip
    collator = DataCollatorForContextParallel(ContextParallelConfig(), max_tokens=50)
    manifest = PackedDataset(documents_of_lengths(range(20, 50)), collator=collator).manifest
    every = sorted(tuple(manifest.lengths[d] for d in row) for row in manifest.samples)
    assert sorted(spread_samples(manifest, 1000)) == every
    few = spread_samples(manifest, 3)
    assert len(few) == 3 and few[0] == min(every, key=lambda row: sum(n * (n + 1) for n in row))


@pytest.fixture
def files(tmp_path):
    """The same documents as token lists and as lengths."""
    lengths = [70, 20, 9, 100, 41, 33, 8, 64]
    rows = [json.dumps({"input_ids": list(range(length))}) for length in lengths]
    (tmp_path / "data.jsonl").write_text("\n".join([*rows, "", '{"input_ids": []}']) + "\n")
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    return tmp_path


def test_the_command(files):
    pytest.importorskip("matplotlib")
    options = ("--max-tokens", "64", "--overflow", "split", "--cp", "4", "--ulysses", "2")
    more = ("--model", "llama-3.1-8b", "--dp", "2", "--plot", files / "p.png", "--json", files / "p.json")
    status, out, _ = call("--data", files / "data.jsonl", *options, *more)
    assert status == 0 and (files / "p.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((files / "p.json").read_text())
    preview = found["preview"]
    assert preview["counts"] == {"empty": 1, "truncated": 0, "split": 2, "dropped": 0}
    assert (preview["num_features"], preview["num_documents"], preview["num_tokens"]) == (9, 10, 345)
    assert found["config"]["ring_degree"] == found["config"]["ulysses_degree"] == 2
    assert "mean/max" in out and "group_by_cost" in out and "document exchange" in out
    assert "1 empty, 2 split" in out and "32 - 63" in out and "####" in out
    collator = DataCollatorForContextParallel(ContextParallelConfig(2, 2), max_tokens=64, overflow="split")
    features = [json.loads(line) for line in (files / "data.jsonl").read_text().splitlines() if line]
    manifest = PackedDataset(features, collator=collator).manifest
    assert preview["fill"] == manifest.fill and preview["num_samples"] == len(manifest.samples)
    by_name = {layout["layout"]: layout for layout in preview["layouts"]}
    first = preview["layouts"][0]
    assert f"full; document with {' and '.join(first['auto'])}: balance {first['balance']:.3f}, " in out
    assert f"sends up to {first['traffic'][-1]['share']:.1%} of a full ring." in out
    for rank, (area, rows) in enumerate(zip(first["areas"], first["traffic"][-1]["tokens_by_rank"], strict=True)):
        assert re.search(rf"^{rank} +{area:,.0f} .* {rows:,.0f}$", out, flags=re.MULTILINE)
    padding = sum(manifest.padding(ContextParallelConfig(2, 2)))
    assert by_name["document"]["padding"] == pytest.approx(padding / (padding + 345))
    # 32 layers, two passes, (u - 1) / u of 2 (32 + 8) heads of 128 numbers of 2 bytes leave for each slot
    slots = (padding + 345) / 4 / len(manifest.samples)
    assert by_name["document"]["ulysses_bytes"] == pytest.approx(32 * 2 * slots * 80 * 128 * 2 / 2)

    status, out, _ = call("--lengths", files / "lengths.txt", *options, "--json", "-", "--layouts", "zigzag")
    by_length = json.loads(out)["preview"]
    assert status == 0 and by_length["fill"] == preview["fill"] and by_length["num_samples"] == preview["num_samples"]
    assert [layout["layout"] for layout in by_length["layouts"]] == ["zigzag"]


def test_text_and_lost_tokens(files, tmp_path):
    from tests.examples.tiny_quickstart import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a" * 30)
    (tmp_path / "text" / "b.md").write_text("b" * 300)
    data = ("--data", tmp_path / "text", "--max-tokens", "64", "--cp", "2")
    status, _, err = call(*data)
    assert status == 2 and "there is no tokenizer" in err and "--tokenizer DIR" in err
    status, out, _ = call(*data, "--overflow", "truncate", "--tokenizer", tmp_path / "tokenizer")
    assert status == 0 and "95, the longest document 64" in out  # 31 with its end token, 64
    assert "1 documents lose tokens" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--cp", "2"), "Feature 0 has 70 tokens, more than max_tokens=64"),
        (("--cp", "6", "--ring", "4"), "--cp 6 is not ring 4 x Ulysses 1"),
        (("--cp", "3", "--ulysses", "3", "--model", "llama-3.1-8b"), "does not divide the 32 query heads"),
        (("--samples", "0"), "--samples 0 is not positive"),
        (("--overflow", "drop", "--plot", "nowhere/p.png"), "nowhere"),
    ],
)
def test_wrong_use(files, options, text):
    status, out, err = call("--data", files / "data.jsonl", "--max-tokens", "64", *options)
    assert status == 2 and text in err and out == ""


def test_what_training_takes_comes_first(files):
    """Though others are more even; these by their balance."""
    (files / "short.txt").write_text("\n".join(map(str, range(10, 0, -1))))
    status, out, _ = call("--lengths", files / "short.txt", "--max-tokens", "55", "--cp", "2", "--json", "-")
    first, *others = json.loads(out)["preview"]["layouts"]
    balances = [layout["balance"] for layout in others]
    assert status == 0 and first["layout"] == "document"
    assert balances == sorted(balances, reverse=True) and first["balance"] < balances[0]


def test_one_process_has_nothing_to_split(files):
    status, out, _ = call("--data", files / "data.jsonl", "--max-tokens", "128")
    assert status == 0 and "Ring axis" not in out and "balance is mean" not in out and "fill" in out
