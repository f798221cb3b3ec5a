"""Every kernel, call by call, against dense attention; GPU kernels with stand-ins for the operators they call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_cp.attention import usp
from hf_cp.attention.kernels import (
    AtenFlashKernel,
    BackwardInputs,
    CpuFlashKernel,
    EagerKernel,
    FlashAttn3Kernel,
    FlashAttnKernel,
    TensorKind,
    choose_kernel,
    fast_kernels,
    kernel_calls,
)
from hf_cp.sequence.tiles import Tile
from tests.attention import flash_stand_in
from tests.attention.cases import Case, errors
from tests.attention.reference import random_row
from tests.sequence.test_plan import band

CPU = torch.device("cpu")
SQUARES = [
    Tile(0, 6, 0, 6, None, 0), Tile(0, 6, 0, 9, None, None), Tile(0, 9, 0, 4, None, None), Tile(0, 1, 0, 1, None, 0),
    Tile(0, 5, 0, 5, 0, None),
]  # fmt: skip
BANDS = [
    Tile(0, 4, 0, 9, None, 0), Tile(0, 6, 0, 6, 2, 0), Tile(0, 6, 0, 8, 1, 1), Tile(0, 3, 0, 6, 2, None),
    Tile(0, 7, 0, 7, None, 3),
]  # fmt: skip


FLASH = ("flash_attn", "flash_attn_3", "aten")


def install(monkeypatch, name: str, **content) -> ModuleType:
    """Makes `import name` find a module with this content."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(scope="module")
def flash_3_operators() -> Iterator[None]:
    library = flash_stand_in.register_flash_3()
    yield
    library._destroy()


@pytest.fixture
def stand_ins(monkeypatch, flash_3_operators):
    """Packages `flash_attn` and `flash_attn_interface` of the right signatures, and the GPU kernels on the CPU."""
    interface = install(
        monkeypatch,
        "flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=flash_stand_in.flash_attn_varlen_forward,
        _flash_attn_varlen_backward=flash_stand_in.flash_attn_varlen_backward,
    )
    install(monkeypatch, "flash_attn", flash_attn_interface=interface)
    install(monkeypatch, "flash_attn_interface")
    aten = AtenFlashKernel()
    aten._forward, aten._backward = flash_stand_in.aten_flash_forward, flash_stand_in.aten_flash_backward
    return {"flash_attn": FlashAttnKernel(), "flash_attn_3": FlashAttn3Kernel(), "aten": aten}


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def dense(q, k, v, tiles):
    """(out, lse) of tiles that share neither queries nor keys."""
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for tile in tiles:
        visible[tile.q_slots, tile.k_slots] |= band(tile)
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(repeat, 1)) * 0.3
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(repeat, 1)), scores.logsumexp(-1).T


