"""Changes of every field of the `model` section, for tests of what exports keep or refuse."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

from llmfoundry.hf.architecture import TRAINING
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.config_keys import get
from llmfoundry.recipe.attention import (
    AttentionOverride,
    ResolvedRopeConfig,
    RopeConfig,
    TemperatureConfig,
)
from llmfoundry.recipe.model import FFNConfig, ModelConfig
from tests.hf.random_models import CASES, HEADS, stack

BASES = {
    name: next(case for case in CASES[name] if "block_overrides" not in case)
    for name in ARCHITECTURES
}
Change = Callable[[ModelConfig], ModelConfig | None]  # None: the setting has no meaning there


def leaves(section: type = ModelConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all settings; an override's as if there were one kind of layer."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kinds = [kind for kind in (hints[field.name], *typing.get_args(hints[field.name]))]
        inner = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if prefix == "block_overrides." and field.name == "overrides":
            yield from leaves(AttentionOverride, f"{prefix}overrides.")
        elif inner is not None and field.name != "order":
            yield from leaves(typing.cast(type, inner), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def put(key: str, value: Any) -> Change:
    """A change that sets `key`, to a value or to what a function makes of the config."""

    def change(config: ModelConfig) -> ModelConfig:
        section, _, name = key.rpartition(".")
        new = value(config) if callable(value) else value
        setattr(get(config, section) if section else config, name, new)
        return config

    return change


def toggle(key: str) -> Change:
    return put(key, lambda config: not get(config, key))


LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def unlatent(change: Change) -> Change:
    """A change that latent attention excludes: the model gets plain heads first."""

    def of_heads(config: ModelConfig) -> ModelConfig | None:
        attn = config.attn_config
        if attn.is_latent:
            attn.attn_type = "multihead_attention"
            for key in LATENT_KEYS:
                setattr(attn, key, None)
            attn.norm_type = attn.norm_eps = None
        return change(config)

    return of_heads


def _latent(key: str, value: int) -> Change:
    """Another width of latent attention, where there is one."""

    def change(config: ModelConfig) -> ModelConfig | None:
        attn = config.attn_config
        if not attn.is_latent:
            return None
        setattr(attn, key, value)
        config.head_dim = attn.latent_head_dim
        return config

    return change


def _positions(kind: str) -> Change:
    """To positions of another kind."""

    def change(config: ModelConfig) -> ModelConfig | None:
        attn = config.attn_config
        attn.alibi = attn.rope = attn.nope = False
        attn.alibi_bias_max = attn.rope_theta = config.learned_pos_emb = None
        attn.rope_hf_config, attn.sliding_window_size = RopeConfig(), -1
        if kind != "learned":
            setattr(attn, kind, True)
        config = config.resolve()
        return config

    return change


def _rope(**values: Any) -> Change:
    """To other frequencies, of a model that rotates."""
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 1000, "factor": 4.0, "type": "llama3"}

    def change(config: ModelConfig) -> ModelConfig | None:
        config.attn_config.rope_hf_config = ResolvedRopeConfig(**(llama3 | values))
        config.attn_config.rope_hf_config.fill()
        return config if config.attn_config.rope else None

    return change


def _yarn(**values: Any) -> Change:
    none = {"low_freq_factor": None, "high_freq_factor": None}
    return _rope(**none, type="yarn", original_max_position_embeddings=60, **values)


def _where(on: str, change: Change) -> Change:
    return lambda config: change(config) if get(config, on) else None


def _heads(kv_heads: int, kind: str) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        config.attn_config.kv_n_heads, config.attn_config.attn_type = kv_heads, kind
        return config

    return change


def _attn_type(config: ModelConfig) -> ModelConfig | None:
    if config.attn_config.kv_n_heads == 1:
        return _heads(HEADS, "multihead_attention")(config)
    return _heads(1, "multiquery_attention")(config)


def _width(config: ModelConfig) -> ModelConfig:
    """To 16, a square number, or from 64 to 32, which is none."""
    width = config.d_model // 2 if config.d_model == 64 else 16
    if config.ffn_config.ffn_hidden_size == 4 * config.d_model:
        config.ffn_config.ffn_hidden_size = 4 * width
    config.d_model, config.expansion_ratio = width, None
    if not config.attn_config.is_latent:
        config.head_dim = width // HEADS
    return config


def _three_heads(config: ModelConfig) -> ModelConfig:
    config.n_heads = 3
    if config.attn_config.is_latent:
        config.attn_config.kv_n_heads = 3
        return config
    config.head_dim = 12
    return _heads(3, "multihead_attention")(config)


def _qk_norm(key: str) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        on = getattr(config.attn_config, key)
        attn = config.attn_config
        attn.qk_ln = attn.qk_gn = False
        attn.norm_type = attn.norm_eps = None
        setattr(attn, key, not on)
        config = config.resolve()
        return config

    return change


def _normed(key: str, value: Any) -> Change:
    """Another norm of queries and keys, where there is one."""
    change = put(key, value)

    def where(config: ModelConfig) -> ModelConfig | None:
        attn = config.attn_config
        return change(config) if attn.qk_ln or attn.qk_gn or attn.is_latent else None

    return where


def _tuning(floor: int) -> Change:
    return put("attn_config.attn_temperature_tuning", TemperatureConfig(floor, 0.7))


def _stack(names: str, **kinds: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig | None:
        if any(kind.get("nope") for kind in kinds.values()) and not config.attn_config.rope:
            return None
        for key, value in stack(names, **kinds).items():
            setattr(config, key, value)
        config = config.resolve()
        return config

    return change


def _ffn_type(config: ModelConfig) -> ModelConfig:
    """To the other kind of dense layer; a mixture to the one that is not its experts' kind."""
    ffn = config.ffn_config
    kind = {"mptmlp": "mptglu"}.get(ffn.ffn_type, "mptmlp")
    config.ffn_config = FFNConfig(kind, ffn.ffn_act_fn, ffn.ffn_hidden_size)
    return config


