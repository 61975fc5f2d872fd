"""On a GPU: every kernel against float64, on the shapes of recipes and all options combined.

The reference of attention and of the mixture is the plain backend `torch` in float64, which other
tests compare with the definition; that of the Triton kernels PyTorch's own operations in float64.
Each test records its errors, which `make gpu-check` puts into its page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.models.router import WideLinear
from llmfoundry.ops.attention.select import IMPLS, attend, refusal
from llmfoundry.ops.loss import linear_cross_entropy, reference_cross_entropy
from llmfoundry.ops.moe import fp8
from llmfoundry.ops.moe import mixture as moe
from llmfoundry.ops.moe.gpu import steps_of
from llmfoundry.ops.packed_layout import IGNORE
from tests.ops.moe_layers import LAYERS, Layer, choices, distances, gradients, inputs
from tests.ops.plain_attention import DTYPES, GRID, TOLERANCE, Case, distance, plan

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")
BY_KERNELS = 3  # a GPU's sums run in another order: its bounds are so many times a CPU's
BACKENDS = ("sdpa", "varlen", "flex", "flash", "flash3", "torch")
CASES = {  # the shapes of recipes
    "2048 tokens, 12 heads of 64": Case(12, 12, 64, ((2048,),), scale=0.125),
    "documents, 16 heads of 128": Case(16, 16, 128, ((500, 48, 1500),), scale=128**-0.5),
    "documents, 48 heads of 128 over 8": Case(48, 8, 128, ((700, 324),), scale=128**-0.5),
    "ALiBi": Case(16, 16, 128, ((1024,),), alibi=True, scale=128**-0.5),
    "ALiBi, documents": Case(16, 16, 128, ((300, 724),), alibi=True, scale=128**-0.5),
    "window of 256": Case(16, 4, 128, ((1024,),), window=255, scale=128**-0.5),
    "softcap": Case(8, 4, 256, ((1024,),), softcap=50.0, scale=0.0625),
    "window, softcap, documents": Case(8, 4, 128, ((700, 324),), window=255, softcap=50.0),
} | {
    name: replace(case, head_dim=64, scale=0.125, lengths=lengths)
    for name, case in GRID.items()
    if name.startswith(("mha", "gqa", "mqa"))
    for lengths in [((300,), (300,)) if len(case.lengths[0]) == 1 else ((7, 200, 93), (300,))]
}
MIXTURES = LAYERS | {"dbrx-mini's": Layer(tokens=4096, d=512, f=896, experts=16, top_k=4)}
MOE_BOUNDS = {"fp32": 1e-5, "bf16": 3e-2}
LOSS_BOUNDS = {"fp32": (2e-5, 2e-5), "bf16": (2e-3, 3e-2)}
TRITON_BOUNDS = {"fp32": 1e-6, "bf16": 8e-3}

Record = Callable[[str, Any], None]


def compare(record: Record, errors: Mapping[str, tuple[float, float]], *bounds: float) -> None:
    """Errors by case, of the output and of gradients, with the bounds; NaN exceeds every bound."""
    if not errors:
        pytest.skip("no case is served")
    record("cases", len(errors))
    record("output error", max(output for output, _ in errors.values()))
    record("gradient error", max(gradient for _, gradient in errors.values()))
    wrong = {k: e for k, e in errors.items() if not (e[0] <= bounds[0] and e[1] <= bounds[-1])}
    assert not wrong, f"beyond {bounds}: {wrong}"


def attention_errors(
    case: Case, impl: str, dtype: str, device: torch.device
) -> tuple[float, float]:
    """Of the output, and of the gradients of q, k and v, as shares of the largest value."""
    torch._dynamo.reset()  # flex compiles each case anew, and gives up after a number of them
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


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("impl", BACKENDS)
def test_attention(impl: str, dtype: str, record_property: Record) -> None:
    """On every case that the backend serves."""
    errors = {
        name: attention_errors(case, impl, dtype, CUDA)
        for name, case in CASES.items()
        if not refusal(impl, case.spec(device=CUDA), CUDA, DTYPES[dtype], head_dim=case.head_dim)
    }
    compare(record_property, errors, *(BY_KERNELS * bound for bound in TOLERANCE[dtype]))


def test_a_backend_that_is_off_by_a_percent_exceeds_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, cpu = IMPLS["sdpa"], torch.device("cpu")
    for name in ("gqa-rows", "gqa-window-packed"):
        for dtype in ("bf16", "fp32"):
            bounds = TOLERANCE[dtype]
            errors = attention_errors(GRID[name], "sdpa", dtype, cpu)
            assert all(a <= b for a, b in zip(errors, bounds, strict=True))
            with monkeypatch.context() as patch:
                patch.setitem(IMPLS, "sdpa", lambda *given: 1.01 * right(*given))
                errors = attention_errors(GRID[name], "sdpa", dtype, cpu)
            assert any(a > b for a, b in zip(errors, bounds, strict=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("impl", ["grouped_mm", "megablocks"])
def test_mixture(impl: str, dtype: str, record_property: Record) -> None:
    """On layers of all kinds; megablocks' experts have no biases."""
    errors = {
        name: mixture_errors(layer, impl, DTYPES[dtype])
        for name, layer in MIXTURES.items()
        if not (layer.biased and impl == "megablocks")
        and not moe.refusal(impl, "cuda", DTYPES[dtype], layer.d, layer.f)
    }
    compare(record_property, errors, MOE_BOUNDS[dtype])


