"""Resolved sections: each default derived once, in a type that declares no `None` for it.

A section whose defaults depend on other settings has a subclass, `ResolvedModelConfig` of
`ModelConfig`, that declares those fields again without `None`. `TrainRecipe.resolve` makes a whole
recipe of such sections. A value that belongs to a setting, such as `moe_top_k` to a mixture of
experts, is set where that setting is on. Elsewhere it stays None and must not be read.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from typing import Any, TypeVar

Section = TypeVar("Section")


def copy_as(resolved_type: type[Section], section: Any) -> Section:
    """Return a copy of a section in its resolved type, before any default is derived.

    Sections within it become the types that `resolved_type` declares for them.
    """
    hints, values = typing.get_type_hints(resolved_type), {}
    for field in dataclasses.fields(resolved_type):  # type: ignore[arg-type]
        value, hint = getattr(section, field.name), hints[field.name]
        is_resolved_later = isinstance(hint, type) and issubclass(hint, type(value))
        if dataclasses.is_dataclass(value) and is_resolved_later:
            values[field.name] = copy_as(hint, value)
        else:
            values[field.name] = copy.deepcopy(value)
    return resolved_type(**values)
