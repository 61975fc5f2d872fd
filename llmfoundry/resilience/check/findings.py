"""Results of a check: `Finding` is one result, `Report` the results of all machines.

The judging functions of this package return findings. `check_report.py` prints them, and
`cli/commands/check.py` derives the exit status. A check that could not run is a finding too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SOUND, UNCHECKED, NOTICE, BAD = "sound", "not checked", "notice", "bad"
LEVELS = (SOUND, UNCHECKED, NOTICE, BAD)
"""Levels of findings in check.json, best first. Only `bad` is a reason to remove a machine."""

STATUS_BAD = 3
"""Exit status if a finding is bad. 0: none is bad; 1: the check itself failed; 2: a mistake in the
command or its recipe."""


@dataclass(frozen=True)
class Finding:
    """Result of one check of one machine or device; the fields are those of check.json.

    Attributes:
        check: `gpus`, `kernel log`, `paths`, `host`, `compute`, `memory`, `pairs`, `processes`.
        level: one of LEVELS.
        where: the machine or machines, as `node` or `node, GPU 3`.
        why: description with the measured value and its limit.
        action: what to do; empty: nothing.
        nodes: machines to remove because of it; empty: none, or it is not known which.
    """

    check: str
    level: str
    where: str
    why: str
    action: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def severity(self) -> int:
        """Index of the level in LEVELS; 0 is the best."""
        return LEVELS.index(self.level)


@dataclass(frozen=True)
class Report:
    """All results of a check, on rank 0.

    Attributes:
        findings: worst first.
        nodes: names of the machines.
        speeds: for each device: where, model, TFLOP/s, GB/s.
        pairs: rows of (unit, unit, GB/s), by payload in bytes.
        units: names of the units (ranks or nodes) of the pairs.
        seconds: duration of the check.
    """

    findings: list[Finding]
    nodes: list[str]
    speeds: list[dict[str, Any]] = field(default_factory=list)
    pairs: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def level(self) -> str:
        """Worst level of all findings."""
        return max((f.level for f in self.findings), key=LEVELS.index, default=SOUND)

    @property
    def bad_nodes(self) -> list[str]:
        """Machines of bad findings, for a scheduler to exclude."""
        nodes = list[str]()
        for finding in self.findings:
            if finding.level == BAD:
                nodes += finding.nodes
        return list(dict.fromkeys(nodes))

    @property
    def size(self) -> str:
        """Number of machines, as `1 node` or `16 nodes`."""
        return f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
