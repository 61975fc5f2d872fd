"""Data sheets of GPUs, and the hardware that a user names.

`GPUS` is the one table of data sheets. MFU (`models/counts.py`), the limits of the machine check
(`resilience/check/`) and the plan of a run (`plan/seconds.py`) read it. `--dry-run=HARDWARE` and
`hardware=` of scripts/plan.py take 8xh100, 512xa100-80gb, 128x80gb or 64xmy-gpu.yaml. A file
describes GPUs that are missing in the table: keys of `Gpu`, `like: h100` for the other keys, and
`gpus: 64` if the command line names no number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.schema import Range, check_fields
from llmfoundry.recipe.typed import Problem, build
from llmfoundry.recipe.yaml_file import read_yaml

_RATE = Range(0, 1e9, "no hardware does that")
_SHARE = Range(above=0, most=1)


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its data sheet; `reached` and `attention` are measurements."""

    tflops: Annotated[float, _RATE] = 0.0
    """TFLOP/s of dense matrix multiplications in bfloat16 (in fp16 without bfloat16 support)."""
    fp8_tflops: Annotated[float, _RATE] = 0.0
    """TFLOP/s of dense matrix multiplications in 8 bits; 0: not supported."""
    memory_gb: Annotated[float, _RATE] = 0.0
    """Memory in GB, as it is sold; the smallest of several sizes."""
    memory_gib: Annotated[float, _RATE] = 0.0
    """Memory in GiB (2^30 bytes) as PyTorch reports it, for example in its out-of-memory errors:
    what the driver and error correction leave. 0: the least of known GPUs of this size, otherwise
    10^9 bytes for each of memory_gb."""
    memory_gb_s: Annotated[float, _RATE] = 0.0
    """Memory bandwidth in GB/s."""
    link_gb_s: Annotated[float, _RATE] = 0.0
    """GB/s to the other GPUs of the node, in one direction: NVLink, Infinity Fabric, else PCIe."""
    network_gb_s: Annotated[float, _RATE] = 0.0
    """GB/s to other nodes, in one direction: a GPU's share of the network cards of its node."""
    multiprocessors: Annotated[int, Range(1, 4096)] = 100
    """Number of multiprocessors. A matrix multiplication with too few tiles for all of them is
    slower."""
    reached: Annotated[float, _SHARE] = 0.75
    """Share of tflops that the fastest matrix multiplication reaches. Measured on A100, H100, H200,
    GH200, B200, GB200, MI300X and MI325X (S. Bekman, Machine Learning Engineering, table of maximum
    achievable matmul FLOPS, 2024 to 2025); a guess for other GPUs."""
    sustained: Annotated[float, _SHARE] = 0.79
    """Share of `reached` that large matrix multiplications sustain within a training step. Fitted:
    0.90 for Ampere to three rows of LLM Foundry's table, 0.79 for Hopper to this project's own runs
    on one H200 (`benchmarks/published/`); other GPUs use Hopper's value."""
    attention: Annotated[float, _SHARE] = 0.4
    """Share of tflops that FlashAttention 2 reaches on long sequences, forward and backward, with
    head dimension 128 (Dao, 2023, figures 4 to 7: 190 of 312 on A100, 335 of 989 on H100); a guess
    for other GPUs."""
    node: Annotated[int, Range(1, 4096)] = 8
    """Number of GPUs that `link_gb_s` connects."""
    switched: bool = False
    """Whether the link is NVLink with switches, whose speed is checked before runs."""
    power: Annotated[float, _SHARE] = 1.0
    """Power limit over that of the data sheet: 0.714 for 500 of 700 W. The clock under load follows
    its cube root, because the power of a chip grows with its clock and with the square of the
    voltage, which grows with the clock."""
    watts: Annotated[float, _RATE] = 0.0
    """Power limit of the data sheet in watts; 0: not known."""
    price: Annotated[float, _RATE] = 0.0
    """Typical price of a GPU-hour in US dollars; 0: not known."""
    fp8_experts: bool = False
    """Whether PyTorch multiplies stacked experts in 8 bits on it: compute capability 9 and 10."""
    fp8_multiple: Annotated[int, Range(1, 1024)] = 16
    """What both sides of an expert's matrix must be multiples of for that: 32 on capability 10."""


