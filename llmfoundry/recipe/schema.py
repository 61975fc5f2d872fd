"""What a recipe may say: every key with its type, default, meaning, rules, choices and owner.

`Schema.of` makes one object for each recipe type, and one for each section that it holds. Help,
completion, hints, overrides, checks and the typed reader ask it, and nothing else walks over the
dataclasses.

What numbers, paths and choices may be is declared in the types of fields:
`lr: Annotated[float, Range(above=0)]` is all that a section writes. Its `check` begins with
`out_of_bounds`, which looks at every field. Where a field declares nothing, a number is finite and
fits its machine type, so that no value can hang a check, overflow or eat a machine.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from llmfoundry.recipe.checks import not_a_choice
from llmfoundry.recipe.choice_table import ChoiceRecord, ChoiceTable

R = TypeVar("R")


@dataclass(frozen=True)
class Key:
    """A key as it stands in its section, and all that is known of it.

    Attributes:
        name: as users write it.
        field: the dataclass's name of it, which ends with an underscore where Python has the word.
        hint: the type of its value.
        rules: what is declared beside the type: a range, choices, a form of text.
        owners: the classes that declare it, the section's own before those that it inherits from.
        required: whether it has no default.
    """

    name: str
    field: str
    hint: Any
    rules: tuple[Any, ...] = ()
    owners: tuple[type, ...] = ()
    required: bool = False

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that its value may have."""
        return options(self.hint)

    @property
    def section(self) -> Schema | None:
        """The keys below it; None where it has a value."""
        return section_of(self.hint)

    @property
    def item(self) -> Schema | None:
        """The keys of each section that it lists or maps names to, as `data.streams` does."""
        return item_of(self.hint)

    @property
    def default(self) -> Any:
        """Its value where nothing is written, of a key that is not required."""
        (field,) = (f for f in dataclasses.fields(self.owners[0]) if f.name == self.field)
        make = field.default_factory
        return field.default if make is dataclasses.MISSING else make()

    @property
    def meaning(self) -> str:
        """The string under its field, of the nearest class that has one, on one line."""
        texts = (_meanings(owner).get(self.field) for owner in self.owners)
        return next((text for text in texts if text is not None), "")

    def rule(self, kind: type[R]) -> R | None:
        """Its rule of a kind; None where its type declares none."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    def explanation(self, dotted: str) -> str:
        """Return where the key has an effect, and its meaning.

        Args:
            dotted: the key with all sections above it.
        """
        if not self.owners:
            return self.meaning
        schema, section = Schema.of(self.owners[0]), dotted.removesuffix(self.name)
        rules = [rule for rule in self.rules if isinstance(rule, Only)]
        sentences = [rule.sentence(schema, section) for rule in rules]
        return " ".join(filter(None, [*sentences, self.meaning]))


class Schema:
    """The keys of a dataclass, by name and by dotted name."""

    def __init__(self, recipe_type: type) -> None:
        """Made by `of` alone, once for each type."""
        self.cls = recipe_type

    @staticmethod
    def of(recipe_type: type) -> Schema:
        """The schema of a recipe or of one of its sections."""
        return _made.setdefault(recipe_type, Schema(recipe_type))

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        """The section's own keys, in the order of declaration."""
        plain = typing.get_type_hints(self.cls)
        declared = typing.get_type_hints(self.cls, include_extras=True)
        classes = [(c, inspect.get_annotations(c)) for c in inspect.getmro(self.cls)]
        keys = (
            Key(
                name=field.name.rstrip("_"),
                field=field.name,
                hint=plain[field.name],
                rules=tuple(_flat(getattr(declared[field.name], "__metadata__", ()))),
                owners=tuple(owner for owner, own in classes if field.name in own),
                required=field.default is field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(self.cls)
        )
        return {key.name: key for key in keys}

    @property
    def meaning(self) -> str:
        """What the section is, on one line."""
        return " ".join((inspect.getdoc(self.cls) or "").split())

    def find(self, dotted: str) -> Key | None:
        """The key at `model.n_heads`, or what stands at `data.streams.NAME` or `phases[0]`."""
        key = Key("", "", self.cls)
        for part in dotted.split("."):
            name, _, index = part.partition("[")
            above = key.section
            found = key if above is None else above.keys.get(name)
            if found is not None and (above is None or index):  # a mapping's names are the user's
                found = None if found.item is None else Key(name, name, found.item.cls)
            if found is None:
                return None
            key = found
        return key

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Key]]:
        """Every dotted key in order, a section before what is in it; items have no names yet."""
        for name, key in self.keys.items():
            yield f"{prefix}{name}", key
            if key.section is not None:
                yield from key.section.walk(f"{prefix}{name}.")


