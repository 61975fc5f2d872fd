"""Feed-forward layers: MPT's MLP and the gated linear unit (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.recipe.model import ModelConfig


def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation, x * sigmoid(1.702 x) (Hendrycks and Gimpel, 2016)."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """The square of max(x, 0) (So et al., 2021)."""
    positive = F.relu(x)
    return positive * positive


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {  # the names of recipe.ffn.ACTIVATIONS
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
}


class FFN(nn.Module):
    """down(act(up x)), or with a gate down(act(gate x) * up x)."""

    def __init__(self, config: ModelConfig, *, gated: bool) -> None:
        super().__init__()
        ffn, bias = config.ffn_config, not config.no_bias
        assert ffn.ffn_hidden_size is not None, "the recipe was not filled"
        name, arguments = ffn.activation
        self.act = partial(ACTIVATIONS[name], **arguments) if arguments else ACTIVATIONS[name]
        self.up_proj = nn.Linear(config.d_model, ffn.ffn_hidden_size, bias=bias)
        self.gate_proj = (
            nn.Linear(config.d_model, ffn.ffn_hidden_size, bias=bias) if gated else None
        )
        self.down_proj = nn.Linear(ffn.ffn_hidden_size, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (B, T, D) token by token."""
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


FFNS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "mptmlp": partial(FFN, gated=False),
    "mptglu": partial(FFN, gated=True),
}
