"""Which row is sample number i of a run, and which sample of which stream is slot j of step n.

Both are pure functions, called by the loader. `Order` is a keyed permutation of (seed, epoch, i)
that is computed place by place. A Feistel network permutes the smallest power of two that holds the
rows, and what falls outside the rows goes through again until it falls inside (cycle walking):
constant time and memory. Rows come from shards, of which only some are on this machine. Up to
`block_size` rows are permuted as a whole. More are taken shard by shard, the shards in a random
order each epoch, and what that gives is cut into blocks of about `block_size` rows, each permuted
as a whole: a row is shuffled among those of many shards, and only the shards of a block are needed
at a time.

`Mixture` gives every batch each source's part, rounded down or up: the cumulative parts are laid on
a line as long as the batch, and the n-th batch takes the whole numbers on that line after it is
shifted by n golden ratios (systematic sampling). Such shifts fill 0 … 1 as evenly as any sequence
can, so what a source has given stays within a few rows of its part of the run for ever, and the sum
over any number of batches has a closed form: nothing is planned or replayed. Each phase, and a
resumed run, continues counting where what was before it stopped: no change of proportions repeats
or loses a sample, and all that a checkpoint keeps is how many of each source are given.

The order is a contract: a run resumed by a later version must see the rows it has not seen, so
the numbers made here never change (tests hold some of them).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from llmfoundry.errors import UserError
from llmfoundry.recipe.source import StreamConfig

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_MASK = (1 << 64) - 1
_STRETCH = 256  # as few lookups cost hardly more than one, and batches are often small
_SHARDS, _CUT, _BLOCKS = (np.uint64(n) for n in (1, 2, 3))  # what an epoch's keys are for
ONLY = "data"  # the name of a stream that is alone
VERSION = 1
# Shifts in units of 2**-40 row. The step is the number next to the golden ratio's part behind the
# point whose continued fraction over 2**40 has no term above 3: even for any number of steps.
_ONE = 1 << 40
_STEP = 679_535_549_441
_START = _ONE >> 1


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


def stream_key(name: str) -> str:
    """The recipe's key of a stream."""
    return "data" if name == ONLY else f"data.streams.{name}"


