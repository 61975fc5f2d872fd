"""adapter_config.json of others: patterns that peft matches so too, and hostile ones."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llmfoundry import bounded
from llmfoundry.errors import UserError
from llmfoundry.hf.peft import names
from llmfoundry.hf.peft.names import CONFIG, check_patterns, first_matches
from llmfoundry.hf.peft.read import read_adapter
from tests.hf.test_peft import adapted, save

peft_other = pytest.importorskip("peft.utils.other")

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate")
NAMES = ["lm_head", *(f"model.layers.{n}.{module}" for n in range(12) for module in MODULES)]
ORDINARY = [
    ["q_proj"],
    ["self_attn.q_proj", "q_proj", "up_proj"],
    ["model.layers.1.self_attn.q_proj"],
    ["layers.1.mlp.gate", "gate", "lm_head", "proj", "", "model"],
    [r"layers\.[0-3]\..*q_proj", "q_proj"],
    [r".*\.(q|k)_proj", "lm_.*"],
    [r"^model\.layers\.1[01]\.mlp\.up_proj"],
    ["k_proj|up_proj"],
]
SLOW = "([a-z._0-9]+)+!"


@pytest.mark.parametrize("given", ORDINARY)
def test_the_first_pattern_that_matches_is_that_of_peft(given):
    found = first_matches(given, NAMES, file="f")
    for name in NAMES:
        theirs = peft_other.get_pattern_key(given, name)
        assert found.get(name, name) == theirs


def test_names_need_no_child(monkeypatch):
    monkeypatch.setattr(names, "run_bounded", None)
    assert first_matches(["q_proj"], NAMES, file="f")
    check_patterns({"target_modules": ["q_proj"], "alpha_pattern": {"a.b": 1}}, NAMES, file="f")
    start = time.process_time()
    first_matches([f"layer_{n}" for n in range(100_000)], NAMES * 20, file="f")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": SLOW},
        {"exclude_modules": SLOW},
        {"rank_pattern": {SLOW: 4}},
        {"alpha_pattern": {SLOW: 4}},
        {"modules_to_save": [SLOW]},
        {"layers_pattern": ["layers", SLOW]},
        {"target_modules": "(unclosed"},
    ],
)
def test_patterns_that_peft_would_not_end_with_are_one_line(config, monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"^f: .* and was stopped") as error:
        check_patterns(config, NAMES, file="f")
    assert len(error.value.lines()) == 1


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"alpha_pattern": {SLOW: 4}}, "alpha_pattern: took more than"),
    "after names": ({"alpha_pattern": {"a": 4, SLOW: 4}}, "alpha_pattern: took more"),
    "no expression": ({"alpha_pattern": {"(": 4}}, "alpha_pattern: failed"),
    "no section": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is not a section"),
    "no number": ({"alpha_pattern": {"q_proj": "4"}}, "write a number above 0"),
    "negative": ({"rank_pattern": {"q_proj": -4}}, "write a number above 0"),
    "no rank": ({"r": 0}, "write a number above 0"),
    "not a number": ({"lora_alpha": float("nan")}, "write a number above 0"),
    "replication": ({"layer_replication": [[0, 10**9]]}, "layer_replication"),
    "target of nothing": ({"target_parameters": 5}, "target_parameters is not a list"),
    "another type": ({"peft_type": "VERA"}, "peft_type VERA"),
    "other ranks": ({"r": 10**12}, "has rank 3, which adapter_config.json does"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_adapters_end_soon_with_a_line(name, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)
    changes, said = HOSTILE[name]
    base, model = adapted("LlamaForCausalLM")
    save(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=said) as error:
        read_adapter(tmp_path / "adapter", base, dropout=0.0)
    assert len(error.value.lines()) == 1 and str(tmp_path / "adapter") in str(error.value)


def test_patterns_of_many_targets_take_little(tmp_path: Path):
    base, model = adapted("MixtralForCausalLM")
    save(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / CONFIG
    written = json.loads(file.read_text())
    many = {f"layer_{n}": 3 for n in range(50_000)}
    written["target_parameters"] = [*(written.get("target_parameters") or []), *many]
    for key in ("alpha_pattern", "rank_pattern"):
        written[key] = {**(written.get(key) or {}), **many}
    file.write_text(json.dumps(written))
    start = time.process_time()
    assert read_adapter(tmp_path / "adapter", base, dropout=0.0).plan
    assert time.process_time() - start < 10
