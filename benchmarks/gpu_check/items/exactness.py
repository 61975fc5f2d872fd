"""Kernels against float64 on the device at hand: the largest error of each case, and its bound.

The reference of attention and of the mixture is the plain backend `torch` in float64, which the
tests hold to the definition; that of the Triton kernels PyTorch's own steps in float64. Cases,
bounds and distances are those of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.items.measure import Here, Row, tried
from llmfoundry.ops.attention.select import attend, plan, refusal
from llmfoundry.ops.loss import linear_cross_entropy, reference_cross_entropy
from llmfoundry.ops.moe import mixture as moe
from llmfoundry.ops.packed_layout import IGNORE
from tests.ops.moe_layers import LAYERS, Layer, choices, distances, gradients, inputs
from tests.ops.plain_attention import DTYPES, GRID, TOLERANCE, Case, distance

BY_KERNELS = 3  # a GPU's sums run in another order: its bounds are so many times a CPU's
REAL = {  # the shapes of recipes
    "2048 tokens, 12 heads of 64": Case(12, 12, 64, ((2048,),), scale=0.125),
    "documents, 16 heads of 128": Case(16, 16, 128, ((500, 48, 1500),), scale=128**-0.5),
    "documents, 48 heads of 128 over 8": Case(48, 8, 128, ((700, 324),), scale=128**-0.5),
    "ALiBi": Case(16, 16, 128, ((1024,),), alibi=True, scale=128**-0.5),
    "ALiBi, documents": Case(16, 16, 128, ((300, 724),), alibi=True, scale=128**-0.5),
    "window of 256": Case(16, 4, 128, ((1024,),), window=255, scale=128**-0.5),
    "softcap": Case(8, 4, 256, ((1024,),), softcap=50.0, scale=0.0625),
    "window, softcap, documents": Case(8, 4, 128, ((700, 324),), window=255, softcap=50.0),
}
WIDE = {
    name: replace(case, head_dim=64, scale=0.125, lengths=lengths)
    for name, case in GRID.items()
    if name.startswith(("mha", "gqa", "mqa"))
    for lengths in [((300,), (300,)) if len(case.lengths[0]) == 1 else ((7, 200, 93), (300,))]
}
SMALL = [name for name in GRID if name.startswith("gqa")]
MOE_BOUNDS = {"fp32": 1e-5, "bf16": 3e-2}
LOSS_BOUNDS = {"fp32": (2e-5, 2e-5), "bf16": (2e-3, 3e-2)}
TRITON_BOUNDS = {"fp32": 1e-6, "bf16": 8e-3, "pack": 1.2e-2}


def attention(here: Here, *, impl: str, small: bool) -> Iterator[Row]:
    """One backend on every case that it serves: shapes of recipes, then all options combined."""
    cases = {name: GRID[name] for name in SMALL} if small else REAL | WIDE
    for dtype in ("bf16", "fp32"):
        if here.device.type == "cpu" and (impl, dtype) == ("torch", "bf16"):
            continue  # it is the reference, and computes in fp32
        for name, case in cases.items():
            row: Row = {"case": name, "dtype": dtype}
            if here.left() < 5:
                yield {**row, "not run": "no time was left"}
                continue
            spec = case.spec(device=here.device)
            if why := refusal(impl, spec, here.device, DTYPES[dtype], head_dim=case.head_dim):
                yield {**row, "not served": why}
                continue
            yield tried(row, partial(_attention_row, case, impl, dtype, here.device))


def _attention_row(case: Case, impl: str, dtype: str, device: torch.device) -> Row:
    times = BY_KERNELS if device.type == "cuda" else 1
    bounds = [times * bound for bound in TOLERANCE[dtype]]
    return _row(_attention_errors(case, impl, dtype, device), bounds)


def _attention_errors(
    case: Case, impl: str, dtype: str, device: torch.device
) -> tuple[float, float]:
    """Of the output, and of the gradients of q, k and v."""
    mine = _attention(case, impl, DTYPES[dtype], device)
    right = [x.cpu() for x in _attention(case, "torch", torch.float64, device)]
    return distance(mine[:1], right[:1]), distance(mine[1:], right[1:])


def _attention(case: Case, impl: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    q, k, v, grad = (x.to(device, dtype) for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    chosen = plan(
        case.layout().to(device),
        case.spec(torch.float64 if dtype == torch.float64 else torch.float32, device),
        queries=grad.shape[1],
        past=0,
        device=device,
        impl=impl,
        dtype=dtype,
    )
    out = attend(q, k, v, chosen)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _row(errors: tuple[float, float], bounds: list[float]) -> Row:
    """Errors beside their bounds; NaN is wrong too."""
    row: Row = {"output error": errors[0], "gradient error": errors[1], "bounds": bounds}
    if not all(error <= bound for error, bound in zip(errors, bounds, strict=True)):
        row["wrong"] = f"errors of {errors[0]:.1e} and {errors[1]:.1e} exceed {bounds}"
    return row


def mixtures(here: Here, *, impl: str, small: bool) -> Iterator[Row]:
    """The mixture of experts by one backend, also with 8-bit storage, on layers of all kinds."""
    layers = dict(list(LAYERS.items())[:4] if small else LAYERS)
    if not small:
        layers["dbrx-mini's"] = Layer(tokens=4096, d=512, f=896, experts=16, top_k=4)
    for dtype in ("bf16", "fp32"):
        for name, layer in layers.items():
            for compress in (False, True) if impl == "grouped_mm" else (False,):
                row: Row = {"case": name, "dtype": dtype + ", 8-bit storage" * compress}
                device, low = here.device.type, DTYPES[dtype]
                if layer.biased and impl == "megablocks":
                    continue  # whose experts have none
                if why := moe.refusal(impl, device, low, layer.d, layer.f):
                    yield {**row, "not served": why}
                    continue
                bounds = [MOE_BOUNDS["bf16" if compress else dtype]] * 2
                yield tried(row, partial(_mixture_row, layer, impl, low, device, compress, bounds))


def _mixture_row(
    layer: Layer, impl: str, dtype: torch.dtype, device: str, compress: bool, bounds: list[float]
) -> Row:
    return _row(_mixture_errors(layer, impl, dtype, device, compress=compress), bounds)


def _mixture_errors(
    layer: Layer, impl: str, dtype: torch.dtype, device: str, *, compress: bool
) -> tuple[float, float]:
    """Of the output, and the largest of the gradients', from the same rounded inputs."""
    picked = choices(layer).to(device)
    x, weights, w = inputs(layer, dtype, device)
    y = moe.mixture(x, weights, picked, w, impl=impl, compress=compress)
    mine = {"y": y.detach(), **gradients(y, x, weights, w)}
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    exact = w.map(lambda t: t.detach().double().requires_grad_())
    y = moe.mixture(wide[0], wide[1], picked, exact, impl="torch")
    found = distances(mine, {"y": y.detach(), **gradients(y, wide[0], wide[1], exact)})
    return found.pop("y"), max(found.values())


