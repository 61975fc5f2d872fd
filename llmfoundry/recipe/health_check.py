"""The `health_check` section: whether GPUs, machines and links are sound before a run begins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.data import n_bytes
from llmfoundry.recipe.values.bounds import PATH, Range, choice, out_of_bounds

BEFORE_RUN = ("none", "quick", "full")
UNITS = ("auto", "processes", "nodes")
_SIZE = re.compile(r"[0-9]{0,9}\.?[0-9]{1,9} ?[kmgt]?b", re.IGNORECASE)  # what n_bytes takes
_LARGEST = 64 * 10**9  # bytes of a payload: no device has more to spare


@dataclass
class HealthCheckConfig:
    """What scripts/check.py looks at, and whether a run looks before it begins.

    Quick: GPU counters (NVML), the kernel's log, every path of the recipe, clocks, limits, shared
    memory, versions. Full: also products, memory bandwidth, and all-reduces between all pairs.
    """

    before_run: Annotated[str, choice(BEFORE_RUN)] = "none"
    """none, quick (seconds) or full (burn_seconds and the pairs); a run does not begin where
    anything is bad, and ends with status 3."""
    kernel_log: Annotated[str | None, PATH] = None
    """A file with the kernel's messages; unset: /dev/kmsg, dmesg or journalctl, whichever this user
    may read."""
    kernel_log_hours: Annotated[float, Range(above=0, most=1e6)] = 24.0
    """How far back the kernel's messages count; what was mended before is no fault now."""
    min_free_disk: str = "10gb"
    """Bytes that must be free where the run writes."""
    max_clock_skew: Annotated[float, Range(above=0, most=1e6)] = 1.0
    """Seconds by which a machine's clock may differ from the others'."""
    burn_seconds: Annotated[float, Range(above=0, most=86_400, why="a day")] = 10.0
    """How long products are computed on every device at one time. 10 s finds slow and wrong
    devices; heat shows after 60 to 300."""
    pairs_of: Annotated[str, choice(UNITS)] = "auto"
    """What is paired for all-reduces: processes, or nodes with all their processes; auto: nodes
    where there are several, else processes."""
    pair_rounds: Annotated[int | None, Range(1, 2**20)] = None
    """Rounds of the tournament; unset: all, in which each meets each (one fewer than there are)."""
    payloads: list[str] = field(default_factory=list)
    """Sizes of the all-reduces; unset: [64kb, 64mb, 1gb] on GPUs, [4kb, 256kb, 4mb] on CPUs."""
    min_bus_bandwidth: Annotated[float | None, Range(above=0, most=1e6)] = None
    """GB/s that pairs of nodes must reach with the largest payload; unset: only pairs among
    themselves are compared."""
    timeout: Annotated[float, Range(above=0, most=86_400, why="a day")] = 60.0
    """Seconds after which a process, a path or a pair that does not answer is given up on."""

    def check(self, key: str = "health_check.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        sizes = {"min_free_disk": self.min_free_disk}
        sizes |= {f"payloads[{n}]": size for n, size in enumerate(self.payloads)}
        for name, size in sizes.items():
            if _SIZE.fullmatch(size.strip()) is None:
                yield f"{key}{name}: {size!r} is not a size; write a number and kb, mb, gb or tb"
            elif name != "min_free_disk" and not 4 <= n_bytes(size) <= _LARGEST:
                yield f"{key}{name}: {size} cannot be sent at once; write 4b to 64gb"

    def fill(self) -> None:
        """Nothing is derived before the devices are known."""
