"""Runs the Triton kernels of the mixture of experts on a CPU, by Triton's interpreter.

Not a test: `test_moe_triton.py` starts it as a process of its own, for the interpreter is chosen by
TRITON_INTERPRET before Triton is imported. Prints each case's distance from PyTorch's step as JSON,
those that do not keep NaN, and whether rows are sorted as by PyTorch.
On a GPU `test_kernels_on_gpus.py` calls `cases`, `lost` and `routes`.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from llmfoundry.ops.moe import experts as moe_steps
from llmfoundry.ops.moe import triton_kernels as moe_triton
from llmfoundry.ops.moe.experts import ScaledRows, route

TOKENS, TOP_K, D, F = 3, 2, 300, 260


def distance(mine: Tensor | None, right: Tensor | None) -> float:
    if mine is None or right is None:
        return 0.0 if mine is right else float("inf")
    assert mine.dtype == right.dtype or right.dtype == torch.float64
    assert mine.shape == right.shape
    return float((mine.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))


Cases = dict[str, list[tuple[Tensor | None, Tensor | None]]]


def cases(
    dtype: torch.dtype, device: str = "cpu", *, exact: bool = False, spoilt: bool = False
) -> Cases:
    """Each kernel's results beside PyTorch's steps.

    Args:
        dtype: of the rows.
        device: where they are.
        exact: PyTorch's steps compute in float64.
        spoilt: a value of every input is NaN, and one of another row is inf.
    """
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator)
        if spoilt:
            values[1, 3], values[2, 5] = float("nan"), float("inf")
        return values.to(device, dtype)

    def wide(argument: object) -> object:
        if argument is dtype:
            return torch.float64
        is_real = isinstance(argument, Tensor) and argument.is_floating_point()
        return argument.double() if is_real else argument

    experts = torch.randn(TOKENS, 4, generator=generator).topk(TOP_K).indices.to(device)
    order, inverse, _ = route(experts, 4)
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(device)
    x, rows, more = random(TOKENS, D), *(random(TOKENS * TOP_K, D) for _ in range(2))
    a, b, dh = (random(TOKENS * TOP_K, F) for _ in range(3))
    found: Cases = {}

    def compare(name: str, function: str, *arguments: object) -> None:
        mine = getattr(moe_triton, function)(*arguments)
        right = getattr(moe_steps, function)(*(map(wide, arguments) if exact else arguments))
        pairs = [(mine, right)] if isinstance(mine, Tensor) else list(zip(mine, right, strict=True))
        found[name] = pairs

    compare("gather", "gather", x, order, TOP_K)
    compare("combine weighted", "combine", rows, inverse, weights, TOP_K)
    compare("combine of two", "combine", rows, inverse, None, TOP_K, more)
    compare("combine backward", "combine_backward", x, rows, weights, order)
    for name in (*moe_triton.ACTIVATIONS, "mish"):
        compare(f"glu {name}", "glu", a, b, name)
        compare(f"glu backward {name}", "glu_backward", dh, a, b, weights, order, name)
    compare("mlp", "glu", a, None, "gelu")
    compare("mlp backward", "glu_backward", dh, a, None, weights, order, "gelu")
    return found


def lost(dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """Kernels whose NaN is elsewhere than in PyTorch's float64 steps, of inputs with NaN or inf."""
    found = []
    for name, pairs in cases(dtype, device, exact=True, spoilt=True).items():
        places = [(m.isnan(), r.isnan()) for m, r in pairs if m is not None and r is not None]
        if not all(torch.equal(m, r) for m, r in places):
            found.append(f"{name} in {str(dtype).removeprefix('torch.')}")
    return found


def quantized(device: str = "cpu") -> dict[str, bool]:
    """Whether rows in fp8 and their scales are bit for bit those of PyTorch's step, by case.

    See `are_equal`.
    """
    generator = torch.Generator().manual_seed(5)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((7, 300), (2, 3, 256), (0, 32)):
            rows = torch.randn(shape, generator=generator)
            rows *= torch.randn(*shape[:-1], 1, generator=generator).exp() ** 4
            rows[:1] = 0
            rows[1:2, ..., 0] = 7 * 2.0**20  # the greatest of e4m3 is 7 times a power of two
            rows = rows.to(device, dtype)
            mine, right = moe_triton.quantize(rows), moe_steps.quantize(rows)
            name = f"{shape} in {str(dtype).removeprefix('torch.')}"
            found[name] = are_equal(mine, right)
    bad = torch.randn(4, 300, generator=generator).to(device)
    bad[1, 280], bad[2, 3] = float("nan"), float("inf")
    scales = moe_triton.quantize(bad).scales
    found["NaN and inf"] = scales.isnan().tolist() == [False, True, True, False]
    return found


