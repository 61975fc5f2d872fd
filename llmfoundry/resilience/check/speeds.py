"""Measure matmuls and memory copies on each device; find devices that are slow or compute wrongly.

All ranks call `burn`. Rank 0 calls `slow_devices` (the devices to measure again) and
`judge_speeds`. The same matmul on the same device gives the same bits (cuBLAS guarantees that for
one stream), so a repeat that differs is silent data corruption. A device is not called slow after a
single measurement, because a false alarm takes a good machine out of service.

Floors are generous and detect broken devices. Devices that are only slow are detected by
comparison with other devices. `recipe/hardware.py` has the data sheets, also used for MFU.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmfoundry.ops.devices import HAS_BF16
from llmfoundry.recipe.hardware import GPUS, known_gpu
from llmfoundry.resilience.check.findings import BAD, SOUND, Finding
from llmfoundry.resilience.check.kernel_log import REPLACE
from llmfoundry.resilience.check.outliers import too_small

GPU_SIZE, CPU_SIZE = 8192, 512  # rows and columns of the matrices, multiples of 128
GPU_BYTES, CPU_BYTES = 1 << 30, 32 << 20  # size of a copy
WARM_UP = 0.2  # share of the time for warm-up: clocks rise and caches fill
LEAST_SLICES = 5  # minimum number of time slices, so that the median ignores a busy moment
AGREE = 3  # number of devices with equal results that makes a different result wrong

PRODUCTS, COPIES = 0.5, 0.6  # floors of matmuls and copies, as shares of the data sheet


@dataclass(frozen=True)
class HardwareLimits:
    """Tolerated differences between devices of one model, as shares of the median.

    Attributes:
        products: minimum deficit of matmuls that counts as slow.
        copies: minimum deficit of memory copies that counts as slow.
        pairs: minimum deficit of a pair's bus bandwidth that counts as slow.
        spread: minimum standard deviation between devices to assume.
        pair_spread: minimum standard deviation between pairs to assume.
    """

    products: float
    copies: float
    pairs: float
    spread: float
    pair_spread: float


# Matmuls of GPUs of one model differ by 1 to 2 % under a power limit, single GPUs by far more
# (Sinha et al., SC 2022). Ranks on a CPU share cores and caches: measured in tests/resilience.
LIMITS = {
    "cuda": HardwareLimits(products=0.08, copies=0.05, pairs=0.2, spread=0.01, pair_spread=0.03),
    "cpu": HardwareLimits(products=0.6, copies=0.7, pairs=0.9, spread=0.2, pair_spread=0.3),
}


@dataclass(frozen=True)
class Device:
    """Device of a rank.

    Attributes:
        rank: rank that uses the device.
        node: host name of the machine.
        label: `GPU 3`, or `rank 3` for a CPU.
        kind: `cuda` or `cpu`.
        name: name of the model; only devices of one model are compared.
        numa: NUMA node; None: not known.
        has_nvlink: whether any NVLink is up.
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
        """Name of the device in findings."""
        return f"{self.node}, {self.label}"


@dataclass(frozen=True)
class Speed:
    """Measured speed of a device.

    Attributes:
        tflops: median of the matmuls, in 1e12 floating-point operations per second.
        copy_gb_s: bytes read and written per second in memory copies, in 1e9.
        mismatches: number of matmuls whose result differed from the first result.
        digest: hash of the first result; equal on all GPUs of one model.
        error: why the measurement failed; empty: it succeeded.
    """

    tflops: float = 0.0
    copy_gb_s: float = 0.0
    mismatches: int = 0
    digest: str = ""
    error: str = ""

    def better(self, other: Speed) -> Speed:
        """Return the faster of two measurements, with the mismatches and errors of both."""
        return replace(
            self,
            tflops=max(self.tflops, other.tflops),
            copy_gb_s=max(self.copy_gb_s, other.copy_gb_s),
            mismatches=self.mismatches + other.mismatches,
            error=self.error or other.error,
        )


Multiply = Callable[[Tensor, Tensor], Tensor]


