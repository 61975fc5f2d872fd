"""Experts in 8-bit floating point: rows of torchao, a float64 formula, and shapes.

`test_moe_mxfp8.py` has what MXFP8 alone has: blocks, and tiles of scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmfoundry.ops.moe import experts as moe_steps
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe.experts import Experts, ScaledRows, quantize, route
from llmfoundry.ops.moe.fp8 import EMULATED, METHODS, MXFP8, ROWWISE, method_of, refusal
from llmfoundry.ops.moe.mixture import mixture
from tests.ops.moe_layers import Layer, choices, distances, gradients, inputs

LAYERS = {
    "a GLU": Layer(d=32, f=48),
    "an MLP": Layer(d=32, f=48, gated=False, activation="gelu"),
    "with biases": Layer(d=32, f=48, biased=True),
    "a clamped GLU": Layer(d=32, f=48, activation="quick_gelu glu_limit=0.8"),
    "experts that nobody chooses": Layer(d=32, f=48, load="first", biased=True),
    "no tokens": Layer(tokens=0, d=32, f=48),
}


def in_fp8(w: Experts, how: str = ROWWISE + EMULATED, *, known: bool = False) -> Experts:
    """The experts, multiplied in fp8; `known`: with matrices that are quantized beforehand."""
    every = [t for t in (w.w1, w.v1, w.w2) if t is not None] if known else []
    quantized = tuple(
        part
        for matrix in every
        for turned in (matrix.detach(), matrix.detach().transpose(1, 2).contiguous())
        for part in METHODS[how].scales.matrices(turned, moe_steps)
    )
    fields = (w.w1, w.v1, w.w2, w.b1, w.bv, w.b2)
    return Experts(*fields, activation=w.activation, fp8=how, quantized=quantized)


def rounded_rows(x: Tensor, dim: int) -> Tensor:
    """Values of x as rowwise fp8 stores them, in float64, by torchao's formulas."""
    utils = pytest.importorskip("torchao.float8.float8_utils")
    granularity = pytest.importorskip("torchao.float8.config").ScalingGranularity.AXISWISE
    if not x.numel():
        return x
    narrow = x.detach().float()
    scale = utils.tensor_to_scale(
        narrow, torch.float8_e4m3fn, scaling_granularity=granularity, axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    values = utils.to_fp8_saturated(narrow.float() * scale, torch.float8_e4m3fn)
    return values.double() / scale.double()


def rounded_blocks(x: Tensor, dim: int) -> Tensor:
    """Values of x as MXFP8 stores them, in float64: in blocks, the power of two rounded up."""
    blocks = x.detach().double().movedim(dim, -1).unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    values = (blocks / scale).float().to(torch.float8_e4m3fn).double() * scale
    return values.nan_to_num().flatten(-2).movedim(-1, dim)  # a block of zeros has the scale 0


ROUNDED = {ROWWISE: rounded_rows, MXFP8: rounded_blocks}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_are_quantized_as_by_torchao(dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(4)
    x = torch.randn(400, 96, generator=draws) * torch.randn(400, 1, generator=draws).exp() ** 4
    x[:8] = 0
    x[8:16, 0] = 7 * 2.0 ** torch.arange(8)  # quotients that are powers of two
    x[8:16, 1:] = 0.5
    x = x.to(dtype)
    utils = pytest.importorskip("torchao.float8.float8_utils")
    granularity = pytest.importorskip("torchao.float8.config").ScalingGranularity.AXISWISE
    scale = utils.tensor_to_scale(
        x, torch.float8_e4m3fn, scaling_granularity=granularity, axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    values = utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
    mine = quantize(x)
    assert torch.equal(mine.scales, scale[:, 0].reciprocal())
    assert torch.equal(mine.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_becomes_nan_alone(bad: float) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = bad
    back = quantize(x).dequantized()
    assert back[1].isnan().all() and back[[0, 2]].isfinite().all()


def formula(
    x: Tensor, weights: Tensor, experts: Tensor, w: Experts, grad: Tensor, rounded: Any
) -> dict[str, Tensor]:
    """Output and gradients, token by token in float64, with operands rounded where fp8 reads them.

    Written without the package's routing, layouts and matmuls.
    """

    def wide(t: Tensor | None) -> Any:
        return None if t is None else t.detach().double()

    x, weights, grad = (wide(t) for t in (x, weights, grad))
    w1, v1, w2, b1, bv, b2 = every = [wide(t) for t in w.tensors()]
    names = ("w1", "v1", "w2", "b1", "bv", "b2")
    sums = {n: torch.zeros_like(t) for n, t in zip(names, every, strict=True) if t is not None}
    y, dx, dweights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for t, chosen in enumerate(experts.tolist()):
        token, g = x[t], grad[t]
        for choice, e in enumerate(chosen):
            p = weights[t, choice]
            gate = rounded(w1[e], 1) @ rounded(token, 0) + (0 if b1 is None else b1[e])
            inner = [gate.requires_grad_()]
            if v1 is not None:
                up = rounded(v1[e], 1) @ rounded(token, 0) + (0 if bv is None else bv[e])
                inner.append(up.requires_grad_())
            h = w.act.function(gate)  # autograd for the derivative of the activation alone
            h = h if v1 is None else h * w.act.up(inner[1])
            out = rounded(h.detach(), 0) @ rounded(w2[e], 0) + (0 if b2 is None else b2[e])
            y[t] += p * out
            dh = rounded(w2[e], 1) @ rounded(g, 0)
            dweights[t, choice] = dh @ h.detach() + (0 if b2 is None else g @ b2[e])
            da, *db = torch.autograd.grad(h, inner, dh * p)
            dx[t] += rounded(da, 0) @ rounded(w1[e], 0)
            # gradients of weights: exact operands
            terms = {"w1": torch.outer(da, token), "w2": torch.outer(p * h.detach(), g)}
            terms |= {"b1": da, "b2": p * g}
            if v1 is not None:
                dx[t] += rounded(db[0], 0) @ rounded(v1[e], 0)
                terms |= {"v1": torch.outer(db[0], token), "bv": db[0]}
            for name in sums:
                sums[name][e] += terms[name]
    return {"y": y, "x": dx, "weights": dweights, **sums}


@pytest.mark.parametrize("known", [False, True], ids=["quantized", "quantized before"])
@pytest.mark.parametrize("method", ROUNDED)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_output_and_gradients_are_those_of_rounded_operands(
    layer: Layer, method: str, known: bool
) -> None:
    """In fp32, so that rounding to fp8 is the only one; and matmuls in fp32 are another result."""
    if method == MXFP8:
        layer = replace(layer, d=64, f=96)
    x, weights, w = inputs(layer, torch.float32)
    experts = choices(layer)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    exact = formula(x, weights, experts, w, grad, ROUNDED[method])

    def found(x: Tensor, weights: Tensor, w: Experts) -> dict[str, float]:
        y = mixture(x, weights, experts, w, impl="grouped_mm")
        return distances({"y": y.detach(), **gradients(y, x, weights, w)}, exact)

    mine = found(x, weights, in_fp8(w, method + EMULATED, known=known))
    plain = found(x, weights, w)
    assert max(mine.values()) < 2e-6
    assert layer.tokens == 0 or min(plain[name] for name in ("y", "x", "w1")) > 1e-2


@pytest.mark.parametrize("method", ROUNDED)
def test_known_quantized_matrices_change_no_bit(method: str) -> None:
    layer = Layer(tokens=100, d=64, f=96, biased=True)
    x, weights, w = inputs(layer, torch.bfloat16)
    found = []
    for known in (False, True):
        some = in_fp8(w, method + EMULATED, known=known)
        y = mixture(x, weights, choices(layer), some, impl="grouped_mm")
        found.append({"y": y, **gradients(y, x, weights, w)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("method", ROUNDED)
def test_rows_without_an_expert_change_no_result(method: str) -> None:
    layer = Layer(d=32, f=64, top_k=1, biased=True)
    x, weights, w = inputs(layer, torch.bfloat16)
    w = in_fp8(w, method + EMULATED)
    y = mixture(x, weights, choices(layer), w, impl="grouped_mm")

    def spread(t: Tensor, value: float) -> Tensor:
        return torch.stack([t, torch.full_like(t, value)], 1).flatten(0, 1)

    wide = [spread(t, float("nan")) for t in (x, weights)]
    experts = spread(choices(layer), layer.experts)
    found = mixture(*wide, experts, w, impl="grouped_mm")
    assert torch.equal(found[::2], y)


class Matmuls:
    """Operands of the fp8 operator, whose shapes PyTorch's meta function checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scaled: list[tuple[Any, ...]] = []
        self.scales: list[tuple[Any, ...]] = []
        function = torch._scaled_grouped_mm

        def record(left: Tensor, right: Tensor, *scales: Tensor, **settings: Any) -> Tensor:
            self.scaled.append((tuple(left.shape), tuple(right.shape), right.stride()))
            self.scales.append((scales[0].dtype, *(tuple(each.shape) for each in scales)))
            return function(left, right, *scales, **settings)

        monkeypatch.setattr(torch, "_scaled_grouped_mm", record)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("method", ROUNDED)
def test_pytorchs_operator_accepts_every_operand(
    monkeypatch: pytest.MonkeyPatch, method: str, gated: bool, known: bool
) -> None:
    """Its meta function checks dtypes, strides, scales and alignment, of fake tensors."""
    layer = Layer(tokens=37, d=64, f=160, gated=gated, biased=True)  # an odd number of rows
    x, weights, w = inputs(layer, torch.bfloat16)
    matmuls, experts = Matmuls(monkeypatch), choices(layer)
    some = in_fp8(w, method, known=known)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.no_grad():
        routing = route(mode.from_tensor(experts), layer.experts)
        tensors, how = some.flat()
        fake = Experts.from_flat([mode.from_tensor(t) for t in tensors], how)
        x, weights = mode.from_tensor(x), mode.from_tensor(weights)
        y, kept = moe_device.forward(x, weights, routing, fake, keep=True)
        forward, matmuls.scaled, matmuls.scales = matmuls.scaled, [], []
        back = moe_device.backward(y, x, weights, kept, routing, fake, frozen=False)
    n_in = 2 if gated else 1
    rows, (n, d, f) = 37 * layer.top_k, (layer.experts, layer.d, layer.f)
    into = ((rows, d), (n, d, f), (d * f, 1, d))  # column-major: a column lies in one piece
    out = ((rows, f), (n, f, d), (d * f, 1, f))
    assert forward == [*[into] * n_in, out]
    assert matmuls.scaled == [into, *[out] * n_in]
    scales = {
        ROWWISE: ((torch.float32, (rows,), (n, f)), (torch.float32, (rows,), (n, d))),
        # 111 rows and 127 for each of 6 experts, and rows of a weight, in multiples of 128; columns
        # of 2 and 5 blocks in multiples of 4
        MXFP8: (
            (torch.float8_e8m0fnu, (896, 4), (n, 256 * 4)),
            (torch.float8_e8m0fnu, (896, 8), (n, 128 * 8)),
        ),
    }[method]
    assert matmuls.scales == [scales[0], *[scales[1]] * n_in]  # of the backward pass
    assert y.shape == x.shape == back.x.shape and y.dtype == back.x.dtype == torch.bfloat16
    for gradient, tensor in zip(back.experts, w.tensors(), strict=True):
        assert (gradient is None) == (tensor is None)
        assert gradient is None or (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize("method", ROUNDED)
def test_without_rows_nothing_is_multiplied(method: str) -> None:
    """PyTorch has no such operator for a CPU: a call would raise."""
    layer = Layer(tokens=0, d=32, f=64, biased=True)
    x, weights, w = inputs(layer, torch.bfloat16)
    y = mixture(x, weights, choices(layer), in_fp8(w, method), impl="grouped_mm")
    found = gradients(y, x, weights, w)
    assert y.shape == (0, 32) and not any(found[n].any() for n in ("w1", "v1", "w2", "b2"))


@pytest.mark.parametrize("method", ROUNDED)
def test_the_operators_keep_pytorchs_rules(method: str) -> None:
    layer = Layer(d=32, f=64, biased=True)
    x, weights, w = inputs(layer, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.llmfoundry.moe_forward,
        (x, weights, choices(layer), *in_fp8(w, method + EMULATED).flat(), True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_refusals_and_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert "Hopper" in str(refusal(torch.device("cpu"), 8, emulate=False))
    assert refusal(torch.device("cpu"), 8, emulate=True) is None
    assert "1024 experts" in str(refusal(cuda, 1024, emulate=True))
    assert method_of(torch.device("cpu"), emulate=True) == "rowwise_emulated"
    for capability, expected in (
        ((9, 0), "rowwise"),
        ((10, 0), "mxfp8"),
        ((10, 3), "mxfp8"),
        ((8, 9), None),
        ((12, 0), None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found = refusal(cuda, 8, emulate=False)
        assert (found is None) == (expected is not None)
        assert found is None or found.endswith("this is {}.{}".format(*capability))
        assert expected is None or method_of(cuda, emulate=False) == expected
        assert method_of(cuda, emulate=True) == f"{expected or ROWWISE}_emulated"


def test_scaled_rows_keep_their_shape() -> None:
    rows = quantize(torch.randn(3, 5, 32).bfloat16())
    assert isinstance(rows, ScaledRows)
    assert rows.values.shape == (3, 5, 32) and rows.scales.shape == (3, 5)
