"""How well the sample order mixes.

    python -m benchmarks.data.orders

In three numbers, beside a true permutation and beside what Streaming calls py1e (shards in random
order, then each sample moved at random by up to half a block):

- same shard: how often two samples in a row are from one shard, over how often they would be if
  each were drawn at random. 1 is perfect, larger means runs of one shard's text.
- shards in 2048: how many shards the samples of a batch of 2,048 are from, as the exponential of
  the entropy: what counts when a shard is of one kind of text. At most the shards of a block.
- apart: how far apart in the order two neighbours of the source come, on average, over a third of
  the epoch, where a permutation would bring them. What a block costs; 1 only without blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.record import table
from llmfoundry.data.order import Order

SEED = 17
WINDOW = 2048
LAYOUTS = ((20, 8192, 1 << 18), (20, 8192, 1 << 15), (256, 8192, 1 << 18), (489, 4091, 1 << 18))


def order() -> None:
    """Print the table, which is the same on every machine."""
    columns = {"epoch": "{}", "order": "{}", "same shard": "{:.3f}"}
    columns |= {f"shards in {WINDOW}": "{:.1f}", "apart": "{:.3f}"}
    print("\n".join(table(mixed_rows(), columns)))


def mixed_rows() -> list[dict[str, Any]]:
    """For each layout and order the three numbers."""
    found = []
    for n_shards, size, block_size in LAYOUTS:
        sizes = np.full(n_shards, size)
        rng = np.random.default_rng(SEED)
        n = int(sizes.sum())
        orders = {
            "permutation": rng.permutation(n),
            "py1e": py1e(sizes, block_size, rng),
            "ours": Order(sizes, seed=SEED, shuffle=True, block_size=block_size).rows(0, n),
        }
        epoch = f"{n:,} rows in {n_shards} shards, blocks of {block_size:,}"
        for name, rows in orders.items():
            same, shards, apart = mixing(rows, sizes)
            row = {"same shard": same, f"shards in {WINDOW}": shards, "apart": apart}
            found.append({"epoch": epoch, "order": name, **row})
    return found


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


if __name__ == "__main__":
    order()
