"""The decoder against a plain float64 one, on every setting it has."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.kv_cache import TokenChunk
from llmfoundry.models.layers import FFNS
from llmfoundry.ops.activations import ACTIVATIONS
from llmfoundry.ops.attention.base import alibi_slopes
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe import model
from llmfoundry.recipe.model import InitConfig, ModelConfig
from llmfoundry.recipe.typed import Problem, build
from tests.models.plain_decoder import activation, document_logits, slope

GQA = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
YARN = {"type": "yarn", "factor": 9.0, "original_max_position_embeddings": 60}
LATENT = {
    "attn_type": "multihead_latent_attention",
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "rope": True,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
MIXED = {  # five layers: windows, a layer without rotation, and keys reused within and across
    "order": [
        {"name": "default"},
        {"order": [{"name": "local"}, {"name": "local-reused"}]},
        {"name": "reused", "repeat": 1},
        {"name": "far"},
    ],
    "overrides": {
        "local": {"attn_config": {"sliding_window_size": 3}},
        "local-reused": {"attn_config": {"sliding_window_size": 3, "reuse_kv_layer_idx": -1}},
        "reused": {"attn_config": {"reuse_kv_layer_idx": -3}},
        "far": {
            "attn_config": {
                "nope": True,
                "attn_temperature_tuning": {"floor_scale": 2, "attn_scale": 0.5},
            }
        },
    },
}
CHAIN = {  # the third layer takes the second's keys, which are the first's
    "order": [{"name": "default"}, {"name": "reused", "repeat": 2}],
    "overrides": {"reused": {"attn_config": {"reuse_kv_layer_idx": -1}}},
}
UNLIKE = {  # keys of a layer with another window, and rotated keys where queries are not
    "order": [{"name": "default"}, {"name": "near"}, {"name": "far"}],
    "overrides": {
        "near": {"attn_config": {"sliding_window_size": 1, "reuse_kv_layer_idx": -1}},
        "far": {"attn_config": {"nope": True, "reuse_kv_layer_idx": -2}},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "learned": {},
    "alibi": {"attn_config": {"alibi": True}},
    "alibi-6-heads": {"attn_config": {"alibi": True, "alibi_bias_max": 4}, "n_heads": 6},
    "alibi-gqa-window": {"attn_config": {"alibi": True, "sliding_window_size": 2, **GQA}},
    "rope": {"attn_config": {"rope": True}},
    "rope-gqa-theta": {"attn_config": {"rope": True, "rope_theta": 500.0, **GQA}},
    "rope-linear": {
        "attn_config": {"rope": True, "rope_hf_config": {"type": "linear", "factor": 2.5}}
    },
    "rope-dynamic": {
        "max_seq_len": 6,
        "attn_config": {"rope": True, "rope_hf_config": {"type": "dynamic", "factor": 2.0}},
    },
    "rope-llama3": {"attn_config": {"rope": True, "rope_hf_config": LLAMA3}},
    "rope-yarn": {"attn_config": {"rope": True, "rope_hf_config": YARN}},
    "rope-yarn-bounds": {
        "head_dim": 16,
        "attn_config": {
            "rope": True,
            "rope_hf_config": YARN
            | {"truncate": False, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.7},
        },
    },
    "nope": {"attn_config": {"nope": True}},
    "learned-off": {"learned_pos_emb": False, "attn_config": {"rope": True}},
    "temperature": {
        "attn_config": {
            "rope": True,
            "attn_temperature_tuning": {"floor_scale": 3, "attn_scale": 0.7},
        }
    },
    "mqa": {"attn_config": {"attn_type": "multiquery_attention"}},
    "latent": {"attn_config": LATENT, "norm_type": "rmsnorm", "no_bias": True},
    "latent-q": {  # values wider than keys, biases of norms
        "attn_config": LATENT | {"q_lora_rank": 9, "v_head_dim": 11, "norm_eps": 1e-2}
    },
    "latent-yarn": {
        "attn_config": LATENT | {"rope_hf_config": YARN | {"mscale": 0.5, "mscale_all_dim": 2.0}},
        "norm_type": "rmsnorm",
        "no_bias": True,
    },
    "latent-window": {
        "attn_config": LATENT | {"sliding_window_size": 3, "softmax_scale": 0.2},
        "n_heads": 3,
    },
    "latent-softcap": {
        "attn_config": LATENT | {"attn_logit_softcapping": 0.4, "attn_impl": "torch"}
    },
    "latent-overrides": {
        "n_layers": 3,
        "attn_config": LATENT | {"rope_hf_config": {"type": "linear", "factor": 2.0}},
        "block_overrides": {
            "order": [{"name": "default"}, {"name": "local"}, {"name": "far"}],
            "overrides": {name: MIXED["overrides"][name] for name in ("local", "far")},
        },
    },
    "clip": {"attn_config": {"clip_qkv": 0.3}},
    "qk-ln": {"attn_config": {"qk_ln": True, "rope": True, **GQA}},
    "qk-gn": {"attn_config": {"qk_gn": True, "rope": True, **GQA}},
    "qk-ln-of-its-own": {  # as LLM Foundry has it, whatever the model's norm
        "attn_config": {"qk_ln": True, "norm_type": "layernorm", "norm_eps": 1e-2, **GQA},
        "norm_type": "rmsnorm",
    },
    "qk-gn-of-its-own": {"attn_config": {"qk_gn": True, "norm_type": "rmsnorm"}, "norm_eps": 1e-2},
    "scale": {"attn_config": {"softmax_scale": 0.05}},
    "window": {"attn_config": {"sliding_window_size": 3, "rope": True}},
    "window-1": {"attn_config": {"sliding_window_size": 1}},
    "softcap": {"attn_config": {"attn_logit_softcapping": 0.4, "attn_impl": "torch"}},
    "sinks": {"attn_config": {"sinks": True, "rope": True, **GQA}},
    "sinks-window": {"attn_config": {"sinks": True, "alibi": True, "sliding_window_size": 3}},
    "head-dim": {"head_dim": 6, "attn_config": {"rope": True}},
    "glu-silu": {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": "silu"}},
    "glu-elu": {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": {"name": "elu", "alpha": 0.3}}},
    "dmoe": {"ffn_config": {"ffn_type": "dmoe", "moe_num_experts": 5, "moe_top_k": 2}},
    "dmoe-dbrx": {
        "ffn_config": {
            "ffn_type": "dmoe",
            "mlp_type": "glu",
            "ffn_act_fn": "silu",
            "ffn_hidden_size": 20,
            "moe_num_experts": 6,
            "moe_top_k": 3,
            "moe_normalize_expert_weights": 1,
            "shared_expert_hidden_size": 12,
        },
        "attn_config": {"rope": True, "clip_qkv": 8.0, **GQA},
        "no_bias": True,
        "tie_word_embeddings": False,
    },
    "glu-limit": {"ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": "silu", "glu_limit": 0.2}},
    "gpt-oss": {
        "ffn_config": {
            "ffn_type": "dmoe",
            "mlp_type": "glu",
            "ffn_act_fn": "quick_gelu",
            "glu_limit": 0.7,
            "ffn_hidden_size": 20,
            "moe_num_experts": 5,
            "moe_top_k": 2,
            "moe_router_bias": True,
            "moe_normalize_expert_weights": 1,
        },
        "attn_config": {"rope": True, "sinks": True, "sliding_window_size": 4, **GQA},
        "norm_type": "rmsnorm",
        "tie_word_embeddings": False,
    },
    "dmoe-dense-first": {
        "n_layers": 3,
        "ffn_config": {
            "ffn_type": "dmoe",
            "mlp_type": "glu",
            "ffn_hidden_size": 12,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "first_k_dense_replace": 1,
            "dense_hidden_size": 28,
            "moe_scoring_func": "sigmoid",
            "moe_n_group": 2,
            "moe_topk_group": 1,
            "moe_routed_scaling_factor": 1.5,
        },
    },
    "tanh": {"ffn_config": {"ffn_act_fn": "gelu_tanh"}, "expansion_ratio": 1.5},
    "relu": {"ffn_config": {"ffn_act_fn": "relu", "ffn_hidden_size": 20}},
    "rmsnorm": {"norm_type": "rmsnorm", "norm_eps": 1e-3},
    "low-layernorm": {"norm_type": "low_precision_layernorm"},
    "low-rmsnorm": {"norm_type": "low_precision_rmsnorm", "attn_config": {"qk_ln": True}},
    "no-bias": {"no_bias": True, "attn_config": {"rope": True, "qk_ln": True}},
    "no-bias-but-qkv": {"no_bias": True, "attention_bias": True},
    "no-qkv-bias": {"attention_bias": False, "attn_config": {"qk_gn": True}},
    "untied": {"tie_word_embeddings": False},
    "logit-scale": {"logit_scale": 0.3},
    "logit-scale-root": {"logit_scale": "inv_sqrt_d_model", "final_logit_softcapping": 0.8},
    "logit-cap": {"final_logit_softcapping": 2.0, "tie_word_embeddings": False},
    "embedding-fraction": {"embedding_fraction": 0.3, "tie_word_embeddings": False},
    "overrides": {
        "n_layers": 5,
        "block_overrides": MIXED,
        "attn_config": {"rope": True, "clip_qkv": 2.0, "qk_ln": True, **GQA},
    },
    "overrides-chain": {
        "n_layers": 3,
        "block_overrides": CHAIN,
        "attn_config": {"alibi": True, "qk_gn": True, "sliding_window_size": 4},
    },
    "overrides-unlike": {
        "n_layers": 3,
        "block_overrides": UNLIKE,
        "attn_config": {"rope": True, "sliding_window_size": 4, **GQA},
    },
}
SIZES = {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "vocab_size": 64}
IMPLS = [  # what each setting is computed by; `torch` alone has a softcap on a CPU
    (name, impl)
    for name, settings in SETTINGS.items()
    for impl in ("torch", "sdpa")
    if settings.get("attn_config", {}).get("attn_impl", impl) == impl
]


def make_config(**settings: Any) -> ModelConfig:
    """A filled `model` section; init_config may be an object, all else is as users write it."""
    problems: list[Problem] = []
    init = settings.pop("init_config", InitConfig())
    config = build(ModelConfig, SIZES | copy.deepcopy(settings), problems)
    config.init_config = init
    assert not problems and not list(config.check()), [*problems, *config.check()]
    config = config.resolve()
    return config


def make_model(config: ModelConfig) -> Decoder:
    """Every parameter random, biases and norms too, so that each of them shows."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def random_tokens(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed))