def triton(here: Here) -> Iterator[Row]:
    """Every Triton kernel on its own, and whether all keep NaN."""
    from tests.ops.moe_triton_interpreted import cases, lost
    from tests.ops.moe_triton_interpreted import distance as relative

    for dtype in ("bf16", "fp32"):
        without = lost(DTYPES[dtype], here.device.type)
        row: Row = {"case": "NaN stays NaN", "dtype": dtype}
        row |= {"output error": len(without), "bounds": [0]}
        yield {**row, "wrong": f"not by {', '.join(without)}"} if without else row
        for name, pairs in cases(DTYPES[dtype], here.device.type, exact=True).items():
            error = max(relative(*pair) for pair in pairs)
            bound = TRITON_BOUNDS["pack" if name == "pack" else dtype]
            row = {"case": name, "dtype": dtype, "output error": error, "bounds": [bound]}
            if not error <= bound:
                row["wrong"] = f"an error of {error:.1e} exceeds {bound}"
            yield row


def loss(here: Here, *, small: bool) -> Iterator[Row]:
    """The chunked loss, its gradients of hidden states and of the head."""
    size = {"tokens": 300, "d": 64, "vocabulary": 700}
    if not small:
        size = {"tokens": 6000, "d": 768, "vocabulary": 50368}
    options: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 30.0}}
    for dtype in ("bf16", "fp32"):
        for name, chosen in options.items():
            errors = _loss_errors(here.device, DTYPES[dtype], chosen, **size)
            yield {"case": name, "dtype": dtype, **_row(errors, list(LOSS_BOUNDS[dtype]))}


def _loss_errors(
    device: torch.device,
    dtype: torch.dtype,
    options: dict[str, Any],
    *,
    tokens: int,
    d: int,
    vocabulary: int,
) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, d, generator=generator)
    weight = torch.randn(vocabulary, d, generator=generator)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::7] = IGNORE
    found = []
    for function, wide in ((linear_cross_entropy, dtype), (reference_cross_entropy, torch.float64)):
        low = [hidden.to(device, dtype), (weight * d**-0.5).to(device, dtype)]
        leaves = [x.to(wide).requires_grad_() for x in low]
        total = function(leaves[0], leaves[1], labels.to(device), **options)
        grads = torch.autograd.grad(total, leaves)
        found.append([x.detach().cpu().double() for x in (total, *grads)])
    mine, right = found
    shares = [distance([a], [b]) for a, b in zip(mine, right, strict=True)]
    return shares[0], max(shares[1:])
