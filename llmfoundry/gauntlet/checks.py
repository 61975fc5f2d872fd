"""Whether a text is what was asked for: each requirement is a function of the text alone.

`meets_checks` is called with the `checks` of a row, mappings such as {"check": "words", "n": 3}: of
generated instructions, or of a file for the gauntlet. All must hold. `check_problems` says what is
wrong with such mappings before any model is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.recipe.values.checks import nearest

_BULLET = re.compile(r"^\s*[-*•] ", re.MULTILINE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SENTENCE = re.compile(r"[^.!?]*[^\W_][^.!?]*[.!?]+")


def meets_checks(text: str, checks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text meets every requirement; an empty one meets none."""
    text = text.strip()
    return bool(text) and all(holds(text, check) for check in checks)


def holds(text: str, check: Mapping[str, Any]) -> bool:
    """Whether a text meets one requirement."""
    arguments = {key: value for key, value in check.items() if key != "check"}
    return CHECKS[check["check"]][0](text, **arguments)


def check_problems(checks: Any) -> Iterator[str]:
    """A line for each mistake in a row's requirements as they are written."""
    if not isinstance(checks, list) or not checks:
        yield f"field 'checks' is {checks!r:.60}; write a list of one or more mappings"
        return
    for check in checks:
        name = check.get("check") if isinstance(check, Mapping) else None
        if not isinstance(name, str) or name not in CHECKS:
            hint = nearest(str(name), CHECKS)
            yield f"field 'checks': {name!r:.60} is not a check{hint} ({', '.join(CHECKS)})"
            continue
        wanted = CHECKS[name][1]
        for key in sorted(check.keys() - {"check"} - wanted.keys()):
            yield f"field 'checks': {name}: unknown key '{key}'; its keys: {', '.join(wanted)}"
        for key, kind in wanted.items():
            value = check.get(key)
            if not _KINDS[kind][1](value):
                yield f"field 'checks': {name}: {key} is {value!r:.60}; write {_KINDS[kind][0]}"


def _words(text: str, n: int) -> bool:
    return len(text.split()) == n


def _at_least_words(text: str, n: int) -> bool:
    return len(text.split()) >= n


def _at_most_words(text: str, n: int) -> bool:
    return len(text.split()) <= n


def _lines(text: str, n: int) -> bool:
    return sum(bool(line.strip()) for line in text.splitlines()) == n


def _sentences(text: str, n: int) -> bool:
    return len(_SENTENCE.findall(text)) == n


def _bullets(text: str, n: int) -> bool:
    return len(_BULLET.findall(text)) == n


def _upper(text: str) -> bool:
    return text.isupper()


def _lower(text: str) -> bool:
    return text.islower()


def _finds(text: str, word: str) -> bool:
    """Whether a word stands in a text, in any case, and not inside of a longer one."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _number(text: str, value: float) -> bool:
    """GSM8K's rule: what follows the last ####, or else the last number, without commas."""
    after = text.rpartition("####")[2]
    found = _NUMBER.findall(after)
    if not found:
        return False
    first_or_last = found[0] if "####" in text else found[-1]
    return float(first_or_last.replace(",", "")) == float(value)


def _json(text: str, value: Mapping[str, Any]) -> bool:
    """The whole text is JSON of this value; the order of keys does not matter."""
    return _loaded(text) == dict(value)


def _json_keys(text: str, keys: Sequence[str]) -> bool:
    found = _loaded(text)
    return isinstance(found, dict) and sorted(found) == sorted(keys)


def _call(text: str, value: Mapping[str, Any]) -> bool:
    """The first JSON object of the text, whatever a template writes around it, is this call."""
    start = text.find("{")
    if start < 0:
        return False
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return False
    found = found.get("function", found)
    if not isinstance(found, dict):
        return False
    arguments = found.get("arguments", found.get("parameters"))
    arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
    return found.get("name") == value["name"] and arguments == value["arguments"]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


CHECKS: dict[str, tuple[Callable[..., bool], dict[str, str]]] = {
    "exact": (lambda found, text: found == text.strip(), {"text": "text"}),
    "starts": (lambda found, text: found.startswith(text), {"text": "text"}),
    "ends": (lambda found, text: found.endswith(text), {"text": "text"}),
    "has": (lambda found, text: _finds(found, text), {"text": "text"}),
    "lacks": (lambda found, text: not _finds(found, text), {"text": "text"}),
    "words": (_words, {"n": "count"}),
    "at_least_words": (_at_least_words, {"n": "count"}),
    "at_most_words": (_at_most_words, {"n": "count"}),
    "lines": (_lines, {"n": "count"}),
    "sentences": (_sentences, {"n": "count"}),
    "bullets": (_bullets, {"n": "count"}),
    "upper": (_upper, {}),
    "lower": (_lower, {}),
    "final_number": (_number, {"value": "number"}),
    "json": (_json, {"value": "mapping"}),
    "json_keys": (_json_keys, {"keys": "list"}),
    "call": (_call, {"value": "mapping"}),
}
"""Each requirement: what checks whether it is met, and its arguments with their kinds."""

_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "count": ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    "number": ("a number", lambda value: type(value) in (int, float)),
    "mapping": ("a mapping", lambda value: isinstance(value, Mapping)),
    "list": ("a list of texts", lambda v: isinstance(v, list) and all(type(x) is str for x in v)),
}
"""Each kind of argument: in words, and as a check."""
