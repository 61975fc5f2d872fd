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
"""In place of a key's default: there is none."""
SHIPPED = "shipped"
"""In place of a record's code: the package above that builds the entry has it, by its name."""
Code: TypeAlias = "Callable[..., Any] | str"
"""A function; or where it is, "package.module:function", imported when it is needed; or SHIPPED."""


class Origin(NamedTuple):
    """Where entries come from: a name for messages, and what their code is, "" for ours."""

    label: str
    code: str


now_adding = [Origin("llmfoundry itself", "")]
"""Whose entries are added: last, a plugin that is being imported."""
not_imported: dict[str, str] = {}
"""Plugins that a saved run's recipe names and this command line does not, each with the recipe."""


class ChoiceTable(UserDict[str, T]):
    """Entries by name. An entry of a wrong kind, or of a name that is there, is refused.

    Args:
        key: of the recipe that chooses from it, for messages.
        kind: of its entries.
        entries: those that come with the project.
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
        """An entry, or what is given in its place."""
        return self.data.get(name, default)

    def names(self, test: Callable[[T], bool]) -> Callable[[], tuple[str, ...]]:
        """Return a function that lists the entries which pass a test, those of plugins too."""
        return lambda: tuple(name for name, entry in self.data.items() if test(entry))

    def taking(self, key: str) -> Callable[[], tuple[str, ...]]:
        """Return a function that lists the entries with a setting `key`, those of plugins too."""
        return self.names(lambda entry: key in entry.keys)  # type: ignore[attr-defined]

    def __missing__(self, name: str) -> T:
        raise UserError(f"{self.key}: {self.refusal(name)}")

    def refusal(self, name: str, *, other: str = "") -> str:
        """Why a text that is no entry is not taken, and where the entry may come from."""
        return not_a_choice(name, [*self.data], other=other) + _of_a_plugin()


def _of_a_plugin() -> str:
    """Where the name may come from."""
    if not not_imported:
        return ""
    names, recipe = ", ".join(not_imported), next(iter(not_imported.values()))
    return f"; if it is a plugin's that {recipe} names, write plugins=[{names}]"


@dataclass(frozen=True)
class ChoiceRecord:
    """What every table's records have."""

    make: Code
    """What makes it. Recipes are checked without torch, so SHIPPED in most of our own records."""
    meaning: str = field(default="", kw_only=True)
    """A sentence for --help."""
    keys: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Settings that it takes, each with its default or REQUIRED."""

    def own_keys(self, section: Any) -> dict[str, Any]:
        """Those of its settings that are no fields of the section, which has them as kwargs."""
        return {key: value for key, value in self.keys.items() if not hasattr(section, key)}

    def fill(self, section: Any) -> None:
        """Write defaults in place, into the section's fields and its kwargs."""
        given = copy.deepcopy({k: v for k, v in self.keys.items() if v != REQUIRED})
        set_defaults(
            section, **{key: value for key, value in given.items() if hasattr(section, key)}
        )
        own = {key: value for key, value in given.items() if key in self.own_keys(section)}
        section.kwargs = own | section.kwargs


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
    """Lines for settings, below `key`, that an entry does not take, lacks, or has otherwise."""
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
    """Lines for a section's `plugins`, names of a table with their settings, but for its `own`."""
    for name, settings in given.items():
        if name not in table or name in own:
            names = [other for other in table if other not in own]
            yield f"{key}plugins: {not_a_choice(name, names)}"
        else:
            yield from check_settings(f"{key}plugins.{name}.", settings or {}, table[name].keys)


def settings_of(
    given: Mapping[str, Mapping[str, Any] | None], table: ChoiceTable[Any]
) -> dict[str, dict[str, Any]]:
    """A section's `plugins` with their defaults; of those that are known here."""
    return {
        name: {**copy.deepcopy(table[name].keys if name in table else {}), **(settings or {})}
        for name, settings in given.items()
    }
