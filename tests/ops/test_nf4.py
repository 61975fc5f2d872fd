"""NF4 against bitsandbytes' stored values, its definition, and products in full precision."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops import nf4
from llmfoundry.ops.moe.experts import Experts
from llmfoundry.ops.moe.mixture import mixture

# Made by bitsandbytes 0.50.2 on a CPU: quantize_4bit(weights(rows, width), quant_type="nf4",
# compress_statistics=double), dequantize_4bit in fp32 and, with the state's dtype so set, in
# bfloat16; the first 16 digits of the SHA-256 of the tensors' bytes. None: fp32 values that differ
# in the last bit, because bitsandbytes adds up the scales' mean in fp32.
GOLDEN: dict[tuple[int, int, bool], tuple[str, str, str | None, str]] = {
    (48, 96, False): (
        "e6dccad10095dae0", "3566bc64811253c3", "95c5d2e47428e8a9", "e0c334c2e569ffaa",
    ),
    (48, 96, True): ("e6dccad10095dae0", "c32ae2680dc6cc79", None, "ca99441c0579f269"),
    (33, 70, False): (
        "43a08b0c957f1db0", "cdff320ba9ab4740", "a01aee1234ebb998", "e87b2f55b492dba2",
    ),
    (33, 70, True): (
        "43a08b0c957f1db0", "9c14ddafc51c0201", "4d88c420bb716414", "09d0ab0f35c4d4be",
    ),
    (512, 256, False): (
        "03b407297fc829aa", "54b592695fd01723", "bdae269a353c981b", "e7b800c163b2c9f1",
    ),
}  # fmt: skip


def weights(rows: int, width: int) -> Tensor:
    """Numbers that are the same everywhere, with rows of different size."""
    i = torch.arange(rows * width)
    v = ((i * 7919 + i // width * 104729) % 10007).float() / 10007 - 0.5
    return (v * v * v * ((i // width % 13) + 1).float()).view(rows, width)


def digest(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize(("rows", "width", "double"), GOLDEN)
def test_bytes_scales_and_values_are_bitsandbytes(rows: int, width: int, double: bool) -> None:
    packed, scales, fp32, bf16 = GOLDEN[rows, width, double]
    values = weights(rows, width)
    data = nf4.quantize(values, double=double)
    parts = nf4.Nf4Layout(values.numel(), double).split(data)
    assert digest(parts.packed[: values.numel() // 2]) == packed
    assert digest(parts.scales) == scales
    low = nf4.dequantize(data, values.shape, torch.bfloat16, double=double)
    assert digest(low.flatten()) == bf16
    wide = nf4.dequantize(data, values.shape, torch.float32, double=double)
    assert fp32 is None or digest(wide.flatten()) == fp32
    assert torch.equal(wide.bfloat16(), low)


@pytest.mark.parametrize("double", [False, True])
def test_each_value_becomes_the_nearest_of_sixteen(double: bool) -> None:
    values = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    data = nf4.quantize(values, double=double)
    parts = nf4.Nf4Layout(4000, double).split(data)
    exact = F.pad(values.flatten(), (0, 32)).view(-1, 64).abs().amax(1)
    if double:
        kept = nf4._scales(parts)
        assert (kept - exact).abs().max() < 0.02 * (exact - exact.mean()).abs().max()
    else:
        assert torch.equal(parts.scales, exact)
    scaled = F.pad(values.flatten(), (0, 32)).view(-1, 64) / exact[:, None]
    nearest = (scaled[..., None] - torch.tensor(nf4.CODE)).abs().argmin(-1)
    code = torch.stack([parts.packed >> 4, parts.packed & 15], 1).view(-1, 64)
    assert torch.equal(code.long(), nearest)


def test_seventeen_billion_values_take_4_127_bits_each() -> None:
    packing = nf4.Nf4Layout(131072 * 131072)
    assert 8 * packing.nbytes / packing.values == pytest.approx(
        4 + 8 / 64 + 32 / 64 / 256, rel=1e-6
    )
    assert nf4.Nf4Layout(1).nbytes == 80  # 16 + 16 + 1 + 32, to a multiple of 16


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (7, 9), (0, 4), (3, 64)])
@pytest.mark.parametrize("double", [False, True])
def test_any_size_comes_back(shape: tuple[int, int], double: bool) -> None:
    values = torch.linspace(-1, 1, shape[0] * shape[1]).view(shape)
    found = nf4.dequantize(nf4.quantize(values, double=double), shape, torch.float32, double=double)
    assert found.shape == shape
    assert torch.allclose(found, values, atol=0.16)


def test_zeros_stay_zeros_and_what_is_not_finite_is_refused() -> None:
    zeros = torch.zeros(4, 64)
    data = nf4.quantize(zeros)
    assert torch.equal(nf4.dequantize(data, (4, 64), torch.float32, double=True), zeros)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            nf4.quantize(torch.full((2, 64), bad))


def test_the_same_bytes_whatever_the_number_of_threads() -> None:
    values = weights(900, 512)
    before = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(nf4.quantize(values))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def kept_floats(out: Tensor, x: Tensor) -> int:
    """Values of floating-point tensors other than x that wait for the backward pass of `out`."""
    found = 0
    for name in dir(out.grad_fn):
        if name == "saved_tensors":
            saved = [t for t in out.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
            found += sum(t.numel() for t in saved if t.is_floating_point() and t is not x)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_with_the_dequantised_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    data = nf4.quantize(torch.randn(48, 80, generator=generator))
    weight = nf4.dequantize(data, (48, 80), dtype, double=True)
    x, grad = torch.randn(2, 5, 80, generator=generator), torch.randn(2, 5, 48, generator=generator)
    ours, plain = (x.to(dtype).requires_grad_() for _ in range(2))
    y, expected = nf4.nf4_linear(ours, data, 48, double=True), F.linear(plain, weight)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert kept_floats(y, ours) == 0
    y.backward(grad.to(dtype))
    expected.backward(grad.to(dtype))
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-5, atol=1e-5)


def test_operators_keep_pytorchs_rules() -> None:
    data = nf4.quantize(torch.randn(16, 32))
    x = torch.randn(3, 32, requires_grad=True)
    torch.library.opcheck(torch.ops.llmfoundry.nf4_linear.default, (x, data, 16, True))
    grad = torch.randn(3, 16)
    torch.library.opcheck(torch.ops.llmfoundry.nf4_linear_backward.default, (grad, data, 32, True))


@pytest.mark.parametrize("impl", ["grouped_mm", "torch"])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_mixture_is_that_with_dequantised_experts(impl: str, low: bool, gated: bool) -> None:
    n, f, d = 4, 24, 40
    generator = torch.Generator().manual_seed(2)
    matrices = [torch.randn(n, f, d, generator=generator) for _ in range(3)]
    stacks = [torch.stack([nf4.quantize(one) for one in stacked]) for stacked in matrices]
    dtype = torch.bfloat16 if low else torch.float32
    back = [
        torch.stack([nf4.dequantize(one, (f, d), dtype, double=True) for one in stacked])
        for stacked in stacks
    ]
    biases = torch.randn(n, f, generator=generator), None, torch.randn(n, d, generator=generator)
    packing = nf4.Nf4Layout(f * d)
    quantised = Experts(
        stacks[0], stacks[1] if gated else None, stacks[2], *biases, "silu", packing=packing
    )
    plain = Experts(back[0], back[1] if gated else None, back[2], *biases, "silu")
    x, choice = torch.randn(30, d, generator=generator), torch.rand(30, n, generator=generator)
    experts = choice.topk(2).indices
    grad = torch.randn(30, d, generator=generator)
    found = []
    for w in (quantised, plain):
        mine, scores = x.clone().requires_grad_(), choice[:, :2].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = mixture(mine, scores, experts, w, impl=impl)
        y.backward(grad.to(y.dtype))
        found.append((y, mine.grad, scores.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
