"""Layers and rotary positions of others' config.json that the decoder cannot follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.read_folder import from_hf
from tests.hf.random_models import rewrite, written

OTHER_LAYERS = [
    ("SmolLM3ForCausalLM", "sliding_window", 1, "sliding_window 1; .*begin at 2"),
    ("Qwen3ForCausalLM", "use_sliding_window", False, "use_sliding_window false, but layer_types"),
    ("Qwen3ForCausalLM", "layer_types", ["full_attention"], "layer_types do not fit"),
    ("Qwen3ForCausalLM", "layer_types", ["chunked_attention"] * 3, "layer_types 'chunked"),
    ("MistralForCausalLM", "layer_types", ["full_attention"] * 2, "layer_types do not fit"),
    ("LlamaForCausalLM", "layer_types", ["sliding_attention"] * 2, "layer_types do not fit"),
    ("MistralForCausalLM", "layer_types", ["linear_attention"] * 2, "layer_types 'linear"),
    ("SmolLM3ForCausalLM", "no_rope_layers", [1], "no_rope_layers has 1 of 2 layers"),
    ("Llama4ForCausalLM", "layer_types", ["chunked_attention"] * 2, "layer_types 'chunked"),
    ("Llama4ForCausalLM", "layer_types", ["sliding_attention"] * 2, "layer_types 'sliding"),
    ("GPTNeoForCausalLM", "attention_types", [[["local"], 1]], "attention_types do not fit"),
]


@pytest.mark.parametrize(("name", "key", "value", "refusal"), OTHER_LAYERS)
def test_layers_that_the_decoder_cannot_follow_are_refused(
    name: str, key: str, value: Any, refusal: str, tmp_path: Path
) -> None:
    case = {"Qwen3ForCausalLM": 2, "SmolLM3ForCausalLM": 2, "GPTNeoForCausalLM": 1}.get(name, 0)
    folder, config = written(name, tmp_path, case)
    rewrite(folder, config, key, value)
    with pytest.raises(UserError, match=f"^config.json: {refusal}"):
        from_hf(str(folder))


def test_heads_whose_norms_differ_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = written("StableLmForCausalLM", tmp_path, 2)
    file, name = folder / "model.safetensors", "self_attn.q_layernorm.norms.3.weight"
    weights = load_file(file)
    weights[f"model.layers.1.{name}"] += 1
    save_file(weights, file)
    with pytest.raises(
        UserError, match=r"layers\.1\.self_attn\.q_layernorm\.norms\.3\.weight: diff"
    ):
        from_hf(str(folder))


@pytest.mark.parametrize(
    ("name", "key"), [(n, key) for n, a in ARCHITECTURES.items() for key in a.unread]
)
def test_dropouts_that_the_decoder_does_not_have_are_named(
    name: str, key: str, tmp_path: Path
) -> None:
    folder, config = written(name, tmp_path)
    said: list[str] = []
    from_hf(str(folder), note=said.append)
    assert said == []
    rewrite(folder, config, key, 0.1)
    from_hf(str(folder), note=said.append)
    (line,) = said
    assert line.startswith(f"config.json: {key} 0.1 is left out; ")


ROTARY = [
    ("rope_parameters.rope_type", "longrope", "rope_type 'longrope'; .*dynamic, llama3, yarn"),
    ("rope_parameters.rope_type", "yarn", "rope_parameters.factor is missing; yarn needs it"),
    ("rope_parameters.rope_type", "linear", "rope_parameters.factor is missing; linear needs it"),
    ("rope_parameters.mscale", 2.0, "rope_parameters.mscale; the decoder has nothing like it"),
    ("rope_parameters.full_attention", {}, "rope_parameters.full_attention"),
    ("rope_scaling.rope_type", "linear", "rope_parameters and rope_scaling disagree"),
    ("rope_parameters.partial_rotary_factor", 0.5, "partial_rotary_factor 0.5"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.5"),
    ("rope_theta", 123.0, "rope_parameters.rope_theta 500000.0, rope_theta 123.0 disagree"),
    ("layer_types", ["full_attention", "sliding_attention"], "layer_types"),
]


@pytest.mark.parametrize(("key", "value", "refusal"), ROTARY)
def test_other_rotary_positions_are_refused(
    key: str, value: Any, refusal: str, tmp_path: Path
) -> None:
    folder, config = written("LlamaForCausalLM", tmp_path)
    rewrite(folder, config, key, value)
    with pytest.raises(UserError, match=f"^config.json: {refusal}"):
        from_hf(str(folder))


def test_old_style_rope_keys_are_read(tmp_path: Path) -> None:
    folder, config = written("LlamaForCausalLM", tmp_path)
    del config["rope_parameters"]
    rewrite(folder, config, "rope_scaling", None)
    assert from_hf(str(folder))[0].attn_config.rope_theta == 500000.0
    rewrite(folder, config, "rope_scaling", {"type": "dynamic", "factor": 2.0})
    rope = from_hf(str(folder))[0].attn_config.rope_hf_config
    assert (rope.type, rope.factor) == ("dynamic", 2.0)
    rewrite(folder, config, "rope_scaling", {"type": "yarn", "factor": 2.0})
    rope = from_hf(str(folder))[0].attn_config.rope_hf_config
    assert (rope.type, rope.original_max_position_embeddings) == ("yarn", 24)


def test_dbrx_means_the_theta_that_its_first_config_json_gave(tmp_path: Path) -> None:
    """Transformers ignores attn_config.rope_theta, and takes 10000 where it is all there is."""
    folder, config = written("DbrxForCausalLM", tmp_path)
    del config["rope_parameters"], config["rope_theta"]
    rewrite(folder, config, "attn_config.rope_theta", 250000.0)
    assert from_hf(str(folder))[0].attn_config.rope_theta == 250000.0
    rewrite(folder, config, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    with pytest.raises(UserError, match=r"attn_config\.rope_theta 500000\.0 disagree"):
        from_hf(str(folder))
