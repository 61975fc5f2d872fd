"""Every shipped YAML: it composes, is sound, says how to run it, and does not repeat its groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS, find_shipped
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe

RECIPES = sorted(YAMLS.glob("*.yaml"))
FINETUNING = ("scaling", "finetune", "adapter", "preference")  # tests/test_finetune_recipes.py's
SUPERVISED = [f"data/{n}.yaml" for n in ("chat", "instructions", "preference", "prompt_response")]
CHOICES = [
    path
    for path in sorted(YAMLS.glob("*/*.yaml"))
    if path.parent.name not in FINETUNING and str(path.relative_to(YAMLS)) not in SUPERVISED
]
PARTNERS = [  # recipes that differ most in what they set beside their groups
    YAMLS / f"{name}.yaml" for name in ("mpt-7b-64k", "dbrx-tiny", "quickstart", "mpt-125m")
]
# What a user must add to a choice that stands for text of their own.
NEEDED = {
    "data=files": ["data.paths=[a.txt]"],
    "data=jsonl": ["data.paths=[a.jsonl]"],
    "data=huggingface": ["data.dataset=some/set"],
    "data=mds": ["data.remote=s3://bucket/set"],
    "tokenizer=huggingface": ["tokenizer.path=some/model"],
}


def header(path: Path) -> str:
    """The comment at the head of a file."""
    lines = path.read_text().splitlines()
    count = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:count])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_sound_and_says_how_to_run_it(path: Path) -> None:
    recipe = checked(TrainRecipe, path)
    recipe = recipe.resolve()
    assert list(recipe.check()) == [], "derived values must not be mistakes"
    assert re.search(rf"python scripts/train.py yamls/{path.name}(\s|$)", header(path))
    assert len(path.read_text().splitlines()) < 40
    if recipe.eval.gauntlet is not None:
        assert find_shipped(recipe.eval.gauntlet, "eval.gauntlet").is_file()


@pytest.mark.parametrize(
    "partners", [PARTNERS[:2], pytest.param(PARTNERS[2:], marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("path", CHOICES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_group_choice_fits_other_recipes(path: Path, partners: list[Path]) -> None:
    group = path.parent.name
    choice = f"{group}={path.stem}"
    words = [choice, *NEEDED.get(choice, [])]
    for recipe in partners:
        filled = checked(TrainRecipe, recipe, words)
        filled = filled.resolve()
        assert list(filled.check()) == []
    assert 1 <= len(header(path).splitlines()) <= (7 if group == "launch" else 4)
    if group == "eval":
        assert checked(EvalRecipe, None, ["checkpoint=runs/x", *words]).eval is not None


def test_choices_for_text_of_ones_own_ask_for_it() -> None:
    for choice, (needed,) in NEEDED.items():
        word = needed.split("=")[0]
        with pytest.raises(Exception, match=f"^yamls/.*: {word}: |^{word}: "):
            checked(TrainRecipe, RECIPES[0], [choice])


def test_groups_are_sections() -> None:
    folders = {path.name for path in YAMLS.iterdir() if path.is_dir()}
    assert folders - {"finetune", "scaling"} <= set(Schema.of(FinetuneRecipe).keys)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_does_not_set_what_its_groups_set(path: Path) -> None:
    """Else a group chosen on the command line would not have its say."""
    body = yaml.safe_load(path.read_text())
    assert "model" not in body, "a model's shape belongs under yamls/model/"
    for choice in body["defaults"]:
        if isinstance(choice, str):  # another recipe
            continue
        ((group, option),) = choice.items()
        group = group.removeprefix("override ")
        chosen = yaml.safe_load((YAMLS / group / f"{option}.yaml").read_text())
        assert not set(body.get(group, {})) & set(chosen), f"{group}={option}"


def test_mpt_125m_has_the_published_number_of_parameters_and_tokens() -> None:
    recipe = checked(TrainRecipe, YAMLS / "mpt-125m.yaml")
    m = recipe.model
    positions, vocab = recipe.max_seq_len, m.vocab_size or 0
    layers, width = m.n_layers, m.d_model
    count = 12 * layers * width**2 + (vocab + positions) * width + (13 * layers + 2) * width
    assert count == 125_311_488
    batches = int(recipe.max_duration.removesuffix("ba"))
    tokens = batches * recipe.global_train_batch_size * positions
    assert tokens / count == pytest.approx(20, rel=0.01)
