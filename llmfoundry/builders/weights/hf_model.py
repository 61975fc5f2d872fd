"""A Hugging Face folder held by transformers' own class: its shape, its checks, its weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.builders.weights.fill import fill_model, with_new_rows
from llmfoundry.errors import UserError
from llmfoundry.hf.read_weights import open_weights
from llmfoundry.hf.transformers_models.build import read_hf_config
from llmfoundry.hf.transformers_models.causal_lm import HFCausalLM
from llmfoundry.hf.transformers_models.weights import class_tensors
from llmfoundry.recipe.architecture.hf_model import HFModelConfig

LONGEST = 2048  # rows of a class whose configuration knows no longest one
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
HIDDEN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ROWS = 4096  # of an embedding that are added up at a time


def class_config(
    written: dict[str, Any], *, attn_impl: str | None, code: str | None
) -> HFModelConfig:
    """The shape of the model that a config.json describes, filled.

    Args:
        written: config.json, with what is overridden.
        attn_impl: transformers' attn_implementation; None: its own choice.
        code: the folder whose Python code may run; None: none.

    Raises:
        UserError: transformers has no such causal language model.
    """
    theirs = read_hf_config(written, code=code)

    def first(names: Iterable[str], default: Any = None) -> Any:
        found = (getattr(theirs, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), default)

    width, heads = first(["hidden_size"]), first(["num_attention_heads"], 1)
    layers, rows = first(["num_hidden_layers"]), first(["vocab_size"])
    if not width or not layers or not rows:
        raise UserError(
            "config.json: has no hidden_size, num_hidden_layers and vocab_size, as a causal"
            " language model has; write the folder of one"
        )
    config = HFModelConfig(
        d_model=width,
        n_heads=heads,
        n_layers=layers,
        head_dim=first(["head_dim"]),
        vocab_size=rows,
        max_seq_len=first(LENGTHS, LONGEST),
        tie_word_embeddings=bool(getattr(theirs, "tie_word_embeddings", False)),
        hf_config=written,
        hf_attn_impl=attn_impl,
        code=code,
    )
    config.attn_config.attn_type = "grouped_query_attention"
    config.attn_config.kv_n_heads = first(["num_key_value_heads"], heads)
    config.ffn_config.ffn_hidden_size = first(HIDDEN, 4 * width)
    _count(config, theirs)
    config.fill()
    return config


def _count(config: HFModelConfig, theirs: Any) -> None:
    """Write in place what only the class itself can say."""
    model = HFCausalLM(config)
    embedding = model.hf.get_input_embeddings().weight
    tables = [
        module.weight
        for module in model.hf.modules()
        if isinstance(module, nn.Embedding) and module.weight is not embedding
    ]
    longest = config.max_seq_len or 0
    config.learned_pos_emb = any(longest <= len(table) <= longest + 8 for table in tables)
    config.attn_config.rope = not config.learned_pos_emb
    counts = (getattr(theirs, name, None) for name in EXPERTS)
    experts = next((n for n in counts if isinstance(n, int) and n > 0), 1)
    chosen = getattr(theirs, "num_experts_per_tok", 1) or 1
    config.hf_parameters = sum(p.numel() for p in model.parameters())
    matrices = 0
    for p in model.parameters():
        if p is embedding and not config.tie_word_embeddings:
            continue
        if any(p is table for table in tables) or p.ndim < 2:
            continue
        matrices += round(p.numel() * chosen / experts) if p.ndim == 3 else p.numel()
    config.hf_matrices = matrices


def check_class(config: HFModelConfig, folder: Path) -> bool:
    """Go through a folder's tensors by shapes alone.

    Returns:
        Whether head and embedding differ although config.json ties them.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place.
    """
    model = HFCausalLM(config)
    with open_weights(folder) as weights:
        for _ in class_tensors(model, weights.names, weights.sketch):
            pass
        both = [
            (first, other)
            for first, others in model.ties.items()
            for other in others
            if {first, other} <= weights.names
        ]
        return any(not _equal(weights.get(a), weights.get(b)) for a, b in both)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    parts = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in parts)


def fill_class(model: nn.Module, folder: Path) -> None:
    """Fill a model of transformers, whole or in shards, from a folder that was checked."""
    assert isinstance(model, HFCausalLM)
    with open_weights(folder) as weights:
        tensors = class_tensors(model, weights.names, weights.get, may_grow=True)
        grown = with_new_rows(model, tensors, model.vocabulary())
        fill_model(model, grown, computed=model.computed())