@dataclass(frozen=True)
class Phase:
    """Proportions that hold from some step on.

    Attributes:
        step: the first of the phase.
        weights: each source's part, to any scale.
    """

    step: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _Segment:
    """Steps in a row of the same proportions.

    Attributes:
        step: its first.
        base: each source's samples given before, less what step 0 to there would have given.
        active: the sources with a part, by name, so that the recipe's order has no effect.
        cumulative: their parts of a batch, summed up, in units of 2**-40.
        rows: what a part of one is: 1, or a batch where each is of one source.
    """

    step: int
    base: tuple[int, ...]
    active: tuple[int, ...]
    cumulative: tuple[int, ...]
    rows: int

    def batch(self, step: int) -> tuple[int, ...]:
        """Rows that each of the active sources gives at `step`."""
        shift = (_START + step * _STEP) % _ONE
        return self._parts((total + shift) // _ONE for total in (0, *self.cumulative))

    def consumed(self, step: int) -> tuple[int, ...]:
        """Samples that each source has given before `step`."""
        sums = (_floor_sum(step, _ONE, _STEP, total + _START) for total in (0, *self.cumulative))
        counts = list(self.base)
        for source, given in zip(self.active, self._parts(sums), strict=True):
            counts[source] += given
        return tuple(counts)

    def _parts(self, sums: Iterable[int]) -> tuple[int, ...]:
        return tuple((after - before) * self.rows for before, after in pairwise(sums))


class Mixture:
    """The sources' samples, dealt to the steps of a run without end.

    Attributes:
        names: of the sources, in the recipe's order, which has no effect.
        batch_size: rows of a step.
    """

    def __init__(
        self,
        names: Sequence[str],
        phases: Sequence[Phase],
        *,
        batch_size: int,
        per_stream: bool = False,
    ) -> None:
        """Fix what every step takes from which source.

        Args:
            names: one for each source.
            phases: by step, the first at 0; of several at one step, the last holds.
            batch_size: rows of a step over all ranks.
            per_stream: each batch is of one source, in place of having a part of each.
        """
        assert phases and phases[0].step == 0 and len(set(names)) == len(names) > 0
        assert all(before.step <= after.step for before, after in pairwise(phases))
        assert all(len(phase.weights) == len(names) for phase in phases)
        self.names, self.batch_size = tuple(names), batch_size
        self._phases, self._per_stream = tuple(phases), per_stream
        self._removed: dict[str, int] = {}  # given by sources that the recipe has no longer
        self._segments = self._chain((0,) * len(names), self._phases)

    def plan(
        self, step: int, first_slot: int = 0, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The samples of slots first_slot … first_slot + count - 1 of a step; None: to the end.

        Returns:
            The source of each, (n,) int64, and the sample's number in that source's own order,
            (n,) int64, from 0 at the start of the run.
        """
        end = self.batch_size if count is None else first_slot + count
        assert 0 <= first_slot <= end <= self.batch_size, (first_slot, end, self.batch_size)
        segment = self._at(step)
        part, nth = _slots(segment.batch(step))
        part, nth = part[first_slot:end], nth[first_slot:end]
        source = np.array(segment.active, np.int64)[part]
        return source, np.array(segment.consumed(step), np.int64)[source] + nth

    def consumed(self, step: int) -> tuple[int, ...]:
        """Samples that each source has given before `step`: also its next sample's number."""
        return self._at(step).consumed(step)

    def state(self, step: int) -> dict[str, Any]:
        """For a checkpoint written when `step` steps are done: what `resume` needs, as JSON."""
        consumed = dict(zip(self.names, self.consumed(step), strict=True))
        return {"version": VERSION, "consumed": consumed | self._removed}

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after `step` done steps with each source's first sample not given yet.

        With the proportions and the batch size of before, the run is the uninterrupted one; with
        others, these hold from `step` on. Sources are known by their names: new ones begin at
        their first sample; what removed ones have given is kept, as they may come back.
        """
        if state["version"] > VERSION:
            raise UserError(
                f"data: the checkpoint counts its samples in a way ({state['version']}) that is"
                f" newer than this code's ({VERSION}); resume with the code that wrote it, or newer"
            )
        consumed = state["consumed"]
        self._removed = {name: n for name, n in consumed.items() if name not in self.names}
        n = bisect_right(self._phases, step, key=lambda phase: phase.step)
        now = Phase(step, self._phases[n - 1].weights)
        counts = tuple(consumed.get(name, 0) for name in self.names)
        self._segments = self._chain(counts, [now, *self._phases[n:]])

    def _chain(self, counts: tuple[int, ...], phases: Sequence[Phase]) -> list[_Segment]:
        """The phases' segments, the first of which begins when `counts` have been given."""
        segments: list[_Segment] = []
        for phase in phases:
            if segments:
                counts = segments[-1].consumed(phase.step)
            segments.append(self._segment(phase, counts))
        return segments

    def _segment(self, phase: Phase, counts: tuple[int, ...]) -> _Segment:
        named = sorted((name, n) for n, name in enumerate(self.names) if phase.weights[n] > 0)
        active = tuple(n for _, n in named)
        units, rows = (1, self.batch_size) if self._per_stream else (self.batch_size, 1)
        cumulative = _cumulative([phase.weights[n] for n in active], units)
        segment = _Segment(phase.step, (0,) * len(counts), active, cumulative, rows)
        given = segment.consumed(phase.step)
        base = tuple(count - less for count, less in zip(counts, given, strict=True))
        return replace(segment, base=base)

    def _at(self, step: int) -> _Segment:
        n = bisect_right(self._segments, step, key=lambda segment: segment.step)
        assert n, f"step {step} lies before the resumed run's first, {self._segments[0].step}"
        return self._segments[n - 1]


def stream_weights(
    streams: Mapping[str, StreamConfig], n_rows: Sequence[int]
) -> tuple[tuple[float, ...], int]:
    """Each stream's part from the recipe's `proportion`, or from `choose` and `repeat`.

    Returns:
        The weights, and how many samples an epoch of the mixture has.
    """
    parts = [_part(stream, rows) for stream, rows in zip(streams.values(), n_rows, strict=True)]
    if not sum(parts) > 0:
        raise UserError("data.streams: no stream has a part; give one a choose or repeat above 0")
    if all(stream.proportion is None for stream in streams.values()):
        return tuple(parts), max(1, round(sum(parts)))
    used = (int(rows) for part, rows in zip(parts, n_rows, strict=True) if part > 0)
    return tuple(parts), sum(used)


def _part(stream: StreamConfig, n_rows: int) -> float:
    if stream.proportion is not None:
        return float(stream.proportion)
    if stream.choose is not None:
        return float(stream.choose)
    return float(n_rows * (1 if stream.repeat is None else stream.repeat))


def _cumulative(weights: Sequence[float], units: int) -> tuple[int, ...]:
    """Running sums of the weights, where all of them are `units`, as multiples of 2**-40."""
    parts = [Fraction(weight) for weight in weights]
    total = sum(parts)
    assert total > 0, "a phase gives no source a part"
    sums, running = [], Fraction(0)
    for part in parts:
        running += part
        sums.append(round(running / total * units * _ONE))
    return tuple(sums)


def _floor_sum(n: int, modulus: int, factor: int, offset: int) -> int:
    """The sum of (factor * i + offset) // modulus over i = 0 … n - 1, as Euclid's algorithm."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (factor // modulus) + n * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        top = factor * n + offset
        if top < modulus:
            return total
        n, offset = divmod(top, modulus)
        modulus, factor = factor, modulus


@functools.lru_cache(maxsize=16)
def _slots(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Which part each slot of a batch belongs to, and its index among that part's slots.

    The j-th row of a part of n lies at (j + phase) / n of the batch, so that each part has its
    share in any stretch of slots. Phases differ, or all the small parts would lie in the middle.
    """
    parts = np.arange(len(counts))
    part = np.repeat(parts, counts)
    nth = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
    phases = (_START + parts * _STEP) % _ONE / _ONE
    order = np.argsort((nth + phases[part]) / np.array(counts)[part], kind="stable")
    part, nth = part[order], nth[order]
    for array in (part, nth):
        array.setflags(write=False)  # the cache hands out one and the same
    return part, nth
