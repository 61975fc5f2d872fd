"""4-bit quantization of frozen matrices: NF4 with optionally quantized scales (QLoRA).

Entry points: `quantize`, `dequantize` and `nf4_linear`, for `models/quantized.py`,
`models/layers.py` and `ops/moe/mixture.py`. The format is that of bitsandbytes (Dettmers et al.,
2023): 64 adjacent values share a scale, their largest magnitude. Each value becomes the nearest of
16 quantiles of a normal distribution; the first of two values is in the high half of a byte. With
double quantization the scales, minus their mean, are one byte each in a code of 256 values, and 256
of them share an fp32 scale: 4.127 bits per value instead of 4.5.

The one idea: all parts of a matrix are in one tensor of bytes. A quantized weight is therefore one
parameter, which FSDP shards evenly and DDP ignores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llmfoundry.ops.devices import planned, to_autocast_dtype

CODE = (  # quantiles of a normal distribution, including -1, 0 and 1, as in bitsandbytes
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64  # values that share a scale
SCALE_BLOCK = 256  # quantized scales that share an fp32 scale
STEP = 1 << 18  # values that a CPU converts at a time, which fit its cache
DEVICE_STEP = 1 << 26  # the same on other devices: the fp32 values take 256 MiB


class Nf4Tensor(NamedTuple):
    """A quantized tensor of n values, in the parts of bitsandbytes.

    Attributes:
        packed: uint8 (ceil(n / 64) * 32,), two values per byte, padded with 0.
        scales: fp32 (ceil(n / 64),), or uint8 with double quantization.
        coarse: fp32 (ceil(len(scales) / 256),), scales of the scales; else empty.
        offset: fp32 (1,), mean of the scales; empty without double quantization.
    """

    packed: Tensor
    scales: Tensor
    coarse: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Nf4Layout:
    """Byte layout of a quantized matrix: coarse, offset, scales, packed.

    Attributes:
        values: number of values of the matrix.
        double: whether scales are quantized.
    """

    values: int
    double: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the bytes of each part; the first two (fp32) are padded to multiples of 16."""
        blocks = -(-self.values // BLOCK)
        if not self.double:
            return 0, 0, 4 * blocks, BLOCK // 2 * blocks
        return -(-4 * -(-blocks // SCALE_BLOCK) // 16) * 16, 16, blocks, BLOCK // 2 * blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix; a multiple of 16, because stacked experts are read as fp32."""
        return -(-sum(self.sizes) // 16) * 16

    def split(self, data: Tensor) -> Nf4Tensor:
        """Return the parts of `data` (nbytes,), which share its memory."""
        blocks = -(-self.values // BLOCK)
        parts = data[: sum(self.sizes)].split(self.sizes)
        coarse, offset, scales, packed = parts
        if not self.double:
            return Nf4Tensor(packed, scales.view(torch.float32), *(coarse, offset))
        coarse = coarse.view(torch.float32)[: -(-blocks // SCALE_BLOCK)]
        return Nf4Tensor(packed, scales, coarse, offset.view(torch.float32)[:1])


@torch.no_grad()
def quantize(values: Tensor, *, double: bool = True) -> Tensor:
    """Quantize a floating-point tensor of any shape on its device; return bytes (nbytes,).

    Raises:
        ValueError: a value is not finite.
    """
    packing, flat = Nf4Layout(values.numel(), double), values.detach().reshape(-1)
    data = torch.zeros(packing.nbytes, dtype=torch.uint8, device=values.device)
    parts = packing.split(data)
    scales = torch.empty(len(parts.scales), device=values.device)
    for start in range(0, len(flat), step := _step(values.device)):
        blocks = slice(start // BLOCK, (start + step) // BLOCK)
        piece = flat[start : start + step].float()
        piece = F.pad(piece, (0, -len(piece) % BLOCK)).view(-1, BLOCK)
        scales[blocks] = piece.abs().amax(1)
        scaled = piece * (1 / scales[blocks].clamp(min=1e-38))[:, None]
        code = torch.bucketize(scaled, _bounds(values.device), out_int32=True).to(torch.uint8)
        pairs = code.view(-1, BLOCK // 2, 2)
        parts.packed.view(-1, BLOCK // 2)[blocks] = (pairs[..., 0] << 4) | pairs[..., 1]
    if not torch.isfinite(scales).all():
        raise ValueError("holds values that are not finite")
    if not double:
        parts.scales.copy_(scales)
        return data
    parts.offset.fill_(scales.double().mean())  # fp64: independent of the number of threads
    _quantize_scales(scales - parts.offset, parts)
    return data


def _quantize_scales(scales: Tensor, parts: Nf4Tensor) -> None:
    """Quantize scales to the nearest values of `_scale_code`, in blocks of 256."""
    rows = F.pad(scales, (0, -len(scales) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    parts.coarse.copy_(rows.abs().amax(1))
    code = _scale_code(scales.device)
    scaled = rows * (1 / parts.coarse.clamp(min=1e-38))[:, None]
    places = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True)
    parts.scales.copy_(places.flatten()[: len(scales)])


@torch.no_grad()
def dequantize(data: Tensor, shape: Sequence[int], dtype: torch.dtype, *, double: bool) -> Tensor:
    """Return the tensor of `shape` that `data` stands for.

    The product of code and scale is computed in fp32 and rounded once to `dtype`.
    """
    if planned() is not None:  # the cached tables below would become fake tensors
        return data.new_empty(shape, dtype=dtype)
    # torch before 2.12 gathers every parameter in FSDP's dtype; bfloat16 is exact to 256
    data = data.to(torch.uint8)
    n = torch.Size(shape).numel()
    parts = Nf4Layout(n, double).split(data)
    scales = _scales(parts) if double else parts.scales
    out = torch.empty(n, dtype=dtype, device=data.device)
    table = _pairs(data.device)
    for start in range(0, n, step := _step(data.device)):
        stop = min(start + step, n)
        packed = parts.packed[start // 2 : (start + step) // 2]
        pairs = table.index_select(0, packed.int()).view(torch.float32).view(-1, BLOCK)
        pairs *= scales[start // BLOCK : (start + step) // BLOCK, None]
        out[start:stop] = pairs.flatten()[: stop - start]
    return out.view(*shape)


def _scales(parts: Nf4Tensor) -> Tensor:
    """Return the fp32 scales (blocks,) of quantized scales."""
    code = _scale_code(parts.scales.device).index_select(0, parts.scales.int())
    each = parts.coarse.repeat_interleave(SCALE_BLOCK, output_size=len(parts.coarse) * SCALE_BLOCK)
    return code * each[: len(code)] + parts.offset


def _step(device: torch.device) -> int:
    return STEP if device.type == "cpu" else DEVICE_STEP


@cache
def _bounds(device: torch.device) -> Tensor:
    """Return (15,) fp32: midpoints between adjacent values of CODE."""
    code = torch.tensor(CODE)
    return ((code[:-1] + code[1:]) / 2).to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return (256,) int64: the two fp32 values of every byte, packed into one integer."""
    code = torch.tensor(CODE)
    high, low = code.repeat_interleave(16), code.repeat(16)
    return torch.stack([high, low], 1).view(torch.int64).flatten().to(device)


@cache
def _scale_code(device: torch.device) -> Tensor:
    """Return (256,) fp32, ascending: bitsandbytes' dynamic 8-bit code (Dettmers, 2016).

    It has 7 decades below 1, each with twice as many values as the one below: 1 to 64 per sign.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values)).to(device)


def nf4_linear(x: Tensor, data: Tensor, width: int, *, double: bool) -> Tensor:
    """Return x W^T, (..., width), for x (..., K) and the quantized W (width, K).

    Differentiable in x. The matmul runs in autocast's dtype if it is enabled, else in x's. W is
    dequantized for the matmul, and again in the backward pass: only `data` is saved.
    """
    return torch.ops.llmfoundry.nf4_linear(to_autocast_dtype(x), data, width, double)


@torch.library.custom_op(
    "llmfoundry::nf4_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor data, int width, bool double) -> Tensor",
)
def _linear(x: Tensor, data: Tensor, width: int, double: bool) -> Tensor:
    weight = dequantize(data, (width, x.shape[-1]), x.dtype, double=double)
    return torch.mm(x.reshape(-1, x.shape[-1]), weight.T).view(*x.shape[:-1], width)


@torch.library.custom_op(
    "llmfoundry::nf4_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor data, int inputs, bool double) -> Tensor",
)
def _linear_backward(grad: Tensor, data: Tensor, inputs: int, double: bool) -> Tensor:
    weight = dequantize(data, (grad.shape[-1], inputs), grad.dtype, double=double)
    return torch.mm(grad.reshape(-1, grad.shape[-1]), weight).view(*grad.shape[:-1], inputs)


@_linear.register_fake
def _(x: Tensor, data: Tensor, width: int, double: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


@_linear_backward.register_fake
def _(grad: Tensor, data: Tensor, inputs: int, double: bool) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, data, _, ctx.double = inputs
    ctx.save_for_backward(data)
    ctx.inputs = x.shape[-1]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (data,) = ctx.saved_tensors
    dx = torch.ops.llmfoundry.nf4_linear_backward(grad, data, ctx.inputs, ctx.double)
    return dx, None, None, None


_linear.register_autograd(_differentiate, setup_context=_setup_context)


@register_flop_formula([torch.ops.llmfoundry.nf4_linear, torch.ops.llmfoundry.nf4_linear_backward])
def _flops(x: Sequence[int], data: Sequence[int], width: int, *_: Any, **__: Any) -> int:
    """Return the FLOPs; a multiply-add counts as two."""
    return 2 * torch.Size(x).numel() * width
