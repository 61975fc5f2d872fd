"""Prompts with answers of others: from what KTO estimates how far the model has moved.

`losses.KTO` and the reference's cache ask for the same rows. The idea: within a row each prompt
gets the answer of the document before it, the first that of the last. Rows that are not packed
have the row before theirs in their padding, on neither side. The row keeps its length, and
what it becomes depends on nothing but itself: not on the microbatch, nor on the number of
processes, where other trainers take the neighbour in the microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.ops.batch import IGNORE, Answers, Batch
from llmfoundry.ops.packed_layout import Layout


def mismatched(batch: Batch) -> tuple[Batch, Tensor]:
    """The batch with answers changed round, and (B, D) bool: which documents have another's.

    A row with one answer alone has none to give it; a document on neither side counts for none.
    """
    layout, answers = batch.layout, batch.answers
    assert layout is not None and answers is not None
    places, lengths, begins = zip(
        *(_change_row(*row) for row in zip(layout.lengths, answers.begins, strict=True)),
        strict=True,
    )
    changed = torch.zeros(answers.side.shape, dtype=torch.bool)
    for row, (of_row, begin) in enumerate(zip(layout.lengths, answers.begins, strict=True)):
        answered = _answered(of_row, begin)
        if len(answered) > 1:
            changed[row, answered] = True
    device = batch.tokens.device
    order = torch.tensor(places).to(device, non_blocking=True)
    own = torch.full_like(batch.labels, IGNORE)  # each token's label at the token itself
    own[:, 1:] = batch.labels[:, :-1]
    labels = torch.full_like(own, IGNORE)
    labels[:, :-1] = own.gather(1, order)[:, 1:]
    moved = Layout.from_lengths(lengths, layout.padding).to(device, non_blocking=True)
    sides = Answers(answers.side, begins)
    tokens = batch.tokens.gather(1, order)
    is_compared = changed.to(device, non_blocking=True) & (answers.side != 0)
    return Batch(tokens, labels, moved, answers=sides), is_compared


def _answered(lengths: tuple[int, ...], begins: tuple[int, ...]) -> list[int]:
    """The documents that have an answer."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [n for n, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end]


def _change_row(
    lengths: tuple[int, ...], begins: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """The place that each token of a row comes from; lengths and begins of its new documents."""
    answered = _answered(lengths, begins)
    giver = dict(zip(answered, [*answered[-1:], *answered[:-1]], strict=True))
    places: list[int] = []
    sizes, starts, begin = [], [], 0
    spans = {n: range(begins[n], sum(lengths[: n + 1])) for n in answered}
    for n, length in enumerate(lengths):
        answer = spans[giver[n]] if n in giver else range(0)
        prompt = range(begin, spans[n].start if n in giver else begin + length)
        starts.append(len(places) + len(prompt))
        sizes.append(len(prompt) + len(answer))
        places += [*prompt, *answer]
        begin += length
    return places, tuple(sizes), tuple(starts)
