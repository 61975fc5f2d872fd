"""The order of samples: a permutation each epoch, fixed for ever, in constant time; its blocks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from itertools import pairwise

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
    # Adjacent samples must not stay adjacent: of 40,000 pairs a random order keeps about two.
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
    whole = Order(10**12, seed=17, shuffle=True, block_size=10**12)
    assert whole.rows(7 * 10**12, 4).tolist() == GOLDEN_LARGE
    blocks = Order([5, 0, 4, 6, 3], seed=17, shuffle=True, block_size=6)
    assert blocks.rows(0, 36).tolist() == GOLDEN_BLOCKS
    huge = Order(np.full(100_000, 4096), seed=17, shuffle=True)
    assert huge.rows(10**12, 4).tolist() == GOLDEN_HUGE


GOLDEN_10 = [6, 2, 1, 0, 8, 7, 5, 4, 3, 9, 3, 5, 1, 4, 0, 7, 8, 9, 2, 6]
GOLDEN_LARGE = [953691287894, 23042559988, 936313044567, 889966449046]
GOLDEN_BLOCKS = [
    *[9, 11, 14, 10, 13, 12, 7, 8, 0, 1, 6, 5, 17, 15, 4, 3, 16, 2],  # shards 3, 1, 2, 0, 4
    *[1, 0, 2, 9, 3, 4, 13, 10, 5, 11, 14, 12, 6, 8, 15, 17, 16, 7],  # shards 1, 0, 3, 2, 4
]
GOLDEN_HUGE = [260388745, 364700501, 348420412, 15891798]


@pytest.mark.parametrize("block_size", [1 << 18, 10**12])
def test_time_does_not_grow_with_the_rows(block_size: int) -> None:
    order = Order(10**12, seed=1, shuffle=True, block_size=block_size)
    order.rows(0, 8)
    start = time.process_time()
    rows = order.rows(777_777_777_777, 1000)
    assert time.process_time() - start < 1
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0 and rows.max() < 10**12


SHARDS: list[list[int]] = [
    [40],
    [1] * 40,
    [0, 13, 0, 0, 13, 14, 0],
    [100, 0, 1, 2, 50],
    [7, 11, 3, 0, 29, 1, 1, 40, 5, 8] * 9,
]


@pytest.mark.parametrize("sizes", SHARDS)
@pytest.mark.parametrize("block_size", [1, 2, 7, 39, 40, 100])
def test_each_epoch_in_blocks_visits_every_row_once(sizes: list[int], block_size: int) -> None:
    for seed in (0, 5, -1):
        order = Order(sizes, seed=seed, shuffle=True, block_size=block_size)
        n = sum(sizes)
        epochs = order.rows(0, 3 * n).reshape(3, n)
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (3, 1)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("block_size", [16, 50, 10_000])
def test_rows_at_any_positions_are_those_of_the_sequence(shuffle: bool, block_size: int) -> None:
    order = Order(SHARDS[-1], seed=5, shuffle=shuffle, block_size=block_size)
    together = order.rows(0, 5000)
    positions = np.random.default_rng(0).integers(0, 5000, 3000)
    assert np.array_equal(order.at(positions), together[positions])
    assert [int(order.rows(i, 1)[0]) for i in range(900, 1100)] == together[900:1100].tolist()
    again = Order(np.array(SHARDS[-1]), seed=5, shuffle=shuffle, block_size=block_size)
    assert again.rows(4000, 1000).tolist() == together[4000:].tolist()
    assert len(order.at(np.array([], np.int64))) == len(order.rows(3, 0)) == 0


def test_the_shards_of_a_small_epoch_have_no_effect() -> None:
    one, many = (Order(s, seed=9, shuffle=True, block_size=60) for s in (60, [10, 0, 30, 20]))
    assert one.rows(0, 200).tolist() == many.rows(0, 200).tolist()


def test_rows_that_come_together_are_from_few_shards() -> None:
    sizes = np.full(500, 100)
    rows = Order(sizes, seed=3, shuffle=True, block_size=2000).rows(0, 50_000) // 100
    for first in range(0, 50_000, 1000):
        # A window of half a block lies in two blocks at most: 3000 rows each, cut shards included.
        assert 10 <= len(set(rows[first : first + 1000].tolist())) <= 2 * 31


def test_blocks_mix_their_shards_as_a_permutation_would() -> None:
    """Chi-square of (place, shard) within blocks that hold ten whole shards each."""
    order = Order(np.full(40, 4096), seed=8, shuffle=True, block_size=40_960)
    shards = order.rows(2 * 40 * 4096, 40_960)[:20_480] // 4096  # all of the first block's
    assert len(set(shards.tolist())) > 4
    first, second = shards[:10_240], shards[10_240:]
    counts = np.stack([np.bincount(part, minlength=40) for part in (first, second)])
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(0) / 2
    freedom = len(expected) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5
    assert (np.diff(shards) == 0).mean() < 0.25  # adjacent ones from one shard: about one in ten


def test_shards_and_borders_of_blocks_differ_between_epochs() -> None:
    order = Order(np.full(64, 100), seed=1, shuffle=True, block_size=400)
    epochs = order.rows(0, 10 * 6400).reshape(10, 6400) // 100
    first = [frozenset(epoch[:200].tolist()) for epoch in epochs]
    assert len(set(first)) == 10
    one_shard = Order(6400, seed=1, shuffle=True, block_size=400)
    epochs = one_shard.rows(0, 10 * 6400).reshape(10, 6400)
    # Block after block: where all rows before are smaller than all rows behind lies a border.
    borders = [
        frozenset(np.flatnonzero(np.maximum.accumulate(e)[:-1] == np.arange(6399)).tolist())
        for e in epochs
    ]
    assert len(set(borders)) == 10
    sizes = [np.diff([-1, *sorted(found), 6399]) for found in borders]
    assert min(s.min() for s in sizes) >= 199 and max(s.max() for s in sizes) < 601


@pytest.mark.parametrize("sizes", [*SHARDS, [0, 9, 0]])
@pytest.mark.parametrize("block_size", [16, 10_000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_come_in_the_order_in_which_samples_need_them(
    sizes: list[int], block_size: int, shuffle: bool
) -> None:
    order = Order(sizes, seed=2, shuffle=shuffle, block_size=block_size)
    n, filled = order.n_rows, np.count_nonzero(sizes)
    held = min(filled, 2 * block_size) if shuffle else 1  # a block has less than twice as many rows
    for first in (0, n // 3, n - 1, 5 * n + 1):
        coming, wished = order.shards(first), []
        needed = np.searchsorted(np.cumsum(sizes), order.rows(first, 3 * n), side="right")
        assert shuffle or next(order.shards(first)) == needed[0]
        for shard in needed.tolist():
            while shard not in wished[-held:]:
                wished.append(next(coming))
        # Had it come too early or not at all, the reader would have gone on to the next epoch's.
        assert len(wished) <= 4 * (filled + 2 * n // block_size + 1)
        assert 0 not in [sizes[shard] for shard in wished]
        twice = sum(one == other for one, other in pairwise(wished))
        assert twice <= 4  # only where an epoch ends: one that two blocks share comes once
