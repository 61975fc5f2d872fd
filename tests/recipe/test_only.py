"""Keys with an `Only` rule: refused where it fails, accepted where it holds, and explained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from llmfoundry.cli.sweep_points import SweepRecipe
from llmfoundry.recipe.schema import Choice, Key, Only, Range, Schema, Unless
from llmfoundry.recipe.typed import Problem, build
from tests.front import Front
from tests.recipe.mutations import SCRIPTS

Values = dict[str, Any]
SOUND: dict[str, Values] = {  # what each script needs in any case
    "finetune": {"model.pretrained": "base"},
    "eval": {"checkpoint": "runs/x"},
    "generate": {"checkpoint": "runs/x"},
    "convert": {"checkpoint": "runs/x", "to": "hf", "output": "out"},
    "fetch_eval_data": {"from_hub": True},
    "scaling": {"base": "quickstart", "sizes": [64], "tokens": [1e6]},
}
OTHERS: dict[str, Values] = {  # a setting -> what a recipe with it needs too
    "model.ffn_config.ffn_type=dmoe": {"model.ffn_config.moe_num_experts": 4},
    "model.ffn_config.moe_n_group=2": {"model.ffn_config.moe_topk_group": 1},
    "model.ffn_config.first_k_dense_replace=2": {"model.ffn_config.dense_hidden_size": 64},
    "parallel.expert_parallel_degree=2": {
        "model.ffn_config.ffn_type": "dmoe",
        "model.ffn_config.moe_num_experts": 4,
    },
    "model.attn_config.attn_type=multihead_latent_attention": {
        "model.attn_config.rope": True,
        "model.attn_config.kv_lora_rank": 16,
        "model.attn_config.qk_nope_head_dim": 8,
        "model.attn_config.qk_rope_head_dim": 8,
        "model.attn_config.v_head_dim": 8,
    },
    "model.attn_config.rope_hf_config.type=llama3": {
        "model.attn_config.rope": True,
        "model.attn_config.rope_hf_config.factor": 8.0,
        "model.attn_config.rope_hf_config.low_freq_factor": 1.0,
        "model.attn_config.rope_hf_config.high_freq_factor": 4.0,
        "model.attn_config.rope_hf_config.original_max_position_embeddings": 64,
    },
    "model.attn_config.rope_hf_config.type=linear": {
        "model.attn_config.rope": True,
        "model.attn_config.rope_hf_config.factor": 8.0,
    },
    "model.attn_config.rope_hf_config.type=yarn": {
        "model.attn_config.rope": True,
        "model.attn_config.rope_hf_config.factor": 8.0,
        "model.attn_config.rope_hf_config.original_max_position_embeddings": 64,
    },
    "model.attn_config.rope_hf_config.mscale=2": {
        "model.attn_config.rope_hf_config.mscale_all_dim": 1.0,
    },
    "model.attn_config.rope_hf_config.mscale_all_dim=2": {
        "model.attn_config.rope_hf_config.mscale": 1.0,
    },
    "tokenizer.name=huggingface": {"tokenizer.path": "there"},
    "data.name=files": {"data.paths": ["a.jsonl"]},
    "data.name=huggingface": {"data.dataset": "there"},
    "data.name=shards": {"data.remote": "there", "eval.validation": False},
    "data.name=instructions": {"data.format": "chat"},
    "data.name=mixture": {"data.streams": {"a": {"name": "python_stdlib", "proportion": 1.0}}},
    "data.format=prompt_response": {"data.name": "files", "data.paths": ["a.jsonl"]},
    "schedule.name=inv_sqrt_with_warmup": {"schedule.t_scale": "10ba"},
    "preference.name=dpo": {"data.name": "instructions", "data.format": "preference"},
    "preference.name=simpo": {"data.name": "instructions", "data.format": "preference"},
    "preference.name=kto": {"data.name": "instructions", "data.format": "unpaired"},
    "model.quantize=nf4": {"adapter.name": "lora"},
    "prepare.format=mds": {
        "prepare.output": "out",
        "data.name": "files",
        "data.paths": ["a.jsonl"],
    },
    "launch.target=ssh": {"launch.hosts": ["a"]},
    "launch.target=slurm": {"launch.image": "x"},
    "compute=[1000000000000.0]": {"tokens": []},
    "to=gguf": {"output": "out.gguf"},
    "sweep.how=random": {"sweep.n": 8},
}


class Case(NamedTuple):
    """A key with rules: the script whose recipe has it, and its dotted name."""

    script: str
    dotted: str
    key: Key

    @property
    def section(self) -> Schema:
        """The section that declares the key."""
        return Schema.of(self.key.owners[0])

    @property
    def prefix(self) -> str:
        """The dotted name of that section, with its last dot."""
        return self.dotted.removesuffix(self.key.name)

    @property
    def rules(self) -> list[Only]:
        """Its rules, after those of the keys that they name."""
        above = [
            rule
            for own in _rules(self.key)
            if len(own.names) == 1 and not isinstance(own, Unless)
            for other in [self.section.find(own.names[0])]
            for rule in ([] if other is None else _rules(other))
        ]
        return [*above, *_rules(self.key)]


def _rules(key: Key) -> list[Only]:
    return [rule for rule in key.rules if isinstance(rule, Only)]


SCHEMAS = {**SCRIPTS, "sweep": SweepRecipe}


def cases() -> Iterator[Case]:
    """Every key with rules, once for the class that declares it."""
    seen: set[tuple[type, str]] = set()
    for script, schema in SCHEMAS.items():
        for dotted, key in Schema.of(schema).walk():
            own = (key.owners[0], key.field)
            if _rules(key) and own not in seen:
                seen.add(own)
                yield Case(script, dotted, key)


CASES = [*cases()]
VALUES: Values = {  # of a certain form
    "optimizer.betas": [0.5, 0.5],
    "optimizer.momentum": 0.5,
    "schedule.t_max": "10ba",
    "schedule.t_cooldown": "10ba",
    "schedule.t_scale": "20ba",
    "data.phases": [{"at": "10ba", "proportions": {"a": 1.0}}],
    "data.streams": {"a": {"name": "python_stdlib"}},
    "data.paths": ["b.jsonl"],
    "data.columns": {"prompt": "x"},
    "data.preprocess": "module:function",
    "model.attn_config.rope_hf_config": {"type": "linear", "factor": 8.0},
    "model.attn_config.rope_hf_config.low_freq_factor": 2.0,
    "model.ffn_config.moe_jitter_eps": 0.5,
    "eval.icl_max_fraction": 0.5,
    "profile.ranks": [1],
    "registry.best": {"metric": "x"},
    "logger.prometheus_textfile": "x.prom",
    "supervise.webhook": "https://host/",
    "prepare.columns": {"a": "str"},
    "launch.time": "1:00:00",
    "launch.mounts": ["a:/b"],
    "launch.resources": {"cpu": 1},
    "launch.options": ["-p", "22"],
    "adapter.trainable_token_indices": [5],
    "held_out": {"size": 64, "tokens": 1e6},
    "launch": {"target": "slurm"},
    "sizes": [128],
    "tokens": [2e6],
    "compute": [1e12],
    "seeds": [1],
    "budget": "1e21",
    "overrides": ["seed=1"],
    "families": {"a": []},
    "hardware": "8xh100",
    "parallel.activation_checkpointing_target": "block",
}


def other_value(dotted: str, key: Key) -> Any:
    """A value that the key takes and that is not its default."""
    if dotted in VALUES:
        return VALUES[dotted]
    choice, numbers = key.rule(Choice), key.rule(Range) or Range()
    others = [option for option in (choice.options if choice else ()) if option != key.default]
    if others:
        return others[0]
    if bool in key.types:
        return not key.default
    if int in key.types or float in key.types:
        tried = (number for number in (2, 0.25, 8, 4096) if numbers.problem(number) is None)
        return next(number for number in tried if number != key.default)
    kinds = {getattr(kind, "__origin__", kind) for kind in key.types}
    return ["x"] if list in kinds else {"x": "y"} if dict in kinds else "x"


def chosen(case: Case, rule: Only, *, holds: bool) -> Values | None:
    """Values of the keys that a rule names with which it holds, or fails; None: there are none."""
    found: Values = {}
    matches = holds != isinstance(rule, Unless)
    for name in rule.names[:1] if holds else rule.names:  # one is enough for a rule to hold
        key, dotted = case.section.find(name), f"{case.prefix}{name}"
        assert key is not None
        choice = key.rule(Choice)
        options = [key.default, other_value(dotted, key), *(choice.options if choice else ())]
        options += [False] if bool in key.types else [0.0] if float in key.types else []
        options += [value for value in rule.options if value is not None] if rule.listed else []
        usable = [option for option in options if rule.matches(option, key) == matches]
        usable = [option for option in usable if not _is_misspelled(choice, option)]
        if not usable:
            return None
        found[dotted] = usable[0]
    return found


def _is_misspelled(choice: Choice | None, value: Any) -> bool:
    return isinstance(value, str) and choice is not None and choice.problem(value) is not None


def settings(case: Case, failing: Only | None = None) -> Values | None:
    """A recipe in which all rules of a key hold but for one; None: it holds with all values."""
    own = {case.dotted: other_value(case.dotted, case.key)}
    found = dict(own)
    for rule in case.rules:
        values = {name: case.section.find(name) for name in rule.names}
        given = {
            n: found.get(f"{case.prefix}{n}", key and key.default) for n, key in values.items()
        }
        if rule is not failing and not rule.holds(given, case.section):
            found |= chosen(case, rule, holds=True) or {}
    if failing is not None:
        wrong = chosen(case, failing, holds=False)
        if wrong is None:
            return None
        found |= wrong
    for key, value in [*found.items()]:
        found = OTHERS.get(f"{key}={value}", {}) | found
    found = SOUND.get(case.script, {}) | found
    return {key: value for key, value in found.items() if value is not None}


def problems(case: Case, found: Values) -> list[str]:
    """What the recipe's check yields."""
    values: Values = {"run_name": "x"} if "run_name" in Schema.of(SCHEMAS[case.script]).keys else {}
    for dotted, value in found.items():
        *sections, name = dotted.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    wrong: list[Problem] = []
    recipe = build(SCHEMAS[case.script], values, wrong)
    assert not wrong
    if hasattr(recipe, "settle"):
        recipe.settle()
    return list(recipe.check())


