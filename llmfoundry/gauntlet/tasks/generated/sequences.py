"""Sequences: copying, reversing, sorting, following orders to repeat, longest common subsequence.

`sets.GENERATORS` names the public functions.
"""

from __future__ import annotations

import random

from llmfoundry.gauntlet.tasks.generated.items import CHOICES, NAMES, Item, in_order, quoted

_LETTERS = "abcdefgh"


def copying(rng: random.Random, level: int) -> Item:
    """A list of level + 2 words, twice, and once more but for its last word.

    The answer ends with a letter: many tokenizers make one token of a bracket and the line end
    after it, so that a bracket alone would never be what a model expects.
    """
    name, *words = rng.sample(NAMES, level + 3)
    line = f"{name} = {quoted(words)}"
    start = line.removesuffix(f'{words[-1]}"]')
    return Item(f"{line}\n{line}\n{start}", words[-1])


def reversing(rng: random.Random, level: int) -> Item:
    """`["key", "node"][::-1] ==`: level + 1 words."""
    words = rng.sample(NAMES, level + 1)
    return Item(f"{quoted(words)}[::-1] ==", quoted(words[::-1]))


def sorting(rng: random.Random, level: int) -> Item:
    """`sorted([52, 7]) ==`: level + 1 numbers below 100."""
    numbers = rng.sample(range(100), level + 1)
    return Item(f"sorted({numbers}) ==", str(sorted(numbers)))


def repeat_copy(rng: random.Random, level: int) -> Item:
    """`say key 3 times` → key key key; the words are separated by spaces.

    Level 1 has one order; level 2 may reverse it; from level 3 on there are two or three, joined by
    `then`; from level 4 on a word may come after each turn; level 5 may ask for all of it twice.
    """
    texts, said = [], []
    for _ in range((1, 1, 2, 2, 3)[level - 1]):
        text, words = _order(rng, level)
        texts.append(text)
        said += words
    question = ", then ".join(texts)
    if level == 5 and rng.random() < 0.5:
        question, said = f"{question}; all of that twice", said * 2
    return Item(question, " ".join(said))


def lcs_length(rng: random.Random, level: int) -> Item:
    """Length of the longest common subsequence of two texts of 2 * level + 3 letters.

    The four choices are level to level + 3, each right equally often.
    """
    length = 2 * level + 3
    place = rng.randrange(CHOICES)
    a = b = ""
    while _lcs(a, b) != level + place:
        common = rng.choices(_LETTERS, k=level + place)
        a, b = (_spread(rng, common, length) for _ in range(2))
    choices = tuple(str(level + i) for i in range(CHOICES))
    return in_order(f"{' '.join(a)}\n{' '.join(b)}", choices, place)


def _order(rng: random.Random, level: int) -> tuple[str, list[str]]:
    """One order, and the words that it asks for."""
    words = rng.sample(NAMES, rng.randint(1, min(level + 1, 3)))
    text, turn = f"say {' '.join(words)}", words
    if level > 1 and len(words) > 1 and rng.random() < 0.5:
        text, turn = f"{text} backwards", words[::-1]
    times = rng.randint(2, 4)
    text = f"{text} {times} times"
    if level > 3 and rng.random() < 0.5:
        after = rng.choice([name for name in NAMES if name not in words])
        text, turn = f"{text} with {after} after each", [*turn, after]
    return text, turn * times


def _spread(rng: random.Random, common: list[str], length: int) -> str:
    """`length` letters, among which are those of `common`, in order."""
    places = set(rng.sample(range(length), len(common)))
    rest = iter(common)
    return "".join(next(rest) if i in places else rng.choice(_LETTERS) for i in range(length))


def _lcs(a: str, b: str) -> int:
    """Length of the longest common subsequence, by dynamic programming over one row."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
