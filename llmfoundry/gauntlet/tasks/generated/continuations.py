"""The `heldout://continuations` task: which of four pieces of text comes next?

`Gauntlet` calls `heldout_rows`. The rows are cut from the run's own held-out documents, so that
every corpus has a task that measures what was trained; they depend on the documents' content alone,
not on their order. The wrong pieces are equally long pieces of other held-out documents.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlsplit

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.recipe.values.checks import nearest

CHOICES = 4
_WITHIN_LINE = re.compile(r"(?<=\S)(?= ?\S)")  # at line borders, bigrams alone are near chance


@dataclass(frozen=True)
class _Shape:
    """Settings in the query of the address: heldout://continuations?rows=50&piece_chars=80."""

    rows: int = 100
    """Questions at most; there are fewer where held-out text is short."""
    context_chars: int = 200
    """Text before the piece, at most: it begins at a line border and ends within a line."""
    piece_chars: int = 32
    """Length of every choice. Short: where the true piece joins on, small models see most."""


@dataclass(frozen=True)
class _Cut:
    """A place in a document: what comes before it, and the piece after it."""

    document: int
    context: str
    piece: str


def heldout_rows(task: TaskConfig, texts: list[str]) -> list[TaskRow]:
    """Multiple-choice rows cut from held-out documents.

    Raises:
        UserError: a wrong address; text too short for a single row.
    """
    shape = _shape(task)
    documents = sorted(set(texts), key=_digest)
    enough = max(shape.rows, CHOICES)
    cuts = list(itertools.islice(_documents_with_cuts(documents, shape), enough))
    pieces = [cut for of_document in cuts for cut in of_document]
    rows: list[TaskRow] = []
    for cut in _round_robin(cuts):
        if len(rows) == shape.rows:
            break
        wrong = _wrong_pieces(cut, pieces)
        if wrong is not None:
            rows.append(_row(cut, wrong, len(rows), task))
    if not rows:
        need = shape.context_chars + shape.piece_chars
        raise UserError(
            f"icl_tasks: {task.label}: dataset_uri: {task.dataset_uri}: the held-out text"
            f" ({len(documents)} documents) gives no question; it takes a few documents of more"
            f" than {need} characters. Raise data.validation_fraction or remove the task"
        )
    return rows


def _shape(task: TaskConfig) -> _Shape:
    """The settings in the task's address."""
    key = f"icl_tasks: {task.label}: dataset_uri: {task.dataset_uri}"
    address = urlsplit(task.dataset_uri)
    if address.netloc != "continuations" or address.path:
        raise UserError(f"{key}: is unknown; write heldout://continuations")
    if task.icl_task_type != "multiple_choice":
        raise UserError(f"{key}: gives choices; write icl_task_type: multiple_choice")
    names = [f.name for f in fields(_Shape)]
    values: dict[str, int] = {}
    for name, value in parse_qsl(address.query, keep_blank_values=True):
        if name not in names:
            hint = nearest(name, names)
            raise UserError(f"{key}: unknown setting '{name}'{hint} (known: {', '.join(names)})")
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{key}: {name} is {value!r}; write a whole number above 0")
        values[name] = int(value)
    return _Shape(**values)


def _documents_with_cuts(documents: list[str], shape: _Shape) -> Iterator[list[_Cut]]:
    """The cuts of each document that is long enough for one."""
    for i, text in enumerate(documents):
        if cuts := _shuffled_cuts(i, text, shape):
            yield cuts


def _shuffled_cuts(document: int, text: str, shape: _Shape) -> list[_Cut]:
    """Places of a document whose contexts and pieces do not overlap, in an order of its own."""
    cuts, at = [], shape.context_chars
    while (match := _WITHIN_LINE.search(text, at)) is not None:
        cut = match.start()
        piece = text[cut : cut + shape.piece_chars]
        if len(piece) < shape.piece_chars:
            break
        context = text[cut - shape.context_chars : cut]
        border = context.find("\n") + 1  # the rest of a line that began before is left out
        cuts.append(_Cut(document, context[border:], piece))
        at = cut + shape.piece_chars + shape.context_chars
    random.Random(_digest(text)).shuffle(cuts)
    return cuts


def _round_robin(cuts: list[list[_Cut]]) -> Iterator[_Cut]:
    """The first cut of every document, then every second one, and so on."""
    for turn in range(max(map(len, cuts), default=0)):
        for of_document in cuts:
            if turn < len(of_document):
                yield of_document[turn]


def _wrong_pieces(cut: _Cut, pieces: list[_Cut]) -> list[str] | None:
    """Three pieces of other documents, all different from each other and from the true one."""
    rng = random.Random(_digest(cut.context + cut.piece))
    wrong: dict[str, None] = {}
    for other in rng.sample(pieces, len(pieces)):
        if other.document != cut.document and other.piece != cut.piece:
            wrong[other.piece] = None
        if len(wrong) == CHOICES - 1:
            return list(wrong)
    return None


def _row(cut: _Cut, wrong: list[str], number: int, task: TaskConfig) -> TaskRow:
    gold = number % CHOICES  # no index is more often right than another
    choices = (*wrong[:gold], cut.piece, *wrong[gold:])
    return TaskRow((cut.context,), choices, gold, f"{task.dataset_uri}:{number + 1}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
