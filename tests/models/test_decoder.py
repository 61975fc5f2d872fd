"""The decoder against a plain float64 one, on every setting it has."""

from __future__ import annotations

import math

import pytest
import torch

from llmfoundry.models.attention import KVCache
from llmfoundry.models.counts import flops_per_token, parameter_count
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.attention import alibi_slopes
from llmfoundry.ops.layout import Layout
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, InitConfig, ModelConfig
from tests.models.plain_decoder import document_logits, slope

GQA = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
SETTINGS = {
    "learned": {},
    "alibi": {"attn_config": {"alibi": True}},
    "alibi-6-heads": {"attn_config": {"alibi": True, "alibi_bias_max": 4}, "n_heads": 6},
    "rope": {"attn_config": {"rope": True}},
    "rope-gqa-theta": {"attn_config": {"rope": True, "rope_theta": 500.0, **GQA}},
    "alibi-gqa": {"attn_config": {"alibi": True, **GQA}},
    "mqa": {"attn_config": {"attn_type": "multiquery_attention"}},
    "clip": {"attn_config": {"clip_qkv": 0.3}},
    "qk-ln": {"attn_config": {"qk_ln": True, "rope": True, **GQA}},
    "scale": {"attn_config": {"softmax_scale": 0.05}},
    "head-dim": {"head_dim": 6, "attn_config": {"rope": True}},
    "glu-silu": {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": "silu"}},
    "tanh": {"ffn_config": {"ffn_act_fn": "gelu_tanh"}, "expansion_ratio": 1.5},
    "relu": {"ffn_config": {"ffn_act_fn": "relu", "ffn_hidden_size": 20}},
    "rmsnorm": {"norm_type": "rmsnorm", "norm_eps": 1e-3},
    "no-bias": {"no_bias": True, "attn_config": {"rope": True, "qk_ln": True}},
    "untied": {"tie_word_embeddings": False},
}


def make_config(**settings: object) -> ModelConfig:
    settings = {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 32} | settings
    attention = AttentionConfig(**settings.pop("attn_config", {}))
    ffn = FFNConfig(**settings.pop("ffn_config", {}))
    config = ModelConfig(attn_config=attention, ffn_config=ffn, vocab_size=64, **settings)
    assert list(config.check()) == []
    config.fill()
    return config


def make_model(config: ModelConfig) -> Decoder:
    """Every parameter random, biases and norms too, so that each of them shows."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def plain_logits(model: Decoder, tokens: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    rows = [
        torch.cat([document_logits(d, weights, model.config) for d in row.split(n)])
        for row, n in zip(tokens, lengths, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("impl", ["sdpa", "torch"])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_and_gradients_equal_the_plain_decoders(name: str, impl: str) -> None:
    config = make_config(**SETTINGS[name])
    config.attn_config.attn_impl = impl
    model = make_model(config).double()
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(2))
    lengths = [[13], [4, 1, 8]]
    logits = model.head(model(tokens, Layout.from_lengths(lengths)))
    expected = plain_logits(model, tokens, lengths)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # rotary tables are fp32
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).double()
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad((logits * weight).sum(), list(parameters.values()))
    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    rows = [
        torch.cat([document_logits(d, leaves, config) for d in row.split(n)])
        for row, n in zip(tokens, lengths, strict=True)
    ]
    plain = torch.autograd.grad((torch.stack(rows) * weight).sum(), list(leaves.values()))
    for (key, _), ours, theirs in zip(parameters.items(), grads, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", SETTINGS)
def test_fp32_logits_are_near_float64(name: str) -> None:
    model = make_model(make_config(**SETTINGS[name]))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(4))
    expected = plain_logits(model, tokens, [[16], [16]])
    logits = model.head(model(tokens))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["learned", "alibi-6-heads", "rope-gqa-theta", "qk-ln"])
def test_key_value_cache_gives_the_logits_of_the_whole_row(name: str) -> None:
    config = make_config(**SETTINGS[name])
    model = make_model(config)
    tokens = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(5))
    cache = KVCache(config, batch=3, max_len=12, device=torch.device("cpu"), dtype=torch.float32)
    parts = [model(part, cache=cache) for part in tokens.split([5, 1, 4, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


def test_packed_documents_do_not_see_each_other() -> None:
    model = make_model(make_config())
    tokens = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(6))
    changed = tokens.clone()
    changed[0, :9] = (changed[0, :9] + 1) % 64
    layout = Layout.from_lengths([[9, 7]])
    torch.testing.assert_close(model(tokens, layout)[0, 9:], model(changed, layout)[0, 9:])
    assert not torch.allclose(model(tokens)[0, 9:], model(changed)[0, 9:])


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])
def test_alibi_slopes_are_the_papers(heads: int) -> None:
    ours = alibi_slopes(heads, 8, torch.device("cpu")).tolist()
    assert ours == pytest.approx([slope(h, heads, 8) for h in range(heads)], rel=1e-6)


def test_alibi_slopes_of_8_and_12_heads_as_published() -> None:
    assert alibi_slopes(8, 8, torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12, 8, torch.device("cpu")).tolist() == pytest.approx(twelve)


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
    config.fill()
    assert parameter_count(config) == expected


@pytest.mark.parametrize("name", ["learned", "rope-gqa-theta", "glu-silu", "untied", "head-dim"])
def test_flops_are_the_counted_matrix_products(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = make_config(**(SETTINGS[name] | {"d_model": 48}))
    config.attn_config.attn_impl = "torch"  # its attention is over the whole row, as we count it
    model = make_model(config)
    tokens = torch.randint(0, 64, (2, 32))
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens)).sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert flops_per_token(config, 32) == pytest.approx(counted, rel=0.02)


def test_initial_weights_follow_the_schemes() -> None:
    settings = {"d_model": 256, "n_layers": 8, "n_heads": 4, "tie_word_embeddings": False}
    model = Decoder(make_config(**settings))
    model.init_weights(17)
    block = model.blocks[3]
    std = math.sqrt(2 / 256)
    assert block.attn.Wqkv.weight.std().item() == pytest.approx(std, rel=0.03)
    assert block.attn.out_proj.weight.std().item() == pytest.approx(std / 4, rel=0.03)
    down = math.sqrt(2 / 1024) / 4
    assert block.ffn.down_proj.weight.std().item() == pytest.approx(down, rel=0.03)
    assert model.lm_head.weight.std().item() == pytest.approx(std, rel=0.05)
    assert (block.norm_1.weight == 1).all() and (block.attn.Wqkv.bias == 0).all()
    init = InitConfig(name="baseline_", init_std=0.05, emb_init_std=0.2, init_div_is_residual=False)
    model = Decoder(make_config(**settings, init_config=init))
    model.init_weights(17)
    assert model.blocks[0].ffn.down_proj.weight.std().item() == pytest.approx(0.05, rel=0.03)
    assert model.wte.weight.std().item() == pytest.approx(0.2, rel=0.05)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    config = make_config()
    first, again, other = (Decoder(config) for _ in range(3))
    torch.manual_seed(1)
    first.init_weights(17)
    torch.manual_seed(2)
    again.init_weights(17)
    other.init_weights(18)
    assert torch.equal(first.wte.weight, again.wte.weight)
    assert not torch.equal(first.wte.weight, other.wte.weight)
    assert not torch.equal(first.blocks[0].attn.Wqkv.weight, first.blocks[1].attn.Wqkv.weight)


def test_root_hands_hidden_states_to_the_caller() -> None:
    model = make_model(make_config())
    tokens = torch.randint(0, 64, (1, 8))
    logits = Root(model)(tokens, None, lambda m, hidden: m.head(hidden))
    torch.testing.assert_close(logits, model.head(model(tokens)))
