"""Every kernel, tile by tile, against dense attention; and the signatures that only run on a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_cp.attention.kernels import EagerKernel, SdpaKernel, choose_kernel
from hf_cp.sequence.plan import Tile
from tests.attention.reference import random_row
from tests.sequence.test_plan import band

TILES = [
    Tile(0, 6, 0, 6, None, 0),
    Tile(0, 6, 0, 9, None, None),
    Tile(0, 9, 0, 4, None, None),
    Tile(0, 1, 0, 1, None, 0),
]
BANDS = [Tile(0, 4, 0, 9, None, 0), Tile(0, 6, 0, 6, 2, 0), Tile(0, 6, 0, 8, 1, 1), Tile(0, 3, 0, 6, 2, None)]


def dense(q, k, v, tile):
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(repeat, 1)) * 0.3
    scores = scores.masked_fill(~band(tile), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(repeat, 1)), scores.logsumexp(-1).T


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [(SdpaKernel(), tile) for tile in TILES] + [(EagerKernel(), tile) for tile in TILES + BANDS],
    ids=lambda x: x.name if hasattr(x, "name") else str(tuple(x)),
)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_one_tile(kernel, tile, num_kv_heads):
    longest = max(tile.q_len, tile.k_len)
    q, k, v, grad_out = random_row(longest, 4, num_kv_heads, 8)
    q, grad_out = q[: tile.q_len].requires_grad_(), grad_out[: tile.q_len]
    k, v = (x[: tile.k_len].requires_grad_() for x in (k, v))
    expected_out, expected_lse = dense(q, k, v, tile)
    expected_out.backward(grad_out)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, tile=tile, scale=0.3)
        grads = kernel.backward(grad_out, q, k, v, out, lse, tile=tile, scale=0.3)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)
    for grad, leaf in zip(grads, (q, k, v), strict=True):
        assert torch.allclose(grad, leaf.grad, atol=1e-12)


@pytest.mark.parametrize("kernel", [SdpaKernel(), EagerKernel()], ids=lambda k: k.name)
def test_backward_of_one_block_with_the_lse_of_all(kernel):
    """The engines call backward per block with the row's final out and lse: the parts must add up."""
    q, k, v, grad_out = random_row(10, 2, 2, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, Tile(0, 10, 0, 10, None, None))
    out.backward(grad_out)
    with torch.no_grad():
        halves = [
            kernel.backward(grad_out, q, k[keys], v[keys], out, lse, tile=Tile(0, 10, 0, 5, None, None), scale=0.3)
            for keys in (slice(0, 5), slice(5, 10))
        ]
    assert torch.allclose(halves[0][0] + halves[1][0], q.grad, atol=1e-12)
    assert torch.allclose(torch.cat([halves[0][1], halves[1][1]]), k.grad, atol=1e-12)
    assert torch.allclose(torch.cat([halves[0][2], halves[1][2]]), v.grad, atol=1e-12)


def test_the_cuda_operators_take_what_the_kernel_gives():
    """Runs nowhere without a GPU; the operators' schemas are the contract."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default._schema
    assert [a.name for a in forward.arguments[:5]] == ["query", "key", "value", "dropout_p", "is_causal"]
    assert [r.name for r in forward.returns[:2]] == ["output", "logsumexp"]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema
    names = "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    assert [a.name for a in backward.arguments] == [*names.split(), "philox_seed", "philox_offset", "scale"]


def test_what_a_kernel_cannot_do_is_refused():
    q = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="one head size, got 8 for queries and 4 for values"):
        choose_kernel("auto", q, torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="cpu and cuda, got meta"):
        choose_kernel("sdpa", q.to("meta"), q.to("meta"))
    assert choose_kernel("auto", q, q).name == "sdpa"
    assert choose_kernel("eager", q, torch.zeros(2, 4, 4)).name == "eager"
