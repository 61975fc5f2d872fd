"""Measure the bus bandwidth between pairs of ranks or nodes, and attribute slow pairs to a cause.

All ranks call `PairTest.measure`, and rank 0 calls `PairRates.slow` and `judge_pairs`. Every pair
is measured by all-reduces in a round-robin tournament: n - 1 rounds of n / 2 pairs that run at the
same time. Slow pairs are attributed to the smallest component that they have in common. A single
slow pair indicates a link, all pairs of a node the node, and all pairs between two halves the
switch between them.
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
"""Numbers of two units (ranks or nodes), the smaller first."""
Rates = Mapping[Pair, float]
"""Bus bandwidth in GB/s; 0: no answer."""
AllReduce = Callable[[Any, Tensor, Pair], None]

WARM_UPS, LEAST, MOST = 2, 5, 100  # warm-up, minimum and maximum repeats of an all-reduce
SECONDS = 0.05  # total time of the repeats of a payload, within these bounds
LEAST_PAIRS = 6  # pairs needed for a comparison
MOSTLY = 0.9  # share of a cause's pairs that must be slow, and of the other pairs that must be good

NVLINK_SHARE = 0.5  # floor of NVLink, as a share of the data sheet
NVLINK, BETWEEN_NODES = "NVLink", "between nodes"  # kinds of links


def tournament(n: int, *, rounds: int | None = None) -> list[list[Pair]]:
    """Return rounds of disjoint pairs that contain each pair of n units once (circle method).

    Args:
        n: number of units; if it is odd, one unit pauses in each round.
        rounds: maximum number of rounds; None: all.
    """
    circle: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    all_rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        all_rounds.append(pairs)
        circle = [circle[0], circle[-1], *circle[1:-1]]  # rotate all units but the first
    return all_rounds[:rounds]


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Distribute pairs over rounds such that no unit is in two pairs of a round."""
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs):
        for candidate in rounds:
            if not any({*pair} & {*other} for other in candidate):
                candidate.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def all_reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
    """All-reduce a tensor over a group and wait for it. Tests replace it with a slower function."""
    group.allreduce([tensor]).wait()


