"""Every field of the `model` section: kept exactly by an architecture, or refused by its key.

`CHANGES` must have all of them, so that a setting which is new in the schema cannot be left out of
exports in silence, as transformers itself would with many a key.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.export.architectures import ARCHITECTURES
from llmfoundry.export.coverage import markdown
from llmfoundry.export.hf import from_hf, to_hf
from llmfoundry.export.parts import TRAINING, get
from llmfoundry.export.settings import choose, read_settings, unkept, write_settings
from llmfoundry.hf import LlmfoundryConfig
from llmfoundry.recipe.attention import RopeConfig, TemperatureConfig
from llmfoundry.recipe.blocks import AttentionOverride
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import build, to_dict
from tests.export.random_models import (
    CARD,
    CASES,
    HEADS,
    decoder,
    logits,
    rows,
    settings,
    stack,
    write_tokenizer,
)

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


def _positions(kind: str) -> Change:
    """To positions of another kind."""

    def change(config: ModelConfig) -> ModelConfig | None:
        attn = config.attn_config
        attn.alibi = attn.rope = attn.nope = False
        attn.alibi_bias_max = attn.rope_theta = config.learned_pos_emb = None
        attn.rope_hf_config, attn.sliding_window_size = RopeConfig(), -1
        if kind != "learned":
            setattr(attn, kind, True)
        config.fill()
        return config

    return change


def _rope(**values: Any) -> Change:
    """To other frequencies, of a model that rotates."""
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 1000, "factor": 4.0, "type": "llama3"}

    def change(config: ModelConfig) -> ModelConfig | None:
        config.attn_config.rope_hf_config = RopeConfig(**(llama3 | values))
        return config if config.attn_config.rope else None

    return change


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
    config.d_model, config.head_dim, config.expansion_ratio = width, width // HEADS, None
    return config


def _three_heads(config: ModelConfig) -> ModelConfig:
    config.n_heads, config.head_dim = 3, 12
    return _heads(3, "multihead_attention")(config)


def _qk_norm(key: str) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        on = getattr(config.attn_config, key)
        config.attn_config.qk_ln = config.attn_config.qk_gn = False
        setattr(config.attn_config, key, not on)
        return config

    return change


def _tuning(floor: int) -> Change:
    return put("attn_config.attn_temperature_tuning", TemperatureConfig(floor, 0.7))


def _stack(names: str, **kinds: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig | None:
        if any(kind.get("nope") for kind in kinds.values()) and not config.attn_config.rope:
            return None
        for key, value in stack(names, **kinds).items():
            setattr(config, key, value)
        config.fill()
        return config

    return change


def _hidden(width: int) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        config.ffn_config.ffn_hidden_size, config.expansion_ratio = width, None
        return config

    return change


KEPT_OR_REFUSED: dict[str, Change] = {  # what logits depend on, each changed alone
    "d_model": _width,
    "n_heads": _three_heads,
    "n_layers": put("n_layers", 3),
    "head_dim": put("head_dim", lambda c: 2 * c.head_dim),
    "vocab_size": put("vocab_size", 192),
    "max_seq_len": put("max_seq_len", 48),
    "learned_pos_emb": _positions("learned"),
    "no_bias": toggle("no_bias"),
    "attention_bias": toggle("attention_bias"),
    "norm_type": put("norm_type", lambda c: {"rmsnorm": "layernorm"}.get(c.norm_type, "rmsnorm")),
    "norm_eps": put("norm_eps", 0.3),
    "tie_word_embeddings": toggle("tie_word_embeddings"),
    "logit_scale": put("logit_scale", 0.6),
    "final_logit_softcapping": put("final_logit_softcapping", 2.5),
    "attn_config.attn_type": _attn_type,
    "attn_config.kv_n_heads": _heads(2, "grouped_query_attention"),
    "attn_config.softmax_scale": put("attn_config.softmax_scale", 0.7),
    "attn_config.attn_logit_softcapping": put("attn_config.attn_logit_softcapping", 1.3),
    "attn_config.clip_qkv": put("attn_config.clip_qkv", 0.4),
    "attn_config.qk_ln": _qk_norm("qk_ln"),
    "attn_config.qk_gn": _qk_norm("qk_gn"),
    "attn_config.sliding_window_size": put("attn_config.sliding_window_size", 7),
    "attn_config.alibi": _positions("alibi"),
    "attn_config.alibi_bias_max": _where("attn_config.alibi", put("attn_config.alibi_bias_max", 4)),
    "attn_config.rope": _positions("rope"),
    "attn_config.rope_theta": _where("attn_config.rope", put("attn_config.rope_theta", 77.0)),
    "attn_config.rope_hf_config.type": _rope(),
    "attn_config.rope_hf_config.factor": _rope(factor=9.0),
    "attn_config.rope_hf_config.low_freq_factor": _rope(low_freq_factor=2.0),
    "attn_config.rope_hf_config.high_freq_factor": _rope(high_freq_factor=20.0),
    "attn_config.rope_hf_config.original_max_position_embeddings": _rope(
        original_max_position_embeddings=100
    ),
    "attn_config.nope": _positions("nope"),
    "attn_config.attn_temperature_tuning.floor_scale": _tuning(3),
    "attn_config.attn_temperature_tuning.attn_scale": _tuning(8),
    "ffn_config.ffn_type": put(
        "ffn_config.ffn_type", lambda c: {"mptglu": "mptmlp"}.get(c.ffn_config.ffn_type, "mptglu")
    ),
    "ffn_config.ffn_act_fn": put("ffn_config.ffn_act_fn", "relu"),
    "ffn_config.ffn_hidden_size": _hidden(40),
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
    "block_overrides.overrides.reuse_kv_layer_idx": _stack(
        "default again", again={"reuse_kv_layer_idx": -1}
    ),
}
WITHOUT_LOGITS: dict[str, Change] = {  # what they do not depend on
    "expansion_ratio": put(
        "expansion_ratio",
        lambda c: None if c.expansion_ratio else c.ffn_config.ffn_hidden_size / c.d_model,
    ),
    "attn_config.attn_impl": put("attn_config.attn_impl", "torch"),
    "init_config.name": put("init_config.name", "small_init_"),
    "init_config.fan_mode": put("init_config.fan_mode", "fan_out"),
    "init_config.init_nonlinearity": put("init_config.init_nonlinearity", "tanh"),
    "init_config.init_gain": put("init_config.init_gain", 0.5),
    "init_config.init_std": put("init_config.init_std", 0.5),
    "init_config.emb_init_std": put("init_config.emb_init_std", 0.5),
    "init_config.emb_init_uniform_lim": put("init_config.emb_init_uniform_lim", 0.5),
    "init_config.init_div_is_residual": put("init_config.init_div_is_residual", False),
}
DROPPED: dict[str, Change] = {key: put(key, 0.25) for key in TRAINING}
ONE_VALUE = {"name"}  # the schema itself refuses any other

BLAMED = {  # keys that a refusal may name for a change of another: it offends what excludes it
    "d_model": ("d_model", "head_dim", "ffn_config.ffn_hidden_size"),
    "n_heads": ("n_heads", "head_dim", "attn_config.attn_type"),
    "attn_config.kv_n_heads": ("attn_config.attn_type",),
    "tie_word_embeddings": ("tie_word_embeddings", "logit_scale"),
    "attn_config.attn_temperature_tuning.floor_scale": (
        "attn_config.attn_temperature_tuning.attn_scale",
    ),
}
POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope", "attn_config.nope")
SHARPENED = "attn_config.attn_temperature_tuning.attn_scale"  # not where layers rotate
BLAMED |= dict.fromkeys(POSITIONS, (*POSITIONS, SHARPENED))
BLAMED |= {key: ("block_overrides",) for key in KEPT_OR_REFUSED if key.startswith("block_")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_every_field_of_the_schema_has_a_decision() -> None:
    assert set(leaves()) == {*KEPT_OR_REFUSED, *WITHOUT_LOGITS, *DROPPED, *ONE_VALUE}


@pytest.mark.parametrize("key", KEPT_OR_REFUSED)
def test_a_setting_is_kept_exactly_or_refused_by_its_key(
    key: str, tokenizer: Path, tmp_path: Path
) -> None:
    tried = 0
    for name in ARCHITECTURES:
        config = KEPT_OR_REFUSED[key](settings(**BASES[name]))
        if config is None:
            continue
        assert not list(config.check()), list(config.check())
        tried += 1
        try:
            choose(config, name)
        except UserError as error:
            blamed = {line.split(":")[0].removeprefix("model.") for line in error.problems}
            assert blamed & set(BLAMED.get(key, (key,))), (name, error.problems)
            assert all(name in line for line in error.problems)
            assert "architecture=llmfoundry" in error.problems[-1]
        else:
            model, out = decoder(config), tmp_path / name
            to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture=name)
            assert difference(model, out) < 2e-5, name
    assert tried


def difference(model: Any, folder: Path) -> float:
    """The largest between our logits and transformers'."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float((theirs(rows()).logits - logits(model, rows())).abs().max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_need_is_there_that_nothing_offends(name: str) -> None:
    refused: set[str] = set()
    for change in KEPT_OR_REFUSED.values():
        config = change(settings(**BASES[name]))
        if config is None:
            continue
        try:
            choose(config, name)
        except UserError as error:
            refused |= {line.split(":")[0].removeprefix("model.") for line in error.problems}
    assert {need.key for need in ARCHITECTURES[name].needs} <= refused


