"""Migration of an LLM Foundry file to a recipe: read the file, convert each setting.

`cli/commands/migrate.py` calls `read_theirs` and `migrate`; `written.py` has the texts. The strict
YAML reader checks the limits of the file first. OmegaConf then reads it as LLM Foundry does; a
broken interpolation is reported with the value that was probably meant. Every setting of the file
has exactly one line in the report, so that nothing is dropped silently. The recipe checker has the
last word on each value. The recipe has comments where a meaning changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llmfoundry.errors import UserError, one_line
from llmfoundry.migrate.detect import is_mcli, kind_of
from llmfoundry.migrate.entry import (
    CHANGED,
    MISSING,
    NO_DEFAULT,
    ForeignConfig,
    MigratedSetting,
    MigrationStatus,
    idle,
    refused,
)
from llmfoundry.migrate.llm_foundry import LLM_FOUNDRY
from llmfoundry.migrate.text_values import MOUNTED, calls
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.compose import Composed, ValueSources
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.paths import YAMLS, show
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import Problem, build
from llmfoundry.recipe.unknown_keys import named, unknown_key
from llmfoundry.recipe.yaml_file import read_yaml, yaml_problem

Place = tuple[str | int, ...]
_NAMED = re.compile(r"\$\{([\w.]+)\}")
_RESOLVER = re.compile(r"(?<!\\)\$\{(?=[\w.]+:)")  # a resolver call such as ${oc.env:NAME}
_PARAMETERS = "parameters"


@dataclass(frozen=True)
class Leaf:
    """A setting of the file: a scalar, an empty section or a list of scalars.

    Attributes:
        shown: dotted key in the file, for the report.
        key: dotted key for the table; list indices are parts of it.
        place: path of the setting in the nested values.
        value: value with resolved interpolations.
        why: problem of its interpolation; "": none.
    """

    shown: str
    key: str
    place: Place
    value: Any
    why: str = ""


@dataclass
class ForeignFile:
    """Contents of an LLM Foundry file.

    Attributes:
        path: path of the file.
        kind: script that the recipe is for, or "gauntlet"; "": the file has no recipe.
        values: resolved values of the recipe.
        leaves: all settings in file order, including those of MCLI around the recipe.
        named: dotted keys that interpolations refer to.
        recipe: other file that the command of an MCLI file runs; None: the recipe is in this file.
    """

    path: Path
    kind: str
    values: dict[str, Any]
    leaves: list[Leaf]
    named: set[str] = field(default_factory=set)
    recipe: Path | None = None


def read_theirs(path: Path) -> ForeignFile:
    """Read and resolve a file.

    Raises:
        UserError: the file cannot be read, or is not an LLM Foundry file.
    """
    # an MCLI file has its own settings around the recipe
    raw = _load(path)
    around: list[Leaf] = []
    recipe, prefix = None, ""
    if is_mcli(raw):
        outside = {key: value for key, value in raw.items() if key != _PARAMETERS}
        around = [Leaf(s, f"mcli.{_key(p)}", p, v) for s, p, v in leaves_of(outside)]
        raw, recipe = _within(path, raw)
        prefix = "" if recipe is not None else f"{_PARAMETERS}."
    kind = kind_of(raw) or ("" if around else None)
    if kind is None:
        raise UserError(
            f"{show(path)}: is not an LLM Foundry file for training, fine-tuning, evaluation, tasks"
            " or MCLI: it has no train_loader, models, icl_tasks or parameters"
        )

    # resolve interpolations, and collect all settings
    values, problems = _resolved(raw)
    inside = []
    for shown, place, value in leaves_of(values):
        why = problems.get(shown, "")
        inside.append(Leaf(f"{prefix}{shown}", _key(place), place, value, why))
    references = {name for text in _texts(raw) for name in _NAMED.findall(text)}
    return ForeignFile(path, kind, values, [*around, *inside], references, recipe)


def _load(path: Path) -> dict[str, Any]:
    """Read a file as LLM Foundry does, within the size limits of a recipe."""
    read_yaml(path)
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(yaml_problem(error, path)) from error
    if not isinstance(values, dict):
        raise UserError(f"{show(path)}: holds no keys; a recipe is lines of `key: value`")
    return {str(key): value for key, value in values.items()}


def _within(path: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Return the recipe that an MCLI file runs, and the file that it comes from.

    The recipe is the section `parameters`, or a file in the command, merged with the overrides of
    the command.

    Raises:
        UserError: the command names a missing file, or has unreadable overrides.
    """
    parameters = raw.get(_PARAMETERS) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{show(path)}: {_PARAMETERS}: is no section; it holds a recipe's keys")
    if parameters:
        return {str(key): value for key, value in parameters.items()}, None

    # the first command that trains or evaluates with a file
    for name, words in calls(str(raw.get("command", ""))):
        files = [word for word in words if word.endswith((".yaml", ".yml"))]
        file = files[0] if files else MOUNTED
        if name not in ("train", "eval") or file == MOUNTED:
            continue
        recipe = _beside(path, file)
        if recipe is None:
            raise UserError(
                f"{show(path)}: command: {file} is not there; write the path of that file in place"
                " of this one, or put this one into its clone of LLM Foundry"
            )

        # merge the file with the overrides of the command
        values, overrides = _load(recipe), [word for word in words if "=" in word[1:]]
        try:
            changes = OmegaConf.from_dotlist(overrides)
            merged = OmegaConf.to_container(OmegaConf.merge(values, changes))
        except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
            raise UserError(
                f"{show(path)}: command: {' '.join(overrides)} cannot be read: {one_line(error)}"
            ) from error
        assert isinstance(merged, dict)
        return {str(key): value for key, value in merged.items()}, recipe
    return {}, None


