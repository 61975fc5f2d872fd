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

from llmfoundry.ops.torch_private import varlen_backward, varlen_forward

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
    """PyTorch's flash kernel for CPUs with sinks."""

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
        out, total = _add_sinks(out, lse, sinks)
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
        return grad_q, grad_k, grad_v, _sinks_gradient(grad, out, total, sinks), None, None


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks of a kernel's output and log-sum-exp.

    FlashAttention's backward pass recomputes the weights as exp(logit - lse), and needs the sum of
    grad * out. A sink adds to the log-sum-exp, and nothing to that sum because it has no value. The
    backward pass is therefore exact if it gets these results.

    Args:
        out: (..., H, T, hd).
        lse: (..., H, T).
        sinks: (H,).
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def _sinks_gradient(grad: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient (H,) of the sinks; grad and out (..., H, T, hd), total (..., H, T)."""
    weight = (sinks.to(total.dtype)[:, None] - total).exp()  # of the sink
    dot = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return -(weight * dot).movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    window: int,
) -> Tensor:
    """Return attention with sinks, (N, H, hd), by PyTorch's variable-length attention.

    Args:
        q: (N, H, hd), the documents one after another.
        k: (M, KV, hd).
        v: (M, KV, hd).
        sinks: (H,).
        borders: (documents + 1,) int32 of the queries, and of the keys.
        longest: most queries of a document, and most keys.
        scale: factor on the logits.
        window: earlier tokens that a token attends to; -1: all.
    """
    return _Varlen.apply(q, k, v, sinks, *borders, *longest, scale, window)


class _Varlen(torch.autograd.Function):
    """PyTorch's variable-length attention (FlashAttention 2, 3 or 4) with sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        borders: Tensor,
        key_borders: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
        window: int,
    ) -> Tensor:
        shared = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        ctx.options = {"max_q": longest, "max_k": longest_keys, "is_causal": window < 0}
        ctx.options |= {"scale": scale, "window_size": [window, 0]}
        places = {"cu_seq_q": borders, "cu_seq_k": key_borders}
        out, lse, random_state = varlen_forward(q, k, v, **places, **ctx.options, **shared)
        by_head, total = _add_sinks(out.transpose(0, 1), lse, sinks)
        out = by_head.transpose(0, 1).contiguous()
        ctx.save_for_backward(q, k, v, sinks, borders, key_borders, out, total, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, borders, key_borders, out, total, random_state = ctx.saved_tensors
        grad, places = grads[0].contiguous(), {"cu_seq_q": borders, "cu_seq_k": key_borders}
        of_inputs = varlen_backward(
            grad, q, k, v, out, total, rng_state=random_state, **places, **ctx.options
        )
        of_sinks = _sinks_gradient(grad.transpose(0, 1), out.transpose(0, 1), total, sinks)
        return (*of_inputs, of_sinks, *[None] * 6)


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
