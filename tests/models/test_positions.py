"""Rotary tables against transformers', sharpened queries against Llama 4's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Llama4TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama4 import modeling_llama4

from llmfoundry.models.attention import (
    dynamic_lengths,
    query_temperature,
    rotary_frequencies,
    rotary_table,
)
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.model import ResolvedModelConfig
from tests.models.test_decoder import make_config

CPU = torch.device("cpu")
LLAMA3 = {
    "type": "llama3",
    "factor": 7.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "no_scaling": {"type": "no_scaling"},
    "linear": {"type": "linear", "factor": 3.0},
    "dynamic": {"type": "dynamic", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-bounds": YARN | {"beta_fast": 20, "beta_slow": 3, "factor": 40.0},
    "yarn-between": YARN | {"truncate": False, "attention_factor": 0.7},
    "yarn-equal-bounds": YARN | {"beta_fast": 1.01, "original_max_position_embeddings": 8},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 1.3},
}


def make(scaling: str) -> ResolvedModelConfig:
    attn = {"rope": True, "rope_theta": 10000.0, "rope_hf_config": SCALINGS[scaling]}
    return make_config(d_model=64, n_heads=2, max_seq_len=128, attn_config=attn)


def ours(
    config: ResolvedModelConfig, layout: PackedLayout | None, total: int
) -> tuple[Tensor, Tensor]:
    positions = torch.arange(total)[None] if layout is None else layout.positions
    lengths = dynamic_lengths(config, layout, total, CPU)
    frequencies = rotary_frequencies(config, lengths, CPU)
    cos, sin = rotary_table(positions, frequencies, config.attn_config.rope_hf_config.table_scale)
    return cos.squeeze(-2), sin.squeeze(-2)


def theirs(config: ResolvedModelConfig, scaling: str, total: int) -> tuple[Tensor, Tensor]:
    """A new module each time: theirs remembers the longest row that it has seen."""
    rope: dict[str, Any] = {"rope_theta": config.attn_config.rope_theta}
    rope |= SCALINGS[scaling]
    kind = rope.pop("type")
    rope["rope_type"] = {"no_scaling": "default"}.get(kind, kind)
    llama = LlamaConfig(
        hidden_size=config.d_model,
        num_attention_heads=config.n_heads,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=rope,
    )
    return LlamaRotaryEmbedding(llama)(torch.ones(1), torch.arange(total)[None])


@pytest.mark.parametrize("total", [1, 128, 129, 400])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_are_transformers(scaling: str, total: int) -> None:
    config = make(scaling)
    for mine, right in zip(ours(config, None, total), theirs(config, scaling, total), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_document_has_the_table_that_it_has_alone(scaling: str) -> None:
    config = make(scaling)
    lengths = [[300, 40, 160], [128, 128, 116, 128]]
    tables = ours(config, PackedLayout.from_lengths(lengths), 500)
    for mine, part in zip(tables, range(2), strict=True):
        for row, documents in zip(mine, lengths, strict=True):
            for document, n in zip(row.split(documents), documents, strict=True):
                torch.testing.assert_close(
                    document, theirs(config, scaling, n)[part][0], rtol=0, atol=1e-5
                )


def test_sharpened_queries_are_llama_4s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention without rotation, given queries of ones: the factor is all that is left."""
    tuning: dict[str, Any] = {"floor_scale": 5, "attn_scale": 0.3}
    llama = Llama4TextConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        no_rope_layers=[0],
        attn_temperature_tuning=True,
        attn_implementation="eager",
        **tuning,
    )
    seen: list[Tensor] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        seen.append(query[0, 0, :, 0].detach())
        return value.transpose(1, 2), None

    monkeypatch.setattr(modeling_llama4, "eager_attention_forward", spy)
    attention = modeling_llama4.Llama4TextAttention(llama, 0)
    torch.nn.init.constant_(attention.q_proj.weight, 1 / 8)
    attention(torch.ones(1, 40, 8), (torch.ones(1), torch.ones(1)), None)
    config = make_config(attn_config={"nope": True, "attn_temperature_tuning": tuning})
    (layer, *_) = config.layers()
    assert layer.temperature == (tuning["floor_scale"], tuning["attn_scale"])
    factors = query_temperature(torch.arange(40)[None], *layer.temperature)
    torch.testing.assert_close(factors[0, :, 0, 0], seen[0], rtol=1e-6, atol=0)
    assert factors[0, 3, 0, 0] == 1 and factors[0, 4, 0, 0] > 1
