"""Which row is sample number i of a run: a pure function of (seed, epoch, i).

Called by the loader. The idea: a keyed permutation that is computed place by place. A Feistel
network permutes the smallest power of two that holds the rows, and what falls outside the rows
goes through again until it falls inside (cycle walking): constant time and memory.

Rows come from shards, of which only some are on this machine. Up to `block_size` rows are permuted
as a whole. More are taken shard by shard, the shards in a random order each epoch, and what that
gives is cut into blocks of about `block_size` rows, each permuted as a whole: a row is shuffled
among those of many shards, and only the shards of a block are needed at a time.

The order is a contract: a run resumed by a later version must see the rows it has not seen, so
the numbers made here never change (tests hold some of them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_MASK = (1 << 64) - 1
_STRETCH = 256  # as few lookups cost hardly more than one, and batches are often small
_SHARDS, _CUT, _BLOCKS = (np.uint64(n) for n in (1, 2, 3))  # what an epoch's keys are for


class Order:
    """The order of the rows of some shards, epoch after epoch, without end.

    Attributes:
        n_rows: rows of an epoch.
        seed: as given.
        shuffle: as given.
        block_size: as given.
    """

    def __init__(
        self,
        sizes: int | Sequence[int] | np.ndarray,
        *,
        seed: int,
        shuffle: bool,
        block_size: int = 1 << 18,
    ) -> None:
        """Fix the order.

        Args:
            sizes: rows of each shard; an int is one shard. At least one row in all, at most 2**62.
            seed: any whole number; each gives another order.
            shuffle: off, every epoch is 0, 1, 2 …
            block_size: rows that are permuted as a whole: an epoch of at most as many; of more,
                blocks of half to one and a half of it (one, if there are less than two).
        """
        self._sizes = np.atleast_1d(np.asarray(sizes, np.int64))
        assert self._sizes.ndim == 1 and (self._sizes >= 0).all() and block_size >= 1
        self._ends = np.cumsum(self._sizes)
        self.n_rows = int(self._ends[-1])
        assert 1 <= self.n_rows <= 1 << 62
        self.seed, self.shuffle, self.block_size = seed, shuffle, block_size
        self._key = np.uint64(seed * _GOLDEN & _MASK)
        self._in_blocks = shuffle and self.n_rows > block_size
        self._epochs: dict[int, _Epoch] = {}
        self._stretch = (-1, np.empty(0, np.int64))  # the last one looked up, by its first sample

    def rows(self, first: int, count: int) -> np.ndarray:
        """(count,) int64: the rows that are samples first … first + count - 1 of the run."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64: the rows that are samples `positions` (n,) int64 of the run, in any order."""
        if not self.shuffle or len(positions) == 0:
            return positions % self.n_rows
        begin = int(positions.min()) // _STRETCH * _STRETCH
        if positions.max() >= begin + _STRETCH:
            return self._look_up(positions)
        kept, rows = self._stretch
        if kept != begin:
            rows = self._look_up(np.arange(begin, begin + _STRETCH))
            self._stretch = (begin, rows)
        return rows[positions - begin]

    def shards(self, first: int) -> Iterator[int]:
        """Numbers of the shards in the order in which samples `first`, first + 1, … need them.

        Endless. Shards whose rows are permuted as a whole come one after another, each once, then
        those of the next block or epoch. A shard that two blocks in a row need comes once.
        """
        epoch, place = divmod(first, self.n_rows)
        while True:
            if self._in_blocks:
                yield from self._epoch(epoch).shards_from(place)
            else:
                begin = 0 if self.shuffle else np.searchsorted(self._ends, place, side="right")
                for shard in range(int(begin), len(self._sizes)):
                    if self._sizes[shard]:
                        yield shard
            epoch, place = epoch + 1, 0

    def _look_up(self, positions: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(positions, self.n_rows)
        if not self._in_blocks:
            epochs, which = _distinct(epochs)
            keys = epochs.astype(np.uint64) + self._key
            return _Permutations(np.array([self.n_rows]), keys).apply(places, which)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = self._epoch(epoch).rows(places[here])
        return rows

    def _epoch(self, number: int) -> _Epoch:
        """Made when first needed; two are kept, as threads and batches may straddle a border."""
        epochs = self._epochs
        if number not in epochs:
            key = _mix(np.array([number], np.uint64) + self._key)
            made = _Epoch(self._sizes, self._ends, key, self.block_size)
            self._epochs = epochs = {**dict(list(epochs.items())[-1:]), number: made}
        return epochs[number]


class _Epoch:
    """An epoch in blocks: its shards laid end to end in a random order, and where that is cut."""

    def __init__(
        self, sizes: np.ndarray, ends: np.ndarray, key: np.ndarray, block_size: int
    ) -> None:
        """Arrays as long as the number of shards; `key` (1,) uint64 is the epoch's."""
        numbers = np.arange(len(sizes))
        permutation = _Permutations(numbers[-1:] + 1, _mix(key + _SHARDS))
        self._shards = permutation.apply(numbers, np.zeros_like(numbers))
        sizes = sizes[self._shards]
        self._ends = np.cumsum(sizes)
        self._shift = ends[self._shards] - self._ends  # from a place among these to a row's number
        self._filled = np.flatnonzero(sizes)
        self._n_rows, self._size = int(self._ends[-1]), block_size
        # A cut keeps half a block's distance from the epoch's ends: no block is too small to mix.
        half = (block_size + 1) // 2
        cut = int(_mix(key + _CUT)[0]) % block_size
        self._first_cut = cut if cut >= half else cut + block_size
        self._n_cuts = max(0, (self._n_rows - half - self._first_cut) // block_size + 1)
        self._key = _mix(key + _BLOCKS)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """(n,) int64: the rows at `places` (n,) int64 of the epoch."""
        blocks, which = _distinct(self._block(places))
        begins = self._begin(blocks)
        keys = blocks.astype(np.uint64) + self._key
        permutations = _Permutations(self._begin(blocks + 1) - begins, keys)
        begin = begins[which]
        places = begin + permutations.apply(places - begin, which)
        return places + self._shift[np.searchsorted(self._ends, places, side="right")]

    def shards_from(self, place: int) -> Iterator[int]:
        """The shards that the blocks need, from the one that holds `place` to the last."""
        ends, last = self._ends[self._filled], -1
        for block in range(int(self._block(np.array([place]))[0]), self._n_cuts + 1):
            begin, end = self._begin(np.array([block, block + 1])).tolist()
            low, high = np.searchsorted(ends, (begin, end - 1), side="right").tolist()
            for index in self._filled[max(low, last + 1) : high + 1].tolist():
                yield int(self._shards[index])
            last = high

    def _block(self, places: np.ndarray) -> np.ndarray:
        return np.clip((places - self._first_cut) // self._size + 1, 0, self._n_cuts)

    def _begin(self, blocks: np.ndarray) -> np.ndarray:
        """The first place of each block, and of the one behind the last."""
        begins = self._first_cut + (blocks - 1) * self._size
        return np.where(blocks == 0, 0, np.where(blocks > self._n_cuts, self._n_rows, begins))


class _Permutations:
    """Permutations of 0 … size - 1, each by a key of its own."""

    def __init__(self, sizes: np.ndarray, keys: np.ndarray) -> None:
        """`sizes` (m,) int64, or (1,) for all; `keys` (m,) uint64."""
        # On fewer than 6 bits, some orders would come too often.
        bits = [max(6, (size - 1).bit_length()) for size in sizes.tolist()]
        self._low_bits = np.array([n // 2 for n in bits], np.uint64)
        self._low_mask = np.array([(1 << n // 2) - 1 for n in bits], np.uint64)
        self._high_mask = np.array([(1 << n - n // 2) - 1 for n in bits], np.uint64)
        self._sizes = sizes.astype(np.uint64)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        self._keys = _mix(_mix(_mix(keys)[None] + rounds))  # (rounds, m)

    def apply(self, places: np.ndarray, which: np.ndarray) -> np.ndarray:
        """(n,) int64: where permutation number `which` (n,) puts each of `places` (n,) int64."""
        out = places.astype(np.uint64)
        todo = np.arange(len(out))
        while len(todo):
            size = which[todo] if len(self._sizes) > 1 else np.zeros(1, np.int64)
            out[todo] = self._network(out[todo], size, which[todo])
            todo = todo[out[todo] >= self._sizes[size]]
        return out.astype(np.int64)

    def _network(self, places: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
        low_bits, low_mask = self._low_bits[size], self._low_mask[size]
        high_mask = self._high_mask[size]
        high, low = places >> low_bits, places & low_mask
        for n in range(0, _ROUNDS, 2):
            high ^= _mix(low ^ self._keys[n][key]) & high_mask
            low ^= _mix(high ^ self._keys[n + 1][key]) & low_mask
        return high << low_bits | low


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values that cover those of `values` (n,) int64, and which of them each of the n is."""
    low, high = int(values.min()), int(values.max())
    if high - low < len(values):  # as in every run of samples: no need to sort
        return np.arange(low, high + 1), values - low
    return np.unique(values, return_inverse=True)


def _mix(value: np.ndarray) -> np.ndarray:
    """64 bits of which each depends on all of `value`; uint64 arithmetic wraps around."""
    value = (value ^ value >> np.uint64(31)) * _MULTIPLIER
    value = (value ^ value >> np.uint64(29)) * _MULTIPLIER
    return value ^ value >> np.uint64(32)
