"""A resolved recipe has a value wherever its types declare one, and is a copy of the user's."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.recipe.load import checked, load
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.schema import Schema, _failed_rule, options
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.recipe.typed import to_yaml

SETTINGS = {
    "plain": [],
    "profile": ["profile.trace=true", "profile.memory_snapshot=true"],
    "callbacks": [
        "callbacks.early_stopper.metric=loss/train/total",
        "callbacks.watch.loss_spike=roll_back",
    ],
    "trackers": ["logger.trackio=true", "logger.wandb=true"],
    "shards": ["parallel.data_parallel_shard_degree=2"],
    "muon": ["optimizer=muon"],
}
BY_OTHER_RULES = ("optimizer.", "schedule.", "model.init_config.init_gain")
"""Keys whose effect a table of choices or the section's own check decides, not a rule `Only`."""


def unset(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys that a type declares without None, that have an effect, and that are None."""
    schema = Schema.of(type(section))
    for name, key in schema.keys.items():
        value = getattr(section, key.field)
        declared = options(typing.get_type_hints(type(section))[key.field])
        if dataclasses.is_dataclass(value):
            yield from unset(value, f"{prefix}{name}.")
        elif value is None and types.NoneType not in declared:
            dotted = f"{prefix}{name}"
            has_effect = _failed_rule(key, schema, section, prefix) is None
            if has_effect and not dotted.startswith(BY_OTHER_RULES):
                yield dotted


@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["quickstart", "dbrx", "mpt-7b", "llama-8b"])
def test_what_a_resolved_type_declares_is_set(name: str, words: list[str]) -> None:
    recipe = load(TrainRecipe, YAMLS / f"{name}.yaml", words).resolve()
    recipe.model.fill(vocab_size=257)
    assert list(unset(recipe)) == []


def test_the_users_recipe_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("defaults: [model: dbrx-tiny]\noptimizer: {lr: 0.5}\nseed: ${oc.env:SEED_,3}\n")
    user_recipe = checked(TrainRecipe, path)
    before = to_yaml(user_recipe)
    recipe = user_recipe.resolve()
    recipe.model.ffn_config.moe_top_k, recipe.parallel.nproc_per_node = 1, 2
    assert isinstance(recipe, ResolvedTrainRecipe) and recipe.user_recipe is user_recipe
    assert to_yaml(recipe.user_recipe) == before and "seed: ${oc.env:SEED_,3}" in before
