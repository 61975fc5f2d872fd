"""How well the sample order mixes, what it costs at MPT-30B's scale, and how fast it is.

    python -m benchmarks.orders

Mixing, in three numbers, beside a true permutation and beside what Streaming calls py1e (shards in
random order, then each sample moved at random by up to half a block):

- same shard: how often two samples in a row are from one shard, over how often they would be if
  each were drawn at random. 1 is perfect, larger means runs of one shard's text.
- shards in 2048: how many shards the samples of a batch of 2,048 are from, as the exponential of
  the entropy: what counts when a shard is of one kind of text. At most the shards of a block.
- apart: how far apart in the order two neighbours of the source come, on average, over a third of
  the epoch, where a permutation would bring them. What a block costs; 1 only without blocks.

Scale: 2,000,047,734 samples in 488,894 shards from 10 sources for 3,072 ranks. Memory is what is
beyond the sizes of the shards, which the index holds.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from llmfoundry.data.mixture import Mixture, Phase
from llmfoundry.data.order import Order

SEED = 17
WINDOW = 2048
LAYOUTS = ((20, 8192, 1 << 18), (20, 8192, 1 << 15), (256, 8192, 1 << 18), (489, 4091, 1 << 18))

N_SAMPLES, N_SHARDS, RANKS, ROWS_OF_A_RANK = 2_000_047_734, 488_894, 3072, 4
# MPT-30B's sources: billions of tokens, and per cent of the training tokens.
SOURCES = {
    "mc4-en": (2417.99, 33.5),
    "c4-en-semdedup": (100.42, 29.9),
    "redpajama-commoncrawl": (878.45, 8.5),
    "the-stack-selected": (463.78, 10.0),
    "redpajama-wikipedia": (4.87, 4.0),
    "the-stack-markdown": (107.07, 4.5),
    "semantic-scholar": (48.95, 3.3),
    "redpajama-books": (26.02, 3.0),
    "redpajama-arxiv": (28.10, 1.9),
    "redpajama-stackexchange": (20.54, 1.4),
}


def main() -> None:
    """Print the three tables."""
    print_mixing()
    print_scale()
    print_speed()


def print_mixing() -> None:
    """One table a layout: the three numbers for each order."""
    for n_shards, size, block_size in LAYOUTS:
        sizes = np.full(n_shards, size)
        rng = np.random.default_rng(SEED)
        n = int(sizes.sum())
        orders = {
            "permutation": rng.permutation(n),
            "py1e": py1e(sizes, block_size, rng),
            "ours": Order(sizes, seed=SEED, shuffle=True, block_size=block_size).rows(0, n),
        }
        print(f"\n{n:,} samples, {n_shards} shards, blocks of {block_size:,}")
        print(f"{'order':12} {'same shard':>12} {f'shards in {WINDOW}':>16} {'apart':>8}")
        for name, rows in orders.items():
            same, shards, apart = mixing(rows, sizes)
            print(f"{name:12} {same:12.3f} {shards:16.1f} {apart:8.3f}")


def mixing(rows: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    """The numbers that the module explains, of one epoch's `rows` (n,) from shards of `sizes`."""
    n = len(rows)
    shards = np.repeat(np.arange(len(sizes)), sizes)[rows]
    same = float((shards[1:] == shards[:-1]).mean() / np.square(sizes / n).sum())
    windows = shards[: n // WINDOW * WINDOW].reshape(-1, WINDOW)
    parts = np.stack([np.bincount(window, minlength=len(sizes)) for window in windows]) / WINDOW
    entropy = -(parts * np.log(np.where(parts > 0, parts, 1))).sum(1)
    place = np.empty(n, np.int64)
    place[rows] = np.arange(n)
    apart = float(np.abs(np.diff(place)).mean() / (n / 3))
    return same, float(np.exp(entropy).mean()), apart


def py1e(sizes: np.ndarray, block_size: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) rows of an epoch as Streaming orders them for one canonical node.

    Each shard's samples are spread over a stretch of 0.75 to 1.25 blocks around it.
    """
    shards = rng.permutation(len(sizes))
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate([starts[n] + rng.permutation(sizes[n]) for n in shards])
    sizes = sizes[shards]
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    behind = len(rows) - before - np.repeat(sizes, sizes)
    stretch = np.repeat(rng.uniform(0.75, 1.25, len(sizes)) * block_size - sizes, sizes)
    reach = np.maximum(stretch / 2, 0)
    moved = rng.uniform(-np.minimum(reach, before), np.minimum(reach, behind))
    order: np.ndarray = rows[np.argsort(np.arange(len(rows)) + moved)]
    return order


class Run:
    """What a rank makes of the index to know its samples.

    Attributes:
        mixture: of the sources.
    """

    def __init__(self, sizes: list[np.ndarray]) -> None:
        """From the rows of each source's shards."""
        weights = tuple(percent for _, percent in SOURCES.values())
        batch_size = RANKS * ROWS_OF_A_RANK
        self.mixture = Mixture(list(SOURCES), [Phase(0, weights)], batch_size=batch_size)
        self._orders = [Order(s, seed=SEED + n, shuffle=True) for n, s in enumerate(sizes)]

    def share(self, step: int, rank: int) -> list[tuple[int, int]]:
        """A rank's samples of a step, as (source, row), and what to fetch next of each source."""
        source, k = self.mixture.plan(step, rank * ROWS_OF_A_RANK, ROWS_OF_A_RANK)
        samples = []
        for n in np.unique(source).tolist():
            samples += [(n, row) for row in self._orders[n].at(k[source == n]).tolist()]
        for order, first in zip(self._orders, self.mixture.consumed(step), strict=True):
            next(order.shards(first))
        return samples


def print_scale() -> None:
    """Start, first shares and resume of MPT-30B's run: seconds and megabytes of each."""
    sizes = mpt_30b()
    steps = N_SAMPLES // (RANKS * ROWS_OF_A_RANK)
    late = steps * 9 // 10
    state = Run(sizes).mixture.state(late)

    def start() -> Run:
        return Run(sizes)

    def first() -> list[Any]:
        run = Run(sizes)
        return [run, *(run.share(0, rank) for rank in (0, RANKS // 2, RANKS - 1))]

    def resume() -> list[Any]:
        run = Run(sizes)
        run.mixture.resume(state, late)
        return [run, *(run.share(late, rank) for rank in (0, RANKS // 2, RANKS - 1))]

    samples, shards = sum(int(s.sum()) for s in sizes), sum(map(len, sizes))
    print(f"\n{samples:,} samples, {shards:,} shards, {len(sizes)} sources, {RANKS:,} ranks")
    print(f"{'':40} {'s':>7} {'MB held':>8} {'MB peak':>8}")
    tasks: dict[str, Callable[[], Any]] = {
        "start": start,
        "start, first share of 3 ranks": first,
        f"resume at step {late:,}, 3 ranks": resume,
    }
    process = psutil.Process()
    before = process.memory_info().rss
    for name, task in tasks.items():
        held, peak = memory(task)
        print(f"{name:40} {seconds(task):7.3f} {held / 1e6:8.1f} {peak / 1e6:8.1f}")
    grown = process.memory_info().rss - before
    print(f"the process grew by {grown / 1e6:.1f} MB in all of it")


def mpt_30b() -> list[np.ndarray]:
    """Rows of each shard of each source: as many of both as MPT-30B had, in its proportions."""
    tokens = np.array([billions for billions, _ in SOURCES.values()])
    totals = []
    for total in (N_SHARDS, N_SAMPLES):
        ends = np.round(np.cumsum(tokens) / tokens.sum() * total).astype(np.int64)
        totals.append(np.diff(ends, prepend=0).tolist())
    return [_even(rows, shards) for shards, rows in zip(*totals, strict=True)]


def _even(rows: int, shards: int) -> np.ndarray:
    return np.diff(np.arange(shards + 1) * rows // shards)


def seconds(task: Callable[[], Any], repeats: int = 3) -> float:
    """The mean of some runs."""
    started = time.perf_counter()
    for _ in range(repeats):
        task()
    return (time.perf_counter() - started) / repeats


def memory(task: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a task's result holds, and that it held at most."""
    tracemalloc.start()
    result = task()
    held_and_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return held_and_peak


def print_speed() -> None:
    """Lookups a second, and a step's plan."""
    sizes = mpt_30b()
    order = Order(sizes[0], seed=SEED, shuffle=True)
    n, batch = order.n_rows, RANKS * ROWS_OF_A_RANK
    anywhere = np.random.default_rng(SEED).integers(0, n, 200_000)
    order.rows(0, 1)  # makes the epoch
    steps = iter(range(10**6))
    print(f"\n{'lookups in the largest source':40} {'rows/s':>12}")
    for name, count, look_up in (
        ("8 rows a call, in a row", 8, lambda: order.rows(next(steps) * 8, 8)),
        ("4 rows a call, a rank's", 4, lambda: order.rows(next(steps) * batch, 4)),
        (f"{batch:,} rows a call, in a row", batch, lambda: order.rows(next(steps) * batch, batch)),
        ("200,000 rows a call, anywhere", 200_000, lambda: order.at(anywhere)),
    ):
        print(f"{name:40} {count / seconds(look_up, 100):12,.0f}")
    run = Run(sizes)
    run.mixture.plan(0)
    print(f"\n{'a step':40} {'ms':>12}")
    for name, plan in (
        (f"plan of all {batch:,} slots", lambda: run.mixture.plan(next(steps))),
        ("plan of a rank's 4 slots", lambda: run.mixture.plan(next(steps), 4, 4)),
    ):
        print(f"{name:40} {seconds(plan, 100) * 1e3:12.3f}")


if __name__ == "__main__":
    main()
