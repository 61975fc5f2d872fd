"""`Finding`: one answer of a check, and what all of them together mean.

Every judge of this room returns findings, `report` shows them and `commands/check.py` ends with the
status that they give. The idea: what could not be looked at is an answer too, never silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SOUND, UNCHECKED, NOTICE, BAD = "sound", "not checked", "notice", "bad"
LEVELS = (SOUND, UNCHECKED, NOTICE, BAD)
"""The best first. A notice is worth a look and no reason to take a machine out; bad is one."""

STATUS_BAD = 3
"""Exit status where anything is bad. 0: nothing is; 1: the check itself failed; 2: a mistake in the
command or its recipe."""


@dataclass(frozen=True)
class Finding:
    """What one check found of one thing.

    Attributes:
        check: which: `gpus`, `kernel log`, `paths`, `host`, `compute`, `memory`, `pairs`.
        level: one of LEVELS.
        where: the machine, or the machines, as `node` or `node, GPU 3`.
        why: what was found, with its number and its limit.
        action: what to do about it; empty where nothing is to be done.
        nodes: the machines to take out of service because of it; empty where it cannot be said.
    """

    check: str
    level: str
    where: str
    why: str
    action: str = ""
    nodes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> str:
    """The worst level; what was not checked does not make the rest unsound."""
    return max((f.level for f in findings), key=LEVELS.index, default=SOUND)


def bad_nodes(findings: Iterable[Finding]) -> list[str]:
    """The machines that a bad finding names, for a scheduler to exclude."""
    named = (node for f in findings if f.level == BAD for node in f.nodes)
    return list(dict.fromkeys(named))


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else as they came."""
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


@dataclass(frozen=True)
class Report:
    """All that a check found; rank 0 has it.

    Attributes:
        findings: the worst first.
        level: the worst of them.
        nodes: the machines, by name.
        bad_nodes: those to take out of service.
        speeds: of each device: where, model, TFLOP/s, GB/s.
        pairs: of each payload in bytes: rows of (unit, unit, GB/s).
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
        """The worst of all findings."""
        return worst(self.findings)

    @property
    def bad_nodes(self) -> list[str]:
        """The machines to take out of service."""
        return bad_nodes(self.findings)

    @property
    def size(self) -> str:
        """`1 node`, `16 nodes`."""
        return f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
