"""Bus bandwidth between pairs of processes or nodes: measured by all-reduces, and who is to blame.

All processes call `measure`; rank 0 compares and blames. The idea: one slow pair names a link, all
pairs of a node name the node, and all pairs between two halves name the switch between them; so
every pair is measured (a round-robin tournament: n - 1 rounds of n / 2 pairs that run at one time),
and the blame is the smallest thing that all slow pairs have in common.

Each process joins a group of its own in every round, over NCCL or gloo, destroyed after it. Rounds
are kept in step through the board, so that all pairs of a round load the network at one time and a
pair that hangs costs one time limit, not the check.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.ops.torch_private import leave_group, small_group
from llmfoundry.resilience.check.outliers import MOST_Z, TO_SIGMA, too_small
from llmfoundry.resilience.check.process_board import Board
from llmfoundry.retry import within

Pair = tuple[int, int]
"""Numbers of two units (processes or nodes), the smaller first."""
Rates = Mapping[Pair, float]

MOSTLY = 0.9  # of the pairs that a blame explains must be slow, and of those beside it sound
LEAST_PAIRS = 6  # measured, before any is compared with the others


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
    """Rounds in which nobody has two of the pairs."""
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (r for r in rounds if not any({*pair} & {*other} for other in r))
        own = next(free, None)
        if own is None:
            rounds.append([pair])
        else:
            own.append(pair)
    return rounds


def bus_bandwidth(n_bytes: int, seconds: float, ranks: int) -> float:
    """GB/s of an all-reduce, as nccl-tests counts it: S/t 2(n-1)/n, whatever n."""
    return n_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


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
        rates: bus bandwidth by pair; 0: no answer.
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
        floor = (floors or {}).get(kind)
        for outlier in too_small(own if len(own) >= LEAST_PAIRS else {}, effect=effect,
                                 spread=spread):  # fmt: skip
            found[outlier.name] = f"{_rate(outlier.value)}, usual {_rate(outlier.usual or 0)}"
        for pair, why in _slower_class(own, effect=effect, spread=spread).items():
            found.setdefault(pair, why)
        for pair, rate in own.items():
            if rate <= 0:
                found[pair] = "no answer"
            elif floor is not None and rate < floor:
                found[pair] = f"{_rate(rate)}, less than {_rate(floor)}"
    return found


def _rate(value: float) -> str:
    return f"{value:.3g} GB/s"


def _slower_class(rates: Rates, *, effect: float, spread: float) -> dict[Pair, str]:
    """The slow of two classes, where a gap parts them; a half of all pairs has no outliers.

    Behind a bad switch half of the pairs are slow, or more, and the median is one of them. So the
    rates are cut at their widest gap. The classes must differ by more than the effect, and the gap
    be wider than chance makes it within either.
    """
    known = sorted((rate, pair) for pair, rate in rates.items() if rate > 0)
    if len(known) < LEAST_PAIRS:
        return {}
    logs = [math.log(rate) for rate, _ in known]
    gap, cut = max((b - a, n + 1) for n, (a, b) in enumerate(pairwise(logs)))
    slow, fast = logs[:cut], logs[cut:]
    sigma = max(spread, *(_sigma(part) for part in (slow, fast)))
    apart = statistics.median(fast) - statistics.median(slow)
    if len(fast) < 2 or gap < MOST_Z * sigma or apart < -math.log1p(-effect):
        return {}
    usual = math.exp(statistics.median(fast))
    return {pair: f"{_rate(rate)}, the faster pairs {_rate(usual)}" for rate, pair in known[:cut]}


def _sigma(logs: Sequence[float]) -> float:
    if len(logs) < 3:
        return 0.0
    middle = statistics.median(logs)
    return TO_SIGMA * statistics.median(abs(value - middle) for value in logs)


@dataclass(frozen=True)
class Blame:
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
) -> list[Blame]:
    """The fewest things that explain the slow pairs; those left over stand for themselves.

    Args:
        slow: pairs that are too slow.
        measured: all pairs that were measured.
        groups: units that are known to share a switch, each group a candidate.
    """
    bad, seen = set(slow), set(measured)
    found: list[Blame] = []
    if len(bad) > 1 and bad == seen:
        everyone = sorted({unit for pair in bad for unit in pair})
        return [Blame("all", tuple(everyone), pairs=tuple(sorted(bad)))]
    units = _whole_units(bad, seen)
    if units:
        found += units
        gone = {unit for each in units for unit in each.units}
        bad = {pair for pair in bad if not gone & {*pair}}
        seen = {pair for pair in seen if not gone & {*pair}}
    if between := _between(bad, seen, groups):
        found.append(between)
        bad -= {*between.pairs}
    return [*found, *(Blame("pair", pair, pairs=(pair,)) for pair in sorted(bad))]


def _whole_units(bad: set[Pair], seen: set[Pair]) -> list[Blame]:
    """Units all of whose pairs are slow; several of them are one finding if they are many."""
    everyone = sorted({unit for pair in seen for unit in pair})
    own = {unit: {pair for pair in seen if unit in pair} for unit in everyone}
    whole = [unit for unit, pairs in own.items() if len(pairs) > 1 and _share(pairs, bad) >= MOSTLY]
    if len(whole) == len(everyone):  # all is slow: nothing is told apart
        return []
    blamed = {unit: tuple(sorted(own[unit] & bad)) for unit in whole}
    if len(whole) <= max(1, len(everyone) // 4):
        return [Blame("unit", (unit,), pairs=pairs) for unit, pairs in blamed.items()]
    every = tuple(sorted({pair for pairs in blamed.values() for pair in pairs}))
    return [Blame("units", tuple(whole), pairs=every)]


def _between(bad: set[Pair], seen: set[Pair], groups: Sequence[Iterable[int]]) -> Blame | None:
    """Two groups within which pairs are sound, and between which they are slow."""
    everyone = sorted({unit for pair in seen for unit in pair})
    best: tuple[int, Blame] | None = None
    for one in _candidates(everyone, seen - bad, groups):
        other = set(everyone) - one
        if min(len(one), len(other)) < 2:
            continue
        across = {pair for pair in seen if (pair[0] in one) != (pair[1] in one)}
        inside = seen - across
        if len(across) < 3 or _share(across, bad) < MOSTLY or _share(inside, bad) > 1 - MOSTLY:
            continue
        explained = tuple(sorted(across & bad))
        few, many = sorted((sorted(one), sorted(other)), key=lambda g: (len(g), g))
        if best is None or len(explained) > best[0]:
            best = len(explained), Blame("between", tuple(few), tuple(many), explained)
    return best and best[1]


def _candidates(
    everyone: Sequence[int], sound: set[Pair], groups: Sequence[Iterable[int]]
) -> Iterator[set[int]]:
    """Groups that may be one side of a switch.

    Those that are known, neighbours by number, and those that reach each other.
    """
    yield from ({*group} & {*everyone} for group in groups)
    yield from ({*everyone[:cut]} for cut in range(2, len(everyone) - 1))
    reached = {unit: {unit} for unit in everyone}
    for a, b in sound:
        if reached[a] is not reached[b]:
            reached[a] |= reached[b]
            for unit in reached[b]:
                reached[unit] = reached[a]
    yield from reached.values()


def _share(pairs: set[Pair], bad: set[Pair]) -> float:
    return len(pairs & bad) / len(pairs) if pairs else 0.0


def is_explained(slow: Iterable[Pair], measured: Iterable[Pair], blamed: Sequence[Blame]) -> bool:
    """Whether the slow pairs are a pattern, or few; many without one are two kinds of links."""
    bad, seen = {*slow}, {*measured}
    single = {pair for each in blamed if each.kind == "pair" for pair in each.pairs}
    return len(bad) <= len(seen) / 4 or len(single) <= len(bad) * (1 - MOSTLY)


def all_pairs(n: int) -> set[Pair]:
    """Every pair of n units."""
    return {(a, b) for a, b in product(range(n), repeat=2) if a < b}


WARM_UPS, LEAST, MOST = 2, 5, 100  # repeats
SECONDS = 0.05  # of the repeats of a payload, within these bounds

AllReduce = Callable[[Any, Tensor, Pair], None]


def all_reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
    """The sum over a group, waited for; tests put a slower one in its place."""
    group.allreduce([tensor]).wait()


@dataclass(frozen=True)
class Links:
    """Who is measured, with what.

    Attributes:
        members: the ranks of each unit: one process, or all of a node.
        payloads: bytes of the all-reduces.
        limit: seconds that a pair may take for a round.
        reduce: the all-reduce.
    """

    members: Sequence[Sequence[int]]
    payloads: Sequence[int]
    limit: float
    reduce: AllReduce = all_reduce


def measure(
    links: Links, rounds: Sequence[Sequence[Pair]], board: Board, device: torch.device, *,
    store: dist.Store, name: str,
) -> dict[int, dict[Pair, float]]:  # fmt: skip
    """GB/s by payload and pair, on rank 0; 0 where a pair gave no answer; {} on the others.

    Args:
        links: who and how.
        rounds: disjoint pairs of units, each round at one time.
        board: by which rounds are kept in step.
        device: of this process.
        store: at which groups meet.
        name: of this measurement: groups of another one meet elsewhere.
    """
    found: dict[int, dict[Pair, float]] = {n_bytes: {} for n_bytes in links.payloads}
    for number, pairs in enumerate(rounds):
        lost = {*board.lost}
        pairs = [pair for pair in pairs if not lost & {*_ranks(links, pair)}]
        own = next((pair for pair in pairs if board.rank in _ranks(links, pair)), None)
        said = None
        if own is not None:
            meeting = dist.PrefixStore(f"{name}/{number}/{own[0]}-{own[1]}", store)
            said = _one(links, own, board.rank, device, meeting)
        came = board.gather(f"{name}/{number}", said, seconds=2 * links.limit)
        for pair in pairs:
            answers = [came.get(rank) for rank in _ranks(links, pair)]
            for index, n_bytes in enumerate(links.payloads):
                found[n_bytes][pair] = min(a[index] if a else 0.0 for a in answers)
    return {} if board.rank else found


def _ranks(links: Links, pair: Pair) -> list[int]:
    return [rank for unit in pair for rank in links.members[unit]]


def _one(
    links: Links, pair: Pair, rank: int, device: torch.device, store: dist.Store
) -> list[float]:
    """GB/s of each payload for this pair, as this process sees it; 0 from where it failed on."""
    ranks, rates, groups = _ranks(links, pair), list[float](), list[Any]()

    def reduce() -> None:
        limit = timedelta(seconds=links.limit)
        groups.append(small_group(store, ranks.index(rank), len(ranks), device=device, limit=limit))
        for n_bytes in links.payloads:
            tensor = torch.zeros(max(1, n_bytes // 4), device=device)
            seconds = _fastest(
                partial(links.reduce, groups[0], tensor, pair),
                partial(_mean, groups[0], len(ranks), device),
                device,
            )
            rates.append(bus_bandwidth(n_bytes, seconds, len(ranks)))

    with suppress(RuntimeError):  # a time limit, a connection that was closed
        within(1.5 * links.limit, reduce)  # gloo ends after `limit`, NCCL waits until it is left
    reached = rates[:]  # what comes later, from a call that is late, is not an answer
    for group in groups:
        leave_group(group, failed=len(reached) < len(links.payloads))
    return reached + [0.0] * (len(links.payloads) - len(reached))


def _mean(group: Any, size: int, device: torch.device, value: float) -> float:
    """Of a group, the same on each of its processes."""
    shared = torch.tensor([value / size], device=device)
    group.allreduce([shared]).wait()
    return float(shared)


def _fastest(
    step: Callable[[], None], agree: Callable[[float], float], device: torch.device
) -> float:
    """Seconds of the fastest of some repeats: what else the machine does only makes it slower.

    Many where they are short, so that one busy moment is not all of them; `agree` makes one number
    of what the processes propose, as each must take part in each.
    """

    def timed() -> float:
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    warm = min(timed() for _ in range(WARM_UPS))
    times = round(agree(min(MOST, max(LEAST, SECONDS / max(warm, 1e-9)))))
    return max(min(timed() for _ in range(times)), 1e-9)