def plain_logits(
    weights: dict[str, torch.Tensor],
    config: ModelConfig,
    tokens: torch.Tensor,
    lengths: list[list[int]],
) -> torch.Tensor:
    rows = [
        torch.cat([document_logits(d, weights, config) for d in row.split(n)])
        for row, n in zip(tokens, lengths, strict=True)
    ]
    return torch.stack(rows)


def plain_weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "impl"), IMPLS)
def test_logits_and_gradients_equal_the_plain_decoders(name: str, impl: str) -> None:
    config = make_config(**SETTINGS[name])
    config.attn_config.attn_impl = impl
    model = make_model(config).double()
    tokens, lengths = random_tokens(2, 13), [[13], [4, 1, 8]]
    logits = model.head(model(tokens, PackedLayout.from_lengths(lengths)))
    leaves = plain_weights(model)
    expected = plain_logits(leaves, config, tokens, lengths)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=2e-6)  # rotary tables are fp32
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).double()
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad((logits * weight).sum(), list(parameters.values()))
    plain = torch.autograd.grad((expected * weight).sum(), list(leaves.values()))
    for (key, _), ours, theirs in zip(parameters.items(), grads, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("name", SETTINGS)
def test_fp32_logits_and_loss_are_near_float64(name: str) -> None:
    model = make_model(make_config(**SETTINGS[name]))
    tokens, labels = random_tokens(2, 16, seed=4), random_tokens(2, 16, seed=5)
    with torch.no_grad():
        expected = plain_logits(plain_weights(model), model.config, tokens, [[16], [16]])
        hidden = model(tokens)
        torch.testing.assert_close(model.head(hidden).double(), expected, rtol=1e-4, atol=1e-4)
        log_probabilities = expected.flatten(0, 1).log_softmax(1)
        nats = -log_probabilities.gather(1, labels.flatten()[:, None]).sum()
        assert model.loss(hidden, labels).item() == pytest.approx(nats.item(), rel=1e-5)


def cached(model: Decoder, parts: Sequence[Tensor], length: int) -> list[Tensor]:
    """Hidden states (B, T, D) of the parts (B, T) of rows, each row in a slot of its own."""
    rows, device = len(parts[0]), torch.device("cpu")
    dtype = model.embedding_weight.dtype
    cache = model.new_slots(slots=rows, length=length, device=device, dtype=dtype)
    found, past = list[Tensor](), 0
    for part in parts:
        pieces = [TokenChunk(slot, past, tuple(new), 0) for slot, new in enumerate(part.tolist())]
        found.append(model(cache.begin(pieces), cache=cache).unflatten(1, part.shape)[0])
        past += part.shape[1]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_key_value_cache_gives_the_logits_of_the_whole_row(name: str) -> None:
    config = make_config(**SETTINGS[name])
    if config.attn_config.rope_hf_config.type == "dynamic":
        config.max_seq_len = 12  # beyond it rows of every length have frequencies of their own
    model = make_model(config)
    tokens = random_tokens(3, 12, seed=5)
    with torch.no_grad():
        parts = cached(model, tokens.split([5, 1, 4, 1, 1], dim=1), 12)
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


def test_cached_keys_turn_as_the_rows_present_length_says_under_dynamic_frequencies() -> None:
    """With one layer equal to the row at once; in deeper ones what went in was made earlier."""
    config = make_config(**SETTINGS["rope-dynamic"], n_layers=1)  # stretched beyond 6 tokens
    model = make_model(config)
    tokens = random_tokens(2, 12, seed=6)
    with torch.no_grad():
        parts = cached(model, tokens.split([4, *[1] * 8], dim=1), 12)
        for end, hidden in enumerate(parts, start=4):
            whole = model(tokens[:, :end])
            torch.testing.assert_close(hidden[:, -1], whole[:, -1], rtol=1e-5, atol=1e-5)


def test_the_cache_holds_only_layers_that_make_their_keys() -> None:
    config = make_config(**SETTINGS["overrides"])
    cache = make_model(config).new_slots(
        slots=2, length=9, device=torch.device("cpu"), dtype=torch.float32
    )
    assert cache._keys.shape == cache._values.shape == (3, 2, 9, 2, 6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str) -> None:
    arguments: dict[str, Any] = {argument: 0.3 for argument in model.ACTIVATIONS[name]}
    arguments |= {"approximate": "tanh"} if name == "gelu" else {}
    arguments |= {"min_val": -0.2, "max_val": 0.7} if name == "hardtanh" else {}
    x = torch.linspace(-7, 7, 101, dtype=torch.float64)
    for written in (name, {"name": name, **arguments}):
        config = make_config(ffn_config={"ffn_act_fn": written})
        act = FFNS["mptmlp"](config).act.function
        torch.testing.assert_close(act(x), activation(x, written), rtol=1e-9, atol=1e-9)


def test_every_activation_of_the_recipe_exists() -> None:
    assert ACTIVATIONS.keys() == model.ACTIVATIONS.keys()


def test_packed_documents_do_not_see_each_other() -> None:
    model = make_model(make_config())
    tokens = random_tokens(1, 16, seed=6)
    changed = tokens.clone()
    changed[0, :9] = (changed[0, :9] + 1) % 64
    layout = PackedLayout.from_lengths([[9, 7]])
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
