"""The decoder-only transformer: embeddings, blocks, final norm and output head.

Entry points: `Decoder` is the model; `Root` is the module that the trainer, the evaluator and the
generator call. Everything that uses weights happens inside `Root.forward`, because DDP and FSDP
hook that one forward pass. The head is a separate method, so that the loss can compute logits in
chunks and the gauntlet can compute them at a few positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.models import init
from llmfoundry.models.attention import (
    Attention,
    Context,
    ContextExchange,
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
from llmfoundry.models.kv_cache import SlotCache, SlottedCache
from llmfoundry.models.latent_attention import LatentAttention
from llmfoundry.models.layers import FFN, FFNS, Embedding, Linear, norm_maker
from llmfoundry.models.low_rank import head_operands, tied_head_operands
from llmfoundry.models.moe import MoE
from llmfoundry.models.router import Routed, Routing, over_layers
from llmfoundry.models.tensor_parallel import TensorRanks
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec
from llmfoundry.ops.attention.select import AttentionKernels
from llmfoundry.ops.devices import has_autocast
from llmfoundry.ops.distillation import (
    DistillationLosses,
    DistillationWeights,
    linear_distillation,
)
from llmfoundry.ops.loss import VocabularyShard, cap, linear_log_probs, linear_losses
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import ModelConfig, ResolvedModelConfig

R = TypeVar("R")
ContextKey = tuple[int, tuple[int, float] | None]
"""Window and query temperature of a layer: layers with the same key share one `Context`."""
Cache = KVCache | SlottedCache
"""A batch of sequences that grow together, or one sequence of new tokens that go to slots."""


class Block(nn.Module):
    """Pre-norm block: x + dropout(attention(norm x)), then x + dropout(ffn(norm x)).

    Keys and values shared between blocks, and the router's statistics, are arguments and results.
    A shared list that all blocks write to would be invisible to activation checkpointing,
    compilation and FSDP.
    """

    def __init__(
        self, config: ResolvedModelConfig, index: int, layer: LayerConfig, *, is_reused: bool
    ) -> None:
        super().__init__()
        norm, bias = norm_maker(config.norm_type), not config.no_bias
        self.pdrop = config.resid_pdrop
        self.norm_1 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        self.attn: Attention | LatentAttention
        if config.attn_config.is_latent:
            self.attn = LatentAttention(config, index, layer)
        else:
            self.attn = Attention(config, index, layer, is_reused=is_reused)
        self.norm_2 = norm(config.d_model, eps=config.norm_eps, bias=bias)
        ffn = config.ffn_config
        self.ffn: nn.Module
        if layer.is_dense:
            self.ffn = FFN(config, gated=ffn.mlp_type == "glu", hidden=ffn.dense_hidden_size)
        elif ffn.ffn_type == "dmoe":
            self.ffn = MoE(config)
        else:
            self.ffn = FFNS[ffn.ffn_type](config)

    def forward(
        self,
        x: Tensor,
        context: Context,
        shared_kv: KeysValues | None = None,
        token_indices: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues | None, Routed | None]:
        """Update the residual stream.

        Args:
            x: (B, T, D), the residual stream.
            context: attention plan, rotary tables and cache of this forward pass.
            shared_kv: keys and values of the earlier block that this block reuses; None if this
                block computes its own.
            token_indices: (N,) flat indices b * T + t of the tokens that are not padding. Experts
                skip all others. None: there is no padding.

        Returns:
            The residual stream (B, T, D); this block's keys and values if later blocks reuse them;
            the router's statistics if the block has a router and is training.
        """
        attended, kv = self.attn(self.norm_1(x), context, shared_kv)
        x = x + _dropout(attended, self.pdrop, self.training)
        if isinstance(self.ffn, MoE):
            ffn_out, routed = self.ffn(self.norm_2(x), token_indices)
        else:
            ffn_out, routed = self.ffn(self.norm_2(x)), None
        return x + _dropout(ffn_out, self.pdrop, self.training), kv, routed


def _context_key(layer: LayerConfig) -> ContextKey:
    return layer.window, layer.temperature


def _of_heads(spec: AttentionSpec, local_heads: Callable[[Tensor], Tensor]) -> AttentionSpec:
    """Return the settings with the ALiBi slopes of some heads."""
    return spec if spec.slopes is None else replace(spec, slopes=local_heads(spec.slopes))


def _cached_kernels(config: ResolvedModelConfig) -> AttentionKernels | None:
    """Return the kernels over cached latent vectors, which are wider than any other head.

    None: a cache holds keys and values, and has the kernels of training.
    """
    attn = config.attn_config
    if not attn.is_latent:
        return None
    is_plain = attn.attn_impl == "torch" or attn.attn_logit_softcapping is not None
    return AttentionKernels("torch" if is_plain else "sdpa", config.cache_row[1])


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p) if p and training else x


SEED = 17
"""Seed of a decoder that is made without a recipe."""


def _unresolved(config: ModelConfig) -> Iterator[str]:
    for name in ("head_dim", "vocab_size", "max_seq_len"):
        if getattr(config, name) is None:
            yield (
                f"model.{name}: is not known; write config.fill(vocab_size=N, max_seq_len=T) before"
                " Decoder(config), or llmfoundry.build(recipe)"
            )


class Decoder(nn.Module):
    """Decoder-only transformer. MPT, GPT-2, Llama and DBRX are settings of it.

    A decoder that is not made on the meta device is initialized. Its logits are
    `model.head(model(tokens))`.

    Args:
        config: resolved, with `config.fill(vocab_size=..., max_seq_len=...)`.

    Raises:
        UserError: the config is not resolved.

    Attributes:
        tensor_ranks: the tensor-parallel ranks; None without tensor parallelism.
        loss_chunk: number of tokens whose logits the loss materializes at a time; None: chosen for
            the device.
        residual_dtype: dtype of the residual stream under autocast; set by `use_residual_dtype`.
        exchange: context-parallel communication around attention, used in training; None without
            context parallelism.
    """

    exchange: ContextExchange | None = None
    tensor_ranks: TensorRanks | None = None
    loss_chunk: int | None = None
    residual_dtype: torch.dtype = torch.float32

    def __init__(self, config: ResolvedModelConfig) -> None:
        super().__init__()
        if problems := [*_unresolved(config)]:
            raise UserError(*problems)
        self.config = config
        self.layers = config.layers()
        widest = max(config.head_dim, config.value_dim)
        self.kernels = AttentionKernels(config.attn_config.attn_impl, widest)
        self.cached_kernels = _cached_kernels(config) or self.kernels
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
        if not self.wte.weight.is_meta:  # a run's is on the meta device until it is sharded
            self.init_weights(SEED)

    def use_residual_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the residual stream, fp32 or autocast's; norms of the stream follow."""
        self.residual_dtype = dtype
        if dtype == torch.float32:
            return
        norms = [norm for block in self.blocks for norm in (block.norm_1, block.norm_2)]
        for norm in [*norms, self.norm_f]:
            norm.low_precision = True  # type: ignore[union-attr]

    def vocabulary(self) -> set[str]:
        """Return the names of the parameters that have one row per token of the vocabulary."""
        tied = self.config.tie_word_embeddings
        return {"wte.weight"} if tied else {"wte.weight", "lm_head.weight"}

    @property
    def embedding_weight(self) -> Tensor:
        """Token embedding (V, D), without its adapter."""
        return self.wte.weight

    @property
    def head_weight(self) -> Tensor:
        """Output head (V, D), or the embedding if they are tied; without its adapter."""
        return self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def _head_operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Return the operands of the head's matmul.

        Args:
            hidden: (..., D).

        Returns:
            Hidden states (..., D) and weight (V, D). With an adapter on the head, both are widened
            by its rank. With tensor parallelism the weight has this rank's rows, and the third
            value names them.
        """
        if self.tensor_ranks is not None:
            weight, shard = self.tensor_ranks.local_vocabulary(self.head_weight)
            return hidden, weight, shard
        # transformers replaces the head by a plain nn.Linear when it adds rows
        is_tied = self.config.tie_word_embeddings
        layer = self.wte if is_tied else self.lm_head
        lora = getattr(layer, "lora", None)
        if lora is None or not lora.on:
            return hidden, self.head_weight, None
        widen = tied_head_operands if is_tied else head_operands
        wide_hidden, wide_weight = widen(layer, hidden, lora)
        return wide_hidden, wide_weight, None

    @property
    def logit_scale(self) -> float:
        """Factor that multiplies the logits."""
        scale = self.config.logit_scale
        if isinstance(scale, str):
            assert scale == "inv_sqrt_d_model"
            return self.config.d_model**-0.5
        return 1.0 if scale is None else scale

    def forward(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Return hidden states (B, T, D) after the final norm.

        Args:
            tokens: (B, T) int64; with context parallelism, this rank's tokens.
            layout: packed documents or prefix trees, and positions; None: each sequence is one
                document.
            cache: keys and values of earlier tokens. The new tokens are appended to it. For a slot
                cache, `tokens` must be the result of its `begin`.
        """
        hidden, _ = self.run(tokens, layout, cache)
        return hidden

    def run(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return `forward`'s hidden states and the routing statistics of all layers.

        The statistics are None without experts and in evaluation mode.
        """
        batch_size, width = tokens.shape
        growing_cache = None if isinstance(cache, SlottedCache) else cache
        past = 0 if growing_cache is None else growing_cache.length

        # positions of the new tokens
        if isinstance(cache, SlottedCache):
            positions = cache.positions
        elif layout is None:
            positions = torch.arange(past, past + width, device=tokens.device)[None]
        else:
            positions = layout.positions

        # what all blocks share: embeddings, attention plans, and the tokens that experts see
        x = self._embed(tokens, positions)
        contexts = self._contexts(layout, positions, past, cache, x.dtype)
        token_indices = self._expert_token_indices(layout, batch_size, width)
        if token_indices is not None:
            token_indices = token_indices.to(tokens.device, non_blocking=True)

        shared_kv: dict[int, KeysValues] = {}  # by the index of the block that computed them
        routed_layers: list[Routed] = []
        for i, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            context = contexts[_context_key(layer)]
            x, kv, routed = block(x, context, shared_kv.get(layer.kv_from), token_indices)
            if kv is not None:
                shared_kv[i] = kv
            if routed is not None:
                routed_layers.append(routed)

        if growing_cache is not None:
            growing_cache.length += width
        x = self.norm_f(x)
        if self.tensor_ranks is not None:
            x = self.tensor_ranks.all_gather(x, width)
        routing = over_layers(routed_layers, self.config.ffn_config) if routed_layers else None
        return x, routing

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., D), scaled and softcapped.

        Their dtype is autocast's if it is enabled, else that of the hidden states.
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
        """Return the sum of the cross-entropy over all labels, in nats.

        Args:
            hidden: (..., D).
            labels: (...) int64; -100 is ignored.
            weights: (...) weight of each label; None: 1.
        """
        return self.losses(hidden, labels, weights)[0]

    def losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        z_loss_weight: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of cross-entropy and z-loss, and the z-loss, which has no gradient.

        The z-loss is `z_loss_weight` times the sum of squared log-sum-exps of the logits.
        """
        hidden, weight, shard = self._head_operands(hidden)
        return linear_losses(
            hidden,
            weight,
            labels,
            scale=self.logit_scale,
            softcap=self.config.final_logit_softcapping,
            weights=weights,
            z_loss_weight=z_loss_weight,
            chunk=self.loss_chunk,
            shard=shard,
        )

    def distillation(
        self,
        hidden: Tensor,
        batch: Batch,
        by: DistillationWeights,
        *,
        z_loss_weight: float = 0.0,
    ) -> DistillationLosses:
        """Return the cross-entropy and the divergence from a batch's teacher, summed over labels.

        Args:
            hidden: (B, T, D).
            batch: tokens with labels and the teacher's tokens.
            by: weights of the summands.
            z_loss_weight: as in `losses`.
        """
        assert batch.teacher is not None, "the data has a teacher"
        hidden, weight, shard = self._head_operands(hidden)
        return linear_distillation(
            hidden,
            weight,
            batch.labels,
            batch.teacher,
            by,
            weights=batch.weights,
            z_loss_weight=z_loss_weight,
            scale=self.logit_scale,
            softcap=self.config.final_logit_softcapping,
            chunk=self.loss_chunk,
            shard=shard,
        )

    def log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label, (...) in fp32; 0 where a label is ignored.

        Its backward pass takes one more matmul with the head than that of `loss`, and no more
        memory.

        Args:
            hidden: (..., D).
            labels: (...) int64; -100 is ignored.
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
        """Allocate a KV cache of `slots` sequences with at most `length` tokens each."""
        ranks = 1 if self.tensor_ranks is None else self.tensor_ranks.n
        return SlotCache(
            self.config, slots=slots, length=length, device=device, dtype=dtype, ranks=ranks
        )

    def init_weights(self, seed: int) -> None:
        """Initialize all weights. The values do not depend on the parallel layout."""
        init.init_weights(self, self.config, seed)

    def _expert_token_indices(
        self, layout: PackedLayout | None, batch_size: int, width: int
    ) -> Tensor | None:
        """Return the flat indices (N,), on the host, of the tokens that experts see; None: all."""
        if self.config.ffn_config.ffn_type != "dmoe":
            return None
        indices = None if layout is None else layout.real_places()
        if self.tensor_ranks is None or (indices is None and not self.training):
            return indices  # in generation a padding token is routed like any other
        return self.tensor_ranks.local_indices(batch_size, width, indices)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings (B, T, D) of tokens (B, T) at positions (B or 1, T).

        With tensor parallelism these are the embeddings of this rank's tokens only.
        """
        ranks = self.tensor_ranks
        x = self.wte(tokens) if ranks is None else ranks.embed(self.wte.weight, tokens)
        if self.config.learned_pos_emb:
            x = x + self.wpe(positions if ranks is None else ranks.local_tokens(positions))
        # FSDP gathers bf16 weights; the dtype of the residual stream does not depend on that
        if has_autocast(x.device.type) and x.dtype != torch.float64:
            x = x.to(self.residual_dtype)
        # scale the gradient of the embedding without changing its value
        fraction = self.config.embedding_fraction
        if fraction < 1:
            x = fraction * x + (1 - fraction) * x.detach()
        return _dropout(x, self.config.emb_pdrop, self.training)

    def _contexts(
        self,
        layout: PackedLayout | None,
        positions: Tensor,
        past: int,
        cache: Cache | None,
        dtype: torch.dtype,
    ) -> dict[ContextKey, Context]:
        """Return the context of every layer key.

        Rotary tables are computed once, attention plans once per window.
        """
        # rotary tables, and the exchange of context parallelism
        device, width = positions.device, positions.shape[1]
        exchange = self.exchange if self.training else None
        is_sharded = layout is not None and layout.ranges is not None
        assert is_sharded == (exchange is not None), "context parallelism needs a sharded layout"
        rotary, cached_rotary = self._rotary(layout, positions, past, cache)

        # one attention plan per window, for the heads and queries of this rank
        specs = self._local_specs(device)
        ranges = None
        if exchange is not None:
            specs = {
                window: _of_heads(spec, exchange.local_heads) for window, spec in specs.items()
            }
            ranges = layout.ranges if layout is not None and exchange.splits_queries else None
        slots = cache if isinstance(cache, SlottedCache) else None
        kernels = self.kernels if cache is None else self.cached_kernels
        plans: dict[int, AttentionPlan | SlotAttention] = {}
        for window, spec in specs.items():
            if slots is not None:
                plans[window] = slots.plan(kernels, spec, dtype)
                continue
            plans[window] = kernels.plan(
                layout,
                spec,
                queries=width if layout is None else layout.width,
                past=past,
                device=device,
                dtype=dtype,
                ranges=ranges,
            )

        # one context per pair of window and temperature
        rotates_late = cached_rotary is not None or (slots is not None and slots.rotates_late)
        contexts = {}
        for key in {_context_key(layer) for layer in self.layers}:
            window, temperature = key
            factors = None if temperature is None else query_temperature(positions, *temperature)
            contexts[key] = Context(
                plan=plans[window],
                rotary=rotary,
                cached_rotary=cached_rotary,
                temperature=factors,
                cache=cache,
                tokens=width,
                exchange=exchange,
                rotates_late=rotates_late,
            )
        return contexts

    def _local_specs(self, device: torch.device) -> dict[int, AttentionSpec]:
        """Return the attention settings of this rank's heads, by window."""
        specs = attention_specs(self.config, self.layers, device)
        if self.tensor_ranks is None or not self.config.attn_config.alibi:
            return specs
        heads = self.tensor_ranks.heads(self.config.n_heads)
        return {
            window: _of_heads(spec, lambda values: values[heads]) for window, spec in specs.items()
        }

    def _rotary(
        self, layout: PackedLayout | None, positions: Tensor, past: int, cache: Cache | None
    ) -> tuple[Table | None, Table | None]:
        """Return the rotary table of the new tokens, and that of all tokens.

        The second is None unless keys are cached unrotated (`type: dynamic`).
        """
        if not any(layer.rotary for layer in self.layers):
            return None, None
        device, total = positions.device, past + positions.shape[1]
        slots = cache if isinstance(cache, SlottedCache) else None
        if slots is not None:
            lengths = slots.lengths()
        else:
            lengths = dynamic_lengths(self.config, layout, total, device)
        frequencies = rotary_frequencies(self.config, lengths, device)
        scale = self.config.attn_config.rope_hf_config.table_scale
        rotary = rotary_table(positions, frequencies, scale)
        is_dynamic = self.config.attn_config.rope_hf_config.type == "dynamic"
        if slots is not None or cache is None or not is_dynamic:
            return rotary, None
        all_positions = torch.arange(total, device=device)[None]
        return rotary, rotary_table(all_positions, frequencies)


class Head(nn.Module):
    """An output head as a module whose call surrounds all uses of its weight, for FSDP's hooks.

    Args:
        linear: the head.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, model: Decoder, hidden: Tensor, finish: Callable[[Decoder, Tensor], R]) -> R:
        """Return `finish(model, hidden)`."""
        return finish(model, hidden)


class Root(nn.Module):
    """Module that DDP and FSDP wrap: runs the decoder, then a function of the caller.

    Attributes:
        head: the output head, if it is an FSDP unit (`distributed/fsdp.py`); else None.
    """

    head: Head | None

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.head = None

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
        """Return `finish(model, hidden)`, with hidden states (B, T, D).

        Args:
            tokens: (B, T) int64.
            layout: packed documents or prefix trees, and positions; None: each sequence is one
                document.
            finish: function of the hidden states. FSDP has gathered the weights of embedding and
                head while it runs.
            cache: keys and values of earlier tokens, in generation.
            routing: also return the routing statistics.
        """
        hidden, statistics = self.model.run(tokens, layout, cache)
        if self.head is None:
            result = finish(self.model, hidden)
        else:
            result = self.head(self.model, hidden, finish)
        return (result, statistics) if routing else result
