"""Rows of trees: against counting by hand, and whatever the requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmfoundry.gauntlet.models import tree
from llmfoundry.gauntlet.models.tree import Forest, grow, split_into_rows, widths, write_row
from llmfoundry.gauntlet.questions import ScoreRequest
from llmfoundry.ops.packed_layout import PackedLayout


def request(*tokens: int, n: int = 1) -> ScoreRequest:
    return ScoreRequest(tokens, tuple(range(n)), "")


def random_requests(seed: int, n: int = 60, longest: int = 40) -> list[ScoreRequest]:
    """Inputs that continue the beginnings of others, of a vocabulary that large tokens are in."""
    rng = random.Random(seed)
    texts: list[tuple[int, ...]] = [(0,)]
    for _ in range(n):
        start = rng.choice(texts)[: rng.randint(1, longest)]
        more = [rng.choice([1, 2, 3, 70_000, 255, 256]) for _ in range(rng.randint(0, 12))]
        texts.append((*start, *more)[:longest])
    return [request(*text, n=rng.randint(1, len(text))) for text in texts]


def trie_nodes(requests: list[ScoreRequest]) -> int:
    """Distinct beginnings: what a tree has to compute at least."""
    return len({r.tokens[:n] for r in requests for n in range(1, len(r.tokens) + 1)})


def paths(forest: Forest, row: int, requests: list[ScoreRequest]) -> dict[int, list[int]]:
    """By request: the tokens that are seen from the last of its places, read off the layout."""
    written = write_row(forest, forest.rows[row], requests)
    found = {}
    for i, places in zip(written.requests, written.places, strict=True):
        last = places[-1]
        path = [j for j in range(last + 1) if written.ends[j] > last]
        assert places == path[len(path) - len(requests[i].targets) :]
        found[i] = [written.tokens[j] for j in path]
    return found


@pytest.mark.parametrize("row_tokens", [64, 128, 4096])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_sees_its_own_tokens_once_and_rows_keep_their_budget(
    seed: int, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "ROW_TOKENS", row_tokens)
    requests = random_requests(seed)
    forest = grow(requests, seq_len=40)
    seen: dict[int, list[int]] = {}
    for number, row in enumerate(forest.rows):
        assert row.used <= row.width <= row_tokens
        assert row.width in widths(40)
        found = paths(forest, number, requests)
        assert not found.keys() & seen.keys()
        seen |= found
        written = write_row(forest, row, requests)
        assert row.targets == sum(len(requests[i].targets) for i in written.requests)
        depths = PackedLayout.from_ends([written.ends]).positions
        assert row.work == int((depths + 1).sum())
    assert seen == {i: list(r.tokens) for i, r in enumerate(requests)}
    assert forest.tokens_unshared == sum(len(r.tokens) for r in requests)
    if len(forest.rows) == 1:
        assert forest.rows[0].used == trie_nodes(requests)


def test_worked_examples_questions_and_choices_are_each_computed_once() -> None:
    shots, questions = tuple(range(1, 101)), [tuple(range(k, k + 20)) for k in (200, 300, 400)]
    requests = [
        request(0, *shots, *question, choice, choice + 1, n=2)
        for question in questions
        for choice in (500, 600, 700, 800)
    ]
    requests += [request(*r.tokens, n=3) for r in requests[:5]]  # the same inputs, other targets
    forest = grow(requests, seq_len=128)
    assert [row.used for row in forest.rows] == [1 + 100 + 3 * (20 + 4 * 2)]
    assert forest.tokens_computed == 256
    assert forest.tokens_unshared == 17 * 123


def test_an_input_that_begins_another_is_a_part_of_its_path() -> None:
    requests = [request(5, 6, 7), request(5, 6), request(5, 6, 7, 8), request(5, 6, n=2)]
    forest = grow(requests, seq_len=8)
    written = write_row(forest, forest.rows[0], requests)
    assert written.tokens == [5, 6, 7, 8]
    assert written.ends == [4, 4, 4, 4]
    places = dict(zip(written.requests, written.places, strict=True))
    assert places == {0: [2], 1: [1], 2: [3], 3: [0, 1]}


def test_where_a_row_ends_the_path_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ROW_TOKENS", 64)
    requests = [request(*range(30), 100 + k, *range(200, 209)) for k in range(9)]
    forest = grow(requests, seq_len=40)
    assert [(row.start, row.stop, row.used) for row in forest.rows] == [
        (0, 3, 60),
        (3, 6, 60),
        (6, 9, 60),
    ]
    written = write_row(forest, forest.rows[1], requests)
    assert written.tokens[:31] == [*range(30), 103]


def test_a_row_ends_where_little_is_shared_rather_than_where_it_is_full() -> None:
    lengths = np.array([30, 31, 30, 31, 30, 31])
    shared = np.array([0, 30, 1, 30, 1, 30])  # three questions of two choices
    rows = split_into_rows(lengths, shared, np.ones_like(lengths), [62])
    assert [(row.start, row.stop, row.used) for row in rows] == [(0, 4, 61), (4, 6, 31)]


def least_cost(lengths: list[int], shared: list[int], row_widths: list[int]) -> int:
    """Tokens of the cheapest rows of all, tried one after the other."""
    best = [0] + [10**9] * len(lengths)
    for stop in range(1, len(lengths) + 1):
        for start in range(stop):
            used = lengths[start] + sum(lengths[i] - shared[i] for i in range(start + 1, stop))
            wide = [w for w in row_widths if w >= used]
            if wide:
                best[stop] = min(best[stop], best[start] + wide[0])
    return best[-1]


@pytest.mark.parametrize("seed", range(6))
def test_few_more_tokens_are_computed_than_the_best_rows_of_all_would_need(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "ROW_TOKENS", 512)
    requests = random_requests(seed, n=150, longest=120)
    forest = grow(requests, seq_len=120)
    lengths = [len(tokens) for tokens in forest.inputs]
    best = least_cost(lengths, forest.shared.tolist(), widths(120))
    assert best <= forest.tokens_computed <= 1.15 * best + 64


def test_the_order_of_requests_changes_no_row() -> None:
    requests = random_requests(3)
    shuffled = random.Random(0).sample(requests, len(requests))
    first, second = (grow(each, seq_len=40) for each in (requests, shuffled))
    assert first.inputs == second.inputs
    assert first.rows == second.rows


def test_widths_are_few_and_hold_the_longest_input() -> None:
    assert widths(128) == [64, 128, 256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096]
    assert widths(5000)[-1] == 5000
    assert len(widths(100_000)) < 20
    longest = [request(*range(5000))]
    assert grow(longest, seq_len=5000).rows[0].width == 5000


def test_nothing_to_ask_is_no_row() -> None:
    forest = grow([], seq_len=8)
    assert forest.rows == []
    assert forest.tokens_computed == 0
