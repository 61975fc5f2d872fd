"""llama.cpp architectures that match transformers' classes, and their settings.

`write.py` calls `choose` and `add_settings`. llama.cpp ignores keys that an architecture does not
know, and hard-codes most choices (activation, windows). An entry therefore allows only settings
that llama.cpp's source code computes, as tests confirm. All other settings are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import (
    GLU_LIMIT,
    HEADS_FILL,
    NO_QKV_BIAS,
    NORMALIZE,
    SCALE,
    Architecture,
    Requirement,
    is_mixture,
)
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.recipe.attention import BETA_FAST, BETA_SLOW, ResolvedRopeConfig
from llmfoundry.recipe.model import ResolvedModelConfig

ACTIVATION, ROPE_SCALING = "ffn_config.ffn_act_fn", "attn_config.rope_hf_config"
APPROXIMATED = (
    "model.ffn_config.ffn_act_fn: gelu is computed by llama.cpp with the approximation by tanh; its"
    " logits differ by about 0.001, and by nothing more with gelu_tanh"
)


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp for one of transformers' classes.

    Attributes:
        name: llama.cpp's name.
        needs: requirements in addition to those of the transformers class.
        is_interleaved: the two elements of a rotary pair are adjacent in queries and keys.
        is_biased: every linear layer has a bias; it is zero if the model has none.
        yarn: requirements on YaRN, which llama.cpp computes whatever a file says.
        windows: whether each second layer has a sliding window, beginning with the first.
    """

    name: str
    needs: tuple[Requirement, ...]
    is_interleaved: bool = False
    is_biased: bool = False
    yarn: tuple[Requirement, ...] = ()
    windows: bool = False


def _scaling(*types: str) -> Requirement:
    """Return the requirement that RoPE scaling is absent or has one of these types."""
    return Requirement(
        f"{ROPE_SCALING}.type",
        None,
        lambda c: c.attn_config.rope_hf_config.type in ("no_scaling", *types),
        f"one of {', '.join(('no_scaling', *types))}",
    )


SILU = Requirement(ACTIVATION, "silu")
GELU = Requirement(
    ACTIVATION, None, lambda c: c.ffn_config.ffn_act_fn in ("gelu_tanh", "gelu"), "gelu_tanh"
)
STRETCHED = _scaling("linear", "yarn")
SUM_TO_ONE = Requirement(
    NORMALIZE, 1.0, lambda c: not is_mixture(c) or c.ffn_config.moe_normalize_expert_weights == 1
)
NO_SCALE = Requirement(SCALE, must="head_dim**-0.5")
YARN_BOUNDS = (
    Requirement(
        f"{ROPE_SCALING}.beta_fast",
        BETA_FAST,
        lambda c: c.attn_config.rope_hf_config.beta_fast in (None, BETA_FAST),
    ),
    Requirement(
        f"{ROPE_SCALING}.beta_slow",
        BETA_SLOW,
        lambda c: c.attn_config.rope_hf_config.beta_slow in (None, BETA_SLOW),
    ),
    Requirement(f"{ROPE_SCALING}.truncate", True),
)
"""What llama.cpp computes of YaRN whatever a file says."""
ROUNDED = (
    "model.attn_config.rope_hf_config.truncate: false is computed by llama.cpp with rounded bounds,"
    " as it does for the published gpt-oss"
)
_LLAMA = GGUFArchitecture(
    "llama", (SILU, _scaling("linear", "llama3", "yarn")), is_interleaved=True
)

LITE_LAYERS = (26, 27)  # by which llama.cpp knows a model without latent queries
_LATENT = (
    SILU,
    _scaling(),
    Requirement(
        "attn_config.q_lora_rank",
        None,
        lambda c: c.attn_config.q_lora_rank is not None or c.n_layers in LITE_LAYERS,
        "a number, unless n_layers is 26 or 27",
    ),
)

