"""Attention sinks: each route next to a softmax with one more column, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from llmfoundry.ops.attention.sinks import attend_on_cpu, scaled_by_sinks, with_sink_key

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
