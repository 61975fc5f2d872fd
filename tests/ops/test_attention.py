"""Every backend that runs on a CPU against attention's definition, and what picks among them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import or_
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import flex_attention, varlen

from llmfoundry.errors import UserError
from llmfoundry.ops.attention import flash
from llmfoundry.ops.attention import flash as attention_flash
from llmfoundry.ops.attention import flash as attention_varlen
from llmfoundry.ops.attention import flex as attention_flex
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec, dense_bias
from llmfoundry.ops.attention.select import PLANS, attend, choose, range_plan, refusal
from llmfoundry.ops.packed_layout import PackedLayout, Ranges
from llmfoundry.recipe.attention import AttentionConfig
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.ops.plain_attention import (
    CPU,
    DTYPES,
    GRID,
    TOLERANCE,
    Case,
    distance,
    errors,
    expected,
    plain_attention,
    plan,
)
from tests.ops.plain_ranges import PAIRS, range_errors

CUDA = torch.device("cuda")
SDPA = [name for name, case in GRID.items() if case.softcap is None]
SERVED = [("torch", name) for name in GRID] + [("sdpa", name) for name in SDPA]
FLEX = {name: case for name, case in GRID.items() if sum(case.lengths[0]) < 300}
SLOPES = torch.ones(4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("impl", "name"), SERVED)
def test_output_and_gradients_equal_the_definitions(impl: str, name: str, dtype: str) -> None:
    forward, backward = errors(GRID[name], impl, dtype)
    assert forward <= TOLERANCE[dtype][0]
    assert backward <= TOLERANCE[dtype][1]


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own uncompiled form: the same mask and score functions, run as they are."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: flex_attention.flex_attention)


def flex_plan(case: Case) -> AttentionPlan:
    """As `plan` makes it on CUDA; on a CPU it refuses, for want of a backward pass."""
    packed = len(case.lengths[0]) > 1
    queries = sum(case.lengths[0])
    layout = case.layout() if packed else None
    return PLANS["flex"](layout, case.spec(), queries=queries, past=0, device=CPU)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FLEX)
def test_flex_output_equals_the_definitions(name: str, dtype: str, eager_flex: None) -> None:
    q, k, v = (x.to(DTYPES[dtype]) for x in GRID[name].tensors()[:3])
    out = attend(q, k, v, flex_plan(GRID[name]))
    assert out.dtype == DTYPES[dtype]
    assert distance([out], [expected(GRID[name])[0]]) <= 2 * TOLERANCE[dtype][0]


@pytest.mark.parametrize("width", [5, 40])
@pytest.mark.parametrize("impl", ["torch", "sdpa", "flex"])
def test_values_may_be_narrower_or_wider_than_keys(impl: str, width: int, eager_flex: None) -> None:
    case = next(case for case in FLEX.values() if len(case.lengths[0]) > 1)
    q, k, v = case.tensors()[:3]
    generator = torch.Generator().manual_seed(4)
    v = torch.randn(*v.shape[:-1], width, generator=generator).to(v.dtype)
    queries = q.shape[1]
    made = PLANS[impl](case.layout(), case.spec(), queries=queries, past=0, device=CPU)
    # the definition on as many columns at a time as a key has
    columns = torch.nn.functional.pad(v, (0, -width % q.shape[-1])).double().split(q.shape[-1], -1)
    parts = [plain_attention(q.double(), k.double(), part, case) for part in columns]
    right = torch.cat(parts, dim=-1)[..., :width]
    torch.testing.assert_close(attend(q, k, v, made).double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [None, ((900,), (128, 772)), ((1, 127, 129, 643), (300,) * 3)])
@pytest.mark.parametrize("window", [-1, 0, 100, 127, 128, 129, 400])
@pytest.mark.parametrize("length", [900, 896, 128, 1])
def test_block_mask_is_the_one_that_pytorch_finds_by_looking_at_every_pair(
    lengths: tuple[tuple[int, ...], ...] | None, window: int, length: int
) -> None:
    documents = None
    if lengths is not None:
        documents = PackedLayout.from_lengths(lengths).documents[:, :length]
    ours = attention_flex.block_mask(length, window, documents, CPU)
    rows = None if documents is None else len(documents)
    theirs = flex_attention.create_block_mask(
        ours.mask_mod, rows, None, length, length, device="cpu"
    )
    assert ours.shape == theirs.shape
    for part in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        torch.testing.assert_close(getattr(ours, part), getattr(theirs, part))
        full = f"full_{part}"
        torch.testing.assert_close(getattr(ours, full), getattr(theirs, full))


@pytest.mark.parametrize(("name", "ranges"), PAIRS)
@pytest.mark.parametrize("impl", ["torch", "sdpa"])
def test_queries_that_are_some_of_the_row_see_all_keys_before_them(
    impl: str, name: str, ranges: Ranges
) -> None:
    if impl == "sdpa" and GRID[name].softcap is not None:
        impl = "auto"
    assert max(range_errors(impl, GRID[name], ranges)) <= 1


@pytest.mark.parametrize(("name", "ranges"), PAIRS)
def test_flex_is_reported_where_its_queries_stand(
    name: str, ranges: Ranges, eager_flex: None
) -> None:
    forward, _ = range_errors("flex", GRID[name], ranges, "fp32", backward=False)
    assert forward <= 2


@pytest.mark.parametrize("lengths", [None, ((900,), (128, 772)), ((1, 127, 129, 643), (300,) * 3)])
@pytest.mark.parametrize("window", [-1, 128, 400])
@pytest.mark.parametrize(("past", "queries"), [(128, 772), (650, 250), (899, 1)])
def test_block_mask_of_the_last_queries_is_pytorchs(
    lengths: tuple[tuple[int, ...], ...] | None, window: int, past: int, queries: int
) -> None:
    length, documents = past + queries, None
    if lengths is not None:
        documents = PackedLayout.from_lengths(lengths).documents[:, :length]
    ours = attention_flex.block_mask(queries, window, documents, CPU, past=past)
    rows = None if documents is None else len(documents)
    theirs = flex_attention.create_block_mask(
        ours.mask_mod, rows, None, queries, length, device="cpu"
    )
    assert ours.shape == theirs.shape
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    dense = dense_bias(
        None if lengths is None else PackedLayout.from_lengths(lengths).span(0, length),
        AttentionSpec(1.0, window=window),
        queries,
        past,
        CPU,
    )
    rows_, here = torch.arange(rows or 1)[:, None, None], torch.arange(queries)[:, None]
    assert torch.equal(
        ours.mask_mod(rows_, torch.tensor(0), here, torch.arange(length)).expand(
            len(dense), -1, -1
        ),
        dense[:, 0],
    )
    whole = ours.full_kv_num_blocks
    assert whole is not None and theirs.full_kv_num_blocks is not None
    assert int(whole.sum()) <= int(theirs.full_kv_num_blocks.sum())


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("impl", ["auto", "torch", "sdpa", "flex", "varlen", "flash"])
@pytest.mark.parametrize("name", ["gqa-rows", "gqa-alibi-window-rows", "mqa-softcap-rows"])
def test_tokens_after_cached_ones_see_the_cache(name: str, impl: str, queries: int) -> None:
    case = GRID[name]
    q, k, v, _ = case.tensors()
    past, q = q.shape[1] - queries, q[:, -queries:]
    spec = case.spec(torch.float64)
    chosen = plan(None, spec, queries=queries, past=past, device=CPU, impl=impl)
    served = "torch" if impl == "torch" or case.softcap else "sdpa"
    assert chosen.impl == served  # the kernels for training have no use here
    out = attend(q, k, v, chosen)
    assert distance([out], [plain_attention(q, k, v, case, past)]) < 1e-13


@pytest.mark.parametrize("impl", ["torch", "sdpa"])
def test_under_autocast_wide_queries_and_narrow_values_are_served(impl: str) -> None:
    case = GRID["gqa-alibi-packed"]
    q, k, v = (x.float() for x in case.tensors()[:3])
    chosen = plan(case.layout(), case.spec(), queries=19, past=0, device=CPU, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v.bfloat16(), chosen)
    assert out.dtype == torch.bfloat16
    assert distance([out], [expected(case)[0]]) <= TOLERANCE["bf16"][0]


@pytest.mark.parametrize("impl", ["torch", "sdpa"])
@pytest.mark.parametrize("lengths", [((256,),), ((100, 156),)])
def test_dropout_drops_that_share_of_the_weights_while_training_only(
    impl: str, lengths: tuple[tuple[int, ...], ...]
) -> None:
    case = Case(heads=8, kv_heads=8, lengths=lengths)
    q = k = torch.zeros(1, 256, 8, 8)  # equal weights
    spec = replace(case.spec(), dropout=0.25)
    chosen = plan(case.layout(), spec, queries=256, past=0, device=CPU, impl=impl)
    seen = torch.cat([torch.arange(1, n + 1) for n in lengths[0]]).view(1, -1, 1)
    ones = torch.ones_like(q)
    torch.manual_seed(0)
    kept = (attend(q, k, ones, chosen, training=True)[..., 0] * 0.75 * seen).sum()
    assert kept / (8 * seen.sum()) == pytest.approx(0.75, abs=0.005)
    torch.testing.assert_close(attend(q, k, ones, chosen), ones)


@pytest.mark.parametrize("impl", ["torch", "sdpa", "flex", "varlen"])
def test_a_plan_asks_the_device_for_no_number(impl: str) -> None:
    """The meta device has none to give: .item(), nonzero and their like raise there."""
    meta = torch.device("meta")
    layout = PackedLayout.from_lengths(((7, 300), (307,))).to(meta)
    spec = AttentionSpec(0.3, None, torch.ones(4, device=meta), window=40)
    chosen = PLANS[impl](layout, spec, queries=307, past=0, device=meta)
    part = range_plan(impl, layout, spec, 20, 300, meta)
    assert (part.queries, part.start, part.stop) == (280, 0, 300)
    if impl in ("torch", "sdpa"):
        q = torch.empty(2, 307, 4, 8, device=meta)
        assert attend(q, q, q, chosen).shape == q.shape


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with a GPU, Triton and flash-attn, as far as `refusal` asks; fields may change."""
    machine = SimpleNamespace(
        capability=(9, 0), triton=True, flash="2.8.3.post2", loads=True, memory=227, flash3=False
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)

    def properties(device: torch.device) -> object:
        return SimpleNamespace(shared_memory_per_block_optin=machine.memory * 1024)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def find_spec(name: str) -> object:
        return object() if machine.triton else None

    def version(name: str) -> str:
        if machine.flash is None or name != "flash-attn":
            raise importlib.metadata.PackageNotFoundError(name)
        return machine.flash

    def import_module(name: str) -> object:
        if not machine.loads:
            raise ImportError("undefined symbol")
        if name == "flash_attn_interface" and not machine.flash3:
            raise ModuleNotFoundError(name)
        return SimpleNamespace(flash_attn_varlen_func=fa3, CONFIG={"build_flags": {}})

    def fa3(*, softmax_scale, causal, window_size, softcap, deterministic): ...  # type: ignore[no-untyped-def]

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", import_module)
    cached = (
        attention_flash._missing_flash,
        flash._missing_flash3,
        flash._build_flags,
        flash.fastest_varlen,
        flash._has_flash4,
    )
    for found in cached:
        found.cache_clear()
    yield machine
    for found in cached:
        found.cache_clear()


