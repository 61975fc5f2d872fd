"""A whole file of LLM Foundry's becomes a recipe: read, each setting looked up, written.

`cli/commands/migrate.py` calls it. OmegaConf reads the file, as LLM Foundry does, once the strict
reader has found it bounded; an interpolation that leads nowhere is reported, with what was meant.
Every leaf of the file gets exactly one line of the report, so that nothing is dropped without a
word; and our own checker has the last word about each value. The result is a recipe with comments
where a meaning changed.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

import yaml
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
from llmfoundry.recipe.typed import Problem, build, dump
from llmfoundry.recipe.unknown_keys import named, unknown_key
from llmfoundry.recipe.yaml_file import read_yaml, yaml_problem

Place = tuple[str | int, ...]
_NAMED = re.compile(r"\$\{([\w.]+)\}")
_RESOLVER = re.compile(r"(?<!\\)\$\{(?=[\w.]+:)")  # ${oc.env:NAME}, which stays as it is
_PARAMETERS = "parameters"


@dataclass(frozen=True)
class Leaf:
    """A setting: a value, an empty section, or a list of values.

    Attributes:
        shown: its dotted key in the file, as a report names it.
        key: what the table knows it by, list numbers as names.
        place: where it stands in `values` of its file.
        value: interpolations resolved.
        why: what is wrong with its interpolation; empty: nothing.
    """

    shown: str
    key: str
    place: Place
    value: Any
    why: str = ""


@dataclass
class ForeignFile:
    """A file, read.

    Attributes:
        path: of it.
        kind: the script of ours that the result is for, or gauntlet; empty: there is no recipe.
        values: the recipe's, resolved.
        leaves: all of them, in the file's order, those around the recipe too.
        named: dotted keys that interpolations take.
        recipe: the other file that an MCLI file's command starts; None: it is in the file.
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
        UserError: it cannot be read, or is none of LLM Foundry's.
    """
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
    values, pending = _resolved(raw)
    inside = [
        Leaf(f"{prefix}{shown}", _key(place), place, value, pending.get(shown, ""))
        for shown, place, value in leaves_of(values)
    ]
    named = {name for text in _texts(raw) for name in _NAMED.findall(text)}
    return ForeignFile(path, kind, values, [*around, *inside], named, recipe)


def _load(path: Path) -> dict[str, Any]:
    """As LLM Foundry reads it, within the bounds of a recipe."""
    read_yaml(path)
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(yaml_problem(error, path)) from error
    if not isinstance(values, dict):
        raise UserError(f"{show(path)}: holds no keys; a recipe is lines of `key: value`")
    return {str(key): value for key, value in values.items()}


def _within(path: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The recipe that an MCLI file runs: its parameters, or a file with what the command changes.

    Raises:
        UserError: the command names a file that is not beside this one.
    """
    parameters = raw.get(_PARAMETERS) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{show(path)}: {_PARAMETERS}: is no section; it holds a recipe's keys")
    if parameters:
        return {str(key): value for key, value in parameters.items()}, None
    for name, words in calls(str(raw.get("command", ""))):
        file = next((word for word in words if word.endswith((".yaml", ".yml"))), MOUNTED)
        if name not in ("train", "eval") or file == MOUNTED:
            continue
        found = _beside(path, file)
        if found is None:
            raise UserError(
                f"{show(path)}: command: {file} is not there; write the path of that file in place"
                " of this one, or put this one into its clone of LLM Foundry"
            )
        theirs, changed = _load(found), [word for word in words if "=" in word[1:]]
        try:
            changes = OmegaConf.from_dotlist(changed)
            merged = OmegaConf.to_container(OmegaConf.merge(theirs, changes))
        except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
            raise UserError(
                f"{show(path)}: command: {' '.join(changed)} cannot be read: {one_line(error)}"
            ) from error
        assert isinstance(merged, dict)
        return {str(key): value for key, value in merged.items()}, found
    return {}, None


def _beside(path: Path, name: str) -> Path | None:
    """A file that a command names, from a folder above the MCLI file's or its scripts/."""
    for folder in path.absolute().parents:
        for place in (folder / name, folder / "scripts" / name):
            if os.path.isfile(place):
                return place
    return None


def _resolved(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values, and for each key whose interpolation leads nowhere what was taken in its place.

    LLM Foundry stops at such a file; where `variables` has the name, that was meant.
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
    if isinstance(value, dict):
        return {key: _keep_resolvers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_resolvers(item) for item in value]
    return _RESOLVER.sub(r"\\${", value) if isinstance(value, str) else value


def leaves_of(values: Any, place: Place = ()) -> Iterator[tuple[str, Place, Any]]:
    """Every setting of nested values: its dotted key, its place, and its value."""
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
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in place).lstrip(".")


