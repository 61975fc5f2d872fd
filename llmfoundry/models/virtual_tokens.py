"""Prompt and prefix tuning: trained vectors in front of every document, under frozen weights.

    prompt_tuning (P, D)        embeddings before those of the document (Lester et al., 2021)
    prefix_tuning (P, 2 L H d)  keys and values that every layer sees before the document's own
                                (Li and Liang, 2021), as peft flattens them: L layers, H heads

A model holds them as its parameter `prompt_embeddings`, and a `VirtualTokens` says which of both
they are. The decoder serves the first, a class of transformers
(`hf/transformers_models/causal_lm.py`) both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.models.init import Distribution, draw
from llmfoundry.models.linear import whole
from llmfoundry.models.shard_layout import assign
from llmfoundry.recipe.architecture.adapter import PREFIX_TUNING

NAME = "prompt_embeddings"  # also of the tensor in peft's file
SMALL = 0.02  # standard deviation of what begins at random: that of embeddings


@dataclass
class VirtualTokens:
    """What a model's `prompt_embeddings` are.

    Attributes:
        kind: prompt_tuning or prefix_tuning.
        count: in front of each document.
        on: off: the model is the base.
    """

    kind: str
    count: int
    on: bool = field(default=True, compare=False)


@contextmanager
def switched_off(tokens: VirtualTokens | None) -> Iterator[None]:
    """The base model, in a context."""
    was_on = tokens is not None and tokens.on
    if tokens is not None:
        tokens.on = False
    try:
        yield
    finally:
        if tokens is not None:
            tokens.on = was_on


def add_virtual(model: nn.Module, tokens: VirtualTokens, *, dtype: torch.dtype) -> None:
    """Put virtual tokens in front of a model, and freeze all else; they are empty."""
    model.requires_grad_(False)
    config: Any = model.config
    width = config.d_model
    if tokens.kind == PREFIX_TUNING:
        width = 2 * config.n_layers * config.attn_config.kv_n_heads * config.head_dim
    device = next(model.parameters()).device
    empty = torch.empty(tokens.count, width, dtype=dtype, device=device)
    model.register_parameter(NAME, nn.Parameter(empty))
    model.virtual = tokens  # type: ignore[assignment]


def virtual_of(model: nn.Module) -> VirtualTokens | None:
    """What a model has in front of its documents; None: nothing."""
    return getattr(model, "virtual", None)


@torch.no_grad()
def init_virtual(
    model: nn.Module, embedding: Tensor, seed: int, *, begin: Sequence[int] | None, vocab: int
) -> None:
    """Fill them, of a base that has its weights; every process calls it.

    Args:
        model: with `add_virtual`'s parameter.
        embedding: (V, D), the model's, whole or in shards.
        seed: of what is drawn.
        begin: tokens whose embeddings they begin as, repeated; empty: tokens drawn at random; None:
            normal numbers, as keys and values always begin.
        vocab: tokens to draw from.
    """
    parameter = model.get_parameter(NAME)
    if begin is None:
        draw(parameter, Distribution(SMALL), seed, NAME)
        return
    count = parameter.shape[0]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocab, (count,), generator=generator).tolist()
    chosen = [begin[i % len(begin)] for i in range(count)] if begin else drawn
    assign(parameter, whole(embedding)[torch.tensor(chosen)].to(parameter.dtype))


def longest_document(model: nn.Module) -> int | None:
    """Tokens that learned positions leave a document behind them; None: any number."""
    config: Any = model.config
    tokens = virtual_of(model)
    if not config.learned_pos_emb:
        return None
    return config.max_seq_len - (0 if tokens is None else tokens.count)


def virtual_table(model: nn.Module) -> list[str]:
    """Lines for the user, as `adapt.adapter_table`'s."""
    tokens = virtual_of(model)
    assert tokens is not None
    mine, total = model.get_parameter(NAME).numel(), sum(p.numel() for p in model.parameters())
    return [
        f"{tokens.kind}: {tokens.count} virtual tokens in front of every document",
        f"trained: {mine:,} of {total:,} parameters ({100 * mine / total:.2g} %)",
    ]
