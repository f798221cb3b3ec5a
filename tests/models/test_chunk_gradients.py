"""The error of 16-bit gradients must not grow with the number of chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_cp.models.chunk_gradients import summed_over_chunks
from hf_cp.models.loss import token_losses
from hf_cp.models.mlp import in_chunks

TOKENS, HIDDEN, VOCAB = 512, 16, 48


def row(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and targets; a mean far from zero gives sums that grow, which rounding hurts most."""
    torch.manual_seed(0)
    return (torch.randn(TOKENS, HIDDEN) + 1).to(dtype), torch.randint(0, VOCAB, (TOKENS,))


def head(dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCAB, bias=bias).to(dtype)


def gradient(module: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, num_chunks: int) -> torch.Tensor:
    module.zero_grad()
    token_losses(hidden, module, targets, num_chunks=num_chunks).sum().backward()
    return module.weight.grad.clone()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("is_patched", [False, True])
def test_many_chunks_are_as_exact_as_one(dtype, is_autocast, is_patched, monkeypatch):
    """`is_patched`: with DeepSpeed's ZeRO-3 linear layer, which is an autograd function of its own."""
    if is_patched:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
    hidden, targets = row(dtype)
    module = head(torch.float32 if is_autocast else dtype)
    module.weight.data = module.weight.data.to(dtype).to(module.weight.dtype)  # the same values either way
    exact = head(torch.float64)
    exact.weight.data = module.weight.data.double()
    wanted = gradient(exact, hidden.double(), targets, 1)
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        errors = {chunks: error(gradient(module, hidden, targets, chunks), wanted) for chunks in (1, 16, 128)}
    assert 0 < errors[1] and max(errors[16], errors[128]) <= 1.5 * errors[1], errors


def test_without_the_sum_in_fp32_the_error_grows(monkeypatch):
    hidden, targets = row(torch.bfloat16)
    module, exact = head(torch.bfloat16), head(torch.float64)
    exact.weight.data = module.weight.data.double()
    wanted = gradient(exact, hidden.double(), targets, 1)
    monkeypatch.setattr("hf_cp.models.loss.summed_over_chunks", lambda module, forward, num_chunks: forward)
    assert error(gradient(module, hidden, targets, 128), wanted) > 2 * error(
        gradient(module, hidden, targets, 1), wanted
    )


def test_a_feed_forward_part_in_chunks():
    torch.manual_seed(0)
    hidden = (torch.randn(1, TOKENS, HIDDEN) + 1).bfloat16()
    module = nn.Sequential(nn.Linear(HIDDEN, VOCAB), nn.SiLU(), nn.Linear(VOCAB, HIDDEN)).bfloat16()
    exact = nn.Sequential(nn.Linear(HIDDEN, VOCAB), nn.SiLU(), nn.Linear(VOCAB, HIDDEN)).double()
    exact.load_state_dict(module.state_dict())

    def gradients(module: nn.Module, hidden: torch.Tensor, chunks: int) -> list[torch.Tensor]:
        module.zero_grad()
        hidden = hidden.clone().requires_grad_()
        in_chunks(summed_over_chunks(module, module, chunks), hidden, chunks).sum().backward()
        return [hidden.grad, *(parameter.grad for parameter in module.parameters())]

    wanted = gradients(exact, hidden.double(), 1)
    one, many = (
        [error(*pair) for pair in zip(gradients(module, hidden, chunks), wanted, strict=True)] for chunks in (1, 64)
    )
    assert all(found <= 1.5 * least + 1e-3 for found, least in zip(many, one, strict=True)), (one, many)


def test_modules_are_as_they_were():
    module = head(torch.bfloat16, bias=True)
    weight, names = module.weight, list(module._parameters)
    called = summed_over_chunks(module, module, 4)
    called(torch.randn(3, HIDDEN).bfloat16())
    with pytest.raises(RuntimeError):
        called(torch.randn(3, HIDDEN + 1).bfloat16())
    assert module.weight is weight and list(module._parameters) == names and "forward" not in vars(module)
    own = module.forward = lambda hidden: nn.Linear.forward(module, hidden)  # as accelerate and DeepSpeed leave it
    called(torch.randn(3, HIDDEN).bfloat16())
    assert module.forward is own


def test_two_backward_passes_over_one_graph():
    hidden, targets = row(torch.bfloat16)
    module = head(torch.bfloat16)
    loss = token_losses(hidden.requires_grad_(), module, targets, num_chunks=8).sum()
    loss.backward(retain_graph=True)
    once = module.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(module.weight.grad, 2 * once)


@pytest.mark.parametrize(
    ("module", "chunks"),
    [(head(torch.float32), 8), (head(torch.bfloat16).requires_grad_(False), 8), (head(torch.bfloat16), 1)],
    ids=["fp32", "frozen", "one chunk"],
)
def test_nothing_to_do(module, chunks):
    assert summed_over_chunks(module, module, chunks) is module
