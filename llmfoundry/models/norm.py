"""Norms: computed in fp32 (or wider), or in the precision of the matrix products.

The latter read and write half as much under autocast: the products that follow would round their
input to its dtype anyhow.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.ops.autocast import to_autocast_dtype


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al., 2016).

    Args:
        width: of the last axis.
        eps: added to the variance.
        bias: whether there is one.
        low_precision: compute in autocast's dtype where it is on, else in x's, and return that;
            otherwise in fp32 or wider, and x's dtype comes back.
    """

    def __init__(self, width: int, *, eps: float, bias: bool, low_precision: bool = False) -> None:
        super().__init__()
        self.eps, self.low_precision = eps, low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        if self.low_precision:
            low = to_autocast_dtype(x)
            with torch.autocast(x.device.type, enabled=False):  # which would make it fp32 on CUDA
                return self._normalise(low)
        return self._normalise(_wide(x)).to(x.dtype)

    def _normalise(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    Args:
        width: of the last axis.
        eps: added to the mean of squares.
        bias: there is none by definition; taken so that all norms are built alike.
        low_precision: as LayerNorm's.
    """

    def __init__(self, width: int, *, eps: float, bias: bool, low_precision: bool = False) -> None:
        super().__init__()
        self.eps, self.low_precision = eps, low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        if self.low_precision:
            low = to_autocast_dtype(x)
            with torch.autocast(x.device.type, enabled=False):
                return F.rms_norm(low, self.weight.shape, self.weight.to(low.dtype), self.eps)
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


low_precision_layernorm = partial(LayerNorm, low_precision=True)
low_precision_rmsnorm = partial(RMSNorm, low_precision=True)