_made: dict[type, Schema] = {}


def section_of(hint: Any) -> Schema | None:
    """The schema of the dataclass in a type such as `EvalConfig | None`; None for a value's."""
    found = (o for o in options(hint) if isinstance(o, type) and dataclasses.is_dataclass(o))
    return next(map(Schema.of, found), None)


def item_of(hint: Any) -> Schema | None:
    """The schema of the dataclass that a list or a mapping holds; None elsewhere."""
    held = [args[-1] for option in options(hint) if (args := typing.get_args(option))]
    return section_of(held[0]) if held else None


def options(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows, or the one type that it is."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _flat(rules: Iterable[Any]) -> Iterator[Any]:
    """The rules of a field one by one; fields that share several name a tuple of them."""
    for rule in rules:
        if isinstance(rule, tuple):
            yield from rule
        else:
            yield rule


@functools.cache
def _meanings(owner: type) -> dict[str, str]:
    """The string under each field that a class declares, on one line, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    found: dict[str, str] = {}
    for key, text in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(key.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


MOST_INT = 2**63 - 1
MOST_FLOAT = 3e38  # what fp32 holds
LONGEST_NAME, LONGEST_PATH = 255, 2048  # bytes; Linux takes 4096, of which what we add is a part


_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what neither a file nor JSON can hold


@dataclass(frozen=True)
class Range:
    """What a number may be; unset ends are those of its machine type."""

    least: float | None = None
    most: float | None = None
    why: str = ""
    """Of `most`: what a greater value would do."""
    above: float | None = None
    below: float | None = None
    infinite: bool = False
    """Whether infinity is a value too."""

    def problem(self, value: float) -> str | None:
        """Why `value` is not in the range, and what to write; None where it is."""
        if isinstance(value, float) and not math.isfinite(value):
            return None if self.infinite and value > 0 else f"{value} is not a finite number"
        if (self.least, self.below) == (0, 1) and not 0 <= value < 1:
            return f"{value} is not a fraction; write a number from 0 up to, not including, 1"
        if self.least is not None and value < self.least:
            return f"{value} is too small; write {self.least} or more"
        if self.above is not None and value <= self.above:
            return f"{value} must be greater than {self.above}"
        if self.below is not None and value >= self.below:
            return f"{value} must be less than {self.below}"
        widest = MOST_INT if isinstance(value, int) else MOST_FLOAT
        most = widest if self.most is None else self.most
        if value > most or value < -widest:
            ending = f": {self.why}" if self.why else ""
            word, end = ("large", f"{most} or less") if value > most else ("small", f"{-widest}")
            return f"{value} is too {word}; write {end}{ending}"
        return None


ANY = Range()
FRACTION = Range(0, below=1)
POSITIVE = Range(above=0)

# What several fields share; each says beside it what it counts.
LENGTH = "positions are exact up to there"
ROWS = Range(1, 2**24, "the rows of a step are listed in memory")
PROCESSES = "each is a process of this machine"
TOKENS = Range(1, 2**24, LENGTH)
MOST_LAYERS = 4096  # each is made; the deepest published transformer has 1,000
WIDTH = Range(1, 2**22, "no device holds a wider matrix")
NEW_TOKENS = Range(1, 2**20, "keys and values of each are kept in memory")
TEMPERATURE = Range(0, 1e6)
TOP_P = Range(above=0, most=1, why="it is a probability")


@dataclass(frozen=True)
class TextRule:
    """Marks a text that must have some form."""

    problem: Callable[[str], str | None]
    """Why a text has not, and what to write; None where it has."""


@dataclass(frozen=True)
class Choice:
    """Marks a text that is one of a few."""

    options: Collection[str]
    """A `ChoiceTable` among them, to which plugins may still add."""
    other: str = ""
    """What else the field takes, for people: `a number of rows`."""
    form: re.Pattern[str] | None = None
    """Of other texts that it takes."""
    reasons: Mapping[str, str] | None = None
    """Of texts that others' recipes have: why it is not taken, and what to write."""

    def problem(self, value: str) -> str | None:
        """Why `value` is not one of them, and what to write; None where it is."""
        if value in self.options or (self.form is not None and self.form.fullmatch(value)):
            return None
        if self.reasons is not None and value in self.reasons:
            return f"{value} {self.reasons[value]}"
        if isinstance(self.options, ChoiceTable):
            return self.options.refusal(value, other=self.other)
        return not_a_choice(value, [*self.options], other=self.other)

    def listed(self) -> str:
        """All of them, for people."""
        return ", ".join(self.options) + (f", or {self.other}" if self.other else "")

    def meanings(self) -> dict[str, str]:
        """What those of a table mean, as far as their entries say so."""
        entries = self.options.items() if isinstance(self.options, ChoiceTable) else ()
        named = ((name, entry) for name, entry in entries if isinstance(entry, ChoiceRecord))
        return {name: entry.meaning for name, entry in named if entry.meaning}


def choice(
    options: Iterable[str],
    other: str = "",
    form: re.Pattern[str] | None = None,
    *,
    reasons: Mapping[str, str] | None = None,
) -> Choice:
    """A `Choice` of the names in a table."""
    names = options if isinstance(options, ChoiceTable) else tuple(options)
    return Choice(names, other, form, reasons)


ANY_TEXT = re.compile(".*", re.DOTALL)
CHAT_TEMPLATES = (
    "chatml", "llama3", "zephyr", "mpt", "qwen2.5", "qwen3", "phi3", "phi3.5", "gemma", "gemma3",
    "mistral", "deepseek-v3", "deepseek-r1", "glm4", "gpt-oss",
)  # fmt: skip
CHAT_TEMPLATE = choice(CHAT_TEMPLATES, "a Jinja file", ANY_TEXT)
AUTO_ROWS = choice(("auto",), "a number of rows")


ON = object()
"""In place of the values of an `Only` rule: any value but null, false, 0, an empty list or
mapping, and the choices none and off."""
_OFF_CHOICES = ("none", "off")


@dataclass(frozen=True)
class Only:
    """Marks a key that has an effect only with certain values of other keys.

    From one rule come the check of a recipe, the sentence in `--help` and that in docs/keys.
    `Only("name", "muon")`: with name=muon. `Only("to", ("hf", "gguf"))`: with either of them.
    `Only("load_path")`: with any load_path. `Only(("trace", "memory_snapshot"))`: with either key.
    A key that a rule names must have an effect itself.
    """

    key: str | tuple[str, ...]
    """A key of the same section, or of one below it (`adapter.name`); or several keys, of which
    one is enough."""
    values: Any = ON
    """The value, a tuple of values, or a function without arguments that returns the tuple. None
    stands for the unset key."""
    why: str = ""
    """A clause that follows the values in messages and help: `which names them`."""

    word: ClassVar[str] = "Only"
    joint: ClassVar[str] = "or"

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that the rule names."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def holds(self, given: Mapping[str, Any], schema: Schema) -> bool:
        """Whether the key has an effect with these values of `names`."""
        return any(self.matches(value, schema.find(name)) for name, value in given.items())

    def matches(self, value: Any, key: Key | None) -> bool:
        """Whether the value of one of `names` is among the values of the rule."""
        if self.values is not ON:
            return value in self.options
        rule = None if key is None else key.rule(Choice)
        if isinstance(value, str):
            return not (value in _OFF_CHOICES and rule is not None and value in rule.options)
        return bool(value)

    @property
    def options(self) -> tuple[Any, ...]:
        """The values as a tuple."""
        values = self.values() if callable(self.values) else self.values
        return values if isinstance(values, tuple) else (values,)

    @property
    def listed(self) -> str:
        """The values for people, as YAML writes them; "" for a rule without values."""
        if self.values is ON:
            return ""
        texts = [_yaml(value) for value in self.options if value is not None]
        return _listed(texts, "or")

    def clause(self, given: Mapping[str, Any], prefix: str) -> str:
        """What completes the sentence "... has no effect", where the rule does not hold."""
        is_unset = any(value in (None, [], {}) for value in given.values())
        if is_unset or (self.listed and len(given) > 1):
            keys = [f"{prefix}{name}" for name in given]
            wanted = f": {self.listed}" if self.listed else ""
            return f"without {_listed(keys, 'or')}{wanted}"
        texts = [f"{prefix}{name}: {_yaml(value)}" for name, value in given.items()]
        wanted = f", only with {self.listed}" if self.listed else ""
        return f"with {_listed(texts, 'and')}{wanted}"

    def sentence(self, schema: Schema, prefix: str) -> str:
        """The rule for `--help` and docs/keys."""
        keys = {f"{prefix}{name}": schema.find(name) for name in self.names}
        if self.values is ON:
            texts = [f"{name}{_when_on(key)}" for name, key in keys.items()]
        else:
            texts = [f"{name}={self.listed}" for name in keys]
        return f"{self.word} with {_listed(texts, self.joint)}{self._reason}."

    @property
    def _reason(self) -> str:
        return f", {self.why}" if self.why else ""


@dataclass(frozen=True)
class Unless(Only):
    """Marks a key that has no effect with certain values of another key, or of all of several."""

    word: ClassVar[str] = "Not"
    joint: ClassVar[str] = "and"

    def holds(self, given: Mapping[str, Any], schema: Schema) -> bool:
        """Whether the key has an effect with these values of `names`."""
        return not all(self.matches(value, schema.find(name)) for name, value in given.items())

    def clause(self, given: Mapping[str, Any], prefix: str) -> str:
        """What completes the sentence "... has no effect", where the rule does not hold."""
        if self.values is ON:
            texts = [f"{prefix}{name}" for name in given]
        else:
            texts = [f"{prefix}{name}: {_yaml(value)}" for name, value in given.items()]
        return f"with {_listed(texts, self.joint)}{self._reason}"


def _when_on(key: Key | None) -> str:
    """What a key that is on is equal to, for people; "" where any value will do."""
    if key is None:
        return ""
    rule = key.rule(Choice)
    off = [word for word in _OFF_CHOICES if rule is not None and word in rule.options]
    if off:
        return f" other than {off[0]}"
    if bool in key.types:
        return "=true"
    return " above 0" if {int, float} & {*key.types} else ""


def _listed(texts: Sequence[str], joint: str) -> str:
    """Some texts as a list in a sentence."""
    return f" {joint} ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _yaml(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _path_problem(value: str) -> str | None:
    if not value.strip():
        return "is empty; write a path"
    if value.startswith("~") and os.path.expanduser(value) == value:
        return f"{value}: there is no such user; write the whole path"
    size = len(os.fsencode(value))
    names = () if "://" in value else (len(os.fsencode(name)) for name in value.split("/"))
    if size > LONGEST_PATH or max(names, default=0) > LONGEST_NAME:
        return f"{value!r} is too long for a path ({size} bytes)"
    return None


def _run_name_problem(value: str) -> str | None:
    names = value.split("/")
    if any(name in ("", ".", "..") or name.startswith("-") for name in names):
        return (
            f"{value!r} cannot name a folder below runs/; write a name such as lr-1e-3 or"
            " sizes/small, and another place as save_folder"
        )
    if not value.isprintable():
        return f"{value!r} has characters that cannot be shown; write others"
    return _path_problem(value)


PATH = TextRule(_path_problem)
"""Marks what the file system is asked for, or the address of a store."""
RUN_NAME = TextRule(_run_name_problem)


def out_of_bounds(key: str, section: Any) -> Generator[str, None, bool]:
    """Lines for a section's own values that its types do not allow; returns whether there are any.

    A check begins with `if (yield from out_of_bounds(key, self)): return` where what follows
    computes with them.
    """
    found = False
    for name, own in Schema.of(section.__class__).keys.items():
        given, rules = getattr(section, own.field), own.rules
        if isinstance(given, dict):  # the long form of a choice, which its section checks
            rules = tuple(rule for rule in rules if not isinstance(rule, Choice))
        for dotted, value in leaves(name, given):
            problem = _problem(value, rules)
            if problem is not None:
                found = True
                yield f"{key}{dotted}: {problem}"
    yield from _without_effect(key, section)
    return found


def _without_effect(prefix: str, section: Any) -> Iterator[str]:
    """Lines for keys that differ from their default where an `Only` rule of theirs fails."""
    schema = Schema.of(section.__class__)
    for name, key in schema.keys.items():
        if not any(isinstance(rule, Only) for rule in key.rules):
            continue
        value = getattr(section, key.field)
        clause = None if value == key.default else _failed_rule(key, schema, section, prefix)
        if clause is not None:
            for dotted in _changed(name, value, key.default):
                yield f"{prefix}{dotted}: has no effect {clause}; remove it"


def _failed_rule(key: Key, schema: Schema, section: Any, prefix: str) -> str | None:
    """The clause of the first `Only` rule that fails for a key, or for a key that it depends on."""
    for rule in (rule for rule in key.rules if isinstance(rule, Only)):
        given = {name: _value_at(section, name) for name in rule.names}
        others = [schema.find(name) for name in rule.names]
        if any(_is_misspelled(other, v) for other, v in zip(others, given.values(), strict=True)):
            continue  # which has a line of its own
        only_other = schema.keys.get(rule.names[0]) if len(rule.names) == 1 else None
        if only_other is not None and not isinstance(rule, Unless):
            clause = _failed_rule(only_other, schema, section, prefix)
            if clause is not None:
                return clause
        if not rule.holds(given, schema):
            return rule.clause(given, prefix)
    return None


def _is_misspelled(key: Key | None, value: Any) -> bool:
    """Whether a value is none of the key's choices."""
    rule = None if key is None else key.rule(Choice)
    return rule is not None and isinstance(value, str) and rule.problem(value) is not None


def _value_at(section: Any, dotted: str) -> Any:
    """The value of a key of a section, or of a section below it."""
    for name in dotted.split("."):
        section = getattr(section, Schema.of(section.__class__).keys[name].field)
    return section


def _changed(name: str, value: Any, default: Any) -> Iterator[str]:
    """A key, or of a section those keys below it that are not at their defaults."""
    if not dataclasses.is_dataclass(default):
        yield name
        return
    for below in Schema.of(value.__class__).keys.values():
        own = getattr(value, below.field)
        if own != getattr(default, below.field):
            yield from _changed(f"{name}.{below.name}", own, getattr(default, below.field))


def _problem(value: Any, rules: tuple[Any, ...]) -> str | None:
    if isinstance(value, str):
        if _NO_TEXT.search(value):
            return "has a NUL character or half of a surrogate pair; write text"
        texts = (rule.problem(value) for rule in rules if isinstance(rule, TextRule | Choice))
        return next((problem for problem in texts if problem is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return next((rule for rule in rules if isinstance(rule, Range)), ANY).problem(value)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A field's values, those in its lists and mappings each by itself; sections have no say."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for part, item in value.items():
            yield name, part
            yield from leaves(f"{name}.{part}", item)
    else:
        yield name, value
