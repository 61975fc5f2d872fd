"""The decoder: embeddings, blocks, final norm, and a head kept apart.

`Root` is what the trainer, the evaluator and the generator call: all that uses weights happens
inside its forward pass, which is the one place where DDP and FSDP need to look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.models import init
from llmfoundry.models.attention import Attention, Context, KVCache
from llmfoundry.models.ffn import FFNS
from llmfoundry.models.norm import NORMS
from llmfoundry.models.positions import rotary_table
from llmfoundry.ops.attention import Rules, alibi_slopes, plan
from llmfoundry.ops.cross_entropy import linear_cross_entropy
from llmfoundry.ops.layout import Layout
from llmfoundry.recipe.model import ModelConfig

R = TypeVar("R")


class Block(nn.Module):
    """x + attention(norm x), then x + ffn(norm x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        norm, bias = NORMS[config.norm_type], not config.no_bias
        self.norm_1 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        self.attn = Attention(config, layer)
        self.norm_2 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        self.ffn = FFNS[config.ffn_config.ffn_type](config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Update the residual stream x (B, T, D)."""
        x = x + self.attn(self.norm_1(x), context)
        return x + self.ffn(self.norm_2(x))


class Decoder(nn.Module):
    """A decoder-only transformer; MPT, GPT-2, Llama and Starcoder2 shapes are settings of it.

    Args:
        config: filled (`ModelConfig.fill`), with vocab_size and max_seq_len.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size and config.max_seq_len and config.head_dim, "fill the recipe"
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.learned_pos_emb:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        norm = NORMS[config.norm_type]
        self.norm_f = norm(config.d_model, eps=config.norm_eps, bias=not config.no_bias)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the output head, or the embedding that it is tied to."""
        return self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(
        self, tokens: Tensor, layout: Layout | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T), the final norm applied.

        Args:
            tokens: (B, T) int64.
            layout: documents and positions; None: every row is one document.
            cache: earlier tokens of the rows; the new ones are added to it.
        """
        past = cache.length if cache is not None else 0
        if layout is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
        else:
            positions = layout.positions
        x = self.wte(tokens)
        if self.config.learned_pos_emb:
            x = x + self.wpe(positions)
        if x.dtype == torch.bfloat16 and torch.is_autocast_enabled(x.device.type):
            x = x.float()  # FSDP gathers bf16 weights; the residual stream stays fp32 all the same
        context = self._context(tokens, layout, positions, cache)
        for block in self.blocks:
            x = block(x, context)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm_f(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        return F.linear(hidden, self.head_weight)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropy of hidden states (..., D) over labels (...), in nats."""
        return linear_cross_entropy(hidden, self.head_weight, labels)

    def init_weights(self, seed: int) -> None:
        """Fill all weights; the same numbers on every layout of processes."""
        init.init_weights(self, self.config, seed)

    def _context(
        self, tokens: Tensor, layout: Layout | None, positions: Tensor, cache: KVCache | None
    ) -> Context:
        attn, head_dim = self.config.attn_config, self.config.head_dim
        assert head_dim is not None
        slopes = rotary = None
        if attn.alibi:
            assert attn.alibi_bias_max is not None
            slopes = alibi_slopes(self.config.n_heads, attn.alibi_bias_max, tokens.device)
        if attn.rope:
            assert attn.rope_theta is not None
            rotary = rotary_table(positions, head_dim, attn.rope_theta)
        attention = plan(
            layout,
            Rules(attn.softmax_scale or head_dim**-0.5, slopes=slopes),
            queries=tokens.shape[1],
            past=cache.length if cache is not None else 0,
            device=tokens.device,
            impl=attn.attn_impl,
        )
        return Context(attention, rotary, cache)


class Root(nn.Module):
    """The module that DDP and FSDP wrap; it runs the decoder and then what the caller wants."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        layout: Layout | None,
        finish: Callable[[Decoder, Tensor], R],
        *,
        cache: KVCache | None = None,
    ) -> R:
        """`finish(model, hidden)`, with hidden (B, T, D) of tokens (B, T).

        Args:
            tokens: (B, T) int64.
            layout: documents and positions; None: every row is one document.
            finish: what to do with the hidden states, where weights are whole.
            cache: earlier tokens of the rows, in generation.
        """
        return finish(self.model, self.model(tokens, layout, cache))
