"""FlashAttention 4: where it is activated, and when PyTorch gets its own kernels back.

Its stand-in has the two functions that PyTorch's registration asks for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn import attention as torch_attention

from llmfoundry.ops.attention import flash
from llmfoundry.ops.attention.base import AttentionSpec
from llmfoundry.ops.attention.select import AttentionKernels
from llmfoundry.ops.packed_layout import PackedLayout

GPU = torch.device("cuda", 0)
PLAIN = AttentionSpec(scale=0.125)
PACKED = PackedLayout.from_lengths([[24, 40]])
needs_windows = pytest.mark.skipif(
    not hasattr(importlib.import_module("torch.nn.attention._fa4"), "_aten_to_fa4_window_size"),
    reason="this PyTorch's FlashAttention 4 has no windows",
)


def clear() -> None:
    for cached in (flash._has_flash4, flash._missing_flash3, flash.fastest_varlen):
        cached.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """flash-attn-4 as if it were installed."""
    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = module._flash_attn_bwd = lambda *args, **options: None  # type: ignore[attr-defined]
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "4.0.0b36" if name == "flash-attn-4" else version(name),
    )
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    kernels = importlib.import_module("torch.nn.attention._fa4")
    kernels._fa4_import_module.cache_clear()
    clear()
    yield module
    if torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()
    kernels._fa4_import_module.cache_clear()
    clear()


def use(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    width: int = 128,
    spec: AttentionSpec = PLAIN,
) -> str | None:
    """The implementation that PyTorch runs after a model of this width has been planned."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels = AttentionKernels(head_dim=width)
    kernels._choose(spec, True, GPU, torch.bfloat16, trees=False)
    return torch_attention.current_flash_attention_impl()


@needs_windows
@pytest.mark.parametrize(
    ("capability", "width", "impl"),
    [
        ((9, 0), 128, "FA4"),
        ((9, 0), 192, "FA4"),
        ((10, 0), 124, "FA4"),  # padded to 128
        ((10, 3), 256, "FA4"),
        ((10, 0), 192, None),
        ((8, 0), 128, None),
        ((12, 0), 128, None),
    ],
)
def test_packed_sequences_run_on_it_where_it_supports_gpu_and_width(
    capability: tuple[int, int],
    width: int,
    impl: str | None,
    package: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert use(monkeypatch, capability, width) == impl
    assert use(monkeypatch, capability, width, replace(PLAIN, window=100)) == impl


@needs_windows
def test_flash_attention_3_comes_first_on_hopper(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(flash, "_missing_flash3", functools.cache(lambda: None))
    monkeypatch.setattr(flash, "flash3_refusal", lambda *case: "not asked for")
    use(monkeypatch, (9, 0))
    use(monkeypatch, (10, 0), 64)
    assert activated == ["FA3", "FA4"]


@needs_windows
@pytest.mark.parametrize(("width", "dropout"), [(128, 0.1), (192, 0.0)])
def test_a_model_that_it_does_not_support_gets_pytorchs_kernels_back(
    width: int, dropout: float, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use(monkeypatch, (10, 0)) == "FA4"
    assert use(monkeypatch, (10, 0), width, replace(PLAIN, dropout=dropout)) is None
    assert use(monkeypatch, (10, 0)) == "FA4"


@needs_windows
def test_a_package_that_does_not_load_is_one_line_and_flash_attention_2(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    del package._flash_attn_bwd
    with pytest.warns(UserWarning, match="runs FlashAttention 2: Module .* not expose FA4 kernels"):
        assert use(monkeypatch, (9, 0)) is None


def test_nothing_is_activated_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    clear()
    assert use(monkeypatch, (9, 0)) is None
    clear()
