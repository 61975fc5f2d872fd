"""What happened to a run, for its report: marks on its charts, and a table.

`report` reads events.jsonl, which the watch, the monitor of hanging ranks and the supervisor write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from llmfoundry.loggers.metrics import BATCH, TOKEN
from llmfoundry.loggers.pages.page import table
from llmfoundry.redaction import public

Events = Sequence[Mapping[str, Any]]
Marks = Sequence[tuple[float, str]]
"""Tokens at which something happened, and what."""
_MOST_MARKS, _MOST_ROWS = 200, 1000


def marks(events: Events, rows: Sequence[Mapping[str, Any]]) -> Marks:
    """A mark for each of the newest events that belong to a step, of the rows of metrics.jsonl."""
    if not rows or not rows[-1][BATCH]:
        return []
    tokens = rows[-1][TOKEN] / rows[-1][BATCH]
    placed = [event for event in events if type(event.get("step")) is int]
    return [(event["step"] * tokens, _sentence(event)) for event in placed[-_MOST_MARKS:]]


def event_table(events: Events) -> str:
    """When, at which step, what was seen and what was done: the newest first."""
    head = ("time (UTC)", "step", "event", "seen", "done")
    return table(head, [_row(event) for event in reversed(events[-_MOST_ROWS:])], right=(1,))


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    when = datetime.fromtimestamp(float(event["time"]), timezone.utc)
    step = event.get("step")
    return (
        f"{when:%Y-%m-%d %H:%M:%S}",
        "" if step is None else str(step),
        str(event.get("kind", "")),
        public(str(event.get("what", ""))),
        public(str(event.get("done") or event.get("action") or "")),
    )


def _sentence(event: Mapping[str, Any]) -> str:
    _, _, kind, what, done = _row(event)
    return f"{kind}: {what}; {done}"
