"""The decoder: embeddings, blocks, final norm, and a head kept apart.

`Root` is what the trainer, the evaluator and the generator call: all that uses weights happens
inside its forward pass, which is the one place where DDP and FSDP need to look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.models import init
from llmfoundry.models.attention import (
    Attention,
    Context,
    HeadExchange,
    KeysValues,
    KVCache,
    SlotAttention,
    Table,
    attention_specs,
    dynamic_lengths,
    query_temperature,
    rotary_frequencies,
    rotary_table,
)
from llmfoundry.models.kv_cache import PlacedCache, SlotCache
from llmfoundry.models.layers import FFNS, Embedding, Linear, norm_maker
from llmfoundry.models.low_rank import head_operands
from llmfoundry.models.moe import MoE
from llmfoundry.models.router import Routed, Routing, over_layers
from llmfoundry.models.tensor_parallel import TensorRanks
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec
from llmfoundry.ops.attention.select import AttentionKernels
from llmfoundry.ops.loss import VocabularyShard, cap, linear_cross_entropy, linear_log_probs
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import ModelConfig

R = TypeVar("R")
Kind = tuple[int, tuple[int, float] | None]  # window and sharpening: what contexts differ by
Cache = KVCache | PlacedCache
"""Rows that grow together, or a row of new tokens that go to slots."""


class Block(nn.Module):
    """x + dropout(attention(norm x)), then x + dropout(ffn(norm x)).

    Keys and values that other blocks take come in and go out as arguments and results, not through
    something that all blocks write to, and so do the router's losses: checkpointing, compilation
    and FSDP then see them.
    """

    def __init__(
        self, config: ModelConfig, index: int, layer: LayerConfig, *, is_reused: bool
    ) -> None:
        super().__init__()
        norm, bias = norm_maker(config.norm_type), not config.no_bias
        self.pdrop = config.resid_pdrop
        self.norm_1 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        self.attn = Attention(config, index, layer, is_reused=is_reused)
        self.norm_2 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        kind = config.ffn_config.ffn_type
        self.ffn = MoE(config) if kind == "dmoe" else FFNS[kind](config)

    def forward(
        self,
        x: Tensor,
        context: Context,
        kv: KeysValues | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues | None, Routed | None]:
        """Update the residual stream x (B, T, D).

        Args:
            x: the residual stream.
            context: of this forward pass.
            kv: keys and values of the block that this one takes them from; else None.
            real: (N,) flat places b * T + t that are no padding, which experts leave out; None: all
                are.

        Returns:
            The residual stream, this block's keys and values where later ones take them, and what
            its router did where it has one that trains.
        """
        mixed, made = self.attn(self.norm_1(x), context, kv)
        x = x + _dropped(mixed, self.pdrop, self.training)
        if isinstance(self.ffn, MoE):
            added, routed = self.ffn(self.norm_2(x), real)
        else:
            added, routed = self.ffn(self.norm_2(x)), None
        return x + _dropped(added, self.pdrop, self.training), made, routed


def _kind(layer: LayerConfig) -> Kind:
    return layer.window, layer.temperature


def _dropped(x: Tensor, share: float, training: bool) -> Tensor:
    return F.dropout(x, share) if share and training else x


class Decoder(nn.Module):
    """A decoder-only transformer; MPT, GPT-2, Llama and DBRX shapes are settings of it.

    Args:
        config: filled (`ModelConfig.fill`), with vocab_size and max_seq_len.

    Attributes:
        tensor_ranks: the processes that share its matrices; None: they are whole.
        loss_chunk: tokens whose logits the loss holds at a time; None: as many as suit the device.
        exchange: with the processes that share its rows while it trains; None: rows are whole.
    """

    exchange: HeadExchange | None = None
    tensor_ranks: TensorRanks | None = None
    loss_chunk: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size and config.max_seq_len and config.head_dim, "fill the recipe"
        self.config = config
        self.layers = config.layers()
        self.kernels = AttentionKernels(config.attn_config.attn_impl, config.head_dim)
        self.wte = Embedding(config.vocab_size, config.d_model)
        if config.learned_pos_emb:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        reused = {layer.kv_from for i, layer in enumerate(self.layers) if layer.kv_from != i}
        self.blocks = nn.ModuleList(
            Block(config, i, layer, is_reused=i in reused) for i, layer in enumerate(self.layers)
        )
        norm = norm_maker(config.norm_type)
        self.norm_f = norm(config.d_model, eps=config.norm_eps, bias=not config.no_bias)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)

    def vocabulary(self) -> set[str]:
        """Names of what has a row for each token."""
        tied = self.config.tie_word_embeddings
        return {"wte.weight"} if tied else {"wte.weight", "lm_head.weight"}

    @property
    def embedding_weight(self) -> Tensor:
        """(V, D): of tokens, without its adapter."""
        return self.wte.weight

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the output head, or the embedding that it is tied to; without its adapter."""
        return self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def _head_operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Hidden states (..., D) and (V, D), or wider ones where the head is adapted.

        And which rows these are, where processes share the head.
        """
        if self.tensor_ranks is not None:
            return hidden, *self.tensor_ranks.local_vocabulary(self.head_weight)
        # transformers puts a plain nn.Linear in its place where it adds rows
        lora = None if self.config.tie_word_embeddings else getattr(self.lm_head, "lora", None)
        if lora is None or not lora.on:
            return hidden, self.head_weight, None
        return *head_operands(self.lm_head, hidden, lora), None

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        scale = self.config.logit_scale
        if isinstance(scale, str):
            assert scale == "inv_sqrt_d_model"
            return self.config.d_model**-0.5
        return 1.0 if scale is None else scale

    def forward(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T), the final norm applied.

        Args:
            tokens: (B, T) int64; where rows are shared, those at hand.
            layout: documents or trees, and positions; None: every row is one document.
            cache: earlier tokens of the rows; the new ones are added to it. Of slots: `tokens` is
                what its `begin` gave.
        """
        return self.run(tokens, layout, cache)[0]

    def run(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Routing | None]:
        """As `forward`, and what the routers did; None without experts, or in evaluation."""
        rows = None if isinstance(cache, PlacedCache) else cache
        past, width = 0 if rows is None else rows.length, tokens.shape[1]
        if isinstance(cache, PlacedCache):
            positions = cache.positions
        elif layout is None:
            positions = torch.arange(past, past + width, device=tokens.device)[None]
        else:
            positions = layout.positions
        x = self._embed(tokens, positions)
        contexts = self._contexts(layout, positions, past, cache, x.dtype)
        shared: dict[int, KeysValues] = {}
        routed: list[Routed] = []
        ranks, real = self.tensor_ranks, self._real_places(layout, len(tokens), width)
        real = None if real is None else real.to(tokens.device, non_blocking=True)
        for i, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            kept = shared.get(layer.kv_from)
            x, kv, how = block(x, contexts[_kind(layer)], kept, real)
            if kv is not None:
                shared[i] = kv
            if how is not None:
                routed.append(how)
        if rows is not None:
            rows.length += width
        x = self.norm_f(x)
        x = x if ranks is None else ranks.all_gather(x, width)
        return x, over_layers(routed, self.config.ffn_config) if routed else None

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), scaled and capped.

        In autocast's dtype where it is on, else in that of the hidden states.
        """
        hidden, weight, shard = self._head_operands(hidden)
        if not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
        logits = F.linear(hidden, weight)
        if shard is not None:
            assert self.tensor_ranks is not None
            logits = self.tensor_ranks.all_logits(logits, shard)
        return cap(logits, self.logit_scale, self.config.final_logit_softcapping)

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy of hidden states (..., D) over labels (...), in nats.

        `weights` (...) are what each label counts; None: 1.
        """
        hidden, weight, shard = self._head_operands(hidden)
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            scale=self.logit_scale,
            softcap=self.config.final_logit_softcapping,
            weights=weights,
            chunk=self.loss_chunk,
            shard=shard,
        )

    def log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """(...) fp32: log-probability of each of labels (...) by hidden states (..., D); 0: none.

        With gradients it takes a product over the head more than `loss`, and no more memory.
        """
        hidden, weight, shard = self._head_operands(hidden)
        return linear_log_probs(
            hidden,
            weight,
            labels,
            scale=self.logit_scale,
            softcap=self.config.final_logit_softcapping,
            chunk=self.loss_chunk,
            shard=shard,
        )

    def new_slots(
        self, *, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> SlotCache:
        """Empty slots for keys and values of so many sequences, of at most `length` tokens each."""
        ranks = 1 if self.tensor_ranks is None else self.tensor_ranks.n
        return SlotCache(
            self.config, slots=slots, length=length, device=device, dtype=dtype, share=ranks
        )

    def init_weights(self, seed: int) -> None:
        """Fill all weights; the same numbers on every layout of processes."""
        init.init_weights(self, self.config, seed)

    def _real_places(self, layout: PackedLayout | None, rows: int, width: int) -> Tensor | None:
        """(N,) on the host: the flat places that experts see; None: all of this process's."""
        if self.config.ffn_config.ffn_type != "dmoe":
            return None
        real = None if layout is None else layout.real_places()
        if self.tensor_ranks is None or (real is None and not self.training):
            return real  # in generation what fills a row up is a token like any other
        return self.tensor_ranks.local_places(rows, width, real)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings (B, T, D) of tokens (B, T) at positions (B or 1, T).

        Where processes share matrices, of this one's tokens alone.
        """
        ranks = self.tensor_ranks
        x = self.wte(tokens) if ranks is None else ranks.embed(self.wte.weight, tokens)
        if self.config.learned_pos_emb:
            x = x + self.wpe(positions if ranks is None else ranks.local_tokens(positions))
        if x.dtype == torch.bfloat16 and torch.is_autocast_enabled(x.device.type):
            x = x.float()  # FSDP gathers bf16 weights; the residual stream stays fp32 all the same
        share = self.config.embedding_fraction
        if share < 1:
            x = share * x + (1 - share) * x.detach()
        return _dropped(x, self.config.emb_pdrop, self.training)

    def _contexts(
        self,
        layout: PackedLayout | None,
        positions: Tensor,
        past: int,
        cache: Cache | None,
        dtype: torch.dtype,
    ) -> dict[Kind, Context]:
        """What each kind of block gets; tables are made once, plans once for each window."""
        device, exchange = positions.device, self.exchange if self.training else None
        assert (exchange is None) == (layout is None or layout.ranges is None), "who has what"
        width = positions.shape[1]
        rotary, cached_rotary = self._rotary(layout, positions, past, cache)
        specs = self._specs(device)
        ranges = None
        if exchange is not None:
            specs = {window: exchange.own(spec) for window, spec in specs.items()}
            ranges = layout.ranges if layout is not None and exchange.splits_queries else None
        slots = cache if isinstance(cache, PlacedCache) else None
        plans: dict[int, AttentionPlan | SlotAttention] = {
            window: slots.plan(self.kernels, spec, dtype)
            if slots is not None
            else self.kernels.plan(
                layout,
                spec,
                queries=width if layout is None else layout.width,
                past=past,
                device=device,
                dtype=dtype,
                ranges=ranges,
            )
            for window, spec in specs.items()
        }
        late = cached_rotary is not None or (slots is not None and slots.rotates_late)
        contexts = {}
        for kind in {_kind(layer) for layer in self.layers}:
            window, tuning = kind
            factors = None if tuning is None else query_temperature(positions, *tuning)
            contexts[kind] = Context(
                plans[window], rotary, cached_rotary, factors, cache, width, exchange, late
            )
        return contexts

    def _specs(self, device: torch.device) -> dict[int, AttentionSpec]:
        """What attention is asked for, by window, of the heads that are here."""
        specs, ranks = attention_specs(self.config, self.layers, device), self.tensor_ranks
        if ranks is None or not self.config.attn_config.alibi:
            return specs
        own = ranks.heads(self.config.n_heads)
        return {
            window: replace(spec, slopes=None if spec.slopes is None else spec.slopes[own])
            for window, spec in specs.items()
        }

    def _rotary(
        self, layout: PackedLayout | None, positions: Tensor, past: int, cache: Cache | None
    ) -> tuple[Table | None, Table | None]:
        """Tables of the new tokens and, where keys are cached unrotated, of all."""
        if not any(layer.rotary for layer in self.layers):
            return None, None
        device, total = positions.device, past + positions.shape[1]
        slots = cache if isinstance(cache, PlacedCache) else None
        lengths = (
            dynamic_lengths(self.config, layout, total, device) if not slots else slots.lengths()
        )
        frequencies = rotary_frequencies(self.config, lengths, device)
        rotary = rotary_table(positions, frequencies)
        if slots or cache is None or self.config.attn_config.rope_hf_config.type != "dynamic":
            return rotary, None
        return rotary, rotary_table(torch.arange(total, device=device)[None], frequencies)


class Root(nn.Module):
    """The module that DDP and FSDP wrap; it runs the decoder and then what the caller wants."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    @overload
    def forward(
        self,
        tokens: Tensor,
        layout: PackedLayout | None,
        finish: Callable[[Decoder, Tensor], R],
        *,
        cache: Cache | None = None,
        routing: Literal[False] = False,
    ) -> R: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        layout: PackedLayout | None,
        finish: Callable[[Decoder, Tensor], R],
        *,
        cache: Cache | None = None,
        routing: Literal[True],
    ) -> tuple[R, Routing | None]: ...

    def forward(
        self,
        tokens: Tensor,
        layout: PackedLayout | None,
        finish: Callable[[Decoder, Tensor], R],
        *,
        cache: Cache | None = None,
        routing: bool = False,
    ) -> R | tuple[R, Routing | None]:
        """`finish(model, hidden)`, with hidden (B, T, D) of tokens (B, T).

        Args:
            tokens: (B, T) int64.
            layout: documents or trees, and positions; None: every row is one document.
            finish: what to do with the hidden states, where weights are whole.
            cache: earlier tokens of the rows, in generation.
            routing: give what the routers did as well.
        """
        hidden, how = self.model.run(tokens, layout, cache)
        finished = finish(self.model, hidden)
        return (finished, how) if routing else finished
