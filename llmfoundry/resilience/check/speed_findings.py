"""What measured speeds mean: findings from burns and from pairs. Pure.

`sweep` calls it twice: first for whom to measure again, then for the verdict. The idea: nobody is
called slow for one measurement, because a false alarm takes a sound machine out of service.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, Finding
from llmfoundry.resilience.check.hardware import LIMITS, NVLINK_KIND, floors, pair_floor
from llmfoundry.resilience.check.link_findings import (
    LEAST_PAIRS,
    Blame,
    Pair,
    blame,
    in_units,
    is_explained,
    slow_pairs,
)
from llmfoundry.resilience.check.outliers import too_small
from llmfoundry.resilience.check.xids import REPLACE

BETWEEN_NODES = "between nodes"  # a kind of link
AGREE = 3  # devices whose results are the same make another's wrong


@dataclass(frozen=True)
class Device:
    """A process's device, as it is told.

    Attributes:
        rank: of the process.
        node: its machine.
        label: `GPU 3`, or `rank 3` of a CPU.
        kind: `cuda` or `cpu`.
        name: of the model; like is compared with like.
        numa: the processor socket that it is at; None: unknown.
        has_nvlink: whether any NVLink of it is up.
    """

    rank: int
    node: str
    label: str
    kind: str
    name: str
    numa: int | None = None
    has_nvlink: bool = False

    @property
    def where(self) -> str:
        """As findings say it."""
        return f"{self.node}, {self.label}"


@dataclass(frozen=True)
class Speed:
    """What a device reached: `probes.burn.Burn`, or why it reached nothing."""

    tflops: float = 0.0
    copy_gb_s: float = 0.0
    mismatches: int = 0
    digest: str = ""
    error: str = ""

    def better(self, other: Speed) -> Speed:
        """The faster of two measurements; what was wrong once stays wrong."""
        return replace(
            self,
            tflops=max(self.tflops, other.tflops),
            copy_gb_s=max(self.copy_gb_s, other.copy_gb_s),
            mismatches=self.mismatches + other.mismatches,
            error=self.error or other.error,
        )


def slow_devices(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> set[int]:
    """Ranks whose speed must be measured again before anything is said."""
    return {rank for rank, _, _ in _slow(devices, speeds)}


def judge_speeds(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> list[Finding]:
    """Devices that fail, compute wrongly, or are slow; and what the others reach."""
    found = []
    for rank, speed in speeds.items():
        at = devices[rank]
        if speed.error:
            why, action = f"failed: {speed.error}", REPLACE
        elif speed.mismatches:
            why = f"computed wrongly: {speed.mismatches} repeats of one product differ"
            action = REPLACE
        else:
            continue
        found.append(Finding("compute", BAD, at.where, why, action, (at.node,)))
    wrong = {finding.where for finding in found}
    for rank, check, why in [*_slow(devices, speeds), *_disagreeing(devices, speeds)]:
        at = devices[rank]
        if at.where not in wrong:
            action = "look at clocks, heat and power; replace it if nothing helps"
            found.append(Finding(check, BAD, at.where, why, action, (at.node,)))
    return [*found, *_reached(devices, speeds)]


def _slow(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """Rank, check and why."""
    for ranks in _alike(devices, speeds).values():
        at = devices[ranks[0]]
        limits, (least_products, least_copies) = LIMITS[at.kind], floors(at.name)
        for check, unit, floor, effect, values in (
            ("compute", "TFLOP/s", least_products, limits.products,
             {rank: speeds[rank].tflops for rank in ranks}),
            ("memory", "GB/s", least_copies, limits.copies,
             {rank: speeds[rank].copy_gb_s for rank in ranks}),
        ):  # fmt: skip
            for out in too_small(values, effect=effect, floor=floor, spread=limits.spread):
                usual = f"; {out.usual:.4g} is usual here" if out.usual else ""
                least = f"{out.limit:.4g}{' by its data sheet' if out.is_floor else ''}"
                yield out.name, check, f"{out.value:.4g} {unit}, less than {least}{usual}"


def _alike(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> dict[str, list[int]]:
    """Ranks by their devices' model, without those that failed."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, speed in speeds.items():
        if not speed.error:
            found[devices[rank].name].append(rank)
    return found


