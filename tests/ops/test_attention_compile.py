"""Attention inside a compiled block: one graph where it can be, and no new one for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen

from llmfoundry.ops.attention import flash as attention_varlen
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec
from llmfoundry.ops.attention.select import PLANS, attend
from llmfoundry.ops.packed_layout import PackedLayout
from tests.ops.plain_attention import CPU, plan

BATCHES = [((13, 51), (64,)), ((1, 63), (64,)), ((20, 20, 24), (30, 34)), ((64,), (8,) * 8)]
WHOLE = ((64,), (64,))
SLOPES = torch.tensor([0.5, 0.25])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(x: Tensor, plan: AttentionPlan) -> Tensor:
    """As a decoder's: a projection, attention, a projection."""
    heads = x.sin().unflatten(-1, (2, 4))
    return attend(heads, heads, heads, plan, training=True).flatten(-2).cos()


def counting(fullgraph: bool, backend: str = "eager") -> tuple[CompileCounterWithBackend, Callable]:
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(block, backend=counter, fullgraph=fullgraph)


@pytest.mark.parametrize(
    ("queries", "dtype"),
    [(64, torch.float32), (256, torch.float32), (256, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("impl", "spec"),
    [
        ("sdpa", AttentionSpec(0.3)),
        ("sdpa", AttentionSpec(0.3, slopes=SLOPES, window=30)),
        ("torch", AttentionSpec(0.3, 2.0, SLOPES, 30)),
    ],
)
def test_rows_are_one_graph(
    impl: str, spec: AttentionSpec, queries: int, dtype: torch.dtype
) -> None:
    counter, compiled = counting(fullgraph=True, backend="aot_eager")
    x = torch.randn(1, queries, 8).to(dtype)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):  # a plan for each step
        chosen = plan(None, spec, queries=queries, past=0, device=CPU, impl=impl, dtype=dtype)
        out = compiled(ours, chosen)
    expected = block(plain, chosen)
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=allowed, atol=allowed)
    grads = (torch.autograd.grad(y.sum(), z)[0] for y, z in ((out, ours), (expected, plain)))
    torch.testing.assert_close(*grads, rtol=allowed, atol=allowed)
    assert counter.frame_count == 1


def test_under_autocast_rows_are_one_graph() -> None:
    counter, compiled = counting(fullgraph=True)
    x = torch.randn(1, 256, 8)
    chosen = plan(None, AttentionSpec(0.3), queries=256, past=0, device=CPU, impl="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compiled(x, chosen), block(x, chosen)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", [AttentionSpec(0.3), AttentionSpec(0.3, slopes=SLOPES, window=9)])
def test_documents_on_a_cpu_are_left_out_of_the_graph_and_compile_nothing_anew(
    spec: AttentionSpec,
) -> None:
    counter, compiled = counting(fullgraph=False)
    x = torch.randn(2, 64, 8)
    counts = []
    for lengths in (*BATCHES, WHOLE, BATCHES[0], WHOLE, *BATCHES):
        layout = PackedLayout.from_lengths(lengths)
        chosen = plan(layout, spec, queries=64, past=0, device=CPU, impl="sdpa")
        torch.testing.assert_close(compiled(x, chosen), block(x, chosen))
        counts.append(counter.frame_count)
    assert counts[: len(BATCHES)] == [counts[0]] * len(BATCHES)
    assert counts[0] <= 4  # before and after attention, in the block and in `attend`
    assert counts[len(BATCHES) :] == [counts[len(BATCHES)]] * (len(BATCHES) + 3)  # rows, once


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.3),
        AttentionSpec(0.3, window=9),
        AttentionSpec(0.3, 2.0, SLOPES),
        AttentionSpec(0.3, 2.0, SLOPES, 9),
    ],
)
def test_flex_is_in_the_graph_and_new_documents_compile_nothing_anew(spec: AttentionSpec) -> None:
    counter, compiled = counting(fullgraph=True)
    x = torch.randn(2, 64, 8)
    for lengths in BATCHES:
        layout = PackedLayout.from_lengths(lengths)
        chosen = PLANS["flex"](layout, spec, queries=64, past=0, device=CPU)
        exact = plan(layout, spec, queries=64, past=0, device=CPU, impl="torch")
        torch.testing.assert_close(compiled(x, chosen), block(x, exact))
    assert counter.frame_count == 1


def test_layers_of_other_rules_share_no_graph_of_flex() -> None:
    counter, compiled = counting(fullgraph=True)
    x = torch.randn(2, 64, 8)
    kinds = [
        AttentionSpec(0.3, window=9),
        AttentionSpec(0.3, window=20),
        AttentionSpec(0.3),
        AttentionSpec(0.3, 2.0),
    ]
    for spec in (*kinds, *kinds):
        chosen = PLANS["flex"](None, spec, queries=64, past=0, device=CPU)
        exact = plan(None, spec, queries=64, past=0, device=CPU, impl="torch")
        torch.testing.assert_close(compiled(x, chosen), block(x, exact))
    assert counter.frame_count == len(kinds)


def test_varlen_is_in_the_graph_and_new_documents_compile_it_once_more_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *borders: Tensor | int, **options: object
    ) -> Tensor:
        first, _, longest, _ = borders
        return q + len(first) + longest  # shows which plan was used

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    attention_varlen._varlen_parameters.cache_clear()
    counter, compiled = counting(fullgraph=True)
    x = torch.randn(2, 64, 8)
    for lengths in BATCHES:
        layout = PackedLayout.from_lengths(lengths)
        chosen = PLANS["varlen"](layout, AttentionSpec(0.3), queries=64, past=0, device=CPU)
        torch.testing.assert_close(compiled(x, chosen), block(x, chosen))
    attention_varlen._varlen_parameters.cache_clear()
    assert counter.frame_count <= 2  # its lengths become variables
