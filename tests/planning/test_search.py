"""Step times and rankings: what must be hidden, what cannot be, and which split comes first."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from transformers import AutoConfig, MixtralConfig

from hf_cp import ContextParallelConfig, SequenceLayout
from hf_cp.planning.devices import DEVICES, GIB, Device, find_device
from hf_cp.planning.memory import Training
from hf_cp.planning.model_shape import ModelShape
from hf_cp.planning.search import TIE, plan_context_parallel
from hf_cp.planning.step_time import Cluster, RowCost
from hf_cp.sequence.costs import attention_flops, ring_bytes, ulysses_bytes
from hf_cp.sequence.plan import AttentionPlan
from hf_cp.tools.plan import MODELS

LLAMA = AutoConfig.from_pretrained(MODELS / "llama-3.1-8b.json")
MISTRAL = AutoConfig.from_pretrained(MODELS / "mistral-7b.json")
PARAMETERS = {  # as published
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
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
    return RowCost((tokens,), config, ModelShape.from_config(LLAMA), Training(**training), cluster)


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
    plan = plan_context_parallel(LLAMA, seq_len=524_288, num_gpus=16, training=Training(lora_r=16))
    fits = [candidate.fits for candidate in plan.candidates]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    assert plan.recommended.ulysses_in_node and plan.recommended.memory.total <= 79.1 * GIB
    assert plan.longest_row > 524_288
    assert {c.dp_size * c.config.cp_size for c in plan.candidates} == {16}


def test_equals_are_decided_by_the_rule():
    plan = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16)
    ties = plan.ties()
    assert plan.recommended == min(ties, key=lambda c: c.order)
    fastest = max(c.tokens_per_second for c in plan.candidates)
    assert all(c.tokens_per_second >= (1 - TIE) * fastest for c in ties)
    assert plan.recommended.config.ulysses_degree == 8 and plan.recommended.config.ring_degree == 2


def test_packed_lengths_change_the_answer():
    lengths = np.random.default_rng(0).integers(500, 2000, 3000).tolist()
    single = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16)
    packed = plan_context_parallel(LLAMA, seq_len=131_072, num_gpus=16, cp_size=16, lengths=lengths)
    assert packed.num_documents == 3000 and packed.num_rows == -(-sum(lengths) // 131_072)
    best = max((c for c in packed.candidates if c.fits), key=lambda c: c.tokens_per_second)
    assert best.config.ring_degree > 2 and best.config.ring_comm == "exchange"
    assert packed.recommended.tokens_per_second > single.recommended.tokens_per_second


def test_a_measured_device_replaces_the_assumed_one(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps({"device": {"intra_gbs": 1.0, "is_measured": True}}))
    device = find_device("h100", measured=tmp_path / "bench.json")
    assert device.intra_gbs == 1.0 and device.is_measured and device.inter_gbs == DEVICES["h100"].inter_gbs
    (tmp_path / "mine.json").write_text(json.dumps({"base": "a100", "memory_gib": 60}))
    assert find_device(str(tmp_path / "mine.json")).memory_gib == 60
    own = dataclasses.replace(DEVICES["h100"], memory_gib=40.0)
    assert find_device(own, measured=tmp_path / "bench.json") == dataclasses.replace(
        own, intra_gbs=1.0, is_measured=True
    )


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