# fmt: off
GPUS = {  # by words of torch.cuda.get_device_name(); most words win. Columns: as the fields above
    "GB200":          Gpu( 2500, 5000, 186, 184.3, 8000, 900,  50, 148, .729, 0.79, 0.20, 72, True),
    "B200":           Gpu( 2250, 4500, 180, 178.3, 7700, 900,   50, 148, .776, 0.79, 0.20, 8, True),
    "GH200":          Gpu(989.5, 1979,  96,  94.5, 4000, 450,   50, 132, .838, 0.79, 0.34, 8, True),
    "H200":           Gpu(989.5, 1979, 141, 139.8, 4800, 450,   50, 132, .803, 0.79, 0.34, 8, True),
    "H200 NVL":       Gpu(835.5, 1671, 141, 139.8, 4800,  64,   50, 132,  .75, 0.79, 0.34),
    "H100":           Gpu(989.5, 1979,  80,  79.2, 3350, 450,   50, 132, .803, 0.79, 0.34, 8, True),
    "H100 NVL":       Gpu(835.5, 1671,  94,  93.1, 3900,  64,   50, 132,  .75, 0.79, 0.34),
    "H100 PCIe":      Gpu(  756, 1513,  80,  79.2, 2000,  64,   50, 114,  .75, 0.79, 0.34),
    "A100":           Gpu(  312,    0,  40,  39.4, 1555, 300,   25, 108, .869, 0.90, 0.61, 8, True),
    "A100 40GB":      Gpu(  312,    0,  40,  39.4, 1555, 300,   25, 108, .869, 0.90, 0.61, 8, True),
    "A100 40GB PCIE": Gpu(  312,    0,  40,  39.4, 1555,  32,   25, 108, .811, 0.90, 0.61),
    "A100 80GB":      Gpu(  312,    0,  80,  79.2, 2039, 300,   25, 108, .869, 0.90, 0.61, 8, True),
    "A100 80GB PCIe": Gpu(  312,    0,  80,  79.2, 1935,  32,   25, 108, .811, 0.90, 0.61),
    "L40S":           Gpu(  362,  733,  48,  44.4,  864,  32, 12.5, 142,  .75, 0.79, 0.40),
    "L40":            Gpu(  181,  362,  48,  44.4,  864,  32, 12.5, 142,  .75, 0.79, 0.40),
    "L4":             Gpu(  121,  242,  24,  22.0,  300,  32, 12.5,  58,  .75, 0.79, 0.40),
    "A10":            Gpu(  125,    0,  24,  22.0,  600,  32, 12.5,  72,  .75, 0.90, 0.40),
    "A10G":           Gpu(   70,    0,  24,  22.0,  600,  32, 12.5,  80,  .75, 0.90, 0.40),
    "V100":           Gpu(  125,    0,  16,  15.7,  900, 150, 12.5,  80,  .75, 0.79, 0.40),
    "V100 PCIE":      Gpu(  112,    0,  16,  15.7,  900,  16, 12.5,  80,  .75, 0.79, 0.40),
    "T4":             Gpu(   65,    0,  16,  14.6,  320,  16, 12.5,  40,  .75, 0.79, 0.40),
    "RTX 5090":       Gpu(209.5,  419,  32,  31.4, 1792,  64,  3.1, 170,  .75, 0.79, 0.40),
    "RTX 4090":       Gpu(  165,  330,  24,  23.5, 1008,  32,  3.1, 128,  .75, 0.79, 0.40),
    "RTX 3090":       Gpu(   71,    0,  24,  23.5,  936,  32,  3.1,  82,  .75, 0.90, 0.40),
    "MI325X":         Gpu( 1307, 2614, 256, 255.6, 6000, 448,   50, 304, .604, 0.79, 0.25),
    "MI300X":         Gpu( 1307, 2614, 192, 191.7, 5300, 448,   50, 304, .514, 0.79, 0.25),
    "MI250X":         Gpu(191.5,    0,  64,  63.9, 1638,  50, 12.5, 110,  .75, 0.79, 0.40),
}
# fmt: on
"""Of makers' data sheets. Products: NVIDIA's A100 (2021), H100 (2023), H200, GB200 NVL72 (2024),
L40S and Ada and Blackwell GeForce white papers; AMD's Instinct MI300X. B200's memory is of HGX
(7.7 TB/s, 180 GB). GiB: total capacity in logs of PyTorch on current drivers (older drivers left up
to 0.1 GiB less); MI325X and MI250X by MI300X's share. Links in one direction: NVLink 3, 4 and 5 of
300, 450 and 900 GB/s; PCIe 4 and 5 of 32 and 64 GB/s; seven Infinity Fabric links of 64 GB/s.
Networks as makers' reference systems have them: a card of 200 Gb/s for each A100, of 400 Gb/s for
each H100 and later (DGX, HGX); cards of 100 Gb/s for others, of 200 Gb/s a node of GeForce. V100
and T4 know fp16 only; MI250X is one of its two dies, which is what PyTorch calls a device."""
_COSTS = {  # power limit in watts, typical price of an hour in US dollars; 0: not known
    "GB200": (1200.0, 10.5),  # CoreWeave
    "B200": (1000.0, 6.69),  # Lambda
    "GH200": (900.0, 2.29),  # Lambda
    "H200": (700.0, 4.59),  # RunPod
    "H200 NVL": (600.0, 0.0),
    "H100": (700.0, 3.99),  # Lambda
    "H100 NVL": (400.0, 3.19),  # RunPod
    "H100 PCIe": (350.0, 3.29),  # Lambda
    "A100": (400.0, 1.99),  # Lambda
    "A100 40GB": (400.0, 1.99),  # Lambda
    "A100 40GB PCIE": (250.0, 1.99),  # assumed to cost as much as SXM
    "A100 80GB": (400.0, 2.79),  # Lambda
    "A100 80GB PCIe": (300.0, 1.79),  # RunPod
    "L40S": (350.0, 2.25),  # CoreWeave
    "L40": (300.0, 1.25),  # CoreWeave
    "L4": (72.0, 0.0),
    "A10": (150.0, 1.29),  # Lambda
    "A10G": (300.0, 0.0),
    "V100": (300.0, 0.79),  # Lambda
    "V100 PCIE": (250.0, 0.79),  # assumed to cost as much as SXM
    "T4": (70.0, 0.0),
    "RTX 5090": (575.0, 0.0),
    "RTX 4090": (450.0, 0.0),
    "RTX 3090": (350.0, 0.0),
    "MI325X": (1000.0, 0.0),
    "MI300X": (750.0, 0.0),
    "MI250X": (280.0, 0.0),
}
"""Power limits of makers' data sheets: of a GB200 half of the 2700 W of two GPUs and a CPU, less
the CPU's; of a GH200 with its CPU; of a die of MI250X half of 560 W. Prices are on-demand list
prices of three clouds: lambda.ai/instances (2026-09-20, nodes of 8 where there are some),
coreweave.com/pricing (2026-09-20, a node's price by its GPUs) and runpod.io/pricing, Secure Cloud
(2026-10-07 and 2026-11-09). In that autumn, an hour of an H100 cost from 2.7 to 12.3 dollars."""
_HOPPER, _BLACKWELL = {"GH200", "H200", "H100"}, {"GB200", "B200"}
GPUS = {
    name: dataclasses.replace(
        gpu,
        watts=_COSTS[name][0],
        price=_COSTS[name][1],
        fp8_experts=name.split()[0] in _HOPPER | _BLACKWELL,
        fp8_multiple=32 if name.split()[0] in _BLACKWELL else 16,
    )
    for name, gpu in GPUS.items()
}
CUT_DOWN = {"Laptop", "MIG", "D"}  # words of parts that have the name but not the peak


