"""Matmuls at fp32's precision from bf16 parts, against float64 and the router's plain matmuls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmfoundry.models import router
from llmfoundry.models.router import WideLinear
from llmfoundry.ops import wide_matmul
from llmfoundry.ops.devices import PlannedDevice, planned_for

N, D, E = 300, 512, 16


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, D) in bf16, and a weight (E, D) and gradients (N, E) in fp32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator).bfloat16()
    weight = torch.randn(E, D, generator=generator) * 0.02
    grad = torch.randn(N, E, generator=generator) * 1e-6
    return x, weight, grad


def distance(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm())


def test_three_parts_are_the_number() -> None:
    _, weight, grad = tensors()
    for numbers in (weight, grad, torch.tensor([[0.0, 1.0, -1 / 3, 1e-30, 3e38, 1 + 2**-23]])):
        parts = wide_matmul.split(numbers)
        assert torch.equal(parts[:3].double().sum(0), numbers.double())
        assert torch.equal(parts[2:], parts[2].expand(3, *numbers.shape))


def test_results_are_as_near_float64_as_fp32_is() -> None:
    x, weight, grad = tensors()
    parts = wide_matmul.split(weight)
    dx, dweight = wide_matmul.gradients(grad, x, parts)
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    assert distance(wide_matmul.logits(x, parts), wide_x @ wide_weight.T) < 3e-7
    assert distance(dweight, wide_grad.T @ wide_x) < 3e-7
    exact = wide_grad @ wide_weight
    assert dx.dtype == torch.bfloat16
    rounded = exact.to(torch.bfloat16)
    assert (dx != rounded).float().mean() < 0.02  # bf16 operands alone: over two thirds
    assert distance(dx, exact) <= 1.001 * distance(rounded, exact)


def test_an_infinity_does_not_become_a_number() -> None:
    x, weight, _ = tensors()
    weight[3, 5] = float("inf")
    found = wide_matmul.logits(x, wide_matmul.split(weight))
    assert not found[:, 3].isfinite().any() and found[:, :3].isfinite().all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_routers_gradients_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype
) -> None:
    """Of weights in fp32, and in bf16 as `precision: bf16` has them."""
    x, weight, grad = tensors()
    found = []
    for is_split in (False, True):
        monkeypatch.setattr(router, "_is_split", lambda _, s=is_split: s)
        leaves = [x.clone().requires_grad_(), weight.to(kind).requires_grad_()]
        y = WideLinear.apply(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, grad)])
    for plain, mine in zip(*found, strict=True):
        assert mine.dtype == plain.dtype
        far = distance(mine.detach(), plain.detach().double())
        assert far < (6e-7 if mine.dtype == torch.float32 else 3e-3)


class Wide(TorchDispatchMode):
    """Number of operations with a result that has an fp32 number for each of the tokens' values."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() >= N * D and leaf.dtype == torch.float32:
                self.found += 1
        return result


@pytest.mark.parametrize(("kind", "count"), [("cuda", 0), ("mps", 3)])
def test_no_fp32_copy_of_the_tokens_is_made_on_cuda(kind: str, count: int) -> None:
    """Elsewhere one in the forward pass, and in the backward pass another and the gradient."""
    device = PlannedDevice(kind, lambda function: function)
    with FakeTensorMode() as mode, planned_for(device):
        x, weight, grad = (mode.from_tensor(t) for t in tensors())
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        with Wide() as wide:
            torch.autograd.grad(WideLinear.apply(*leaves), leaves, grad)
    assert wide.found == count
