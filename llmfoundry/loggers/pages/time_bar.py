"""Where a run's time went: one bar of the whole run, and beside it the seconds of a usual step.

`report` calls `time_bar`. Steps are divided by time/step/* (`train/step_time.py`); evaluation and
saving, which come between steps, have metrics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from statistics import median

from llmfoundry.loggers.console import duration, percent
from llmfoundry.loggers.metrics import BATCH
from llmfoundry.loggers.pages.frame import WIDTH, figure, svg, text
from llmfoundry.loggers.pages.goodput import grown
from llmfoundry.loggers.pages.page import table
from llmfoundry.loggers.pages.report_charts import Rows, is_number

PREFIX = "time/step/"
EVALUATION, SAVING = "time/val", "time/checkpoint_blocking"
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
_TOP, _HEIGHT = 4, 34
_LEAST_NAMED = 0.1  # share of the bar from which a part's name fits into it


@dataclass(frozen=True)
class Part:
    """What a part of the run took: seconds in all, and of a usual step, NaN between steps."""

    name: str
    seconds: float
    usual: float


def run_parts(rows: Rows) -> list[Part]:
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
    found = [Part(name, parts[name], usual.get(name, float("nan"))) for name in ordered]
    return [part for part in found if part.seconds > 0]


def time_bar(rows: Rows) -> str:
    """The figure; empty where no step was measured."""
    parts = run_parts(rows)
    whole = sum(part.seconds for part in parts)
    if not whole:
        return ""
    legend = (
        f'<span title="{escape(_SAYS.get(part.name, part.name))}"><svg viewBox="0 0 18 8">'
        f'<rect width="18" height="8" rx="2" style="{_fill(part)}"/></svg>{escape(part.name)}'
        f" {percent(part.seconds / whole)}</span>"
        for part in parts
    )
    drawn = svg("Where the time went", _bar(parts, whole), height=_TOP + _HEIGHT + 6)
    hint = ("hint", "of the main process: steps, evaluation and saving")
    bar = figure(f"{duration(whole)} in all", drawn, hints=[hint], legend=legend)
    rows_of_table = [
        (
            part.name,
            duration(part.seconds),
            percent(part.seconds / whole),
            _milliseconds(part.usual),
            _SAYS.get(part.name, ""),
        )
        for part in parts
    ]
    head = ("", "in all", "share", "usual step", "")
    numbers = table(head, rows_of_table, right=(1, 2, 3))
    return (
        f'<div class="charts apart">{bar}</div>'
        f'<details class="group"><summary>In numbers</summary>{numbers}</details>'
    )


def _bar(parts: list[Part], whole: float) -> Iterator[str]:
    left = 0.0
    for part in parts:
        share = part.seconds / whole
        width = share * WIDTH
        tip = escape(f"{part.name}: {duration(part.seconds)}, {percent(share)}")
        yield (
            f'<rect x="{left:.1f}" y="{_TOP}" width="{max(width - 1, 0.5):.1f}" height="{_HEIGHT}"'
            f' rx="2" style="{_fill(part)}"><title>{tip}</title></rect>'
        )
        if share >= _LEAST_NAMED:
            yield text(left + 7, _TOP + _HEIGHT / 2 + 4, escape(part.name), kind="axis inside")
        left += width


def _fill(part: Part) -> str:
    """A color for each part, the same in every report."""
    number = _ORDER.index(part.name) if part.name in _ORDER else len(_ORDER)
    return f"fill:var(--s{number % 10})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds == seconds else ""


def _value(row: dict[str, float], name: str) -> float:
    value = row.get(name, 0.0)
    return float(value) if is_number(value) else 0.0