def _experts(config: ModelConfig) -> ModelConfig:
    """To a mixture of seven; a dense layer to one of experts of its kind."""
    ffn = config.ffn_config
    if ffn.ffn_type != "dmoe":
        ffn.mlp_type = {"mptglu": "glu", "mptmlp": "mlp"}[ffn.ffn_type]
        ffn.ffn_type = "dmoe"
    ffn.moe_num_experts = 7
    config = config.resolve()
    return config


def _router_std(config: ModelConfig) -> ModelConfig | None:
    """Another start of the routers, where there are any."""
    if config.ffn_config.ffn_type != "dmoe":
        return None
    config.init_config.router_init_std = 0.5
    return config


def _moe(**values: Any) -> Change:
    """Other settings of a mixture, where there is one."""

    def change(config: ModelConfig) -> ModelConfig | None:
        ffn = config.ffn_config
        if ffn.ffn_type != "dmoe":
            return None
        for key, value in values.items():
            setattr(ffn, key, value(ffn) if callable(value) else value)
        config = config.resolve()
        return config

    return change


def _groups(best: int) -> Change:
    """To as many groups as possible, of which a token has its experts from `best`."""

    def change(config: ModelConfig) -> ModelConfig | None:
        ffn = config.ffn_config
        if ffn.ffn_type != "dmoe" or ffn.moe_num_experts in (None, 1):
            return None
        size = 2 if ffn.moe_scoring_func == "sigmoid" else 1
        ffn.moe_n_group, ffn.moe_topk_group = ffn.moe_num_experts // size, best
        ffn.moe_top_k = min(ffn.moe_top_k, best * size)
        return config

    return change


def _biased(rate: float) -> Change:
    off = {"moe_loss_weight": None, "moe_lbl_scope": None}
    return _moe(moe_balancing="bias", moe_bias_update_rate=rate, **off)


def _hidden(width: int) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        config.ffn_config.ffn_hidden_size, config.expansion_ratio = width, None
        return config

    return change


def _glu_limit(config: ModelConfig) -> ModelConfig | None:
    is_glu = config.ffn_config.ffn_type == "mptglu" or config.ffn_config.mlp_type == "glu"
    return put("ffn_config.glu_limit", 0.4)(config) if is_glu else None