CAP, DROP, BIAS, LOCAL = {"softcap": 5.0}, {"dropout": 0.1}, {"slopes": SLOPES}, {"window": 9}
SINKS = {"sinks": True}
assert varlen  # imported here: `gpu` replaces what imports its parts
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
REFUSED = [
    ("sdpa", CAP, CUDA, BF16, {}, "has no softcap; write auto, flex, flash, flash3 or torch"),
    ("flex", DROP, CUDA, BF16, {}, "has no dropout; write auto, sdpa, flash or torch"),
    ("flex", {}, CPU, FP32, {}, "has no backward pass on a CPU; write auto"),
    ("flex", {}, torch.device("mps"), FP32, {}, "on CUDA alone, not on mps; write auto"),
    ("flex", {}, CUDA, FP64, {}, "no double precision; write auto"),
    ("flex", {}, CUDA, BF16, {"triton": False}, "Triton, which is not installed; write auto"),
    ("varlen", BIAS, CUDA, BF16, {}, "adds no bias; write auto, sdpa, flex, flash or torch"),
    ("varlen", CAP, CUDA, BF16, {}, "has no softcap; write auto, flex, flash, flash3 or torch"),
    ("varlen", DROP, CUDA, BF16, {}, "has no dropout; write auto, sdpa, flash or torch"),
    ("varlen", {}, CPU, BF16, {}, "runs on CUDA alone, not on cpu; write auto"),
    ("varlen", {}, CUDA, FP32, {}, "bf16 and fp16, not float32; write auto, or precision: amp_bf"),
    ("varlen", {}, CUDA, BF16, {"capability": (7, 5)}, "8.0 (A100) or newer, this one has 7.5;"),
    ("varlen", {}, CUDA, BF16, {"head_dim": 320}, "at most 256 wide, not 320; write auto"),
    ("flash", CAP | DROP, CUDA, BF16, {}, "no dropout under a softcap; write auto or torch"),
    ("flash", DROP, CUDA, BF16, {"head_dim": 224, "memory": 99}, "wider than 192, which these are"),
    ("flash", {}, CPU, BF16, {}, "runs on CUDA alone, not on cpu; write auto"),
    ("flash", {}, CUDA, FP32, {}, "bf16 and fp16, not float32; write auto, or precision: amp_bf"),
    ("flash", {}, CUDA, BF16, {"capability": (7, 0)}, "8.0 (A100) or newer, this one has 7.0;"),
    ("flash", {}, CUDA, BF16, {"head_dim": 320}, "at most 256 wide, not 320; write auto"),
    ("flash", {}, CUDA, BF16, {"flash": None}, "not installed; pip install flash-attn --no-build"),
    ("flash", {}, CUDA, BF16, {"flash": "2.5.9"}, "flash-attn 2.5.9 is older than 2.6.2; pip inst"),
    ("flash", {}, CUDA, BF16, {"loads": False}, "does not load (undefined symbol); build it again"),
]