def _beside(path: Path, name: str) -> Path | None:
    """Find a file named by a command, in a folder above the MCLI file or in its scripts/."""
    for folder in path.absolute().parents:
        for place in (folder / name, folder / "scripts" / name):
            if os.path.isfile(place):
                return place
    return None


def _resolved(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the resolved values, and a message for each key with a broken interpolation.

    LLM Foundry stops at such an interpolation. If `variables` has the name, its value is used.
    """
    variables = raw["variables"] if isinstance(raw.get("variables"), dict) else {}
    config = OmegaConf.create(_keep_resolvers(raw))
    wrong: dict[str, str] = {}
    values, pending = Composed(config, ValueSources([], [])).resolved()
    for shown, place, text in leaves_of(raw):
        if shown not in pending:
            continue
        names = _NAMED.findall(str(text))
        meant = variables.get(names[0]) if len(names) == 1 else None
        wrong[shown] = f"{text} leads nowhere, at which LLM Foundry stops"
        if meant is not None:
            wrong[shown] += f"; variables.{names[0]} is taken"
        put(values, place, meant)
    return values, wrong


def _keep_resolvers(value: Any) -> Any:
    """Escape resolver calls such as ${oc.env:NAME}, so that OmegaConf leaves them unchanged."""
    if isinstance(value, dict):
        return {key: _keep_resolvers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_resolvers(item) for item in value]
    return _RESOLVER.sub(r"\\${", value) if isinstance(value, str) else value


def leaves_of(values: Any, place: Place = ()) -> Iterator[tuple[str, Place, Any]]:
    """Yield the dotted key, the path and the value of every setting in nested values."""
    is_list = isinstance(values, list)
    items: Any = enumerate(values) if is_list else values.items()
    for name, value in items:
        at = (*place, name)
        is_nested = isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
        )
        if is_nested and value:
            yield from leaves_of(value, at)
        else:
            yield _shown(at), at, value


def _shown(place: Place) -> str:
    """Return a path as in a file, such as `streams[0].name`."""
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in place).lstrip(".")


def _key(place: Place) -> str:
    """Return a path as a dotted key, such as `streams.0.name`."""
    return ".".join(map(str, place))


def _texts(values: Any) -> Iterator[str]:
    """Return the strings and lists in nested values, as text."""
    return (str(value) for _, _, value in leaves_of(values) if isinstance(value, str | list))


def put(values: Any, place: Place, value: Any) -> None:
    """Write a value at a path of nested sections and lists, and create missing ones."""
    # descend to the section or list that contains the value
    *above, last = place
    for name, following in zip(above, place[1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(values, list):
            assert isinstance(name, int)
            values.extend({} for _ in range(name + 1 - len(values)))
            values = values[name]
        else:
            if not isinstance(values.get(name), type(empty)):
                values[name] = empty
            values = values[name]

    # write it; a list grows as needed
    if isinstance(values, list):
        assert isinstance(last, int)
        values.extend(None for _ in range(last + 1 - len(values)))
    values[last] = value


RECIPES: dict[str, type[Any]] = {
    "train": TrainRecipe,
    "finetune": FinetuneRecipe,
    "eval": EvalRecipe,
}
GAUNTLET = "gauntlet"
_MODEL_KEYS = ("model", "tokenizer", "load_path", "model_name")
_REQUIRED = (
    "max_duration",
    "max_seq_len",
    "global_train_batch_size",
    "tokenizer.name",
    "optimizer.name",
    "scheduler.name",
)
_INERT = re.compile(r"([\w.\[\]]+): has no effect (.*); remove it$")
_WRONG = re.compile(r"([\w.\[\]]+): ")


@dataclass
class SettingReport:
    """Report on one setting.

    Attributes:
        leaf: the setting; None: an LLM Foundry default that the recipe states explicitly.
        key: key in the LLM Foundry file, for the report.
        value: value in the LLM Foundry file.
        taken: the converted setting.
        verdict: final status.
    """

    leaf: Leaf | None
    key: str
    value: Any
    taken: MigratedSetting
    verdict: MigrationStatus

    @property
    def is_default(self) -> bool:
        """Return whether the setting is a default that the file does not have."""
        return self.leaf is None


@dataclass
class Migration:
    """Result of a migration.

    Attributes:
        source: the LLM Foundry file.
        lines: a report for every setting, in file order, then for the defaults that are stated.
        values: recipe values by dotted key.
        gauntlet: contents of the gauntlet file; empty: none is needed.
        problems: errors that the recipe checker finds in the result.
    """

    source: ForeignFile
    lines: list[SettingReport] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    gauntlet: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def recipe_type(self) -> type[Any] | None:
        """Return the class of the resulting recipe; None for a gauntlet file or no recipe."""
        return RECIPES.get(self.source.kind)


def migrate(source: ForeignFile, gauntlet: str | None = None) -> Migration:
    """Convert all settings, add LLM Foundry's defaults, and check the resulting recipe.

    Args:
        source: the LLM Foundry file.
        gauntlet: path of the gauntlet file that the tasks of `source` will be written to.
    """
    kind = source.kind if source.kind in RECIPES else "eval"
    theirs = ForeignConfig(_one_held_out(source.values), kind, source.recipe or source.path)
    result = Migration(source)
    for leaf in source.leaves:
        _add(result, leaf, leaf.shown, leaf.value, _taken(leaf, source, theirs))
    if result.recipe_type is not None:
        for key, value, taken in _defaults(theirs):
            _add(result, None, key, value, taken)
        if result.gauntlet:
            result.values["eval.gauntlet"] = gauntlet or MISSING
        _check(result)
    return result


def _one_held_out(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a file with only the first of several evaluation loaders."""
    loaders = values.get("eval_loader")
    return values | {"eval_loader": loaders[0]} if isinstance(loaders, list) and loaders else values


def _add(
    result: Migration, leaf: Leaf | None, key: str, value: Any, taken: MigratedSetting
) -> None:
    """Add the report and the values of a setting.

    A default is not added if an earlier setting has a value for the same key.
    """
    schema = None if result.recipe_type is None else Schema.of(result.recipe_type)
    values: dict[str, Any] = {}
    for ours, one in taken.values.items():
        # gauntlet values go into their own file; keys that the recipe lacks are dropped
        if ours.startswith(f"{GAUNTLET}."):
            place = ours.split(".")[1:]
            put(result.gauntlet, tuple(int(n) if n.isdecimal() else n for n in place), one)
        elif schema is not None and ours != "defaults.model" and not _has(schema, ours):
            continue
        elif ours == "models":
            result.values[ours] = [*result.values.get(ours, []), *one]
        elif leaf is None and ours in result.values:
            return
        else:
            result.values[ours] = one
        values[ours] = one

    # the report says what remains
    if taken.values and not values:
        taken = _not_ours(result.source.kind, value)
    taken = replace(taken, values=values)
    if leaf is not None and leaf.why:
        taken = replace(taken, why=leaf.why, verdict=CHANGED if values else MigrationStatus.REFUSED)
    result.lines.append(SettingReport(leaf, key, value, taken, _verdict(key, value, taken)))


def _not_ours(kind: str, value: Any) -> MigratedSetting:
    """Return the result of a setting that the recipe has no key for."""
    if kind == "eval":
        return idle("the model decides it, or its run: scripts/eval.py has no such setting")
    if value in (None, False, {}, []):
        return idle("is off there too")
    return refused(f"scripts/{kind}.py has no such setting; remove it")


def _has(schema: Schema, key: str) -> bool:
    """Return whether a recipe has a key with a value, or a mapping with free keys above it."""
    if (found := schema.find(key)) is not None:
        return found.section is None
    above = key.rpartition(".")[0]
    while above and (found := schema.find(above)) is None:
        above = above.rpartition(".")[0]
    return bool(above) and found is not None and any(get_origin(t) is dict for t in found.types)


def _verdict(key: str, value: Any, taken: MigratedSetting) -> MigrationStatus:
    """Return the status of a setting; without an explicit one, "kept" or "renamed"."""
    if taken.verdict is not None:
        return taken.verdict
    plain = _dotted(key.removeprefix("parameters."))
    ours = {_dotted(k.removeprefix("gauntlet.")): v for k, v in taken.values.items()}
    same = {plain: value} == ours
    return MigrationStatus.KEPT if same else MigrationStatus.RENAMED


def _dotted(key: str) -> str:
    """Write list indices as parts of a dotted key: a[0] becomes a.0."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _taken(leaf: Leaf, source: ForeignFile, theirs: ForeignConfig) -> MigratedSetting:
    """Convert a setting: by the table, or by the recipe key of the same name."""
    # variables are resolved already
    head = leaf.key.partition(".")[0]
    if head == "variables":
        is_named = leaf.key in source.named or leaf.key.removeprefix("variables.") in source.named
        return idle("stands where it was named" if is_named else "nothing names it")

    # validation sets; an evaluation file with one model is treated as a list of models
    key = leaf.key
    if source.kind == "eval" and head == "eval_loader":
        return refused("scripts/eval.py measures a run's own held-out text; write it as a task")
    if re.match(r"eval_loader\.[1-9]", key):
        return refused("held-out text is of the first loader alone; scripts/eval.py takes others")
    key = re.sub(r"^eval_loader\.0\.", "eval_loader.", key)
    if source.kind == "eval" and head in _MODEL_KEYS and "models" not in source.values:
        key = f"models.0.{key}"

    # by the table
    theirs.here, theirs.index = _section(source.values, leaf.place)
    theirs.key, theirs.name = key, str(leaf.place[-1])
    schema = Schema.of(RECIPES.get(source.kind, EvalRecipe))
    entries = named(key, LLM_FOUNDRY)
    if entries:
        return entries[0].taken(key, leaf.value, theirs)

    # by the same key of the recipe
    shown = leaf.shown.removeprefix("parameters.")
    if _has(schema, shown):
        return idle("has no value") if leaf.value is None else MigratedSetting({shown: leaf.value})

    # unknown keys
    if leaf.key in source.named or head in source.named:
        return idle("stands where it was named; LLM Foundry wants it below variables")
    if source.kind == "eval" and Schema.of(TrainRecipe).find(key) is not None:
        return idle("of training runs")
    hint = unknown_key(schema, key, leaf.value)[0].why.lstrip("; ")
    near = hint if hint.startswith("did you mean") else "remove it"
    return refused(f"is not here and no known setting of LLM Foundry's; {near}")


def _section(values: Any, place: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
    """Return the section that contains a path, and the last list index on the path."""
    indices = [n for n in place if isinstance(n, int)]
    index = indices[-1] if indices else 0
    try:
        for name in place[:-1]:
            values = values[name]
    except (KeyError, IndexError, TypeError):
        return {}, index
    return (values if isinstance(values, dict) else {}), index


def _defaults(theirs: ForeignConfig) -> Iterator[tuple[str, Any, MigratedSetting]]:
    """Yield the LLM Foundry defaults that differ from ours, and the settings that it requires.

    A required setting without a value is an error: our default may not be what was meant.
    """
    for key in _REQUIRED if theirs.trains else ():
        if theirs.get(key) is None:
            ours = key.replace("scheduler", "schedule")
            yield (
                key,
                None,
                MigratedSetting({ours: MISSING}, "LLM Foundry needs it", MigrationStatus.REFUSED),
            )
    for other in LLM_FOUNDRY:
        word = other.words.split()[0]
        if other.default is NO_DEFAULT or theirs.get(word) is not None:
            continue
        above = word.rpartition(".")[0]
        is_there = not above or theirs.get(above) is not None
        if other.is_default_of(theirs, is_there):
            taken = (
                other.taken(word, other.default, theirs)
                if other.write or other.take
                else (MigratedSetting({word: other.default}))
            )
            if taken.values:
                yield word, other.default, taken


def _check(result: Migration) -> None:
    """Check the recipe: drop values without effect, and report all other problems."""
    # drop values without effect until there are none
    for _ in range(len(result.values) + 1):
        reader_problems, checker_problems = _problems(result)
        matches = [_INERT.match(problem) for problem in checker_problems]
        inert = [match for match in matches if match and match[1] in result.values]
        if not inert:
            result.problems = reader_problems
            if not reader_problems:
                result.problems = [p for p in checker_problems if not _waits(result, p)]
            break
        for match in inert:
            _drop(result, match[1], f"has no effect {match[2]}")

    # mark the settings that cause the remaining problems
    for number, problem in enumerate(result.problems):
        key = _WRONG.match(problem)
        lines = [line for line in result.lines if key and key[1] in line.taken.values]
        if key is None or not lines:
            continue
        line = lines[0]
        if line.verdict is not MigrationStatus.REFUSED:
            line.verdict = MigrationStatus.REFUSED
            line.taken = replace(line.taken, why=problem.partition(": ")[2])
        elif not line.is_default:  # the checker knows only that the value is missing
            result.problems[number] = f"{key[1]}: {line.taken.why}"


def _waits(result: Migration, line: str) -> bool:
    """Return whether a problem concerns a value that is resolved at load time, ${oc.env:NAME}."""
    key = _WRONG.match(line)
    return key is not None and "${" in str(result.values.get(key[1]))


def _drop(result: Migration, key: str, why: str) -> None:
    """Remove a value from the recipe and update its reports."""
    del result.values[key]
    for line in [line for line in result.lines if key in line.taken.values]:
        values = {k: v for k, v in line.taken.values.items() if k != key}
        line.taken = replace(line.taken, values=values, why=line.taken.why if values else why)
        if not values and line.is_default:
            result.lines.remove(line)
        elif not values:
            line.verdict = MigrationStatus.IDLE


def _problems(result: Migration) -> tuple[list[str], list[str]]:
    """Return the problems of the recipe reader, and those of the recipe checker."""
    assert result.recipe_type is not None
    problems: list[Problem] = []
    recipe = build(result.recipe_type, nested_values(result, with_groups=True), problems)
    if hasattr(recipe, "settle"):
        recipe.settle()
    return [problem.line for problem in problems], [*recipe.check()]


def nested_values(result: Migration, *, with_groups: bool = False) -> dict[str, Any]:
    """Return the nested values of the recipe; `with_groups` adds the values of its model group."""
    plain: dict[str, Any] = {}
    for key, value in result.values.items():
        if key == "defaults.model":
            if with_groups:
                plain["model"] = read_yaml(YAMLS / "model" / f"{value}.yaml")
            else:
                plain["defaults"] = [{"model": value}]
    for key, value in result.values.items():
        if key != "defaults.model":
            parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
            put(plain, tuple(int(n) if n else name for n, name in parts), value)
    return plain
