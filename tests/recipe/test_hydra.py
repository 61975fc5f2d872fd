"""Our composition is what Hydra's own makes of the same files, wherever both have a meaning.

They differ on purpose where a group is chosen over a section that the recipe itself has keys of:
Hydra merges the two, we replace the section (`test_groups.py`). Hydra reads the files itself here.
Each day tries a third of them, or `pytest -m "slow or not slow"` all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from llmfoundry.recipe.compose import compose
from llmfoundry.recipe.paths import YAMLS, group_options
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import Problem, build, to_dict
from tests.day import part_of_the_day
from tests.selection import slow_but

SCHEMA = Schema.of(TrainRecipe)
RECIPES = sorted(YAMLS.glob("*.yaml"))
VALUES = [
    "seed=3",
    "optimizer.lr=1e-3",
    "model.n_layers=2",
    "run_name=a-b",
    "optimizer.betas=[0.8,0.9]",
]
OPTIONS = group_options([YAMLS], SCHEMA)
GROUPS = [f"{group}={name}" for group, names in OPTIONS.items() for name in names]


def by_hydra(recipe: Path | None, words: list[str]) -> TrainRecipe:
    """Of Hydra's composition of a file below yamls/, or of none, over the schema's defaults."""
    with hydra.initialize_config_dir(str(YAMLS), version_base="1.3"):
        theirs = hydra.compose(recipe and recipe.stem, words)
    merged = OmegaConf.create(to_dict(TrainRecipe()))
    for key in theirs:
        value = OmegaConf.to_container(theirs)[key]  # type: ignore[index,call-overload]
        OmegaConf.update(merged, str(key), value, merge=True, force_add=True)
    return typed(OmegaConf.to_container(merged, resolve=True))


def ours(recipe: Path | None, words: list[str]) -> TrainRecipe:
    """The same, as a script has it."""
    return typed(compose(SCHEMA, recipe, words).resolved()[0])


def typed(values: Any) -> TrainRecipe:
    """With its values' types, which `1e-8` has only then."""
    problems: list[Problem] = []
    recipe = build(TrainRecipe, values, problems)
    assert not problems
    return recipe


@pytest.mark.parametrize(
    "recipe", slow_but(part_of_the_day(RECIPES, 3), RECIPES), ids=lambda path: path.stem
)
def test_a_recipe_with_and_without_values_is_hydras(recipe: Path) -> None:
    assert ours(recipe, []) == by_hydra(recipe, [])
    forced = [f"++{word}" for word in VALUES]
    assert ours(recipe, VALUES) == by_hydra(recipe, forced) != by_hydra(recipe, [])


@pytest.mark.parametrize("word", slow_but(part_of_the_day(GROUPS, 3), GROUPS))
def test_a_group_alone_is_hydras(word: str) -> None:
    assert ours(None, [word]) == by_hydra(None, [f"+{word}"])
