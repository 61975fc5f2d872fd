"""A mixture of experts at random, for the tests of its backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry.ops.moe.experts import Experts
from llmfoundry.ops.moe.mixture import mixture


@dataclass(frozen=True)
class Layer:
    """Sizes and settings; `load` is how a token finds its experts."""

    tokens: int = 40
    d: int = 16
    f: int = 24
    experts: int = 6
    top_k: int = 3
    gated: bool = True
    biased: bool = False
    activation: str = "silu"
    load: str = "even"  # even; skewed; first: always the first top_k


LAYERS = {
    "a GLU": Layer(),
    "an MLP": Layer(gated=False),
    "a GLU with biases": Layer(biased=True),
    "an MLP with biases": Layer(gated=False, biased=True),
    "GELU": Layer(activation="gelu"),
    "tanh-GELU": Layer(activation="gelu_tanh", gated=False),
    "ReLU": Layer(activation="relu"),
    "another activation": Layer(activation="leaky_relu negative_slope=0.1"),
    "clamped GLU": Layer(activation="quick_gelu glu_limit=0.8"),
    "one choice": Layer(top_k=1),
    "every choice": Layer(top_k=6),
    "one expert": Layer(experts=1, top_k=1),
    "more experts than tokens": Layer(tokens=3, experts=16, top_k=2, biased=True),
    "skewed load": Layer(tokens=200, load="skewed"),
    "experts that nobody chooses": Layer(load="first", biased=True),
    "one token": Layer(tokens=1),
}


def choices(layer: Layer) -> Tensor:
    """Experts (T, k), different ones of a token."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(layer.tokens, layer.experts, generator=generator)
    if layer.load == "skewed":
        scores -= torch.arange(layer.experts) * 1.5
    elif layer.load == "first":
        scores -= torch.arange(layer.experts) * 100
    return scores.topk(layer.top_k).indices


def inputs(layer: Layer, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Experts]:
    """Leaves x (T, d), weights (T, k) and experts: the same values, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(2)

    def leaf(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator) * scale
        return values.to(device, dtype).requires_grad_()

    n, f, d = layer.experts, layer.f, layer.d
    x = leaf(layer.tokens, d)
    weights = torch.rand(layer.tokens, layer.top_k, generator=generator).to(device)
    weights = weights.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_()
    w1, v1, w2 = (leaf(n, f, d, scale=d**-0.5) for _ in range(3))
    b1, bv, b2 = leaf(n, f), leaf(n, f), leaf(n, d)
    if not layer.gated:
        v1 = bv = None
    if not layer.biased:
        b1 = bv = b2 = None
    return x, weights, Experts(w1, v1, w2, b1, bv, b2, layer.activation)


def run(layer: Layer, impl: str, dtype: torch.dtype, *, device: str = "cpu") -> dict[str, Tensor]:
    """Output and gradients by name, of a backward pass from random gradients."""
    x, weights, w = inputs(layer, dtype, device)
    y = mixture(x, weights, choices(layer).to(device), w, impl=impl)
    return {"y": y.detach(), **gradients(y, x, weights, w)}


def gradients(y: Tensor, x: Tensor, weights: Tensor, w: Experts) -> dict[str, Tensor]:
    """By name."""
    names = ("x", "weights", "w1", "v1", "w2", "b1", "bv", "b2")
    leaves = {
        name: leaf
        for name, leaf in zip(names, (x, weights, *w.tensors()), strict=True)
        if leaf is not None
    }
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))


def distances(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance, by name, in the norm over all elements."""
    assert mine.keys() == exact.keys()
    return {
        name: float(
            (mine[name].double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-30)
        )
        for name in exact
    }
