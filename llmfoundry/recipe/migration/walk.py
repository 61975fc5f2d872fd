"""Each setting of a file by the table: a line of the report, and values of ours.

`commands/migrate.py` calls `migrate`. The idea: every leaf of the file gets exactly one line, so
that nothing is dropped without a word; and our own checker has the last word about each value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_origin

from llmfoundry.recipe.front.help.hints import unknown_key
from llmfoundry.recipe.front.paths import YAMLS
from llmfoundry.recipe.front.typed import Problem, build
from llmfoundry.recipe.front.yamlfile import read_yaml
from llmfoundry.recipe.migration.read import Leaf, Source, put
from llmfoundry.recipe.other_tools.entry import (
    CHANGED,
    MISSING,
    NO_DEFAULT,
    Taken,
    Theirs,
    Verdict,
    idle,
    refused,
)
from llmfoundry.recipe.other_tools.foreign import FOUNDRY
from llmfoundry.recipe.other_tools.table import TOOLS, named
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.scripts.after_training import EvalRecipe
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe
from llmfoundry.recipe.scripts.train import TrainRecipe

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
class Line:
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
    taken: Taken
    verdict: Verdict

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

    source: Source
    lines: list[Line] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    gauntlet: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def recipe_type(self) -> type[Any] | None:
        """The recipe that the result is; None: a gauntlet's file, or none."""
        return RECIPES.get(self.source.kind)


def migrate(source: Source, gauntlet: str | None = None) -> Migration:
    """Take every setting, then what LLM Foundry takes by itself, then ask our checker.

    Args:
        source: the file.
        gauntlet: the path of the file that its own tasks will be written to.
    """
    kind = source.kind if source.kind in RECIPES else "eval"
    theirs = Theirs(_one_held_out(source.values), kind, source.recipe or source.path)
    result = Migration(source)
    for leaf in source.leaves:
        _add(result, leaf, leaf.shown, leaf.value, _taken(leaf, source, theirs))
    if result.recipe_type is not None:
        for key, value, taken in _defaults(theirs, source.tool):
            _add(result, None, key, value, taken)
        if result.gauntlet:
            result.values["eval.gauntlet"] = gauntlet or MISSING
        _check(result)
    return result


def _one_held_out(values: dict[str, Any]) -> dict[str, Any]:
    """The file's values, of several loaders of held-out text the first."""
    loaders = values.get("eval_loader")
    return values | {"eval_loader": loaders[0]} if isinstance(loaders, list) and loaders else values


def _add(result: Migration, leaf: Leaf | None, key: str, value: Any, taken: Taken) -> None:
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
        taken = replace(taken, why=leaf.why, verdict=CHANGED if values else Verdict.REFUSED)
    result.lines.append(Line(leaf, key, value, taken, _verdict(key, value, taken)))


def _not_ours(kind: str, value: Any) -> Taken:
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


def _verdict(key: str, value: Any, taken: Taken) -> Verdict:
    if taken.verdict is not None:
        return taken.verdict
    plain = _dotted(key.removeprefix("parameters."))
    ours = {_dotted(k.removeprefix("gauntlet.")): v for k, v in taken.values.items()}
    same = {plain: value} == ours
    return Verdict.KEPT if same else Verdict.RENAMED


def _dotted(key: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _taken(leaf: Leaf, source: Source, theirs: Theirs) -> Taken:
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
    if source.tool != FOUNDRY and leaf.value is None:
        return idle("has no value")
    own = Schema.of(RECIPES.get(source.kind, EvalRecipe))
    found = named(key, TOOLS[source.tool])
    if source.tool != FOUNDRY:
        found = [other for other in found if not other.write or _has(own, other.key)]
    if found:
        return found[0].taken(key, leaf.value, theirs)
    schema = own
    shown = leaf.shown.removeprefix("parameters.")
    if _has(schema, shown):
        return idle("has no value") if leaf.value is None else Taken({shown: leaf.value})
    if leaf.key in source.named or head in source.named:
        return idle("stands where it was named; LLM Foundry wants it below variables")
    if source.kind == "eval" and Schema.of(TrainRecipe).find(key) is not None:
        return idle("of training runs")
    hint = unknown_key(schema, key, leaf.value)[0].why.lstrip("; ")
    near = hint if hint.startswith("did you mean") else "remove it"
    return refused(f"is not here and no known setting of {source.tool}'s; {near}")


def _section(values: Any, place: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
    """The section that holds a place, and the last list number on the way."""
    index = next((n for n in reversed(place) if isinstance(n, int)), 0)
    try:
        for name in place[:-1]:
            values = values[name]
    except (KeyError, IndexError, TypeError):
        return {}, index
    return (values if isinstance(values, dict) else {}), index


def _defaults(theirs: Theirs, tool: str) -> Iterator[tuple[str, Any, Taken]]:
    """What LLM Foundry takes by itself, where we would take another; or what it cannot do without.

    Ours has a default for everything, which nobody meant.
    """
    for key in _REQUIRED if theirs.trains and tool == FOUNDRY else ():
        if theirs.get(key) is None:
            ours = key.replace("scheduler", "schedule")
            yield key, None, Taken({ours: MISSING}, "LLM Foundry needs it", Verdict.REFUSED)
    for other in TOOLS[tool]:
        word = other.words.split()[0]
        if other.default is NO_DEFAULT or theirs.get(word) is not None:
            continue
        above = word.rpartition(".")[0]
        is_there = not above or theirs.get(above) is not None
        if other.is_default_of(theirs, is_there):
            taken = (
                other.taken(word, other.default, theirs)
                if other.write or other.take
                else (Taken({word: other.default}))
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
    for problem in result.problems:
        key = _WRONG.match(problem)
        line = next((li for li in result.lines if key and key[1] in li.taken.values), None)
        if line is not None and line.verdict is not Verdict.REFUSED:
            line.verdict = Verdict.REFUSED
            line.taken = replace(line.taken, why=problem.partition(": ")[2])


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
            line.verdict = Verdict.IDLE


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
