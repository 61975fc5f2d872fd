"""What a run's time went into: goodput of a supervised run, and the parts of its steps.

`report` calls `goodput_tile` and `time_bar`. Goodput is a pure function of metrics.jsonl, which
keeps the rows of steps that were not done again, and of the supervisor's events. Between two starts
by hand time does not count. Where a clock was set during a run, the whole is right, and what is
called starting or lost may be the other. Steps are divided by time/step/* (`train/callbacks.py`);
evaluation and saving, which come between steps, have metrics of their own.
"""

from __future__ import annotations

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
_LEAST = 0.001  # a share of goodput that is shown
LONGEST_PAUSE = 330.0
"""Seconds between two attempts of a supervisor: its decide.py waits for 300 s at most."""
_LEAST_NAMED = 0.1  # share of the bar from which a part's name fits into it
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
    whole = whole_seconds(events, rows)
    training = sum(grown(rows, TRAINING))
    found = {
        "training": training,
        "evaluation": sum(grown(rows, EVALUATION)),
        "saving": float(sum(row.get(SAVING, 0.0) for row in rows)),
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
        yield Tile("goodput", percent(min(1.0, training / whole)), text)


def whole_seconds(events: Rows, rows: Rows) -> float:
    """Seconds of a supervisor's attempts and between them, of one under way up to the last row.

    An attempt's are those that its supervisor has counted, as a clock may be set meanwhile.
    """
    whole, begun, ended = 0.0, None, None
    for event in events:
        when = float(event["time"])
        if event.get("kind") == "start":
            if ended is not None and event.get("attempt") != 1:
                whole += min(LONGEST_PAUSE, max(0.0, when - ended))
            begun, ended = when, None
        elif event.get("kind") == "decision" and begun is not None:
            whole += _value(event, "took") if "took" in event else max(0.0, when - begun)
            begun, ended = None, when
    return whole if begun is None else whole + max(0.0, rows[-1][WALL] / 1000 - begun)


def grown(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[float]:
    """How much a sum that each process begins anew has grown, row by row."""
    last = 0.0
    for row in rows:
        if name in row:
            value = float(row[name])
            yield growth(last, value)
            last = value


def growth(last: float, value: float) -> float:
    """From a value of such a sum to the next."""
    return value - last if value >= last else value


def _starting(starts: Rows, rows: Rows) -> Iterator[float]:
    """From each start that has a row left, to the beginning of the first step."""
    times = [float(start["time"]) for start in starts]
    for begin, following in zip(times, [*times[1:], float("inf")], strict=True):
        own = [r for r in rows if begin <= r[WALL] / 1000 < following and TRAINING in r]
        if own:
            first = min(own, key=lambda row: row[BATCH])
            yield max(0.0, first[WALL] / 1000 - begin - first[TRAINING])


@dataclass(frozen=True)
class TimePart:
    """What a part of the run took: seconds in all, and of a usual step, NaN between steps."""

    name: str
    seconds: float
    usual: float


def run_parts(rows: Rows) -> list[TimePart]:
    """The parts of a run by time/step/*, in order; empty where nothing has measured them."""
    timed = [row for row in rows if any(name.startswith(PREFIX) for name in row)]
    names = {name.removeprefix(PREFIX) for row in timed for name in row if name.startswith(PREFIX)}
    parts, before = dict.fromkeys(names, 0.0), 0
    for row in timed:
        steps, before = max(1, row[BATCH] - before), row[BATCH]
        for name in names:
            parts[name] += _value(row, PREFIX + name) * steps
    usual = {name: median([_value(row, PREFIX + name) for row in timed]) for name in names}
    if timed:
        parts["evaluation"] = sum(grown(rows, EVALUATION))
        parts["saving"] = sum(_value(row, SAVING) for row in rows)
    ordered = sorted(parts, key=lambda name: (*_ORDER, name).index(name))
    found = [TimePart(name, parts[name], usual.get(name, float("nan"))) for name in ordered]
    return [one for one in found if one.seconds > 0]


def time_bar(rows: Rows) -> Markup:
    """The figure and its numbers; empty where no step was measured."""
    parts = run_parts(rows)
    whole = sum(one.seconds for one in parts)
    if not whole:
        return Markup()
    shown = [_shown(one, whole) for one in parts]
    hint = "of the main process: steps, evaluation and saving"
    bar = together([part("time_bar", f"{duration(whole)} in all", hint, shown)], "charts apart")
    keys = ("name", "all", "share", "usual", "says")
    rows_of_table = [[one[key] for key in keys] for one in shown]
    numbers = table(("", "in all", "share", "usual step", ""), rows_of_table, right=(1, 2, 3))
    return bar + part("folded", "In numbers", numbers, "", "group")


def _shown(one: TimePart, whole: float) -> dict[str, Any]:
    """How a part reads; its color is the same in every report."""
    number = _ORDER.index(one.name) if one.name in _ORDER else len(_ORDER)
    return {
        "name": one.name,
        "seconds": round(one.seconds, 6),
        "all": duration(one.seconds),
        "share": percent(one.seconds / whole),
        "usual": f"{one.usual * 1e3:.1f} ms" if one.usual == one.usual else "",
        "says": _SAYS.get(one.name, ""),
        "color": fill(number % 10),
        "is_named": one.seconds / whole >= _LEAST_NAMED,
    }


def _value(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name, 0.0)
    return float(value) if is_number(value) else 0.0