def known_gpu(device_name: str) -> str | None:
    """Return the key of GPUS for PyTorch's name of a device; None if it is not in the table."""
    words = set(re.split(r"[\s/-]+", device_name))
    return None if words & CUT_DOWN else _most_words(words)


def named_gpu(text: str) -> str | None:
    """Return the key of GPUS that a user names: h100, H100-PCIe, a100-80gb, rtx-4090; else None.

    The memory may be named, too, where there is only one size: h100-80gb.
    """
    plain = text.lower().replace("a100-40", "a100-40gb").replace("a100-80", "a100-80gb")
    words = set(re.split(r"[\s_-]+", plain.replace("gbgb", "gb"))) - _MAKERS
    by_words = {frozenset(key.lower().split()): key for key in GPUS}
    with_size = {name | {f"{GPUS[key].memory_gb:g}gb"}: key for name, key in by_words.items()}
    return {**with_size, **by_words}.get(frozenset(words))


def short_name(key: str) -> str:
    """Return a key of GPUS as users write it."""
    return key.lower().replace(" ", "-")


_MAKERS = {"nvidia", "amd", "geforce", "instinct", "sxm", "sxm4", "sxm5"}


def _most_words(words: Iterable[str]) -> str | None:
    known = [key for key in GPUS if set(words).issuperset(key.split())]
    return max(known, key=lambda key: len(key.split()), default=None)


