"""Tables of choices: what an optimizer, a schedule, a logger, a norm or a file type can be.

A table is defined next to the section whose key chooses from it (optimizer, schedule, logger,
callback, norm) or, where no key does, next to the code that reads it (file types, task types). The
checks, the help, the builder and the memory estimate read the same record. A plugin (`plugins.py`)
adds a record as to a dict:
`OPTIMIZERS["sgd"] = OptimizerType(torch.optim.SGD, keys={"momentum": 0.9}, moments=1)`.
"""

from __future__ import annotations

import copy
import importlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest, not_a_choice, set_defaults

T = TypeVar("T")
REQUIRED = "???"
"""In place of a default: the setting is required."""
SHIPPED = "shipped"
"""In place of a record's code: the package above that builds the entry has it, by its name."""
Code: TypeAlias = "Callable[..., Any] | str"
"""A function; or where it is, "package.module:function", imported when it is needed; or SHIPPED."""


class Origin(NamedTuple):
    """The source of records: a name for messages, and a hash of its code, "" for the project."""

    label: str
    code: str


now_adding = [Origin("llmfoundry itself", "")]
"""The source of new records; the last one is a plugin that is being imported."""
not_imported: dict[str, str] = {}
"""Plugins that the recipe of a saved run names but that are not imported, with the recipe."""


class ChoiceTable(UserDict[str, T]):
    """Records by name. A record of the wrong type, or with an existing name, is an error.

    Args:
        key: the recipe key that chooses from the table, for messages.
        kind: the type of the records.
        entries: the records of the project.
    """

    def __init__(self, key: str, kind: type[T], entries: Mapping[str, T]) -> None:
        self.key, self.kind = key, kind
        self.origins: dict[str, Origin] = {}
        super().__init__(entries)

    __hash__ = object.__hash__

    def __setitem__(self, name: str, entry: T) -> None:
        if not isinstance(name, str) or not isinstance(entry, self.kind):
            raise UserError(
                f"{self.key}: {name!r} is of type {type(entry).__name__}; entries of this table are"
                f" of type {self.kind.__name__}"
            )
        if name in self.data:
            raise UserError(
                f"{self.key}: {name!r} is there already, from {self.origins[name].label}; write"
                f" another name in {now_adding[-1].label}"
            )
        self.data[name], self.origins[name] = entry, now_adding[-1]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a record, or the default."""
        return self.data.get(name, default)

    def names(self, test: Callable[[T], bool]) -> Callable[[], tuple[str, ...]]:
        """Return a function that lists the records which pass a test, also those of plugins."""
        return lambda: tuple(name for name, entry in self.data.items() if test(entry))

    def taking(self, key: str) -> Callable[[], tuple[str, ...]]:
        """Return a function that lists the records with a setting `key`, including plugins'."""
        return self.names(lambda entry: key in entry.keys)  # type: ignore[attr-defined]

    def __missing__(self, name: str) -> T:
        raise UserError(f"{self.key}: {self.refusal(name)}")

    def refusal(self, name: str, *, other: str = "") -> str:
        """Return why a text is not a choice, and where the record may come from."""
        return not_a_choice(name, [*self.data], other=other) + _of_a_plugin()


def _of_a_plugin() -> str:
    """Return the clause that names plugins which may add the record."""
    if not not_imported:
        return ""
    names, recipe = ", ".join(not_imported), next(iter(not_imported.values()))
    return f"; if it is a plugin's that {recipe} names, write plugins=[{names}]"


@dataclass(frozen=True)
class ChoiceRecord:
    """Base class of the records of all tables."""

    make: Code
    """The constructor. Recipes are checked without torch, so most of our records say SHIPPED."""
    meaning: str = field(default="", kw_only=True)
    """A sentence for --help."""
    keys: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Settings, each with its default or REQUIRED."""

    def own_keys(self, section: Any) -> dict[str, Any]:
        """Return the settings that are not fields of the section, which has them in kwargs."""
        return {key: value for key, value in self.keys.items() if not hasattr(section, key)}

    def fill(self, section: Any) -> None:
        """Resolve defaults in place, in the section's fields and its kwargs."""
        kwargs: dict[str, Any] = {}
        for key, default in self.keys.items():
            if default == REQUIRED:
                continue
            if hasattr(section, key):
                set_defaults(section, **{key: copy.deepcopy(default)})
            else:
                kwargs[key] = copy.deepcopy(default)
        section.kwargs = kwargs | section.kwargs


def load_code(code: Code, shipped: Code | None = None) -> Callable[..., Any]:
    """Return the function of a record's field; `shipped` is what SHIPPED stands for."""
    if code == SHIPPED and shipped is not None:
        code = shipped
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


def check_settings(key: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error line for each setting that is unknown, missing or of another type."""
    for name, value in given.items():
        default = known.get(name)
        if name not in known:
            yield f"unknown key '{key}{name}'{nearest(name, known)}"
        elif default is not None and default != REQUIRED and not _is_alike(value, default):
            yield f"{key}{name}: {value!r} is not like its default, {default!r}; write such a value"
    for name in [name for name, value in known.items() if value == REQUIRED and name not in given]:
        yield f"{key}{name}: is required; write {key}{name}=VALUE"


def _is_alike(value: Any, default: Any) -> bool:
    if isinstance(default, float) and not isinstance(value, bool):
        return isinstance(value, int | float)
    return type(value) is type(default) or value is None


def check_plugins(
    key: str, given: Mapping[str, Mapping[str, Any] | None], table: ChoiceTable[Any], own: set[str]
) -> Iterator[str]:
    """Yield an error line for each unknown name in a section's `plugins`, and for its settings."""
    for name, settings in given.items():
        if name not in table or name in own:
            names = [other for other in table if other not in own]
            yield f"{key}plugins: {not_a_choice(name, names)}"
        else:
            yield from check_settings(f"{key}plugins.{name}.", settings or {}, table[name].keys)


def settings_of(
    given: Mapping[str, Mapping[str, Any] | None], table: ChoiceTable[Any]
) -> dict[str, dict[str, Any]]:
    """Return a section's `plugins` with their defaults; unknown plugins have none."""
    return {
        name: {**copy.deepcopy(table[name].keys if name in table else {}), **(settings or {})}
        for name, settings in given.items()
    }