def _disagreeing(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """GPUs that give another result than several of their kind, who agree."""
    for ranks in _alike(devices, speeds).values():
        if devices[ranks[0]].kind != "cuda":
            continue  # a CPU's order of sums depends on where its memory begins
        digest, often = Counter(speeds[rank].digest for rank in ranks).most_common(1)[0]
        others = [rank for rank in ranks if speeds[rank].digest != digest]
        if often >= AGREE and len(others) <= often / 3:
            why = f"computed wrongly: {often} others agree on another result of the same product"
            yield from ((rank, "compute", why) for rank in others)


def _reached(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> Iterator[Finding]:
    for name, ranks in _alike(devices, speeds).items():
        products = sorted(speeds[rank].tflops for rank in ranks)
        copies = sorted(speeds[rank].copy_gb_s for rank in ranks)
        many = f"{len(ranks)} x {name}"
        floor = "" if floors(name)[0] is not None or len(ranks) > 3 else "; nothing to compare with"
        yield Finding("compute", SOUND, many, f"{_range(products)} TFLOP/s{floor}")
        yield Finding("memory", SOUND, many, f"{_range(copies)} GB/s copied{floor}")


def _range(values: Sequence[float]) -> str:
    """Least, median and most of sorted values."""
    return f"{values[0]:.4g} to {values[-1]:.4g}, median {values[len(values) // 2]:.4g}"


def link_kind(a: Device, b: Device) -> str:
    """What lies between two processes' devices."""
    if a.node != b.node:
        return BETWEEN_NODES
    if a.has_nvlink and b.has_nvlink:
        return NVLINK_KIND
    return "in a node" if a.numa == b.numa else "in a node, across sockets"


@dataclass(frozen=True)
class PairRates:
    """What pairs reached.

    Attributes:
        units: the devices of each unit: one process's, or all of a node.
        rates: GB/s by payload in bytes and pair; 0: no answer.
        least: a floor for pairs of nodes, by the recipe; None: none.
        groups: units that are known to share a switch.
    """

    units: Sequence[Sequence[Device]]
    rates: Mapping[int, Mapping[Pair, float]]
    least: float | None = None
    groups: Sequence[Sequence[int]] = ()

    def kinds(self) -> dict[Pair, str]:
        """What lies between each pair."""
        pairs = {pair for own in self.rates.values() for pair in own}
        return {(a, b): link_kind(self.units[a][0], self.units[b][0]) for a, b in pairs}

    def compared(self) -> set[Pair]:
        """Pairs of whose kind there are enough; two processes of a node are mostly alone there."""
        kinds = self.kinds()
        often = Counter(kinds.values())
        return {pair for pair, kind in kinds.items() if often[kind] >= LEAST_PAIRS}

    def label(self, unit: int) -> str:
        """A unit as findings call it."""
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
        nodes = {} if self.least is None else {BETWEEN_NODES: self.least}
        return {NVLINK_KIND: pair_floor(self.units[0][0].name) or 0.0} | nodes

    def slow(self) -> dict[Pair, str]:
        """Pairs that are slow at any payload, with the first reason."""
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


def judge_pairs(pairs: PairRates, confirmed: Mapping[Pair, str]) -> list[Finding]:
    """Who is to blame for the pairs that were slow both times."""
    measured = {pair for own in pairs.rates.values() for pair in own}
    compared = pairs.compared() | {*confirmed}
    blamed = blame(confirmed, compared, groups=pairs.groups)
    found: list[Finding] = []
    slower = {*confirmed} - pairs.broken()
    if slower and not is_explained(confirmed, compared, blamed):
        count = f"{len(slower)} of {len(measured)} pairs are slower than the others"
        why = f"{count}, in no pattern: two kinds of links, or other work on them"
        found.append(Finding("pairs", NOTICE, "the network", why, "check again while it is quiet"))
        blamed = blame({*confirmed} - slower, compared, groups=pairs.groups)
    found += [_blamed(pairs, each, confirmed) for each in blamed]
    sound = len(measured) - len(confirmed)
    if measured and sound:
        most = max(pairs.rates)
        best = sorted(r for p, r in pairs.rates[most].items() if p not in confirmed and r > 0)
        if best:
            at = f"{_range(best)} GB/s at {in_units(most)}"
            why = f"{sound} of {len(measured)} pairs are sound: {at}"
            found.append(Finding("pairs", SOUND, "the network", why))
    return found


def _blamed(pairs: PairRates, each: Blame, reasons: Mapping[Pair, str]) -> Finding:
    names, count = [pairs.label(unit) for unit in each.units], len(each.pairs)
    nodes = tuple(dict.fromkeys(d.node for unit in each.units for d in pairs.units[unit]))
    why = reasons[each.pairs[0]]
    listed = ", ".join(names)
    if each.kind == "unit":
        said = f"all {count} pairs of it are slow ({why})"
        return Finding("pairs", BAD, listed, said, "look at its ports, cards and cables", nodes)
    if each.kind == "all":
        said = f"all {count} pairs are slow ({why})"
        action = "look at NCCL's settings, the network's driver and cards, and the switches"
        return Finding("pairs", BAD, "the network", said, action)
    if each.kind == "units":
        said = f"all {count} pairs of these are slow ({why})"
        action = "look at the switch that they share, else at each of them"
        return Finding("pairs", BAD, listed, said, action, nodes)
    if each.kind == "between":
        others = ", ".join(pairs.label(unit) for unit in each.others)
        said = f"slow to {others}, sound among themselves ({count} pairs; {why})"
        action = "look at the switch or the uplinks between these halves"
        return Finding("pairs", BAD, listed, said, action)
    action = "look at the cable, the ports and the route between the two"
    return Finding("pairs", BAD, " - ".join(names), f"this pair alone is slow ({why})", action)
