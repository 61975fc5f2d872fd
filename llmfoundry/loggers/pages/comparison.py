"""Several runs on one page: their numbers, their curves laid over one another, what differs.

`cli/commands/compare.py` writes it, of metrics.jsonl, run.json, recipe.yaml and eval/*.json in each
run's folder alone, so that it can be written at any time, while the runs go too. The idea: a run
has one color everywhere, and every curve is kept by tokens, by steps and by hours of computing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write, read_json_if_there
from llmfoundry.loggers.console import duration, percent, short_count
from llmfoundry.loggers.metrics_file import BATCH, TOKEN, milliseconds
from llmfoundry.loggers.pages import coordinates, eval_page
from llmfoundry.loggers.pages.charts import (
    EVAL_BPB,
    EVAL_LOSS,
    GAUNTLET,
    MEMORY,
    MFU,
    NORM,
    SPEED_METRIC,
    TRAIN_BPB,
    TRAIN_LOSS,
    Chart,
    Line,
    Rows,
    is_number,
    line_chart,
    metric_names,
    stretch_ends,
)
from llmfoundry.loggers.pages.page import breakable, page, part, table, together
from llmfoundry.loggers.pages.report import STATUS, averages, metric_rows, read_evaluations
from llmfoundry.loggers.pages.run_time import EVALUATION, TRAINING, grown
from llmfoundry.recipe.typed import flat
from llmfoundry.recipe.yaml_file import read_yaml
from llmfoundry.redaction import public

POINTS = 4000  # of all lines of a chart together
LEAST_POINTS = 100  # of one line
OWN_KEYS = ("run_name", "save_folder", "pause_at", "autoresume", "save_overwrite")
"""Of which the numbers of a run do not depend."""
PAUSED = "paused"  # a status begins so, of a run that pause_at has ended
_SWEPT_KEY = re.compile(r"(?:^|,)([\w./@+~-]+)=((?:(?!,[\w./@+~-]+=).)*)")
"""In a folder's name, as a sweep gives it: key=value,key=value."""
MOST_AXES = 8  # keys beside one another
DECIDING = (EVAL_BPB, EVAL_LOSS, TRAIN_BPB, TRAIN_LOSS)
"""What the best run has least of: the first that all runs have. A loss compares only where the
tokenizer is the same."""
COLUMNS = {EVAL_BPB: "bits per byte, validation", EVAL_LOSS: "loss, validation"}
COLUMNS |= {TRAIN_BPB: "bits per byte, training", TRAIN_LOSS: "loss, training"}
HOURS = "hours"
_FALLING: dict[str, Any] = {"smooth": True, "steep": True}
CHARTS = (
    Chart("Training loss", {"": TRAIN_LOSS}, "nats/token", **_FALLING),
    Chart("Validation loss", {"": EVAL_LOSS}, "nats/token", steep=True),
    Chart("Training bits per byte", {"": TRAIN_BPB}, **_FALLING),
    Chart("Validation bits per byte", {"": EVAL_BPB}, steep=True),
    Chart("Gradient norm", {"": NORM}, "global L2, before clipping", smooth=True),
    Chart("Throughput", {"": SPEED_METRIC}, "tokens/s", "count", smooth=True, from_zero=True),
    Chart("MFU", {"": MFU}, "% of the GPU's peak", "tenth", from_zero=True, scale=100),
    Chart("Peak memory", {"": MEMORY}, "GiB", "size", from_zero=True),
)


@dataclass
class ComparedRun:
    """What is read of a run's folder.

    Attributes:
        folder: of the run.
        name: how the page calls it, unlike any other run's.
        status: a key of STATUS, or running.
        rows: of metrics.jsonl, finite or not; HOURS are of training and evaluation so far, pauses
            left out.
        settings: of recipe.yaml, by dotted key, as text.
        evaluation: the last gauntlet's result; empty: there is none.
    """

    folder: Path
    name: str
    status: str
    rows: Rows
    settings: dict[str, str]
    evaluation: dict[str, Any] = field(default_factory=dict)

    def last(self, metric: str) -> float | None:
        """The last value that was logged, finite or not; None: there is none."""
        found = (float(row[metric]) for row in reversed(self.rows) if is_number(row.get(metric)))
        return next(found, None)

    def middle(self, metric: str) -> float | None:
        """The median of what was logged and is finite; None: nothing was."""
        logged = (row[metric] for row in self.rows if is_number(row.get(metric)))
        found = [value for value in logged if math.isfinite(value)]
        return median(found) if found else None


