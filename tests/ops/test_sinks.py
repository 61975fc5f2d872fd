"""Attention sinks: each route next to a softmax with one more column, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from llmfoundry.ops.attention import sinks as attention_sinks
from llmfoundry.ops.attention.base import AttentionSpec
from llmfoundry.ops.attention.select import PLANS, attend
from llmfoundry.ops.attention.sinks import attend_on_cpu, scaled_by_sinks, with_sink_key
from llmfoundry.ops.packed_layout import PackedLayout

SCALE = 0.4


def tensors(queries: int = 5, keys: int = 5) -> tuple[Tensor, ...]:
    """Return q (B, H, T, hd), k and v (B, KV, S, hd) with KV = H / 2, and sinks (H,)."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), (4,))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, sees: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    logits = (q @ k.mT * SCALE).masked_fill(~sees, float("-inf"))
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1] @ v


def assert_same(ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Compare outputs and the gradients of all leaves."""
    weight = torch.linspace(-1, 2, ours.numel(), dtype=ours.dtype).view_as(ours)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(ours, leaves, weight, retain_graph=True)
    expected = torch.autograd.grad(theirs, leaves, weight)
    torch.testing.assert_close(found, expected)


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


@pytest.mark.parametrize("as_bias", [False, True])
def test_the_kernel_for_cpus_with_sinks_is_a_softmax_with_one_more_column(as_bias: bool) -> None:
    q, k, v, sinks = leaves = tensors()
    sees = causal(5, 5)
    bias = torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, float("-inf"))
    ours = attend_on_cpu(q, k, v, sinks, bias if as_bias else None, SCALE)
    assert_same(ours, plain(*leaves, sees), leaves)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("as_bias", [False, True])
def test_a_sink_as_one_more_key(queries: int, as_bias: bool) -> None:
    q, k, v, sinks = leaves = tensors(queries)
    sees = causal(queries, 5)
    bias = torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, float("-inf"))
    keys, values, mask = with_sink_key(k, v, sinks, bias if as_bias else None, queries)
    ours = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    assert_same(ours, plain(*leaves, sees), leaves)


def test_output_and_log_sum_exp_of_flex_attention_are_enough() -> None:
    """FlexAttention has no backward pass on a CPU: the output is its own, the rest autograd's."""
    q, k, v, sinks = (x.detach().float() for x in tensors(128, 128))

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    mask = create_block_mask(is_seen, None, None, 128, 128, device="cpu")
    out, aux = flex_attention(
        q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    ours = scaled_by_sinks(out, aux.lse, sinks)
    torch.testing.assert_close(ours, plain(q, k, v, sinks, causal(128, 128)), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_the_scaled_output_is_that_of_the_softmax() -> None:
    q, k, v, sinks = leaves = tensors()
    sees = causal(5, 5)
    keys, values = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    logits = (q @ keys.mT * SCALE).masked_fill(~sees, float("-inf"))
    ours = scaled_by_sinks(logits.softmax(-1) @ values, logits.logsumexp(-1), sinks)
    assert_same(ours, plain(*leaves, sees), leaves)


def test_a_large_sink_takes_all_weight_and_a_small_one_none() -> None:
    q, k, v, sinks = (x.detach() for x in tensors())
    without = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    nothing = attend_on_cpu(q, k, v, torch.full_like(sinks, 1e4), None, SCALE)
    everything = attend_on_cpu(q, k, v, torch.full_like(sinks, -1e4), None, SCALE)
    assert not nothing.any()
    torch.testing.assert_close(everything, without)


def logits_of(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the masked logits (H, T, S) of one document, of q (T, H, hd) and k (S, H, hd)."""
    place = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    left, _ = options["window_size"]
    sees = (place <= 0) & (place >= -left if left >= 0 else place <= 0)
    assert options["is_causal"] == (left < 0)
    logits = torch.einsum("thd,shd->hts", q, k) * options["scale"]
    return logits.masked_fill(~sees, float("-inf"))


def documents(options: dict[str, Any]) -> list[tuple[slice, slice]]:
    """Return queries and keys of each document, and check the longest."""
    parts = [list(pairwise(options[f"cu_seq_{x}"].tolist())) for x in "qk"]
    for part, most in zip(parts, (options["max_q"], options["max_k"]), strict=True):
        assert max(b - a for a, b in part) <= most
    return [(slice(*a), slice(*b)) for a, b in zip(*parts, strict=True)]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`torch_attn::_varlen_attn` by its documented results, in the dtype of q."""
    group = q.shape[1] // k.shape[1]
    assert bool(options.get("enable_gqa")) == (group > 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for queries, keys in documents(options):
        logits = logits_of(q[queries], k[keys], options)
        out[queries] = torch.einsum("hts,shd->thd", logits.softmax(-1), v[keys])
        lse[:, queries] = logits.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """FlashAttention's backward pass (Dao et al., 2022, algorithm 4), from output and lse alone."""
    shared, group = k.shape, q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys in documents(options):
        weights = (logits_of(q[queries], k[keys], options) - lse[:, queries, None]).exp()
        delta = (grad[queries] * out[queries]).sum(-1).mT[..., None]
        of_weights = torch.einsum("thd,shd->hts", grad[queries], v[keys])
        of_logits = weights * (of_weights - delta) * options["scale"]
        grads[0][queries] = torch.einsum("hts,shd->thd", of_logits, k[keys])
        grads[1][keys] = torch.einsum("hts,thd->shd", of_logits, q[queries])
        grads[2][keys] = torch.einsum("hts,thd->shd", weights, grad[queries])
    heads = (shared[0], shared[1], group, shared[2])
    return grads[0], *(x.view(heads).sum(2) for x in grads[1:])


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("lengths", [None, ((3, 6), (9,))])
def test_variable_length_attention_with_sinks_is_a_softmax_with_one_more_column(
    lengths: tuple[tuple[int, ...], ...] | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels run on CUDA alone: their formulas stand in, the sinks are ours."""
    monkeypatch.setattr(attention_sinks, "varlen_forward", flash_forward)
    monkeypatch.setattr(attention_sinks, "varlen_backward", flash_backward)
    q, k, v, sinks = leaves = tensors(9, 9)
    layout = None if lengths is None else PackedLayout.from_lengths(lengths)
    spec = AttentionSpec(SCALE, window=window, sinks=True)
    plan = PLANS["varlen"](layout, spec, queries=9, past=0, device=torch.device("cpu"))
    ours = attend(*(x.transpose(1, 2) for x in (q, k, v)), plan, sinks=sinks).transpose(1, 2)

    sees = causal(9, 9)
    if window >= 0:
        sees = sees.triu(-window)
    sees = sees.repeat(2, 1, 1, 1)
    if lengths is not None:
        sees[0, :, 3:, :3] = False
    assert_same(ours, plain(*leaves, sees), leaves)


def test_variable_length_attention_with_sinks_takes_pytorchs_operators() -> None:
    """Their fake versions check arguments, and give the shapes of output and gradients."""
    meta = {"device": "meta", "requires_grad": True}
    q = torch.empty(1, 12, 4, 20, dtype=torch.bfloat16, **meta)
    k, v = (torch.empty(1, 12, 2, 20, dtype=torch.bfloat16, **meta) for _ in range(2))
    sinks = torch.empty(4, **meta)
    spec = AttentionSpec(SCALE, window=3, sinks=True)
    plan = PLANS["varlen"](None, spec, queries=12, past=0, device=q.device)
    out = attend(q, k, v, plan, sinks=sinks)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, sinks))
    assert out.shape == q.shape and out.dtype == q.dtype
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v, sinks)]
