"""Parameters against closed formulas and MPT's own counts, FLOPs against counted products."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.models import counts
from llmfoundry.models.adapter import add_adapter, init_adapter, is_added
from llmfoundry.models.adapter_targets import plan_adapter
from llmfoundry.models.counts import (
    flops_per_token,
    parameter_count,
    peak_flops,
    trained_flops_per_token,
)
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import place, quantize_frozen
from llmfoundry.recipe.adapter import AdapterConfig
from llmfoundry.recipe.model import FFNConfig, ModelConfig
from llmfoundry.recipe.schema import MOST_LAYERS
from tests.models.test_decoder import SETTINGS, make_config, make_model

PUBLISHED = {  # d_model, n_heads, n_layers, parameters of MPT with learned positions and tied head
    "125m": (768, 12, 12, 125_311_488),
    "350m": (1024, 16, 24, 355_985_408),
    "760m": (1536, 12, 24, 760_470_528),
    "1b": (2048, 16, 24, 1_315_950_592),
    "7b": (4096, 32, 32, 6_658_859_008),
    "70b": (8192, 64, 80, 64_862_437_376),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_mpts(name: str) -> None:
    d, heads, layers, expected = PUBLISHED[name]
    config = ModelConfig(
        d_model=d, n_heads=heads, n_layers=layers, vocab_size=50368, max_seq_len=2048
    )
    config = config.resolve()
    assert parameter_count(config) == expected


def expected_ffn(ffn: FFNConfig, d: int, *, bias: bool) -> int:
    """One layer's."""
    projections = 2 if "mptglu" in ffn.ffn_type or ffn.mlp_type == "glu" else 1

    def layer(hidden: int) -> int:
        return (projections + 1) * d * hidden + (projections * hidden + d if bias else 0)

    if ffn.ffn_type != "dmoe":
        return layer(ffn.ffn_hidden_size)
    shared = layer(ffn.shared_expert_hidden_size) if ffn.shared_expert_hidden_size else 0
    router = (d + bool(ffn.moe_router_bias)) * ffn.moe_num_experts
    return router + ffn.moe_num_experts * layer(ffn.ffn_hidden_size) + shared


def expected_block_ffn(config: ModelConfig, index: int) -> int:
    """Of a block; the first ones of a mixture may have no experts."""
    ffn, bias = config.ffn_config, not config.no_bias
    if index < (ffn.first_k_dense_replace or 0):
        kind = "mptglu" if ffn.mlp_type == "glu" else "mptmlp"
        ffn = FFNConfig(ffn_type=kind, ffn_hidden_size=ffn.dense_hidden_size)
    return expected_ffn(ffn, config.d_model, bias=bias)


def expected_parameters(config: ModelConfig) -> int:
    """Counted from the definitions, layer by layer."""
    attn, d, hd = config.attn_config, config.d_model, config.head_dim
    bias = not config.no_bias
    vectors = 2 if bias and "layernorm" in config.norm_type else 1  # of one norm
    qk_vectors = 2 if bias and "layernorm" in str(attn.norm_type) else 1
    total = (1 if config.tie_word_embeddings else 2) * config.vocab_size * d + vectors * d
    total += config.max_seq_len * d if config.learned_pos_emb else 0
    for index, layer in enumerate(config.layers()):
        if attn.attn_type == "multihead_latent_attention":
            heads, rank = config.n_heads, attn.kv_lora_rank
            total += expected_block_ffn(config, index) + 2 * vectors * d
            total += d * (rank + attn.qk_rope_head_dim) + qk_vectors * rank
            total += rank * heads * (attn.qk_nope_head_dim + attn.v_head_dim)
            total += heads * attn.v_head_dim * d + (d if bias else 0)
            if attn.q_lora_rank is None:
                total += d * heads * hd
            else:
                total += attn.q_lora_rank * (d + heads * hd + qk_vectors)
            continue
        kv_heads = attn.kv_n_heads if layer.kv_from == index else 0
        projected = (config.n_heads + 2 * kv_heads) * hd
        total += d * projected + (projected if config.attention_bias else 0)
        total += config.n_heads * hd * d + (d if bias else 0)
        total += expected_block_ffn(config, index)
        total += 2 * vectors * d + (config.n_heads if attn.sinks else 0)
        if attn.qk_ln:
            total += qk_vectors * (config.n_heads + kv_heads) * hd
        if attn.qk_gn:
            total += qk_vectors * (2 if kv_heads else 1) * hd
    return total


