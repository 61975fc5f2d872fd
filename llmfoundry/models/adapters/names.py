"""Parts of a model by name: `wte`, `"blocks.0-3"`, `"*.attn"`, `Wqkv`.

`adapter.target_modules`, `adapter.exclude_modules`, `adapter.modules_to_save` and `freeze` are read
here. One rule: the parts of a pattern, between dots, are looked for side by side among the parts of
a name. A part may have `*` and `?`, or be a range of numbers, both ends included.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from llmfoundry.errors import UserError

_RANGE = re.compile(r"(\d+)-(\d+)")
_FUSED = {  # what other libraries call layers that the decoder fuses or names otherwise
    **dict.fromkeys(("query_key_value", "c_attn", "qkv_proj"), "Wqkv"),
    "o_proj": "out_proj",
    "embed_tokens": "wte",
    "embed_in": "wte",
    "embed_out": "lm_head",
    "gate_up_proj": "w1, v1",
    "mlp": "ffn",
    "self_attn": "attn",
}


def matches(pattern: str, name: str) -> bool:
    """Whether the parts of `pattern` stand side by side in `name`."""
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(_is_part, wanted, parts[start:])) for start in starts)


def _is_part(wanted: str, part: str) -> bool:
    found = _RANGE.fullmatch(wanted)
    if found:
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)


def select(patterns: Iterable[str], names: Collection[str], key: str) -> list[str]:
    """Those of `names`, in their order, that any pattern matches.

    Args:
        patterns: as the recipe has them.
        names: of modules or parameters.
        key: of the recipe, for errors.

    Raises:
        UserError: a pattern matches nothing, or its range ends behind the last block.
    """
    taken: set[str] = set()
    for index, pattern in enumerate(patterns):
        found = {name for name in names if matches(pattern, name)}
        if not found:
            raise UserError(
                f"{key}[{index}]: {pattern!r} matches nothing; {_advice(pattern, names)}"
            )
        _check_range(pattern, found, f"{key}[{index}]")
        taken |= found
    return [name for name in names if name in taken]


def _check_range(pattern: str, found: Collection[str], key: str) -> None:
    """Every number of a range is one of the model's."""
    for part in pattern.split("."):
        numbers = _RANGE.fullmatch(part)
        if numbers is None:
            continue
        present = {int(p) for name in found for p in name.split(".") if p.isdecimal()}
        if int(numbers[2]) not in present or int(numbers[1]) not in present:
            raise UserError(
                f"{key}: {pattern!r} goes beyond what there is; the last that it matches is"
                f" {max(present)}; write {numbers[1]}-{max(present)}"
            )


def _advice(pattern: str, names: Collection[str]) -> str:
    last = pattern.rpartition(".")[2]
    if last in _FUSED:
        return f"here it is called {_FUSED[last]}"
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))

    def likeness(name: str) -> float:
        parts = [name, *name.split(".")]
        return max(difflib.SequenceMatcher(None, pattern, part).ratio() for part in parts)

    nearest = sorted(kinds, key=likeness, reverse=True)[:3]
    return f"the nearest are {', '.join(nearest)}"
