"""From the mappings of a gauntlet file to dataclasses; each mistake becomes a line with its place.

`tasks` and `definitions` call `read_section`, for each task after `translate`, which takes out what
LLM Foundry's files may say and we have no field for. The idea: what is wrong in a file raises
nothing here but is appended to `problems`, so that a user sees all of its mistakes at once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.front.typed import options
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


def read_list(cls: type[T], raw: Any, where: str, problems: list[str]) -> list[T]:
    """Every entry that can be read, as `cls`; what cannot be adds its lines to `problems`."""
    if not isinstance(raw, list):
        problems.append(f"{where}: {raw!r} will not do; write a list of entries")
        return []
    entries = [
        read_section(cls, raw[i], place(where, i, raw[i]), problems) for i in range(len(raw))
    ]
    return [entry for entry in entries if entry is not None]


def place(where: str, i: int, entry: Any) -> str:
    """How messages name the entry i of a list: its number, and its label or name in brackets."""
    name = entry.get("label", entry.get("name")) if isinstance(entry, Mapping) else None
    return f"{where}[{i}]" + (f" ({name})" if name is not None else "")


def read_section(cls: type[T], raw: Any, where: str, problems: list[str]) -> T | None:
    """A dataclass from its YAML mapping, or None where `problems` grew.

    A key without a value (null) keeps its default.
    """
    if not isinstance(raw, Mapping):
        problems.append(f"{where}: is not a mapping of keys to values")
        return None
    before = len(problems)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(cls)
    given = {key: value for key, value in raw.items() if value is not None or key not in fields}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            hint = nearest(str(key), fields)
            problems.append(f"{where}: unknown key '{key}'{hint} (keys: {', '.join(fields)})")
        else:
            values[key] = _read_value(kinds[key], value, f"{where}: {key}", problems)
    problems.extend(
        f"{where}: {key}: is missing; write {_describe(kinds[key])}"
        for key, f in fields.items()
        if key not in given
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    )
    return cls(**values) if len(problems) == before else None


def _read_value(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    kind = options(kind)[0]  # null is not given, so `int | None` is an int here
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        if dataclasses.is_dataclass(inner[0]):
            return read_list(typing.cast(type, inner[0]), value, where, problems)
        if not isinstance(value, list):  # a list of one may be written without brackets
            return [_read_value(inner[0], value, where, problems)]
        return [_read_value(inner[0], v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
    if typing.get_origin(kind) is dict and isinstance(value, Mapping):
        return {
            str(k): _read_value(inner[1], v, f"{where}.{k}", problems) for k, v in value.items()
        }
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and is_broken(value):
        problems.append(f"{where}: {value!r} {BROKEN}")
    if kind is Any or type(value) is kind:
        return value
    problems.append(f"{where}: {value!r} will not do; write {_describe(kind)}")
    return None


BROKEN = "holds half a surrogate pair, which is no character; write the character, or remove it"


def is_broken(text: str) -> bool:
    """Whether a text has no UTF-8: JSON and YAML can spell half a surrogate pair."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _describe(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is list:
        return "a list of one or more " + (
            "whole numbers, such as [0]" if typing.get_args(kind) == (int,) else "entries"
        )
    if origin is dict:
        return "a mapping, {name: value}"
    return {str: "a text", int: "a whole number", bool: "true or false"}.get(kind, "a number")


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
