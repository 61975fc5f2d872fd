"""The schema of recipes: every key with its type, default, meaning, rules and owner.

`Schema.of` returns the schema of a recipe type or of a section. Help, completion, hints, overrides,
checks and the typed reader use it; no other code walks over the dataclasses.

Rules are declared in the types of fields: a range (`lr: Annotated[float, Range(above=0)]`),
choices, a form of text, or the keys that it depends on (`Only("name", "muon")`). The `check` of a
section begins with `check_fields`, which applies the rules of every field. A number without a rule
must be finite and fit its machine type, so that no value can hang a check, overflow or exhaust
memory.
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
    """A key of a section.

    Attributes:
        name: the name that users write.
        field: the name of the dataclass field; it ends with an underscore if Python reserves the
            word.
        hint: the type of its value.
        rules: the annotations of the type: a range, choices, a form of text, `Only`.
        owners: the classes that declare the field, the section's class before its base classes.
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
        """Types of its value."""
        return options(self.hint)

    @property
    def section(self) -> Schema | None:
        """The schema of the keys below it; None if the key has a value."""
        return section_of(self.hint)

    @property
    def item(self) -> Schema | None:
        """The schema of the sections in a list or a mapping, such as `data.streams`."""
        return item_of(self.hint)

    @property
    def default(self) -> Any:
        """The default value of a key that is not required."""
        (field,) = (f for f in dataclasses.fields(self.owners[0]) if f.name == self.field)
        make = field.default_factory
        return field.default if make is dataclasses.MISSING else make()

    @property
    def meaning(self) -> str:
        """The string under the field, of the nearest class that has one, on one line."""
        texts = (_meanings(owner).get(self.field) for owner in self.owners)
        return next((text for text in texts if text is not None), "")

    def rule(self, kind: type[R]) -> R | None:
        """Return its rule of a kind; None if there is none."""
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
        """Wrap a dataclass; only `of` calls it, once for each type."""
        self.cls = recipe_type

    @staticmethod
    def of(recipe_type: type) -> Schema:
        """Return the schema of a recipe type or of a section, also of their resolved types."""
        mro = recipe_type.__mro__
        recipe_type = next((c for c in mro if "__dataclass_fields__" in vars(c)), recipe_type)
        return _made.setdefault(recipe_type, Schema(recipe_type))

    @functools.cached_property
    def keys(self) -> dict[str, Key]:
        """The keys of the section, in the order of declaration."""
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
        """The docstring of the section, on one line."""
        return " ".join((inspect.getdoc(self.cls) or "").split())

    def find(self, dotted: str) -> Key | None:
        """Return the key at `model.n_heads`, or the item at `data.streams.NAME` or `phases[0]`."""
        key = Key("", "", self.cls)
        for part in dotted.split("."):
            name, _, index = part.partition("[")
            section = key.section
            below = key if section is None else section.keys.get(name)
            # An item of a list or of a mapping, whose names the user chooses.
            if below is not None and (section is None or index):
                below = None if below.item is None else Key(name, name, below.item.cls)
            if below is None:
                return None
            key = below
        return key

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Key]]:
        """Yield every dotted key in order, a section before its keys; items are not expanded."""
        for name, key in self.keys.items():
            yield f"{prefix}{name}", key
            if key.section is not None:
                yield from key.section.walk(f"{prefix}{name}.")


_made: dict[type, Schema] = {}


def section_of(hint: Any) -> Schema | None:
    """Return the schema of the dataclass in a type such as `EvalConfig | None`; else None."""
    for option in options(hint):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return Schema.of(option)
    return None


def item_of(hint: Any) -> Schema | None:
    """Return the schema of the dataclass that a list or a mapping holds; else None."""
    for option in options(hint):
        arguments = typing.get_args(option)
        if arguments:
            return section_of(arguments[-1])
    return None


def options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the one type."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _flat(rules: Iterable[Any]) -> Iterator[Any]:
    """Yield the rules of a field one by one; fields that share rules name a tuple of them."""
    for rule in rules:
        if isinstance(rule, tuple):
            yield from rule
        else:
            yield rule


