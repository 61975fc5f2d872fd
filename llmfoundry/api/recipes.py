"""`recipe` of `import llmfoundry`: a recipe read and checked as the command line does.

A recipe is a tree of dataclasses. Values may be set on it; `checked_recipe` checks them when it is
used, so that a program cannot train what the command line would refuse.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from llmfoundry.errors import UserError
from llmfoundry.migrate.other_tools import register_other_tools
from llmfoundry.recipe.finetune import FinetuneRecipe, is_finetuning
from llmfoundry.recipe.load import checked, read, recheck
from llmfoundry.recipe.overrides import words_of
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import notes, require
from llmfoundry.redaction import hide, public

Overrides: TypeAlias = "Mapping[str, Any] | Sequence[str]"
"""Values by dotted key, or words as on the command line."""
T = TypeVar("T")


def recipe(source: str | os.PathLike[str], overrides: Overrides = ()) -> TrainRecipe:
    """Return a recipe, with its values checked.

    >>> recipe = lf.recipe("quickstart", {"max_duration": "50ba", "optimizer.lr": 1e-3})
    >>> recipe.optimizer.lr
    0.001
    >>> recipe.run_name = "other"      # checked when the recipe is used
    >>> recipe.optimizer.lr = -1
    >>> lf.train(recipe)
    Traceback (most recent call last):
    ...
    llmfoundry.errors.UserError: optimizer.lr: -1.0 must be greater than 0

    Args:
        source: name of a shipped recipe (`llmfoundry ls` lists them), or a file, such as the
            recipe.yaml of a run.
        overrides: values by dotted key. A text may choose a group, `{"model": "mpt-125m"}`. Or a
            list of words, `["optimizer.lr=1e-3"]`.

    Raises:
        UserError: a line for each unknown key and each invalid value, as the command line reports.
    """
    words = words_as_written(overrides)
    path = os.fspath(source)
    kind = FinetuneRecipe if is_finetuning(path, words) else TrainRecipe
    found = checked_words(kind, path, words)
    for note in notes(found):
        print(public(note), file=sys.stderr)
    return found


def words_as_written(overrides: Overrides) -> list[str]:
    """Return overrides as words of a command line."""
    if isinstance(overrides, str):
        raise UserError(f"overrides: {overrides!r} is a text; write {{key: value}}, or a list")
    return words_of(overrides) if isinstance(overrides, Mapping) else [*overrides]


def checked_words(kind: type[T], path: str | Path | None, words: Sequence[str]) -> T:
    """Return a recipe of some kind, checked, with the hints that scripts give."""
    register_other_tools()
    return checked(kind, path, words)


def checked_texts(
    kind: type[T], texts: Mapping[str, str | list[str]], values: Mapping[str, Any]
) -> T:
    """Return a recipe of some kind, checked, with values by key.

    The `texts` of a program, such as prompts and paths, are taken literally. In `values`, as on the
    command line, quotes, null and ${...} have a meaning.
    """
    register_other_tools()
    hide(texts)
    recipe, _ = read(kind, None, words_of(values))  # its check is made below, with the texts
    require(recipe)
    for key, text in texts.items():
        setattr(recipe, key, text)
    problems = [*recipe.check()]  # type: ignore[attr-defined]
    if problems:
        raise UserError(*problems)
    return recipe


def checked_recipe(given: TrainRecipe | str, overrides: Overrides = ()) -> TrainRecipe:
    """Return a fresh copy of a recipe, or the recipe that a name and overrides stand for.

    Raises:
        UserError: a value is invalid, or the overrides are beside a recipe that has its values.
    """
    if isinstance(given, str | os.PathLike):
        return recipe(given, overrides)
    if overrides:
        raise UserError("overrides: set these values on the recipe, or in lf.recipe(...)")
    if not isinstance(given, TrainRecipe):
        kind = type(given).__name__
        raise UserError(f"recipe: {kind} is none; write lf.recipe(NAME), or the NAME of one")
    register_other_tools()
    return recheck(getattr(given, "user_recipe", given))
