"""Linear layers and embeddings with optional adapters, norms, and feed-forward layers.

Only `Linear.base` and `Linear.dense` know how a frozen weight is stored: it may be quantized to 4
bits (`models/quantized.py`). Norms compute in fp32 or wider, or in autocast's dtype. The second
halves their memory traffic, and the matmul that follows rounds its input to that dtype anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.models.low_rank import LowRank, adapted, embedded
from llmfoundry.ops import nf4
from llmfoundry.ops.activations import from_text, to_text
from llmfoundry.ops.devices import has_autocast, to_autocast_dtype
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.attention import NORMS
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.model import ResolvedModelConfig


class Linear(nn.Linear):
    """nn.Linear with an optional adapter and an optionally quantized weight.

    Attributes:
        lora: the adapter; None: none.
        packing: byte layout of the quantized weight; None: not quantized.
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
        """Return the output without the adapter."""
        if self.packing is None:
            return F.linear(x, self.weight, self.bias)
        y = nf4.nf4_linear(x, self.weight, self.out_features, double=self.packing.double)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense(self) -> Tensor:
        """Return the weight (out_features, in_features).

        A quantized weight is dequantized to fp32, without a gradient.
        """
        if self.packing is None:
            return self.weight
        data, shape = full_tensor(self.weight), (self.out_features, self.in_features)
        return nf4.dequantize(data, shape, torch.float32, double=self.packing.double)


class Embedding(nn.Embedding):
    """nn.Embedding with an optional adapter."""

    lora: LowRank | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (..., D) of tokens (...)."""
        y = super().forward(tokens)
        if self.lora is None or not self.lora.on:
            return y
        return embedded(self, tokens, y, self.lora)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al., 2016).

    Args:
        width: size of the last axis.
        eps: added to the variance.
        bias: whether the norm has a bias.
        low_precision: compute in autocast's dtype (x's if autocast is off) and return that dtype.
            Otherwise compute in fp32 or wider and return x's dtype.
    """

    def __init__(self, width: int, *, eps: float, bias: bool, low_precision: bool = False) -> None:
        super().__init__()
        self.eps, self.low_precision = eps, low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width)."""
        if self.low_precision:
            low = to_autocast_dtype(x)
            # on CUDA, autocast would compute layer_norm in fp32
            with torch.autocast(x.device.type, enabled=False):
                return self._normalize(low)
        return self._normalize(_wide(x)).to(x.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    Args:
        width: size of the last axis.
        eps: added to the mean of squares.
        bias: ignored, as RMSNorm has no bias; accepted so that all norms have one signature.
        low_precision: as in LayerNorm.
    """

    def __init__(self, width: int, *, eps: float, bias: bool, low_precision: bool = False) -> None:
        super().__init__()
        self.eps, self.low_precision = eps, low_precision
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width)."""
        if self.low_precision:
            low = to_autocast_dtype(x)
            with torch.autocast(x.device.type, enabled=False):
                return F.rms_norm(low, self.weight.shape, self.weight.to(low.dtype), self.eps)
        wide = _wide(x)
        weight = self.weight.to(wide.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


low_precision_layernorm = partial(LayerNorm, low_precision=True)
low_precision_rmsnorm = partial(RMSNorm, low_precision=True)
_NORMS: dict[str, Callable[..., nn.Module]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "low_precision_layernorm": low_precision_layernorm,
    "low_precision_rmsnorm": low_precision_rmsnorm,
}
"""The code of the entries of NORMS that come with the project."""


def norm_maker(name: str) -> Callable[..., nn.Module]:
    """Return what makes a norm of `model.norm_type`, called with (width, *, eps, bias)."""
    return load_code(NORMS[name].make, _NORMS.get(name))


class FFN(nn.Module):
    """Feed-forward layer: down(act(up x)), or as a GLU down(act(gate x) * up x).

    `ops.activations.clamped` has the GLU with glu_limit.

    Args:
        config: resolved model configuration.
        gated: build a GLU.
        hidden: inner width; None: ffn_hidden_size.
    """

    def __init__(
        self, config: ResolvedModelConfig, *, gated: bool, hidden: int | None = None
    ) -> None:
        super().__init__()
        ffn, d, bias = config.ffn_config, config.d_model, not config.no_bias
        hidden = hidden or ffn.ffn_hidden_size
        self.act = from_text(to_text(*ffn.glu_activation))
        self.up_proj = Linear(d, hidden, bias=bias)
        self.gate_proj = Linear(d, hidden, bias=bias) if gated else None
        self.down_proj = Linear(hidden, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (B, T, D) token by token."""
        if self.gate_proj is None:
            return self.down_proj(self.act.function(self.up_proj(x)))
        gate_x, up_x = x, x
        if all(getattr(layer, "lora", None) is None for layer in (self.gate_proj, self.up_proj)):
            gate_x, up_x = _cast_for_two(x)
        gate = self.act.function(self.gate_proj(gate_x))
        return self.down_proj(gate * self.act.up(self.up_proj(up_x)))


def _cast_for_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x twice in autocast's dtype, for two layers that would each cast and keep a copy.

    The gradients of both are added in x's dtype, so that every bit is as with two casts.
    """
    kind = x.device.type
    if not has_autocast(kind) or x.dtype == torch.get_autocast_dtype(kind):
        return x, x
    return _CastForTwo.apply(x, torch.get_autocast_dtype(kind))


class _CastForTwo(torch.autograd.Function):
    """A cast whose result is used twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.dtype = x.dtype
        low = x.to(dtype)
        return low, low.view_as(low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        first, second = grads
        return first.to(ctx.dtype) + second, None


FFNS: dict[str, Callable[[ResolvedModelConfig], FFN]] = {  # `dmoe` is in models/moe.py
    "mptmlp": partial(FFN, gated=False),
    "mptglu": partial(FFN, gated=True),
}