SHAPES: dict[str, GGUFArchitecture] = {
    "MptForCausalLM": GGUFArchitecture("mpt", (GELU, NO_SCALE)),
    "GPT2LMHeadModel": GGUFArchitecture("gpt2", (GELU,)),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Starcoder2ForCausalLM": GGUFArchitecture(
        "starcoder2", (GELU, STRETCHED, HEADS_FILL), is_biased=True
    ),
    "Qwen2ForCausalLM": GGUFArchitecture("qwen2", (SILU, STRETCHED, HEADS_FILL)),
    "Qwen3ForCausalLM": GGUFArchitecture("qwen3", (SILU, STRETCHED, NO_QKV_BIAS)),
    "Qwen3MoeForCausalLM": GGUFArchitecture("qwen3moe", (SILU, STRETCHED, NO_QKV_BIAS, SUM_TO_ONE)),
    "DbrxForCausalLM": GGUFArchitecture("dbrx", (SILU, STRETCHED, SUM_TO_ONE)),
    "GptOssForCausalLM": GGUFArchitecture(
        "gpt-oss",
        (
            *(STRETCHED, NO_SCALE, Requirement(GLU_LIMIT, 7.0)),
            Requirement("tie_word_embeddings", False),
        ),
        is_biased=True,
        yarn=YARN_BOUNDS[:2],
        windows=True,
    ),
    "DeepseekV2ForCausalLM": GGUFArchitecture(
        "deepseek2", (*_LATENT, Requirement("ffn_config.moe_n_group", None, must="null"))
    ),
    "DeepseekV3ForCausalLM": GGUFArchitecture("deepseek2", _LATENT),
}


def _narrowed(name: str) -> Architecture:
    """Return the entry of a class with llama.cpp's requirements added, and without windows."""
    architecture, shape = ARCHITECTURES[name], SHAPES[name]
    needs = (*architecture.needs, *shape.needs, *(shape.yarn or YARN_BOUNDS))
    windows = architecture.windows if shape.windows else None
    return replace(architecture, needs=needs, windows=windows)


def choose(config: ResolvedModelConfig, architecture: str | None) -> str:
    """Return the class whose tensors are written, a key of `SHAPES`.

    Args:
        config: resolved model configuration.
        architecture: the class; None: one that fits.

    Raises:
        UserError: llama.cpp cannot compute the model; the error names each setting in the way.
    """
    name = choose_architecture(
        config,
        architecture,
        {name: _narrowed(name) for name in SHAPES},
        engine="llama.cpp",
        advice="write to=hf",
    )
    sizes = [layer.window for layer in config.layers()]
    if SHAPES[name].windows and not _alternates(sizes):
        raise UserError(
            f"model: llama.cpp's {SHAPES[name].name} has windows of one size in the layers 0, 2, 4,"
            " … and none in the others; write to=hf"
        )
    return name


def _alternates(sizes: Sequence[int]) -> bool:
    """Return whether each second layer has the same window (-1: none), beginning with the first."""
    return sizes[0] > 0 and all(
        size == (-1 if index % 2 else sizes[0]) for index, size in enumerate(sizes)
    )


def settings_of(config: ResolvedModelConfig, name: str) -> ResolvedModelConfig:
    """Return the settings with the biases that llama.cpp's architecture has."""
    if not SHAPES[name].is_biased:
        return config
    return replace(config, no_bias=False, attention_bias=True)