def _key(place: Place) -> str:
    return ".".join(map(str, place))


def _texts(values: Any) -> Iterator[str]:
    return (str(value) for _, _, value in leaves_of(values) if isinstance(value, str | list))


def put(values: Any, place: Place, value: Any) -> None:
    """Write a value at a place of nested sections and lists, which are made on the way."""
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
    """What became of one setting.

    Attributes:
        leaf: of theirs; None: what LLM Foundry takes where the file is silent, written out.
        key: of theirs, as a report names it.
        value: theirs.
        taken: ours.
        verdict: decided.
    """

    leaf: Leaf | None
    key: str
    value: Any
    taken: MigratedSetting
    verdict: MigrationStatus

    @property
    def is_default(self) -> bool:
        """Whether the file is silent about it."""
        return self.leaf is None


@dataclass
class Migration:
    """A file's settings, in ours.

    Attributes:
        source: the file.
        lines: of every leaf one, in the file's order; then of defaults that are written out.
        values: of the recipe, by dotted key.
        gauntlet: the content of a gauntlet's file; empty: none is needed.
        problems: what our checker finds in the result all the same.
    """

    source: ForeignFile
    lines: list[SettingReport] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    gauntlet: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def recipe_type(self) -> type[Any] | None:
        """The recipe that the result is; None: a gauntlet's file, or none."""
        return RECIPES.get(self.source.kind)


def migrate(source: ForeignFile, gauntlet: str | None = None) -> Migration:
    """Take every setting, then what LLM Foundry takes by itself, then ask our checker.

    Args:
        source: the file.
        gauntlet: the path of the file that its own tasks will be written to.
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
    """The file's values, of several loaders of held-out text the first."""
    loaders = values.get("eval_loader")
    return values | {"eval_loader": loaders[0]} if isinstance(loaders, list) and loaders else values


def _add(
    result: Migration, leaf: Leaf | None, key: str, value: Any, taken: MigratedSetting
) -> None:
    """A line, and its values; a default's where no line before has one for the key."""
    schema = None if result.recipe_type is None else Schema.of(result.recipe_type)
    values: dict[str, Any] = {}
    for ours, one in taken.values.items():
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
    if taken.values and not values:
        taken = _not_ours(result.source.kind, value)
    taken = replace(taken, values=values)
    if leaf is not None and leaf.why:
        taken = replace(taken, why=leaf.why, verdict=CHANGED if values else MigrationStatus.REFUSED)
    result.lines.append(SettingReport(leaf, key, value, taken, _verdict(key, value, taken)))


def _not_ours(kind: str, value: Any) -> MigratedSetting:
    """Of a setting that the recipe has no key for."""
    if kind == "eval":
        return idle("the model decides it, or its run: scripts/eval.py has no such setting")
    if value in (None, False, {}, []):
        return idle("is off there too")
    return refused(f"scripts/{kind}.py has no such setting; remove it")


def _has(schema: Schema, key: str) -> bool:
    """Whether a recipe has a key with a value, or a mapping of anything above it."""
    if (found := schema.find(key)) is not None:
        return found.section is None
    above = key.rpartition(".")[0]
    while above and (found := schema.find(above)) is None:
        above = above.rpartition(".")[0]
    return bool(above) and found is not None and any(get_origin(t) is dict for t in found.types)


def _verdict(key: str, value: Any, taken: MigratedSetting) -> MigrationStatus:
    if taken.verdict is not None:
        return taken.verdict
    plain = _dotted(key.removeprefix("parameters."))
    ours = {_dotted(k.removeprefix("gauntlet.")): v for k, v in taken.values.items()}
    same = {plain: value} == ours
    return MigrationStatus.KEPT if same else MigrationStatus.RENAMED


