"""Answers of a given form: JSON with given keys, so many words, upper case, several at once.

`rows.TASKS` names the public functions. The first three have one right answer each; what
`constraints` asks for, as IFEval does (Zhou et al., 2023), many texts fulfil, and its answer is one
of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from llmfoundry.data.instructions.exchange import WORDS, Exchange, another, ask


def json_object(rng: random.Random) -> Exchange:
    """`JSON: key 4, moon 17` → {"key": 4, "moon": 17}."""
    keys = rng.sample(WORDS, rng.randint(1, 4))
    values = rng.sample(range(100), len(keys))
    content = dict(zip(keys, values, strict=True))
    listed = ", ".join(f"{key} {value}" for key, value in content.items())
    wrong = json.dumps(content | {keys[-1]: another(rng, values[-1], 0, 99)})
    if rng.random() < 0.5:
        wrong = listed
    return ask(f"JSON: {listed}", json.dumps(content), wrong, {"check": "json", "value": content})


def upper(rng: random.Random) -> Exchange:
    """`Upper case: key moon` → KEY MOON."""
    text = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    wrong = text if rng.random() < 0.5 else text.capitalize()
    return ask(f"Upper case: {text}", text.upper(), wrong)


def repeat(rng: random.Random) -> Exchange:
    """`Say key moon 3 times` → key moon key moon key moon."""
    words, n = rng.sample(WORDS, rng.randint(1, 2)), rng.randint(2, 5)
    text = " ".join(words)
    wrong = " ".join([text] * another(rng, n, 1, 6))
    return ask(f"Say {text} {n} times", " ".join([text] * n), wrong)


def constraints(rng: random.Random) -> Exchange:
    """`Write 3 words in upper case with the word key and without the word moon.`."""
    n = rng.randint(2, 6)
    wanted, banned, *others = rng.sample(WORDS, len(WORDS))
    checks: list[Mapping[str, Any]] = [
        {"check": "words", "n": n},
        {"check": "has", "text": wanted},
    ]
    words = [wanted, *others[: n - 1]]
    required = f"with the word {wanted}"
    if rng.random() < 0.5:
        checks.append({"check": "lacks", "text": banned})
        required += f" and without the word {banned}"
    casing = rng.choice(("", " in upper case", " in lower case"))
    form = rng.choice((" in one line", " in lines", " as a list"))
    join, start = _FORMS[form]
    checks.append({"check": "lines", "n": 1 if form == " in one line" else n})
    if casing:
        checks.append({"check": casing.split()[1]})
    if form == " as a list":
        checks[0] = {"check": "bullets", "n": n}
    text = start + join.join(words)
    text = text.upper() if casing == " in upper case" else text
    question = f"Write {n} words{casing}{form} {required}."
    return ask(question, text, _broken(rng, text, join), *checks)


_FORMS = {" in one line": (" ", ""), " in lines": ("\n", ""), " as a list": ("\n- ", "- ")}
"""What stands between the words, and before the first."""


def _broken(rng: random.Random, text: str, join: str) -> str:
    """The same with a word too many, or without its first."""
    if rng.random() < 0.5:
        return text + join + rng.choice(WORDS)
    return text.split(join, 1)[-1].removeprefix("- ")
