"""Energy of a machine's processors and memory, from Linux's powercap (Intel's RAPL, and AMD's).

Entry point: `RaplReader`, which `Watch` reads at every step. The kernel has a folder for each
package of cores (intel-rapl:0) and for its parts (intel-rapl:0:1). Counters are in microjoules and
start again at 0 after their largest value, which takes minutes at full power. On most machines only
root may read them; a machine without readable counters has no energy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:\d+(?P<part>:\d+)?")
_NUMBER = re.compile(r"[0-9]{1,20}")  # of 64 bits
_PACKAGE, _MEMORY = "package", "dram"  # memory is a part, but not in the package's counter


@dataclass
class _Counter:
    """A counter of the kernel, and its value in the last reading, in microjoules."""

    file: Path
    largest: int
    value: int


class RaplReader:
    """Reader of the energy counters of this machine.

    Attributes:
        counters: the readable counters; empty: there are none.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        """Find the counters below `folder`."""
        self.counters = []
        self._microjoules = 0
        for zone in sorted(folder.glob("intel-rapl:*")):
            counter = _open(zone)
            if counter is not None:
                self.counters.append(counter)

    def read(self) -> None:
        """Add the energy since the last reading; a counter that has disappeared adds none.

        A counter must be read before it has started again twice.
        """
        for counter in self.counters:
            value = _read(counter.file)
            if value is None:
                continue
            used = value - counter.value
            if used < 0:  # started again, after its largest value or with the machine
                used = used + counter.largest if used + counter.largest >= 0 else value
            self._microjoules += used
            counter.value = value

    def take(self) -> float:
        """Return the joules since the last call."""
        self.read()
        joules, self._microjoules = self._microjoules / 1e6, 0
        return joules


def _open(zone: Path) -> _Counter | None:
    """Return the counter of a package or its memory; None: another part, or not readable."""
    match = _ZONE.fullmatch(zone.name)
    name = _text(zone / "name") or ""
    wanted = _MEMORY if match and match["part"] else _PACKAGE
    if not match or not name.startswith(wanted):
        return None
    value, largest = _read(zone / "energy_uj"), _read(zone / "max_energy_range_uj")
    if value is None or largest is None:
        return None
    return _Counter(zone / "energy_uj", largest, value)


def _read(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None
