"""Rows of single tokens that train in a model of transformers' class (`LowRank.tokens`).

Entry points: `add_token_rows`, and `head_operands` for the chunked loss. Embedding and head get the
two factors of the decoder's adapter, and forward hooks that add the change. The class's parameters
keep their names and ties. `peft/class_adapter.py` reads and writes peft's trainable_token_indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.models import low_rank
from llmfoundry.models.low_rank import A, B, LowRank

_HOOK = "_token_rows_hook"


def add_token_rows(hf: Any, tokens: Sequence[int], dtype: torch.dtype) -> None:
    """Add rows of tokens to the embedding and, unless it is tied, to the head; uninitialized."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    _add(embedding, tokens, dtype, is_embedding=True)
    _hook(embedding, _change_embedding)
    if head is None:
        return
    if head.weight is embedding.weight:
        _hook(head, partial(_change_tied_head, embedding))
    else:
        _add(head, tokens, dtype, is_embedding=False)
        _hook(head, _change_head)


def _add(layer: Any, tokens: Sequence[int], dtype: torch.dtype, *, is_embedding: bool) -> None:
    """Register the factors; the one that selects the tokens is frozen."""
    rows, width = layer.weight.shape
    out, into = (width, rows) if is_embedding else (rows, width)
    count = len(tokens)
    layer.lora = LowRank(count, count, ((0, out),), tokens=tuple(tokens))
    for name, shape in ((A, (count, into)), (B, (out, count))):
        empty = torch.empty(shape, dtype=dtype, device=layer.weight.device)
        trains = (name == B) == is_embedding
        layer.register_parameter(name, nn.Parameter(empty, requires_grad=trains))


def _hook(layer: nn.Module, hook: Any) -> None:
    setattr(layer, _HOOK, layer.register_forward_hook(hook))


def _change_embedding(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Return embeddings y (..., D) with the rows' change, scaled as the class scales them."""
    if not layer.lora.on:
        return y
    change = low_rank.embedded(layer, inputs[0], torch.zeros_like(y), layer.lora)
    return y + change * getattr(layer, "embed_scale", 1.0)


def _change_head(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Return logits y (..., V) with those of the changed rows."""
    return low_rank.adapted(layer, inputs[0], y, layer.lora) if layer.lora.on else y


def _change_tied_head(
    embedding: Any, layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor
) -> Tensor:
    """Return logits y (..., V) with those of the embedding's changed rows."""
    if not embedding.lora.on:
        return y
    hidden = inputs[0].to(embedding.lora_B.dtype)
    return y + (hidden @ embedding.lora_B @ embedding.lora_A).to(y.dtype)


def head_operands(hf: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and head weight, widened by the changed rows if there are any."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    layer = embedding if is_tied else head
    lora = getattr(layer, "lora", None)
    if not isinstance(lora, LowRank) or not lora.on:
        return hidden, head.weight
    widen = low_rank.tied_head_operands if is_tied else low_rank.head_operands
    return widen(layer, hidden, lora)


def row_layers(hf: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with rows of tokens, by name in the class."""
    for name, module in hf.named_modules():
        if isinstance(getattr(module, "lora", None), LowRank):
            yield name, module


@torch.no_grad()
def merge_token_rows(hf: nn.Module) -> None:
    """Add the changes to the class's weights, and remove factors and hooks."""
    for _, layer in [*row_layers(hf)]:
        is_embedding = isinstance(layer, nn.Embedding)
        change = layer.lora_B.T if is_embedding else layer.lora_A
        ids = list(layer.lora.tokens)
        layer.weight[ids] = (layer.weight[ids].float() + change.float()).to(layer.weight.dtype)
        del layer.lora, layer.lora_A, layer.lora_B
    for module in hf.modules():
        handle = module.__dict__.pop(_HOOK, None)
        if handle is not None:
            handle.remove()
