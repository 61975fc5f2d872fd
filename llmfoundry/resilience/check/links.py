"""Bus bandwidth between pairs of processes or nodes: measured by all-reduces, and who is to blame.

All processes call `PairTest.measure`, rank 0 `PairRates.slow` and `judge_pairs`. The idea: one
slow pair names a link, all pairs of a node name the node, and all pairs between two halves name the
switch between them; so every pair is measured (a round-robin tournament: n - 1 rounds of n / 2
pairs that run at one time), and the blame is the smallest thing that all slow pairs have in common.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.ops.torch_private import leave_group, small_group
from llmfoundry.recipe.hardware import GPUS, known_gpu
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, Finding
from llmfoundry.resilience.check.outliers import MOST_Z, robust_sigma, too_small
from llmfoundry.resilience.check.process_board import Board
from llmfoundry.resilience.check.speeds import LIMITS, Device, least_to_most
from llmfoundry.retry import within

Pair = tuple[int, int]
"""Numbers of two units (processes or nodes), the smaller first."""
Rates = Mapping[Pair, float]
"""Bus bandwidth in GB/s; 0: no answer."""
AllReduce = Callable[[Any, Tensor, Pair], None]

WARM_UPS, LEAST, MOST = 2, 5, 100  # repeats of an all-reduce
SECONDS = 0.05  # of the repeats of a payload, within these bounds
LEAST_PAIRS = 6  # measured, before any is compared with the others
MOSTLY = 0.9  # of the pairs that a blame explains must be slow, and of those beside it sound

NVLINK_SHARE = 0.5  # of the data sheet: the floor
NVLINK, BETWEEN_NODES = "NVLink", "between nodes"  # kinds of links


def tournament(n: int, *, rounds: int | None = None) -> list[list[Pair]]:
    """Rounds of disjoint pairs, every pair of n units once (the circle method); or the first ones.

    An odd unit rests in each round.
    """
    places: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found[:rounds]


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Rounds in which no unit has two of the pairs."""
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (r for r in rounds if not any({*pair} & {*other} for other in r))
        if (own := next(free, None)) is None:
            rounds.append(own := [])
        own.append(pair)
    return rounds


def all_reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
    """The sum over a group, waited for; tests replace it by a slower one."""
    group.allreduce([tensor]).wait()


