"""Attention by products on a CPU against the definition in float64; what it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.ops.attention import products as attention_products
from llmfoundry.ops.attention.backends import attend, plan
from tests.ops.plain_attention import CPU, TOLERANCE, Case, distance

CASES = {
    "heads": Case(heads=2, kv_heads=2, lengths=((256,), (256,))),
    "shared heads": Case(heads=6, kv_heads=2, lengths=((384,), (384,), (384,))),
    "one chunk": Case(heads=2, kv_heads=1, lengths=((128,),)),
    "head_dim 5": Case(heads=2, kv_heads=1, head_dim=5, lengths=((256,),)),
    "alibi": Case(heads=4, kv_heads=2, lengths=((256,), (256,)), alibi=True),
    "window": Case(heads=2, kv_heads=1, lengths=((512,),), window=40),
    "window of itself": Case(heads=2, kv_heads=1, lengths=((256,),), window=0),
    "long rows": Case(heads=2, kv_heads=1, lengths=((1024,),), window=300),
    "alibi and a window": Case(heads=4, kv_heads=2, lengths=((512,),), window=130, alibi=True),
}


@pytest.fixture(autouse=True)
def _instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are right on any processor, only slower where oneDNN emulates bf16."""
    monkeypatch.setattr(attention_products, "HAS_BF16", True)


def attention(case: Case, dtype: torch.dtype, impl: str, *, loud: float = 1.0) -> list[Tensor]:
    """Output, and gradients of q, k, v; queries `loud` times as large."""
    q, k, v, weight = (x.to(dtype) for x in case.tensors())
    q, k, v = (x.requires_grad_() for x in (q * loud, k, v))
    spec = case.spec(torch.float64 if dtype == torch.float64 else torch.float32)
    chosen = plan(None, spec, queries=q.shape[1], past=0, device=CPU, impl=impl, dtype=dtype)
    out = attend(q, k, v, chosen)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weight)]


@pytest.mark.parametrize(("values", "kept"), [(attention_products.VALUES, 0), (1, 1024)])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_definitions(
    name: str, values: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a batch at once, weights taken again; one by one, and the weights kept."""
    monkeypatch.setattr(attention_products, "VALUES", values)
    monkeypatch.setattr(attention_products, "KEPT", kept)
    out, *gradients = attention(CASES[name], torch.bfloat16, "sdpa")
    expected, *slopes = attention(CASES[name], torch.float64, "torch")
    assert distance([out], [expected]) <= TOLERANCE["bf16"][0]
    assert distance(gradients, slopes) <= TOLERANCE["bf16"][1]


def test_large_logits_are_not_rounded_to_bf16() -> None:
    case = CASES["heads"]
    (ours, *_), (exact, *_) = (
        attention(case, dtype, impl, loud=16.0)
        for dtype, impl in ((torch.bfloat16, "sdpa"), (torch.float64, "torch"))
    )
    q, k, v, _ = (x.transpose(1, 2) for x in case.tensors())
    logits = (q @ k.mT * (16 * case.scale)).bfloat16().double()
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    coarse = (logits.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)
    assert distance([ours], [exact]) <= TOLERANCE["bf16"][0]
    assert distance([coarse], [exact]) > 4 * TOLERANCE["bf16"][0]


def test_parts_of_one_projection_are_served() -> None:
    case = CASES["shared heads"]
    fused = torch.cat(case.tensors()[:3], dim=2).bfloat16()
    parts = fused.split((case.heads, case.kv_heads, case.kv_heads), dim=2)
    assert not any(part.is_contiguous() for part in parts)
    chosen = plan(None, case.spec(), queries=384, past=0, device=CPU, impl="sdpa")
    torch.testing.assert_close(
        attend(*parts, chosen), attention(case, torch.bfloat16, "sdpa")[0], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("dtype", "queries", "dropout", "served"),
    [
        (torch.bfloat16, 128, 0.0, True),
        (torch.bfloat16, 1024, 0.0, True),
        (torch.bfloat16, 2048, 0.0, True),
        (torch.bfloat16, 1152, 0.0, False),
        (torch.bfloat16, 4096, 0.0, False),
        (torch.bfloat16, 300, 0.0, False),
        (torch.bfloat16, 256, 0.1, False),
        (torch.float32, 256, 0.0, False),
        (torch.float16, 256, 0.0, False),
    ],
)
def test_whole_chunks_of_bf16_without_dropout_are_served(
    dtype: torch.dtype, queries: int, dropout: float, served: bool
) -> None:
    assert attention_products.serves(dtype, queries, dropout) == served


def test_without_the_instructions_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_products, "HAS_BF16", False)
    assert not attention_products.serves(torch.bfloat16, 256, 0.0)


@pytest.mark.parametrize(("kept", "products"), [(0, 2 + 5), (512, 2 + 4)])
@pytest.mark.parametrize(("name", "logits"), [("heads", 3), ("window of itself", 2)])
def test_flops_are_those_of_the_chunks_that_are_seen(
    name: str, logits: int, kept: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making logits precise is no work of the model's."""
    monkeypatch.setattr(attention_products, "KEPT", kept)
    case = CASES[name]
    with FlopCounterMode(display=False) as counter:
        attention(case, torch.bfloat16, "sdpa")
    one = 2 * len(case.lengths) * case.heads * case.head_dim * logits * 128 * 128
    assert counter.get_total_flops() == products * one


def test_weights_are_kept_for_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of at most KEPT tokens: 128 * (128 + 256) of each head and row in two bytes."""
    q, k, v = (x.bfloat16() for x in CASES["heads"].tensors()[:3])
    sizes: list[int] = []

    def attended(*, wanted: bool) -> int:
        sizes.clear()
        leaves = (q, k, v.requires_grad_(wanted))
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            attention_products.attend(*leaves, None, scale=1.0, window=-1)
        return max(sizes, default=0)

    def save(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    assert attended(wanted=True) == 2 * 2 * 128 * 384
    assert attended(wanted=False) == 0
    monkeypatch.setattr(attention_products, "KEPT", 128)
    assert attended(wanted=True) == q.numel()


def test_the_operator_keeps_pytorchs_rules() -> None:
    """Its schema, the shapes that torch.compile takes for granted, and its derivative."""
    case = CASES["alibi"]
    q, k, v = (x.bfloat16().requires_grad_() for x in case.tensors()[:3])
    bias = torch.zeros(1, case.heads, 256, 256)
    for keep in (False, True):
        torch.library.opcheck(
            torch.ops.llmfoundry.causal_attention, (q, k, v, bias, case.scale, -1, keep)
        )
