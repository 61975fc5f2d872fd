"""events.jsonl as tags of a run, for stores that have some: a pure function.

A `BackgroundWriter` sends them when an attempt has made its first step, at each event and at the
end; the supervisor's last decision is sent by a process that it starts. The idea: tags are made of
the whole file each time, so whoever comes next also tells what was written while no process of the
run was there. Their number is bounded, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from llmfoundry.events import is_restart, names_in
from llmfoundry.redaction import public

_MOST_KINDS, _LONGEST = 20, 500
_OWN = ("start", "decision")  # the supervisor's, told by its own tags


def event_tags(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Tags of a run's events, in the order in which they were written; none where there are none.

    Returns:
        `events.KIND`: how many of a kind (of kinds beyond the twentieth together: `events.others`);
        `events.last`: the newest. Of a supervised run `supervise.attempts`, `supervise.restarts`,
        `supervise.last` (the newest decision), `supervise.cause` (why the attempt before it ended)
        and `supervise.bad_nodes` (machines that a check found bad).
    """
    events = list(events)
    seen = [event for event in events if event["kind"] not in _OWN]
    counts = Counter[str]()
    for event in seen:
        kind = str(event["kind"])
        counts[kind if kind in counts or len(counts) < _MOST_KINDS else "others"] += 1
    tags = {f"events.{kind}": str(n) for kind, n in counts.items()}
    if seen:
        tags["events.last"] = _line(seen[-1])
    return {**tags, **_supervised(events)}


def _supervised(events: list[Mapping[str, Any]]) -> dict[str, str]:
    decisions = [event for event in events if event["kind"] == "decision"]
    starts = sum(event["kind"] == "start" for event in events)
    tags = {"supervise.attempts": str(starts)} if starts else {}
    if decisions:
        bad = {node for event in decisions for node in names_in(event, "bad_nodes")}
        tags["supervise.restarts"] = str(sum(map(is_restart, decisions)))
        tags["supervise.last"] = _line(decisions[-1])
        tags |= {"supervise.cause": str(cause)} if (cause := decisions[-1].get("cause")) else {}
        tags |= {"supervise.bad_nodes": _cut(", ".join(sorted(bad)))} if bad else {}
    return tags


def _line(event: Mapping[str, Any]) -> str:
    """When, at which step, what was seen and what was done."""
    when = datetime.fromtimestamp(float(event["time"]), timezone.utc)
    step = "" if event.get("step") is None else f" step {event['step']}"
    done = event.get("done") or event.get("action") or "nothing is done"
    kind = "" if event["kind"] in _OWN else f" {event['kind']}:"
    return _cut(public(f"{when:%Y-%m-%d %H:%M:%S} UTC{step}{kind} {event.get('what')}; {done}"))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