def check_calls(kernel, tiles, num_kv_heads: int, num_calls: int | None = None) -> None:
    """Forward and backward of the calls that `tiles` need, against dense attention; they must cover all queries."""
    num_queries, num_keys = max(t.q_slots.stop for t in tiles), max(t.k_slots.stop for t in tiles)
    q, k, v, grad_out = random_row(max(num_queries, num_keys), 4, num_kv_heads, 8)
    q, grad_out = q[:num_queries].requires_grad_(), grad_out[:num_queries]
    k, v = (x[:num_keys].requires_grad_() for x in (k, v))
    expected_out, expected_lse = dense(q, k, v, tiles)
    expected_out.backward(grad_out)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=q.dtype)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    groups = kernel_calls(tiles, kernel, CPU)
    assert num_calls is None or len(groups) == num_calls
    with torch.no_grad():
        for group in groups:
            rows = (q[group.q_index], k[group.k_index], v[group.k_index])
            out[group.q_index], lse[group.q_index] = kernel.forward(*rows, group=group, scale=0.3)
        for group in groups:
            rows = (grad_out[group.q_index], q[group.q_index], k[group.k_index], v[group.k_index])
            inputs = BackwardInputs(*rows, out[group.q_index], lse[group.q_index])
            parts = kernel.backward(inputs, group=group, scale=0.3)
            for grad, slots, part in zip(grads, (group.q_index, group.k_index, group.k_index), parts, strict=True):
                grad[slots] += part
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)
    for grad, leaf in zip(grads, (q, k, v), strict=True):
        assert torch.allclose(grad, leaf.grad, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tile", SQUARES, ids=str)
def test_cpu_flash(tile, num_kv_heads):
    check_calls(CpuFlashKernel(), [tile], num_kv_heads, num_calls=1)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tile", SQUARES + BANDS, ids=str)
def test_eager(tile, num_kv_heads):
    check_calls(EagerKernel(), [tile], num_kv_heads, num_calls=1)


def test_the_reference_hides_no_nan():
    q, k, v = (torch.randn(4, 2, 8) for _ in range(3))
    k[1] = torch.nan
    (group,) = kernel_calls([Tile(0, 4, 0, 4, None, 0)], EagerKernel(), CPU)
    out, _ = EagerKernel().forward(q, k, v, group=group, scale=1.0)
    assert out[0].isfinite().all() and out[1:].isnan().all()


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tile", SQUARES + BANDS, ids=str)
def test_flash_with_stand_ins(stand_ins, name, tile, num_kv_heads):
    check_calls(stand_ins[name], [tile], num_kv_heads, num_calls=1)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3"])
def test_the_backward_pass_is_deterministic_where_torch_is_told_so(stand_ins, name):
    with deterministic():  # the stand-ins compare the flag that they get with torch's
        check_calls(stand_ins[name], DOCUMENTS, 2)


DOCUMENTS = [Tile(0, 4, 0, 4, None, 0), Tile(4, 3, 4, 3, None, 0), Tile(7, 5, 7, 5, None, 0)]
APART = [Tile(0, 4, 2, 4, None, 0), Tile(4, 3, 8, 5, None, 0), Tile(7, 2, 6, 2, None, 0)]
MIXED = [Tile(0, 4, 0, 4, None, 0), Tile(4, 3, 4, 5, None, None), Tile(7, 5, 9, 5, None, 0)]


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize(("tiles", "num_calls"), [(DOCUMENTS, 1), (APART, 2), (MIXED, 2)])
def test_many_tiles_in_one_call(stand_ins, name, tiles, num_calls):
    check_calls(stand_ins[name], tiles, 2, num_calls)


def test_a_call_has_tiles_of_similar_length_and_not_too_many(stand_ins):
    """flash-attn starts work for every tile as if it were the longest, and has a workspace per tile."""
    lengths = [100, 5000, 50, 200] + [10] * 600
    starts = np.cumsum([0, *lengths])
    tiles = [Tile(int(start), n, int(start), n, None, 0) for start, n in zip(starts, lengths, strict=False)]
    groups = kernel_calls(tiles, stand_ins["aten"], CPU)
    assert sorted(len(group.tiles) for group in groups) == [1, 91, 256, 256]
    assert {tile.q_len for group in groups for tile in group.tiles if len(group.tiles) == 1} == {5000}
    for group in groups:
        rows = np.arange(sum(lengths))[group.q_slots]
        assert rows.tolist() == [s for t in group.tiles for s in range(t.q_start, t.q_start + t.q_len)]
        assert group.area == sum(tile.area for tile in group.tiles)


def test_neighbouring_rows_are_not_copied(stand_ins):
    (group,) = kernel_calls(DOCUMENTS, stand_ins["aten"], CPU)
    assert group.q_index == group.k_index == slice(0, 12)
    assert group.varlen.cu_seqlens_q.tolist() == [0, 4, 7, 12] and group.varlen.max_seqlen_q == 5


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("ring_comm", ["p2p", "allgather", "exchange"])
def test_whole_rows_through_the_flash_kernels(stand_ins, monkeypatch, name, window, ring_comm):
    monkeypatch.setattr(usp, "choose_kernel", lambda *args: stand_ins[name])
    (result,) = errors([Case((5, 1, 7, 30, 2), window=window, ring_comm=ring_comm)])
    assert max(result.values()) < 1e-10


def test_rows_that_see_nothing_get_minus_infinity(stand_ins):
    """flash-attn writes +inf; no plan makes such rows, but a merge must never see them."""
    q, k, v, _ = random_row(4, 2, 2, 8)
    (group,) = kernel_calls([Tile(0, 4, 0, 2, None, 0)], stand_ins["aten"], CPU)
    out, lse = stand_ins["aten"].forward(q, k[:2], v[:2], group=group, scale=1.0)
    assert (lse[:2] == -torch.inf).all() and lse[2:].isfinite().all() and not out[:2].any()


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), EagerKernel()], ids=lambda k: k.name)
def test_backward_of_one_block_with_the_lse_of_all(kernel):
    """The engines call backward per block with the row's final out and lse: the parts must add up."""
    q, k, v, grad_out = random_row(10, 2, 2, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, [Tile(0, 10, 0, 10, None, None)])
    out.backward(grad_out)
    (group,) = kernel_calls([Tile(0, 10, 0, 5, None, None)], kernel, CPU)
    with torch.no_grad():
        halves = [
            kernel.backward(BackwardInputs(grad_out, q, k[keys], v[keys], out, lse), group=group, scale=0.3)
            for keys in (slice(0, 5), slice(5, 10))
        ]
    assert torch.allclose(halves[0][0] + halves[1][0], q.grad, atol=1e-12)
    assert torch.allclose(torch.cat([halves[0][1], halves[1][1]]), k.grad, atol=1e-12)
    assert torch.allclose(torch.cat([halves[0][2], halves[1][2]]), v.grad, atol=1e-12)


@pytest.mark.parametrize(
    ("operator", "stand_in"),
    [
        (torch.ops.aten._flash_attention_forward, flash_stand_in.aten_flash_forward),
        (torch.ops.aten._flash_attention_backward, flash_stand_in.aten_flash_backward),
    ],
)
def test_the_aten_stand_ins_have_the_operators_signatures(operator, stand_in):
    expected = [argument.name for argument in operator.default._schema.arguments]
    assert list(inspect.signature(stand_in).parameters) == expected