def _dotted(key: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _taken(leaf: Leaf, source: ForeignFile, theirs: ForeignConfig) -> MigratedSetting:
    """What a leaf is here: by the table, by its own name, or nothing."""
    head = leaf.key.partition(".")[0]
    if head == "variables":
        is_named = leaf.key in source.named or leaf.key.removeprefix("variables.") in source.named
        return idle("stands where it was named" if is_named else "nothing names it")
    key = leaf.key
    if source.kind == "eval" and head == "eval_loader":
        return refused("scripts/eval.py measures a run's own held-out text; write it as a task")
    if re.match(r"eval_loader\.[1-9]", key):
        return refused("held-out text is of the first loader alone; scripts/eval.py takes others")
    key = re.sub(r"^eval_loader\.0\.", "eval_loader.", key)
    if source.kind == "eval" and head in _MODEL_KEYS and "models" not in source.values:
        key = f"models.0.{key}"
    theirs.here, theirs.index = _section(source.values, leaf.place)
    theirs.key, theirs.name = key, str(leaf.place[-1])
    schema = Schema.of(RECIPES.get(source.kind, EvalRecipe))
    if found := named(key, LLM_FOUNDRY):
        return found[0].taken(key, leaf.value, theirs)
    shown = leaf.shown.removeprefix("parameters.")
    if _has(schema, shown):
        return idle("has no value") if leaf.value is None else MigratedSetting({shown: leaf.value})
    if leaf.key in source.named or head in source.named:
        return idle("stands where it was named; LLM Foundry wants it below variables")
    if source.kind == "eval" and Schema.of(TrainRecipe).find(key) is not None:
        return idle("of training runs")
    hint = unknown_key(schema, key, leaf.value)[0].why.lstrip("; ")
    near = hint if hint.startswith("did you mean") else "remove it"
    return refused(f"is not here and no known setting of LLM Foundry's; {near}")


def _section(values: Any, place: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
    """The section that holds a place, and the last list number on the way."""
    index = next((n for n in reversed(place) if isinstance(n, int)), 0)
    try:
        for name in place[:-1]:
            values = values[name]
    except (KeyError, IndexError, TypeError):
        return {}, index
    return (values if isinstance(values, dict) else {}), index


def _defaults(theirs: ForeignConfig) -> Iterator[tuple[str, Any, MigratedSetting]]:
    """What LLM Foundry takes by itself, where we would take another; or what it cannot do without.

    Ours has a default for everything, which nobody meant.
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
    """Let our checker look: what it finds without effect goes, all else is for the user.

    Raises:
        AssertionError: it does not come to an end.
    """
    for _ in range(len(result.values) + 1):
        wrong, lines = _problems(result)
        inert = [match for line in lines if (match := _INERT.match(line))]
        gone = [m for m in inert if m[1] in result.values]
        if not gone:
            result.problems = wrong or [line for line in lines if not _waits(result, line)]
            break
        for match in gone:
            _drop(result, match[1], f"has no effect {match[2]}")
    for number, problem in enumerate(result.problems):
        key = _WRONG.match(problem)
        line = next((li for li in result.lines if key and key[1] in li.taken.values), None)
        if line is None or key is None:
            continue
        if line.verdict is not MigrationStatus.REFUSED:
            line.verdict = MigrationStatus.REFUSED
            line.taken = replace(line.taken, why=problem.partition(": ")[2])
        elif not line.is_default:  # the checker only knows that the value is missing
            result.problems[number] = f"{key[1]}: {line.taken.why}"


def _waits(result: Migration, line: str) -> bool:
    """Whether a problem is of a value that is known once the recipe is loaded, ${oc.env:NAME}."""
    key = _WRONG.match(line)
    return key is not None and "${" in str(result.values.get(key[1]))


def _drop(result: Migration, key: str, why: str) -> None:
    """Take a value out again."""
    del result.values[key]
    for line in [line for line in result.lines if key in line.taken.values]:
        values = {k: v for k, v in line.taken.values.items() if k != key}
        line.taken = replace(line.taken, values=values, why=line.taken.why if values else why)
        if not values and line.is_default:
            result.lines.remove(line)
        elif not values:
            line.verdict = MigrationStatus.IDLE


def _problems(result: Migration) -> tuple[list[str], list[str]]:
    """What our reader says of the values, and our checker of those that it could read."""
    assert result.recipe_type is not None
    problems: list[Problem] = []
    recipe = build(result.recipe_type, nested_values(result, with_groups=True), problems)
    if hasattr(recipe, "settle"):
        recipe.settle()
    return [problem.line for problem in problems], [*recipe.check()]


def nested_values(result: Migration, *, with_groups: bool = False) -> dict[str, Any]:
    """The recipe's values, nested as it is; a group's own among them where asked for."""
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


WIDTH = 100
_LONGEST = 60  # characters of a value in a line of the report
WRITTEN_OUT = "written out"


def recipe_text(result: Migration, name: str) -> str:
    """The recipe's YAML, sections in our order.

    Args:
        result: of the migration.
        name: of the file to write, for the launch line.
    """
    assert result.recipe_type is not None
    comments = _comments(result)
    lines = [*_header(result, name)]
    for comment in comments.pop("", []):
        lines += _wrapped(comment, "")
    plain = _sorted(nested_values(result), Schema.of(result.recipe_type))
    for section, value in plain.items():
        lines += _lines(section, value, section, comments, "")
    left = [line for line in result.lines if line.verdict is MigrationStatus.REFUSED]
    if left:
        lines += ["", "# Not possible here:"]
        for line in left:
            lines += _wrapped(f"{line.key}: {line.taken.why}", "")
    return "\n".join([*lines, ""])


def _sorted(values: dict[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Sections and their keys in our order."""
    if schema is None:
        return values
    order = ["defaults", *schema.keys]
    return {
        name: _sorted(values[name], None if name == "defaults" else schema.keys[name].section)
        if isinstance(values[name], dict)
        else values[name]
        for name in sorted(values, key=order.index)
    }


def gauntlet_text(result: Migration, name: str) -> str:
    """The gauntlet file's YAML."""
    head = f"# Tasks and categories of {result.source.path.name}, from LLM Foundry.\n"
    run = f"#   python scripts/eval.py checkpoint=runs/NAME eval.gauntlet={name}\n"
    order = sorted(result.gauntlet, key=("definitions", "icl_tasks", "eval_gauntlet").index)
    values = {key: result.gauntlet[key] for key in order}
    return head + run + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH)


def _header(result: Migration, name: str) -> list[str]:
    of = f" and {result.source.recipe.name}" if result.source.recipe is not None else ""
    what = f"From LLM Foundry's {result.source.path.name}{of}, by scripts/migrate.py."
    return [*_wrapped(what, ""), f"#   python scripts/{result.source.kind}.py {name}"]


def _comments(result: Migration) -> dict[str, list[str]]:
    """By key of ours, what to know about it."""
    found: dict[str, list[str]] = {}
    for line in result.lines:
        key = next(iter(line.taken.values), "")
        if (
            key
            and line.is_default
            and line.verdict not in (MigrationStatus.CHANGED, MigrationStatus.REFUSED)
        ):
            found.setdefault(key, []).append("LLM Foundry's own default")
        elif key and line.verdict in (MigrationStatus.CHANGED, MigrationStatus.REFUSED):
            found.setdefault(key, []).append(f"{line.key}: {line.taken.why}")
        elif line.verdict is MigrationStatus.CHANGED:
            found.setdefault("", []).append(f"{line.key}: {line.taken.why}")
    return found


def _lines(
    name: str, value: Any, key: str, comments: dict[str, list[str]], indent: str
) -> Iterator[str]:
    """A key and what is below it, comments before."""
    if isinstance(value, dict) and value and key != "defaults":
        yield f"{indent}{name}:"
        for inner, item in value.items():
            yield from _lines(str(inner), item, f"{key}.{inner}", comments, f"{indent}  ")
        return
    for comment in comments.get(key, []):
        yield from _wrapped(comment, indent)
    text = dump({name: value}).rstrip("\n")
    yield from (f"{indent}{line}" for line in text.splitlines())


def _wrapped(text: str, indent: str) -> list[str]:
    begin = f"{indent}# "
    plain = " ".join(text.split())
    return textwrap.wrap(
        plain, WIDTH, initial_indent=begin, subsequent_indent=begin, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def report(result: Migration) -> Iterator[str]:
    """A line for each setting, and how many there are of each kind."""
    for line in result.lines:
        is_written = line.is_default and line.verdict is not MigrationStatus.REFUSED
        word = WRITTEN_OUT if is_written else line.verdict.value
        yield f"{word:<15} {_said(line)}"
    counts = Counter(line.verdict for line in result.lines if not line.is_default)
    added = sum(line.is_default for line in result.lines)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in MigrationStatus]
    yield f"{sum(counts.values())} settings: {', '.join(parts)}; {added} {WRITTEN_OUT}"


def _said(line: SettingReport) -> str:
    ours = ", ".join(f"{key}: {_short(value)}" for key, value in line.taken.values.items())
    why = f" ({line.taken.why})" if line.taken.why and ours else line.taken.why
    if line.is_default:
        return f"{ours}{why or f' (their default of {line.key})'}"
    said = f"{line.key}: {_short(line.value)}"
    if line.verdict is MigrationStatus.KEPT:
        return said + why
    return f"{said} -> {ours}{why}" if ours else f"{said}: {why}"


def _short(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
