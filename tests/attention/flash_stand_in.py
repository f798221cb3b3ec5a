"""Stand-ins for GPU operators, with their signatures and conventions, computed on the CPU by plain matrix products.

The signatures are those of `flash_attn` 2.7/2.8, of FlashAttention-3 and of PyTorch's aten operators. Conventions
kept: windows are bottom-right aligned with -1 for no bound, lse is [num_heads, total_q], +inf (FlashAttention-3: -inf)
for a row that sees no key, gradients are written into given buffers (flash_attn) or returned (aten).
"""

from __future__ import annotations

import torch
from torch.library import Library

from hf_cp.sequence.tiles import Tile
from tests.sequence.test_plan import band


def _visible(q_len: int, k_len: int, left: int, right: int) -> torch.Tensor:
    return band(Tile(0, q_len, 0, k_len, None if left < 0 else left, None if right < 0 else right))


def _sequences(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    for (q0, q1), (k0, k1) in zip(
        *(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True) for cu in (cu_seqlens_q, cu_seqlens_k)), strict=True
    ):
        yield slice(q0, q1), slice(k0, k1)


def varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right):
    assert int(cu_seqlens_q[-1]) == len(q) and int(cu_seqlens_k[-1]) == len(k) == len(v)
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), torch.inf, dtype=q.dtype)
    repeat = q.shape[1] // k.shape[1]
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        visible = _visible(rows.stop - rows.start, keys.stop - keys.start, left, right)
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[keys].repeat_interleave(repeat, 1)) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        seen = visible.any(1)
        out[rows][seen] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[keys].repeat_interleave(repeat, 1))[seen]
        lse[:, rows][:, seen] = scores.logsumexp(-1)[:, seen]
    return out, lse


def varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right
):
    assert dout.is_contiguous() and lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repeat = q.shape[1] // k.shape[1]
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        visible = _visible(rows.stop - rows.start, keys.stop - keys.start, left, right)
        k_heads, v_heads = (x[keys].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[rows], k_heads) * scale
        probs = (scores - lse[:, rows, None]).exp().masked_fill(~visible, 0)
        delta = (dout[rows] * out[rows]).sum(-1).T[..., None]
        grad_scores = probs * (torch.einsum("ihd,jhd->hij", dout[rows], v_heads) - delta) * scale
        dq[rows] += torch.einsum("hij,jhd->ihd", grad_scores, k_heads)
        dk[keys] += torch.einsum("hij,ihd->jhd", grad_scores, q[rows]).unflatten(1, (-1, repeat)).sum(2)
        dv[keys] += torch.einsum("hij,ihd->jhd", probs, dout[rows]).unflatten(1, (-1, repeat)).sum(2)
    return dq, dk, dv


def flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """`flash_attn.flash_attn_interface._flash_attn_varlen_forward` of 2.7 and 2.8."""
    assert dropout_p == 0.0 and not causal
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = varlen_forward(q, k, v, *sizes, softmax_scale, window_size_left, window_size_right)
    return out, lse, None, None


def flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """`flash_attn.flash_attn_interface._flash_attn_varlen_backward` of 2.7 and 2.8."""
    assert dropout_p == 0.0 and not causal and deterministic == torch.are_deterministic_algorithms_enabled()
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    bounds = (softmax_scale, window_size_left, window_size_right)
    for buffer, grad in zip(
        (dq, dk, dv), varlen_backward(dout, q, k, v, out, softmax_lse, *sizes, *bounds), strict=True
    ):
        buffer.copy_(grad)


def aten_flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    """`aten::_flash_attention_forward`."""
    assert dropout_p == 0.0 and not is_causal and not return_debug_mask
    sizes = (cum_seq_q, cum_seq_k, max_q, max_k)
    out, lse = varlen_forward(query, key, value, *sizes, scale, window_size_left, window_size_right)
    return out, lse, None, None, None


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """`aten::_flash_attention_backward`."""
    assert dropout_p == 0.0 and not is_causal
    sizes = (cum_seq_q, cum_seq_k, max_q, max_k)
    bounds = (scale, window_size_left, window_size_right)
    return varlen_backward(grad_out, query, key, value, out, logsumexp, *sizes, *bounds)


# the schemas with which FlashAttention-3 registers its two operators: torch checks names and types of every call
FLASH_3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASH_3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def register_flash_3() -> Library:
    """`torch.ops.flash_attn_3` on the CPU, as importing `flash_attn_interface` makes it on CUDA; keep the result."""
    library = Library("flash_attn_3", "DEF")
    library.define(FLASH_3_FORWARD)
    library.define(FLASH_3_BACKWARD)
    library.impl("fwd", _flash_3_forward, "CPU")
    library.impl("bwd", _flash_3_backward, "CPU")
    return library


def _flash_3_forward(
    q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0,
    pack_gqa=None, sm_margin=0,
):  # fmt: skip
    assert num_splits == 1 and not is_causal and softcap == 0.0 and attention_chunk == 0
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = varlen_forward(q, k, v, *sizes, softmax_scale, window_size_left, window_size_right)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf), q.new_empty(0), q.new_empty(0)


def _flash_3_backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert not is_causal and softcap == 0.0 and deterministic == torch.are_deterministic_algorithms_enabled()
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    bounds = (softmax_scale, window_size_left, window_size_right)
    grads = varlen_backward(dout, q, k, v, out, softmax_lse, *sizes, *bounds)
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad)
    return tuple(q.new_empty(0) for _ in range(5))
