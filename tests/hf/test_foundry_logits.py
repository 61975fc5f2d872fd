"""Models of LLM Foundry itself: logits that its MPTForCausalLM (0.22) gave, and published configs.

foundry_logits.json holds, for each set of options, what differs from `common` in the config.json
that it wrote, its weights' names and shapes, `{012}` standing for layers 0, 1 and 2, and the first
four logits of each row's last token, computed in float64 with the weights that `weights` makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.config_keys import read_settings
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder

GIVEN: dict[str, Any] = json.loads((Path(__file__).parent / "foundry_logits.json").read_text())
COMMON = GIVEN.pop("common")
TOKENS = (torch.arange(24) * 5 % 23).reshape(2, 12)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    sections = {k: merged(base[k], v) for k, v in changes.items() if isinstance(base.get(k), dict)}
    return {**base, **changes, **sections}


def weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Numbers from whole ones alone, the same everywhere: norms near 1, others within 0.6 of 0."""
    whole = {}
    for name, shape in shapes.items():
        layers = re.search(r"\{(\d*)\}", name)
        for layer in layers[1] if layers else "-":
            whole[name.replace(layers[0], layer) if layers else name] = shape
    state = {}
    for i, (name, shape) in enumerate(sorted(whole.items())):
        mixed = torch.arange(torch.Size(shape).numel()) * 7919 + i * 104729 + 1
        mixed = mixed * 2654435761 % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
        value = (mixed.double() / 2**31 - 1) * 0.6
        is_norm = len(shape) == 1 and name.endswith("weight")
        state[name] = (value + is_norm).reshape(shape).float()
    return state


def save(folder: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    """The model's folder; its weights."""
    config = merged(COMMON, GIVEN[name]["config"]) | changes
    (folder / "config.json").write_text(json.dumps(config))
    state = weights(GIVEN[name]["shapes"])
    save_file(state, folder / "model.safetensors")
    return state


def read(folder: Path) -> Decoder:
    config, state = from_hf(str(folder))
    model = Decoder(config)
    model.load_state_dict(state)
    return model.double()


@pytest.mark.parametrize("name", GIVEN)
def test_logits_are_those_of_llm_foundry(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    model = read(tmp_path)
    with torch.no_grad():
        found = model.head(model(TOKENS))[:, -1, :4]
    assert (found - torch.tensor(GIVEN[name]["logits"])).abs().max() < 2e-5


def test_a_norm_of_queries_and_keys_that_is_not_the_models_is_not_exported_as_such(
    tmp_path: Path,
) -> None:
    save(tmp_path, "qk_gn-rmsnorm-False-0.01")
    config, _ = from_hf(str(tmp_path))
    attn = config.attn_config
    assert (attn.norm_type, attn.norm_eps) == ("low_precision_layernorm", 1e-5)
    config.no_bias, config.attention_bias = True, False
    attn.rope, config.learned_pos_emb, config.ffn_config.ffn_type = True, False, "mptglu"
    attn.clip_qkv = None
    config.fill()
    with pytest.raises(UserError) as caught:
        choose_architecture(config, "Qwen3ForCausalLM")
    lines = [line for line in caught.value.problems if line.startswith("model.")]
    assert [line.split(":")[0] for line in lines] == [
        "model.attn_config.norm_type",
        "model.attn_config.norm_eps",
    ]


MPT_7B: dict[str, Any] = {  # as published, without what logits do not feel
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"init_div_is_residual": True, "name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 50432,
}
DBRX: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"],
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "emb_pdrop": 0.0,
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
    "initializer_range": 0.02,
    "max_seq_len": 32768,
    "model_type": "dbrx",
    "n_heads": 48,
    "n_layers": 40,
    "output_router_logits": False,
    "resid_pdrop": 0.0,
    "router_aux_loss_coef": 0.05,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 100352,
}


def test_published_configs_are_read_as_they_are() -> None:
    name, config = read_settings(MPT_7B)
    assert (name, config.norm_type) == ("MPTForCausalLM", "low_precision_layernorm")
    assert (config.learned_pos_emb, config.attn_config.alibi_bias_max) == (False, 8)
    story = merged(MPT_7B, {"attn_config": {"alibi_bias_max": 16, "clip_qkv": 6}})
    attn = read_settings(story)[1].attn_config
    assert (attn.alibi, attn.alibi_bias_max, attn.clip_qkv) == (True, 16, 6.0)
    without = merged(MPT_7B, {"attn_config": {"alibi": False}})
    config = read_settings(without)[1]
    assert (config.attn_config.alibi, config.learned_pos_emb) == (False, True)
    ffn = read_settings(DBRX)[1].ffn_config
    assert (ffn.moe_num_experts, ffn.moe_jitter_eps) == (16, None)


@pytest.mark.parametrize(("key", "value"), [("alibi_bias_max", 16), ("alibi", False)])
def test_what_transformers_class_passes_over_is_refused_with_the_reason(
    key: str, value: Any
) -> None:
    """It computes with 8, whatever it reads: whose model this is cannot be known."""
    written = merged(MPT_7B, {"attn_config": {key: value}, "architectures": ["MptForCausalLM"]})
    with pytest.raises(UserError, match=rf"attn_config\.{key} .*transformers passes.*MPTForCausal"):
        read_settings(written)
