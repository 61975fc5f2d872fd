"""Causal attention of bf16 rows on a CPU, by matrix products of many heads at once.

`attention_sdpa` takes it where `serves`. PyTorch's own kernel multiplies tile by tile of one head
and gets a tenth of what the processor's bf16 instructions can do; here a chunk of queries of all
heads meets the keys that it can see in one batched product. Of rows longer than KEPT nothing of
T * T values is kept: the backward pass takes the softmax again.

oneDNN writes products in bf16, too coarse for logits: 8 bits of 20 are off by 0.06. So a second
product leaves what the first was rounded by, and the softmax is taken of their sum, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llmfoundry.ops.processor import HAS_BF16

SHORTEST, LONGEST = 128, 2048  # tokens of a row; beyond, PyTorch's kernel is as fast
KEPT = 512  # tokens of a row, up to which weights are kept: at most 640 bytes a token and head
VALUES = 1 << 20  # logits at a time: with what comes of them, they stay in the cache


def serves(dtype: torch.dtype, queries: int, dropout: float) -> bool:
    """Whether rows of so many tokens, each with itself and those before, are served faster here."""
    whole = SHORTEST <= queries <= LONGEST and queries % _chunk(queries) == 0
    return HAS_BF16 and dtype == torch.bfloat16 and whole and dropout == 0


def _chunk(length: int) -> int:
    """Queries a product: small ones leave out more keys, large ones are fewer sums in bf16."""
    return 128 if length < 1024 else 256


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, window: int
) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, T, KV, hd), KV dividing H; (B, T, H, hd).

    Args:
        q: bf16, as k and v; T as `serves` takes it.
        k: keys.
        v: values.
        bias: (1, 1 or H, T, T) in fp32, added to the logits: minus infinity where a key is not
            seen. It is not differentiated. None: causality, and nothing more.
        scale: factor on the logits.
        window: a query sees itself and so many keys before it, as the bias says; -1: all.
    """
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    keep = wants and q.shape[1] <= KEPT
    return torch.ops.llmfoundry.causal_attention(q, k, v, bias, scale, window, keep)[0]


RULES = "Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, int window"


