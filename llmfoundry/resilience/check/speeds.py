"""What each device computes and copies, and which devices are wrong or slow.

All processes call `burn`, rank 0 calls `slow_devices` (whom to measure again) and `judge_speeds`.
The idea: the same product of the same numbers on the same device is the same to the last bit
(cuBLAS promises it for one stream), so a repeat that differs is silent corruption; and no device is
called slow for one measurement, because a false alarm takes a sound machine out of service.

Floors are generous and find what is broken; what is merely slow is found by comparison with the
others. Data sheets are of `recipe/hardware.py`, which the training loop's MFU uses too.
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
GPU_BYTES, CPU_BYTES = 1 << 30, 32 << 20  # copied at a time
WARM_UP = 0.2  # of the time: clocks rise first, and caches fill
LEAST_SLICES = 5  # however short the time: the median of fewer is one busy moment
AGREE = 3  # devices whose results are the same make another's wrong

PRODUCTS, COPIES = 0.5, 0.6  # of the data sheets: the floors


@dataclass(frozen=True)
class HardwareLimits:
    """How much like devices may differ, as shares of the median.

    Attributes:
        products: by which a slow device's products must be slower to matter.
        copies: the same of copies in memory.
        pairs: the same of a pair's bus bandwidth.
        spread: least standard deviation between devices that is assumed.
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


@dataclass(frozen=True)
class Device:
    """A process's device.

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
        """As findings name it."""
        return f"{self.node}, {self.label}"


@dataclass(frozen=True)
class Speed:
    """What a device reached.

    Attributes:
        tflops: of products, the median over slices, in 1e12 floating-point operations a second.
        copy_gb_s: bytes read and written a second when memory is copied, in 1e9.
        mismatches: products that differed from the first one of the same numbers.
        digest: of that first product; the same on every GPU of one kind.
        error: why it reached nothing.
    """

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


Multiply = Callable[[Tensor, Tensor], Tensor]


def burn(device: torch.device, seconds: float, *, multiply: Multiply = torch.matmul) -> Speed:
    """Multiply for `seconds` (in bf16 where there are instructions for it), copy for a fifth of it.

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
    """The same (n, n) on every machine: made on the CPU."""
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
    """Ranks whose speed must be measured again before anything is reported."""
    return {rank for rank, _, _ in _slow(devices, speeds)}


def judge_speeds(devices: Mapping[int, Device], speeds: Mapping[int, Speed]) -> list[Finding]:
    """Devices that fail, compute wrongly, or are slow; and what the others reach."""
    wrong = {
        rank: f"computed wrongly: {speed.mismatches} repeats of one product differ"
        for rank, speed in speeds.items()
        if speed.mismatches
    } | {rank: f"failed: {speed.error}" for rank, speed in speeds.items() if speed.error}
    answers = [(rank, "compute", why, REPLACE) for rank, why in sorted(wrong.items())]
    action = "look at clocks, heat and power; replace it if nothing helps"
    for rank, check, why in [*_slow(devices, speeds), *_disagreeing(devices, speeds)]:
        if rank not in wrong:
            answers.append((rank, check, why, action))
    found = [Finding(check, BAD, devices[rank].where, why, action, (devices[rank].node,))
             for rank, check, why, action in answers]  # fmt: skip
    return [*found, *_reached(devices, speeds)]


def _slow(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """Rank, check and why."""
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
    """Ranks by their devices' model, without those that failed."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, speed in speeds.items():
        if not speed.error:
            found[devices[rank].name].append(rank)
    return found


def floors(device_name: str) -> tuple[float | None, float | None]:
    """Least TFLOP/s of bf16 products, and GB/s of copies; None where the device is not known."""
    known = known_gpu(device_name)
    if known is None:
        return None, None
    return PRODUCTS * GPUS[known].tflops, COPIES * GPUS[known].memory_gb_s


def _disagreeing(
    devices: Mapping[int, Device], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, str, str]]:
    """GPUs that give another result than several of their kind, which agree."""
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
        is_alone = floors(name)[0] is None and len(ranks) <= 3
        note = "; nothing to compare with" if is_alone else ""
        where = f"{len(ranks)} x {name}"
        products = least_to_most([speeds[rank].tflops for rank in ranks])
        copies = least_to_most([speeds[rank].copy_gb_s for rank in ranks])
        yield Finding("compute", SOUND, where, f"{products} TFLOP/s{note}")
        yield Finding("memory", SOUND, where, f"{copies} GB/s copied{note}")


def least_to_most(values: Sequence[float]) -> str:
    """`1 to 9, median 5`."""
    ordered = sorted(values)
    return f"{ordered[0]:.4g} to {ordered[-1]:.4g}, median {ordered[len(ordered) // 2]:.4g}"
