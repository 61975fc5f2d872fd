"""Folders of LLM Foundry's MPT, with megablocks' and its own mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder
from tests.hf.random_models import (
    ALIBI,
    GQA,
    MOE,
    ROPE,
    ROWS,
    decoder,
    logits,
    rewrite,
    rows,
    settings,
    stack,
)
from tests.hf.test_hf_import import DBRX, DBRX_FEW, make, read

# config.json as LLM Foundry's MPTConfig saves it, with all the defaults that it fills in
ATTENTION: dict[str, Any] = {
    "alibi": False,
    "alibi_bias_max": 8,
    "attn_impl": "flash",
    "attn_pdrop": 0.0,
    "attn_temperature_tuning": {"attn_scale": 0.0, "floor_scale": 8192},
    "attn_type": "grouped_query_attention",
    "attn_uses_sequence_id": True,
    "clip_qkv": 0.5,
    "fused_qkv": True,
    "kv_dim": None,
    "kv_n_heads": 2,
    "prefix_lm": False,
    "qk_gn": False,
    "qk_ln": False,
    "rope": True,
    "rope_dail_config": {"pos_idx_in_fp32": True, "type": "original", "xpos_scale_base": 512},
    "rope_hf_config": {"factor": 1.0, "type": "no_scaling"},
    "rope_impl": "dail",
    "rope_theta": 777.0,
    "sliding_window_size": -1,
    "softmax_scale": None,
}
MIXTURE: dict[str, Any] = {
    "bf16": False,
    "fc_type": {"name": "torch"},
    "ffn_act_fn": {"name": "silu"},
    "ffn_hidden_size": 24,
    "ffn_type": "mb_dmoe",
    "fp16": False,
    "memory_optimized_mlp": True,
    "mlp_impl": "grouped",
    "mlp_type": "glu",
    "moe_jitter_eps": 0.0,
    "moe_loss_weight": 0.05,
    "moe_normalize_expert_weights": 1,
    "moe_num_experts": 5,
    "moe_top_k": 3,
    "moe_world_size": 1,
    "return_bias": False,
    "uniform_expert_assignment": False,
}
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": ATTENTION,
    "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
    "d_model": 32,
    "emb_pdrop": 0.0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "fc_type": "torch",
    "ffn_config": MIXTURE,
    "init_config": {"name": "kaiming_normal_", "verbose": 0, "init_nonlinearity": "relu"},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 24,
    "model_type": "mpt",
    "n_heads": 4,
    "n_layers": 2,
    "no_bias": True,
    "norm_eps": 1e-05,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "tokenizer_name": "gpt-4",
    "torch_dtype": "float32",
    "use_cache": False,
    "use_pad_tok_in_ffn": True,
    "vocab_size": ROWS,
}


FILE = "model.safetensors"


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["mb_dmoe", "torch_dmoe"])
def test_the_architecture_of_dbrx_gives_transformers_logits(kind: str, tmp_path: Path) -> None:
    """DBRX was trained as such an MPT: its weights differ in the names of norms and attention."""
    rope = {"rope_type": "default", "rope_theta": 777.0}
    theirs = make("Dbrx", {**DBRX, "ffn_config": DBRX_FEW, "rope_parameters": rope})
    weights = {n.replace(".norm_attn_norm.", "."): w for n, w in theirs.state_dict().items()}
    save(tmp_path, MPT, weights)
    rewrite(tmp_path, MPT, "ffn_config.ffn_type", kind)
    with torch.no_grad():
        expected = theirs(rows()).logits
    assert expected.std() > 0.05
    assert (logits(read(tmp_path), rows()) - expected).abs().max() < 1e-5
    ffn = from_hf(str(tmp_path))[0].ffn_config
    said = (ffn.moe_balancing, ffn.moe_loss_weight, ffn.moe_lbl_scope)
    assert (
        said == {"mb_dmoe": ("loss", 0.05, "microbatch"), "torch_dmoe": ("none", None, None)}[kind]
    )


def test_norms_and_attention_may_be_one_module(tmp_path: Path) -> None:
    theirs = make("Dbrx", {**DBRX, "ffn_config": DBRX_FEW})
    save(tmp_path, MPT, theirs.state_dict())
    config = {**MPT, "fuse_norm_attn_norm": True}
    rewrite(tmp_path, config, "attn_config.rope_theta", 10000.0)
    with torch.no_grad():
        assert (logits(read(tmp_path), rows()) - theirs(rows()).logits).abs().max() < 1e-5


def renamed(model: Decoder) -> dict[str, Tensor]:
    """Our weights under LLM Foundry's names."""
    inner = {"ffn.router.": "ffn.router.layer.", "ffn.experts.": "ffn.experts.mlp."}
    state = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in inner.items():
            name = name.replace(ours, theirs)
        state[name if name.startswith("lm_head") else f"transformer.{name}"] = weight
    return state