def mixture_errors(layer: Layer, impl: str, dtype: torch.dtype) -> tuple[float, float]:
    """Of the output, and the largest of the gradients', from the same rounded inputs."""
    picked = choices(layer).to("cuda")
    x, weights, w = inputs(layer, dtype, "cuda")
    y = moe.mixture(x, weights, picked, w, impl=impl)
    mine = {"y": y.detach(), **gradients(y, x, weights, w)}
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    exact = w.map(lambda t: t.detach().double().requires_grad_())
    y = moe.mixture(wide[0], wide[1], picked, exact, impl="torch")
    found = distances(mine, {"y": y.detach(), **gradients(y, wide[0], wide[1], exact)})
    return found.pop("y"), max(found.values())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_triton_kernels(dtype: str, record_property: Record) -> None:
    """Each on its own; all keep NaN."""
    pytest.importorskip("triton")
    from tests.ops import moe_triton_interpreted as kernels

    assert not kernels.lost(DTYPES[dtype], "cuda"), "NaN does not stay NaN"
    assert all(kernels.routes("cuda").values())
    if torch.cuda.get_device_capability() >= (8, 9):
        assert all(kernels.quantized("cuda").values())
        assert all(kernels.quantized_to_mx("cuda").values())
    for name, pairs in kernels.cases(DTYPES[dtype], "cuda", exact=True).items():
        error = max(kernels.distance(*pair) for pair in pairs)
        record_property(name, error)
        assert error <= TRITON_BOUNDS[dtype], name


@pytest.mark.gpu
@needs_cuda
def test_router_products_without_a_copy_of_the_tokens() -> None:
    """Of bf16 tokens and fp32 weights, as near float64 as on a CPU."""
    from tests.ops import test_wide_matmul as router

    x, weight, grad = (t.to(CUDA) for t in router.tensors())
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = WideLinear.apply(*leaves)
    dx, dweight = torch.autograd.grad(y, leaves, grad)
    wide_x, wide_weight, wide_grad = (t.detach().double() for t in (x, weight, grad))
    assert router.distance(y.detach(), wide_x @ wide_weight.T) < 1e-6
    assert router.distance(dweight, wide_grad.T @ wide_x) < 1e-6
    assert router.distance(dx, wide_grad @ wide_weight) < 3e-3


FP8_LAYERS = {
    "odd numbers of rows": Layer(tokens=37, d=64, f=96, biased=True),
    "experts that nobody chooses": Layer(tokens=300, d=128, f=256, load="first"),
    "an MLP": Layer(tokens=200, d=64, f=96, gated=False),
    "dbrx-mini's": MIXTURES["dbrx-mini's"],
}


@pytest.mark.gpu
@needs_cuda
def test_experts_in_fp8(record_property: Record) -> None:
    """PyTorch's matmuls against the emulation on the same device: only sums differ."""
    if fp8.refusal(CUDA, 16, emulate=False) is not None:
        pytest.skip("has no fp8 matmuls of experts")
    method = fp8.method_of(CUDA, emulate=False)
    assert method != fp8.MXFP8 or fp8.fault(CUDA, steps_of(CUDA)) is None
    errors = {}
    for name, layer in FP8_LAYERS.items():
        found = []
        for how in (method, method + fp8.EMULATED):
            x, weights, w = inputs(layer, torch.bfloat16, "cuda")
            some = replace(w, fp8=how)
            y = moe.mixture(x, weights, choices(layer).to(CUDA), some, impl="grouped_mm")
            found.append({"y": y.detach(), **gradients(y, x, weights, w)})
        apart = distances(found[0], {k: t.double() for k, t in found[1].items()})
        errors[name] = (apart.pop("y"), max(apart.values()))
    compare(record_property, errors, MOE_BOUNDS["bf16"])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bit_kernels(kind: str, dtype: str, record_property: Record) -> None:
    """By the format's definition: half a step at most, scales rounded to bf16."""
    pytest.importorskip("triton")
    from tests.ops import blockwise_triton_interpreted as kernels

    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3")
    far = kernels.compare(DTYPES[dtype], kind, "cuda")
    for name, error in far.items():
        record_property(name, error)
    assert far["scale"] <= 2**-8 and far["value"] <= 1 + 1e-6
    assert far["restored"] == far["lost"] == 0


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2**-8), ("fp32", 2e-5)])
def test_loss_kernel(dtype: str, bound: float, record_property: Record) -> None:
    """By autograd of the plain formula in float64."""
    pytest.importorskip("triton")
    from tests.ops import loss_triton_interpreted as kernel

    for name, (nats, grad) in kernel.distances(DTYPES[dtype], "cuda").items():
        record_property(name, [nats, grad])
        assert nats < 2e-5 and grad < bound, name
    assert kernel.finite_losses("cuda") == []


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_chunked_loss(softcap: float | None, dtype: str, record_property: Record) -> None:
    """With its gradients of hidden states and of the head."""
    options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    generator, (tokens, d, vocabulary) = torch.Generator().manual_seed(0), (6000, 768, 50368)
    hidden = torch.randn(tokens, d, generator=generator)
    weight = torch.randn(vocabulary, d, generator=generator)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::7] = IGNORE
    found, wides = [], (DTYPES[dtype], torch.float64)
    for function, wide in zip((linear_cross_entropy, reference_cross_entropy), wides, strict=True):
        low = [hidden.to(CUDA, DTYPES[dtype]), (weight * d**-0.5).to(CUDA, DTYPES[dtype])]
        leaves = [x.to(wide).requires_grad_() for x in low]
        total = function(leaves[0], leaves[1], labels.to(CUDA), **options)
        grads = torch.autograd.grad(total, leaves)
        found.append([x.detach().cpu().double() for x in (total, *grads)])
    shares = [distance([a], [b]) for a, b in zip(*found, strict=True)]
    errors = {"all": (shares[0], max(shares[1:]))}
    compare(record_property, errors, *LOSS_BOUNDS[dtype])
