from __future__ import annotations

import torch

from hf_cp.attention.merge import empty_result, merge_
from tests.attention.reference import random_row


def block(q, k, v):
    """(out, lse) of one head over one block of keys."""
    scores = torch.einsum("ihd,jhd->ihj", q, k)
    return torch.einsum("ihj,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)


def test_blocks_add_up_to_the_whole():
    q, k, v, _ = random_row(12, 2, 2, 4)
    out, lse = empty_result(q)
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        merge_(out, lse, *block(q, k[keys], v[keys]))
    whole_out, whole_lse = block(q, k, v)
    assert torch.allclose(out, whole_out, atol=1e-14) and torch.allclose(lse, whole_lse, atol=1e-14)


def test_empty_blocks_leave_everything_as_it_is():
    q, k, v, _ = random_row(6, 2, 2, 4)
    out, lse = empty_result(q)
    nothing = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    merge_(out, lse, *nothing)
    assert not out.any() and (lse == -torch.inf).all()
    merge_(out, lse, *block(q, k, v))
    merge_(out, lse, *nothing)
    whole_out, whole_lse = block(q, k, v)
    assert out.equal(whole_out) and lse.equal(whole_lse)


def test_a_nan_is_not_lost():
    """One process would have it in its output, too."""
    q, k, v, _ = random_row(6, 2, 2, 4)
    out, lse = empty_result(q)
    merge_(out, lse, *block(q, k[:3], v[:3]))
    merge_(out, lse, *block(q, k[3:] * torch.nan, v[3:]))
    assert out.isnan().all() and lse.isnan().all()


def test_the_accumulator_is_fp32_and_not_the_input():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = torch.ones(3, 2, 4, dtype=dtype)
        out, lse = empty_result(q)
        assert out.dtype == lse.dtype == torch.float32
        out += 1
        assert (q == 1).all()


def test_large_scores_do_not_overflow():
    out, lse = torch.zeros(1, 1, 2), torch.full((1, 1), 1e4)
    merge_(out, lse, torch.ones(1, 1, 2), torch.full((1, 1), 1e4))
    assert torch.allclose(out, torch.full((1, 1, 2), 0.5))
    merge_(out, lse, torch.ones(1, 1, 2), torch.full((1, 1), -1e4))
    assert torch.allclose(out, torch.full((1, 1, 2), 0.5))
