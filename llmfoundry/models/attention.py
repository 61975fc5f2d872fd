"""The attention layer: projections, guards and positions around `ops.attention.attend`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmfoundry.models.norm import NORMS
from llmfoundry.models.positions import rotate
from llmfoundry.ops.attention import Plan, attend
from llmfoundry.recipe.model import ModelConfig


class KVCache:
    """Keys and values of the tokens that a row has had, for every layer.

    Attributes:
        length: tokens held; new tokens take positions length, length + 1, …
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        kv_heads, head_dim = config.attn_config.kv_n_heads, config.head_dim
        assert kv_heads is not None and head_dim is not None, "the recipe was not filled"
        shape = (config.n_layers, batch, max_len, kv_heads, head_dim)
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, T, KV, hd) of one layer; all of its keys and values so far."""
        end = self.length + k.shape[1]
        assert end <= self._keys.shape[2], "the key-value cache is full"
        self._keys[layer, :, self.length : end] = k
        self._values[layer, :, self.length : end] = v
        return self._keys[layer, :, :end], self._values[layer, :, :end]


@dataclass(frozen=True)
class Context:
    """What one forward pass hands to every block."""

    plan: Plan
    rotary: tuple[Tensor, Tensor] | None
    cache: KVCache | None


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query attention.

    The order is MPT's: project, clip, normalise queries and keys, rotate, attend, project.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        attn = config.attn_config
        assert attn.kv_n_heads is not None and config.head_dim is not None
        self.layer, self.head_dim = layer, config.head_dim
        self.clip = attn.clip_qkv
        kv_width = attn.kv_n_heads * config.head_dim
        self.widths = (config.n_heads * config.head_dim, kv_width, kv_width)
        bias = not config.no_bias
        self.Wqkv = nn.Linear(config.d_model, sum(self.widths), bias=bias)
        norm = NORMS[config.norm_type]
        if attn.qk_ln:
            self.q_ln = norm(self.widths[0], eps=config.norm_eps, bias=bias)
            self.k_ln = norm(self.widths[1], eps=config.norm_eps, bias=bias)
        self.qk_ln = attn.qk_ln
        self.out_proj = nn.Linear(self.widths[0], config.d_model, bias=bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix tokens of x (B, T, D)."""
        qkv = self.Wqkv(x)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.qk_ln:
            q, k = self.q_ln(q), self.k_ln(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if context.rotary is not None:
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
            k, v = k.to(q.dtype), v.to(q.dtype)
        return self.out_proj(attend(q, k, v, context.plan, training=self.training).flatten(-2))
