"""8-bit storage: its error, what is compressed and what is not, once each, freed in time."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.moe import saved_bytes
from llmfoundry.ops.blockwise import BLOCK, FORMATS, dequantize, quantize
from llmfoundry.ops.compression import Compressed, Compressor, restore
from llmfoundry.ops.moe.experts import Experts
from llmfoundry.ops.moe.mixture import mixture
from tests.ops.moe_layers import Layer, choices, inputs

ROWS, D, F_ = 96, 128, 256


def bounds(x: Tensor, kind: str) -> Tensor:
    """The largest error of each value of x (blocks, BLOCK), from the format's definition."""
    largest = x.abs().amax(1, keepdim=True) * (1 + 2**-8)  # of a scale rounded to bf16
    if kind == "int8":
        return largest / 254 + largest * 2**-8 * (x.abs() > largest * 126 / 127)  # clamped
    # e4m3: half a step of three bits, or of the smallest subnormal 2^-9 under the scale
    return (x.abs() * 2**-4).clamp_min(largest / 448 * 2**-10) + largest * 2**-8 * (
        x.abs() > largest * 440 / 448
    )


@pytest.mark.parametrize("n", [BLOCK, 5 * BLOCK, 40, 3 * BLOCK + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FORMATS)
def test_error_is_at_most_half_a_step(n: int, dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    span = 4 if dtype == torch.float16 else 20
    x *= torch.logspace(-span, span, -(-n // BLOCK)).repeat_interleave(BLOCK)[:n]
    x = x.to(dtype)
    packed = quantize(x, FORMATS[kind])
    assert packed.values.shape == (n,) and packed.values.element_size() == 1
    assert packed.scales.shape == (math.ceil(n / BLOCK),)
    found = dequantize(packed, torch.float32)
    assert found.shape == (n,) and dequantize(packed, dtype).dtype == dtype
    wide, more = x.double(), (0, -n % BLOCK)
    blocks = F.pad(wide, more).view(-1, BLOCK)
    error = F.pad((found.double() - wide).abs(), more).view(-1, BLOCK)
    assert (error <= bounds(blocks, kind)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zero_and_what_is_not_finite_is_seen(kind: str) -> None:
    x = torch.zeros(4 * BLOCK)
    x[BLOCK] = 1e6
    x[2 * BLOCK + 3], x[3 * BLOCK + 3] = math.nan, math.inf
    blocks = dequantize(quantize(x, FORMATS[kind]), torch.float32).view(4, BLOCK)
    assert not blocks[0].any() and not blocks[1, 1:].any()
    assert blocks[1, 0].item() == pytest.approx(1e6, rel=5e-3)
    assert not blocks[2:].isfinite().all()


class Net(nn.Module):
    """A block in miniature; `table` is what all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(D), nn.Linear(D, F_, bias=False)
        self.gate, self.down = nn.Linear(D, F_), nn.Linear(F_, D)

    def forward(self, x: Tensor, table: Any = None) -> Tensor:
        h = self.norm(x)
        h = F.silu(self.gate(h)) * self.up(h)
        return x + self.down(h if table is None else h * table.factor)


@dataclass(frozen=True)
class Table:
    factor: Tensor


def stream(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x.requires_grad_()


def note(net: nn.Module, *given: Any, compress: Compressor) -> tuple[Tensor, list[Any]]:
    """The output, and what autograd holds for its backward pass."""
    held: list[Any] = []
    with compress.hooks(net, given, {}):

        def pack(tensor: Tensor) -> Any:
            held.append(compress.save(tensor))
            return held[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, restore):
            y = net(*given)
    return y, held


def test_activations_alone_are_compressed_and_each_storage_once() -> None:
    torch.manual_seed(0)
    net, x = Net(), stream()
    table = Table(torch.rand(ROWS, F_))
    _, held = note(net, x, table, compress=Compressor("int8"))
    small = [one for one in held if isinstance(one, Compressed)]
    # x; its norm, which two products read; gate, its activation, up, what goes down
    assert {tuple(one.shape) for one in small} == {(ROWS, D), (ROWS, F_)}
    assert len({id(one.kept) for one in small}) == 2 + 4 < len(small)
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    exact = [one for one in held if isinstance(one, Tensor) and one.ndim > 1 and one.numel() > ROWS]
    places = {one.untyped_storage().data_ptr() for one in exact}
    assert places <= weights | {table.factor.untyped_storage().data_ptr()} and len(places) > 3


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_of_weights_in_autocasts_dtype_are_left_as_they_are(frozen: bool) -> None:
    torch.manual_seed(0)
    net, x = Net().requires_grad_(not frozen), stream()
    with torch.autocast("cpu", torch.bfloat16):
        _, held = note(net, x, compress=Compressor("int8"))
    matrices = {(D, F_), (F_, D)}
    assert not [one for one in held if isinstance(one, Compressed) and one.shape in matrices]
    exact = {tuple(one.shape) for one in held if isinstance(one, Tensor)}
    assert matrices <= exact


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp"])
def test_outputs_are_untouched_and_gradients_are_near(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), stream()
    found = []
    for compress in (None, Compressor(kind)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x) if compress is None else note(net, x, compress=compress)[0]
        found.append((y, torch.autograd.grad(y.square().mean(), [x, *net.parameters()])))
    (y, exact), (same, near) = found
    assert torch.equal(y, same)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(near, exact, strict=True)]
    assert 1e-4 < max(errors) < (1.5e-2 if kind == "int8" else 4e-2)


def test_strides_come_back_and_views_of_a_part_hold_that_part() -> None:
    compress, whole = Compressor("int8"), torch.randn(4, 64, 3 * D).requires_grad_()
    q, k, v = whole.split(D, dim=-1)
    with compress.hooks(nn.Module(), (whole,), {}):
        for view in (q.transpose(1, 2), k.unflatten(-1, (8, 16)).transpose(1, 2), v, whole):
            saved = compress.compress(view)
            again = restore(saved)
            assert again.shape == view.shape and saved.kept.packed.values.numel() == view.numel()
            assert (again - view).abs().max() < view.abs().max() / 100
            order = [sorted(range(t.ndim), key=t.stride, reverse=True) for t in (again, view)]
            assert order[0] == order[1]


def test_memory_given_to_another_tensor_is_another_tensor() -> None:
    """An allocator gives freed memory out again: the same address is no proof."""
    compress = Compressor("int8")
    with compress.hooks(nn.Module(), (torch.empty(1, 4),), {}):
        held = []
        for i in range(20):
            held.append(compress.compress(torch.full((SIZE,), float(i))))
    assert [round(restore(one)[0].item()) for one in held] == list(range(20))


SIZE = 8192


def test_a_tensor_changed_in_place_is_saved_anew() -> None:
    compress, x = Compressor("int8"), torch.ones(SIZE)
    with compress.hooks(nn.Module(), (x,), {}):
        first = compress.compress(x)
        x.mul_(2)
        second = compress.compress(x)
    assert [round(restore(one)[0].item(), 2) for one in (first, second)] == [1, 2]


def test_nothing_outlives_the_graph() -> None:
    net, x, compress = Net(), stream(), Compressor("int8")
    y, held = note(net, x, compress=compress)
    kept = [weakref.ref(one.kept) for one in held if isinstance(one, Compressed)]
    del held
    y.sum().backward()
    del y
    gc.disable()  # no cycle is needed to free them
    try:
        assert kept and not [one for one in kept if one() is not None]
    finally:
        gc.enable()
    with compress.hooks(net, (x,), {}):
        assert not compress._kept


def test_hooks_run_on_fake_tensors_and_count_what_is_kept() -> None:
    real, fake = {}, {}
    for found, mode in ((real, None), (fake, FakeTensorMode())):
        with mode or torch.enable_grad():
            _, held = note(
                Net(), torch.randn(ROWS, D).requires_grad_(), compress=Compressor("int8")
            )
        each = {id(one.kept): one.kept.packed for one in held if isinstance(one, Compressed)}
        found["bytes"] = sum(t.nbytes for packed in each.values() for t in packed)
    assert fake == real and real["bytes"] > 0


@pytest.mark.parametrize("path", ["grouped_mm", "torch"])
def test_experts_are_near_with_what_waits_in_8_bits(path: str) -> None:
    layer = Layer(tokens=128, d=128, f=256, gated=True, biased=True)
    x, weights, w = inputs(layer, torch.float32)
    experts, compress = nn.Module(), Compressor("int8")
    grads = []
    for hooks in (torch.enable_grad(), compress.hooks(experts, (x,), {})):
        with hooks:
            y = mixture(x, weights, choices(layer), w, impl=path)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        grads.append(torch.autograd.grad(y, [x, weights, w.w1, w.v1, w.w2, w.b1, w.bv, w.b2], grad))
    errors = [float((a - b).norm() / b.norm()) for b, a in zip(*grads, strict=True)]
    assert 1e-3 < max(errors) < 2e-2


def test_bytes_of_experts_that_wait_for_backward() -> None:
    """Per token, in d bytes, in bf16 and where k f / d is 8: DBRX's, and each recipe's."""
    layer = Layer(tokens=1024, d=512, f=1024, experts=8, top_k=4)
    x, weights, w = inputs(layer, torch.bfloat16)
    parameters = [None if t is None else nn.Parameter(t.detach()) for t in w.tensors()]
    w = Experts(*parameters, activation=w.activation)
    experts = nn.ParameterList(p for p in parameters if p is not None)
    compress, kept = Compressor("int8"), {}

    def ours(x: Tensor) -> Tensor:
        return mixture(x, weights, choices(layer), w, impl="grouped_mm")

    exact = saved_bytes(ours, x) / layer.tokens / layer.d
    with compress.hooks(experts, (x,), {}):

        def pack(tensor: Tensor) -> Any:
            saved = compress.save(tensor)
            if isinstance(saved, Compressed):
                kept[id(saved.kept)] = sum(t.nbytes for t in saved.kept.packed)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, restore):
            ours(x)
    found = sum(kept.values()) / layer.tokens / layer.d
    assert 34 < exact < 35 and found == pytest.approx((1 + 16) * (1 + 2 / BLOCK), rel=0.02)


def test_the_operators_keep_pytorchs_rules() -> None:
    """Schema and fake kernels, as torch.library checks them."""
    x, ops = torch.randn(5 * BLOCK + 8), torch.ops.llmfoundry
    for kind in FORMATS.values():
        # the checker itself has no arithmetic of 8-bit floating point
        utils = ("test_schema", "test_faketensor")[kind is not torch.int8 :]
        torch.library.opcheck(ops.quantize, (x, kind), test_utils=utils)
        given = (*ops.quantize(x, kind), torch.bfloat16)
        torch.library.opcheck(ops.dequantize, given, test_utils=utils)