def are_equal(mine: ScaledRows, right: ScaledRows) -> bool:
    """Whether scales are equal bit for bit, and values, too; on a CPU but for the interpreter.

    Triton's interpreter casts to fp8 inexactly: ties and subnormal values are off by one step, and
    where a mantissa is rounded up to the next power of two, its half is the result.
    """
    places = mine.values.view(torch.uint8) == right.values.view(torch.uint8)
    if mine.values.device.type == "cpu":
        mine_wide, wide = mine.values.float(), right.values.float()
        step = wide.abs().clamp_min(2**-6).log2().floor().exp2() / 8
        is_power = wide.abs().log2() % 1 == 0
        places |= (mine_wide - wide).abs() <= step
        places |= is_power & (2 * mine_wide == wide)
    has_types = mine.values.dtype == right.values.dtype and mine.scales.dtype == right.scales.dtype
    return has_types and bool(places.all()) and torch.equal(mine.scales, right.scales)


def quantized_to_mx(device: str = "cpu") -> dict[str, bool]:
    """Whether sorted rows in MXFP8 and tiles of their scales are PyTorch's, by case.

    With experts without rows, rows after the last end, columns of scales that do not fill a tile,
    and several laps along a row; of rows, and of tokens that are gathered.
    """
    generator = torch.Generator().manual_seed(6)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, n_experts, d in ((9, 4, 288), (150, 3, 32), (0, 4, 32)):
            if tokens > 128 and dtype == torch.float32 and device == "cpu":
                continue  # the interpreter takes seconds
            rows = torch.randn(tokens, d // 32, 32, generator=generator)
            rows *= torch.randn(tokens, d // 32, 1, generator=generator).exp() ** 8
            rows[:1] = 0
            rows[1:2, ..., 0] = 7 * 2.0**20  # the greatest of e4m3 is 7 times a power of two
            rows = rows.flatten(1).to(device, dtype)
            scores = torch.randn(tokens, n_experts, generator=generator)
            scores[:, 1] = -100  # chosen by no token
            experts = scores.topk(2).indices.to(device)
            experts[::5, 1] = n_experts  # no expert
            routing = route(experts, n_experts)
            name = f"{tokens} tokens of {d} in {str(dtype).removeprefix('torch.')}"
            pair = (m.gather_mx(rows, routing, 2) for m in (moe_triton, moe_steps))
            found[f"{name}, gathered"] = are_equal(*pair)
            ends = (routing.ends // 2).contiguous()
            pair = (m.quantize_mx_rows(rows, ends) for m in (moe_triton, moe_steps))
            found[name] = are_equal(*pair)
    bad = torch.randn(4, 96, generator=generator).to(device)
    bad[1, 70], bad[2, 3] = float("nan"), -float("inf")
    tiles = moe_triton.quantize_mx_rows(bad, torch.tensor([4], dtype=torch.int32).to(device)).scales
    spoilt = tiles.flatten()[:64].view(4, 16)[:, :3] == 255
    is_bad = [[False] * 3, [False, False, True], [True, False, False], [False] * 3]
    found["NaN and inf"] = spoilt.tolist() == is_bad and int((tiles == 255).sum()) == 2
    return found


def routes(device: str = "cpu") -> dict[str, bool]:
    """Whether the kernel's order, inverse and ends are PyTorch's, by tokens, experts and choices.

    With several chunks of an expert; experts that nobody chooses; tokens without an expert; more
    experts than a key of 8 bits tells apart.
    """
    generator = torch.Generator().manual_seed(2)
    found = {}
    for tokens, n_experts, top_k in (
        (0, 4, 2),
        (1, 16, 4),
        (5, 4, 3),
        (257, 1, 1),
        (300, 16, 4),
        (100, 300, 6),
        (90, 70, 2),
    ):
        scores = torch.randn(tokens, n_experts, generator=generator)
        scores -= torch.arange(n_experts) / 4
        experts = scores.topk(top_k).indices.to(device)
        experts[::3] = n_experts  # none
        pairs = zip(moe_triton.route(experts, n_experts), route(experts, n_experts), strict=True)
        are_equal = [torch.equal(m, r) and m.dtype == r.dtype for m, r in pairs]
        found[f"{tokens} tokens, {top_k} of {n_experts}"] = all(are_equal)
    return found


if __name__ == "__main__":
    moe_triton.WIDTH = 256  # two laps along a row, cheaply
    moe_triton.WARPS = 1
    moe_triton.PAIRS = 64  # several blocks of pairs
    distances = {
        f"{name} in {str(dtype).removeprefix('torch.')}": max(distance(*pair) for pair in pairs)
        for dtype in (torch.float32, torch.bfloat16)
        for name, pairs in cases(dtype).items()
    }
    found = {"distances": distances, "nan lost": lost(torch.bfloat16), "routes": routes()}
    found["quantized"] = quantized()
    found["quantized to mxfp8"] = quantized_to_mx()
    print(json.dumps(found))
