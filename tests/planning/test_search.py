"""Step times and rankings: what must be hidden, what cannot be, and which split comes first."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, MixtralConfig

from hf_cp import ContextParallelConfig, SequenceLayout
from hf_cp.data.manifest import PackingManifest
from hf_cp.planning.devices import DEVICES, GIB, Cluster, Device, find_device
from hf_cp.planning.memory import Training
from hf_cp.planning.model_names import MODELS
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.packing_preview import spread_samples
from hf_cp.planning.search import (
    ERROR,
    PRICED_SAMPLES,
    SPARE,
    SPEED_STEP,
    Candidate,
    Plan,
    _mean_step,
    plan_context_parallel,
)
from hf_cp.planning.step_time import AttentionCost, Cost, SampleCost
from hf_cp.sequence.costs import attention_flops, choose_engine, ring_bytes, ulysses_bytes
from hf_cp.sequence.packing import pack_documents
from hf_cp.sequence.plan import AttentionPlan
from tests.planning.shapes import LLAMA, LLAMA_SHAPE

ROOT = Path(__file__).resolve().parents[2]
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


def cost(
    ring=1, ulysses=1, *, comm="p2p", lengths=(65_536,), device=None, per_node=8, gpus=16, chunks=1, model=LLAMA_SHAPE,
    **training,
) -> SampleCost:  # fmt: skip
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, ring_comm=comm, head_chunks=chunks)
    cluster = Cluster(device or DEVICES["h100"], gpus, per_node)
    return SampleCost.of(lengths, config, model, Training(**training), cluster)


def layer(*args, **kwargs) -> AttentionCost:
    """One layer of full attention."""
    sample = cost(*args, **kwargs)
    return sample.attention(sample.plans[0])


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


def test_a_ring_hides_hops_and_an_all_to_all_hides_nothing():
    slow = dataclasses.replace(DEVICES["h100"], intra_gbs=2.0)
    fast = dataclasses.replace(DEVICES["h100"], intra_gbs=1e6, intra_latency=0.0)
    assert layer(8, device=fast).forward.exposed == 0
    assert layer(8, device=slow).forward.exposed > 0
    ulysses = layer(1, 8)
    assert ulysses.forward.exposed == pytest.approx(
        ulysses.total.ulysses_bytes / 2 / (DEVICES["h100"].intra_gbs * 1e9) + 14 * DEVICES["h100"].intra_latency
    )


def test_what_arithmetic_does_not_hide():
    """p2p, forward pass: 7 hops beside 8 equal steps of a zigzag ring; nothing hidden adds all of them."""
    device = dataclasses.replace(DEVICES["h100"], intra_overlap=0.25)
    every, some, none = (
        layer(8, device=dataclasses.replace(device, intra_overlap=share)).forward for share in (1.0, 0.25, 0.0)
    )
    hops = every.ring_bytes / (device.intra_gbs * 1e9) + 7 * device.intra_latency
    assert every.exposed == 0 and none.exposed == pytest.approx(hops) and some.exposed == pytest.approx(0.75 * hops)
    whole = layer(1, 8, device=device).forward.exposed
    assert layer(1, 8, device=device, chunks=4).forward.exposed == pytest.approx(whole * (0.25 + 0.75 * 0.75))


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
    straddling, inside = (layer(3, gpus=24, per_node=per_node) for per_node in (8, 12))
    assert straddling.backward.exposed > inside.backward.exposed


@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full", "window"])
@pytest.mark.parametrize("doc_lengths", [(65_536,), (30_000, 200, 300), (512,) * 128], ids=len)
@pytest.mark.parametrize("ring", [2, 8])
def test_auto_is_priced_as_what_it_takes(ring, doc_lengths, model):
    config = ContextParallelConfig(ring_degree=ring)
    shape = ModelShape.from_config(model)
    row = SampleCost.of(doc_lengths, config, shape, Training(), Cluster(DEVICES["h100"], 8, 8))
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


def test_all_to_alls_have_a_rate_of_their_own():
    device = dataclasses.replace(DEVICES["h100"], intra_trade_gbs=100.0, intra_trade_latency=1e-3)
    ulysses = layer(1, 8, device=device).forward
    assert layer(8, device=device) == layer(8)
    assert ulysses.exposed == pytest.approx(ulysses.ulysses_bytes / 100e9 + 14 * 1e-3)
    assert Cluster(device, 16, 8).link_to_all(16, 16, for_all_to_all=True).bytes_per_second == pytest.approx(
        45e9 * 15 / 8
    )


def test_an_exchange_takes_as_long_as_its_fullest_way():
    """A zigzagged document over 8 ranks: the first one sees all 14 chunks of the others, though 10.5 are sent each."""
    slow = dataclasses.replace(DEVICES["h100"], intra_gbs=0.5, intra_latency=0.0)
    row = cost(8, comm="exchange", device=slow)
    chunk = 65_536 // 16 * 2 * 8 * 128 * 2
    seconds = 14 * chunk / (slow.intra_gbs * 1e9)
    plan = row.plans[0]
    own = row.attention(plan).forward
    rank = max(range(8), key=plan.area)
    compute = own.compute * plan.pair_area(rank, rank) / plan.area(rank)
    assert own.exposed == pytest.approx(seconds - compute, rel=1e-3)


def test_documents_are_priced_as_they_are():
    row = cost(8, comm="exchange", lengths=(512,) * 128)
    assert row.step().ring_bytes == 0  # whole documents stay where they are
    assert row.step().compute < cost(8).step().compute
    balanced = AttentionPlan(SequenceLayout((512,) * 128, row.config))
    assert len({balanced.area(rank) for rank in range(8)}) == 1


def test_windows_are_priced_as_they_are():
    mistral = cost(8, comm="exchange", model=ModelShape.from_config(MISTRAL))
    full = cost(8, comm="exchange", model=dataclasses.replace(mistral.model, windows=((None, 32),)))
    assert mistral.layers().forward.compute < full.layers().forward.compute / 4
    assert mistral.step().ring_bytes < full.step().ring_bytes


def test_what_does_not_fit_comes_last():
    plan = plan_context_parallel(LLAMA, seq_len=524_288, num_gpus=8, training=LORA)
    fits = [candidate.fits for candidate in plan.candidates]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    assert plan.recommended.ulysses_in_node and plan.recommended.memory.total <= 79.1 * GIB
    assert plan.longest_document > 524_288
    assert {c.dp_size * c.config.cp_size for c in plan.candidates} == {8}


def same_speed(plan: Plan) -> list[Candidate]:
    """Those that fit and are no slower than `SPEED_STEP` below the fastest."""
    fitting = [c for c in plan.candidates if c.fits]
    fastest = max(c.tokens_per_second for c in fitting)
    return [c for c in fitting if c.tokens_per_second > (1 - SPEED_STEP) * fastest]


def test_between_equals_the_rule_decides():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16)
    ties = same_speed(plan)
    assert plan.recommended == min(ties, key=lambda c: c.order) and 1 < len(ties) < len(plan.candidates)
    assert plan.candidates[: len(ties)] == tuple(sorted(ties, key=lambda c: c.order))
    assert plan.recommended.config.ulysses_degree == 8 and plan.recommended.config.ring_degree == 2


def test_memory_to_spare_comes_first_among_equals():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=8)
    tight = [c for c in same_speed(plan) if c.is_tight]
    assert min(same_speed(plan), key=lambda c: c.order[1:]) in tight  # the rest of the rule would take this one
    assert not plan.recommended.is_tight and all(0 <= c.free < SPARE for c in tight)
    usable = 0.9 * 79.1 * GIB
    assert all(c.free == pytest.approx(1 - c.memory.total / usable) and c.fits == (c.free >= 0) for c in tight)


def test_longest_documents_fit_and_no_longer_ones():
    plan = plan_context_parallel(LLAMA, seq_len=16_384, num_gpus=4, cp_size=4, training=LORA)
    assert plan.longest_document == max(c.longest_document for c in plan.candidates)
    first = plan.recommended
    for tokens, fits in ((first.longest_document, True), (first.longest_document + 8192, False)):
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
        own, intra_gbs=1.0, is_measured=True, measured=device.measured
    )


def test_a_device_knows_what_was_measured(tmp_path):
    path = tmp_path / "bench.json"
    section = {"name": "CPU", "intra_gbs": 1.4, "attention_tflops": 0.0659, "matmul_tflops": 0.0924}
    path.write_text(json.dumps({"device": section}))
    device = find_device("h100", measured=path)
    names = ("intra_gbs", "inter_gbs", "attention_tflops", "matmul_tflops", "memory_gib")
    assert [device.is_field_measured(name) for name in names] == [True, False, True, True, False]
    assert not any(DEVICES["h100"].is_field_measured(name) for name in names)
    path.write_text(json.dumps({"base": "h100", "memory_gib": 70, "is_measured": True}))
    assert [find_device(str(path)).is_field_measured(name) for name in names] == [False] * 4 + [True]


def test_the_error_is_what_measurements_show():
    """Of the attention cases that were measured and priced with measured rates, nine of ten are within it."""
    content = json.loads((ROOT / "docs" / "benchmarks" / "plan_vs_bench.json").read_text())
    ratios = [case["estimated"] / case["measured"]["median"] for case in content["cases"]]
    within = sum(abs(ratio - 1) <= ERROR for ratio in ratios)
    assert (within, len(ratios)) == (36, 40)


MAX_TOKENS = 32_768
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.2, 1200).clip(16, MAX_TOKENS).astype(int).tolist()


def packed(lengths: list[int]) -> PackingManifest:
    return PackingManifest(tuple(lengths), tuple(map(tuple, pack_documents(lengths, MAX_TOKENS))), MAX_TOKENS)


def test_a_few_samples_tell_the_mean_of_all():
    manifest = packed(LENGTHS)
    few, every = (
        [cost(2, comm="auto", lengths=lengths) for lengths in spread_samples(manifest, count)]
        for count in (PRICED_SAMPLES, 10**6)
    )
    mean, steps = _mean_step(few, manifest), [sample.step() for sample in every]
    assert len(few) < len(every) == len(manifest.samples)
    for name in ("compute", "seconds"):
        assert getattr(mean, name) == pytest.approx(np.mean([getattr(step, name) for step in steps]), rel=0.02), name


def test_an_almost_empty_last_sample_counts_once():
    """10 full ones and one of a single token: the mean is 10/11 of a full one's tokens, a step's time within 10 %."""
    plan = plan_context_parallel(LLAMA, seq_len=MAX_TOKENS, num_gpus=2, cp_size=2, lengths=[4096] * 80 + [1])
    full = plan_context_parallel(LLAMA, seq_len=MAX_TOKENS, num_gpus=2, cp_size=2, lengths=[4096] * 80)
    assert (plan.num_samples, full.num_samples) == (11, 10)
    one, other = (p.candidates[0] for p in (plan, full))
    assert one.tokens_per_second * one.step.seconds * 2 == pytest.approx((10 * MAX_TOKENS + 1) / 11)
    assert one.step.seconds == pytest.approx(other.step.seconds, rel=0.1)


def test_costs_add_up():
    assert Cost(1.0, 2.0, 3.0, 4.0) + Cost(1.0) * 2 == Cost(3.0, 2.0, 3.0, 4.0)


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