@pytest.mark.parametrize(("impl", "options", "device", "dtype", "machine", "reason"), REFUSED)
def test_what_a_backend_cannot_serve_is_refused_with_the_reason(
    impl: str,
    options: dict[str, object],
    device: torch.device,
    dtype: torch.dtype,
    machine: dict[str, object],
    reason: str,
    gpu: SimpleNamespace,
) -> None:
    head_dim = machine.get("head_dim", 64)
    vars(gpu).update(machine)
    spec = AttentionSpec(0.1, **options)
    found = refusal(impl, spec, device, dtype, head_dim=head_dim)
    assert found is not None
    assert found.startswith(f"{impl}: ")
    assert reason in found
    with pytest.raises(UserError, match=r"^model.attn_config.attn_impl: " + impl):
        plan(None, spec, queries=64, past=0, device=device, impl=impl, dtype=dtype, head_dim=320)
    assert refusal("auto", spec, device, dtype) is None
    assert refusal("torch", spec, device, dtype) is None


def test_an_old_torch_without_windows_in_varlen_is_refused(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal("varlen", AttentionSpec(0.1), CUDA, BF16) is None
    monkeypatch.setattr(attention_varlen, "_varlen_parameters", lambda: frozenset({"is_causal"}))
    found = refusal("varlen", AttentionSpec(0.1), CUDA, BF16)
    assert found is not None
    assert "install 2.11 or newer" in found


SETTINGS = {
    "alibi: true": BIAS,
    "attn_logit_softcapping: 5": CAP,
    "attn_pdrop: 0.1": DROP,
    "sliding_window_size: 9": LOCAL,
}
COMBINED = [names for n in range(5) for names in itertools.combinations(SETTINGS, n)]


@pytest.mark.parametrize("head_dim", [64, 256, 264])
@pytest.mark.parametrize("impl", ["sdpa", "flex", "varlen", "flash", "flash3", "torch"])
def test_the_recipe_and_the_backends_refuse_the_same_options(
    impl: str, head_dim: int, gpu: SimpleNamespace
) -> None:
    gpu.flash3 = True
    recipe = checked(TrainRecipe, None, ["run_name=x", f"model.head_dim={head_dim}"])
    for names in COMBINED:
        spec = AttentionSpec(0.1, **functools.reduce(or_, (SETTINGS[n] for n in names), {}))
        found = refusal(impl, spec, CUDA, BF16, head_dim=head_dim)
        settings = yaml.safe_load(f"{{{', '.join(names)}}}")
        recipe.model.attn_config = AttentionConfig(attn_impl=impl, **settings)
        key = "model.attn_config.attn_impl: "
        assert [*recipe.check()] == ([] if found is None else [key + found.replace(":", "", 1)])


def test_wide_heads_with_dropout_need_the_memory_of_a_large_gpu(gpu: SimpleNamespace) -> None:
    spec = AttentionSpec(0.1, dropout=0.1, window=9)
    for width, memory, impl in ((256, 227, "flash"), (256, 163, "flash"), (256, 99, "sdpa")):
        gpu.memory = memory
        assert choose(spec, True, CUDA, BF16, width) == impl
    assert choose(spec, True, CUDA, BF16, 192) == "flash"


ALL = BIAS | CAP | DROP | LOCAL
CHOICES = [  # device, dtype, packed, spec, machine -> backend
    (CPU, FP32, False, {}, {}, "sdpa"),
    (CPU, FP32, True, BIAS | LOCAL | DROP, {}, "sdpa"),
    (CPU, FP32, True, CAP, {}, "torch"),
    (torch.device("mps"), FP32, True, BIAS, {}, "sdpa"),
    (CUDA, BF16, False, {}, {}, "sdpa"),
    (CUDA, BF16, False, DROP, {}, "sdpa"),
    (CUDA, FP32, False, {}, {}, "sdpa"),
    (CUDA, BF16, True, {}, {}, "varlen"),
    (CUDA, BF16, True, LOCAL, {}, "varlen"),
    (CUDA, BF16, False, LOCAL, {}, "varlen"),
    (CUDA, BF16, False, SINKS, {}, "varlen"),
    (CUDA, BF16, True, SINKS | LOCAL, {}, "varlen"),
    (CUDA, FP32, True, SINKS, {}, "flex"),
    (CUDA, FP32, True, {}, {}, "flex"),
    (CUDA, FP32, False, LOCAL, {}, "flex"),
    (CUDA, BF16, False, BIAS, {}, "flex"),
    (CUDA, BF16, True, BIAS | CAP | LOCAL, {}, "flex"),
    (CUDA, BF16, True, {}, {"capability": (7, 5)}, "flex"),
    (CUDA, BF16, True, DROP, {}, "flash"),
    (CUDA, BF16, False, BIAS | DROP, {}, "flash"),
    (CUDA, BF16, False, CAP | DROP, {}, "torch"),
    (CUDA, BF16, True, ALL, {}, "torch"),
    (CUDA, BF16, True, ALL, {"flash": None}, "torch"),
    (CUDA, BF16, True, BIAS | DROP, {"flash": None}, "sdpa"),
    (CUDA, FP64, True, BIAS, {}, "sdpa"),
    (CUDA, FP64, True, CAP, {}, "torch"),
    (CUDA, BF16, True, CAP, {"triton": False}, "flash"),
    (CUDA, BF16, True, CAP, {"triton": False, "flash": None}, "torch"),
]


@pytest.mark.parametrize(("device", "dtype", "packed", "options", "machine", "impl"), CHOICES)
def test_auto_takes_the_cheapest_that_can_serve(
    device: torch.device,
    dtype: torch.dtype,
    packed: bool,
    options: dict[str, object],
    machine: dict[str, object],
    impl: str,
    gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vars(gpu).update(machine)
    for name in PLANS:  # the choice alone: no tensor can be on the device
        monkeypatch.setitem(
            PLANS, name, lambda *_, name=name, **__: AttentionPlan(name, AttentionSpec(0.1))
        )
    layout = PackedLayout.from_lengths(((20, 44),) if packed else ((64,),))
    spec = AttentionSpec(0.1, **options)
    chosen = plan(layout, spec, queries=64, past=0, device=device, impl="auto", dtype=dtype)
    assert chosen.impl == impl


def test_autocast_decides_what_auto_computes_in(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PLANS:
        monkeypatch.setitem(
            PLANS, name, lambda *_, name=name, **__: AttentionPlan(name, AttentionSpec(0.1))
        )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    layout = PackedLayout.from_lengths(((20, 44),))

    def choice(dtype: torch.dtype | None) -> str:
        spec = AttentionSpec(0.1)
        return plan(layout, spec, queries=64, past=0, device=CUDA, impl="auto", dtype=dtype).impl

    assert choice(None) == choice(torch.float32) == "varlen"
    assert choice(torch.float64) == "sdpa"  # autocast leaves it alone


def test_rows_of_one_document_are_not_packed() -> None:
    spec = AttentionSpec(0.1)
    layout = PackedLayout.from_lengths(((64,), (64,)))
    chosen = plan(layout, spec, queries=64, past=0, device=CPU, impl="sdpa")
    assert chosen == AttentionPlan("sdpa", spec)


def calls_of(monkeypatch: pytest.MonkeyPatch, lengths: tuple[tuple[int, ...], ...]) -> list[int]:
    """Rows of each call of PyTorch's function, for documents of these lengths."""
    rows: list[int] = []
    function = torch.nn.functional.scaled_dot_product_attention

    def counted(q: Tensor, *inputs: Tensor, **options: object) -> Tensor:
        rows.append(len(q))
        return function(q, *inputs, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    case = Case(heads=1, kv_heads=1, lengths=lengths)
    errors(case, "sdpa", "fp32")
    return rows


def test_neighbouring_documents_of_one_length_are_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert calls_of(monkeypatch, ((30,), (30,), (10, 20), (20, 10), (10, 10, 10))) == [2, 1, 2, 4]
