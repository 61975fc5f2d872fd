"""Elementwise activations and their derivatives, by the names of recipe/model.py.

A layer that autograd differentiates takes `function`; the mixture of experts, which recomputes
activations in its own backward pass, needs `backward` as well: the gradient of the input from the
gradient of the output and the input. PyTorch has both for most; formulas are written out for the
rest. Inside a custom operator there is no autograd, hence the second column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

GLU_LIMIT = "glu_limit"
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al., 2017


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative.

    Attributes:
        function: of the input; arguments by keyword.
        backward: of the gradient of the output and the input; the same arguments.
        limit: of a clamped GLU (gpt-oss), see `clamped`; None: a GLU is function(gate) * up.
    """

    function: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    limit: float | None = None

    def up(self, x: Tensor) -> Tensor:
        """Return the factor of a GLU from the output of its up projection."""
        return x if self.limit is None else x.clamp(-self.limit, self.limit) + 1

    def up_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the up projection from that of the factor."""
        return grad if self.limit is None else grad * (x.abs() <= self.limit)


def clamped(activation: Activation, limit: float) -> Activation:
    """Return the activation of a clamped GLU: act(min(gate, limit)) * (clamp(up) + 1).

    The up projection is clamped to [-limit, limit].
    """

    def function(x: Tensor) -> Tensor:
        return activation.function(x.clamp(max=limit))

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        return activation.backward(grad * (x <= limit), x.clamp(max=limit))

    return Activation(function, backward, limit)


def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation, x * sigmoid(1.702 x) (Hendrycks and Gimpel, 2016)."""
    return x * torch.sigmoid(1.702 * x)


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.silu_backward(grad, 1.702 * x)  # the function is silu(1.702 x) / 1.702


def relu2(x: Tensor) -> Tensor:
    """The square of max(x, 0) (So et al., 2021)."""
    positive = F.relu(x)
    return positive * positive


def _relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * F.relu(x) * 2


def _elu_backward(grad: Tensor, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return aten.elu_backward(grad, alpha, 1.0, 1.0, False, x)


def _celu_backward(grad: Tensor, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return aten.elu_backward(grad, alpha, 1.0, 1.0 / alpha, False, x)


def _selu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.elu_backward(grad, SELU_ALPHA, SELU_SCALE, 1.0, False, x)


def _softplus_backward(
    grad: Tensor, x: Tensor, *, beta: float = 1.0, threshold: float = 20.0
) -> Tensor:
    return aten.softplus_backward(grad, x, beta, threshold)


def _sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(grad, torch.sigmoid(x))


def _logsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * torch.sigmoid(-x)


def _tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.tanh_backward(grad, torch.tanh(x))


def _tanhshrink_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * torch.tanh(x).square()


def _softsign_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad / (1 + x.abs()).square()


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(grad, x, 0)


def _leaky_relu_backward(grad: Tensor, x: Tensor, *, negative_slope: float = 0.01) -> Tensor:
    return aten.leaky_relu_backward(grad, x, negative_slope, False)


def _softshrink_backward(grad: Tensor, x: Tensor, *, lambd: float = 0.5) -> Tensor:
    return aten.softshrink_backward(grad, x, lambd)


def _hardshrink_backward(grad: Tensor, x: Tensor, *, lambd: float = 0.5) -> Tensor:
    return aten.hardshrink_backward(grad, x, lambd)


def _hardtanh_backward(
    grad: Tensor, x: Tensor, *, min_val: float = -1.0, max_val: float = 1.0
) -> Tensor:
    return aten.hardtanh_backward(grad, x, min_val, max_val)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh")
    ),
    "quick_gelu": Activation(quick_gelu, _quick_gelu_backward),
    "silu": Activation(F.silu, aten.silu_backward),
    "relu": Activation(F.relu, _relu_backward),
    "relu2": Activation(relu2, _relu2_backward),
    "relu6": Activation(F.relu6, partial(_hardtanh_backward, min_val=0.0, max_val=6.0)),
    "leaky_relu": Activation(F.leaky_relu, _leaky_relu_backward),
    "elu": Activation(F.elu, _elu_backward),
    "celu": Activation(F.celu, _celu_backward),
    "selu": Activation(F.selu, _selu_backward),
    "mish": Activation(F.mish, aten.mish_backward),
    "softplus": Activation(F.softplus, _softplus_backward),
    "softsign": Activation(F.softsign, _softsign_backward),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_backward),
    "logsigmoid": Activation(F.logsigmoid, _logsigmoid_backward),
    "tanh": Activation(torch.tanh, _tanh_backward),
    "tanhshrink": Activation(F.tanhshrink, _tanhshrink_backward),
    "softshrink": Activation(F.softshrink, _softshrink_backward),
    "hardshrink": Activation(F.hardshrink, _hardshrink_backward),
    "hardsigmoid": Activation(F.hardsigmoid, aten.hardsigmoid_backward),
    "hardswish": Activation(F.hardswish, aten.hardswish_backward),
    "hardtanh": Activation(F.hardtanh, _hardtanh_backward),
}


@lru_cache
def from_text(text: str) -> Activation:
    """The activation that a text such as `leaky_relu negative_slope=0.1` names.

    Custom operators take plain values, so that name and arguments travel as one text. The argument
    glu_limit makes it that of a clamped GLU.
    """
    name, *pairs = text.split()
    activation = ACTIVATIONS[name]
    arguments = dict(_argument(pair) for pair in pairs)
    limit = arguments.pop(GLU_LIMIT, None)
    if arguments:
        activation = Activation(
            partial(activation.function, **arguments), partial(activation.backward, **arguments)
        )
    return activation if limit is None else clamped(activation, float(limit))


def to_text(name: str, arguments: dict[str, Any]) -> str:
    """Name and arguments as `from_text` reads them."""
    return " ".join([name, *(f"{key}={value}" for key, value in arguments.items())])


def _argument(pair: str) -> tuple[str, Any]:
    key, value = pair.split("=")
    try:
        return key, float(value)
    except ValueError:
        return key, value  # gelu's approximate