KEPT_OR_REFUSED: dict[str, Change] = {  # what logits depend on, each changed alone
    "d_model": _width,
    "n_heads": _three_heads,
    "n_layers": put("n_layers", 3),
    "head_dim": unlatent(put("head_dim", lambda c: 2 * c.head_dim)),
    "vocab_size": put("vocab_size", 192),
    "max_seq_len": put("max_seq_len", 48),
    "learned_pos_emb": unlatent(_positions("learned")),
    "no_bias": toggle("no_bias"),
    "attention_bias": unlatent(toggle("attention_bias")),
    "norm_type": put("norm_type", lambda c: {"rmsnorm": "layernorm"}.get(c.norm_type, "rmsnorm")),
    "norm_eps": put("norm_eps", 0.3),
    "tie_word_embeddings": toggle("tie_word_embeddings"),
    "logit_scale": put("logit_scale", 0.6),
    "final_logit_softcapping": put("final_logit_softcapping", 2.5),
    "attn_config.attn_type": unlatent(_attn_type),
    "attn_config.kv_n_heads": unlatent(_heads(2, "grouped_query_attention")),
    "attn_config.kv_lora_rank": _latent("kv_lora_rank", 12),
    "attn_config.q_lora_rank": _latent("q_lora_rank", 9),
    "attn_config.qk_nope_head_dim": _latent("qk_nope_head_dim", 4),
    "attn_config.qk_rope_head_dim": _latent("qk_rope_head_dim", 4),
    "attn_config.v_head_dim": _latent("v_head_dim", 16),
    "attn_config.softmax_scale": put("attn_config.softmax_scale", 0.7),
    "attn_config.attn_logit_softcapping": put("attn_config.attn_logit_softcapping", 1.3),
    "attn_config.clip_qkv": unlatent(
        put("attn_config.clip_qkv", lambda c: None if c.attn_config.clip_qkv else 0.4)
    ),
    "attn_config.sinks": unlatent(toggle("attn_config.sinks")),
    "attn_config.qk_ln": unlatent(_qk_norm("qk_ln")),
    "attn_config.qk_gn": unlatent(_qk_norm("qk_gn")),
    "attn_config.norm_type": _normed(
        "attn_config.norm_type", lambda c: {"rmsnorm": "layernorm"}.get(c.norm_type, "rmsnorm")
    ),
    "attn_config.norm_eps": _normed("attn_config.norm_eps", 0.3),
    "attn_config.sliding_window_size": put("attn_config.sliding_window_size", 7),
    "attn_config.alibi": unlatent(_positions("alibi")),
    "attn_config.alibi_bias_max": _where("attn_config.alibi", put("attn_config.alibi_bias_max", 4)),
    "attn_config.rope": unlatent(_positions("rope")),
    "attn_config.rope_theta": _where("attn_config.rope", put("attn_config.rope_theta", 77.0)),
    "attn_config.rope_hf_config.type": _rope(),
    "attn_config.rope_hf_config.factor": _rope(factor=9.0),
    "attn_config.rope_hf_config.low_freq_factor": _rope(low_freq_factor=2.0),
    "attn_config.rope_hf_config.high_freq_factor": _rope(high_freq_factor=20.0),
    "attn_config.rope_hf_config.original_max_position_embeddings": _rope(
        original_max_position_embeddings=100
    ),
    "attn_config.rope_hf_config.beta_fast": _yarn(beta_fast=20.0),
    "attn_config.rope_hf_config.beta_slow": _yarn(beta_slow=3.0),
    "attn_config.rope_hf_config.truncate": _yarn(truncate=False),
    "attn_config.rope_hf_config.attention_factor": _yarn(attention_factor=1.9),
    "attn_config.rope_hf_config.mscale": _yarn(mscale=2.0, mscale_all_dim=0.5),
    "attn_config.rope_hf_config.mscale_all_dim": _yarn(mscale=0.5, mscale_all_dim=2.0),
    "attn_config.nope": unlatent(_positions("nope")),
    "attn_config.attn_temperature_tuning.floor_scale": _tuning(3),
    "attn_config.attn_temperature_tuning.attn_scale": _tuning(8),
    "ffn_config.ffn_type": _ffn_type,
    "ffn_config.ffn_act_fn": put("ffn_config.ffn_act_fn", "relu"),
    "ffn_config.ffn_hidden_size": _hidden(40),
    "ffn_config.moe_num_experts": _experts,
    "ffn_config.moe_top_k": _moe(moe_top_k=lambda ffn: ffn.moe_top_k + 1),
    "ffn_config.glu_limit": _glu_limit,
    "ffn_config.moe_router_bias": _moe(moe_router_bias=True),
    "ffn_config.mlp_type": _moe(mlp_type="mlp", glu_limit=None),
    "ffn_config.moe_normalize_expert_weights": _moe(
        moe_normalize_expert_weights=lambda ffn: None if ffn.moe_normalize_expert_weights else 2.0
    ),
    "ffn_config.moe_balancing": _biased(1e-3),
    "ffn_config.moe_bias_update_rate": _biased(0.2),
    "ffn_config.shared_expert_hidden_size": _moe(
        shared_expert_hidden_size=lambda ffn: 20 if ffn.shared_expert_hidden_size else 40
    ),
    "ffn_config.moe_scoring_func": _moe(
        moe_scoring_func=lambda ffn: "softmax" if ffn.moe_scoring_func == "sigmoid" else "sigmoid"
    ),
    "ffn_config.moe_n_group": _groups(1),
    "ffn_config.moe_topk_group": _groups(2),
    "ffn_config.moe_routed_scaling_factor": _moe(moe_routed_scaling_factor=1.7),
    "ffn_config.first_k_dense_replace": _moe(first_k_dense_replace=1, dense_hidden_size=20),
    "ffn_config.dense_hidden_size": _moe(first_k_dense_replace=1, dense_hidden_size=36),
    "ffn_config.uniform_expert_assignment": _moe(uniform_expert_assignment=True),
    "ffn_config.moe_force_balance": _moe(moe_force_balance=True),
    "block_overrides.order": _stack("local default local", local={"sliding_window_size": 5}),
    "block_overrides.overrides.sliding_window_size": _stack(
        "a default b", a={"sliding_window_size": 5}, b={"sliding_window_size": 9}
    ),
    "block_overrides.overrides.attn_temperature_tuning.floor_scale": _stack(
        "default a", a={"attn_temperature_tuning": TemperatureConfig(3, 0.7)}
    ),
    "block_overrides.overrides.attn_temperature_tuning.attn_scale": _stack(
        "default a", a={"nope": True, "attn_temperature_tuning": TemperatureConfig(None, 0.7)}
    ),
    "block_overrides.overrides.nope": _stack("default free", free={"nope": True}),
    "block_overrides.overrides.reuse_kv_layer_idx": unlatent(
        _stack("default again", again={"reuse_kv_layer_idx": -1})
    ),
}
WITHOUT_LOGITS: dict[str, Change] = {  # what they do not depend on
    "expansion_ratio": put(
        "expansion_ratio",
        lambda c: None if c.expansion_ratio else c.ffn_config.ffn_hidden_size / c.d_model,
    ),
    "attn_config.attn_impl": put("attn_config.attn_impl", "torch"),
    "ffn_config.moe_lbl_scope": _moe(moe_lbl_scope="microbatch"),
    "ffn_config.moe_impl": _moe(moe_impl="torch"),
    "init_config.name": put("init_config.name", "small_init_"),
    "init_config.fan_mode": put("init_config.fan_mode", "fan_out"),
    "init_config.init_nonlinearity": put("init_config.init_nonlinearity", "tanh"),
    "init_config.init_gain": put("init_config.init_gain", 0.5),
    "init_config.init_std": put("init_config.init_std", 0.5),
    "init_config.emb_init_std": put("init_config.emb_init_std", 0.5),
    "init_config.emb_init_uniform_lim": put("init_config.emb_init_uniform_lim", 0.5),
    "init_config.router_init_std": _router_std,
    "init_config.init_div_is_residual": put("init_config.init_div_is_residual", False),
}
DROPPED: dict[str, Change] = {
    key: _moe(**{key.split(".")[1]: 0.25}) if ".moe_" in key else put(key, 0.25) for key in TRAINING
}
EXPERT = "shared_expert_hidden_size"
ONE_VALUE = {"name"}  # the schema itself refuses any other

