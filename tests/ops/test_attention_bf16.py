"""Attention of whole rows in bf16 on a CPU against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmfoundry.ops.attention.select import attend
from tests.ops.plain_attention import CPU, TOLERANCE, Case, distance, plan

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


def attention(case: Case, dtype: torch.dtype, impl: str, *, loud: float = 1.0) -> list[Tensor]:
    """Output, and gradients of q, k, v; queries `loud` times as large."""
    q, k, v, weight = (x.to(dtype) for x in case.tensors())
    q, k, v = (x.requires_grad_() for x in (q * loud, k, v))
    spec = case.spec(torch.float64 if dtype == torch.float64 else torch.float32)
    chosen = plan(None, spec, queries=q.shape[1], past=0, device=CPU, impl=impl, dtype=dtype)
    out = attend(q, k, v, chosen)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weight)]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_definitions(name: str) -> None:
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
