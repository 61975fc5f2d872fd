"""Sides of documents, on their way from rows to microbatches."""

from __future__ import annotations

import numpy as np
import torch

from llmfoundry.data.batch import SequenceBatch, TrainingSequence
from llmfoundry.ops.packed_layout import IGNORE

T = 10


def row(
    documents: list[tuple[list[int], list[int], int]], known: list[list[float]] | None
) -> TrainingSequence:
    """Prompt, answer and side of each document."""
    ids = [i for prompt, answer, _ in documents for i in prompt + answer]
    weights = [w for prompt, answer, _ in documents for w in [0] * len(prompt) + [1] * len(answer)]
    return TrainingSequence(
        np.array(ids),
        [len(prompt) + len(answer) for prompt, answer, _ in documents],
        weights=np.array(weights, np.float32),
        sides=[side for *_, side in documents],
        references=None if known is None else np.array(known, np.float32),
    )


ROWS = [
    row([([1, 2], [3], 1), ([1, 2], [4, 5], -1)], [[-1, -2]]),
    row([([6], [7, 8], 1), ([6], [9], -1), ([1], [2], 1), ([1], [3, 4], -1)], [[-3, -4, -5, -6]]),
    TrainingSequence(np.array([5, 6, 7]), [3], weights=np.zeros(3, np.float32)),
]


def test_a_batch_has_the_sides_and_the_begins_of_its_answers() -> None:
    batch = SequenceBatch.fill(ROWS, T, 0).batch(with_layout=True)
    answers = batch.answers
    assert answers is not None and batch.layout is not None
    assert answers.side.tolist() == [[1, -1, 0, 0], [1, -1, 1, -1], [0, 0, 0, 0]]
    assert batch.layout.lengths == ((3, 4, 3), (3, 2, 2, 3), (3, 7))
    # places of the first token of each answer; one past the document where it has none
    assert answers.begins == ((2, 5, 10), (1, 4, 6, 8), (3, 10))
    assert answers.reference is not None
    assert answers.reference.tolist() == [[-1, -2, 0, 0], [-3, -4, -5, -6], [0, 0, 0, 0]]
    assert answers.mismatched is None
    learned = [batch.labels[n][batch.labels[n] != IGNORE].tolist() for n in range(3)]
    assert learned == [[3, 4, 5], [7, 8, 9, 2, 3, 4], []]


def test_microbatches_have_their_rows_answers() -> None:
    known = [r._replace(references=None) for r in ROWS]
    known[1] = known[1]._replace(references=np.arange(8, dtype=np.float32).reshape(2, 4))
    parts = list(SequenceBatch.fill(known, T, 0).batch(with_layout=True).split(2))
    first, second = (part.answers for part in parts)
    assert first is not None and second is not None
    assert first.begins + second.begins == ((2, 5, 10), (1, 4, 6, 8), (3, 10))
    assert first.reference is not None and first.mismatched is not None
    assert first.reference.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert first.mismatched.tolist() == [[0, 0, 0, 0], [4, 5, 6, 7]]
    assert second.side.tolist() == [[0, 0, 0, 0]]


def test_rows_without_sides_have_no_answers() -> None:
    batch = SequenceBatch.fill([ROWS[2]], T, 0).batch(with_layout=True)
    assert batch.answers is None and batch.to(torch.device("cpu")).answers is None
