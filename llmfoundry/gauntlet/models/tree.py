"""Inputs that begin alike, computed once: a prefix tree over all requests, cut into rows.

`score.score_requests` calls `grow` and `write_row`. The one idea: sorted, inputs that share a
beginning are adjacent, and all that a tree needs to know is how much each shares with the one
before it. A row is a range of the sorted inputs. The first of them is written whole, so that where
a row ends the path to the next is computed again, and nothing else ever is.

A worked-example prefix, under it the questions, under these the choices: they are found, not given.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmfoundry.gauntlet.questions import ScoreRequest

ROW_TOKENS = 4096
"""Tokens of a full row, or seq_len where that is more. A row begins with what all its inputs share:
at 2048 that costs 3 % more tokens than at 4096 (9 tasks, fixed worked examples), at 8192 1 % less.
"""
SMALLEST = 64  # tokens of the shortest row


@dataclass(frozen=True)
class TreeRow:
    """Inputs start..stop of a forest in one row.

    Attributes:
        start: first input.
        stop: the one after the last.
        used: tokens of the tree.
        width: tokens of the row, one of `widths`.
        work: pairs of a token and a token of its path: what attention looks at.
        targets: tokens that its requests score.
    """

    start: int
    stop: int
    used: int
    width: int
    work: int
    targets: int


@dataclass(frozen=True)
class Forest:
    """All requests as rows of trees, whatever the batch and the number of ranks.

    Attributes:
        inputs: distinct inputs, sorted.
        shared: of each, how many first tokens it has in common with the one before.
        members: of each, the requests that read it.
        rows: all inputs, in order.
        n_requests: how many there were.
        tokens_unshared: of all requests, each on its own.
    """

    inputs: list[tuple[int, ...]]
    shared: NDArray[np.int64]
    members: list[list[int]]
    rows: list[TreeRow]
    n_requests: int
    tokens_unshared: int

    @property
    def tokens_computed(self) -> int:
        """Tokens that go through the model, padding of rows with them."""
        return sum(row.width for row in self.rows)


def grow(requests: Sequence[ScoreRequest], *, seq_len: int) -> Forest:
    """The forest of these requests, whose inputs have at most seq_len tokens."""
    members: dict[bytes, list[int]] = {}
    for i, request in enumerate(requests):
        assert 1 <= len(request.targets) <= len(request.tokens) <= seq_len, "cut before"
        members.setdefault(_sortable(request.tokens), []).append(i)
    keys = sorted(members)
    shared = [0, *(_common(a, b) for a, b in itertools.pairwise(keys))][: len(keys)]
    inputs = [requests[members[key][0]].tokens for key in keys]
    readers = [members[key] for key in keys]
    lengths = np.array([len(tokens) for tokens in inputs], dtype=np.int64)
    scored = [sum(len(requests[i].targets) for i in each) for each in readers]
    common = np.array(shared, dtype=np.int64)
    rows = split_into_rows(lengths, common, np.array(scored, dtype=np.int64), widths(seq_len))
    unshared = sum(len(request.tokens) for request in requests)
    return Forest(inputs, common, readers, rows, len(requests), unshared)


def widths(seq_len: int) -> list[int]:
    """Lengths that a row may have, ascending: eighths of the longest, then halves of an eighth."""
    longest = max(seq_len, ROW_TOKENS)
    eighths = [-(-longest * k // 8) for k in range(1, 9)]
    halves = [eighths[0] >> k for k in range(1, 32) if eighths[0] >> k >= SMALLEST]
    return [*reversed(halves), *eighths]


def split_into_rows(
    lengths: NDArray[np.int64],
    shared: NDArray[np.int64],
    targets: NDArray[np.int64],
    row_widths: list[int],
) -> list[TreeRow]:
    """Rows of sorted inputs, each cut where it costs least.

    What a row costs is its width and, at the start of the next, the path that is computed again;
    of all ends that fit, the one with the lowest cost for each token of the tree is taken.

    Args:
        lengths: (N,) tokens of each input.
        shared: (N,) as in `Forest`.
        targets: (N,) tokens scored after each input.
        row_widths: ascending.
    """
    bounds = np.array(row_widths)
    new = lengths - shared  # tokens that an input adds to the one before
    tokens = np.cumsum(new)
    depths = np.cumsum(_triangle(lengths) - _triangle(shared))
    again = np.append(shared[1:], 0)  # tokens to be computed again if a row ends after an input
    rows, start = [], 0
    while start < len(lengths):
        base = tokens[start] - lengths[start]
        stop = int(np.searchsorted(tokens, base + bounds[-1], side="right"))
        used = tokens[start:stop] - base
        wide = bounds[np.searchsorted(bounds, used)]
        cost = (wide + again[start:stop]) / used
        last = start + int(len(cost) - 1 - np.argmin(cost[::-1]))  # of equal ones the longest row
        work = depths[last] - depths[start] + _triangle(lengths[start])
        at = last - start
        scored = int(targets[start : last + 1].sum())
        rows.append(TreeRow(start, last + 1, int(used[at]), int(wide[at]), int(work), scored))
        start = last + 1
    return rows


@dataclass(frozen=True)
class WrittenRow:
    """A row's tree token by token.

    Attributes:
        tokens: the row's, without padding.
        ends: of each token, where what is below it ends.
        places: of each request in turn, the places of its tokens that predict its targets.
        requests: those requests.
    """

    tokens: list[int]
    ends: list[int]
    places: list[list[int]]
    requests: list[int]


def write_row(forest: Forest, row: TreeRow, requests: Sequence[ScoreRequest]) -> WrittenRow:
    """The tokens of a row in preorder, and where its requests' targets are predicted."""
    written = WrittenRow([], [], [], [])
    tokens, ends = written.tokens, written.ends
    path: list[int] = []  # places from the root to the last token
    for i in range(row.start, row.stop):
        kept = int(forest.shared[i]) if i > row.start else 0
        for place in path[kept:]:
            ends[place] = len(tokens)
        del path[kept:]
        added = forest.inputs[i][kept:]
        path.extend(range(len(tokens), len(tokens) + len(added)))
        tokens.extend(added)
        ends.extend([0] * len(added))
        for request in forest.members[i]:
            written.places.append(path[len(path) - len(requests[request].targets) :])
            written.requests.append(request)
    for place in path:
        ends[place] = len(tokens)
    assert len(tokens) == row.used, "a row has the tokens that it was cut for"
    return written


def _sortable(tokens: tuple[int, ...]) -> bytes:
    """Bytes in the same order as the tokens; they compare far faster than tuples."""
    return np.array(array("I", tokens), dtype=">u4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """How many first tokens two inputs share."""
    n = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, ">u4", n) != np.frombuffer(b, ">u4", n)
    return int(differ.argmax()) if differ.any() else n


def _triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of tokens, each with itself and those before it, in a text of n tokens."""
    return n * (n + 1) // 2
