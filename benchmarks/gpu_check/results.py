"""What a check has found so far: `gpu-check.json`, of which the page is a view.

`runner` fills it and writes it after every item, `verdict` and `page` read it. One idea: an item
that did not run has its state and a reason, like one that did; nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""What an item measured; under `wrong` what is not right about it."""

VERSION = 1  # of the file's form
JSON_NAME, PAGE_NAME = "gpu-check.json", "gpu-check.html"

OK, WRONG, FAILED, MEMORY, TOO_LONG = "ok", "wrong", "failed", "out of memory", "too long"
NO_TIME, NOT_HERE, NOT_CHOSEN, WAITING = "no time", "not here", "not chosen", "waiting"
DEFECTS = (WRONG, FAILED, MEMORY, TOO_LONG)  # states of an item that something is wrong with
MISSING = (NO_TIME, WAITING)  # states of an item that was to run and did not
DONE = (OK, *DEFECTS)


@dataclass
class ItemResult:
    """One process's result.

    Attributes:
        name: within its step.
        state: one of the words above.
        reason: why it is not `ok`.
        seconds: of wall time.
        rows: what it measured, also where it was ended before its time.
        log: the last lines that it printed, where it failed.
    """

    name: str
    state: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    log: str = ""


@dataclass
class StepResult:
    """A step's items, in the order in which they run."""

    name: str
    title: str
    items: list[ItemResult] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, with its item's name."""
        yield from ((item.name, row) for item in self.items for row in item.rows)


@dataclass
class Results:
    """All of a check.

    Attributes:
        device: as it was asked for, `cuda` or `cpu`.
        minutes: the budget.
        started: date and time.
        status: running, finished or stopped.
        seconds: so far.
        facts: of device and libraries, as the first item found them.
        steps: in order of importance.
    """

    device: str
    minutes: float
    started: str
    status: str = "running"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)

    def step(self, name: str) -> StepResult:
        """The step of a name; an empty one where there is none."""
        return next((step for step in self.steps if step.name == name), StepResult(name, name))

    def items(self) -> Iterator[tuple[StepResult, ItemResult]]:
        """Every item with its step."""
        yield from ((step, item) for step in self.steps for item in step.items)

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, default=str) + "\n"

    @classmethod
    def read(cls, path: Path) -> Results | None:
        """What an earlier check left; None where nothing of this form is there."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("version") != VERSION:
                return None
            steps = [
                StepResult(s["name"], s["title"], [ItemResult(**item) for item in s["items"]])
                for s in content.pop("steps")
            ]
            return cls(**content, steps=steps)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
