"""Which sample of which source is slot j of step n: a pure function of the proportions.

Called by the loader. Every batch has each source's part, rounded down or up: the cumulative parts
are laid on a line as long as the batch, and the n-th batch takes the whole numbers on that line
after it is shifted by n golden ratios (systematic sampling). Such shifts fill 0 … 1 as evenly as
any sequence can, so what a source has given stays within a few rows of its part of the run for
ever, and the sum over any number of batches has a closed form: nothing is planned or replayed.

Each phase, and a resumed run, continues counting where what was before it stopped: no change of
proportions repeats or loses a sample, and all that a checkpoint keeps is how many of each source
are given.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from llmfoundry.errors import UserError
from llmfoundry.recipe.source import StreamConfig

ONLY = "data"  # the name of a stream that is alone


def stream_key(name: str) -> str:
    """The recipe's key of a stream."""
    return "data" if name == ONLY else f"data.streams.{name}"


VERSION = 1
# Shifts in units of 2**-40 row. The step is the number next to the golden ratio's part behind the
# point whose continued fraction over 2**40 has no term above 3: even for any number of steps.
_ONE = 1 << 40
_STEP = 679_535_549_441
_START = _ONE >> 1


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

        Raises:
            UserError: a later version wrote the checkpoint.
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

    Args:
        streams: the recipe's.
        n_rows: of each stream.

    Returns:
        The weights, and how many samples an epoch of the mixture has.

    Raises:
        UserError: no stream has a part.
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
