"""What the CUDA kernels are handed: stand-ins that do what their documentation says, on a CPU.

On a machine with a GPU the kernels themselves are held to the definition as well (marked `gpu`).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from llmfoundry.ops.attention import flash as attention_varlen
from llmfoundry.ops.attention.flash import is_hopper
from llmfoundry.ops.attention.select import PLANS, attend
from llmfoundry.ops.packed_layout import Ranges
from tests.ops.plain_attention import (
    CPU,
    DTYPES,
    GRID,
    TOLERANCE,
    Case,
    distance,
    errors,
    expected,
    plan,
)
from tests.ops.plain_ranges import PAIRS, range_errors

SHORT = {name: case for name, case in GRID.items() if sum(case.lengths[0]) <= 256}
VARLEN = [name for name, case in SHORT.items() if not case.alibi and case.softcap is None]


def document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> Tensor:
    """What both packages document, of one sequence: q (T, H, hd), k and v (S, KV, hd).

    Key j of query i, counted from S - T, counts where i - left <= j <= i + right, -1 for no bound;
    ALiBi's bias is -slope * |i - j|.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).double() for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if softcap > 0:
        logits = torch.tanh(logits / softcap) * softcap
    j = torch.arange(len(k))[None]
    i = j[0, len(k) - len(q) :, None]
    if slopes is not None:
        assert slopes.dtype == torch.float32
        assert slopes.shape == (q.shape[1],)
        logits = logits - slopes[:, None, None] * (i - j).abs()
    left, right = window
    seen = (j >= i - left) | torch.tensor(left < 0)
    seen &= (j <= i + right) | torch.tensor(right < 0)
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


def by_border(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    **options: Any,
) -> Tensor:
    """Of the queries and of the keys: where sequences begin and end, tokens of the longest."""
    for ends, most, x in zip(borders, longest, (q, k), strict=True):
        assert ends.dtype == torch.int32
        assert ends[0] == 0
        assert ends[-1] == len(x)
        assert most >= ends.diff().max()  # it sizes the kernel's grid
    assert len(k) == len(v)
    parts = zip(*(pairwise(ends.tolist()) for ends in borders), strict=True)
    return torch.cat([document(q[a:b], k[c:d], v[c:d], **options) for (a, b), (c, d) in parts])


