"""Prefix trees over all requests, split into rows, so that common prefixes are computed once.

Entry points: `grow` and `write_row`, which `own_decoder.py` calls. The one idea: after sorting,
inputs with a common prefix are adjacent, and a tree is determined by the number of tokens that each
input shares with the previous one. A row is a range of the sorted inputs. The first input of a row
is written completely, so its prefix is recomputed. No other token is computed twice.

The usual levels of a tree (few-shot examples, questions, choices) follow from the tokens alone.
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
"""Tokens of a full row, unless seq_len is larger. Every row begins with the common prefix of its
inputs: rows of 2048 need 3 % more tokens than rows of 4096 (9 tasks, fixed few-shot examples), and
rows of 8192 1 % less.
"""
SMALLEST = 64  # tokens of the shortest row


@dataclass(frozen=True)
class TreeRow:
    """Range of a forest's inputs in one row.

    Attributes:
        start: first input.
        stop: end of the range (exclusive).
        used: tokens of the tree.
        width: tokens of the row including padding, one of `widths`.
        work: number of (query, key) pairs that attention computes.
        targets: number of scored tokens.
    """

    start: int
    stop: int
    used: int
    width: int
    work: int
    targets: int


@dataclass(frozen=True)
class Forest:
    """Rows of prefix trees over all requests; independent of batch size and number of ranks.

    Attributes:
        inputs: distinct inputs, sorted.
        shared: number of first tokens that each input shares with the previous one.
        members: numbers of the requests with each input.
        rows: ranges that cover all inputs, in order.
        n_requests: number of requests.
        tokens_unshared: total tokens of all requests, without sharing.
    """

    inputs: list[tuple[int, ...]]
    shared: NDArray[np.int64]
    members: list[list[int]]
    rows: list[TreeRow]
    n_requests: int
    tokens_unshared: int

    @property
    def tokens_computed(self) -> int:
        """Return the number of tokens that the model computes, including padding."""
        return sum(row.width for row in self.rows)


def grow(requests: Sequence[ScoreRequest], *, seq_len: int) -> Forest:
    """Build the forest of requests, whose inputs have at most seq_len tokens."""
    # distinct inputs, sorted
    requests_of: dict[bytes, list[int]] = {}
    for i, request in enumerate(requests):
        assert 1 <= len(request.targets) <= len(request.tokens) <= seq_len, "callers cut requests"
        requests_of.setdefault(_sortable(request.tokens), []).append(i)
    keys = sorted(requests_of)
    inputs = [requests[requests_of[key][0]].tokens for key in keys]
    members = [requests_of[key] for key in keys]

    # number of tokens that each shares with the previous one
    shared = np.zeros(len(keys), dtype=np.int64)
    for n, (previous, key) in enumerate(itertools.pairwise(keys), 1):
        shared[n] = _common(previous, key)

    # rows
    lengths = np.array([len(tokens) for tokens in inputs], dtype=np.int64)
    targets = [sum(len(requests[i].targets) for i in group) for group in members]
    rows = split_into_rows(lengths, shared, np.array(targets, dtype=np.int64), widths(seq_len))
    unshared = sum(len(request.tokens) for request in requests)
    return Forest(inputs, shared, members, rows, len(requests), unshared)


def widths(seq_len: int) -> list[int]:
    """Return the possible widths of a row, ascending: eighths of the longest, halves of those."""
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
    """Split sorted inputs into rows of minimal cost (greedily, row by row).

    The cost of a row is its width plus the tokens of the next row that are recomputed. Among all
    possible ends of a row, the one with the lowest cost per token of the tree is chosen.

    Args:
        lengths: (N,) tokens of each input.
        shared: (N,) as in `Forest`.
        targets: (N,) tokens scored after each input.
        row_widths: possible widths, ascending.
    """
    bounds = np.array(row_widths)
    tokens = np.cumsum(lengths - shared)  # tokens of the trees up to each input
    pairs = np.cumsum(_triangle(lengths) - _triangle(shared))  # attention pairs up to each input
    recomputed = np.append(shared[1:], 0)  # tokens to recompute if a row ends after each input
    rows, start = [], 0
    while start < len(lengths):
        # cost of every end that fits
        base = tokens[start] - lengths[start]
        stop = int(np.searchsorted(tokens, base + bounds[-1], side="right"))
        used = tokens[start:stop] - base
        padded = bounds[np.searchsorted(bounds, used)]
        cost = (padded + recomputed[start:stop]) / used

        # the cheapest row; the longest one of equal cost
        last = start + int(len(cost) - 1 - np.argmin(cost[::-1]))
        work = pairs[last] - pairs[start] + _triangle(lengths[start])
        n = last - start
        n_targets = int(targets[start : last + 1].sum())
        rows.append(TreeRow(start, last + 1, int(used[n]), int(padded[n]), int(work), n_targets))
        start = last + 1
    return rows


@dataclass(frozen=True)
class WrittenRow:
    """Tokens of a row.

    Attributes:
        tokens: tokens in preorder, without padding.
        ends: end of the subtree of each token.
        places: for each request, the positions that predict its targets.
        requests: numbers of these requests.
    """

    tokens: list[int]
    ends: list[int]
    places: list[list[int]]
    requests: list[int]


def write_row(forest: Forest, row: TreeRow, requests: Sequence[ScoreRequest]) -> WrittenRow:
    """Write the tokens of a row in preorder, with the positions that predict its targets."""
    written = WrittenRow([], [], [], [])
    tokens, ends = written.tokens, written.ends
    path: list[int] = []  # positions from the root to the last token
    for i in range(row.start, row.stop):
        # close the subtrees that the next input does not share
        n_shared = int(forest.shared[i]) if i > row.start else 0
        for place in path[n_shared:]:
            ends[place] = len(tokens)
        del path[n_shared:]

        # append its other tokens
        added = forest.inputs[i][n_shared:]
        path.extend(range(len(tokens), len(tokens) + len(added)))
        tokens.extend(added)
        ends.extend([0] * len(added))
        for request in forest.members[i]:
            written.places.append(path[len(path) - len(requests[request].targets) :])
            written.requests.append(request)
    for place in path:
        ends[place] = len(tokens)
    assert len(tokens) == row.used, "`split_into_rows` counts the tokens of a row"
    return written


def _sortable(tokens: tuple[int, ...]) -> bytes:
    """Return bytes with the same sort order as the tokens; they compare faster than tuples."""
    return np.array(array("I", tokens), dtype=">u4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix of two inputs, in tokens."""
    n = min(len(a), len(b)) // 4  # 4 bytes per token
    differ = np.frombuffer(a, ">u4", n) != np.frombuffer(b, ">u4", n)
    return int(differ.argmax()) if differ.any() else n


def _triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of (query, key) pairs of causal attention over n tokens."""
    return n * (n + 1) // 2