BLAMED: dict[
    str, tuple[str, ...]
] = {  # keys that a refusal may name for a change of another: it offends what excludes it
    "d_model": ("d_model", "head_dim", "ffn_config.ffn_hidden_size"),
    "n_heads": ("n_heads", "head_dim", "attn_config.attn_type"),
    "attn_config.kv_n_heads": ("attn_config.attn_type",),
    "head_dim": ("head_dim", "attn_config.attn_type"),
    "ffn_config.ffn_hidden_size": (
        "ffn_config.ffn_hidden_size",
        "ffn_config.shared_expert_hidden_size",
    ),
    "ffn_config.moe_topk_group": ("ffn_config.moe_n_group",),
    "ffn_config.dense_hidden_size": ("ffn_config.first_k_dense_replace",),
    "norm_type": ("norm_type", "attn_config.norm_type"),
    "norm_eps": ("norm_eps", "attn_config.norm_eps"),
    "tie_word_embeddings": ("tie_word_embeddings", "logit_scale"),
    "attn_config.attn_temperature_tuning.floor_scale": (
        "attn_config.attn_temperature_tuning.attn_scale",
    ),
    "ffn_config.moe_num_experts": ("ffn_config.ffn_type",),
    "ffn_config.moe_bias_update_rate": ("ffn_config.moe_balancing",),
}
POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope", "attn_config.nope")
SHARPENED = "attn_config.attn_temperature_tuning.attn_scale"  # not where layers rotate
BLAMED |= dict.fromkeys(POSITIONS, (*POSITIONS, SHARPENED, "attn_config.attn_type"))
BLAMED |= {key: ("block_overrides",) for key in KEPT_OR_REFUSED if key.startswith("block_")}