def test_mlp_experts_alibi_and_norms_of_queries_and_keys_come_back_bit_for_bit(
    tmp_path: Path,
) -> None:
    ffn = MOE | {"mlp_type": "mlp", "ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}
    ffn |= {"moe_balancing": "none"}
    model = decoder(settings(attn=ALIBI | GQA | {"qk_ln": True}, ffn=ffn, no_bias=True))
    said = {"alibi": True, "rope": False, "qk_ln": True, "clip_qkv": None}
    theirs = {"ffn_type": "torch_dmoe", "mlp_type": "mlp", "moe_top_k": 2}
    theirs |= {"ffn_act_fn": ffn["ffn_act_fn"], "moe_normalize_expert_weights": None}
    config = {
        **MPT,
        "attn_config": ATTENTION | said,
        "ffn_config": MIXTURE | theirs,
        "tie_word_embeddings": True,
    }
    save(tmp_path, config, renamed(model))
    back = read(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    assert (logits(back, rows()) - logits(model, rows())).abs().max() < 1e-6


@pytest.mark.parametrize("hidden", [None, 40])
def test_a_shared_expert_is_as_wide_as_the_others_unless_said(
    hidden: int | None, tmp_path: Path
) -> None:
    ffn = MOE | {"moe_balancing": "none", "shared_expert_hidden_size": hidden or 24}
    model = decoder(settings(attn=ROPE | GQA, ffn=ffn, no_bias=True, tie_word_embeddings=False))
    theirs = {"shared_expert": True, "shared_expert_weighted_sum": False, "moe_loss_weight": 0}
    theirs |= {"moe_top_k": 2, "moe_normalize_expert_weights": None}
    if hidden is not None:
        theirs["shared_expert_hidden_size"] = hidden
    attention = ATTENTION | {"clip_qkv": None, "rope_theta": 500000.0}
    config = {**MPT, "attn_config": attention, "ffn_config": MIXTURE | theirs}
    weights = {n.replace(".shared.", ".shared_expert."): w for n, w in renamed(model).items()}
    save(tmp_path, config, weights)
    assert (logits(read(tmp_path), rows()) - logits(model, rows())).abs().max() < 1e-6


def test_dense_models_that_transformers_mpt_is_not_are_read_as_well(tmp_path: Path) -> None:
    ffn = {"ffn_type": "mptglu", "ffn_act_fn": "silu", "ffn_hidden_size": 48}
    model = decoder(settings(attn=ROPE | GQA | {"qk_gn": True}, ffn=ffn, logit_scale=0.3))
    said = {"qk_gn": True, "clip_qkv": None, "rope_theta": 500000.0}
    theirs = {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 48}
    config = {
        **MPT,
        "attn_config": ATTENTION | said,
        "ffn_config": theirs,
        "logit_scale": 0.3,
        "no_bias": False,
        "tie_word_embeddings": True,
    }
    save(tmp_path, config, renamed(model))
    assert torch.equal(logits(read(tmp_path), rows()), logits(model, rows()))


def test_layers_that_reuse_keys_and_values_are_read(tmp_path: Path) -> None:
    again = {"reuse_kv_layer_idx": -1}
    model = decoder(settings(attn=ROPE | GQA, no_bias=True, **stack("default again", again=again)))
    overrides = {
        "order": [{"name": "default"}, {"name": "again"}],
        "overrides": {"again": {"attn_config": again}},
    }
    config = {
        **MPT,
        "attn_config": ATTENTION | {"clip_qkv": None, "rope_theta": 500000.0},
        "block_overrides": overrides,
        "ffn_config": {"ffn_type": "mptmlp", "ffn_act_fn": {"name": "gelu"}},
        "tie_word_embeddings": True,
    }
    weights = renamed(model)
    assert "transformer.blocks.1.attn.Wq.weight" in weights, "this is what the test is about"
    save(tmp_path, config, weights)
    assert (logits(read(tmp_path), rows()) - logits(model, rows())).abs().max() < 1e-6


def test_experts_have_no_biases_where_the_other_layers_have(tmp_path: Path) -> None:
    model = decoder(
        settings(attn=ROPE | GQA, ffn=MOE | {"moe_balancing": "none"}, tie_word_embeddings=False)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and name.endswith("_bias"):
                parameter.zero_()
    weights = {n: w for n, w in renamed(model).items() if not n.endswith("_bias")}
    theirs = {"ffn_type": "torch_dmoe", "moe_top_k": 2, "moe_normalize_expert_weights": 0}
    config = {
        **MPT,
        "attn_config": ATTENTION | {"clip_qkv": None, "rope_theta": 500000.0},
        "ffn_config": MIXTURE | theirs,
        "no_bias": False,
    }
    save(tmp_path, config, weights)
    assert (logits(read(tmp_path), rows()) - logits(model, rows())).abs().max() < 1e-6
    # megablocks' own bias is one for all experts of a layer
    save(tmp_path, config, weights | {"transformer.blocks.0.ffn.experts.bias": torch.ones(32)})
    with pytest.raises(UserError, match=r"^transformer\.blocks\.0\.ffn\.experts\.bias: .*no such"):
        from_hf(str(tmp_path))


REFUSED = [
    ("ffn_config.ffn_type", "mb_moe", "ffn_type: mb_moe is"),
    ("ffn_config.ffn_type", "te_ln_mlp", "ffn_type: 'te_ln_mlp' is not a choice"),
    ("ffn_config.shared_expert_weighted_sum", True, "shared_expert_weighted_sum; the decoder"),
    ("ffn_config.ffn_act_fn", None, "ffn_config.ffn_act_fn is missing"),
    ("ffn_config.moe_bias_rate", 1, "unknown key 'ffn_config.moe_bias_rate'"),
    ("attn_config.rope_dail_config", {"type": "xpos"}, "attn_config.rope_dail_config; the"),
    ("attn_config.prefix_lm", True, "attn_config.prefix_lm; the decoder has nothing"),
    ("attn_config.kv_dim", 16, "attn_config.kv_dim; the decoder has nothing"),
    ("attn_config.rope_hf_config", {"type": "longrope"}, "rope_hf_config.type: 'longrope'"),
]


@pytest.mark.parametrize(("key", "value", "refusal"), REFUSED)
def test_what_the_decoder_has_nothing_for_is_refused_by_key(
    key: str, value: Any, refusal: str, tmp_path: Path
) -> None:
    save(tmp_path, MPT, {"transformer.wte.weight": torch.zeros(ROWS, 32)})
    rewrite(tmp_path, MPT, key, value)
    with pytest.raises(UserError, match=f"^config.json: .*{refusal}"):
        from_hf(str(tmp_path))
