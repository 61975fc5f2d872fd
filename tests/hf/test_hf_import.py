"""Models that transformers made and saved, as `from_hf` reads them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import ANYTHING, REQUIRED
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.layer_keys import FLOOR, SCALE
from llmfoundry.hf.open_class import load_config
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder
from tests.hf.random_models import ROWS, logits, rewrite, written

LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MOSAIC_SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 24,
}
DBRX = {
    **MOSAIC_SHAPE,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 1, "moe_top_k": 1},
}
FULL_ROTARY = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 1.0}
SCALED = {"attention_multiplier": 0.2}
FEW = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
LOCAL_FEW = {**FEW, "num_local_experts": 5}
OLMOE = {**LLAMA_SHAPE, "num_experts": 1, "num_experts_per_tok": 1}
QWEN_MOE = {**LLAMA_SHAPE, **FEW, "num_experts": 5, "moe_intermediate_size": 24}
DEEPSEEK = {
    **LLAMA_SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
}
DBRX_FEW = {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 17}
MSCALED = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}  # which scales the softmax too
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1000,
}
LLAMA4 = {
    "intermediate_size_mlp": 40,
    "moe_layers": [],
    "no_rope_layers": [0, 0],
    "head_dim": 16,
    "floor_scale": 5,
    "use_qk_norm": False,
}
LLAMA4_MIXED = {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}
MIXED = ["full_attention", "sliding_attention"]
GEMMA = {
    **LLAMA_SHAPE,
    "head_dim": 8,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "attn_implementation": "eager",  # without it transformers 5.0 passes the softcap over
}
NEO = {
    **{key: LLAMA_SHAPE[key] for key in ("vocab_size", "hidden_size", "bos_token_id")},
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 24,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
}

GPT_OSS = {
    **LLAMA_SHAPE,
    **LOCAL_FEW,
    "head_dim": 16,
    "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}

MADE = [  # transformers' config and class, and the settings
    ("Llama", LLAMA_SHAPE),
    ("Llama", {**LLAMA_SHAPE, "tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-2}),
    ("Llama", {**LLAMA_SHAPE, "attention_bias": True, "num_key_value_heads": 1}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": LLAMA3}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": YARN}),
    ("Qwen2", {**LLAMA_SHAPE, "rope_parameters": YARN | {"attention_factor": None}}),
    ("Qwen3", {**LLAMA_SHAPE, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    ("Qwen2", {**LLAMA_SHAPE, "rope_parameters": YARN | {"mscale": 0.7, "factor": None}}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": YARN | {"attention_factor": 1.5, "mscale": 2.0}}),
    ("Llama", {**LLAMA_SHAPE, "rope_parameters": YARN | {"truncate": False, "beta_slow": 3}}),
    ("Llama", {**LLAMA_SHAPE, "hidden_act": "quick_gelu", "mlp_bias": True}),
    ("Mistral", {**LLAMA_SHAPE, "sliding_window": None}),
    ("Mistral", {**LLAMA_SHAPE, "sliding_window": 6}),
    ("Qwen2", LLAMA_SHAPE),
    ("Qwen2", {**LLAMA_SHAPE, "use_sliding_window": True, "sliding_window": 6}),
    (
        "Qwen2",
        {**LLAMA_SHAPE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    ("Qwen3", {**LLAMA_SHAPE, "head_dim": 16}),
    (
        "Qwen3",
        {
            **LLAMA_SHAPE,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": MIXED[::-1],
        },
    ),
    ("SmolLM3", {**LLAMA_SHAPE, "num_hidden_layers": 5}),
    ("SmolLM3", {**LLAMA_SHAPE, "no_rope_layers": [0, 0], "attention_bias": True}),
    (
        "SmolLM3",
        {
            **LLAMA_SHAPE,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    ("VaultGemma", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.2}),
    ("VaultGemma", {**GEMMA, "tie_word_embeddings": False, "attn_logit_softcapping": None}),
    ("Llama4", {**LLAMA_SHAPE, **LLAMA4, "tie_word_embeddings": True}),
    ("Llama4", {**LLAMA_SHAPE, **LLAMA4, **LLAMA4_MIXED, "attention_bias": True}),
    ("GPTNeo", NEO),
    ("Granite", {**LLAMA_SHAPE, **SCALED}),
    ("Granite", {**LLAMA_SHAPE, **SCALED, "logits_scaling": 3.0}),
    ("Arcee", {**LLAMA_SHAPE, "hidden_act": "relu", "mlp_bias": True}),
    ("Starcoder2", LLAMA_SHAPE),
    ("Starcoder2", {**LLAMA_SHAPE, "use_bias": False, "num_key_value_heads": 4}),
    ("StableLm", {**LLAMA_SHAPE, "rope_parameters": FULL_ROTARY}),
    ("StableLm", {**LLAMA_SHAPE, "rope_parameters": FULL_ROTARY, "use_qkv_bias": True}),
    ("Starcoder2", {**LLAMA_SHAPE, "sliding_window": 6, "hidden_act": "leaky_relu"}),
    ("Olmoe", OLMOE),
    ("Olmoe", {**LLAMA_SHAPE, **FEW, "num_experts": 5}),
    ("Olmoe", {**LLAMA_SHAPE, **FEW, "num_experts": 5, "norm_topk_prob": True}),
    ("Mixtral", {**LLAMA_SHAPE, **LOCAL_FEW}),
    ("Mixtral", {**LLAMA_SHAPE, **LOCAL_FEW, "sliding_window": 6, "router_jitter_noise": 0.1}),
    ("Mixtral", {**LLAMA_SHAPE, "num_local_experts": 1, "num_experts_per_tok": 1}),
    ("Qwen3Moe", QWEN_MOE),
    ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True, "attention_bias": True, "head_dim": 16}),
    ("Qwen3Moe", {**QWEN_MOE, "use_sliding_window": True, "sliding_window": 6}),
    ("GraniteMoe", {**LLAMA_SHAPE, **LOCAL_FEW, **SCALED, "logits_scaling": 3.0}),
    ("GraniteMoeShared", {**LLAMA_SHAPE, **LOCAL_FEW, "shared_intermediate_size": 12}),
    ("GraniteMoeShared", {**LLAMA_SHAPE, **LOCAL_FEW, "attention_bias": True}),
    ("GptOss", GPT_OSS),
    ("GptOss", GPT_OSS | {"rope_parameters": None}),  # YaRN, as gpt-oss has it
    ("GptOss", {**GPT_OSS, "layer_types": MIXED, "swiglu_limit": 0.2, "attention_bias": False}),
    ("DeepseekV2", DEEPSEEK),
    ("DeepseekV2", {**DEEPSEEK, "rope_parameters": MSCALED}),
    (
        "DeepseekV3",
        {
            **DEEPSEEK,
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            "rope_parameters": MSCALED,
        },
    ),
    (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": 12,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 16.0,
        },
    ),
    ("DeepseekV3", {**DEEPSEEK, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}),
    (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": 12,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_shared_experts": 1,
        },
    ),
    ("GPT2", GPT2_SHAPE),
    ("GPT2", {**GPT2_SHAPE, "n_inner": 40, "activation_function": "gelu"}),
    ("GPTBigCode", GPT2_SHAPE),
    ("Mpt", {**MOSAIC_SHAPE, "attn_config": {"softmax_scale": 0.2, "clip_qkv": 0.5}}),
    ("Dbrx", DBRX),
    ("Dbrx", {**DBRX, "ffn_config": DBRX_FEW}),
    ("Dbrx", {**DBRX, "ffn_config": {**DBRX_FEW, "moe_normalize_expert_weights": None}}),
]


def make(kind: str, options: dict[str, Any], *, head: bool = True) -> Any:
    """A model of transformers with every weight and bias away from its neutral start."""
    config_class = {"Llama4": "Llama4TextConfig"}.get(kind, f"{kind}Config")
    config = getattr(transformers, config_class)(**options)
    ending = {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM") if head else "Model"
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}{ending}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


def read(folder: Path) -> Decoder:
    config, state = from_hf(str(folder))
    model = Decoder(config)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(("kind", "options"), MADE)
def test_a_model_of_transformers_gives_the_same_logits(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make(kind, options)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, ROWS, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.05
    assert (logits(read(tmp_path), tokens) - expected).abs().max() < 1e-5


def test_gpt2_saved_without_its_head_and_with_buffers_is_read(tmp_path: Path) -> None:
    theirs = make("GPT2", GPT2_SHAPE, head=False)
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in weights, "this is what the test is about"
    weights["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)  # as the first GPT-2's file has it
    save_file(weights, tmp_path / "model.safetensors")
    tokens = torch.randint(0, ROWS, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).last_hidden_state @ theirs.wte.weight.T
    assert (logits(read(tmp_path), tokens) - expected).abs().max() < 1e-5


def test_biases_that_are_all_zero_are_left_out(tmp_path: Path) -> None:
    theirs = make("GPT2", GPT2_SHAPE)
    theirs.save_pretrained(tmp_path)
    assert from_hf(str(tmp_path))[0].no_bias is False
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    theirs.save_pretrained(tmp_path)
    assert from_hf(str(tmp_path))[0].no_bias is True


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_that_config_json_leaves_out_mean_what_transformers_takes(name: str) -> None:
    """The table's defaults against those of transformers' own config classes."""
    architecture = ARCHITECTURES[name]
    defaults = transformers.AutoConfig.for_model(architecture.model_type).to_dict()
    assert len(architecture.fields) > 5
    keys = [(f.theirs, f.default) for f in (*architecture.fields, *architecture.fixed)]
    for key, default in keys:
        if default in (REQUIRED, ANYTHING, None):
            continue  # None: both derive it from other keys, or both have it off
        value: Any = defaults
        for part in key.split("."):
            value = value[part]
        assert value == default, key
    partial = defaults.get("rope_parameters") or {}
    if architecture.tuned:
        assert (defaults["floor_scale"], defaults["attn_scale"]) == (FLOOR, SCALE)
        assert defaults["attn_temperature_tuning"] is True
    if architecture.partial_rotary is not None:
        assert partial.get("partial_rotary_factor", 1.0) == architecture.partial_rotary
        assert partial["rope_theta"] == architecture.theta
    windows = architecture.windows
    if windows is not None:
        on = transformers.AutoConfig.for_model(architecture.model_type, use_sliding_window=True)
        if windows.sizes:
            size = "window_size" if windows.key == "attention_types" else "sliding_window"
            assert getattr(on, size) == windows.default
        assert windows.switch == ("use_sliding_window" in defaults)


def different(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return {type(None): 7, str: "other", list: [0]}.get(type(value)) or value + 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_that_the_decoder_cannot_follow_are_refused_one_by_one(
    name: str, tmp_path: Path
) -> None:
    folder, config = written(name, tmp_path)
    for fixed in ARCHITECTURES[name].fixed:
        rewrite(folder, config, fixed.theirs, different(fixed.value))
        if fixed.default is ANYTHING:
            from_hf(str(folder))
            continue
        with pytest.raises(UserError, match=f"^config.json: {fixed.theirs} "):
            from_hf(str(folder))
    for field in ARCHITECTURES[name].fields:
        if field.choices is not None:
            rewrite(folder, config, field.theirs, "laplace")
            with pytest.raises(UserError, match=f"^config.json: {field.theirs} 'laplace'"):
                from_hf(str(folder))
    rewrite(folder, config, "is_causal", False)  # each token sees all others, as in embedders
    with pytest.raises(UserError, match=r"^config.json: is_causal false"):
        from_hf(str(folder))
    rewrite(folder, config, "quantization_config", {"bits": 4})
    with pytest.raises(UserError, match=r"^config.json: quantization_config"):
        from_hf(str(folder))


def test_an_unknown_kind_and_a_missing_key_are_refused(tmp_path: Path) -> None:
    folder, config = written("GPT2LMHeadModel", tmp_path)
    rewrite(folder, config, "model_type", "mamba")
    with pytest.raises(UserError, match=r"model_type 'mamba' cannot be read .*llama"):
        from_hf(str(folder))
    del config["n_layer"]
    rewrite(folder, config, "n_head", 4)
    with pytest.raises(UserError, match=r"^config.json: n_layer is missing"):
        from_hf(str(folder))


KINDS: list[tuple[str, str, Any]] = [
    ("LlamaForCausalLM", "hidden_size", None),
    ("LlamaForCausalLM", "num_attention_heads", [2]),
    ("LlamaForCausalLM", "rms_norm_eps", "small"),
    ("LlamaForCausalLM", "rope_parameters", 3),
    ("LlamaForCausalLM", "rope_theta", "x"),
    ("LlamaForCausalLM", "hidden_act", {}),
    ("GraniteForCausalLM", "logits_scaling", 0),
    ("SmolLM3ForCausalLM", "no_rope_layers", 3),
    ("DbrxForCausalLM", "ffn_config.moe_top_k", None),
    ("DbrxForCausalLM", "ffn_config", "x"),
]


@pytest.mark.parametrize(("name", "key", "value"), KINDS)
def test_values_of_another_kind_are_refused_by_key(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder, config = written(name, tmp_path)
    rewrite(folder, config, key, value)
    with pytest.raises(UserError, match=f"(?m)^config.json: {key}"):
        from_hf(str(folder))


YARNS: list[tuple[dict[str, Any], str]] = [
    ({"factor": None, "original_max_position_embeddings": 0}, "rope_parameters.factor is missing"),
    ({"factor": None, "original_max_position_embeddings": "9"}, "rope_parameters.factor is missi"),
    ({"factor": "x"}, "rope_parameters.factor: .*not a number"),
    ({"factor": 0.5}, ".*rope_hf_config.factor: 0.5 is too small"),
    ({"original_max_position_embeddings": 0}, ".*original_max_position_embeddings: 0 is too small"),
    ({"truncate": "perhaps"}, "rope_parameters.truncate: "),
    ({"rope_theta": 1.0}, ".*rope_theta: 1; yarn needs a number above 1"),
]


@pytest.mark.parametrize(("changes", "line"), YARNS)
def test_values_of_yarn_that_cannot_be_are_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    folder, config = written("LlamaForCausalLM", tmp_path)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}
    rope = yarn | {"rope_theta": 10000.0} | changes
    config |= {"rope_parameters": rope, "rope_scaling": None, "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"(?m)^config.json: {line}"):
        from_hf(str(folder))


def test_a_kind_of_scaling_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder, config = written("LlamaForCausalLM", tmp_path)
    rewrite(folder, config, "rope_scaling", {"type": ["yarn"], "factor": 4})
    with pytest.raises(UserError, match=r"^config.json: rope_scaling.type: .* is not a text"):
        from_hf(str(folder))


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = written("GPT2LMHeadModel", tmp_path)
    file = folder / "model.safetensors"
    whole = load_file(file)
    one, bias = "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.bias"

    save_file({k: v for k, v in whole.items() if k != one}, file)
    with pytest.raises(UserError, match=f"^{one}: the tensor is missing"):
        from_hf(str(folder))
    save_file(whole | {"transformer.h.0.router": whole[one].clone()}, file)
    with pytest.raises(UserError, match=r"^transformer\.h\.0\.router: the decoder has no such"):
        from_hf(str(folder))
    save_file(whole | {one: whole[one][:, 1:].clone(), bias: whole[bias][1:].clone()}, file)
    with pytest.raises(UserError, match=rf"{one} .*\(32, 128\).* is \(32, 127\)"):
        from_hf(str(folder))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        from_hf(str(folder))
    file.unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        from_hf(str(folder))


@pytest.mark.parametrize("kind", ["Llama", "Llama4", "Mixtral"])
def test_each_part_of_a_joined_matrix_has_its_own_shape(kind: str, tmp_path: Path) -> None:
    options = {"Llama4": LLAMA4, "Mixtral": LOCAL_FEW, "Llama": {"attention_bias": True}}[kind]
    make(kind, {**LLAMA_SHAPE, **options}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    q, k = (
        next(name for name in whole if f"1.self_attn.{part}_proj.weight" in name) for part in "qk"
    )
    width = len(whole[k]) // 2
    moved = {q: torch.cat([whole[q], whole[k][:width]]), k: whole[k][width:].clone()}
    changes = [
        moved,
        *({q: t.clone()} for t in (whole[q].flatten(), whole[q][None], whole[q].T[:1])),
    ]
    if kind == "Llama":
        changes.append({q.replace("weight", "bias"): whole[q.replace("weight", "bias")][:, None]})
    for change in changes:
        save_file(whole | change, file)
        with pytest.raises(
            UserError, match=r"makes model\.layers\.1\.self_attn\.q_proj\."
        ) as error:
            from_hf(str(tmp_path))
        assert len(error.value.lines()) == 1


def test_one_file_comes_before_the_index_that_an_earlier_save_left(tmp_path: Path) -> None:
    make("Llama", LLAMA_SHAPE).save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = make("Llama", {**LLAMA_SHAPE, "rms_norm_eps": 0.1})
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists(), "transformers removes shards alone"
    tokens = torch.randint(0, ROWS, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(logits(read(tmp_path), tokens), theirs(tokens).logits)


def test_a_softmax_scale_that_the_decoder_does_not_have_is_refused(tmp_path: Path) -> None:
    for rope in ({"mscale_all_dim": 1.3}, {**MSCALED, "attention_factor": 1.1}):
        make("DeepseekV2", {**DEEPSEEK, "rope_parameters": YARN | rope}).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=r"rope_parameters\.mscale_all_dim without mscale, or"):
            from_hf(str(tmp_path))


def test_rope_scaling_stands_in_the_place_of_rope_parameters(tmp_path: Path) -> None:
    theirs = make("Llama", LLAMA_SHAPE)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": {"type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, ROWS, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(logits(read(tmp_path), tokens), theirs(tokens).logits)


def test_a_folder_that_is_not_there_or_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint: there is no folder"):
        from_hf(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"config\.json: is missing"):
        from_hf(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_config_json_is_read_in_every_encoding_of_json(tmp_path: Path, encoding: str) -> None:
    folder, config = written("LlamaForCausalLM", tmp_path)
    (folder / "config.json").write_bytes(json.dumps(config).encode(encoding))
    assert from_hf(str(folder))[0].n_layers == 2


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff\xfe{", b'{"a":' * 10**5, b"1" * 5000]
)
def test_config_json_that_is_none_is_one_line(tmp_path: Path, content: bytes) -> None:
    """By import and by `generate`, which opens a folder in its own way."""
    folder, _ = written("LlamaForCausalLM", tmp_path)
    (folder / "config.json").write_bytes(content)
    for read in (from_hf, partial(load_config, seq_len=None)):
        with pytest.raises(
            UserError, match=r"config\.json: (is not JSON|holds no settings)"
        ) as error:
            read(str(folder))
        assert len(error.value.lines()) == 1


def test_weights_of_our_own_class_must_fit_its_settings(tmp_path: Path) -> None:
    folder, config = written("llmfoundry", tmp_path)
    rewrite(folder, config, "settings.n_layers", 3)
    with pytest.raises(UserError, match=r"^model\.blocks\.2\..*disagree"):
        from_hf(str(folder))
    rewrite(folder, config, "settings.n_layer", 3)
    with pytest.raises(UserError, match="did you mean 'n_layers'"):
        from_hf(str(folder))


def test_a_hub_id_is_fetched_and_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = written("LlamaForCausalLM", tmp_path)

    def fetch(name: str, **_: Any) -> str:
        if name == "someone/small":
            return str(folder)
        raise OSError("401 Client Error\nand many lines of advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert from_hf("someone/small")[0].n_layers == 2
    with pytest.raises(UserError, match=r"someone/other is not a folder.*: 401 Client Error$"):
        from_hf("someone/other")
