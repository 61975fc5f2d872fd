"""Goodput of a supervised run: the share of its time in steps that count, and what ate the rest.

A pure function of metrics.jsonl, which keeps the rows of steps that were not done again, and of the
supervisor's events. Between two starts by hand time does not count. Where a clock was set during a
run, the whole is right, and what is called starting or lost may be the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.loggers.console import duration, percent
from llmfoundry.loggers.metrics import BATCH, WALL
from llmfoundry.loggers.pages.page import Tile

_TRAINING, _EVALUATION, _SAVING = "time/train", "time/val", "time/checkpoint_blocking"
_LEAST = 0.001  # a share that is shown
_LONGEST_PAUSE = 330.0  # seconds between two attempts: decide.py waits for 300 s at most
Rows = Sequence[Mapping[str, Any]]


def goodput(rows: Rows, events: Rows) -> dict[str, float]:
    """Seconds of a run by what they went into; empty where no supervisor has recorded any.

    Args:
        rows: of metrics.jsonl, in order of steps.
        events: of events.jsonl, in order of time.

    Returns:
        training, evaluation, saving, starting (from a start to its first step's beginning), lost
        (steps done again, waiting, hanging) and the sum, whole.
    """
    starts = [event for event in events if event.get("kind") == "start"]
    rows = [row for row in rows if WALL in row]
    if not starts or not rows:
        return {}
    whole = _whole(events, rows)
    training = sum(grown(rows, _TRAINING))
    found = {
        "training": training,
        "evaluation": sum(grown(rows, _EVALUATION)),
        "saving": float(sum(row.get(_SAVING, 0.0) for row in rows)),
        "starting": sum(_starting(starts, rows)),
    }
    found["lost"] = max(0.0, whole - sum(found.values()))
    return {**found, "whole": whole}


def goodput_tile(rows: Rows, events: Rows) -> Iterator[Tile]:
    """For the head of a report; nothing where it is not known."""
    found = goodput(rows, events)
    whole = found.pop("whole", 0.0)
    if whole > 0:
        training = found.pop("training")
        rest = [f"{k} {percent(v / whole)}" for k, v in found.items() if v / whole >= _LEAST]
        text = f"of {duration(whole)}" + (f"; {', '.join(rest)}" if rest else "")
        yield Tile("goodput", percent(training / whole), text)


def _whole(events: Rows, rows: Rows) -> float:
    """Seconds of attempts and between them, up to now where the last is still under way.

    An attempt's are those that its supervisor has counted, as a clock may be set meanwhile.
    """
    whole, begun, ended = 0.0, None, None
    for event in events:
        when = float(event["time"])
        if event.get("kind") == "start":
            if ended is not None and event.get("attempt") != 1:
                whole += min(_LONGEST_PAUSE, max(0.0, when - ended))
            begun, ended = when, None
        elif event.get("kind") == "decision" and begun is not None:
            whole += float(event.get("took", max(0.0, when - begun)))
            begun, ended = None, when
    return whole if begun is None else whole + max(0.0, rows[-1][WALL] / 1000 - begun)


def grown(rows: Rows, name: str) -> Iterator[float]:
    """How much a sum that each process begins anew has grown, row by row."""
    last = 0.0
    for row in rows:
        if name in row:
            value = float(row[name])
            yield value - last if value >= last else value
            last = value


def _starting(starts: Rows, rows: Rows) -> Iterator[float]:
    """From each start that has a row left, to the beginning of the first step."""
    times = [float(start["time"]) for start in starts]
    for begin, following in zip(times, [*times[1:], float("inf")], strict=True):
        own = [r for r in rows if begin <= r[WALL] / 1000 < following and _TRAINING in r]
        if own:
            first = min(own, key=lambda row: row[BATCH])
            yield max(0.0, first[WALL] / 1000 - begin - first[_TRAINING])
