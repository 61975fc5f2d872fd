"""The linear layer of attention and feed-forward layers, and the embedding; each may be adapted.

Where a frozen weight comes from is `base` and `dense` alone, for adapters as for all others: it may
be kept in 4 bits (`models/quantized.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmfoundry.models.low_rank import LowRank, adapted, embedded
from llmfoundry.ops import nf4


class Linear(nn.Linear):
    """nn.Linear that may be adapted, its frozen weight quantised.

    Attributes:
        lora: what is added to it; None: nothing.
        packing: how its frozen weight lies in bytes; None: it is not quantised.
    """

    lora: LowRank | None = None
    packing: nf4.Nf4Layout | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (..., in_features)."""
        y = self.base(x)
        if self.lora is None or not self.lora.on:
            return y
        return adapted(self, x, y, self.lora)

    def base(self, x: Tensor) -> Tensor:
        """What it gives without an adapter."""
        if self.packing is None:
            return F.linear(x, self.weight, self.bias)
        y = nf4.linear(x, self.weight, self.out_features, double=self.packing.double)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense(self) -> Tensor:
        """Its weight, (out_features, in_features); a quantised one in fp32, without gradient."""
        if self.packing is None:
            return self.weight
        data, shape = whole(self.weight), (self.out_features, self.in_features)
        return nf4.dequantize(data, shape, torch.float32, double=self.packing.double)


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Embedding(nn.Embedding):
    """nn.Embedding that may be adapted."""

    lora: LowRank | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """(..., D) of tokens (...)."""
        y = super().forward(tokens)
        if self.lora is None or not self.lora.on:
            return y
        return embedded(self, tokens, y, self.lora)