def read_run(folder: Path, name: str, *, is_held: bool) -> ComparedRun:
    """What the page needs of a run's folder; `is_held`: a process is at work there.

    Raises:
        UserError: a file in it cannot be read, or does not hold what a run writes there.
    """
    run = _mapping(folder / "run.json")
    summary = run.get("summary")
    status = str(summary.get("status", "running")) if isinstance(summary, dict) else "running"
    if status == "running" and not is_held:
        status = "not finished"  # its process was killed, or lost its machine
    recipe = folder / "recipe.yaml"
    values = read_yaml(recipe) if recipe.exists() else {}
    if status == "killed" and values.get("pause_at") is not None:
        status = PAUSED
    settings = {key: _as_text(value) for key, value in flat(values) if key not in OWN_KEYS}
    evaluations = [found for found in _evaluations(folder) if found.get("tasks")]
    rows, seconds = metric_rows(folder), 0.0
    more = {key: grown(rows, key) for key in (TRAINING, EVALUATION)}
    for row in rows:
        seconds += sum(next(of_key) for key, of_key in more.items() if key in row)
        row[HOURS] = seconds / 3600
    return ComparedRun(folder, name, status, rows, settings, (evaluations or [{}])[-1])


def _mapping(path: Path) -> dict[str, Any]:
    """What a JSON file holds; empty: there is none."""
    try:
        found = read_json_if_there(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no object of JSON; restore or delete it")
    return found


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """The gauntlet's results, oldest first."""
    for path in folder.glob("eval/*.json"):
        _mapping(path)
    return read_evaluations(folder)


def write_comparison(
    path: Path, runs: Sequence[ComparedRun], *, follows: bool, warnings: Sequence[str] = ()
) -> None:
    """Write the page; `follows`: it will be written again, and an open one reloads itself.

    `warnings` are lines about runs that could not be read.
    """
    going = sum(run.status == "running" for run in runs)
    is_open = follows or any(run.status in ("not begun", "not finished") for run in runs)
    sections = [
        ("Runs", run_table(runs, path.parent) + (part("listed", warnings) if warnings else "")),
        ("Settings and result", parallel_coordinates(runs)),
        ("Training", charts(runs)),
        ("Differing settings", settings_table(runs)),
        ("Evaluation", evaluation(runs)),
    ]
    html = page(
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        status=f"running: {going}" if going else "not finished" if is_open else "finished",
        reached="",
        tiles=[],
        sections=sections,
        has_charts=True,
        written=milliseconds() if follows else 0,
    )
    atomic_write(path, html)


@dataclass(frozen=True)
class Verdict:
    """Which runs are best, by what, and the sentences that say so."""

    metric: str
    best: Sequence[int]
    lines: Sequence[str]


def verdict(runs: Sequence[ComparedRun]) -> Verdict | None:
    """The run with the least of what decides, several where they tie; None: nothing decides.

    Those that finished are judged, where any has; else those that were paused, as by halving, else
    all that have not failed. A single one that finished has won against those paused. A run that
    ended with a value that is not finite is never the best.
    """
    judged = [n for n, run in enumerate(runs) if run.status == "finished"]
    paused = [n for n, run in enumerate(runs) if run.status.startswith(PAUSED)]
    judged = judged or paused or [n for n, run in enumerate(runs) if run.status in _MAY_WIN]
    for metric in DECIDING:
        last = {n: value for n in judged if (value := runs[n].last(metric)) is not None}
        if judged and len(last) == len(judged) and len({*judged, *paused}) > 1:
            finite = {n: value for n, value in last.items() if math.isfinite(value)}
            best = [n for n in finite if finite[n] == min(finite.values())]
            return Verdict(metric, best, list(_sentences(runs, judged, metric, best)))
    return None


_MAY_WIN = ("running", "not finished", "killed")


def _sentences(
    runs: Sequence[ComparedRun], judged: Sequence[int], metric: str, best: Sequence[int]
) -> Iterator[str]:
    what, by_status = COLUMNS[metric], dict[str, list[str]]()
    if best:
        names = _named([runs[n].name for n in best])
        who = names if len(best) == 1 else f"a tie of {names}"
        value = runs[best[0]].last(metric)
        yield f"best: {who}, by the least {what} at the end of each run: {value:.4f}"
    lost = [runs[n].name for n in judged if not math.isfinite(runs[n].last(metric) or 0)]
    if lost:
        yield f"not finite at the end: {_named(lost)}"
    for n in sorted({*range(len(runs))} - {*judged}):
        by_status.setdefault(STATUS.get(runs[n].status, runs[n].status), []).append(runs[n].name)
    for status, left in by_status.items():
        yield f"not compared, {status}: {_named(left)}"
    if best and len({runs[n].rows[-1][BATCH] for n in judged}) > 1:
        yield "the runs that are compared did not end at the same step"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 6 else ""
    return ", ".join(names[: 5 if more else None]) + more


HEAD = ("run", "status", "steps", "tokens", "time", *COLUMNS.values(), "tokens/s", "MFU")


def run_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """A row of text for each run, as HEAD names them."""
    rows = []
    for run in runs:
        speed, use = run.middle(SPEED_METRIC), run.middle(MFU)
        losses = (run.last(metric) for metric in COLUMNS)
        rows.append(
            (
                run.name,
                STATUS.get(run.status, run.status),
                f"{run.rows[-1][BATCH]:,}" if run.rows else "0",
                short_count(run.rows[-1][TOKEN]) if run.rows else "0",
                duration(3600 * run.rows[-1][HOURS]) if run.rows else "",
                *("" if value is None else f"{value:.4f}" for value in losses),
                "" if speed is None else short_count(speed),
                "" if use is None else percent(use),
            )
        )
    return rows


def run_table(runs: Sequence[ComparedRun], beside: Path) -> Markup:
    """The runs, each with its color and a link to its report, the best marked."""
    found, rows = verdict(runs), []
    for i, (run, row) in enumerate(zip(runs, run_rows(runs), strict=True)):
        report = run.folder / "report.html"
        link = quote(os.path.relpath(report, beside)) if report.exists() else ""
        name = breakable(run.name)
        name = Markup('<a href="{}">{}</a>').format(link, name) if link else name
        mark = Markup(' <span class="hint">best</span>') if found and i in found.best else ""
        rows.append((part("swatch", i) + name + mark, *row[1:]))
    used = [n for n in range(len(HEAD)) if n < 2 or any(row[n] for row in rows)]
    listed = [[row[n] for n in used] for row in rows]
    right = range(2, len(used))
    shown = table([HEAD[n] for n in used], listed, right=right, is_wide=True)
    lines = found.lines if found is not None else ()
    return shown + Markup().join(Markup('<p class="hint">{}</p>').format(line) for line in lines)


def parallel_coordinates(runs: Sequence[ComparedRun]) -> Markup:
    """Draw the keys of a sweep against the result; nothing where fewer than two keys were swept."""
    found = verdict(runs)
    known = {n: run for n, run in enumerate(runs) if run.settings}
    swept = _swept([*known.values()])
    swept_keys = [*next(iter(swept.values()), {})]
    if found is None or len(swept_keys) < 2:
        return Markup()
    settings = {n: run.settings | swept[run.name] for n, run in known.items()}
    shown = swept_keys[:MOST_AXES]
    values = [run.last(found.metric) for run in known.values()]
    axes = [coordinates.key_axis(key, [settings[n].get(key, "") for n in known]) for key in shown]
    words = {
        n: "\n".join(
            [
                run.name + (", best" if n in found.best else ""),
                *(f"{key}: {settings[n].get(key, '')}" for key in shown),
                f"{COLUMNS[found.metric]}: {'none' if value is None else f'{value:.4f}'}",
                STATUS.get(run.status, run.status),
            ]
        )
        for (n, run), value in zip(known.items(), values, strict=True)
    }
    hidden = len({*differing(runs)} - {*shown})
    more = f"; {hidden} more keys below" if hidden else ""
    hint = "a line is a run, the best is bold, dashed: no finite end" + more
    result = coordinates.result_axis(COLUMNS[found.metric], values)
    return coordinates.drawn("Keys against result", hint, [*axes, result], words, found.best)


def _swept(runs: Sequence[ComparedRun]) -> dict[str, dict[str, str]]:
    """By each run's name the keys that a sweep named its folder by, and the values.

    Keys of one value alone are left out; empty where a folder is not named so.
    """
    named = {run.name: dict(_SWEPT_KEY.findall(run.folder.name)) for run in runs}
    keys = [*next(iter(named.values()), {})]
    if any([*values] != keys for values in named.values()):
        return {}
    keys = [key for key in keys if len({values[key] for values in named.values()}) > 1]
    return {name: {key: values[key] for key in keys} for name, values in named.items() if keys}


def charts(runs: Sequence[ComparedRun]) -> Markup:
    """The standard pictures with a line for each run, then the gauntlet's averages."""
    names = dict.fromkeys(name for run in runs for name in averages(run.evaluation))
    scores = [Chart(name.replace("_", " "), {"": f"{GAUNTLET}{name}"}) for name in names]
    there = {name for run in runs for name in metric_names(run.rows)}
    drawn = [_overlaid(chart, runs) for chart in (*CHARTS, *scores) if chart.metrics[""] in there]
    return together(drawn, "charts") or Markup('<p class="hint">No step was logged.</p>')


def _overlaid(chart: Chart, runs: Sequence[ComparedRun]) -> Markup:
    (metric,) = chart.metrics.values()
    limit = max(LEAST_POINTS, POINTS // len(runs))
    lines, axes = [], []
    for run in runs:  # one without values too: a run's color is its number
        rows = [row for row in run.rows if is_number(row.get(metric))]
        points = [(float(row[TOKEN]), float(row[metric]) * chart.scale) for row in rows]
        lines.append(Line(run.name, points, metric))
        axes.append(_axes([rows[end] for end in stretch_ends(len(rows), limit)]))
    ends = _axes([run.rows[-1] for run in runs if run.rows])
    return line_chart(
        chart,
        lines,
        x_end=max(ends["tokens"], default=0.0),
        limit=limit,
        axes=axes,
        ends={name: max(values, default=0.0) or 1.0 for name, values in ends.items()},
    )


def _axes(rows: Rows) -> dict[str, list[float]]:
    """Of rows, the place along each axis that a reader may choose."""
    return {
        "tokens": [float(row[TOKEN]) for row in rows],
        "steps": [float(row[BATCH]) for row in rows],
        "hours": [float(f"{row[HOURS]:.6g}") for row in rows],
    }


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Keys whose values are not the same in all runs that have a recipe, in its order."""
    known = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in known for key in run.settings)
    return [key for key in keys if len({run.settings.get(key) for run in known}) > 1]


def settings_table(runs: Sequence[ComparedRun]) -> Markup:
    """The keys that differ, and their values in each run that has a recipe."""
    known = [run for run in runs if run.settings]
    rows = [(key, *(run.settings.get(key, "") for run in known)) for key in differing(runs)]
    if not rows:
        return Markup('<p class="hint">None: the recipes are the same.</p>') if known else Markup()
    return table(("key", *(run.name for run in known)), rows, is_wide=True)


def evaluation(runs: Sequence[ComparedRun]) -> Markup:
    """The last gauntlet of each run, as an evaluation's page shows several models.

    Runs without one are there too: a run's color and number are its place among all.
    """
    if not any(run.evaluation for run in runs):
        return Markup()
    results = [(run.name, run.evaluation or {"tasks": []}) for run in runs]
    drawn = (
        eval_page.models_table(results, []),
        eval_page.not_comparable(results),
        eval_page.score_charts(results),
        eval_page.score_table(results),
        eval_page.task_table(results),
    )
    return Markup().join(drawn)


def _as_text(value: Any) -> str:
    return public("" if value is None else str(value))