def burn(device: torch.device, seconds: float, *, multiply: Multiply = torch.matmul) -> Speed:
    """Run matmuls for `seconds`, then memory copies for a fifth of the time.

    Matmuls are in bf16 if the device has instructions for it, else in fp32.

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

    spans = _spans(product, device, seconds, times=10 if is_gpu else 1)
    return Speed(
        tflops=2 * n**3 / statistics.median(spans) / 1e12,
        mismatches=int(wrong),
        digest=hashlib.sha256(first.float().cpu().numpy().tobytes()).hexdigest()[:16],
        copy_gb_s=_copies(device, seconds / 5),
    )


def _numbers(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers (n, n), generated on the CPU so that they are equal on all machines."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, n, generator=generator).to(dtype)


def _copies(device: torch.device, seconds: float) -> float:
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = _spans(lambda: target.copy_(source), device, seconds, times=4)
    return 2 * size / statistics.median(spans) / 1e9


def _spans(
    step: Callable[[], object], device: torch.device, seconds: float, *, times: int
) -> list[float]:
    """Return the mean seconds of a step for each slice of `times` steps after the warm-up."""
    spans: list[float] = []
    started = time.perf_counter()
    while True:
        at = time.perf_counter() - started
        if at > seconds and len(spans) >= LEAST_SLICES:
            return spans
        begun = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if at >= WARM_UP * seconds:
            spans.append((time.perf_counter() - begun) / times)


def slow_devices(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> set[int]:
    """Return the ranks whose device must be measured again before it is reported."""
    return {rank for rank, _, _ in _slow(devices, speeds)}


def judge_speeds(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> list[Finding]:
    """Return findings: devices that fail, compute wrongly or are slow, and the speed of all."""
    # failed and wrong devices
    wrong = dict[int, str]()
    for rank, speed in speeds.items():
        if speed.mismatches:
            wrong[rank] = f"computed wrongly: {speed.mismatches} repeats of one product differ"
        if speed.error:
            wrong[rank] = f"failed: {speed.error}"
    problems = [(rank, "compute", why, REPLACE) for rank, why in sorted(wrong.items())]

    # slow devices, and devices whose result differs from the others
    action = "look at clocks, heat and power; replace it if nothing helps"
    for rank, check, why in [*_slow(devices, speeds), *_disagreeing(devices, speeds)]:
        if rank not in wrong:
            problems.append((rank, check, why, action))

    findings = list[Finding]()
    for rank, check, why, action in problems:
        device = devices[rank]
        findings.append(Finding(check, BAD, device.where, why, action, (device.node,)))
    return [*findings, *_reached(devices, speeds)]


def _slow(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """Yield (rank, check, reason) for each slow device."""
    for name, ranks in _alike(devices, speeds).items():
        limits, (least_products, least_copies) = LIMITS[devices[ranks[0]].kind], floors(name)
        for check, field, unit, floor, effect in (
            ("compute", "tflops", "TFLOP/s", least_products, limits.products),
            ("memory", "copy_gb_s", "GB/s", least_copies, limits.copies),
        ):
            values = {rank: float(getattr(speeds[rank], field)) for rank in ranks}
            for out in too_small(values, effect=effect, floor=floor, spread=limits.spread):
                usual = f"; {out.usual:.4g} is usual here" if out.usual else ""
                least = f"{out.limit:.4g}{' by its data sheet' if out.is_floor else ''}"
                yield out.name, check, f"{out.value:.4g} {unit}, less than {least}{usual}"


def _alike(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> dict[str, list[int]]:
    """Return the ranks by the model of their device, without failed devices."""
    ranks_by_model: dict[str, list[int]] = defaultdict(list)
    for rank, speed in speeds.items():
        if not speed.error:
            ranks_by_model[devices[rank].name].append(rank)
    return ranks_by_model


def floors(device_name: str) -> tuple[float | None, float | None]:
    """Return the floors: TFLOP/s of bf16 matmuls, GB/s of copies; None: unknown device."""
    known = known_gpu(device_name)
    if known is None:
        return None, None
    return PRODUCTS * GPUS[known].tflops, COPIES * GPUS[known].memory_gb_s


def _disagreeing(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """Yield (rank, check, reason) for each GPU whose result differs while several agree."""
    for ranks in _alike(devices, speeds).values():
        if devices[ranks[0]].kind != "cuda":
            continue  # on a CPU the order of summation depends on memory alignment
        digest, often = Counter(speeds[rank].digest for rank in ranks).most_common(1)[0]
        others = [rank for rank in ranks if speeds[rank].digest != digest]
        if often >= AGREE and len(others) <= often / 3:
            why = f"computed wrongly: {often} others agree on another result of the same product"
            yield from ((rank, "compute", why) for rank in others)


def _reached(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> Iterator[Finding]:
    """Yield findings with the range of speeds of each model."""
    for name, ranks in _alike(devices, speeds).items():
        is_alone = floors(name)[0] is None and len(ranks) <= 3
        note = "; nothing to compare with" if is_alone else ""
        where = f"{len(ranks)} x {name}"
        products = least_to_most([speeds[rank].tflops for rank in ranks])
        copies = least_to_most([speeds[rank].copy_gb_s for rank in ranks])
        yield Finding("compute", SOUND, where, f"{products} TFLOP/s{note}")
        yield Finding("memory", SOUND, where, f"{copies} GB/s copied{note}")


def least_to_most(values: Sequence[float]) -> str:
    """Return the range and median of values, as `1 to 9, median 5`."""
    ordered = sorted(values)
    return f"{ordered[0]:.4g} to {ordered[-1]:.4g}, median {ordered[len(ordered) // 2]:.4g}"
