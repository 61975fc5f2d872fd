"""One bf16 copy of the experts for all microbatches of a step: when, how often, the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry.builders.model import build_autocast
from llmfoundry.distributed.experts import cast_experts_once, mixtures
from llmfoundry.models import moe
from llmfoundry.ops.moe import experts
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.recipe.parallel import ActivationMemory, Degrees
from llmfoundry.train.step import Guard, StepHooks, StepSettings, train_step
from tests.models.test_decoder import SIZES
from tests.train.test_moe_training import CPU, make_optimizer, make_root
from tests.train.test_step import make_batch

NONE = ActivationMemory("none", (frozenset(), frozenset()))


class Casts(TorchDispatchMode):
    """Number of casts of a whole matrix of all experts to bf16."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.found += args[0].dtype == torch.float32 and result.numel() == self.size
        return result


def steps(
    impl: str, *, once: bool, fp8: str | None = None, f: int = 40
) -> tuple[list[Tensor], int]:
    """Losses, gradients and weights of two steps of three microbatches, and the number of casts."""
    root = make_root(moe_impl=impl, mlp_type="glu", ffn_hidden_size=f)
    for layer in mixtures(root):
        layer.experts.fp8 = fp8
    if once:
        cast_experts_once(root, None, NONE, precision="amp_bf16")
    optimizer, found = make_optimizer(root), []

    def keep() -> None:
        found.extend(p.grad.clone() for p in root.parameters() if p.grad is not None)

    settings = StepSettings(
        microbatch=2,
        autocast=build_autocast("amp_bf16", CPU),
        clipping=GradientClippingConfig("norm", 1.0),
    )
    layers = list(mixtures(root))
    with Casts(layers[0].experts.w1.numel()) as casts:
        for number in range(2):
            result = train_step(
                root,
                optimizer,
                make_batch(),
                settings,
                number=number,
                guard=Guard(CPU),
                hooks=StepHooks(on_gradients=keep),
            )
            found.append(result.loss)
    assert all(layer.experts.copies is None for layer in layers)
    return [*found, *(p.detach() for p in root.parameters())], casts.found


@pytest.mark.parametrize(("impl", "each", "shared"), [("torch", 3, 1), ("grouped_mm", 0, 1)])
def test_microbatches_share_a_copy(
    monkeypatch: pytest.MonkeyPatch, impl: str, each: int, shared: int
) -> None:
    """A CPU's grouped_mm casts expert by expert otherwise."""
    monkeypatch.setattr(moe, "kind_of", lambda device: "cuda")
    plain, before = steps(impl, once=False)
    mine, after = steps(impl, once=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    n_layers = len(list(mixtures(make_root())))
    assert (before, after) == (2 * 3 * n_layers * each, 2 * 3 * n_layers * shared)


@pytest.mark.parametrize(
    ("method", "step"), [("rowwise_emulated", "quantize"), ("mxfp8_emulated", "quantize_mx")]
)
def test_microbatches_share_matrices_in_fp8(
    monkeypatch: pytest.MonkeyPatch, method: str, step: str
) -> None:
    monkeypatch.setattr(moe, "kind_of", lambda device: "cuda")
    quantized = []

    def quantize(rows: Tensor) -> experts.ScaledRows:
        quantized.append(rows.ndim)
        return original(rows)

    monkeypatch.setitem(SIZES, "d_model", 32)  # a block of MXFP8
    original = getattr(experts, step)
    monkeypatch.setattr(experts, step, quantize)
    found, counts = [], []
    for once in (False, True):
        quantized.clear()
        found.append(steps("grouped_mm", once=once, fp8=method, f=96)[0])
        counts.append(quantized.count(3))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    n_layers = len(list(mixtures(make_root())))
    # three matrices, each along both dimensions: for every microbatch of two steps, or once a step
    assert counts == [2 * 3 * n_layers * 6, 2 * n_layers * 6]


def test_a_cpu_casts_each_expert_when_it_is_used() -> None:
    assert steps("grouped_mm", once=True)[1] == 0


@pytest.mark.parametrize(
    ("degrees", "level", "precision", "expected"),
    [
        (Degrees(), "none", "amp_bf16", True),
        (Degrees(replicate=4), "none", "amp_bf16", True),
        (Degrees(shard=4), "none", "amp_bf16", False),  # FSDP casts
        (Degrees(shard=4, expert=2), "none", "amp_bf16", False),
        (Degrees(), "whole", "amp_bf16", False),  # the copy would stay in memory
        (Degrees(), "selective", "amp_bf16", False),
        (Degrees(), "none", "fp32", False),
        (Degrees(), "none", "bf16", False),
    ],
)
def test_only_layouts_that_keep_the_copy_anyway(
    degrees: Degrees, level: str, precision: str, expected: bool
) -> None:
    root, meshes = make_root(), SimpleNamespace(degrees=degrees)
    memory = ActivationMemory(level, NONE.targets)
    cast_experts_once(root, meshes, memory, precision=precision)  # type: ignore[arg-type]
    assert {layer.experts.is_cast_once for layer in mixtures(root)} == {expected}