def varlen_213(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert query.shape[-1] % 8 == 0  # "head_size should be a multiple of 8"
    assert key.shape[1] == query.shape[1] or enable_gqa
    assert scale is not None
    assert isinstance(window_size, tuple)  # compared with (-1, 0), which means causal
    borders, longest = (cu_seq_q, cu_seq_k), (max_q, max_k)
    return by_border(query, key, value, borders, longest, scale=scale, window=window_size)


def varlen_211(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    inputs = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_213(*inputs, scale=scale, window_size=window_size)


@pytest.fixture(params=[varlen_213, varlen_211])
def varlen_kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(varlen, "varlen_attn", request.param)
    attention_varlen._varlen_parameters.cache_clear()
    yield
    attention_varlen._varlen_parameters.cache_clear()


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A flash_attn of the documented semantics; the options of each call."""
    calls: list[dict[str, Any]] = []
    package = ModuleType("flash_attn")

    def handled(options: dict[str, Any]) -> dict[str, Any]:
        calls.append(dict(options))
        assert set(options) <= FLASH_OPTIONS
        assert options.pop("causal")
        left, right = options["window_size"]
        assert right in (0, -1)
        return {
            "scale": options["softmax_scale"],
            "window": (left, 0),
            "softcap": options["softcap"],
            "slopes": options["alibi_slopes"],
        }

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        known = handled(options)
        return torch.stack([document(*row, **known) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(  # its names, which callers may use
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        borders, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return by_border(q, k, v, borders, longest, **handled(options))

    package.flash_attn_func = flash_attn_func
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return calls


FLASH_OPTIONS = {  # of flash_attn_func in 2.6 to 2.8, without return_attn_probs
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
}


def agrees(impl: str, case: Case, dtype: str = "fp64") -> None:
    """Output and gradients of a backend over its stand-in, planned as on CUDA."""
    *qkv, weight = (x.to(DTYPES[dtype]) for x in case.tensors())
    leaves = [x.requires_grad_() for x in qkv]
    packed = any(len(row) > 1 for row in case.lengths)
    layout, queries = case.layout() if packed else None, leaves[0].shape[1]
    spec = case.spec()
    if spec.window >= queries - 1:
        spec = replace(spec, window=-1)  # as `plan` does
    chosen = PLANS[impl](layout, spec, queries=queries, past=0, device=CPU)
    out = attend(*leaves, chosen)
    theirs, *gradients = expected(case)
    # ALiBi's slopes are fp32
    allowed = (1e-6, 1e-6) if dtype == "fp64" and case.alibi else TOLERANCE[dtype]
    assert distance([out], [theirs]) <= allowed[0]
    assert distance(torch.autograd.grad(out, leaves, weight), gradients) <= allowed[1]


@pytest.mark.parametrize("name", VARLEN)
def test_varlen_is_handed_what_gives_the_definitions_output(name: str, varlen_kernel: None) -> None:
    agrees("varlen", GRID[name])


@pytest.mark.parametrize("name", SHORT)
def test_flash_is_handed_what_gives_the_definitions_output(
    name: str, flash_calls: list[dict[str, Any]]
) -> None:
    agrees("flash", GRID[name])
    assert len(flash_calls) == 1


@pytest.mark.parametrize(("name", "ranges"), PAIRS)
def test_queries_that_are_some_of_the_row_have_borders_of_their_own(
    name: str, ranges: Ranges, varlen_kernel: None, flash_calls: list[dict[str, Any]]
) -> None:
    for impl in ("flash", "varlen") if name in VARLEN else ("flash",):
        assert max(range_errors(impl, GRID[name], ranges)) <= 1
    assert len(flash_calls) == len(ranges)


@pytest.mark.parametrize("impl", ["varlen", "flash"])
def test_under_autocast_the_kernels_get_its_dtype(
    impl: str, monkeypatch: pytest.MonkeyPatch, flash_calls: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", varlen_213)
    attention_varlen._varlen_parameters.cache_clear()
    case = GRID["gqa-window-packed"]
    q, k, v = (x.float() for x in case.tensors()[:3])
    chosen = PLANS[impl](case.layout(), case.spec(), queries=19, past=0, device=CPU)
    with torch.autocast("cpu", torch.bfloat16):  # normalized q and k are fp32, v is not
        out = attend(q, k, v.bfloat16(), chosen)
    assert out.dtype == torch.bfloat16
    assert distance([out], [expected(case)[0]]) <= TOLERANCE["bf16"][0]


def test_flash_drops_while_training_and_is_deterministic_where_torch_is(
    flash_calls: list[dict[str, Any]],
) -> None:
    case = GRID["gqa-packed"]
    spec = replace(case.spec(), dropout=0.1)
    chosen = PLANS["flash"](case.layout(), spec, queries=19, past=0, device=CPU)
    q, k, v, _ = case.tensors()
    attend(q, k, v, chosen, training=True)
    attend(q, k, v, chosen)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v, chosen)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["dropout_p"] for call in flash_calls] == [0.1, 0.0, 0.0]
    assert [call["deterministic"] for call in flash_calls] == [False, False, True]


def test_the_installed_varlen_takes_what_it_is_handed() -> None:
    names = inspect.signature(varlen.varlen_attn).parameters
    assert {"scale", "window_size"} <= set(names)
    first = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(names)[:7] == first


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="needs the package flash-attn"
)
needs_flash3 = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn_interface") is None
    or not is_hopper(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs the package flash-attn-3 and a Hopper GPU",
)
KERNELS = [
    pytest.param("sdpa", "fp32", marks=needs_gpu),
    pytest.param("sdpa", "bf16", marks=needs_gpu),
    pytest.param("flex", "fp32", marks=needs_gpu),
    pytest.param("flex", "bf16", marks=needs_gpu),
    pytest.param("varlen", "bf16", marks=needs_gpu),
    pytest.param("flash", "bf16", marks=[*needs_gpu, needs_flash]),
    pytest.param("flash3", "bf16", marks=[*needs_gpu, needs_flash3]),
]
WIDE = {
    name: replace(case, head_dim=64, scale=0.125, lengths=lengths)
    for name, case in GRID.items()
    if name.startswith(("mha", "gqa", "mqa"))
    for lengths in [((300,), (300,)) if len(case.lengths[0]) == 1 else ((7, 200, 93), (300,))]
}


def serves(impl: str, case: Case) -> bool:
    if impl == "sdpa":
        return case.softcap is None
    if impl == "flash3":
        return not case.alibi
    return impl != "varlen" or (case.softcap is None and not case.alibi)


@pytest.mark.parametrize(("impl", "dtype"), KERNELS)
def test_kernels_on_a_gpu_equal_the_definition(impl: str, dtype: str) -> None:
    for name, case in WIDE.items():
        if serves(impl, case):
            forward, backward = errors(case, impl, dtype, torch.device("cuda"))
            assert forward <= 3 * TOLERANCE[dtype][0], name
            assert backward <= 3 * TOLERANCE[dtype][1], name


@pytest.mark.parametrize(("impl", "dtype"), KERNELS)
def test_kernels_on_a_gpu_never_wait_for_it(impl: str, dtype: str) -> None:
    device = torch.device("cuda")
    case = WIDE["gqa-window-packed"]
    layout, spec = case.layout().to(device), case.spec(device=device)
    q, k, v = (x.to(device, DTYPES[dtype]).requires_grad_() for x in case.tensors()[:3])

    def step() -> None:
        options = {"queries": 300, "past": 0, "device": device, "dtype": q.dtype}
        attend(q, k, v, plan(layout, spec, impl=impl, **options)).sum().backward()

    step()  # what is compiled or loaded once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
