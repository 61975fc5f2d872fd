"""The linear layer of attention and feed-forward layers."""

from __future__ import annotations

from torch import Tensor, nn

from llmfoundry.ops.matmul import linear


class Linear(nn.Linear):
    """nn.Linear, its products by `ops.matmul`."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (..., in_features)."""
        return linear(x, self.weight, self.bias)