def add_settings(writer: Any, config: ResolvedModelConfig, name: str) -> None:
    """Write the model's settings under llama.cpp's keys.

    Args:
        writer: a `gguf.GGUFWriter`.
        config: resolved model configuration.
        name: class name, a key of `SHAPES`.
    """
    # sizes
    attn, ffn, head = config.attn_config, config.ffn_config, config.head_dim
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(ffn.dense_hidden_size or ffn.ffn_hidden_size)
    writer.add_head_count(config.n_heads)
    if not attn.is_latent:
        writer.add_head_count_kv(attn.kv_n_heads)
        writer.add_key_length(head)
        writer.add_value_length(head)
    else:
        _add_latent(writer, config)
    if SHAPES[name].windows:
        writer.add_sliding_window(config.layers()[0].window + 1)  # with the token

    # norms and positions
    if config.norm_type.endswith("rmsnorm"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if attn.rope:
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_rope_freq_base(attn.rope_theta)
        _add_scaling(writer, attn.rope_hf_config)
    if attn.alibi:
        writer.add_max_alibi_bias(float(attn.alibi_bias_max or 0))

    # settings of few architectures, and experts
    for setting in ARCHITECTURES[name].fields:
        value = attrgetter(setting.ours)(config) if setting.gguf else None
        if value is not None:
            getattr(writer, setting.gguf)(value)
    if is_mixture(config):
        writer.add_expert_count(ffn.moe_num_experts)
        writer.add_expert_used_count(ffn.moe_top_k)
        writer.add_expert_feed_forward_length(ffn.ffn_hidden_size)
    if SHAPES[name].name == "deepseek2":
        _add_deepseek_experts(writer, config)


def _add_latent(writer: Any, config: ResolvedModelConfig) -> None:
    """Write the sizes of latent attention; its cache is that of one head of latents."""
    attn = config.attn_config
    writer.add_head_count_kv(1)
    writer.add_key_length(attn.kv_lora_rank + attn.qk_rope_head_dim)
    writer.add_value_length(attn.kv_lora_rank)
    writer.add_key_length_mla(config.head_dim)
    writer.add_value_length_mla(config.value_dim)
    writer.add_kv_lora_rank(attn.kv_lora_rank)
    if attn.q_lora_rank is not None:
        writer.add_q_lora_rank(attn.q_lora_rank)


def _add_deepseek_experts(writer: Any, config: ResolvedModelConfig) -> None:
    """Write how DeepSeek's tokens choose their experts."""
    from gguf import ExpertGatingFuncType

    ffn = config.ffn_config
    is_sigmoid = ffn.moe_scoring_func == "sigmoid"
    writer.add_leading_dense_block_count(ffn.first_k_dense_replace or 0)
    writer.add_expert_shared_count((ffn.shared_expert_hidden_size or 0) // ffn.ffn_hidden_size)
    writer.add_expert_weights_scale(ffn.moe_routed_scaling_factor or 1.0)
    writer.add_expert_weights_norm(ffn.moe_normalize_expert_weights is not None)
    writer.add_expert_gating_func(ExpertGatingFuncType["SIGMOID" if is_sigmoid else "SOFTMAX"])
    if ffn.moe_n_group:
        writer.add_expert_group_count(ffn.moe_n_group)
        writer.add_expert_group_used_count(ffn.moe_topk_group)


def _add_scaling(writer: Any, scaling: ResolvedRopeConfig) -> None:
    """Write linear and YaRN scaling; llama3 scaling is a tensor, see `computed_tensors`."""
    if scaling.type not in ("linear", "yarn"):
        return
    from gguf import RopeScalingType

    writer.add_rope_scaling_type(RopeScalingType[scaling.type.upper()])
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        # llama.cpp multiplies its own factor by this number
        usual = 0.1 * math.log(scaling.factor) + 1
        writer.add_rope_scaling_attn_factors(scaling.table_scale / usual)


def computed_tensors(config: ResolvedModelConfig) -> Mapping[str, Tensor]:
    """Return tensors that no checkpoint has: the divisors of rotary frequencies in llama3 scaling.

    The formula is that of Llama 3.1.
    """
    scaling, attn = config.attn_config.rope_hf_config, config.attn_config
    if not attn.rope or scaling.type != "llama3":
        return {}
    assert config.head_dim and attn.rope_theta and scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    assert low and high and length
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    rotations = length / (2 * math.pi * attn.rope_theta**exponents)  # over the original length
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)  # share of the original frequency
    divisors = 1 / ((1 - unscaled) / scaling.factor + unscaled)
    return {"rope_freqs.weight": divisors.float()}


def remarks(config: ResolvedModelConfig, name: str) -> list[str]:
    """Return a line for each difference between llama.cpp's computation and the model."""
    lines, scaling = [], config.attn_config.rope_hf_config
    uses_gelu = config.ffn_config.activation[0] == "gelu" and GELU in SHAPES[name].needs
    if uses_gelu and not _is_tanh(config):
        lines.append(APPROXIMATED)
    if scaling.type == "yarn" and scaling.truncate is False:
        lines.append(ROUNDED)
    return lines


def _is_tanh(config: ResolvedModelConfig) -> bool:
    return config.ffn_config.activation == ("gelu", {"approximate": "tanh"})