@functools.cache
def _meanings(owner: type) -> dict[str, str]:
    """Return the string under each field of a class, on one line, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    meanings: dict[str, str] = {}
    for field, text in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            words = str(ast.literal_eval(text.value)).split()
            meanings[ast.unparse(field.target)] = " ".join(words)
    return meanings


MOST_INT = 2**63 - 1
MOST_FLOAT = 3e38  # the range of fp32
LONGEST_NAME, LONGEST_PATH = 255, 2048  # bytes; Linux allows 4096, and we append names


_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # characters that neither a file nor JSON can hold


@dataclass(frozen=True)
class Range:
    """The range of a number; missing ends are those of the machine type."""

    least: float | None = None
    most: float | None = None
    why: str = ""
    """Reason for `most`: the effect of a larger value."""
    above: float | None = None
    below: float | None = None
    infinite: bool = False
    """Whether infinity is allowed."""

    def problem(self, value: float) -> str | None:
        """Return why `value` is not in the range, and what to write; None if it is."""
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

# Ranges that several fields share.
LENGTH = "positions are exact up to there"
ROWS = Range(1, 2**24, "the rows of a step are listed in memory")
PROCESSES = "each is a process of this machine"
TOKENS = Range(1, 2**24, LENGTH)
MOST_LAYERS = 4096  # the deepest published transformer has 1,000
WIDTH = Range(1, 2**22, "no device holds a wider matrix")
NEW_TOKENS = Range(1, 2**20, "keys and values of each are kept in memory")
TEMPERATURE = Range(0, 1e6)
TOP_P = Range(above=0, most=1, why="it is a probability")


@dataclass(frozen=True)
class TextRule:
    """The form of a text."""

    problem: Callable[[str], str | None]
    """Function that returns why a text is invalid, and what to write; None if it is valid."""


@dataclass(frozen=True)
class Choice:
    """A text that is one of several choices."""

    options: Collection[str]
    """The choices; a `ChoiceTable` includes those that plugins add later."""
    other: str = ""
    """Other values of the field, as a text: `a number of rows`."""
    form: re.Pattern[str] | None = None
    """Regular expression of other valid texts."""
    reasons: Mapping[str, str] | None = None
    """Choices of other tools that are refused, with the reason and what to write."""

    def problem(self, value: str) -> str | None:
        """Return why `value` is not a choice, and what to write; None if it is."""
        if value in self.options or (self.form is not None and self.form.fullmatch(value)):
            return None
        if self.reasons is not None and value in self.reasons:
            return f"{value} {self.reasons[value]}"
        if isinstance(self.options, ChoiceTable):
            return self.options.refusal(value, other=self.other)
        return not_a_choice(value, [*self.options], other=self.other)

    def listed(self) -> str:
        """Return all choices as a text."""
        return ", ".join(self.options) + (f", or {self.other}" if self.other else "")

    def meanings(self) -> dict[str, str]:
        """Return the meanings of the choices of a table, if its records have them."""
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
    """Return a `Choice` of the names in a table or a sequence."""
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
    """A key that has an effect only with certain values of other keys.

    The check of a recipe, the sentence in `--help` and that in docs/keys follow from one rule.
    `Only("name", "muon")`: with name=muon. `Only("to", ("hf", "gguf"))`: with either value.
    `Only("load_path")`: with any load_path. `Only(("trace", "memory_snapshot"))`: with either key.
    The keys that a rule names must have an effect themselves.
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
        """Return whether the key has an effect, for these values of `names`."""
        return any(self.matches(value, schema.find(name)) for name, value in given.items())

    def matches(self, value: Any, key: Key | None) -> bool:
        """Return whether the value of one of `names` is among the values of the rule."""
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
        """The values as a text, as YAML writes them; "" for a rule without values."""
        if self.values is ON:
            return ""
        texts = [_yaml(value) for value in self.options if value is not None]
        return _listed(texts, "or")

    def clause(self, given: Mapping[str, Any], prefix: str) -> str:
        """Return the end of the sentence "... has no effect", if the rule does not hold."""
        is_unset = any(value in (None, [], {}) for value in given.values())
        if is_unset or (self.listed and len(given) > 1):
            keys = [f"{prefix}{name}" for name in given]
            wanted = f": {self.listed}" if self.listed else ""
            return f"without {_listed(keys, 'or')}{wanted}"
        texts = [f"{prefix}{name}: {_yaml(value)}" for name, value in given.items()]
        wanted = f", only with {self.listed}" if self.listed else ""
        return f"with {_listed(texts, 'and')}{wanted}"

    def sentence(self, schema: Schema, prefix: str) -> str:
        """Return the rule as a sentence for `--help` and docs/keys."""
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
    """A key that has no effect with certain values of another key, or of all of several keys."""

    word: ClassVar[str] = "Not"
    joint: ClassVar[str] = "and"

    def holds(self, given: Mapping[str, Any], schema: Schema) -> bool:
        """Return whether the key has an effect, for these values of `names`."""
        return not all(self.matches(value, schema.find(name)) for name, value in given.items())

    def clause(self, given: Mapping[str, Any], prefix: str) -> str:
        """Return the end of the sentence "... has no effect", if the rule does not hold."""
        if self.values is ON:
            texts = [f"{prefix}{name}" for name in given]
        else:
            texts = [f"{prefix}{name}: {_yaml(value)}" for name, value in given.items()]
        return f"with {_listed(texts, self.joint)}{self._reason}"


