"""The residual stream in bfloat16 over fp32 weights, next to the model in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from tests.distributed.layouts import MODELS
from tests.models.test_decoder import make_config

NAMES = ("learned", "gqa", "dbrx")  # LayerNorm with biases, RMSNorm, experts


def make_model(name: str) -> Decoder:
    model = Decoder(make_config(**MODELS[name]))
    model.init_weights(3)
    return model.eval()


def step(model: Decoder) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, loss, and the gradient of the head."""
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    hidden = model(tokens)
    loss = model.loss(hidden, tokens.roll(-1, 1))
    (grad,) = torch.autograd.grad(loss, model.head_weight)
    return hidden.detach(), loss.detach(), grad


@pytest.mark.parametrize("name", NAMES[:2])  # rounding may choose other experts
def test_a_bf16_stream_is_near_float64(name: str) -> None:
    exact = step(make_model(name).double())
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(name)
        model.use_residual_dtype(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = step(model)
        assert found[0].dtype == dtype and found[1].dtype == found[2].dtype == torch.float32
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)])
    for narrow, wide in zip(errors[1], errors[0], strict=True):
        assert narrow < 0.02 and narrow < 6 * wide + 1e-3  # rounding of the stream, not a fault


@pytest.mark.parametrize("name", NAMES)
def test_blocks_pass_on_the_dtype_of_the_stream(name: str) -> None:
    model, seen = make_model(name), set[torch.dtype]()

    def note(block: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        seen.update({args[0].dtype, output[0].dtype})

    for block in model.blocks:
        block.register_forward_hook(note)
    for dtype in (torch.float32, torch.bfloat16):
        model.use_residual_dtype(dtype)
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            step(model)
        assert seen == {dtype}
    seen.clear()
    step(model)  # without autocast nothing is rounded
    assert seen == {torch.float32}
