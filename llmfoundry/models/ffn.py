"""Feed-forward layers: MPT's MLP and the gated linear unit (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.recipe.model import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class FFN(nn.Module):
    """down(act(up x)), or with a gate down(act(gate x) * up x)."""

    def __init__(self, config: ModelConfig, *, gated: bool) -> None:
        super().__init__()
        ffn, bias = config.ffn_config, not config.no_bias
        assert ffn.ffn_hidden_size is not None, "the recipe was not filled"
        self.act = ACTIVATIONS[ffn.activation[0]]
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
