"""Which row is sample number i of a run: a pure function of (seed, epoch, i).

Called by the loader. Constant time and memory whatever the number of rows: each epoch is a keyed
Feistel network on the smallest power of two that holds the rows, and what falls outside the rows
goes through again until it falls inside (cycle walking), which leaves a permutation of the rows.

The order is a contract: a run resumed by a later version must see the rows it has not seen, so
the numbers made here never change (tests hold some of them).
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_MASK = (1 << 64) - 1


class Order:
    """The order of `n_rows` rows, epoch after epoch, without end."""

    def __init__(self, n_rows: int, *, seed: int, shuffle: bool) -> None:
        """Fix the order.

        Args:
            n_rows: rows of an epoch, from 1 to 2**62.
            seed: any whole number; each gives another order.
            shuffle: off, every epoch is 0, 1, 2 …
        """
        assert 1 <= n_rows <= 1 << 62
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle
        bits = max(6, (n_rows - 1).bit_length())  # on fewer, some orders come too often
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def rows(self, first: int, count: int) -> np.ndarray:
        """(count,) int64: the rows that are samples first … first + count - 1 of the run."""
        epoch, offset = divmod(first, self.n_rows)
        place = np.arange(offset, offset + count, dtype=np.uint64)
        epochs = np.uint64(epoch) + place // np.uint64(self.n_rows)
        place %= np.uint64(self.n_rows)
        if not self.shuffle:
            return place.astype(np.int64)
        keys = self._keys(epochs)
        todo = np.arange(count)
        while len(todo):
            place[todo] = self._permute(place[todo], keys[:, todo])
            todo = todo[place[todo] >= self.n_rows]
        return place.astype(np.int64)

    def _keys(self, epochs: np.ndarray) -> np.ndarray:
        """(rounds, count) uint64: a key for each round of each sample's epoch."""
        seed = np.uint64(self.seed * _GOLDEN & _MASK)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        return _mix(_mix(_mix(epochs + seed)[None] + rounds))

    def _permute(self, place: np.ndarray, keys: np.ndarray) -> np.ndarray:
        high, low = place >> self._low_bits, place & self._low_mask
        for n in range(0, _ROUNDS, 2):
            high ^= _mix(low ^ keys[n]) & self._high_mask
            low ^= _mix(high ^ keys[n + 1]) & self._low_mask
        return high << self._low_bits | low


def _mix(value: np.ndarray) -> np.ndarray:
    """64 bits of which each depends on all of `value`; uint64 arithmetic wraps around."""
    value = (value ^ value >> np.uint64(31)) * _MULTIPLIER
    value = (value ^ value >> np.uint64(29)) * _MULTIPLIER
    return value ^ value >> np.uint64(32)
