"""Every field of the `model` section: kept exactly by an architecture, or refused by its key.

`changes.py` must have all of them, so that a setting which is new in the schema cannot be left out
of exports in silence, as transformers itself would with many a key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.hf import LlmfoundryConfig
from llmfoundry.hf.architecture import LOSS, TRAINING
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.choose_architecture import choose_architecture, unkept
from llmfoundry.hf.config_keys import get, read_settings, write_settings
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import build, to_dict
from tests.hf.changes import (
    BASES,
    BLAMED,
    DROPPED,
    KEPT_OR_REFUSED,
    ONE_VALUE,
    WITHOUT_LOGITS,
    leaves,
)
from tests.hf.random_models import CARD, decoder, logits, rows, settings, to_hf, write_tokenizer
from tests.selection import slow_but


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_every_field_of_the_schema_has_a_decision() -> None:
    assert set(leaves()) == {*KEPT_OR_REFUSED, *WITHOUT_LOGITS, *DROPPED, *ONE_VALUE}


@pytest.mark.parametrize("key", slow_but(list(KEPT_OR_REFUSED)[::2], KEPT_OR_REFUSED))
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
            choose_architecture(config, name)
        except UserError as error:
            blamed = {line.split(":")[0].removeprefix("model.") for line in error.problems}
            assert blamed & set(BLAMED.get(key, (key,))), (name, error.problems)
            assert all(name in line for line in error.problems)
            assert "architecture=llmfoundry" in error.problems[0]
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
            choose_architecture(config, name)
        except UserError as error:
            refused |= {line.split(":")[0].removeprefix("model.") for line in error.problems}
    assert {need.key for need in ARCHITECTURES[name].needs} <= refused


@pytest.mark.parametrize("key", WITHOUT_LOGITS)
def test_a_setting_that_logits_do_not_feel_changes_nothing(key: str) -> None:
    for name, case in BASES.items():
        base, config = settings(**case), WITHOUT_LOGITS[key](settings(**case))
        if config is None:
            assert (".moe_" in key or "router" in key) and not ARCHITECTURES[name].mixture
            continue
        assert get(config, key) != get(base, key)
        assert write_settings(config, choose_architecture(config, name)) == write_settings(
            base, name
        )
        assert unkept(config, name) == []


@pytest.mark.parametrize("key", DROPPED)
def test_a_setting_of_training_goes_along_or_is_named(key: str) -> None:
    kept = set()
    for name, case in BASES.items():
        config = DROPPED[key](settings(**case))
        if config is None:
            assert (".moe_" in key or "router" in key) and not ARCHITECTURES[name].mixture
            continue
        assert choose_architecture(config, name) == name
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
        "ffn_config.moe_loss_weight": {
            name for name, a in ARCHITECTURES.items() if any(f.ours == LOSS for f in a.fields)
        },
        "ffn_config.moe_jitter_eps": {"DbrxForCausalLM", "MixtralForCausalLM"},
        "ffn_config.moe_zloss_weight": set(),
    }
    assert expected[key] <= kept and (bool(kept) == bool(expected[key]))


def test_our_own_class_carries_every_setting() -> None:
    changes = KEPT_OR_REFUSED | WITHOUT_LOGITS | DROPPED
    for name in (
        "LlamaForCausalLM",
        "MptForCausalLM",
        "DbrxForCausalLM",
    ):  # between them every setting has a meaning
        for key, change in changes.items():
            config = change(settings(**BASES[name]))
            if config is None:
                continue
            saved = LlmfoundryConfig(to_dict(config)).to_json_string()
            again = LlmfoundryConfig.from_dict(json.loads(saved))
            assert again.settings == to_dict(config), key
            assert to_dict(build(ModelConfig, again.settings, [])) == to_dict(config), key


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
