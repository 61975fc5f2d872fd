"""A call of a tool: which of some functions, with which arguments.

`rows.TASKS` names `tool_call`. Schemas are those of OpenAI and transformers; arguments are a
mapping, not a text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from llmfoundry.data.instructions.exchange import WORDS, Exchange, another

_PLACES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Accra")

_FUNCTIONS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "weather": ({"place": "string"}, ("What is the weather in {place}?",)),
    "clock": ({"place": "string"}, ("What time is it in {place}?",)),
    "find": ({"word": "string"}, ("Find the {word}.", "Where is the {word}?")),
    "buy": ({"word": "string", "n": "integer"}, ("Buy {n} of {word}.",)),
    "alarm": ({"hour": "integer"}, ("Wake me at {hour}.", "Set an alarm for {hour}.")),
}
"""Each function's parameters with their types, and ways to ask for it."""


def tool_call(rng: random.Random) -> Exchange:
    """Two or three functions and a question that one of them serves."""
    names = rng.sample(sorted(_FUNCTIONS), rng.randint(2, 3))
    name = rng.choice(names)
    arguments = {key: _value(rng, key) for key in _FUNCTIONS[name][0]}
    question = rng.choice(_FUNCTIONS[name][1]).format(**arguments)
    call = {"name": name, "arguments": arguments}
    other = rng.choice([n for n in names if n != name])
    wrong: dict[str, Any] = {"name": other, "arguments": {}}
    wrong["arguments"] = {key: _value(rng, key) for key in _FUNCTIONS[other][0]}
    if rng.random() < 0.5:
        wrong = {"name": name, "arguments": {key: _not(rng, v) for key, v in arguments.items()}}
    return Exchange(
        ({"role": "user", "content": question},),
        "",
        "",
        ({"check": "call", "value": call},),
        call=call,
        wrong_call=wrong,
        tools=tuple(schema(n) for n in names),
    )


def schema(name: str) -> Mapping[str, Any]:
    """A function as models are shown it."""
    parameters, _ = _FUNCTIONS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    described = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": described}}


def _value(rng: random.Random, key: str) -> Any:
    if key == "place":
        return rng.choice(_PLACES)
    if key == "word":
        return rng.choice(WORDS)
    return rng.randint(1, 12)


def _not(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int):
        return another(rng, value, 1, 12)
    pool = _PLACES if value in _PLACES else WORDS
    return rng.choice([other for other in pool if other != value])
