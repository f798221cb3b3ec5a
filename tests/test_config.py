from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import HfArgumentParser

from hf_cp.config import ContextParallelConfig, check_heads


def heads(num_heads: int, num_kv_heads: int) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "cp_size", "ulysses_degree"),
    [
        *((32, 32, 8, 8), (32, 8, 8, 8), (28, 4, 4, 4)),  # enough K/V heads: Ulysses alone
        (32, 8, 16, 16),  # K/V heads replicated twice: still less than a ring of 2
        *((64, 8, 4, 1), (32, 1, 8, 1), (8, 1, 4, 1)),  # few K/V heads: a ring alone
        *((64, 8, 8, 8), (64, 8, 16, 16)),
        *((6, 2, 4, 2), (9, 3, 6, 3), (9, 3, 2, 1), (7, 7, 4, 1)),  # heads that do not divide
    ],
)
def test_auto_sends_least(num_heads, num_kv_heads, cp_size, ulysses_degree):
    config = ContextParallelConfig.auto(cp_size, heads(num_heads, num_kv_heads))
    assert (config.ring_degree, config.ulysses_degree) == (cp_size // ulysses_degree, ulysses_degree)
    check_heads(num_heads, num_kv_heads, config)


def test_auto_says_why(caplog):
    with caplog.at_level("INFO"):
        ContextParallelConfig.auto(4, heads(8, 4))
    assert "8 query and 4 K/V heads over 4 processes: ulysses_degree=4, ring_degree=1" in caplog.text


def test_auto_keeps_ulysses_inside_a_node():
    config = ContextParallelConfig.auto(16, heads(32, 16), ranks_per_node=8)
    assert (config.ring_degree, config.ulysses_degree) == (2, 8)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (7, 7)])
def test_a_degree_that_does_not_divide_the_query_heads_is_refused(num_heads, num_kv_heads):
    with pytest.raises(ValueError, match=f"ulysses_degree=4 does not divide the {num_heads} query heads"):
        check_heads(num_heads, num_kv_heads, ContextParallelConfig(ulysses_degree=4))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (8, 2), (8, 1), (12, 3)])
def test_kv_heads_need_not_divide(num_heads, num_kv_heads):
    check_heads(num_heads, num_kv_heads, ContextParallelConfig(ulysses_degree=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ring_degree": 0}, "ring_degree must be a positive integer, got 0"),
        ({"ulysses_degree": 1.5}, "ulysses_degree must be a positive integer"),
        ({"ring_degree": True}, "ring_degree must be a positive integer"),
        ({"layout": "zebra"}, "layout='zebra' does not exist"),
        ({"kernel": "flash"}, "kernel='flash' does not exist"),
        ({"ring_comm": "carrier-pigeon"}, "ring_comm='carrier-pigeon' does not exist"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be positive"),
        ({"timeout_seconds": "90"}, "timeout_seconds must be positive, got '90'"),
        ({"force": "false"}, "force must be True or False"),
        ({"ring_comm": "p2p", "grad_comm_dtype": "compute"}, "would round the sums of dK/dV at every hop"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ContextParallelConfig(**settings)


def test_environment(monkeypatch):
    monkeypatch.setenv("HF_CP_RING_DEGREE", "2")
    monkeypatch.setenv("HF_CP_LAYOUT", "striped")
    monkeypatch.setenv("HF_CP_FORCE", "true")
    monkeypatch.setenv("HF_CP_TIMEOUT_SECONDS", "90")
    config = ContextParallelConfig.from_env(ulysses_degree=2)
    assert config == ContextParallelConfig(2, 2, layout="striped", force=True, timeout_seconds=90.0)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [("HF_CP_RING_DEGREE", "two", "HF_CP_RING_DEGREE='two'"), ("HF_CP_RINGS", "2", "HF_CP_RINGS is not a setting")],
)
def test_bad_environment_is_refused(monkeypatch, key, text, message):
    monkeypatch.setenv(key, text)
    with pytest.raises(ValueError, match=message):
        ContextParallelConfig.from_env()


def test_command_line():
    parser = HfArgumentParser(ContextParallelConfig)
    (config,) = parser.parse_args_into_dataclasses(["--ring_degree", "2", "--layout", "zigzag", "--force"])
    assert config == ContextParallelConfig(2, layout="zigzag", force=True)


@pytest.mark.parametrize(("ulysses_degree", "head_chunks"), [(1, 3), (2, 4), (8, 2)])
def test_head_chunks_must_divide_the_kv_heads_of_a_rank(ulysses_degree, head_chunks):
    config = ContextParallelConfig(ulysses_degree=ulysses_degree, head_chunks=head_chunks)
    with pytest.raises(ValueError, match=f"head_chunks={head_chunks} does not divide"):
        check_heads(16, 4, config)
    check_heads(16, 4, ContextParallelConfig(ulysses_degree=2, head_chunks=2))
