"""Feed-forward layers: MPT's MLP and the gated linear unit (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from llmfoundry.models.linear import Linear
from llmfoundry.ops.activations import from_text, to_text
from llmfoundry.recipe.architecture.model import ModelConfig


class FFN(nn.Module):
    """down(act(up x)), or with a gate down(act(gate x) * up x).

    Args:
        config: filled.
        gated: whether there is a gate.
        hidden: inner width; None: ffn_hidden_size.
    """

    def __init__(self, config: ModelConfig, *, gated: bool, hidden: int | None = None) -> None:
        super().__init__()
        ffn, d, bias = config.ffn_config, config.d_model, not config.no_bias
        hidden = hidden or ffn.ffn_hidden_size
        assert hidden is not None, "the recipe was not filled"
        self.act = from_text(to_text(*ffn.activation)).function
        self.up_proj = Linear(d, hidden, bias=bias)
        self.gate_proj = Linear(d, hidden, bias=bias) if gated else None
        self.down_proj = Linear(hidden, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (B, T, D) token by token."""
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


FFNS: dict[str, Callable[[ModelConfig], FFN]] = {  # dmoe is models/moe.py's
    "mptmlp": partial(FFN, gated=False),
    "mptglu": partial(FFN, gated=True),
}
