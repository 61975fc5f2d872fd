"""Values that Python gives a recipe are checked as the command line checks them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import llmfoundry as lf
from llmfoundry.recipe.load import checked, recheck
from llmfoundry.recipe.overrides import parse_value, words_of
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_yaml
from tests.day import day

CHARACTERS = "ab'\"\\ \n[]{}:=,$é/.~#"
QUICKSTART = "quickstart"


def test_values_are_the_words_of_a_command_line() -> None:
    values = {"max_duration": "50ba", "optimizer.lr": 1e-3, "model": "mpt-125m", "seed": 3}
    words = ["max_duration=50ba", "optimizer.lr=1e-3", "model=mpt-125m", "seed=3"]
    assert lf.recipe(QUICKSTART, values) == lf.recipe(QUICKSTART, words)
    assert lf.recipe(QUICKSTART, values) == checked(TrainRecipe, QUICKSTART, words)


def test_every_value_survives_the_grammar() -> None:
    generator = random.Random(day())
    for _ in range(300):
        text = "".join(generator.choices(CHARACTERS, k=generator.randrange(9)))
        number = generator.random() * 10 ** generator.randrange(-30, 30)
        value = [text, {"a-b/c": text, "d e": [number]}, number, 3, None, True]
        (word,) = words_of({"key": value})
        parsed = parse_value(word.removeprefix("key="))
        assert parsed is not None and parsed.value() == value, word


def test_derived_values_follow_those_that_are_set() -> None:
    recipe = lf.recipe(QUICKSTART)
    assert recheck(recipe) == recipe and to_yaml(recheck(recipe)) == to_yaml(recipe)
    recipe.run_name = "other"
    again = recheck(recipe)
    assert again.save_folder == "runs/other" and recipe.save_folder == "runs/quickstart"
    assert "save_folder: runs/${run_name}" in to_yaml(again)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optimizer.lr", -1, "optimizer.lr: -1.0 must be greater than 0"),
        ("optimizer.lr", float("nan"), "optimizer.lr: nan is not a finite number"),
        ("optimizer.lr", "fast", "optimizer.lr: 'fast' is not a number"),
        ("optimizer.lrr", 1, "unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        ("max_durations", "3ba", "unknown key 'max_durations'; did you mean 'max_duration'?"),
        ("optimizer", {"lrr": 3}, "unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        ("optimizer", None, "optimizer: null is not a section; write its keys below it"),
        ("seed", 1.5, "seed: 1.5 is not an integer"),
        ("plugins", [Path("nope.py")], "plugins: nothing at nope.py"),
        ("learning_rate", 1, "unknown key 'learning_rate'; write optimizer.lr=6e-4"),
    ],
)
def test_a_wrong_value_is_refused_where_the_recipe_is_used(key: str, value: Any, line: str) -> None:
    for use in (lf.train, lf.data, lf.build):
        recipe = lf.recipe(QUICKSTART)
        *sections, name = key.split(".")
        section: Any = recipe
        for each in sections:
            section = getattr(section, each)
        setattr(section, name, value)
        with pytest.raises(lf.UserError) as error:
            use(recipe)
        assert str(error.value).startswith(line)


def test_what_is_no_recipe_is_refused() -> None:
    for given, line in (
        (3, "recipe: int is none"),
        ("quickstar", "no recipe at quickstar; did you mean yamls/quickstart.yaml"),
    ):
        with pytest.raises(lf.UserError, match=line):
            lf.train(given)  # type: ignore[arg-type]
    with pytest.raises(lf.UserError, match="set these values on the recipe"):
        lf.train(lf.recipe(QUICKSTART), {"seed": 3})
    with pytest.raises(lf.UserError, match="overrides: 'seed=3' is a text"):
        lf.recipe(QUICKSTART, "seed=3")
    with pytest.raises(lf.UserError, match=r"is of type complex; write a number"):
        lf.recipe(QUICKSTART, {"seed": 1j})
    with pytest.raises(lf.UserError, match=r"model.pretrained: is missing"):
        lf.finetune(QUICKSTART)