MOST_GPUS = 10**7 - 1
_COUNTED = re.compile(r"([1-9][0-9]{0,6})x(.+)", re.IGNORECASE | re.DOTALL)
_MEMORY = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)gb", re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """GPUs for which a run is planned.

    Attributes:
        gpus: the number of GPUs.
        gpu: the data sheet; for 128x80gb only the memory is known.
        name: the kind, as the user wrote it.
    """

    gpus: int
    gpu: Gpu
    name: str

    @property
    def memory(self) -> int:
        """Memory of a GPU in bytes, as PyTorch reports it."""
        if self.gpu.memory_gib:
            return int(self.gpu.memory_gib * 2**30)
        same_size = [g.memory_gib for g in GPUS.values() if g.memory_gb == self.gpu.memory_gb]
        return int(min(same_size) * 2**30) if same_size else int(self.gpu.memory_gb * 10**9)

    @property
    def is_timed(self) -> bool:
        """Whether the data sheet suffices to compute times."""
        return min(self.gpu.tflops, self.gpu.memory_gb_s, self.gpu.link_gb_s) > 0

    @staticmethod
    def parse(text: str, key: str) -> Hardware:
        """Return the hardware that `text`, the value of `key`, names.

        Raises:
            UserError: the text is malformed, or names an unknown GPU.
        """
        match = _COUNTED.fullmatch(text)
        count, kind = (int(match[1]), match[2]) if match else (None, text)
        if kind.endswith((".yaml", ".yml")):
            return _read(kind, key, count)
        memory, known = _MEMORY.fullmatch(kind), named_gpu(kind)
        if count is None or (memory is None and known is None):
            raise UserError(f"{key}: {text!r} is no hardware{_advice(kind, count)}")
        if memory is not None:
            return Hardware(count, Gpu(memory_gb=float(memory[1])), kind)
        assert known is not None
        return Hardware(count, GPUS[known], short_name(known))

    def __str__(self) -> str:
        if not self.gpu.tflops:
            return f"{self.gpus} x GPU of {self.gpu.memory_gb:g} GB"
        return f"{self.gpus} x {self.name} of {self.gpu.memory_gb:g} GB"


def _advice(kind: str, count: int | None) -> str:
    """Return the clause that says what to write in place of an unknown name."""
    names = [short_name(name) for name in GPUS]
    write = "; write how many GPUs and which: 8xh100, 64xa100-80gb, 128x80gb (memory alone)"
    if count is None:
        return f"{write}, 8xmy-gpu.yaml"
    return nearest(kind.lower(), names) or f"{write}; known: {', '.join(names)}"


def _read(path: str, key: str, count: int | None) -> Hardware:
    """Read the data sheet in a user's file."""
    file = find_file(path, key)
    values = read_yaml(file)
    like, gpus = values.pop("like", None), values.pop("gpus", None)
    problems = [*_wrong_base(like), *_wrong_count(gpus)]
    build_problems: list[Problem] = []
    base = {} if problems or like is None else dataclasses.asdict(GPUS[str(named_gpu(like))])
    if "memory_gb" in values:
        base.pop("memory_gib", None)
    gpu = build(Gpu, {**base, **values}, build_problems)
    problems += [problem.line for problem in build_problems]
    if not build_problems:
        problems += [*check_fields("", gpu), *_missing(gpu, count or gpus)]
    number = count if count is not None else gpus
    if number is None:
        problems.append(f"gpus: is missing; write it, or {key}=8x{path}")
    if problems:
        raise UserError(*(f"{key}: {path}: {line}" for line in problems))
    assert isinstance(number, int)
    return Hardware(number, gpu, Path(path).stem)


def _wrong_base(like: Any) -> list[str]:
    if like is None or (isinstance(like, str) and named_gpu(like)):
        return []
    names = [short_name(name) for name in GPUS]
    return [f"like: {like!r} is not known{nearest(str(like), names)}; one of {', '.join(names)}"]


def _wrong_count(gpus: Any) -> list[str]:
    is_count = isinstance(gpus, int) and not isinstance(gpus, bool) and 1 <= gpus <= MOST_GPUS
    return [] if gpus is None or is_count else [f"gpus: {gpus!r}; write a number from 1 up"]


def _missing(gpu: Gpu, gpus: Any) -> list[str]:
    """Return an error line for each key that is missing to compute memory and times."""
    needed = ["tflops", "memory_gb", "memory_gb_s", "link_gb_s"]
    if isinstance(gpus, int) and gpus > gpu.node:
        needed.append("network_gb_s")
    lacking = [name for name in needed if getattr(gpu, name) <= 0]
    return [f"{name}: is missing; write it, or like: h100" for name in lacking]