def _when_on(key: Key | None) -> str:
    """Return the suffix for a key that must be on; "" if any value will do."""
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
    """Join texts as a list in a sentence."""
    return f" {joint} ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _yaml(value: Any) -> str:
    """Return a value as YAML writes it."""
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
"""A path, or the URL of a store."""
RUN_NAME = TextRule(_run_name_problem)


def check_fields(key: str, section: Any) -> Generator[str, None, bool]:
    """Yield an error line for each value of a section that its rules do not allow.

    Return whether a value is out of bounds. Use `if (yield from check_fields(key, self)): return`
    if the rest of a check computes with the values.
    """
    is_out_of_bounds = False
    for name, own_key in Schema.of(section.__class__).keys.items():
        value, rules = getattr(section, own_key.field), own_key.rules
        if isinstance(value, dict):  # the long form of a choice, which its section checks
            rules = tuple(rule for rule in rules if not isinstance(rule, Choice))
        for dotted, leaf in leaves(name, value):
            problem = _problem(leaf, rules)
            if problem is not None:
                is_out_of_bounds = True
                yield f"{key}{dotted}: {problem}"
    yield from _without_effect(key, section)
    return is_out_of_bounds


def _without_effect(prefix: str, section: Any) -> Iterator[str]:
    """Yield an error line for each key that is set although one of its `Only` rules fails."""
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
    """Return the clause of the first rule that fails, of a key or of the key that it depends on."""
    for rule in (rule for rule in key.rules if isinstance(rule, Only)):
        values = {name: _value_at(section, name) for name in rule.names}
        others = [schema.find(name) for name in rule.names]
        if any(_is_misspelled(other, v) for other, v in zip(others, values.values(), strict=True)):
            continue  # the misspelled value has an error line of its own
        # A rule on a key without effect fails as well.
        only_other = schema.keys.get(rule.names[0]) if len(rule.names) == 1 else None
        if only_other is not None and not isinstance(rule, Unless):
            clause = _failed_rule(only_other, schema, section, prefix)
            if clause is not None:
                return clause
        if not rule.holds(values, schema):
            return rule.clause(values, prefix)
    return None


def _is_misspelled(key: Key | None, value: Any) -> bool:
    """Return whether a value is none of the key's choices."""
    rule = None if key is None else key.rule(Choice)
    return rule is not None and isinstance(value, str) and rule.problem(value) is not None


def _value_at(section: Any, dotted: str) -> Any:
    """Return the value of a key of a section, or of a section below it."""
    for name in dotted.split("."):
        section = getattr(section, Schema.of(section.__class__).keys[name].field)
    return section


def _changed(name: str, value: Any, default: Any) -> Iterator[str]:
    """Yield a key, or for a section the keys below it that differ from their defaults."""
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
    """Yield a value, or each item of a list or mapping, with its key."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for part, item in value.items():
            yield name, part
            yield from leaves(f"{name}.{part}", item)
    else:
        yield name, value
