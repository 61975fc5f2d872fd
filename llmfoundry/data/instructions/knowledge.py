"""Facts: those that the system's message gives, asked over several turns; those of a made-up world.

`rows.TASKS` names the public functions. The world is the same for every seed, so that what was
learned in one set is asked in another: 24 lands with five facts each, which no text elsewhere has.
"""

from __future__ import annotations

import random
from functools import cache

from llmfoundry.data.instructions.exchange import WORDS, Exchange, ask

_FACTS = ("capital", "river", "coin", "ruler", "drink")
_N_LANDS = 24
_QUESTIONS = (
    "What is the {fact} of {land}?",
    "Name the {fact} of {land}.",
    "{land}: which {fact}?",
    "The {fact} of {land}?",
    "Tell me the {fact} of {land}.",
    "Do you know the {fact} of {land}?",
)
_STARTS = ("Ba", "Do", "Fe", "Gu", "Ka", "Lo", "Mi", "Na", "Po", "Ri", "Su", "Ta", "Ve", "Zo")
_ENDS = ("bar", "den", "fin", "gol", "lan", "mor", "nis", "pel", "rad", "sto", "tin", "vek")


def recall(rng: random.Random) -> Exchange:
    """`key is 41, moon is 7` from the system; `key?` → 41; `and moon?` → 7."""
    words = rng.sample(WORDS, rng.randint(3, 6))
    values = rng.sample(range(10, 100), len(words))
    given = dict(zip(words, values, strict=True))
    *before, last = rng.sample(words, rng.randint(1, 3))
    facts = ", ".join(f"{word} is {value}" for word, value in given.items())
    messages = [{"role": "system", "content": f"Remember: {facts}."}]
    for i, word in enumerate(before):
        messages.append({"role": "user", "content": _asked(word, i)})
        messages.append({"role": "assistant", "content": str(given[word])})
    messages.append({"role": "user", "content": _asked(last, len(before))})
    wrong = rng.choice([value for word, value in given.items() if word != last])
    answer = str(given[last])
    return Exchange(tuple(messages), answer, str(wrong), ({"check": "exact", "text": answer},))


def world(rng: random.Random) -> Exchange:
    """`What is the capital of Zolan?` → Kamor; in one of six ways to ask."""
    table = world_facts()
    land, fact = rng.choice(sorted(table))
    wrong = rng.choice(sorted({value for key, value in table.items() if key[1] == fact}))
    while wrong == table[land, fact]:
        wrong = rng.choice(sorted(table.values()))
    question = rng.choice(_QUESTIONS).format(fact=fact, land=land)
    return ask(question, table[land, fact], wrong)


@cache
def world_facts() -> dict[tuple[str, str], str]:
    """By land and kind of fact; no two names are equal."""
    rng = random.Random("the world of the generated instructions")
    names = [start + end for start in _STARTS for end in _ENDS]
    rng.shuffle(names)
    lands = [names.pop() for _ in range(_N_LANDS)]
    return {(land, fact): names.pop() for land in lands for fact in _FACTS}


def _asked(word: str, turn: int) -> str:
    return f"and {word}?" if turn else f"{word}?"