@dataclass(frozen=True)
class PairTest:
    """All-reduces of pairs of units, measured by all processes together.

    Attributes:
        units: the ranks of each: one process, or all of a node.
        payloads: bytes of the all-reduces.
        limit: seconds that a pair may take for a round.
        board: of the check.
        device: of this process.
        reduce: the all-reduce.
    """

    units: Sequence[Sequence[int]]
    payloads: Sequence[int]
    limit: float
    board: Board
    device: torch.device
    reduce: AllReduce = all_reduce

    def measure(self, rounds: Sequence[Sequence[Pair]], name: str) -> dict[int, dict[Pair, float]]:
        """GB/s by payload and pair, on rank 0; 0 where a pair gave no answer; {} on the others.

        The pairs of a round are disjoint. Rounds are kept in step through the board, so that all of
        a round load the network at one time and a pair that hangs costs one time limit, not the
        check. `name`: groups of another measurement meet elsewhere in the store.
        """
        board, found = self.board, {n: dict[Pair, float]() for n in self.payloads}
        for number, every in enumerate(rounds):
            pairs = [pair for pair in every if not board.lost.keys() & {*self._ranks(pair)}]
            own = next((pair for pair in pairs if board.rank in self._ranks(pair)), None)
            rates = None
            if own is not None:
                rates = self._rates(own, board.meeting(f"{name}/{number}/{own[0]}-{own[1]}"))
            came = board.gather(f"{name}/{number}", rates, seconds=2 * self.limit)
            for pair in pairs:
                answers = [came.get(rank) for rank in self._ranks(pair)]
                for index, n_bytes in enumerate(self.payloads):
                    found[n_bytes][pair] = min(a[index] if a else 0.0 for a in answers)
        return {} if board.rank else found

    def _ranks(self, pair: Pair) -> list[int]:
        return [rank for unit in pair for rank in self.units[unit]]

    def _rates(self, pair: Pair, store: dist.Store) -> list[float]:
        """GB/s of each payload for this pair, as this process sees it; 0 from where it failed on.

        The group, over NCCL or gloo, is made for the pair and left after it.
        """
        ranks, rates, groups = self._ranks(pair), list[float](), list[Any]()
        size, device = len(ranks), self.device

        def mean(value: float) -> float:
            """Of the pair's processes, the same on each."""
            shared = torch.tensor([value / size], device=device)
            groups[0].allreduce([shared]).wait()
            return float(shared)

        def reduce() -> None:
            rank, limit = ranks.index(self.board.rank), timedelta(seconds=self.limit)
            groups.append(small_group(store, rank, size, device=device, limit=limit))
            for n_bytes in self.payloads:
                tensor = torch.zeros(max(1, n_bytes // 4), device=device)
                step = partial(self.reduce, groups[0], tensor, pair)
                rates.append(bus_bandwidth(n_bytes, _fastest(step, mean, device), size))

        with suppress(RuntimeError):  # a time limit, a connection that was closed
            within(1.5 * self.limit, reduce)  # gloo ends after `limit`, NCCL waits until it is left
        reached = rates[:]  # what comes later, from a call that is late, is not an answer
        for group in groups:
            leave_group(group, failed=len(reached) < len(self.payloads))
        return reached + [0.0] * (len(self.payloads) - len(reached))


def _fastest(
    step: Callable[[], None], mean: Callable[[float], float], device: torch.device
) -> float:
    """Seconds of the fastest of some repeats: what else the machine does only makes it slower.

    Many where they are short, so that one busy moment is not all of them. As each process must take
    part in each, their number is the `mean` of what the processes propose.
    """

    def timed() -> float:
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    warm = min(timed() for _ in range(WARM_UPS))
    times = round(mean(min(MOST, max(LEAST, SECONDS / max(warm, 1e-9)))))
    return max(min(timed() for _ in range(times)), 1e-9)


def bus_bandwidth(n_bytes: int, seconds: float, ranks: int) -> float:
    """GB/s of an all-reduce, as nccl-tests counts it: S/t 2(n-1)/n, whatever n."""
    return n_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


@dataclass(frozen=True)
class PairRates:
    """What pairs reached.

    Attributes:
        units: the devices of each unit: one process's, or all of a node.
        rates: by payload in bytes.
        least: a floor for pairs of nodes, by the recipe; None: none.
        groups: units that are known to share a switch.
    """

    units: Sequence[Sequence[Device]]
    rates: Mapping[int, dict[Pair, float]]
    least: float | None = None
    groups: Sequence[Sequence[int]] = ()

    def keep_best(self, again: Mapping[int, Rates]) -> None:
        """Add another measurement of some of the pairs."""
        for n_bytes, own in again.items():
            for pair, rate in own.items():
                self.rates[n_bytes][pair] = max(self.rates[n_bytes].get(pair, 0.0), rate)

    def leave_out(self, units: set[int]) -> None:
        """Forget all pairs of some units."""
        for own in self.rates.values():
            for pair in [pair for pair in own if units & {*pair}]:
                del own[pair]

    def measured(self) -> set[Pair]:
        """All pairs, of any payload."""
        return {pair for own in self.rates.values() for pair in own}

    def kinds(self) -> dict[Pair, str]:
        """What lies between each pair."""
        units = self.units
        return {(a, b): link_kind(units[a][0], units[b][0]) for a, b in self.measured()}

    def compared(self) -> set[Pair]:
        """Pairs of whose kind there are enough; two processes of a node are mostly alone there."""
        kinds = self.kinds()
        often = Counter(kinds.values())
        return {pair for pair, kind in kinds.items() if often[kind] >= LEAST_PAIRS}

    def label(self, unit: int) -> str:
        """A unit as findings name it."""
        devices = self.units[unit]
        return devices[0].node if len(devices) > 1 else devices[0].where

    def as_rows(self) -> dict[str, Any]:
        """What a report has of them."""
        rows = {n: [(*pair, rate) for pair, rate in own.items()] for n, own in self.rates.items()}
        return {"pairs": rows, "units": [self.label(unit) for unit in range(len(self.units))]}

    def floors(self, n_bytes: int) -> dict[str, float]:
        """GB/s by kind of link, of the largest payload; small ones are a matter of latency."""
        if n_bytes < max(self.rates):
            return {}
        known = known_gpu(self.units[0][0].name)
        speed = GPUS[known].link_gb_s if known and GPUS[known].switched else 0.0
        nodes = {} if self.least is None else {BETWEEN_NODES: self.least}
        return {NVLINK: NVLINK_SHARE * speed} | nodes

    def slow(self) -> dict[Pair, str]:
        """Pairs that are slow at any payload, with the reason of the largest."""
        kinds, found = self.kinds(), dict[Pair, str]()
        limits = LIMITS[self.units[0][0].kind]
        for n_bytes, rates in sorted(self.rates.items(), reverse=True):
            slow = slow_pairs(rates, kinds, effect=limits.pairs, spread=limits.pair_spread,
                              floors=self.floors(n_bytes))  # fmt: skip
            for pair, why in slow.items():
                found.setdefault(pair, f"{in_units(n_bytes)}: {why}")
        return found

    def broken(self) -> set[Pair]:
        """Pairs that are slow whatever the others are: without an answer, or below a floor."""
        kinds = self.kinds()
        return {
            pair
            for n_bytes, rates in self.rates.items()
            for pair, rate in rates.items()
            if rate <= 0 or rate < self.floors(n_bytes).get(kinds[pair], 0.0)
        }


def link_kind(a: Device, b: Device) -> str:
    """What lies between two processes' devices."""
    if a.node != b.node:
        return BETWEEN_NODES
    if a.has_nvlink and b.has_nvlink:
        return NVLINK
    return "in a node" if a.numa == b.numa else "in a node, across sockets"


def in_units(n_bytes: int) -> str:
    """A payload as recipes write it, in decimal units: 64 MB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes} B"


def slow_pairs(
    rates: Rates,
    kinds: Mapping[Pair, str],
    *,
    effect: float,
    spread: float,
    floors: Mapping[str, float] | None = None,
) -> dict[Pair, str]:
    """Pairs that are too slow, each with why; compared among pairs of one kind of link.

    Args:
        rates: of one payload.
        kinds: what lies between the two: only like is compared with like.
        effect: the share by which a rate must be smaller than is usual.
        spread: least standard deviation of a rate, as a share.
        floors: what each kind must reach, where that is known.
    """
    by_kind: dict[str, dict[Pair, float]] = defaultdict(dict)
    for pair, rate in rates.items():
        by_kind[kinds.get(pair, "")][pair] = rate
    found: dict[Pair, str] = {}
    for kind, own in by_kind.items():
        if len(own) >= LEAST_PAIRS:
            for out in too_small(own, effect=effect, spread=spread):
                found[out.name] = f"{_rate(out.value)}, usual {_rate(out.usual or 0)}"
        for pair, why in _slower_class(own, effect=effect, spread=spread).items():
            found.setdefault(pair, why)
        floor = (floors or {}).get(kind, 0.0)
        for pair, rate in own.items():
            if rate <= 0:
                found[pair] = "no answer"
            elif rate < floor:
                found[pair] = f"{_rate(rate)}, less than {_rate(floor)}"
    return found


def _rate(value: float) -> str:
    return f"{value:.3g} GB/s"


def _slower_class(rates: Rates, *, effect: float, spread: float) -> dict[Pair, str]:
    """The slow of two classes, where a gap parts them; a half of all pairs has no outliers.

    Behind a bad switch half of the pairs are slow, or more, and the median is one of them. So the
    rates are split at their widest gap. The classes must differ by more than the effect, and the
    gap be wider than chance makes it within either.
    """
    known = sorted((rate, pair) for pair, rate in rates.items() if rate > 0)
    if len(known) < LEAST_PAIRS:
        return {}
    logs = [math.log(rate) for rate, _ in known]
    gap, split = max((b - a, n + 1) for n, (a, b) in enumerate(pairwise(logs)))
    slow, fast = logs[:split], logs[split:]
    sigma = max(spread, *(robust_sigma(part) for part in (slow, fast) if len(part) > 2))
    apart = statistics.median(fast) - statistics.median(slow)
    if len(fast) < 2 or gap < MOST_Z * sigma or apart < -math.log1p(-effect):
        return {}
    usual = math.exp(statistics.median(fast))
    return {pair: f"{_rate(rate)}, the faster pairs {_rate(usual)}" for rate, pair in known[:split]}


@dataclass(frozen=True)
class PairFault:
    """What some slow pairs have in common.

    Attributes:
        kind: `all` (every pair), `unit` (all pairs of one), `units` (all pairs of several),
            `between` (all pairs from one group to the other) or `pair`.
        units: the one, the several, the smaller group, or the two.
        others: the other group, of `between`.
        pairs: the slow pairs that it explains.
    """

    kind: str
    units: tuple[int, ...]
    others: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()


def blame(
    slow: Iterable[Pair], measured: Iterable[Pair], *, groups: Sequence[Iterable[int]] = ()
) -> list[PairFault]:
    """The fewest things that explain the slow pairs; those left over stand for themselves.

    `groups`: units that are known to share a switch, each group a candidate.
    """
    bad, seen = set(slow), set(measured)
    if len(bad) > 1 and bad == seen:
        return [PairFault("all", tuple(_units(bad)), pairs=tuple(sorted(bad)))]
    found = _slow_units(bad, seen)
    gone = {unit for each in found for unit in each.units}
    bad = {pair for pair in bad if not gone & {*pair}}
    seen = {pair for pair in seen if not gone & {*pair}}
    if between := _between(bad, seen, groups):
        found.append(between)
        bad -= {*between.pairs}
    return [*found, *(PairFault("pair", pair, pairs=(pair,)) for pair in sorted(bad))]


def _units(pairs: Iterable[Pair]) -> list[int]:
    return sorted({unit for pair in pairs for unit in pair})


def _share(pairs: set[Pair], bad: set[Pair]) -> float:
    return len(pairs & bad) / len(pairs) if pairs else 0.0


def _slow_units(bad: set[Pair], seen: set[Pair]) -> list[PairFault]:
    """Units all of whose pairs are slow; several of them are one finding if they are many."""
    everyone = _units(seen)
    own = {unit: {pair for pair in seen if unit in pair} for unit in everyone}
    slow = [unit for unit, pairs in own.items() if len(pairs) > 1 and _share(pairs, bad) >= MOSTLY]
    if len(slow) == len(everyone):  # all is slow: nothing tells them apart
        return []
    if len(slow) <= max(1, len(everyone) // 4):
        return [PairFault("unit", (unit,), pairs=tuple(sorted(own[unit] & bad))) for unit in slow]
    every = {pair for unit in slow for pair in own[unit] & bad}
    return [PairFault("units", tuple(slow), pairs=tuple(sorted(every)))]


def _between(bad: set[Pair], seen: set[Pair], groups: Sequence[Iterable[int]]) -> PairFault | None:
    """Two groups within which pairs are sound, and between which they are slow."""
    everyone = {*_units(seen)}
    best: PairFault | None = None
    for one in _candidates(sorted(everyone), seen - bad, groups):
        other = everyone - one
        across = {pair for pair in seen if (pair[0] in one) != (pair[1] in one)}
        is_split = _share(across, bad) >= MOSTLY and _share(seen - across, bad) <= 1 - MOSTLY
        if min(len(one), len(other)) < 2 or len(across) < 3 or not is_split:
            continue
        explained = tuple(sorted(across & bad))
        if best is None or len(explained) > len(best.pairs):
            few, many = sorted((sorted(one), sorted(other)), key=lambda g: (len(g), g))
            best = PairFault("between", tuple(few), tuple(many), explained)
    return best


def _candidates(
    everyone: Sequence[int], sound: set[Pair], groups: Sequence[Iterable[int]]
) -> Iterator[set[int]]:
    """Groups that may be one side of a switch.

    Those that are known, those of consecutive numbers, and those that reach each other.
    """
    yield from ({*group} & {*everyone} for group in groups)
    yield from ({*everyone[:end]} for end in range(2, len(everyone) - 1))
    reached = {unit: {unit} for unit in everyone}
    for a, b in sound:
        if reached[a] is not reached[b]:
            reached[a] |= reached[b]
            for unit in reached[b]:
                reached[unit] = reached[a]
    yield from reached.values()


def is_explained(
    slow: Iterable[Pair], measured: Iterable[Pair], blamed: Sequence[PairFault]
) -> bool:
    """Whether the slow pairs are a pattern, or few; many without one are two kinds of links."""
    bad, seen = {*slow}, {*measured}
    single = {pair for each in blamed if each.kind == "pair" for pair in each.pairs}
    return len(bad) <= len(seen) / 4 or len(single) <= len(bad) * (1 - MOSTLY)


def judge_pairs(pairs: PairRates, confirmed: Mapping[Pair, str]) -> list[Finding]:
    """Who is to blame for the pairs that were slow each time, and what the others reach."""
    measured, compared = pairs.measured(), pairs.compared() | {*confirmed}
    blamed = blame(confirmed, compared, groups=pairs.groups)
    found: list[Finding] = []
    slower = {*confirmed} - pairs.broken()
    if slower and not is_explained(confirmed, compared, blamed):
        count = f"{len(slower)} of {len(measured)} pairs are slower than the others"
        why = f"{count}, in no pattern: two kinds of links, or other work on them"
        found.append(Finding("pairs", NOTICE, "the network", why, "check again while it is quiet"))
        blamed = blame({*confirmed} - slower, compared, groups=pairs.groups)
    found += [_blamed(pairs, each, confirmed) for each in blamed]
    most = max(pairs.rates)
    best = [r for pair, r in pairs.rates[most].items() if pair not in confirmed and r > 0]
    if best:
        count = f"{len(measured) - len(confirmed)} of {len(measured)} pairs are sound"
        why = f"{count}: {least_to_most(best)} GB/s at {in_units(most)}"
        found.append(Finding("pairs", SOUND, "the network", why))
    return found


def _blamed(pairs: PairRates, each: PairFault, reasons: Mapping[Pair, str]) -> Finding:
    names, count = [pairs.label(unit) for unit in each.units], len(each.pairs)
    nodes = tuple(dict.fromkeys(d.node for unit in each.units for d in pairs.units[unit]))
    others = ", ".join(pairs.label(unit) for unit in each.others)
    why, action = {
        "unit": (f"all {count} pairs of it are slow", "look at its ports, cards and cables"),
        "all": (
            f"all {count} pairs are slow",
            "look at NCCL's settings, the network's driver and cards, and the switches",
        ),
        "units": (
            f"all {count} pairs of these are slow",
            "look at the switch that they share, else at each of them",
        ),
        "between": (
            f"slow to {others}, sound among themselves",
            "look at the switch or the uplinks between these halves",
        ),
        "pair": (
            "this pair alone is slow",
            "look at the cable, the ports and the route between the two",
        ),
    }[each.kind]
    where = {"all": "the network", "pair": " - ".join(names)}.get(each.kind, ", ".join(names))
    counted = f"{count} pairs; " if each.kind == "between" else ""
    why = f"{why} ({counted}{reasons[each.pairs[0]]})"
    return Finding(
        "pairs", BAD, where, why, action, nodes if each.kind in ("unit", "units") else ()
    )
