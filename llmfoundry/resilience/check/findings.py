"""`Finding`: one result of a check, and `Report`: what all of them together mean.

The judges of this package return findings, `report` shows them and `cli/commands/check.py`
exits with their status. The idea: what could not be checked is a result too, never silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SOUND, UNCHECKED, NOTICE, BAD = "sound", "not checked", "notice", "bad"
LEVELS = (SOUND, UNCHECKED, NOTICE, BAD)
"""As check.json has them, the best first. A notice is worth a look and no reason to take a machine
out; bad is one."""

STATUS_BAD = 3
"""Exit status where anything is bad. 0: nothing is; 1: the check itself failed; 2: a mistake in the
command or its recipe."""


@dataclass(frozen=True)
class Finding:
    """What one check found of one thing; its fields are those of check.json.

    Attributes:
        check: `gpus`, `kernel log`, `paths`, `host`, `compute`, `memory`, `pairs`, `processes`.
        level: one of LEVELS.
        where: the machine, or the machines, as `node` or `node, GPU 3`.
        why: what was found, with its number and its limit.
        action: what to do about it; empty where nothing is to be done.
        nodes: the machines to take out of service because of it; empty where it cannot be known.
    """

    check: str
    level: str
    where: str
    why: str
    action: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def severity(self) -> int:
        """0 for the best level."""
        return LEVELS.index(self.level)


@dataclass(frozen=True)
class Report:
    """All that a check found, on rank 0.

    Attributes:
        findings: the worst first.
        nodes: the machines, by name.
        speeds: of each device: where, model, TFLOP/s, GB/s.
        pairs: by payload in bytes: rows of (unit, unit, GB/s).
        units: names of what was paired, by number.
        seconds: that it took.
    """

    findings: list[Finding]
    nodes: list[str]
    speeds: list[dict[str, Any]] = field(default_factory=list)
    pairs: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def level(self) -> str:
        """The worst of all findings; what was not checked does not make the rest unsound."""
        return max((f.level for f in self.findings), key=LEVELS.index, default=SOUND)

    @property
    def bad_nodes(self) -> list[str]:
        """The machines that a bad finding names, for a scheduler to exclude."""
        named = (node for f in self.findings if f.level == BAD for node in f.nodes)
        return list(dict.fromkeys(named))

    @property
    def size(self) -> str:
        """`1 node`, `16 nodes`."""
        return f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
