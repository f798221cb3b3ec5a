"""Step times and rankings: what must be hidden, what cannot be, and which split comes first."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import AutoConfig, MixtralConfig

from hf_cp import ContextParallelConfig, SequenceLayout
from hf_cp.attention.usp import choose_engine
from hf_cp.planning.devices import ASSUMED_ERROR, DEVICES, GIB, MEASURED_ERROR, Device, find_device
from hf_cp.planning.memory import Training
from hf_cp.planning.model_names import MODELS
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.search import SPARE, TIE, Candidate, plan_context_parallel
from hf_cp.planning.step_time import Cluster, RowCost
from hf_cp.sequence.costs import attention_flops, ring_bytes, ulysses_bytes
from hf_cp.sequence.plan import AttentionPlan
from tests.planning.shapes import LLAMA, LLAMA_SHAPE

LORA = Training(lora_r=16)
MISTRAL = AutoConfig.from_pretrained(MODELS / "mistral-7b.json")
PARAMETERS = {  # as published
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_known_models(name):
    shape = ModelShape.from_config(AutoConfig.from_pretrained(MODELS / f"{name}.json"))
    assert shape.num_parameters == PARAMETERS[name]
    assert shape.windows == (((4096 if "mistral" in name else None), shape.num_layers),)


def cost(ring=1, ulysses=1, *, comm="p2p", tokens=65_536, device=None, per_node=8, **training) -> RowCost:
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, ring_comm=comm)
    cluster = Cluster(device or DEVICES["h100"], 16, per_node)
    return RowCost((tokens,), config, LLAMA_SHAPE, Training(**training), cluster)


@pytest.mark.parametrize("comm", ["p2p", "exchange", "allgather"])
def test_bytes_are_those_of_the_formulas(comm):
    row = cost(4, 2, comm=comm, checkpointing="none")
    step, layers = row.step(), 32
    plan = AttentionPlan(row.layout)
    rank = max(range(4), key=plan.area)
    assert step.ring_bytes == layers * sum(ring_bytes(row.shape, plan, rank, comm))
    assert step.ulysses_bytes == layers * 2 * ulysses_bytes(row.shape, local_length=8192, ulysses_degree=2)
    again = cost(4, 2, comm=comm, checkpointing="full").step()  # recomputation repeats the forward pass
    assert again.ring_bytes == step.ring_bytes + layers * ring_bytes(row.shape, plan, rank, comm)[0]
    assert again.ulysses_bytes == 1.5 * step.ulysses_bytes
    kept = cost(4, 2, comm=comm, checkpointing="keep_attention").step()
    assert kept.ring_bytes == step.ring_bytes and kept.seconds < again.seconds
    assert cost(4, 2, comm=comm, checkpointing="offload").step() == kept  # attention's output is kept on the host


def test_compute_is_the_arithmetic_over_the_rates():
    row, area = cost(checkpointing="none"), 65_536 * 65_537 // 2
    block = area**0.5
    flops = sum(attention_flops(row.shape, area)) * 32 * (block + 512) / block
    dense = 6 * (row.model.linear_parameters + 4096 * 128_256) + 2 * 4096 * 128_256  # logits are computed twice
    device = DEVICES["h100"]
    expected = flops / (device.attention_tflops * 1e12) + dense * 65_536 / (device.matmul_tflops * 1e12)
    assert row.step().compute == pytest.approx(expected, rel=1e-3)


def test_a_relay_hides_hops_and_an_all_to_all_hides_nothing():
    slow = dataclasses.replace(DEVICES["h100"], intra_gbs=2.0)
    fast = dataclasses.replace(DEVICES["h100"], intra_gbs=1e6, intra_latency=0.0)
    assert cost(8, device=fast).attention(None).forward.exposed == 0
    assert cost(8, device=slow).attention(None).forward.exposed > 0
    ulysses = cost(1, 8).attention(None)
    assert ulysses.forward.exposed == pytest.approx(
        ulysses.ulysses_bytes / 2 / (DEVICES["h100"].intra_gbs * 1e9) + 14 * DEVICES["h100"].intra_latency
    )


def test_what_arithmetic_does_not_hide():
    """p2p, forward pass: 7 hops beside 8 equal steps of a zigzag ring; nothing hidden adds all of them."""
    device = dataclasses.replace(DEVICES["h100"], intra_overlap=0.25)
    every, some, none = (
        cost(8, device=dataclasses.replace(device, intra_overlap=share)).attention(None).forward
        for share in (1.0, 0.25, 0.0)
    )
    hops = every.ring_bytes / (device.intra_gbs * 1e9) + 7 * device.intra_latency
    assert every.exposed == 0 and none.exposed == pytest.approx(hops) and some.exposed == pytest.approx(0.75 * hops)
    chunked = dataclasses.replace(cost(1, 8, device=device), config=ContextParallelConfig(1, 8, head_chunks=4))
    whole = cost(1, 8, device=device).attention(None).forward.exposed
    assert chunked.attention(None).forward.exposed == pytest.approx(whole * (0.25 + 0.75 * 0.75))


def test_links_between_nodes_are_slower():
    inside, across = cost(2, 1, per_node=8), cost(2, 1, per_node=1)
    assert across.step().exposed > inside.step().exposed
    assert across.step().ring_bytes == inside.step().ring_bytes


def test_groups_that_straddle_nodes_have_the_slow_link():
    cluster = Cluster(DEVICES["h100"], 24, 8)
    assert [cluster.is_in_node(span) for span in (1, 2, 3, 4, 6, 8, 12, 24)] == [
        True, True, False, True, False, True, False, False
    ]  # fmt: skip
    assert cluster.link(3).bytes_per_second == cluster.link(24).bytes_per_second == 45e9
    assert cluster.link(4).bytes_per_second == pytest.approx(337.5e9)
    one_node = Cluster(DEVICES["h100"], 6, 6)
    assert one_node.is_in_node(3) and one_node.is_in_node(6) and not one_node.is_in_node(12)
    straddling = dataclasses.replace(cost(3), cluster=cluster)
    inside = dataclasses.replace(cost(3), cluster=dataclasses.replace(cluster, gpus_per_node=12))
    assert straddling.attention(None).backward.exposed > inside.attention(None).backward.exposed


@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full", "window"])
@pytest.mark.parametrize("doc_lengths", [(65_536,), (30_000, 200, 300), (512,) * 128], ids=len)
@pytest.mark.parametrize("ring", [2, 8])
def test_auto_is_priced_as_what_it_takes(ring, doc_lengths, model):
    config = ContextParallelConfig(ring_degree=ring)
    row = RowCost(doc_lengths, config, ModelShape.from_config(model), Training(), Cluster(DEVICES["h100"], 8, 8))
    plan = AttentionPlan(row.layout, window=row.model.windows[0][0])
    engine = choose_engine(config, plan)
    assert row.engines == (engine,)
    fixed = dataclasses.replace(row, config=dataclasses.replace(config, ring_comm=engine))
    assert row.step() == fixed.step() and row.step().ring_bytes in (0, *(
        sum(layers * sum(ring_bytes(row.shape, plan, rank, engine)) for _, layers in row.model.windows)
        for rank in range(ring)
    ))  # fmt: skip


def test_auto_comes_first_and_others_where_they_differ():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=8, cp_size=8)
    rings = [c for c in plan.candidates if c.config.ring_degree == 4]
    assert [(c.config.ring_comm, c.engines) for c in rings if c.config.ring_comm == "auto"] == [("auto", ("p2p",))]
    assert {c.config.ring_comm for c in rings} == {"auto", "exchange", "allgather"}
    assert [c.config.ring_comm for c in plan.candidates if c.config.ring_degree == 1] == ["auto"]
    assert rings[0].config.ring_comm == "auto" or rings[0].free > rings[-1].free


def test_parts_for_the_own_node_do_not_take_the_slow_link():
    """All-to-all over 16 processes, 8 a node: 8 of 15 parts leave the node. Groups of 3 are not counted on."""
    cluster, device = Cluster(DEVICES["h100"], 16, 8), DEVICES["h100"]
    assert cluster.link_to_all(16, 16).bytes_per_second == pytest.approx(device.inter_gbs * 1e9 * 15 / 8)
    assert cluster.link_to_all(2, 16).bytes_per_second == device.inter_gbs * 1e9  # a ring of 2 with Ulysses 8 inside
    assert cluster.link_to_all(8, 8) == cluster.link(8)
    assert Cluster(device, 24, 8).link_to_all(3, 3).bytes_per_second == device.inter_gbs * 1e9
    equal = dataclasses.replace(device, inter_gbs=device.intra_gbs)
    even = Cluster(equal, 16, 8).link_to_all(16, 16).bytes_per_second
    assert even == pytest.approx(equal.intra_gbs * 1e9 * 15 / 8)


def test_trades_have_a_rate_of_their_own():
    device = dataclasses.replace(DEVICES["h100"], intra_trade_gbs=100.0, intra_trade_latency=1e-3)
    ring, ulysses = cost(8, device=device), cost(1, 8, device=device).attention(None).forward
    assert ring.attention(None) == cost(8).attention(None)
    assert ulysses.exposed == pytest.approx(ulysses.ulysses_bytes / 100e9 + 14 * 1e-3)
    assert Cluster(device, 16, 8).link_to_all(16, 16, for_trades=True).bytes_per_second == pytest.approx(45e9 * 15 / 8)


def test_an_exchange_takes_as_long_as_its_fullest_way():
    """A zigzagged document over 8 ranks: the first one sees all 14 chunks of the others, though 10.5 are sent each."""
    slow = dataclasses.replace(DEVICES["h100"], intra_gbs=0.5, intra_latency=0.0)
    row = cost(8, comm="exchange", device=slow)
    chunk = 65_536 // 16 * 2 * 8 * 128 * 2
    seconds = 14 * chunk / (slow.intra_gbs * 1e9)
    own = row.attention(None).forward
    plan = AttentionPlan(row.layout)
    rank = max(range(8), key=plan.area)
    compute = own.compute * plan.pair_area(rank, rank) / plan.area(rank)
    assert own.exposed == pytest.approx(seconds - compute, rel=1e-3)


def test_documents_are_priced_as_they_are():
    row = dataclasses.replace(cost(8, comm="exchange"), doc_lengths=(512,) * 128)
    assert row.step().ring_bytes == 0  # whole documents stay where they are
    assert row.step().compute < cost(8).step().compute
    balanced = AttentionPlan(SequenceLayout((512,) * 128, row.config))
    assert len({balanced.area(rank) for rank in range(8)}) == 1


def test_windows_are_priced_as_they_are():
    mistral = dataclasses.replace(cost(8, comm="exchange"), model=ModelShape.from_config(MISTRAL))
    full = dataclasses.replace(mistral.model, windows=((None, 32),))
    assert mistral.layers().forward.compute < dataclasses.replace(mistral, model=full).layers().forward.compute / 4
    assert mistral.step().ring_bytes < dataclasses.replace(mistral, model=full).step().ring_bytes


def test_what_does_not_fit_comes_last():
    plan = plan_context_parallel(LLAMA, seq_len=524_288, num_gpus=8, training=LORA)
    fits = [candidate.fits for candidate in plan.candidates]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    assert plan.recommended.ulysses_in_node and plan.recommended.memory.total <= 79.1 * GIB
    assert plan.longest_row > 524_288
    assert {c.dp_size * c.config.cp_size for c in plan.candidates} == {8}


def test_equals_are_decided_by_the_rule():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16)
    ties = plan.ties()
    assert plan.recommended == min(ties, key=lambda c: c.order)
    fastest = max(plan.candidates, key=lambda c: c.tokens_per_second)
    assert all(c in ties for c in plan.candidates if c.tokens_per_second >= (1 - TIE) * fastest.tokens_per_second)
    assert all(c.is_as_fast(fastest) for c in ties)
    assert plan.recommended.config.ulysses_degree == 8 and plan.recommended.config.ring_degree == 2


def test_errors_of_rates_turn_only_what_they_can():
    """Two seconds of arithmetic or of communication more or less, with errors of 25 %."""
    base = plan_context_parallel(LLAMA, seq_len=8192, num_gpus=1).candidates[0]

    def candidate(compute: float, exposed: float, error: float = 0.25) -> Candidate:
        step = dataclasses.replace(base.step, compute=compute, exposed=exposed, error=error * (compute + exposed))
        return dataclasses.replace(base, step=step)

    ten = candidate(10.0, 3.0)
    assert candidate(10.6, 3.0).is_as_fast(ten)  # within 5 %
    assert not candidate(12.0, 3.0).is_as_fast(ten)  # slower at any rate
    assert not candidate(12.0, 4.0).is_as_fast(ten)
    assert candidate(7.0, 7.0).is_as_fast(ten) and ten.is_as_fast(candidate(7.0, 7.0))  # 1 of 7: rates could turn it
    assert not candidate(7.0, 7.0, error=0.05).is_as_fast(candidate(10.0, 3.0, error=0.05))
    assert not candidate(7.0, 9.0).is_as_fast(ten)  # 3 of 9
    waiting = dataclasses.replace(base, step=dataclasses.replace(ten.step, waiting=2.0))
    assert not waiting.is_as_fast(ten)


def test_memory_to_spare_comes_first_among_equals():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=8)
    tight = [c for c in plan.ties() if c.is_tight]
    assert min(plan.ties(), key=lambda c: c.order[1:]) in tight  # the rest of the rule would take this one
    assert not plan.recommended.is_tight and all(0 <= c.free < SPARE for c in tight)
    usable = 0.9 * 79.1 * GIB
    assert all(c.free == pytest.approx(1 - c.memory.total / usable) and c.fits == (c.free >= 0) for c in tight)


def test_longest_rows_fit_and_no_longer_ones():
    plan = plan_context_parallel(LLAMA, seq_len=16_384, num_gpus=4, cp_size=4, training=LORA)
    assert plan.longest_row == max(c.longest_row for c in plan.candidates)
    first = plan.recommended
    for tokens, fits in ((first.longest_row, True), (first.longest_row + 8192, False)):
        again = plan_context_parallel(LLAMA, seq_len=tokens, num_gpus=4, cp_size=4, training=LORA)
        assert [c.fits for c in again.candidates if c.config == first.config] == [fits]


def test_a_measured_device_replaces_the_assumed_one(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps({"device": {"intra_gbs": 1.0, "is_measured": True}}))
    device = find_device("h100", measured=tmp_path / "bench.json")
    assert device.intra_gbs == 1.0 and device.is_measured and device.inter_gbs == DEVICES["h100"].inter_gbs
    (tmp_path / "mine.json").write_text(json.dumps({"base": "a100", "memory_gib": 60}))
    assert find_device(str(tmp_path / "mine.json")).memory_gib == 60
    own = dataclasses.replace(DEVICES["h100"], memory_gib=40.0)
    assert find_device(own, measured=tmp_path / "bench.json") == dataclasses.replace(
        own, intra_gbs=1.0, is_measured=True, measured=device.measured, intra_error=MEASURED_ERROR
    )


def test_a_device_knows_what_was_measured_and_how_well(tmp_path):
    path = tmp_path / "bench.json"
    spread = {"median": 2.0, "p10": 1.8, "p90": 2.2}
    links = [{"in_node": True, "residual": 0.3}, {"in_node": True, "residual": 0.2}, {"in_node": False, "residual": 1}]
    section = {"name": "CPU", "intra_gbs": 1.4, "attention_tflops": 0.0659, "matmul_tflops": 0.0924}
    path.write_text(json.dumps({"device": section, "calibration": {"attention": spread, "links": links}}))
    device = find_device("h100", measured=path)
    names = ("intra_gbs", "inter_gbs", "attention_tflops", "matmul_tflops", "memory_gib")
    assert [device.is_field_measured(name) for name in names] == [True, False, True, True, False]
    errors = (device.attention_error, device.matmul_error, device.intra_error, device.inter_error)
    assert errors == pytest.approx((0.1, MEASURED_ERROR, 0.3, ASSUMED_ERROR))
    assert not any(DEVICES["h100"].is_field_measured(name) for name in names)
    path.write_text(json.dumps({"base": "h100", "memory_gib": 70, "is_measured": True}))
    assert [find_device(str(path)).is_field_measured(name) for name in names] == [False] * 4 + [True]


def test_the_error_of_a_step_is_that_of_its_parts():
    exact = dict.fromkeys(("attention_error", "matmul_error", "intra_error", "inter_error"), 0.0)
    device = dataclasses.replace(DEVICES["h100"], **exact)
    step = cost(2, 8).step()
    assert step.error == pytest.approx(0.25 * step.seconds)
    parts = [cost(2, 8, device=dataclasses.replace(device, **{name: 0.25})).step().error for name in exact]
    assert min(parts[0], parts[1], parts[3]) > 0 and sum(parts) == pytest.approx(step.error)
    assert cost(2, 8, device=device).step().error == 0


@pytest.mark.parametrize(("content", "message"), [("{memory_gib", "is not JSON"), ("[1, 2]", "holds a list")])
def test_files_that_are_no_device_are_named(tmp_path, content, message):
    path = tmp_path / "mine.json"
    path.write_text(content)
    for arguments in ({"which": str(path)}, {"which": "h100", "measured": path}):
        with pytest.raises(ValueError, match=rf"mine\.json {message}.*\n  Give a JSON object with"):
            find_device(**arguments)
    path.write_text('{"base": ["h100"]}')
    with pytest.raises(ValueError, match="There is no device"):
        find_device(str(path))


def test_experts_are_refused():
    """Their weights are no linear layers, and a token sees only some of them: the estimate would be far off."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(num_hidden_layers=2, num_local_experts=4, vocab_size=64, **sizes)
    with pytest.raises(ValueError, match=r"mixtral has experts in 2 of 2 layers"):
        plan_context_parallel(config, seq_len=1024, num_gpus=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus": 0}, "num_gpus must be a positive integer, got 0"),
        ({"cp_size": 3}, "cp_size=3 does not divide 16 GPUs"),
        ({"num_gpus": 12}, r"(?s)12 GPUs with 8 a node are 1 full node and 4 GPUs .*Use 8 or 16 GPUs, or 6 a node"),
        ({"num_gpus": 20}, r"(?s)2 full nodes and 4 GPUs .*Use 16 or 24 GPUs, or 5 a node \(--gpus-per-node 5\)"),
        ({"gpu": "h9000"}, "no device 'h9000'"),
        ({"lengths": [70_000]}, "70,?000"),
        ({"num_gpus": 7, "cp_size": 7, "seq_len": 0}, "seq_len"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_context_parallel(LLAMA, **{"seq_len": 65_536, "num_gpus": 16, **arguments})


def test_devices_are_complete():
    assert all(
        isinstance(d, Device) and d.memory_gib > 0 and d.peak_tflops > d.matmul_tflops for d in DEVICES.values()
    )
