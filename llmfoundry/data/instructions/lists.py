"""Operations on lists: reverse, sort, the largest, how many, which is the n-th.

`rows.TASKS` names the public functions. Each takes a random state and the numbers of items that a
list may have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from llmfoundry.data.instructions.exchange import (
    LETTERS,
    WORDS,
    Exchange,
    another,
    ask,
    shuffled,
)

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def reverse(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Reverse: d a c` → c a d."""
    items = rng.sample(LETTERS, rng.choice(lengths))
    answer = items[::-1]
    return ask(f"Reverse: {' '.join(items)}", *_right_and_wrong(rng, answer))


def sort(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Sort: d a c` → a c d."""
    items = rng.sample(LETTERS, rng.choice(lengths))
    return ask(f"Sort: {' '.join(items)}", *_right_and_wrong(rng, sorted(items)))


def largest(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`Largest number: 52 7 31` → 52."""
    numbers = rng.sample(range(100), rng.choice(lengths))
    top = max(numbers)
    wrong = rng.choice([n for n in numbers if n != top])
    return ask(f"Largest number: {' '.join(map(str, numbers))}", str(top), str(wrong))


def word_count(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`How many words: key moon key` → 3."""
    words = rng.choices(WORDS, k=rng.choice(lengths))
    n = len(words)
    return ask(f"How many words: {' '.join(words)}", str(n), str(another(rng, n, 2, 9)))


def nth(rng: random.Random, lengths: Sequence[int]) -> Exchange:
    """`The second word: key moon door` → moon."""
    words = rng.sample(WORDS, rng.choice(lengths))
    place = rng.randrange(len(words))
    wrong = rng.choice([word for word in words if word != words[place]])
    return ask(f"The {_ORDINALS[place]} word: {' '.join(words)}", words[place], wrong)


def _right_and_wrong(rng: random.Random, items: Sequence[str]) -> tuple[str, str]:
    return " ".join(items), " ".join(shuffled(rng, items))