@pytest.mark.parametrize("key", WITHOUT_LOGITS)
def test_a_setting_that_logits_do_not_feel_changes_nothing(key: str) -> None:
    for name, case in BASES.items():
        base, config = settings(**case), WITHOUT_LOGITS[key](settings(**case))
        assert config is not None and get(config, key) != get(base, key)
        assert write_settings(config, choose(config, name)) == write_settings(base, name)
        assert unkept(config, name) == []


@pytest.mark.parametrize("key", DROPPED)
def test_a_setting_of_training_goes_along_or_is_named(key: str) -> None:
    kept = set()
    for name, case in BASES.items():
        config = DROPPED[key](settings(**case))
        assert config is not None and choose(config, name) == name
        back = read_settings(write_settings(config, name))[1]
        if get(back, key) == 0.25:
            kept.add(name)
            assert unkept(config, name) == []
        else:
            assert get(back, key) == TRAINING[key]
            (line,) = unkept(config, name)
            assert line.startswith(f"model.{key}: 0.25 is left out; {name} ")
    expected = {
        "emb_pdrop": {"GPT2LMHeadModel", "Starcoder2ForCausalLM", "GPTNeoForCausalLM"},
        "resid_pdrop": {"GPT2LMHeadModel", "Starcoder2ForCausalLM", "DbrxForCausalLM"},
        "attn_config.attn_pdrop": ARCHITECTURES.keys() - {"MptForCausalLM"},
        "embedding_fraction": set(),
    }
    assert expected[key] <= kept and (bool(kept) == bool(expected[key]))


