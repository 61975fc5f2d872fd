"""What hardware must reach, and how much like devices may differ: the tables that verdicts go by.

Peaks of products are `models.counts.PEAK_FLOPS`, which the training loop's MFU goes by too; what
stands here has the same names. The idea: floors are generous, they find what is broken; what is
merely slow is found by comparison with the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmfoundry.models.counts import PEAK_FLOPS, known_device

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
