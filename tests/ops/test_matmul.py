"""Products by oneDNN: those of PyTorch in every form, with their gradients."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.ops import matmul

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Any processor is taken for one that MKL is slow on; what oneDNN was asked."""
    monkeypatch.setattr(matmul, "_prefers_onednn", lambda: True)
    asked = MagicMock(wraps=torch.ops.mkldnn._linear_pointwise)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", asked)
    return asked


def random(*size: int) -> torch.Tensor:
    """The same at every call."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_products_are_exact_to_fp32_in_every_layout(calls: MagicMock, rows: int) -> None:
    a, b = random(rows, 40), random(40, 24)
    exact = (a.double() @ b.double()).float()
    out = torch.full((rows + 2, 24), 9.0)
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            torch.testing.assert_close(matmul.mm(left, right), exact, rtol=1e-5, atol=1e-5)
            assert matmul.mm(left, right, out=out[1:-1]).data_ptr() == out[1].data_ptr()
            torch.testing.assert_close(out[1:-1], exact, rtol=1e-5, atol=1e-5)
    assert calls.call_count == 8 and (out[0] == 9).all() and (out[-1] == 9).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_empty_products_are_pytorchs(calls: MagicMock, dtype: torch.dtype) -> None:
    a, b = random(3, 4), random(4, 5)
    assert torch.equal(matmul.mm(a.to(dtype), b.to(dtype)), a.to(dtype) @ b.to(dtype))
    assert matmul.mm(a[:0], b).shape == (0, 5)
    assert not matmul.mm(a[:, :0], b[:0]).any()
    calls.assert_not_called()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "x", "weight"])
def test_linear_has_the_gradients_of_pytorchs(
    calls: MagicMock, has_bias: bool, frozen: str
) -> None:
    found = []
    for function in (matmul.linear, F.linear):
        x, weight = random(2, 9, 80).requires_grad_(), random(72, 80).requires_grad_()
        bias = random(72).requires_grad_() if has_bias else None
        leaves = {"x": x, "weight": weight, "bias": bias}
        if frozen != "nothing":
            leaves[frozen].requires_grad_(False)
        y = function(x, weight, bias)
        (y * random(2, 9, 72)).sum().backward()
        found.append([y.detach(), *(t.grad for t in leaves.values() if t is not None)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert calls.call_count == (3 if frozen == "nothing" else 2)


@pytest.mark.parametrize(("ins", "outs"), [(80, 16), (16, 80)])
def test_layers_of_few_features_are_pytorchs(calls: MagicMock, ins: int, outs: int) -> None:
    x, weight = random(2, 9, ins).requires_grad_(), random(outs, ins)
    matmul.linear(x, weight).sum().backward()
    calls.assert_not_called()


def test_small_products_without_gradients_and_autocast_are_left_alone(calls: MagicMock) -> None:
    x, weight = random(4, 16), random(8, 16).requires_grad_()
    with torch.no_grad():
        assert torch.equal(matmul.linear(x, weight), F.linear(x, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul.linear(x, weight).dtype == torch.bfloat16
    calls.assert_not_called()
    large = random(1024, 256)
    with torch.no_grad():
        matmul.linear(large, random(512, 256))
    calls.assert_called_once()


def test_their_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(matmul, "_prefers_onednn", lambda: True)
    counts = []
    for function in (matmul.linear, F.linear):
        x, weight = random(5, 16).requires_grad_(), random(12, 16).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            function(x, weight).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 5 * 16 * 12
