"""Derivatives of the activations against autograd's."""

from __future__ import annotations

import pytest
import torch

from llmfoundry.ops.activations import ACTIVATIONS, from_text, to_text
from llmfoundry.recipe.model import ACTIVATIONS as IN_RECIPE

VALUES = {"approximate": "tanh", "min_val": -0.7, "max_val": 0.4, "threshold": 2.0}
WITH_ARGUMENTS = {
    f"{name} with arguments": to_text(name, {key: VALUES.get(key, 0.3) for key in keys})
    for name, keys in IN_RECIPE.items()
    if keys
}
LIMITED = {
    "with a limit": "silu glu_limit=2.5",
    "both": "leaky_relu negative_slope=0.1 glu_limit=2",
}
CASES = {**LIMITED, **{name: name for name in ACTIVATIONS}, **WITH_ARGUMENTS}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_derivative_is_autograds(text: str) -> None:
    act = from_text(text)
    x = torch.linspace(-8, 8, 999, dtype=torch.float64).requires_grad_()  # hits no kink
    grad = torch.randn(999, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(act.function(x), x, grad)
    torch.testing.assert_close(act.backward(grad, x.detach()), expected)


def test_the_up_projection_of_a_clamped_glu_is_clamped_and_plus_one() -> None:
    act = from_text("silu glu_limit=2.5")
    x = torch.linspace(-8, 8, 999, dtype=torch.float64).requires_grad_()
    up = act.up(x)
    assert (up.min(), up.max()) == (-1.5, 3.5)
    torch.testing.assert_close(up[450], x[450] + 1)
    grad = torch.randn(999, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(up, x, grad)
    torch.testing.assert_close(act.up_backward(grad, x.detach()), expected)


def test_every_activation_of_the_recipe_is_here() -> None:
    assert set(ACTIVATIONS) == set(IN_RECIPE)


def test_arguments_reach_the_function() -> None:
    x = torch.tensor([-2.0, 3.0])
    slope = from_text(to_text("leaky_relu", {"negative_slope": 0.25}))
    torch.testing.assert_close(slope.function(x), torch.tensor([-0.5, 3.0]))
    tanh = from_text(to_text("gelu", {"approximate": "tanh"}))
    torch.testing.assert_close(tanh.function(x), from_text("gelu_tanh").function(x))
