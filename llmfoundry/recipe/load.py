"""Loading of typed recipes from a file and overrides; every reader of a saved recipe uses it.

Scripts start with `checked`. `load` does not check, and only reports missing values that are
needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmfoundry.errors import MOST_LINES, UserError
from llmfoundry.recipe.paths import find_recipe, show
from llmfoundry.recipe.plugins import import_plugins, leave_out
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import (
    Problem,
    build,
    edits,
    remember,
    require,
    unknown_attributes,
)
from llmfoundry.recipe.unknown_keys import other_tools_file, unknown_key
from llmfoundry.recipe.yaml_file import read_yaml
from llmfoundry.redaction import hide, hide_override

if TYPE_CHECKING:
    from llmfoundry.recipe.compose import Composed

T = TypeVar("T")


def load(recipe_type: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Return the typed recipe at `path` with `overrides`, unchecked and without importing plugins.

    A value that is not available here, such as an environment variable that is not set, keeps its
    default until `require` asks for it: generating text needs no key to the training data.

    Raises:
        UserError: all unknown keys and wrong types, or the first file that cannot be read.
    """
    return read(recipe_type, path, overrides, plugins=False)[0]


def checked(recipe_type: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Return the recipe as `load` does, and raise all lines of its `check` and missing values."""
    recipe, problems = read(recipe_type, path, overrides)
    require(recipe)
    if problems:
        raise UserError(*problems)
    return recipe


def read(
    recipe_type: type[T],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    plugins: bool = True,
) -> tuple[T, list[str]]:
    """Load a recipe, import its plugins and resolve `auto` formats; return also its error lines."""
    from llmfoundry.recipe.compose import compose  # OmegaConf takes its time

    # Plain values of the file and the overrides, with interpolations resolved.
    schema = Schema.of(recipe_type)
    for word in overrides:
        hide_override(word)
    file = None if path is None else find_recipe(path)
    if file is not None:
        _refuse_foreign(file, schema)
    composed = compose(schema, file, overrides)
    raw = composed.raw()
    hide(raw)
    if file is not None and raw.get("run_name", "") is None:
        composed.config.run_name = file.stem
    return _typed(recipe_type, composed, raw, file=file, plugins=plugins)


def recheck(recipe: T) -> T:
    """Return a copy of a recipe, checked as when it was read, with what was set since.

    Values that were derived from others, such as a folder named after the run, follow those.

    Raises:
        UserError: a line for each unknown attribute, wrong type and value, and missing value.
    """
    from llmfoundry.recipe.compose import Composed, ValueSources, config_of

    schema = Schema.of(type(recipe))
    problems = [*unknown_attributes(recipe)]
    if problems:
        listed = [unknown_key(schema, problem.key, None) for problem in problems]
        raise UserError(*(problem.line for problem in itertools.chain(*listed)))
    found = edits(recipe)
    places = found.places or ValueSources([], [])
    places = replace(places, overridden=[*places.overridden, *found.changed])
    composed = Composed(config_of(found.values), places)
    if found.values.get("run_name", "") is None:  # named after its file when it was read
        composed.config.run_name = recipe.run_name  # type: ignore[attr-defined]
    again, lines = _typed(type(recipe), composed, found.values, file=None, plugins=True)
    require(again)
    if lines:
        raise UserError(*lines)
    return again


def _typed(
    recipe_type: type[T],
    composed: Composed,
    raw: dict[str, Any],
    *,
    file: Path | None,
    plugins: bool,
) -> tuple[T, list[str]]:
    """Return the typed recipe of composed values, and its error lines.

    Args:
        recipe_type: the recipe's dataclass.
        composed: its values.
        raw: the values as written, which are remembered.
        file: the recipe's file; None: there is none, or its values were checked before.
        plugins: whether to import them, and to settle what depends on files.
    """
    from llmfoundry.recipe.compose import value_at

    values, pending = composed.resolved()
    hide(values)
    # The typed recipe, and its plugins, whose choices the checks need.
    problems: list[Problem] = []
    recipe = build(recipe_type, values, problems)
    if plugins:
        by_file = file if "plugins" not in composed.places.overridden else None
        import_plugins(getattr(recipe, "plugins", []), recipe=by_file)
    elif file is not None:
        leave_out(getattr(recipe, "plugins", []), file)
    # Unknown keys and wrong types, each with its file and line.
    problems = [problem for problem in problems if problem.key not in pending]
    if problems:
        schema = Schema.of(recipe_type)
        listed = [
            [p] if not p.is_unknown else unknown_key(schema, p.key, value_at(values, p.key))
            for p in problems[:MOST_LINES]
        ]
        problems = [*itertools.chain(*listed), *problems[MOST_LINES:]]
        shown, others = problems[:MOST_LINES], problems[MOST_LINES:]
        places = [composed.where(problem.key) for problem in shown]  # each is looked for in files
        lines = [where + problem.line for where, problem in zip(places, shown, strict=True)]
        raise UserError(*lines, *(problem.line for problem in others))
    # The checks of the sections.
    if plugins and hasattr(recipe, "settle"):
        recipe.settle()
    remember(recipe, raw, pending, composed.places)
    return recipe, [composed.places.placed(line) for line in recipe.check()]  # type: ignore[attr-defined]


def _refuse_foreign(file: Path, schema: Schema) -> None:
    """Refuse a file of another tool or script with one line, in place of a line per key.

    Raises:
        UserError: the file is one.
    """
    values = read_yaml(file)
    hint = other_tools_file(values)
    if hint is not None:
        raise UserError(f"{show(file)}: {hint.format(file=show(file))}")
    is_of_one_run = not {"base", "fit"} & values.keys() and {"defaults", "model"} & values.keys()
    if "sizes" in schema.keys and is_of_one_run:
        raise UserError(
            f"{show(file)}: is the recipe of one run; write base: {show(file)}, sizes and tokens in"
            " a file like yamls/scaling/quickstart.yaml"
        )
    defaults = values.get("defaults") or []
    chooses_model = any(isinstance(entry, dict) and "model" in entry for entry in defaults)
    if "model" in getattr(schema.cls, "NOT_GROUPS", ()) and chooses_model:
        raise UserError(
            f"{show(file)}: trains a new model; write `python scripts/train.py {show(file)}`, or"
            " take a recipe of yamls/finetune, with model.pretrained=runs/NAME"
        )
    # A file of a group, which is one section of a recipe.
    group = schema.keys.get(file.parent.name)
    is_of_group = group is not None and group.section is not None
    if is_of_group and values and not values.keys() & schema.keys.keys():
        choice = f"{file.parent.name}={file.stem}"
        raise UserError(
            f"{show(file)}: is one section of a recipe; choose it beside a recipe, such as"
            f" `yamls/quickstart.yaml {choice}`"
        )
    # A training recipe, for a script that takes the folder of a run.
    if "max_duration" in values and not {"max_duration", "sizes", "data"} & schema.keys.keys():
        model = values.get("model")
        is_finetuning = isinstance(model, dict) and "pretrained" in model
        script = "finetune" if is_finetuning else "train"
        raise UserError(
            f"{show(file)}: is the recipe of a training run; write"
            f" `python scripts/{script}.py {show(file)}`, and then the folder of the run in place"
            f" of the recipe, such as runs/{file.stem}"
        )
    if "sizes" not in schema.keys and {"base", "sizes"} <= values.keys():
        raise UserError(
            f"{show(file)}: is of many runs; write `python scripts/scaling.py {show(file)}`"
        )


def import_for_help(schema: Schema, path: str | None, overrides: Sequence[str]) -> None:
    """Import the plugins that a command line names, whose choices `--help` lists."""
    words = [word for word in overrides if word.lstrip("+").startswith("plugins=")]
    if words or path is not None:
        from llmfoundry.recipe.compose import compose

        file = None if path is None else find_recipe(path)
        names = compose(schema, file, words).resolved()[0].get("plugins")
        import_plugins(names if isinstance(names, list) else [], recipe=None if words else file)
