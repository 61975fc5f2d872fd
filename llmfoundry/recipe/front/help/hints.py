"""What to write in place of a key or a flag that does not exist.

`load.py`, `script.py` and `explain.py` call it. In this order: the key of that name elsewhere in
the recipe; what the word of another tool means (`recipe/other_tools/`), if that key exists here; a
key that is really near. None of them: no guess, which would mislead.
"""

from __future__ import annotations

import re
from typing import Any

from llmfoundry.recipe.front.argv import FLAGS
from llmfoundry.recipe.front.paths import group_options, search_folders
from llmfoundry.recipe.front.typed import Problem, flat
from llmfoundry.recipe.other_tools.entry import Other
from llmfoundry.recipe.other_tools.table import named
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.values.bounds import Choice
from llmfoundry.recipe.values.checks import nearest, nearest_option

MOST_PLACES = 3  # of one name, that are listed
LONGEST = 60  # characters of a value that is put into a hint


def unknown_key(schema: Schema, key: str, value: Any = None) -> list[Problem]:
    """What to say of `key`, which a recipe does not have, or of each key below it.

    Args:
        schema: the whole recipe's.
        key: dotted.
        value: given for it; None: not known.
    """
    if isinstance(value, dict) and value:
        below = [(f"{key}.{name}", item) for name, item in flat(value)]
        if any(_suggestion(schema, name, item, alone=False) for name, item in below):
            return [_problem(schema, name, item) for name, item in below]
    return [_problem(schema, key, value)]


def unknown_flag(schema: Schema, argument: str, following: str | None = None) -> str:
    """What to say of a flag, `--name` or `--name=value`, and the word that follows it."""
    name, equals, value = argument.lstrip("-").partition("=")
    key, given = name.replace("-", "_"), value if equals else following
    suggestion = _suggestion(schema, key, given)
    if schema.find(key) is not None:
        suggestion = f"; settings have no dashes: {key}={'VALUE' if given is None else given}"
    elif not suggestion:
        suggestion = nearest(argument, FLAG_WORDS)
    if not suggestion and equals:
        suggestion = f"; settings have no dashes: {argument.lstrip('-')}"
    return f"unknown flag '{argument}'{suggestion} (flags: {', '.join(FLAGS)})"


FLAG_WORDS = [*(flag.split()[0] for flag in FLAGS), "--multirun"]


def _problem(schema: Schema, key: str, value: Any) -> Problem:
    return Problem(key, _suggestion(schema, key, value), is_unknown=True)


def _suggestion(schema: Schema, key: str, value: Any, *, alone: bool = True) -> str:
    """The clause that says what to write; "" where nothing is near. `alone`: guess it as well."""
    head, _, name = key.partition(".")
    if head == "variables":
        return _variable(schema, name, value)
    name = key.rpartition(".")[2]
    other = _other(schema, key.lower())
    other = other or (_other(schema, name.lower()) if alone else None)
    if not alone:
        return "" if other is None else _say(schema, other, value)
    is_whole = other is not None and any("." in word for word in other.words.split())
    places = [k for k, _ in schema.walk() if k.endswith(f".{name}")]
    if other is None or (places and other.key not in places and not is_whole):
        found = _near(schema, key, places)
        if found:
            return found
    return "" if other is None else _say(schema, other, value)


def _variable(schema: Schema, name: str, value: Any) -> str:
    """What to do with LLM Foundry's `variables.NAME`, which interpolations take."""
    taken = f"${{variables.{name or 'NAME'}}}"
    other = _other(schema, name.lower())
    ours = name if name in schema.keys else other.key if other is not None else ""
    if not ours:
        return f"; write its value where {taken} stands"
    said = f"{ours}={value}" if _fits(value) else ours
    return f"; write {said}, and ${{{ours}}} where {taken} stands"


def _near(schema: Schema, key: str, places: list[str]) -> str:
    parent, _, name = key.rpartition(".")
    above = schema.find(parent) if parent else None
    section = (above.section or above.item) if above is not None else None
    own = (section.keys if section is not None else {}) if parent else schema.keys
    if places and nearest_option(name, [n for n in own if n == name]) is None:
        fewest = min(place.count(".") for place in places)
        shown = [place for place in places if place.count(".") == fewest][:MOST_PLACES]
        return "; did you mean " + " or ".join(f"'{place}'" for place in shown) + "?"
    return nearest(name, own)


def _other(schema: Schema, word: str) -> Other | None:
    """What another tool's word means: the first that this recipe has, else for another script."""
    found = [other for other in named(word) if other.write or other.why]
    here = (o for o in found if not o.write or schema.find(o.key) is not None)
    return next(here, next((o for o in found if o.script), None))


def _say(schema: Schema, other: Other, value: Any) -> str:
    """The clause for another tool's setting: with its value where ours takes it."""
    if not other.write:
        return f"; {other.why}"
    text = "" if value is None else str(value)
    where = "" if schema.find(other.key) is not None else f" with scripts/{other.script}.py"
    why = f" ({other.why})" if other.why else ""
    example = re.sub("<(.*?)>", r"\1", other.write)
    takes_bool = re.search("<(true|false)>", other.write) is not None
    if text.lower() in ("false", "no", "off", "none") and not takes_bool:
        if other.off:
            return f"; write {other.off}{where}"
        return f"; remove it: off unless you write {example}{where}"
    if re.fullmatch(r"-[\d.]+", text):
        return f"; remove it: {text} is no value here, and {other.key} has its default{where}"
    written = re.sub(
        "<(.*?)>([a-z]*)", lambda m: _carried(schema, other.key, m[1], m[2], value), other.write
    )
    return f"; write {written}{where}{why}"


def _carried(schema: Schema, key: str, example: str, unit: str, value: Any) -> str:
    """The typed value as our setting takes it, or else the example; with its unit."""
    if isinstance(value, bool):
        return str(value).lower() if example in ("true", "false") else example
    if isinstance(value, list) and value and all(map(_fits, value)):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    rule = None if (found := schema.find(key)) is None else found.rule(Choice)
    groups = group_options(search_folders(None), schema)
    options = groups.get(key) or (rule.options if rule is not None else ())
    if options and text not in options:
        begun = [option for option in options if text.lower().startswith(option)]
        nearest = nearest_option(text, options)
        is_free = rule is not None and rule.other
        return nearest or (begun[0] if begun else text if is_free and _fits(value) else example)
    if unit and not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text):
        return example + unit
    return (text if _fits(value) else example) + unit


def _fits(value: Any) -> bool:
    """Whether a value can be put into a hint as it stands."""
    text = "" if value is None else str(value)
    is_plain = bool(text) and len(text) <= LONGEST and text.isprintable()
    return is_plain and not {*text} & set(" '\"[]{}$")