def test_there_are_many() -> None:
    assert len(CASES) > 150


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.dotted)
def test_a_key_is_refused_where_a_rule_fails_and_accepted_where_all_hold(case: Case) -> None:
    accepted = settings(case)
    assert accepted is not None
    assert problems(case, accepted) == [], accepted
    for rule in case.rules:
        refused = settings(case, rule)
        if refused is None:
            # every optimizer that is shipped takes betas; one loss is shipped
            assert case.dotted in ("optimizer.betas", "loss.z_loss_weight")
            continue
        lines = [line for line in problems(case, refused) if "has no effect" in line]
        own = [line for line in lines if line.startswith((f"{case.dotted}:", f"{case.dotted}."))]
        assert own, (rule, refused)
        assert any(f"{case.prefix}{name}" in line for line in own for name in rule.names), own
        assert all(line.endswith("; remove it") for line in own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.dotted)
def test_help_says_so(case: Case) -> None:
    text = case.key.explanation(case.dotted)
    for rule in _rules(case.key):
        sentence = rule.sentence(case.section, case.prefix)
        assert sentence in text and all(f"{case.prefix}{name}" in sentence for name in rule.names)
    assert "Only " not in case.key.meaning  # which would be said twice


def test_the_front_prints_the_rule_and_ends_with_status_2(front: Front) -> None:
    out = front("--help", "optimizer.momentum").out
    assert "Only with optimizer.name=muon. Momentum" in out
    got = front("run_name=x", "optimizer.momentum=0.5")
    assert got.status == 2 and got.errors == [
        "optimizer.momentum: has no effect with optimizer.name: decoupled_adamw, only with muon;"
        " remove it"
    ]