@dataclass(frozen=True)
class PairTest:
    """Test of pairs of units by all-reduces, run by all ranks together.

    Attributes:
        units: ranks of each unit: one rank, or all ranks of a node.
        payloads: sizes of the all-reduces in bytes.
        limit: seconds that a pair may take for a round.
        board: process board of the check.
        device: device of this rank.
        reduce: the all-reduce function.
    """

    units: Sequence[Sequence[int]]
    payloads: Sequence[int]
    limit: float
    board: Board
    device: torch.device
    reduce: AllReduce = all_reduce

    def measure(self, rounds: Sequence[Sequence[Pair]], name: str) -> dict[int, dict[Pair, float]]:
        """Measure rounds of disjoint pairs.

        The board synchronizes the ranks after each round. All pairs of a round therefore load the
        network at the same time, and a pair that hangs costs one time limit.

        Args:
            rounds: rounds of disjoint pairs.
            name: name of the measurement, which separates its process groups in the store.

        Returns:
            Bus bandwidth in GB/s by payload and pair on rank 0, 0 if a pair did not answer; {} on
            the other ranks.
        """
        board = self.board
        result = {n_bytes: dict[Pair, float]() for n_bytes in self.payloads}
        for number, planned in enumerate(rounds):
            # measure this rank's pair of the round; pairs with lost ranks are left out
            pairs = [pair for pair in planned if not board.lost.keys() & {*self._ranks(pair)}]
            local_pair = next((pair for pair in pairs if board.rank in self._ranks(pair)), None)
            local_rates = None
            if local_pair is not None:
                store = board.meeting(f"{name}/{number}/{local_pair[0]}-{local_pair[1]}")
                local_rates = self._rates(local_pair, store)
            rates = board.gather(f"{name}/{number}", local_rates, seconds=2 * self.limit)

            # the rate of a pair is that of its slowest rank
            for pair in pairs:
                answers = [rates.get(rank) for rank in self._ranks(pair)]
                for index, n_bytes in enumerate(self.payloads):
                    result[n_bytes][pair] = min(a[index] if a else 0.0 for a in answers)
        return {} if board.rank else result

    def _ranks(self, pair: Pair) -> list[int]:
        return [rank for unit in pair for rank in self.units[unit]]

    def _rates(self, pair: Pair, store: dist.Store) -> list[float]:
        """Return this rank's GB/s of each payload for a pair; 0 for a failed payload and the rest.

        A process group of the pair (NCCL or gloo) is created and destroyed for it.
        """
        ranks, rates, groups = self._ranks(pair), list[float](), list[Any]()
        size, device = len(ranks), self.device

        def mean(value: float) -> float:
            """Return the mean over the ranks of the pair."""
            total = torch.tensor([value / size], device=device)
            groups[0].allreduce([total]).wait()
            return float(total)

        def reduce() -> None:
            rank, limit = ranks.index(self.board.rank), timedelta(seconds=self.limit)
            groups.append(small_group(store, rank, size, device=device, limit=limit))
            for n_bytes in self.payloads:
                tensor = torch.zeros(max(1, n_bytes // 4), device=device)
                step = partial(self.reduce, groups[0], tensor, pair)
                rates.append(bus_bandwidth(n_bytes, _fastest(step, mean, device), size))

        with suppress(RuntimeError):  # a timeout, or a closed connection
            within(1.5 * self.limit, reduce)  # gloo ends after `limit`, NCCL when the group ends
        measured = rates[:]  # copied, because a late call in the thread may still append
        for group in groups:
            leave_group(group, failed=len(measured) < len(self.payloads))
        return measured + [0.0] * (len(self.payloads) - len(measured))


def _fastest(
    step: Callable[[], None], mean: Callable[[float], float], device: torch.device
) -> float:
    """Return the seconds of the fastest repeat, because other load only makes a repeat slower.

    Short steps are repeated more often, so that a busy moment does not cover all repeats. All ranks
    must run the same number of repeats, which is the `mean` of what the ranks propose.
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
    """Return the bus bandwidth of an all-reduce in GB/s, as in nccl-tests: S/t 2(n-1)/n."""
    return n_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


@dataclass(frozen=True)
class PairRates:
    """Measured rates of pairs.

    Attributes:
        units: devices of each unit: of one rank, or of all ranks of a node.
        rates: GB/s of each pair, by payload in bytes.
        least: the recipe's floor for pairs of nodes; None: none.
        groups: units that are known to share a switch.
    """

    units: Sequence[Sequence[Device]]
    rates: Mapping[int, dict[Pair, float]]
    least: float | None = None
    groups: Sequence[Sequence[int]] = ()

    def keep_best(self, again: Mapping[int, Rates]) -> None:
        """Merge another measurement of some pairs; the faster rate of a pair is kept."""
        for n_bytes, rates in again.items():
            for pair, rate in rates.items():
                self.rates[n_bytes][pair] = max(self.rates[n_bytes].get(pair, 0.0), rate)

    def leave_out(self, units: set[int]) -> None:
        """Remove all pairs of some units."""
        for rates in self.rates.values():
            for pair in [pair for pair in rates if units & {*pair}]:
                del rates[pair]

    def measured(self) -> set[Pair]:
        """Return all measured pairs."""
        return {pair for rates in self.rates.values() for pair in rates}

    def kinds(self) -> dict[Pair, str]:
        """Return the kind of link of each pair."""
        units = self.units
        return {(a, b): link_kind(units[a][0], units[b][0]) for a, b in self.measured()}

    def compared(self) -> set[Pair]:
        """Return the pairs of kinds that have enough pairs for a comparison."""
        kinds = self.kinds()
        counts = Counter(kinds.values())
        return {pair for pair, kind in kinds.items() if counts[kind] >= LEAST_PAIRS}

    def label(self, unit: int) -> str:
        """Return the name of a unit in findings."""
        devices = self.units[unit]
        return devices[0].node if len(devices) > 1 else devices[0].where

    def as_rows(self) -> dict[str, Any]:
        """Return the fields `pairs` and `units` of a report."""
        rows = dict[int, list[tuple[int, int, float]]]()
        for n_bytes, rates in self.rates.items():
            rows[n_bytes] = [(*pair, rate) for pair, rate in rates.items()]
        return {"pairs": rows, "units": [self.label(unit) for unit in range(len(self.units))]}

    def floors(self, n_bytes: int) -> dict[str, float]:
        """Return the floors in GB/s by kind of link.

        Only the largest payload has floors, because the time of small ones is mostly latency.
        """
        if n_bytes < max(self.rates):
            return {}
        known = known_gpu(self.units[0][0].name)
        speed = GPUS[known].link_gb_s if known and GPUS[known].switched else 0.0
        nodes = {} if self.least is None else {BETWEEN_NODES: self.least}
        return {NVLINK: NVLINK_SHARE * speed} | nodes

    def slow(self) -> dict[Pair, str]:
        """Return pairs that are slow at any payload, with the reason at the largest one."""
        kinds, reasons = self.kinds(), dict[Pair, str]()
        limits = LIMITS[self.units[0][0].kind]
        for n_bytes, rates in sorted(self.rates.items(), reverse=True):
            slow = slow_pairs(rates, kinds, effect=limits.pairs, spread=limits.pair_spread,
                              floors=self.floors(n_bytes))  # fmt: skip
            for pair, why in slow.items():
                reasons.setdefault(pair, f"{in_units(n_bytes)}: {why}")
        return reasons

    def broken(self) -> set[Pair]:
        """Return pairs that are slow without a comparison: no answer, or below a floor."""
        kinds = self.kinds()
        return {
            pair
            for n_bytes, rates in self.rates.items()
            for pair, rate in rates.items()
            if rate <= 0 or rate < self.floors(n_bytes).get(kinds[pair], 0.0)
        }


def link_kind(a: Device, b: Device) -> str:
    """Return the kind of link between two devices."""
    if a.node != b.node:
        return BETWEEN_NODES
    if a.has_nvlink and b.has_nvlink:
        return NVLINK
    return "in a node" if a.numa == b.numa else "in a node, across sockets"


def in_units(n_bytes: int) -> str:
    """Return a payload in decimal units, as in recipes: 64 MB."""
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
    """Return slow pairs with reasons.

    Args:
        rates: rates of one payload.
        kinds: kind of link of each pair; only pairs of one kind are compared.
        effect: minimum deficit of a slow rate, as a share of the median.
        spread: minimum standard deviation of a rate to assume, as a share.
        floors: rate that each kind of link must reach; None: not known.
    """
    by_kind: dict[str, dict[Pair, float]] = defaultdict(dict)
    for pair, rate in rates.items():
        by_kind[kinds.get(pair, "")][pair] = rate
    reasons: dict[Pair, str] = {}
    for kind, kind_rates in by_kind.items():
        # compared with the other pairs of the kind: single outliers, then a slower class
        if len(kind_rates) >= LEAST_PAIRS:
            for out in too_small(kind_rates, effect=effect, spread=spread):
                reasons[out.name] = f"{_rate(out.value)}, usual {_rate(out.usual or 0)}"
        for pair, why in _slower_class(kind_rates, effect=effect, spread=spread).items():
            reasons.setdefault(pair, why)

        # no answer, or below the floor
        floor = (floors or {}).get(kind, 0.0)
        for pair, rate in kind_rates.items():
            if rate <= 0:
                reasons[pair] = "no answer"
            elif rate < floor:
                reasons[pair] = f"{_rate(rate)}, less than {_rate(floor)}"
    return reasons


def _rate(value: float) -> str:
    return f"{value:.3g} GB/s"


def _slower_class(rates: Rates, *, effect: float, spread: float) -> dict[Pair, str]:
    """Return the slower of two classes of pairs, if a wide gap separates their rates.

    Behind a bad switch half of the pairs or more are slow, and so is the median. There are then no
    outliers. The rates are therefore split at their widest gap. The classes must differ by more
    than the effect, and the gap must be wider than chance explains.
    """
    known = sorted((rate, pair) for pair, rate in rates.items() if rate > 0)
    if len(known) < LEAST_PAIRS:
        return {}
    logs = [math.log(rate) for rate, _ in known]
    # split at the widest gap
    gap, split = max((b - a, n + 1) for n, (a, b) in enumerate(pairwise(logs)))
    slow, fast = logs[:split], logs[split:]
    # compare the gap with the spread within the classes, and the medians with the effect
    sigma = max(spread, *(robust_sigma(part) for part in (slow, fast) if len(part) > 2))
    difference = statistics.median(fast) - statistics.median(slow)
    if len(fast) < 2 or gap < MOST_Z * sigma or difference < -math.log1p(-effect):
        return {}
    usual = math.exp(statistics.median(fast))
    return {pair: f"{_rate(rate)}, the faster pairs {_rate(usual)}" for rate, pair in known[:split]}


@dataclass(frozen=True)
class PairFault:
    """A cause of slow pairs.

    Attributes:
        kind: `all` (all pairs are slow), `unit` (all pairs of one unit), `units` (all pairs of
            several units), `between` (all pairs between two groups) or `pair` (one pair).
        units: the unit or units, the smaller group, or the two units of the pair.
        others: the larger group of `between`.
        pairs: slow pairs that it explains.
    """

    kind: str
    units: tuple[int, ...]
    others: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()


def blame(
    slow: Iterable[Pair], measured: Iterable[Pair], *, groups: Sequence[Iterable[int]] = ()
) -> list[PairFault]:
    """Return the fewest causes that explain the slow pairs.

    Args:
        slow: slow pairs.
        measured: all pairs.
        groups: units that are known to share a switch.
    """
    bad, seen = set(slow), set(measured)
    if len(bad) > 1 and bad == seen:
        return [PairFault("all", tuple(_units(bad)), pairs=tuple(sorted(bad)))]

    # slow units; their pairs are explained
    causes = _slow_units(bad, seen)
    blamed_units = {unit for cause in causes for unit in cause.units}
    bad = {pair for pair in bad if not blamed_units & {*pair}}
    seen = {pair for pair in seen if not blamed_units & {*pair}}

    # a switch between two groups; each remaining slow pair is its own cause
    between = _between(bad, seen, groups)
    if between is not None:
        causes.append(between)
        bad -= {*between.pairs}
    return [*causes, *(PairFault("pair", pair, pairs=(pair,)) for pair in sorted(bad))]


def _units(pairs: Iterable[Pair]) -> list[int]:
    return sorted({unit for pair in pairs for unit in pair})


def _share(pairs: set[Pair], bad: set[Pair]) -> float:
    return len(pairs & bad) / len(pairs) if pairs else 0.0


def _slow_units(bad: set[Pair], seen: set[Pair]) -> list[PairFault]:
    """Return the units all of whose pairs are slow; many such units are one cause."""
    units = _units(seen)
    pairs_of = {unit: {pair for pair in seen if unit in pair} for unit in units}
    slow = list[int]()
    for unit, pairs in pairs_of.items():
        if len(pairs) > 1 and _share(pairs, bad) >= MOSTLY:
            slow.append(unit)
    if len(slow) == len(units):  # all units are slow, so none can be blamed
        return []
    if len(slow) <= max(1, len(units) // 4):
        faults = list[PairFault]()
        for unit in slow:
            explained = tuple(sorted(pairs_of[unit] & bad))
            faults.append(PairFault("unit", (unit,), pairs=explained))
        return faults
    slow_pairs = {pair for unit in slow for pair in pairs_of[unit] & bad}
    return [PairFault("units", tuple(slow), pairs=tuple(sorted(slow_pairs)))]


def _between(bad: set[Pair], seen: set[Pair], groups: Sequence[Iterable[int]]) -> PairFault | None:
    """Return two groups whose pairs are good within each group and slow between the groups."""
    units = {*_units(seen)}
    best: PairFault | None = None
    for one in _candidates(sorted(units), seen - bad, groups):
        other = units - one
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
    """Yield groups that may be one side of a switch."""
    # known groups, and groups of consecutive numbers
    yield from ({*group} & {*everyone} for group in groups)
    yield from ({*everyone[:end]} for end in range(2, len(everyone) - 1))

    # components of units that are connected by good pairs
    component_of = {unit: {unit} for unit in everyone}
    for a, b in sound:
        if component_of[a] is not component_of[b]:
            component_of[a] |= component_of[b]
            for unit in component_of[b]:
                component_of[unit] = component_of[a]
    yield from component_of.values()


def is_explained(
    slow: Iterable[Pair], measured: Iterable[Pair], blamed: Sequence[PairFault]
) -> bool:
    """Return whether the slow pairs are few or have a pattern.

    Many slow pairs without a pattern are more likely links of two kinds.
    """
    bad, seen = {*slow}, {*measured}
    single = {pair for each in blamed if each.kind == "pair" for pair in each.pairs}
    return len(bad) <= len(seen) / 4 or len(single) <= len(bad) * (1 - MOSTLY)


def judge_pairs(pairs: PairRates, confirmed: Mapping[Pair, str]) -> list[Finding]:
    """Return findings: the causes of slow pairs, and the rates of the other pairs.

    Args:
        pairs: all rates.
        confirmed: pairs that were slow in each measurement, with the reason.
    """
    measured, compared = pairs.measured(), pairs.compared() | {*confirmed}
    blamed = blame(confirmed, compared, groups=pairs.groups)
    findings: list[Finding] = []

    # slower pairs without a pattern are only a notice
    slower = {*confirmed} - pairs.broken()
    if slower and not is_explained(confirmed, compared, blamed):
        count = f"{len(slower)} of {len(measured)} pairs are slower than the others"
        why = f"{count}, in no pattern: two kinds of links, or other work on them"
        action = "check again while it is quiet"
        findings.append(Finding("pairs", NOTICE, "the network", why, action))
        blamed = blame({*confirmed} - slower, compared, groups=pairs.groups)
    findings += [_blamed(pairs, cause, confirmed) for cause in blamed]

    # the range of good pairs
    largest = max(pairs.rates)
    good = [r for pair, r in pairs.rates[largest].items() if pair not in confirmed and r > 0]
    if good:
        count = f"{len(measured) - len(confirmed)} of {len(measured)} pairs are sound"
        why = f"{count}: {least_to_most(good)} GB/s at {in_units(largest)}"
        findings.append(Finding("pairs", SOUND, "the network", why))
    return findings


def _blamed(pairs: PairRates, cause: PairFault, reasons: Mapping[Pair, str]) -> Finding:
    """Return the finding of a cause."""
    # the units, their nodes, and the other group
    names, count = [pairs.label(unit) for unit in cause.units], len(cause.pairs)
    devices = [device for unit in cause.units for device in pairs.units[unit]]
    nodes = tuple(dict.fromkeys(device.node for device in devices))
    others = ", ".join(pairs.label(unit) for unit in cause.others)

    # description and action
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
    }[cause.kind]
    where = {"all": "the network", "pair": " - ".join(names)}.get(cause.kind, ", ".join(names))
    counted = f"{count} pairs; " if cause.kind == "between" else ""
    why = f"{why} ({counted}{reasons[cause.pairs[0]]})"
    bad_nodes = nodes if cause.kind in ("unit", "units") else ()
    return Finding("pairs", BAD, where, why, action, bad_nodes)
