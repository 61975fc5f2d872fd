"""Shuffling and mixing of the training data, as pure functions.

Entry points, both called by the loader: `Order` maps a sample number of a stream to a sequence of
its data, and `Mixture` maps a slot of a batch to a stream and a sample number.

`Order` is a permutation keyed by (seed, epoch), evaluated at single positions in constant time and
memory. A Feistel network permutes the smallest power of two that holds all sequences, and an output
outside the range is permuted again until it lies inside (cycle walking). An epoch of at most
`block_size` sequences is one permutation. A larger epoch concatenates its shards in a random order,
splits the result into blocks of about `block_size` sequences, and permutes each block. Each
sequence is then shuffled with those of many shards, but only the shards of one block have to be on
this machine at a time.

`Mixture` gives each source its proportion of every batch, rounded down or up, by systematic
sampling. The cumulative proportions are marked on a line as long as the batch. Batch n shifts the
line by n times the golden ratio and takes the integers on it. Such shifts fill 0 … 1 as evenly as
any sequence can, so each source stays within a few samples of its exact proportion for the whole
run. The sum over any number of batches has a closed form, so no state is planned or replayed. A new
phase and a resumed run continue the counts of the steps before them. A change of the proportions
therefore repeats or loses no sample, and a checkpoint stores only one count per source.

The order is a contract: a run resumed by a later version must read exactly the unread sequences.
The numbers computed here therefore never change. Tests pin some of them.
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
_STRETCH = 256  # positions computed at once: they cost little more than one, and batches are small
_SHARDS, _CUT, _BLOCKS = (np.uint64(n) for n in (1, 2, 3))  # purposes of the keys of an epoch
ONLY = "data"  # name of the stream of a recipe without data.streams
VERSION = 1
# Shifts are in units of 2**-40 sample. The step is close to the golden ratio's fractional part: the
# nearest integer whose continued fraction over 2**40 has no term above 3. The shifts are then
# evenly spread after any number of steps.
_ONE = 1 << 40
_STEP = 679_535_549_441
_START = _ONE >> 1


class Order:
    """Endless order of the sequences of a set of shards, epoch after epoch.

    Attributes:
        n_rows: sequences per epoch.
        seed: seed of the permutations.
        shuffle: False: every epoch is 0, 1, 2 …
        block_size: sequences per block (see `__init__`).
    """

    def __init__(
        self,
        sizes: int | Sequence[int] | np.ndarray,
        *,
        seed: int,
        shuffle: bool,
        block_size: int = 1 << 18,
    ) -> None:
        """Determine the order.

        Args:
            sizes: number of sequences of each shard; an int is a single shard. The sum is 1 to
                2**62.
            seed: any integer. Different seeds give different orders.
            shuffle: False: every epoch is 0, 1, 2 …
            block_size: an epoch of at most this many sequences is permuted as one block. A larger
                epoch has blocks of 0.5 to 1.5 times this size (one block, if it is below twice
                this size).
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
        self._stretch = (-1, np.empty(0, np.int64))  # cache: first sample and rows of a stretch

    def rows(self, first: int, count: int) -> np.ndarray:
        """Return the sequence numbers (count,) int64 of samples first … first + count - 1."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the sequence numbers (n,) int64 of samples.

        Args:
            positions: (n,) int64, sample numbers of the run, in any order.
        """
        if not self.shuffle or len(positions) == 0:
            return positions % self.n_rows
        # consecutive batches mostly lie in one stretch, which is computed once
        begin = int(positions.min()) // _STRETCH * _STRETCH
        if positions.max() >= begin + _STRETCH:
            return self._look_up(positions)
        cached_begin, rows = self._stretch
        if cached_begin != begin:
            rows = self._look_up(np.arange(begin, begin + _STRETCH))
            self._stretch = (begin, rows)
        return rows[positions - begin]

    def shards(self, first: int) -> Iterator[int]:
        """Yield, without end, the shard numbers in the order in which the samples need them.

        The samples are `first`, first + 1, … The shards of a block come before those of the next
        block or epoch. A shard that two adjacent blocks of an epoch share is yielded once.
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
            in_epoch = epochs == epoch
            rows[in_epoch] = self._epoch(epoch).rows(places[in_epoch])
        return rows

    def _epoch(self, number: int) -> _Epoch:
        """Return the blocks of an epoch.

        The two latest epochs are cached, because batches and threads may straddle their border.
        """
        epochs = self._epochs
        if number not in epochs:
            key = _mix(np.array([number], np.uint64) + self._key)
            epoch = _Epoch(self._sizes, self._ends, key, self.block_size)
            latest = dict(list(epochs.items())[-1:])
            self._epochs = epochs = {**latest, number: epoch}
        return epochs[number]


class _Epoch:
    """One epoch in blocks: its shards, concatenated in a random order and split into blocks."""

    def __init__(
        self, sizes: np.ndarray, ends: np.ndarray, key: np.ndarray, block_size: int
    ) -> None:
        """Shuffle the shards and choose the borders of the blocks.

        Args:
            sizes: (shards,) int64, sequences of each shard.
            ends: (shards,) int64, cumulative sum of `sizes`.
            key: (1,) uint64, key of the epoch.
            block_size: sequences per block.
        """
        # random order of the shards
        numbers = np.arange(len(sizes))
        permutation = _Permutations(numbers[-1:] + 1, _mix(key + _SHARDS))
        self._shards = permutation.apply(numbers, np.zeros_like(numbers))
        sizes = sizes[self._shards]
        self._ends = np.cumsum(sizes)
        self._shift = ends[self._shards] - self._ends  # position in this epoch to sequence number
        self._filled = np.flatnonzero(sizes)
        self._n_rows, self._size = int(self._ends[-1]), block_size
        # Block borders, from a random first one. They keep half a block's distance from both ends
        # of the epoch, so that no block is too small to shuffle well.
        half = (block_size + 1) // 2
        cut = int(_mix(key + _CUT)[0]) % block_size
        self._first_cut = cut if cut >= half else cut + block_size
        self._n_cuts = max(0, (self._n_rows - half - self._first_cut) // block_size + 1)
        self._key = _mix(key + _BLOCKS)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the sequence numbers (n,) int64 at positions `places` (n,) int64 of the epoch."""
        # a permutation for each block that has one of the positions
        blocks, block_index = _distinct(self._block(places))
        block_begins = self._begin(blocks)
        block_sizes = self._begin(blocks + 1) - block_begins
        permutations = _Permutations(block_sizes, blocks.astype(np.uint64) + self._key)

        # shuffle the positions within their blocks
        begins = block_begins[block_index]
        shuffled = begins + permutations.apply(places - begins, block_index)

        # convert to sequence numbers by the shard of each position
        shards = np.searchsorted(self._ends, shuffled, side="right")
        return shuffled + self._shift[shards]

    def shards_from(self, place: int) -> Iterator[int]:
        """Yield the shards of the blocks, from the block that contains `place` to the last."""
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
        """Return the first position of each block. The block after the last begins at the end."""
        begins = self._first_cut + (blocks - 1) * self._size
        begins = np.where(blocks > self._n_cuts, self._n_rows, begins)
        return np.where(blocks == 0, 0, begins)


