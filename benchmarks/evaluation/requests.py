"""Requests of the gauntlet's shape, made by code: what `compare.py` lets every evaluator answer.

Tokens are random; the numbers of rows, worked examples, choices and tokens are those of nine tasks
of v0.3 (mean tokens of a byte-level BPE of 8k tokens on the real rows). Each row is asked twice:
with the task's fixed worked examples (`native`), and with some drawn for the row (LLM Foundry's
way), which share far less.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry.gauntlet.questions import Request

VOCAB = 8192
EOS = 0


@dataclass(frozen=True)
class TaskShape:
    """A task: mean numbers of tokens.

    Attributes:
        shots: worked examples.
        question: tokens of a question, in `schema` of a context.
        answer: tokens of a choice, in `schema` of what follows the contexts.
        choices: options of a row; 1: the answer is written freely.
        schema: the options are contexts, which differ in their last two tokens.
        letters: the choices are the same for all rows, one token each.
    """

    shots: int
    question: int
    answer: int
    choices: int
    schema: bool = False
    letters: bool = False


SHAPES = {
    "arc_easy": TaskShape(3, 45, 8, 4),
    "boolq": TaskShape(0, 224, 1, 2, letters=True),
    "winogrande": TaskShape(5, 23, 14, 2, schema=True),
    "winograd": TaskShape(3, 24, 8, 2, schema=True),
    "commonsense_qa": TaskShape(0, 65, 1, 4, letters=True),
    "piqa": TaskShape(0, 19, 39, 2),
    "lambada": TaskShape(0, 120, 2, 1),
    "copa": TaskShape(0, 15, 10, 2),
    "arithmetic": TaskShape(5, 6, 2, 1),
}


@dataclass(frozen=True)
class _Row:
    contexts: list[list[int]]
    choices: list[list[int]]


def requests(n_rows: int, *, fixed: bool, seed: int = 0) -> list[Request]:
    """All rows' requests.

    Args:
        n_rows: of all tasks together, equally many of each.
        fixed: the same worked examples for all rows of a task; else each row has its own.
        seed: of lengths and tokens, which do not depend on `fixed`.
    """
    found: list[Request] = []
    for name, shape in SHAPES.items():
        lengths, draws = random.Random(f"{seed} {name}"), random.Random(f"{seed} {name} shots")
        rows = [_row(shape, lengths) for _ in range(n_rows // len(SHAPES))]
        kept = draws.sample(range(len(rows)), shape.shots + 1)
        for i, row in enumerate(rows):
            pool = kept if fixed else draws.sample(range(len(rows)), shape.shots + 1)
            examples = [rows[j] for j in pool if j != i][: shape.shots]
            found += _asked(row, examples)
    return found


def _row(shape: TaskShape, rng: random.Random) -> _Row:
    question = _tokens(rng, shape.question)
    if shape.schema:
        contexts = [[*question, *_tokens(rng, 2)] for _ in range(shape.choices)]
        return _Row(contexts, [_tokens(rng, shape.answer)])
    if shape.letters:
        return _Row([question], [[1 + letter] for letter in range(shape.choices)])
    return _Row([question], [_tokens(rng, shape.answer) for _ in range(shape.choices)])


def _tokens(rng: random.Random, mean: int) -> list[int]:
    n = max(1, round(rng.gauss(mean, mean / 3)))
    return [rng.randrange(16, VOCAB) for _ in range(n)]


def _asked(row: _Row, examples: list[_Row]) -> Iterator[Request]:
    """A request for each option, after the worked examples with their first option."""
    before = [EOS, *(t for e in examples for t in (*e.contexts[0], *e.choices[0]))]
    for context in row.contexts:
        for choice in row.choices:
            yield Request((*before, *context, *choice[:-1]), tuple(choice), "")