def test_our_own_class_carries_every_setting() -> None:
    changes = KEPT_OR_REFUSED | WITHOUT_LOGITS | DROPPED
    for name in ("LlamaForCausalLM", "MptForCausalLM"):  # between them every setting has a meaning
        for key, change in changes.items():
            config = change(settings(**BASES[name]))
            if config is None:
                continue
            saved = LlmfoundryConfig(to_dict(config)).to_json_string()
            again = LlmfoundryConfig.from_dict(json.loads(saved))
            assert again.settings == to_dict(config), key
            assert build(ModelConfig, again.settings, []) == config, key


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_low_precision_norms_are_written_as_their_plain_form_and_named(
    kind: str, tokenizer: Path, tmp_path: Path
) -> None:
    name = {"rmsnorm": "LlamaForCausalLM", "layernorm": "GPT2LMHeadModel"}[kind]
    model = decoder(settings(**BASES[name] | {"norm_type": f"low_precision_{kind}"}))
    said: list[str] = []
    to_hf(model, tokenizer, tmp_path / "out", dtype="fp32", card=CARD, note=said.append)
    assert difference(model, tmp_path / "out") < 1e-5
    assert from_hf(str(tmp_path / "out"))[0].norm_type == kind
    (line,) = said
    assert line.startswith(f"model.norm_type: low_precision_{kind} is written as {kind}; ")
    assert line in (tmp_path / "out" / "README.md").read_text()


def test_the_table_of_coverage_is_what_the_decisions_say() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in markdown().splitlines()[2:]}
    assert "Qwen3ForCausalLM" in rows["attn_config.qk_gn"]
    assert "VaultGemmaForCausalLM" in rows["attn_config.attn_logit_softcapping"]
    assert "LlamaForCausalLM" not in rows["attn_config.sliding_window_size"]
    assert "none" in rows["block_overrides.overrides.reuse_kv_layer_idx"]
    assert rows.keys() <= set(leaves())
