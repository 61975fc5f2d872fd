"""Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1).

Entry point: `LatentAttention`, which takes the place of `attention.Attention` in a block. Keys and
values of all heads are computed from one latent vector per token. One rotated key per token, which
all heads share, carries the positions.

Training and generation compute the same function in two forms. In training, keys and values are
expanded, and attention is that of many heads. With a cache, only the latent vector and the rotated
key are stored, and the expansion is absorbed into queries and outputs: attention is then that of
many query heads over one key head, whose key is the cached row and whose value is a part of it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from llmfoundry.models.attention import Context, KeysValues, rotate
from llmfoundry.models.layers import Linear, norm_maker
from llmfoundry.ops.attention.base import AttentionPlan, working_dtype
from llmfoundry.ops.attention.select import attend
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import ResolvedModelConfig


class LatentAttention(nn.Module):
    """Multi-head latent attention.

    Shapes: H query heads of width n + r, of which r are rotated; value heads of width v; latent
    vectors of width c.

    Args:
        config: resolved model configuration.
        index: number of the block.
        layer: settings of this block's attention.

    Attributes:
        gather: identity; with tensor parallelism it gathers the latent vectors of all ranks.
    """

    def __init__(self, config: ResolvedModelConfig, index: int, layer: LayerConfig) -> None:
        super().__init__()
        assert layer.kv_from == index, "checked before"
        attn, heads, d = config.attn_config, config.n_heads, config.d_model
        self.index, self.rotary = index, layer.rotary
        self.nope_dim, self.rope_dim = attn.qk_nope_head_dim, attn.qk_rope_head_dim
        self.value_dim, self.latent_dim = attn.v_head_dim, attn.kv_lora_rank
        norm = partial(norm_maker(attn.norm_type), eps=attn.norm_eps, bias=not config.no_bias)
        if attn.q_lora_rank is None:
            self.Wq = Linear(d, heads * config.head_dim, bias=False)
        else:
            self.Wq_a = Linear(d, attn.q_lora_rank, bias=False)
            self.q_a_ln = norm(attn.q_lora_rank)
            self.Wq_b = Linear(attn.q_lora_rank, heads * config.head_dim, bias=False)
        self.Wkv_a = Linear(d, self.latent_dim + self.rope_dim, bias=False)
        self.kv_a_ln = norm(self.latent_dim)
        self.gather = nn.Identity()
        self.Wkv_b = Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), bias=False)
        self.out_proj = Linear(heads * self.value_dim, d, bias=not config.no_bias)

    def forward(
        self, x: Tensor, context: Context, kv: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues | None]:
        """Apply attention to the normalized residual stream.

        Args:
            x: (B, T, D).
            context: of this forward pass.
            kv: None; blocks do not share keys and values.

        Returns:
            The attention output (B, T, D), and None.
        """
        assert kv is None
        # tensor parallelism pads T to a multiple of the ranks (`TensorRanks.padded`)
        q, padding = self._queries(x, context)  # (B, T, H, n + r)
        latents, rotated_key = self._latents(x, context)  # (B, T, c) and (B, T, 1, r)
        if context.cache is None:
            attended = self._attend_expanded(q, latents, rotated_key, context)
        else:
            attended = self._attend_absorbed(q, latents, rotated_key, context)
        attended = attended.flatten(-2)  # (B, T, H * v)
        if padding:
            attended = F.pad(attended, (0, 0, 0, padding))
        return self.out_proj(attended), None

    def _queries(self, x: Tensor, context: Context) -> tuple[Tensor, int]:
        """Return rotated queries (B, T, H, n + r), and the tokens of padding that were removed."""
        projected = self.Wq(x) if hasattr(self, "Wq") else self.Wq_b(self.q_a_ln(self.Wq_a(x)))
        padding = projected.shape[1] - context.tokens
        if padding:
            projected = projected[:, : context.tokens]
        q = projected.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        if self.rotary:
            assert context.rotary is not None
            plain, turning = q.split((self.nope_dim, self.rope_dim), dim=-1)
            q = torch.cat([plain, rotate(turning, context.rotary)], dim=-1)
        if context.temperature is not None:
            q = (q * context.temperature).to(q.dtype)
        return q, padding

    def _latents(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return normalized latent vectors (B, T, c) and the rotated key (B, T, 1, r).

        With tensor parallelism the latent vectors are a replicated DTensor, whose gradient the
        projection to this rank's heads reduces.
        """
        widths = (self.latent_dim, self.rope_dim)
        latents, key = self.Wkv_a(x).split(widths, dim=-1)
        both = self.gather(torch.cat([self.kv_a_ln(latents), key], dim=-1))
        latents, key = both[:, : context.tokens].split(widths, dim=-1)
        if isinstance(key, DTensor):
            key = key.to_local(grad_placements=[Partial()])
        key = key.unsqueeze(2)
        if self.rotary:
            assert context.rotary is not None
            key = rotate(key, context.rotary)
        return latents, key

    def _attend_expanded(
        self, q: Tensor, latents: Tensor, rotated_key: Tensor, context: Context
    ) -> Tensor:
        """Return attention (B, T, H, v) over the keys and values of all heads."""
        expanded = self.Wkv_b(latents).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        plain_key, v = expanded.split((self.nope_dim, self.value_dim), dim=-1)
        rotated_key = rotated_key.to(plain_key.dtype).expand(-1, -1, plain_key.shape[2], -1)
        k = torch.cat([plain_key, rotated_key], dim=-1)  # (B, T, H, n + r)
        assert isinstance(context.plan, AttentionPlan), "slots have a cache"
        if context.exchange is None:
            return attend(q, k, v, context.plan, training=self.training)
        q, (k, v) = context.exchange.exchange_qkv(q, (k, v))
        attended = attend(q, k, v, context.plan, training=self.training)
        return context.exchange.exchange_output(attended)

    def _attend_absorbed(
        self, q: Tensor, latents: Tensor, rotated_key: Tensor, context: Context
    ) -> Tensor:
        """Return attention (B, T, H, v) over the cached latent vectors, without expanding them.

        q_h . (K_h c) = (K_h^T q_h) . c for the rows K_h of Wkv_b that give a head's key, and
        sum_t w_t (V_h c_t) = V_h (sum_t w_t c_t) for the rows V_h that give its value.
        """
        assert context.cache is not None and context.exchange is None
        if isinstance(latents, DTensor):
            latents = latents.to_local()
        dtype = working_dtype(latents)
        to_key, to_value = self._expansion(latents).split((self.nope_dim, self.value_dim), dim=1)
        plain, turned = q.split((self.nope_dim, self.rope_dim), dim=-1)
        plain = torch.einsum("bthn,hnc->bthc", plain.to(dtype), to_key.to(dtype))
        q = torch.cat([plain, turned.to(plain.dtype)], dim=-1)  # (B, T, H, c + r)

        row = torch.cat([latents[:, :, None].to(dtype), rotated_key.to(dtype)], dim=-1)
        row, _ = context.cache.append(self.index, row, row[..., :0])  # (B, S, 1, c + r)
        if isinstance(context.plan, AttentionPlan):
            attended = attend(q, row.to(dtype), row.to(dtype), context.plan)
        else:
            attended = context.plan.attend(q, row, row, rotary=False, sinks=None)
        attended = attended[..., : self.latent_dim]  # the value is a part of the row
        return torch.einsum("bthc,hvc->bthv", attended, to_value.to(attended.dtype))

    def _expansion(self, like: Tensor) -> Tensor:
        """Return the weight of Wkv_b by head, (H, n + v, c), with its adapter."""
        layer = self.Wkv_b
        if layer.packing is None and (layer.lora is None or not layer.lora.on):
            weight = layer.weight
            weight = weight.to_local() if isinstance(weight, DTensor) else weight
        else:  # quantized or adapted: column c is the output of unit vector c
            weight = layer(torch.eye(self.latent_dim, dtype=like.dtype, device=like.device)).mT
        return weight.unflatten(0, (-1, self.nope_dim + self.value_dim))
