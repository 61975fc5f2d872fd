"""Time of a run: goodput of a supervised run, and a breakdown of step times.

`report` calls `goodput_tile` and `time_bar`. Goodput is computed from metrics.jsonl, which has only
the final execution of repeated steps, and from the supervisor's events. Time between two manual
starts does not count. If the clock was set during a run, the total is correct, but the split
between "starting" and "lost" may be wrong. The breakdown of a step comes from time/step/*
(`train/callbacks.py`). Evaluation and saving happen between steps and have separate metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from markupsafe import Markup

from llmfoundry.loggers.console import duration, percent
from llmfoundry.loggers.metrics_file import BATCH, WALL
from llmfoundry.loggers.pages.charts import is_number
from llmfoundry.loggers.pages.page import Tile, fill, part, table, together

PREFIX = "time/step/"
TRAINING, EVALUATION, SAVING = "time/train", "time/val", "time/checkpoint_blocking"
ENERGY = "gpu/energy_kwh"  # of all GPUs, from the start of the process
CPU_ENERGY = "cpu/energy_kwh"  # of the processors and memory of all machines, likewise
_LEAST = 0.001  # minimal fraction that the tile shows
LONGEST_PAUSE = 330.0
"""Maximal seconds between two attempts of a supervisor: its decide.py waits for at most 300 s."""
_LEAST_NAMED = 0.1  # fraction of the bar from which the name of a part fits into it
_SAYS = {
    "data": "waiting for the batch, and copying it to the device",
    "forward": "forward passes of all microbatches",
    "backward": "backward passes, with what is computed again",
    "messages": "waiting for other processes, and packing what is sent",
    "optimizer": "norm, clipping and the update",
    "logging": "metrics of logged steps",
    "other": "callbacks, and the host's own work",
    "evaluation": "held-out text and the gauntlet",
    "saving": "checkpoints, as far as training waits for them",
}
_ORDER = tuple(_SAYS)
Rows = Sequence[Mapping[str, Any]]


def goodput(rows: Rows, events: Rows) -> dict[str, float]:
    """Return the seconds of a run by activity; empty for a run without a supervisor.

    Args:
        rows: rows of metrics.jsonl, in order of steps.
        events: events of events.jsonl, in order of time.

    Returns:
        Seconds by name: training, evaluation, saving, starting (from a start of the process to the
        start of its first step), lost (repeated steps, waiting, hangs) and the total, "whole".
    """
    starts = [event for event in events if event.get("kind") == "start"]
    rows = [row for row in rows if WALL in row]
    if not starts or not rows:
        return {}
    total = whole_seconds(events, rows)
    seconds = {
        "training": sum(grown(rows, TRAINING)),
        "evaluation": sum(grown(rows, EVALUATION)),
        "saving": float(sum(row.get(SAVING, 0.0) for row in rows)),
        "starting": sum(_starting(starts, rows)),
    }
    seconds["lost"] = max(0.0, total - sum(seconds.values()))
    return {**seconds, "whole": total}


def goodput_tile(rows: Rows, events: Rows) -> Iterator[Tile]:
    """Yield the headline number of the report, if goodput is known."""
    seconds = goodput(rows, events)
    total = seconds.pop("whole", 0.0)
    if total > 0:
        training = seconds.pop("training")
        text = f"of {duration(total)}"
        # name the other activities that took a visible share
        shares = [(activity, value / total) for activity, value in seconds.items()]
        visible = [f"{activity} {percent(share)}" for activity, share in shares if share >= _LEAST]
        if visible:
            text += f"; {', '.join(visible)}"
        yield Tile("goodput", percent(min(1.0, training / total)), text)


def whole_seconds(events: Rows, rows: Rows) -> float:
    """Return the seconds of all attempts of a supervisor and of the pauses between them.

    An attempt that is still running lasts until the last row of metrics.jsonl. The duration of an
    attempt is the one that the supervisor measured, because the clock may be set meanwhile.
    """
    total, start, end = 0.0, None, None
    for event in events:
        when = float(event["time"])
        if event.get("kind") == "start":
            # the pause before an attempt, unless a person started the run again
            if end is not None and event.get("attempt") != 1:
                total += min(LONGEST_PAUSE, max(0.0, when - end))
            start, end = when, None
        elif event.get("kind") == "decision" and start is not None:
            total += _value(event, "took") if "took" in event else max(0.0, when - start)
            start, end = None, when
    return total if start is None else total + max(0.0, rows[-1][WALL] / 1000 - start)


def grown(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[float]:
    """Yield the increments of a cumulative metric, which each process restarts at zero."""
    last = 0.0
    for row in rows:
        if name in row:
            value = float(row[name])
            yield growth(last, value)
            last = value


def growth(last: float, value: float) -> float:
    """Return the increment between two values of a cumulative metric; a smaller value restarts."""
    return value - last if value >= last else value


def _starting(starts: Rows, rows: Rows) -> Iterator[float]:
    """Yield the seconds from each start to its first step, for starts that logged a row."""
    times = [float(start["time"]) for start in starts]
    for start, next_start in zip(times, [*times[1:], float("inf")], strict=True):
        attempt_rows = []
        for row in rows:
            if start <= row[WALL] / 1000 < next_start and TRAINING in row:
                attempt_rows.append(row)
        if attempt_rows:
            first = min(attempt_rows, key=lambda row: row[BATCH])
            yield max(0.0, first[WALL] / 1000 - start - first[TRAINING])


@dataclass(frozen=True)
class TimePart:
    """Time of one activity of a run.

    Attributes:
        name: name of the activity.
        seconds: total seconds.
        usual: median seconds per step; NaN for activities between steps.
    """

    name: str
    seconds: float
    usual: float


def run_parts(rows: Rows) -> list[TimePart]:
    """Return the activities of a run in a fixed order; empty if they were not measured."""
    # names of the measured activities
    timed_rows = [row for row in rows if any(name.startswith(PREFIX) for name in row)]
    names = set()
    for row in timed_rows:
        for name in row:
            if name.startswith(PREFIX):
                names.add(name.removeprefix(PREFIX))

    # total seconds; a row stands for all steps since the previous row
    totals, last_batch = dict.fromkeys(names, 0.0), 0
    for row in timed_rows:
        steps, last_batch = max(1, row[BATCH] - last_batch), row[BATCH]
        for name in names:
            totals[name] += _value(row, PREFIX + name) * steps
    medians = {name: median([_value(row, PREFIX + name) for row in timed_rows]) for name in names}
    if timed_rows:
        totals["evaluation"] = sum(grown(rows, EVALUATION))
        totals["saving"] = sum(_value(row, SAVING) for row in rows)

    # fixed order; unknown names come last
    ordered = sorted(totals, key=lambda name: (*_ORDER, name).index(name))
    parts = [TimePart(name, totals[name], medians.get(name, float("nan"))) for name in ordered]
    return [one for one in parts if one.seconds > 0]


def time_bar(rows: Rows) -> Markup:
    """Return the chart of a run's time and a table of its numbers; empty if not measured."""
    parts = run_parts(rows)
    total = sum(one.seconds for one in parts)
    if not total:
        return Markup()
    segments = [_segment(one, total) for one in parts]
    hint = "of the main process: steps, evaluation and saving"
    bar = together([part("time_bar", f"{duration(total)} in all", hint, segments)], "charts apart")
    keys = ("name", "all", "share", "usual", "says")
    table_rows = [[segment[key] for key in keys] for segment in segments]
    numbers = table(("", "in all", "share", "usual step", ""), table_rows, right=(1, 2, 3))
    return bar + part("folded", "In numbers", numbers, "", "group")


def _segment(one: TimePart, total: float) -> dict[str, Any]:
    """Return the segment of the bar for an activity; its color is the same in every report."""
    number = _ORDER.index(one.name) if one.name in _ORDER else len(_ORDER)
    is_per_step = not math.isnan(one.usual)
    return {
        "name": one.name,
        "seconds": round(one.seconds, 6),
        "all": duration(one.seconds),
        "share": percent(one.seconds / total),
        "usual": f"{one.usual * 1e3:.1f} ms" if is_per_step else "",
        "says": _SAYS.get(one.name, ""),
        "color": fill(number % 10),
        "is_named": one.seconds / total >= _LEAST_NAMED,
    }


def _value(row: Mapping[str, Any], name: str) -> float:
    """Return the value of a metric in a row; 0 if it is missing or no number."""
    value = row.get(name, 0.0)
    return float(value) if is_number(value) else 0.0
