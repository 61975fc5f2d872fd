"""Attention sinks: a learned logit per head that takes part in the softmax and has no value.

A token can so attend to nothing (Xiao et al., 2023, "Efficient streaming language models with
attention sinks"; gpt-oss, 2025). The output is that of attention without the sink, times
sigmoid(lse - sink), where lse is the log-sum-exp of the logits. Every kernel that returns its
log-sum-exp can therefore serve sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def scaled_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with sinks, from attention without them.

    Args:
        out: (B, H, T, hd), the output without sinks.
        lse: (B, H, T), log-sum-exp of the logits, in nats and differentiable.
        sinks: (H,).
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Return attention with sinks, (B, H, T, hd), by PyTorch's flash kernel for CPUs.

    Args:
        q: (B, H, T, hd).
        k: (B, KV, S, hd).
        v: (B, KV, S, hd).
        sinks: (H,).
        bias: broadcastable to (B, H, T, S), added to the logits; None: causal, with T = S or 1.
        scale: factor on the logits.
    """
    return _FlashOnCpu.apply(q, k, v, sinks, bias, scale)


class _FlashOnCpu(torch.autograd.Function):
    """PyTorch's flash kernel for CPUs with sinks.

    The kernel's backward pass recomputes the weights as exp(logit - lse), and needs the sum of
    grad * out. A sink adds to the log-sum-exp, and nothing to that sum because it has no value. The
    kernel is therefore exact if it gets the output and the log-sum-exp with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        is_causal = bias is None and q.shape[2] > 1
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # (B, H, T)
        out = out * (lse - total).exp()[..., None].to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, bias, out, total)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, bias, out, total = ctx.saved_tensors
        (grad,) = grads
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, ctx.is_causal, attn_mask=bias, scale=ctx.scale
        )
        weight = (sinks.to(total.dtype)[:, None] - total).exp()  # (B, H, T), of the sink
        dot = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
        grad_sinks = -(weight * dot).sum((0, 2)).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


def with_sink_key(
    k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor | None, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and bias with one key more, which is the sink of each head.

    For kernels that take a bias and do not return the log-sum-exp.

    Args:
        k: (B, KV, S, hd).
        v: (B, KV, S, hd).
        sinks: (H,).
        bias: broadcastable to (B, H, T, S), added to the logits; None: causal, with T = S or 1.
        queries: T.

    Returns:
        Keys and values (B, KV, S + 1, hd), and the bias (B or 1, H, T, S + 1) in the keys' dtype.
    """
    if bias is None:
        hidden = float("-inf") if queries > 1 else 0.0
        bias = k.new_full((1, 1, queries, k.shape[2]), hidden).triu(1)
    rows, _, count, keys = bias.shape
    column = sinks.to(k.dtype).view(1, -1, 1, 1).expand(rows, -1, count, 1)
    bias = bias.to(k.dtype).expand(-1, len(sinks), -1, keys)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), torch.cat([bias, column], dim=-1)
