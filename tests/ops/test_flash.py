"""FlashAttention 3: what its package is handed, where it is chosen, and what PyTorch is given.

Its stand-in has the signatures of hopper/flash_attn_interface.py of Dao-AILab/flash-attention at
0251105a (3.0.0), and computes what they document, on a CPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from llmfoundry.attention_limits import LIMITS
from llmfoundry.ops.attention import flash
from llmfoundry.ops.attention.base import AttentionSpec
from llmfoundry.ops.attention.select import PLANS, attend, choose, refusal
from llmfoundry.ops.packed_layout import Ranges
from tests.ops.plain_attention import CPU, DTYPES, GRID, Case, distance, expected
from tests.ops.plain_ranges import PAIRS, range_errors
from tests.ops.test_attention_kernels import SHORT, agrees, by_border, document

SERVED = [name for name, case in SHORT.items() if not case.alibi]
H100 = torch.device("cuda", 0)
PLAIN = AttentionSpec(scale=0.125)
CAPPED = replace(PLAIN, softcap=30.0)
WINDOW = replace(PLAIN, window=100)
BF16 = torch.bfloat16
needs_backward = pytest.mark.skipif(
    not hasattr(importlib.import_module("torch.nn.attention"), "activate_flash_attention_impl")
    or not hasattr(importlib.import_module("torch.nn.attention._fa3"), "_FA3_CUDA_BWD"),
    reason="this PyTorch's FlashAttention 3 has no backward pass",
)


def clear() -> None:
    for cached in (flash._missing_flash3, flash._build_flags, flash.fastest_varlen):
        cached.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """flash-attn-3 as if it were installed; `calls` are the options of each call."""
    module, config = ModuleType("flash_attn_interface"), ModuleType("flash_attn_config")
    calls: list[dict[str, Any]] = []

    def known(options: dict[str, Any]) -> dict[str, Any]:
        calls.append(options)
        assert options["causal"]
        left, right = options["window_size"]
        assert right == (0 if left >= 0 else -1)
        return {
            "scale": options["softmax_scale"],
            "window": (left, 0),
            "softcap": options["softcap"],
        }

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert q.shape[-1] % 8 == 0  # "head_size should be a multiple of 8"
        options = known({n: value for n, value in locals().items() if n not in ("q", "k", "v")})
        return torch.stack([document(*row, **options) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert q.shape[-1] % 8 == 0
        options = known({n: value for n, value in locals().items() if n not in ("q", "k", "v")})
        borders, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return by_border(q, k, v, borders, longest, **options)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.calls, config.CONFIG = calls, {"build_flags": {}}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    clear()
    yield module
    clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What PyTorch was asked to activate, in place of doing so."""
    asked: list[str] = []
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", asked.append)
    yield asked
    clear()


@pytest.mark.parametrize("name", SERVED)
def test_it_is_handed_what_gives_the_definitions_output(name: str, package: ModuleType) -> None:
    agrees("flash3", GRID[name])
    assert len(package.calls) == 1 and not package.calls[0]["deterministic"]


@pytest.mark.parametrize(("name", "ranges"), [pair for pair in PAIRS if pair[0] in SERVED])
def test_queries_that_are_some_of_the_row_have_borders_of_their_own(
    name: str, ranges: Ranges, package: ModuleType
) -> None:
    assert max(range_errors("flash3", GRID[name], ranges)) <= 1


def test_heads_of_odd_width_and_the_older_pair_of_outputs(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(GRID["gqa-packed"], head_dim=5)
    newer = package.flash_attn_varlen_func

    def older(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return newer(*args, **kwargs), None

    for function in (newer, older):
        monkeypatch.setattr(package, "flash_attn_varlen_func", function)
        q, k, v = (x.to(DTYPES["fp64"]) for x in case.tensors()[:3])
        plan = PLANS["flash3"](case.layout(), case.spec(), queries=19, past=0, device=CPU)
        assert distance([attend(q, k, v, plan)], [expected(case)[0]]) < 1e-12


def test_it_is_deterministic_where_torch_is_and_says_where_it_cannot_be(
    package: ModuleType, hopper: None
) -> None:
    case: Case = GRID["gqa-packed"]
    plan = PLANS["flash3"](case.layout(), case.spec(), queries=19, past=0, device=CPU)
    assert refusal("flash3", PLAIN, H100, BF16, head_dim=256) is None
    torch.use_deterministic_algorithms(True)
    try:
        attend(*case.tensors()[:3], plan)
        assert refusal("flash3", PLAIN, H100, BF16, head_dim=192) is None
        reason = refusal("flash3", PLAIN, H100, BF16, head_dim=256)
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.calls[0]["deterministic"]
    assert reason is not None and "not deterministic for heads wider than 192" in reason


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (replace(PLAIN, dropout=0.1), BF16, "attn_pdrop: FlashAttention 3 has no dropout"),
        (replace(PLAIN, slopes=torch.ones(2)), BF16, "alibi: FlashAttention 3 adds no bias"),
        (replace(PLAIN, sinks=True), BF16, "sinks: FlashAttention 3 has no sinks"),
        (PLAIN, torch.float32, "takes bf16 and fp16, not float32"),
    ],
)
def test_what_it_cannot_serve_is_said(
    spec: AttentionSpec, dtype: torch.dtype, words: str, package: ModuleType, hopper: None
) -> None:
    reason = refusal("flash3", spec, H100, dtype)
    assert reason is not None and words in reason and "\n" not in reason
    assert len(LIMITS["flash3"]) == 3  # and nothing else


