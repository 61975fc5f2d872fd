"""What a recipe may say: every key with its type, default, meaning, rules and owner.

`Schema.of` makes one object for each recipe type, and one for each section that it holds. Help,
completion, hints, overrides, checks and the typed reader ask it, and nothing else walks over the
dataclasses. It lies below all of them and imports none.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

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
                rules=getattr(declared[field.name], "__metadata__", ()),
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


@functools.cache
def _meanings(owner: type) -> dict[str, str]:
    """The string under each field that a class declares, on one line, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    found: dict[str, str] = {}
    for field, text in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
