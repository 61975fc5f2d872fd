"""What kinds of GPU compute, hold, move and send: the one table of data sheets.

MFU (`models/counts.py`), the machine check's floors (`resilience/check/`) and the plan of a run
(`plan/seconds.py`) read it. `front/hardware.py` reads what a user writes, such as 8xh100.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range

_RATE = Range(0, 1e9, "no hardware does that")


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its maker's data sheet; no field is a measurement but `reached`."""

    tflops: Annotated[float, _RATE] = 0.0
    """TFLOP/s of dense products in bfloat16 (in fp16 where there is no bfloat16)."""
    memory_gb: Annotated[float, _RATE] = 0.0
    """GB (10^9 bytes) of memory; of several sizes the least."""
    memory_gb_s: Annotated[float, _RATE] = 0.0
    """GB/s of that memory."""
    fp8_tflops: Annotated[float, _RATE] = 0.0
    """TFLOP/s of dense products in 8 bits; 0: it has none."""
    link_gb_s: Annotated[float, _RATE] = 0.0
    """GB/s to the other GPUs of its node, in one direction: NVLink, Infinity Fabric, else PCIe."""
    network_gb_s: Annotated[float, _RATE] = 0.0
    """GB/s to other nodes, in one direction: its share of the node's network cards."""
    node: Annotated[int, Range(1, 4096)] = 8
    """GPUs that `link_gb_s` connects."""
    switched: bool = False
    """Whether that link is NVLink through switches, which is checked before runs."""
    reached: Annotated[float, Range(above=0, most=1)] = 0.75
    """Share of tflops that the fastest product reaches. Measured on A100, H100, H200, GH200, B200,
    GB200, MI300X and MI325X (S. Bekman, Machine Learning Engineering, table of maximum achievable
    matmul FLOPS, 2024 to 2025); of the others a guess."""


GPUS = {  # by words of torch.cuda.get_device_name(); most words win
    "GB200": Gpu(2500, 186, 8000, 5000, 900, 50, node=72, switched=True, reached=0.729),
    "B200": Gpu(2250, 180, 7700, 4500, 900, 50, switched=True, reached=0.776),
    "GH200": Gpu(989.5, 96, 4000, 1979, 450, 50, switched=True, reached=0.838),
    "H200": Gpu(989.5, 141, 4800, 1979, 450, 50, switched=True, reached=0.803),
    "H200 NVL": Gpu(835.5, 141, 4800, 1671, 64, 50),
    "H100": Gpu(989.5, 80, 3350, 1979, 450, 50, switched=True, reached=0.803),
    "H100 NVL": Gpu(835.5, 94, 3900, 1671, 64, 50),
    "H100 PCIe": Gpu(756, 80, 2000, 1513, 64, 50),
    "A100": Gpu(312, 40, 1555, 0, 300, 25, switched=True, reached=0.869),
    "A100 40GB": Gpu(312, 40, 1555, 0, 300, 25, switched=True, reached=0.869),
    "A100 80GB": Gpu(312, 80, 2039, 0, 300, 25, switched=True, reached=0.869),
    "A100 80GB PCIe": Gpu(312, 80, 1935, 0, 32, 25, reached=0.811),
    "L40S": Gpu(362, 48, 864, 733, 32, 12.5),
    "L40": Gpu(181, 48, 864, 362, 32, 12.5),
    "L4": Gpu(121, 24, 300, 242, 32, 12.5),
    "A10": Gpu(125, 24, 600, 0, 32, 12.5),
    "A10G": Gpu(70, 24, 600, 0, 32, 12.5),
    "V100": Gpu(125, 16, 900, 0, 150, 12.5),  # this one and T4 know fp16 only
    "V100 PCIE": Gpu(112, 16, 900, 0, 16, 12.5),
    "T4": Gpu(65, 16, 320, 0, 16, 12.5),
    "RTX 5090": Gpu(209.5, 32, 1792, 419, 64, 3.1),
    "RTX 4090": Gpu(165, 24, 1008, 330, 32, 3.1),
    "RTX 3090": Gpu(71, 24, 936, 0, 32, 3.1),
    "MI325X": Gpu(1307, 256, 6000, 2614, 448, 50, reached=0.604),
    "MI300X": Gpu(1307, 192, 5300, 2614, 448, 50, reached=0.514),
    "MI250X": Gpu(191.5, 64, 1638, 0, 50, 12.5),  # of one of its two dies, PyTorch's device
}
"""Of makers' data sheets. Products: NVIDIA's A100 (2021), H100 (2023), H200, GB200 NVL72 (2024),
L40S and Ada and Blackwell GeForce white papers; AMD's Instinct MI300X. B200's memory is of HGX
(7.7 TB/s, 180 GB). Links in one direction: NVLink 3, 4 and 5 of 300, 450 and 900 GB/s; PCIe 4 and
5 of 32 and 64 GB/s; seven Infinity Fabric links of 64 GB/s. Networks as makers' reference systems
have them: a card of 200 Gb/s for each A100, of 400 Gb/s for each H100 and later (DGX, HGX); cards
of 100 Gb/s for others, of 200 Gb/s a node of GeForce."""
CUT_DOWN = {"Laptop", "MIG", "D"}  # words of parts that have the name but not the peak


def known_gpu(device_name: str) -> str | None:
    """The key of GPUS for a device of PyTorch's; None where it is not in the table."""
    words = set(re.split(r"[\s/-]+", device_name))
    return None if words & CUT_DOWN else _most_words(words)


def named_gpu(text: str) -> str | None:
    """The key of GPUS that a user names: h100, H100-PCIe, a100-80gb, rtx-4090; None: no such."""
    plain = text.lower().replace("a100-40", "a100-40gb").replace("a100-80", "a100-80gb")
    words = set(re.split(r"[\s_-]+", plain.replace("gbgb", "gb"))) - _MAKERS
    same = (key for key in GPUS if set(key.lower().split()) == words)
    return next(same, None)


def short_name(key: str) -> str:
    """How a user writes a key of GPUS."""
    return key.lower().replace(" ", "-")


_MAKERS = {"nvidia", "amd", "geforce", "instinct", "sxm", "sxm4", "sxm5"}


def _most_words(words: Iterable[str]) -> str | None:
    known = [key for key in GPUS if set(words).issuperset(key.split())]
    return max(known, key=lambda key: len(key.split()), default=None)