@pytest.mark.parametrize("name", SETTINGS)
def test_parameter_counts_follow_every_setting(name: str) -> None:
    config = make_config(**SETTINGS[name])
    assert parameter_count(config) == expected_parameters(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_flops_are_the_counted_matrix_products(name: str) -> None:
    config = make_config(**(SETTINGS[name] | {"d_model": 48, "max_seq_len": 32}))
    config.attn_config.attn_impl = "torch"  # its attention is over the whole row, as we count it
    model = make_model(config)
    tokens = torch.randint(0, 64, (2, 32))
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens)).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert flops_per_token(config, 32) == pytest.approx(counted, rel=0.02)


def test_mfu_of_mpt_7b_is_llm_foundrys() -> None:
    """10,643 tokens/s of an H100 at 2048 tokens a row were published as 46.44 % of its peak."""
    config = ModelConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50368, max_seq_len=2048)
    config.attn_config.alibi = True
    config = config.resolve()
    assert 10_643 * flops_per_token(config, 2048) / 989.5e12 == pytest.approx(0.4644, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI250X", 191.5e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_are_found_by_the_devices_name(
    name: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts.torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == expected


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_counting_does_not_build_every_layer() -> None:
    few = make_config(n_layers=2)
    with torch.device("meta"):
        block = sum(p.numel() for p in Decoder(few).blocks[1].parameters())
    deep = make_config(n_layers=MOST_LAYERS)
    began = time.process_time()
    assert parameter_count(deep) == parameter_count(few) + (MOST_LAYERS - 2) * block
    assert flops_per_token(deep, 8) > flops_per_token(few, 8)
    assert time.process_time() - began < 0.5  # building one takes seconds


def counted(model: Decoder, length: int) -> float:
    """FLOPs a token that PyTorch counts in a step; router losses left out."""
    tokens = torch.randint(0, 64, (2, length))
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens)).sum().backward()
    return counter.get_total_flops() / tokens.numel()


def adapted(name: str, *, quantize: bool = False, **settings: Any) -> Decoder:
    config = make_config(**(SETTINGS[name] | {"d_model": 48, "max_seq_len": 32}))
    config.attn_config.attn_impl = "torch"
    model = make_model(config)
    adapter = AdapterConfig(name="lora", r=6, **settings)
    adapter.fill()
    add_adapter(model, plan_adapter(model, adapter, split_qkv=False))
    if quantize:
        values = {name: p.detach() for name, p in model.named_parameters() if not is_added(name)}
        quantize_frozen(model, double=True)
        for key, value in values.items():
            place(model, key, value)
    init_adapter(model, 1)
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_trains_as_a_whole_costs_what_its_settings_say(name: str) -> None:
    config = make_config(**SETTINGS[name])
    whole = trained_flops_per_token(make_model(config), 32)
    assert whole == pytest.approx(flops_per_token(config, 32))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rope", {}),
        ("glu-silu", {}),
        ("glu-silu", {"target_modules": ["down_proj"]}),
        ("qk-ln", {"target_modules": ["blocks.1.attn.*"]}),
        ("untied", {"init_lora_weights": "pissa"}),
        ("dmoe-dbrx", {}),
        ("dmoe-dbrx", {"experts": "shared"}),
        ("dmoe", {"init_lora_weights": "gaussian"}),
        ("overrides", {}),
    ],
)
@pytest.mark.parametrize("quantize", [False, True])
def test_flops_of_adapters_are_the_counted_products(
    name: str, settings: dict[str, Any], quantize: bool
) -> None:
    model = adapted(name, quantize=quantize, **settings)
    assert trained_flops_per_token(model, 32) == pytest.approx(counted(model, 32), rel=0.02)


@pytest.mark.parametrize("frozen", ["blocks.0", "wte blocks.0", "wte blocks.0 blocks.1", "blocks"])
def test_nothing_goes_back_behind_the_first_part_that_trains(frozen: str) -> None:
    config = make_config(**(SETTINGS["untied"] | {"d_model": 48, "max_seq_len": 32}))
    config.attn_config.attn_impl = "torch"
    model = make_model(config)
    for name, parameter in model.named_parameters():
        parts = (*frozen.split(), *(("wpe",) if "wte" in frozen else ()))
        parameter.requires_grad_(not name.startswith(parts))
    assert trained_flops_per_token(model, 32) == pytest.approx(counted(model, 32), rel=0.02)


def test_frozen_products_cost_two_thirds_where_all_is_adapted() -> None:
    """4 N a token through frozen weights, 2 in the first layer, whose input has no gradient."""
    d, layers, r = 48, 2, 6
    model = adapted("no-bias")
    matrices = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]  # Wqkv, out, up, down
    frozen = sum(out * into for out, into in matrices)
    factors = sum(r * (out + into) for out, into in matrices)
    attention = 2 * 2 * d * 32
    expected = layers * (4 * frozen + 6 * factors + 3 * attention) + 4 * 64 * d
    expected -= 2 * 3 * d * d + 2 * r * d  # the gradient of the first layer's input
    assert trained_flops_per_token(model, 32) == expected