class _Permutations:
    """m keyed permutations of 0 … size - 1, by a Feistel network with cycle walking."""

    def __init__(self, sizes: np.ndarray, keys: np.ndarray) -> None:
        """Derive the round keys.

        Args:
            sizes: (m,) int64, size of each permutation; (1,): the same size for all.
            keys: (m,) uint64.
        """
        # with fewer than 6 bits, some permutations would be too frequent
        bits = [max(6, (size - 1).bit_length()) for size in sizes.tolist()]
        self._low_bits = np.array([n // 2 for n in bits], np.uint64)
        self._low_mask = np.array([(1 << n // 2) - 1 for n in bits], np.uint64)
        self._high_mask = np.array([(1 << n - n // 2) - 1 for n in bits], np.uint64)
        self._sizes = sizes.astype(np.uint64)
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        self._keys = _mix(_mix(_mix(keys)[None] + rounds))  # (rounds, m)

    def apply(self, places: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Return the images (n,) int64 of `places`.

        Args:
            places: (n,) int64, the values to permute.
            which: (n,) int64, index of the permutation of each value.
        """
        out = places.astype(np.uint64)
        pending = np.arange(len(out))  # indices of the values that are still outside their range
        while len(pending):
            size = which[pending] if len(self._sizes) > 1 else np.zeros(1, np.int64)
            out[pending] = self._network(out[pending], size, which[pending])
            pending = pending[out[pending] >= self._sizes[size]]
        return out.astype(np.int64)

    def _network(self, places: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Apply the Feistel network once. `size` and `key` index the sizes and the round keys."""
        low_bits, low_mask = self._low_bits[size], self._low_mask[size]
        high_mask = self._high_mask[size]
        high, low = places >> low_bits, places & low_mask
        for n in range(0, _ROUNDS, 2):
            high ^= _mix(low ^ self._keys[n][key]) & high_mask
            low ^= _mix(high ^ self._keys[n + 1][key]) & low_mask
        return high << low_bits | low


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct values that include all of `values` (n,) int64, and the index of each."""
    low, high = int(values.min()), int(values.max())
    if high - low < len(values):  # the usual case, consecutive samples, needs no sort
        return np.arange(low, high + 1), values - low
    return np.unique(values, return_inverse=True)


def _mix(value: np.ndarray) -> np.ndarray:
    """Hash uint64 values: each bit of the result depends on all bits of `value`.

    The products rely on the wraparound of uint64 arithmetic.
    """
    value = (value ^ value >> np.uint64(31)) * _MULTIPLIER
    value = (value ^ value >> np.uint64(29)) * _MULTIPLIER
    return value ^ value >> np.uint64(32)


def stream_key(name: str) -> str:
    """Return the recipe key of a stream."""
    return "data" if name == ONLY else f"data.streams.{name}"


@dataclass(frozen=True)
class Phase:
    """Proportions that apply from a step on.

    Attributes:
        step: first step of the phase.
        weights: proportion of each source, in any scale.
    """

    step: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _Segment:
    """Consecutive steps with the same proportions.

    Attributes:
        step: first step.
        base: offset of each source: samples consumed before `step`, minus the samples that these
            proportions would have consumed in the steps 0 … step - 1.
        active: indices of the sources with a proportion above 0, sorted by name, so that the order
            in the recipe has no effect.
        cumulative: cumulative proportions of the active sources in a batch, in units of 2**-40.
        rows: samples per unit of a proportion: 1, or the batch size if each batch has one source.
    """

    step: int
    base: tuple[int, ...]
    active: tuple[int, ...]
    cumulative: tuple[int, ...]
    rows: int

    def batch(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each active source at `step`."""
        shift = (_START + step * _STEP) % _ONE
        return self._parts((total + shift) // _ONE for total in (0, *self.cumulative))

    def consumed(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each source before `step`."""
        sums = (_floor_sum(step, _ONE, _STEP, total + _START) for total in (0, *self.cumulative))
        counts = list(self.base)
        for source, count in zip(self.active, self._parts(sums), strict=True):
            counts[source] += count
        return tuple(counts)

    def _parts(self, sums: Iterable[int]) -> tuple[int, ...]:
        return tuple((after - before) * self.rows for before, after in pairwise(sums))


class Mixture:
    """Assignment of the samples of all sources to the steps of an endless run.

    Attributes:
        names: names of the sources. Their order has no effect on the assignment.
        batch_size: global batch size in samples.
    """

    def __init__(
        self,
        names: Sequence[str],
        phases: Sequence[Phase],
        *,
        batch_size: int,
        per_stream: bool = False,
    ) -> None:
        """Determine the samples of every step.

        Args:
            names: unique names of the sources.
            phases: sorted by step, the first at step 0. If several have the same step, the last
                one applies.
            batch_size: global batch size in samples.
            per_stream: take each batch from one source instead of mixing the sources in it.
        """
        assert phases and phases[0].step == 0 and len(set(names)) == len(names) > 0
        assert all(before.step <= after.step for before, after in pairwise(phases))
        assert all(len(phase.weights) == len(names) for phase in phases)
        self.names, self.batch_size = tuple(names), batch_size
        self._phases, self._per_stream = tuple(phases), per_stream
        self._removed: dict[str, int] = {}  # samples of the sources that the recipe no longer has
        self._segments = self._chain((0,) * len(names), self._phases)

    def plan(
        self, step: int, first_slot: int = 0, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of slots first_slot … first_slot + count - 1 of a step.

        Args:
            step: number of the step.
            first_slot: index in the global batch.
            count: number of slots; None: all up to the end of the batch.

        Returns:
            The source index of each slot, (n,) int64, and the sample number in the order of that
            source, (n,) int64, which counts from 0 at the start of the run.
        """
        end = self.batch_size if count is None else first_slot + count
        assert 0 <= first_slot <= end <= self.batch_size, (first_slot, end, self.batch_size)
        segment = self._at(step)
        part, nth = _slots(segment.batch(step))
        part, nth = part[first_slot:end], nth[first_slot:end]
        source = np.array(segment.active, np.int64)[part]
        return source, np.array(segment.consumed(step), np.int64)[source] + nth

    def consumed(self, step: int) -> tuple[int, ...]:
        """Return the samples of each source before `step`, which is also its next sample number."""
        return self._at(step).consumed(step)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state to checkpoint after `step` steps, as JSON, for `resume`."""
        consumed = dict(zip(self.names, self.consumed(step), strict=True))
        return {"version": VERSION, "consumed": consumed | self._removed}

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Continue at `step` with the first unread sample of each source.

        With the same proportions and batch size, the run equals the uninterrupted one. Changed ones
        apply from `step` on. Sources are identified by name. A new source starts at its first
        sample. The count of a removed source is retained in case the source returns.
        """
        if state["version"] > VERSION:
            raise UserError(
                f"data: the checkpoint counts its samples in a way ({state['version']}) that is"
                f" newer than this code's ({VERSION}); resume with the code that wrote it, or newer"
            )
        consumed = state["consumed"]
        self._removed = {name: n for name, n in consumed.items() if name not in self.names}
        n = bisect_right(self._phases, step, key=lambda phase: phase.step)
        current = Phase(step, self._phases[n - 1].weights)
        counts = tuple(consumed.get(name, 0) for name in self.names)
        self._segments = self._chain(counts, [current, *self._phases[n:]])

    def _chain(self, counts: tuple[int, ...], phases: Sequence[Phase]) -> list[_Segment]:
        """Return the segments of the phases. `counts` samples precede the first one."""
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
        consumed = segment.consumed(phase.step)
        base = tuple(count - less for count, less in zip(counts, consumed, strict=True))
        return replace(segment, base=base)

    def _at(self, step: int) -> _Segment:
        n = bisect_right(self._segments, step, key=lambda segment: segment.step)
        assert n, f"step {step} lies before the resumed run's first, {self._segments[0].step}"
        return self._segments[n - 1]


def stream_weights(
    streams: Mapping[str, StreamConfig], n_rows: Sequence[int], units: Sequence[float]
) -> tuple[tuple[float, ...], int]:
    """Compute the weight of each stream from `proportion`, or from `choose` and `repeat`.

    Args:
        streams: of the recipe.
        n_rows: sequences of each stream.
        units: how many of what `proportion` is a share of are in a sequence of each stream.

    Returns:
        The weights, and the number of samples in an epoch of the mixture.
    """
    counts = zip(streams.values(), n_rows, units, strict=True)
    parts = [_part(stream, rows, unit) for stream, rows, unit in counts]
    if not sum(parts) > 0:
        raise UserError("data.streams: no stream has a part; give one a choose or repeat above 0")
    if all(stream.proportion is None for stream in streams.values()):
        return tuple(parts), max(1, round(sum(parts)))
    used = (int(rows) for part, rows in zip(parts, n_rows, strict=True) if part > 0)
    return tuple(parts), sum(used)


def _part(stream: StreamConfig, n_rows: int, unit: float) -> float:
    if stream.proportion is not None:
        return stream.proportion / unit
    if stream.choose is not None:
        return float(stream.choose)
    return float(n_rows * (1 if stream.repeat is None else stream.repeat))


def _cumulative(weights: Sequence[float], units: int) -> tuple[int, ...]:
    """Return the cumulative weights, scaled to a total of `units`, as multiples of 2**-40."""
    parts = [Fraction(weight) for weight in weights]
    total = sum(parts)
    assert total > 0, "a phase gives no source a part"
    sums, running = [], Fraction(0)
    for part in parts:
        running += part
        sums.append(round(running / total * units * _ONE))
    return tuple(sums)


def _floor_sum(n: int, modulus: int, factor: int, offset: int) -> int:
    """Return the sum of (factor * i + offset) // modulus over i = 0 … n - 1.

    Computed like Euclid's algorithm, in a number of steps logarithmic in `modulus`.
    """
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
    """Return the part that each slot of a batch belongs to, and its index within that part.

    Slot j of a part of n slots is sorted by (j + offset) / n, so that any range of slots has each
    part in proportion. The offsets differ, because otherwise all small parts would lie in the
    middle of the batch.
    """
    parts = np.arange(len(counts))
    part = np.repeat(parts, counts)
    nth = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (_START + parts * _STEP) % _ONE / _ONE
    order = np.argsort((nth + offsets[part]) / np.array(counts)[part], kind="stable")
    part, nth = part[order], nth[order]
    for array in (part, nth):
        array.setflags(write=False)  # all callers share the cached arrays
    return part, nth
