"""What each device computes and copies, and which devices are wrong or slow.

All processes call `burn`, rank 0 calls `slow_devices` (whom to measure again) and `judge_speeds`.
The idea: the same product of the same numbers on the same device is the same to the last bit
(cuBLAS promises it for one stream), so a repeat that differs is silent corruption; and no device is
called slow for one measurement, because a false alarm takes a sound machine out of service.

Floors are generous and find what is broken; what is merely slow is found by comparison with the
others. Peaks of products are `models.counts.PEAK_FLOPS`, which the training loop's MFU uses too.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmfoundry.models.counts import PEAK_FLOPS, known_device
from llmfoundry.ops.cpu_features import HAS_BF16
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, Finding
from llmfoundry.resilience.check.kernel_log import REPLACE
from llmfoundry.resilience.check.links import (
    LEAST_PAIRS,
    Blame,
    Pair,
    blame,
    in_units,
    is_explained,
    slow_pairs,
)
from llmfoundry.resilience.check.outliers import too_small

GPU_SIZE, CPU_SIZE = 8192, 512  # rows and columns, multiples of 128
GPU_BYTES, CPU_BYTES = 1 << 30, 32 << 20  # copied at a time
WARM_UP = 0.2  # of the time: clocks rise first, and caches fill
LEAST = 5  # slices, however short the time: the median of fewer is one busy moment


@dataclass(frozen=True)
class Burn:
    """What was measured.

    Attributes:
        tflops: the median over slices, in 1e12 floating-point operations a second.
        slices: how many were measured.
        mismatches: products that differed from the first one of the same numbers.
        digest: of that first product; the same on every GPU of one kind.
        copy_gb_s: bytes read and written a second when memory is copied, in 1e9.
        dtype: of the products.
    """

    tflops: float
    slices: int
    mismatches: int
    digest: str
    copy_gb_s: float
    dtype: str


Multiply = Callable[[Tensor, Tensor], Tensor]


def burn(device: torch.device, seconds: float, *, multiply: Multiply = torch.matmul) -> Burn:
    """Multiply for `seconds`, then copy for a fifth of that.

    Raises:
        RuntimeError: the device failed.
    """
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu or HAS_BF16 else torch.float32
    n = GPU_SIZE if is_gpu else CPU_SIZE
    a, b = (_numbers(n, seed, dtype).to(device) for seed in (1, 2))
    first = multiply(a, b)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def product() -> None:
        wrong.add_((multiply(a, b) != first).any())

    per_slice = 10 if is_gpu else 1
    spans = _spans(product, device, seconds, times=per_slice)
    digest = hashlib.sha256(first.float().cpu().numpy().tobytes()).hexdigest()[:16]
    return Burn(
        tflops=2 * n**3 / statistics.median(spans) / 1e12,
        slices=len(spans),
        mismatches=int(wrong),
        digest=digest,
        copy_gb_s=_copies(device, seconds / 5),
        dtype=str(dtype)[6:],
    )


def _numbers(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same on every machine: made on the CPU."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(n, n, generator=made).to(dtype)


def _copies(device: torch.device, seconds: float) -> float:
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = _spans(lambda: target.copy_(source), device, seconds, times=4)
    return 2 * size / statistics.median(spans) / 1e9


def _spans(
    step: Callable[[], object], device: torch.device, seconds: float, *, times: int
) -> list[float]:
    """Seconds of a step, the mean of each slice of `times`; slices of the warm-up are left out."""
    spans: list[float] = []
    started = time.perf_counter()
    while True:
        at = time.perf_counter() - started
        if at > seconds and len(spans) >= LEAST:
            return spans
        begun = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if at >= WARM_UP * seconds:
            spans.append((time.perf_counter() - begun) / times)


COPY_GB_S = {  # memory bandwidth in GB/s by the makers' data sheets; of several sizes the least
    "GB200": 8000.0,
    "B200": 7700.0,
    "GH200": 4000.0,
    "H200": 4800.0,
    "H200 NVL": 4800.0,
    "H100": 3350.0,
    "H100 NVL": 3900.0,
    "H100 PCIe": 2000.0,
    "A100": 1555.0,
    "L40S": 864.0,
    "L40": 864.0,
    "L4": 300.0,
    "A10": 600.0,
    "A10G": 600.0,
    "V100": 900.0,
    "V100 PCIE": 900.0,
    "T4": 320.0,
    "RTX 5090": 1792.0,
    "RTX 4090": 1008.0,
    "RTX 3090": 936.0,
    "MI325X": 6000.0,
    "MI300X": 5300.0,
    "MI250X": 1638.0,  # of one of its two dies
}
NVLINK_GB_S = {  # one direction of one GPU, through NVSwitch
    "GB200": 900.0,
    "B200": 900.0,
    "GH200": 450.0,
    "H200": 450.0,
    "H100": 450.0,
    "A100": 300.0,
}
PRODUCTS, COPIES, NVLINK = 0.5, 0.6, 0.5  # of the tables: the floors
NVLINK_KIND = "NVLink"  # as `measured.link_kind` calls it


@dataclass(frozen=True)
class HardwareLimits:
    """How much like devices may differ, as shares of the median.

    Attributes:
        products: by which a slow device's products must be slower to matter.
        copies: the same of copies in memory.
        pairs: the same of a pair's bus bandwidth.
        spread: standard deviation between devices that is taken for granted.
        pair_spread: the same between pairs.
    """

    products: float
    copies: float
    pairs: float
    spread: float
    pair_spread: float


# GPUs of one model differ by 1 to 2 % in products under a power limit (Sinha et al., SC 2022, and
# single ones by far more). A CPU's processes share cores and caches: measured in tests/resilience.
LIMITS = {
    "cuda": HardwareLimits(products=0.08, copies=0.05, pairs=0.2, spread=0.01, pair_spread=0.03),
    "cpu": HardwareLimits(products=0.6, copies=0.7, pairs=0.9, spread=0.2, pair_spread=0.3),
}


def floors(device_name: str) -> tuple[float | None, float | None]:
    """Least TFLOP/s of bf16 products, and GB/s of copies; None where the device is not known."""
    known = known_device(device_name)
    if known is None:
        return None, None
    return PRODUCTS * PEAK_FLOPS[known] / 1e12, COPIES * COPY_GB_S[known]


def pair_floor(device_name: str) -> float | None:
    """Least bus bandwidth in GB/s of an all-reduce of a large payload over NVLink."""
    speed = NVLINK_GB_S.get(known_device(device_name) or "")
    return None if speed is None else NVLINK * speed


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