@torch.library.custom_op(
    "llmfoundry::causal_attention",
    mutates_args=(),
    schema=f"({RULES}, bool keep) -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, window: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """Output; all attention weights, or nothing where they are not to be kept."""
    queries, keys, values = _by_chunk(q, k.shape[2]), _by_head(k), _by_head(v)
    out = torch.empty_like(queries)
    spec = _Spec(k.shape[2], bias, scale, window)
    kept = q.new_empty(_weights(q.shape, window) if keep else 0)
    for some, chunk, seen, weights in _attention(queries, keys, spec, kept, is_known=False):
        torch.bmm(weights, values[some, seen], out=out[chunk, some])
    return _from_chunks(out, q), kept


@torch.library.custom_op(
    "llmfoundry::causal_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor kept, {RULES}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    queries, keys, values = _by_chunk(q, k.shape[2]), _by_head(k), _by_head(v)
    grads = _by_chunk(grad, k.shape[2])
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    spec = _Spec(k.shape[2], bias, scale, window)
    known = len(kept) > 0
    for some, chunk, seen, weights in _attention(queries, keys, spec, kept, is_known=known):
        mine, k_grad, v_grad = grads[chunk, some], dk[some, seen], dv[some, seen]
        slope = torch.bmm(mine, values[some, seen].mT)
        slope = torch.ops.aten._softmax_backward_data(slope, weights, -1, slope.dtype)
        torch.baddbmm(mine, slope, keys[some, seen], beta=0, alpha=scale, out=dq[chunk, some])
        torch.baddbmm(k_grad, slope.mT, queries[chunk, some], alpha=scale, out=k_grad)
        torch.baddbmm(v_grad, weights.mT, mine, out=v_grad)
    batch = len(q)
    dk, dv = (x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous() for x in (dk, dv))
    return _from_chunks(dq, q), dk, dv


class _Spec(NamedTuple):
    """As `attend` has them."""

    kv_heads: int
    bias: Tensor | None
    scale: float
    window: int


def _attention(
    q: Tensor, k: Tensor, spec: _Spec, kept: Tensor, *, is_known: bool
) -> Iterator[tuple[slice, int, slice, Tensor]]:
    """Some rows of q and k, a chunk of their queries, the keys it sees, and the weights of those.

    Args:
        q: (T / chunk, B * KV, G * chunk, hd).
        k: (B * KV, T, hd).
        spec: what a query sees, and how.
        kept: memory of all weights (rows, G * chunk, keys); empty: each are written over the last.
        is_known: the weights are there.
    """
    n_chunks, n_rows, height, _ = q.shape
    length, kv_heads = k.shape[1], spec.kv_heads
    step = kv_heads * max(1, VALUES // (kv_heads * height * length))
    size = min(step, n_rows) * height * length
    low, wide = q.new_empty(size), q.new_empty(size, dtype=torch.float32)
    rest, place = torch.empty_like(wide), 0
    later = wide.new_full((1, _chunk(length), _chunk(length)), float("-inf")).triu_(1)
    for start in range(0, n_rows, step):
        some = slice(start, start + step)
        for chunk in range(n_chunks):
            seen = _seen(chunk, length, spec.window)
            mine, keys = q[chunk, some], k[some, seen].mT
            shape = (len(mine), height, keys.shape[2])
            weights = _part(kept[place:] if len(kept) else low, shape)
            place += weights.numel()
            if not is_known:
                logits, error = _part(wide, shape), _part(rest, shape)
                torch.baddbmm(weights, mine, keys, beta=0, alpha=spec.scale, out=weights)
                logits.copy_(weights)
                torch.baddbmm(weights, mine, keys, beta=-1, alpha=spec.scale, out=weights)
                logits += error.copy_(weights)
                own = slice(seen.stop - len(later[0]), seen.stop)
                bias = later if spec.bias is None else spec.bias[0, :, own, seen]
                _add_bias(logits, bias, kv_heads)
                torch.softmax(logits, -1, out=logits)
                weights.copy_(logits)
            yield some, chunk, seen, weights


def _seen(chunk: int, length: int, window: int) -> slice:
    """The keys that a chunk of the queries of so long a row sees."""
    start, stop = chunk * _chunk(length), (chunk + 1) * _chunk(length)
    return slice(0 if window < 0 else max(0, start - window), stop)


def _weights(q: Sequence[int], window: int) -> int:
    """How many attention weights there are, for q of this shape, (B, T, H, hd)."""
    batch, length, heads, _ = q
    spans = (_seen(chunk, length, window) for chunk in range(length // _chunk(length)))
    return batch * heads * _chunk(length) * sum(span.stop - span.start for span in spans)


def _add_bias(logits: Tensor, bias: Tensor, kv_heads: int) -> None:
    """Add a bias (1 or H, chunk, n) to the logits (B * KV, G * chunk, keys) of the last n keys."""
    n_heads, chunk, n = bias.shape
    heads = logits[..., -n:].unflatten(1, (-1, chunk)).unflatten(0, (-1, kv_heads))
    heads += bias if n_heads == 1 else bias.unflatten(0, (kv_heads, -1))


def _part(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


def _by_chunk(x: Tensor, kv_heads: int) -> Tensor:
    """(B, T, H, hd) as (T / chunk, B * KV, G * chunk, hd): G query heads share a key's."""
    cut = x.unflatten(2, (kv_heads, -1)).unflatten(1, (-1, _chunk(x.shape[1])))
    return cut.permute(1, 0, 3, 4, 2, 5).flatten(3, 4).flatten(1, 2).contiguous()


def _from_chunks(x: Tensor, like: Tensor) -> Tensor:
    """What `_by_chunk` made of a tensor shaped like that one, (B, T, H, hd) again."""
    cut = x.unflatten(2, (-1, _chunk(like.shape[1]))).unflatten(1, (len(like), -1))
    return cut.permute(1, 0, 4, 2, 3, 5).reshape(like.shape).contiguous()


def _by_head(x: Tensor) -> Tensor:
    """(B, T, KV, hd) as (B * KV, T, hd)."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, window: int, keep: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(_weights(q.shape, window) if keep else 0)


@_backward.register_fake
def _(
    grad: Tensor, kept: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window, _ = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.spec = scale, window
    ctx.set_materialize_grads(False)  # what is kept has no gradient


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    backward = torch.ops.llmfoundry.causal_attention_backward
    return *backward(grad, *ctx.saved_tensors, *ctx.spec), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@register_flop_formula(torch.ops.llmfoundry.causal_attention)
def _flops(q: Sequence[int], *rest: Any, **_: Any) -> int:
    """Two a multiply-add, of two products; not those that only make the logits precise."""
    return 2 * 2 * _weights(q, rest[4]) * q[-1]


@register_flop_formula(torch.ops.llmfoundry.causal_attention_backward)
def _backward_flops(
    grad: Sequence[int], kept: Sequence[int], q: Sequence[int], *rest: Any, **_: Any
) -> int:
    """Four products, and where no weights were kept the logits'."""
    return 2 * (4 if kept[0] else 5) * _weights(q, rest[4]) * q[-1]
