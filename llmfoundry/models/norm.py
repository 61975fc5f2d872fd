"""Norms, always computed in fp32 (or wider) and returned in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al., 2016)."""

    def __init__(self, width: int, *, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, weight.shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, *, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = None  # by definition; `bias` is taken so that all norms are built alike

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
