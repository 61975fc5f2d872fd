"""The mixtures of experts that `make bench-moe` trains whole, as sizes and as a recipe's section.

DBRX's kind of model, so that transformers has the very same one: grouped queries, rotary positions,
clipped projections, layer norms without biases, gated experts, an untied head.
"""

from __future__ import annotations

from dataclasses import dataclass

EXPERTS, TOP_K = 16, 4
CLIP, THETA, INIT_STD = 8.0, 5e5, 0.02
BALANCE = 0.01  # the load-balancing loss where all experts are equally loaded


@dataclass(frozen=True)
class Size:
    """What differs between the two.

    Attributes:
        d: width of a token.
        f: inner width of an expert.
        layers: blocks.
        heads: query heads.
        kv_heads: key-value heads.
    """

    d: int
    f: int
    layers: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"d {self.d}, {self.layers} layers, f {self.f}, {EXPERTS} experts choose {TOP_K}"

    @property
    def recipe(self) -> str:
        """The `model` section."""
        return f"""
model:
  d_model: {self.d}
  n_layers: {self.layers}
  n_heads: {self.heads}
  no_bias: true
  tie_word_embeddings: false
  attn_config:
    attn_type: grouped_query_attention
    kv_n_heads: {self.kv_heads}
    clip_qkv: {CLIP}
    rope: true
    rope_theta: {THETA}
  ffn_config:
    ffn_type: dmoe
    mlp_type: glu
    ffn_act_fn: silu
    ffn_hidden_size: {self.f}
    moe_num_experts: {EXPERTS}
    moe_top_k: {TOP_K}
    moe_normalize_expert_weights: 1
    moe_loss_weight: {BALANCE}
  init_config: {{name: baseline_, init_std: {INIT_STD}}}
"""


SIZES = {
    "large": Size(d=512, f=1024, layers=4, heads=8, kv_heads=4),
    "small": Size(
        d=256, f=512, layers=6, heads=4, kv_heads=2
    ),  # where a loop over experts is cheap
}