@pytest.mark.parametrize(
    ("flag", "spec", "width"),
    [("SOFTCAP", CAPPED, 64), ("LOCAL", WINDOW, 64), ("HDIM96", PLAIN, 80), ("VARLEN", PLAIN, 8)],
)
def test_a_build_without_a_part_serves_what_needs_it_not(
    flag: str, spec: AttentionSpec, width: int, package: ModuleType, hopper: None
) -> None:
    assert refusal("flash3", spec, H100, BF16, head_dim=width) is None
    sys.modules["flash_attn_config"].CONFIG = {
        "build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}
    }
    clear()
    reason = refusal("flash3", spec, H100, BF16, head_dim=width)
    assert reason is not None and f"was built without {flag};" in reason
    if flag not in ("VARLEN", "HDIM96"):
        assert refusal("flash3", PLAIN, H100, BF16, head_dim=width) is None


def test_other_gpus_and_missing_or_old_packages_are_refused(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, words in (((8, 0), "not 8.0"), ((10, 0), "not 10.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=found: found)
        assert words in str(refusal("flash3", PLAIN, H100, BF16))
        assert choose(CAPPED, True, H100, BF16, 64) != "flash3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(package, "flash_attn_varlen_func", lambda q, k, v, causal: None)
    clear()
    assert "too old: it takes no deterministic, softcap, softmax_scale, window_size" in str(
        refusal("flash3", PLAIN, H100, BF16)
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    clear()
    assert "flash-attn-3 is not installed" in str(refusal("flash3", PLAIN, H100, BF16))
    assert choose(PLAIN, True, H100, BF16, 64) == "varlen"


@needs_backward
def test_auto_runs_packed_rows_on_it(
    package: ModuleType, hopper: None, activated: list[str]
) -> None:
    """By PyTorch's varlen, which compiles as a whole, and with a softcap by the package."""
    assert choose(PLAIN, True, H100, BF16, 64) == choose(WINDOW, True, H100, BF16, 64) == "varlen"
    assert activated == ["FA3"]  # once
    assert choose(CAPPED, True, H100, BF16, 64) == choose(CAPPED, False, H100, BF16, 64) == "flash3"
    assert choose(PLAIN, False, H100, BF16, 64) == "sdpa"
    assert choose(replace(CAPPED, slopes=torch.ones(2)), True, H100, BF16, 64) != "flash3"


def test_dropout_leaves_pytorchs_attention_as_it_is(
    package: ModuleType, hopper: None, activated: list[str]
) -> None:
    """Activated, FlashAttention 3 would refuse plain rows with dropout too."""
    choose(replace(PLAIN, dropout=0.1), True, H100, BF16, 64)
    choose(CAPPED, True, H100, BF16, 64)
    assert not activated


@needs_backward
def test_where_pytorch_cannot_run_it_the_package_is_called(
    package: ModuleType, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = sys.modules["torch.nn.attention._fa3"]
    monkeypatch.delattr(kernels, "_FA3_CUDA_BWD")  # as before it had a backward pass
    assert choose(PLAIN, True, H100, BF16, 64) == "flash3"


@needs_backward
def test_a_failed_activation_is_one_line_and_another_kernel(
    package: ModuleType, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(impl: str) -> None:
        raise RuntimeError("does not expose FA3 kernels\nand more")

    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", refuse)
    with pytest.warns(UserWarning, match="runs FlashAttention 2: does not expose FA3 kernels$"):
        assert choose(PLAIN, True, H100, BF16, 64) == "flash3"


@needs_backward
def test_pytorch_activates_what_the_package_registers(package: ModuleType, hopper: None) -> None:
    """PyTorch's own registration, with operators of the package's names."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("fwd(Tensor q) -> Tensor")
    library.define("bwd(Tensor q) -> Tensor")
    try:
        assert flash.fastest_varlen(H100, 64) == "FA3"
        assert torch_attention.current_flash_attention_impl() == "FA3"
    finally:
        torch_attention.restore_flash_attention_impl()
        library._destroy()