def test_what_a_kernel_cannot_do_is_refused(stand_ins):
    q = torch.zeros(2, 4, 8)
    narrow = torch.zeros(2, 4, 4)
    for kernel, tensors, message in (
        ("auto", (q, narrow), "'sdpa' needs one head size, got 8 for queries and 4 for values. Use kernel='eager'"),
        ("sdpa", (q.to("meta"), q.to("meta")), "'sdpa' runs on cpu and cuda, got meta. Use kernel='eager'"),
        ("flash_attn", (q, q), "'flash_attn' runs fp16 and bf16 on CUDA, got torch.float32 on cpu. Use kernel='sdpa'"),
        ("flash_attn_3", (q, q), "'flash_attn_3' runs fp16 and bf16 on CUDA, got torch.float32 on cpu."),
    ):
        with pytest.raises(ValueError, match=f"^kernel={message}"):
            choose_kernel(kernel, *tensors)
    assert choose_kernel("auto", q, q).name == "sdpa"
    assert choose_kernel("eager", q, narrow).name == "eager"


def test_kernels_that_are_not_installed_are_refused():
    q = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="not installed \\(pip install 'hf-cp\\[flash\\]'\\). Use kernel='sdpa'."):
        choose_kernel("flash_attn", q, q)
    with pytest.raises(ValueError, match="needs FlashAttention-3 .* not installed. Use kernel='sdpa'."):
        choose_kernel("flash_attn_3", q, q)


CUDA_BF16 = TensorKind(torch.device("cuda", 0), torch.bfloat16, 128, 128)


@pytest.fixture
def gpu(monkeypatch, stand_ins):
    """Call it to set the compute capability that torch reports."""

    def set_capability(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {major}.0")

    return set_capability


@pytest.mark.parametrize(
    ("capability", "change", "expected"),
    [
        (9, {}, ["flash_attn_3", "flash_attn", "sdpa"]),
        (9, {"dtype": torch.float16, "head_dim": 256, "value_dim": 256}, ["flash_attn_3", "flash_attn", "sdpa"]),
        (8, {}, ["flash_attn", "sdpa"]),
        (10, {}, ["flash_attn", "sdpa"]),
        (7, {}, []),
        (9, {"dtype": torch.float32}, []),
        (9, {"head_dim": 100, "value_dim": 100}, []),
        (9, {"value_dim": 64}, []),
        (9, {"device": torch.device("cpu")}, ["sdpa"]),
        (9, {"device": torch.device("cpu"), "dtype": torch.float64, "head_dim": 5, "value_dim": 5}, ["sdpa"]),
    ],
)
def test_auto_takes_the_first_kernel_that_can(gpu, capability, change, expected):
    gpu(capability)
    assert [kernel.name for kernel in fast_kernels(CUDA_BF16._replace(**change))] == expected


def test_the_nearest_kernel_is_named(gpu):
    with FakeTensorMode():
        q, fp32, odd = (
            torch.empty(2, 4, size, device="cuda", dtype=dtype)
            for size, dtype in ((128, torch.bfloat16), (128, torch.float32), (100, torch.bfloat16))
        )
        gpu(9)
        assert choose_kernel("auto", q, q).name == "flash_attn_3" and choose_kernel("sdpa", q, q).name == "sdpa"
        with pytest.raises(
            ValueError, match="got torch.float32 on cuda. Use bf16, or kernel='eager' for short samples"
        ):
            choose_kernel("auto", fp32, fp32)
        with pytest.raises(ValueError, match="multiple of 8 up to 256, got 100 .* 100 .*. Use kernel='eager'"):
            choose_kernel("auto", odd, odd)
        gpu(8)
        with pytest.raises(ValueError, match="'flash_attn_3' runs on Hopper .* got GPU 8.0. Use kernel='flash_attn'."):
            choose_kernel("flash_attn_3", q, q)
        gpu(7)
        with pytest.raises(ValueError, match="'sdpa' needs an Ampere GPU or a later one, got GPU 7.0. Use kernel='ea"):
            choose_kernel("auto", q, q)


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (("BACKWARD",), "without a backward pass"),
        (("LOCAL", "VARLEN"), "without windows, variable lengths"),
        (("HDIM128", "HDIM192", "HDIM256"), "without head size 128"),
        (("HDIM128", "SOFTCAP", "FP8"), None),  # 128 is rounded up to 192
    ],
)
def test_builds_of_flash_attention_3_that_cannot_train_are_refused(gpu, monkeypatch, left_out, reason):
    gpu(9)
    flags = {f"FLASHATTENTION_DISABLE_{name}": True for name in left_out}
    install(
        monkeypatch, "flash_attn_config", CONFIG={"build_flags": {"FLASHATTENTION_DISABLE_PAGEDKV": False} | flags}
    )
    refusal = FlashAttn3Kernel.refusal(CUDA_BF16)
    assert refusal is None if reason is None else reason in refusal
    first = "flash_attn_3" if reason is None else "flash_attn"
    assert fast_kernels(CUDA_BF16)[0].name == first
