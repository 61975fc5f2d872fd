"""The order of samples: a permutation each epoch, uniform, fixed for ever, in constant time."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from llmfoundry.data.order import Order


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 16, 17, 63, 64, 65, 1000, 4097, 50_000])
@pytest.mark.parametrize("seed", [0, 17, 2**63, -1])
def test_each_epoch_visits_every_row_once(n: int, seed: int) -> None:
    order = Order(n, seed=seed, shuffle=True)
    for epoch in (0, 1, 9):
        assert np.array_equal(np.sort(order.rows(epoch * n, n)), np.arange(n))


def test_unshuffled_order_is_the_corpus_order_each_epoch() -> None:
    assert Order(5, seed=3, shuffle=False).rows(3, 9).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("n", [1, 3, 100])
def test_a_sample_does_not_depend_on_what_was_asked_with_it(n: int) -> None:
    order = Order(n, seed=5, shuffle=True)
    together = order.rows(0, 350)
    assert [int(order.rows(i, 1)[0]) for i in range(350)] == together.tolist()
    assert order.rows(123, 70).tolist() == together[123:193].tolist()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_rows_come_equally_often(n: int) -> None:
    orders = list(itertools.permutations(range(n)))
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(60):
        epochs = Order(n, seed=seed, shuffle=True).rows(0, n * 50).reshape(50, n)
        seen.update(map(tuple, epochs.tolist()))
    expected = 3000 / len(orders)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_rows_land_uniformly_over_the_epoch() -> None:
    """Chi-square of (place, row) over a 16 x 16 grid, 255 cells free of constraint at most."""
    n = 40_000
    rows = Order(n, seed=1, shuffle=True).rows(0, n)
    grid, _, _ = np.histogram2d(np.arange(n), rows, bins=16)
    expected = n / 256
    assert ((grid - expected) ** 2 / expected).sum() < 225 + 4 * (2 * 225) ** 0.5
    # Neighbours must not stay neighbours: of 40,000 pairs a random order keeps about two.
    assert (np.abs(np.diff(rows)) == 1).sum() < 12


def test_seeds_and_epochs_differ() -> None:
    n = 10_000
    a, b = (Order(n, seed=seed, shuffle=True).rows(0, 2 * n) for seed in (1, 2))
    for one, other in ((a[:n], b[:n]), (a[:n], a[n:])):
        assert (one == other).sum() < 10  # one expected by chance
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_the_order_is_a_contract() -> None:
    """Stored numbers: another result here breaks the resume of every earlier run."""
    assert Order(10, seed=17, shuffle=True).rows(0, 20).tolist() == GOLDEN_10
    assert Order(10**12, seed=17, shuffle=True).rows(7 * 10**12, 4).tolist() == GOLDEN_LARGE


GOLDEN_10 = [6, 2, 1, 0, 8, 7, 5, 4, 3, 9, 3, 5, 1, 4, 0, 7, 8, 9, 2, 6]
GOLDEN_LARGE = [953691287894, 23042559988, 936313044567, 889966449046]


def test_time_does_not_grow_with_the_rows() -> None:
    order = Order(10**12, seed=1, shuffle=True)
    order.rows(0, 8)
    start = time.perf_counter()
    rows = order.rows(777_777_777_777, 1000)
    assert time.perf_counter() - start < 0.1
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0 and rows.max() < 10**12
