"""From the mappings of a gauntlet file to dataclasses; each mistake becomes a line with its place.

`gauntlet_file.py` and the fetch table call `read_section`, of tasks after `translate`, which takes
out what LLM Foundry's files may say and we have no field for. The idea: the recipe's typed reader
does the work, and mistakes are appended to `problems`, so that a user sees all of them at once.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.front.typed import Problem, build
from llmfoundry.recipe.schema import Schema, item_of
from llmfoundry.recipe.values.bounds import leaves
from llmfoundry.recipe.values.checks import nearest

T = TypeVar("T")

HARNESS = "lm_eval"
"""Type of tasks whose dataset_uri is lm_eval:NAME, a task of lm-evaluation-harness."""

# Keys of LLM Foundry without a field here, and why they have no effect.
IDLE_KEYS = {
    "batch_size": "batches are made by tokens, and scores do not depend on them",
    "pad_tok_id": "nothing is padded with a token that a model could see",
    "destination_path": "rows are not copied before they are read",
}

OLD_TYPES = {"question_answering": "generation_task_with_answers"}

# generation_kwargs that leave greedy decoding what it is, and their values; None: any value.
_GREEDY: dict[str, tuple[Any, ...] | None] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0, None),
    "temperature": None,  # this and the next two are of sampling
    "top_k": None,
    "top_p": None,
    "use_cache": None,
    "synced_gpus": None,
    "pad_token_id": None,
}


def find(name: str, *, beside: Path, key: str) -> Path:
    """The file `name`: beside the file `beside`, or where `find_file` looks.

    Raises:
        UserError: there is none, or it is a folder; the line begins with `key`.
    """
    path = beside.parent / Path(name).expanduser()
    if not path.exists():
        path = find_file(name, key)
    if not path.is_file():
        raise UserError(f"{key}: {name} is a folder; write the path of a file")
    return path


def place_in_list(where: str, i: int, entry: Any) -> str:
    """How messages name the entry i of a list: its number, and its label or name in brackets."""
    name = entry.get("label", entry.get("name")) if isinstance(entry, Mapping) else None
    return f"{where}[{i}]" + (f" ({name})" if name is not None else "")


def read_section(cls: type[T], raw: Any, where: str, problems: list[str]) -> T | None:
    """A dataclass from its YAML mapping, or None where `problems` grew.

    A key without a value (null) keeps its default, and a list of one needs no brackets.
    """
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: is not a mapping of keys to values")
        return None
    found: list[Problem] = []
    section = build(cls, _written_out(Schema.of(cls), raw), found)
    lines = [_line(Schema.of(cls), problem, raw, where) for problem in found]
    lines += [
        f"{where}: {name}: {text!r} {BROKEN}"
        for key, value in raw.items()
        for name, text in leaves(str(key), value)
        if isinstance(text, str) and is_broken(text)
    ]
    problems += lines
    return None if lines else section


def _written_out(schema: Schema, raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """An entry without the keys that have no value, and with the brackets around lists of one."""
    return {
        name: _bracketed(schema.keys[name].hint, value) if name in schema.keys else value
        for name, value in raw.items()
        if value is not None or name not in schema.keys
    }


def _bracketed(hint: Any, value: Any) -> Any:
    kind, inner, item = typing.get_origin(hint), typing.get_args(hint), item_of(hint)
    if item is not None and isinstance(value, list):
        return [_written_out(item, v) if isinstance(v, Mapping) else v for v in value]
    if kind is dict and isinstance(value, Mapping):
        return {name: _bracketed(inner[1], v) for name, v in value.items()}
    return [value] if kind is list and item is None and not isinstance(value, list) else value


def _line(schema: Schema, problem: Problem, raw: Any, where: str) -> str:
    """The message, in which list entries are named as `place_in_list` names them."""
    inside = re.match(r"(\w+)\[(\d+)\]\.", problem.key)
    if inside is not None and problem.key not in raw:
        name, i = inside[1], int(inside[2])
        item, entry = schema.keys[name].item, raw[name][i]
        assert item is not None, f"{name} lists sections"
        inner = problem._replace(key=problem.key[inside.end() :])
        return _line(item, inner, entry, place_in_list(f"{where}: {name}", i, entry))
    keys = f" (keys: {', '.join(schema.keys)})" if problem.is_unknown else ""
    return f"{where}: {problem.line}{keys}"


BROKEN = "holds half a surrogate pair, which is no character; write the character, or remove it"


def is_broken(text: str) -> bool:
    """Whether a text has no UTF-8: JSON and YAML can spell half a surrogate pair."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def translate(
    raw: Mapping[str, Any], where: str, problems: list[str], notes: dict[str, list[str]]
) -> dict[str, Any]:
    """A task's entry in our keys.

    Args:
        raw: the entry as it is written.
        where: its place.
        problems: receives what cannot be had.
        notes: receives what has no effect or another name here, each with the tasks' labels.
    """
    entry = dict(raw)
    uri = entry.get("dataset_uri")
    if isinstance(uri, str) and uri.startswith(f"{HARNESS}:"):
        named = {"label": uri.removeprefix(f"{HARNESS}:"), "icl_task_type": HARNESS}
        entry = {**named, **entry}
    label = str(entry.get("label"))
    for key, why in IDLE_KEYS.items():
        if key in entry:
            del entry[key]
            notes.setdefault(f"{key}: has no effect: {why}", []).append(label)
    if "prelimiter" in entry:
        if "question_prelimiter" in entry:
            problems.append(f"{where}: prelimiter: is question_prelimiter; remove one of them")
        entry["question_prelimiter"] = entry.pop("prelimiter")
    kind = entry.get("icl_task_type")
    if isinstance(kind, str) and kind in OLD_TYPES:
        entry["icl_task_type"] = OLD_TYPES[kind]
        note = f"icl_task_type: {kind} is read as {OLD_TYPES[kind]}, its name today"
        notes.setdefault(note, []).append(label)
    if "generation_kwargs" in entry:
        kwargs = entry.pop("generation_kwargs") or {}
        _translate_generation(kwargs, entry, f"{where}: generation_kwargs", problems)
        note = "generation_kwargs: only max_new_tokens has an effect; answers are greedy here"
        notes.setdefault(note, []).append(label)
    return entry


def _translate_generation(
    kwargs: Any, entry: dict[str, Any], where: str, problems: list[str]
) -> None:
    """Accept what asks for greedy decoding; move max_new_tokens to the task's own key."""
    if not isinstance(kwargs, Mapping):
        problems.append(f"{where}: {kwargs!r} will not do; write a mapping, {{name: value}}")
        return
    for name, value in kwargs.items():
        if name == "max_new_tokens":
            if entry.setdefault(name, value) != value:
                problems.append(f"{where}.{name}: the task's own max_new_tokens differs; write one")
            continue
        if name not in _GREEDY:
            why = "is not known to leave greedy decoding as it is"
            problems.append(f"{where}.{name}: {why}{nearest(str(name), _GREEDY)}; remove it")
            continue
        allowed = _GREEDY[name]
        if allowed is not None and value not in allowed:
            problems.append(
                f"{where}.{name}: {value!r}; answers are greedy here, so that every run gives the"
                f" same ones; write {str(allowed[0]).lower()} or remove it"
            )
