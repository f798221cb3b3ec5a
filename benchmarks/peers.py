"""Two other implementations of sharded causal attention, made to run on the CPU, for comparison.

- PyTorch's own ring (`torch.distributed.tensor.experimental`), with its zigzag ("head-tail") load balancing: its
  templates are called directly with the CPU flash operators, which it does not register itself.
- Ulysses as one would write it by hand: three all-to-alls in, `scaled_dot_product_attention`, one out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp
from torch.nn.functional import scaled_dot_product_attention


def _flash(query, key, value, is_causal=False, dropout_p=0.0, scale=None):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )


def _flash_backward(grad_out, query, key, value, out, logsumexp, is_causal, dropout_p=0.0, scale=None):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale
    )


class TorchRing(torch.autograd.Function):
    """PyTorch's ring attention on local zigzag shards, [1, H, n, D]."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        out, lse = torch_cp._templated_ring_attention(group, 2, _flash, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch_cp._templated_ring_attention_backward(
            ctx.group, 2, _flash_backward, grad_out, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return *grads[:3], None


class _Trade(torch.autograd.Function):
    """[n, H, D] -> [n * u, H / u, D], or back."""

    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.group, ctx.to_heads = group, to_heads
        size = dist.get_world_size(group)
        if to_heads:
            blocks = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        else:
            blocks = x.unflatten(0, (size, -1)).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return _Trade.apply(grad, ctx.group, not ctx.to_heads), None, None


def hand_written_ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, H, D] each -> [n, H, D]; heads must divide."""
    heads = [_Trade.apply(x, group, True).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = scaled_dot_product_attention(*heads, is_causal=True)
    return _Trade.apply(out[0].transpose(0, 1), group, False)


def register_cpu_flash() -> None:
    """Lets PyTorch's `context_parallel` run on the CPU: its flash operators go to PyTorch's own ring templates."""
    operators = torch.ops.aten
    forward = operators._scaled_dot_product_flash_attention_for_cpu.default
    backward = operators._scaled_dot_product_flash_attention_for_cpu_backward.default
    torch_cp.custom_ops[forward] = _ring_forward
    torch_cp.custom_ops[backward] = _ring_backward


def _ring_forward(_, args: tuple, kwargs: dict) -> tuple[DTensor, DTensor]:
    """query, key, value [, dropout_p, is_causal] and options, sharded over tokens."""
    names = ("query", "key", "value", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (options.pop(name) for name in names[:3])
    results = torch_cp._templated_ring_attention(
        query.device_mesh.get_group(),
        2,
        _flash,
        *(x.to_local() for x in (query, key, value)),
        is_causal=options.get("is_causal", False),
        dropout_p=options.get("dropout_p", 0.0),
        scale=options.get("scale"),
    )
    return tuple(_like(result, query) for result in results)


def _ring_backward(_, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    """grad_out, query, key, value, out, logsumexp, dropout_p, is_causal and options."""
    query, (*_, dropout_p, is_causal) = args[1], args[:8]
    local = [x.to_local() for x in args[:6]]
    grads = torch_cp._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        2,
        _flash_backward,
        local[0],
        "grad_out",
        *local[1:],
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return tuple(_like(grad, query) for grad in grads[:3])


def _like(local: torch.Tensor, sharded: DTensor) -> DTensor:
    return DTensor.from_local(local, sharded.device_mesh, sharded.placements, run_check=False)
