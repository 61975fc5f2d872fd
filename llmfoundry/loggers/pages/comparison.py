"""Comparison page of several runs: their results, their curves and their different settings.

`cli/commands/compare.py` calls `read_run` and `write_comparison`. The page is made only from
metrics.jsonl, run.json, recipe.yaml and eval/*.json of each save folder, so that it can be written
at any time, also during training. A run has the same color in all charts. The x axis of every curve
can be tokens, steps or hours of computation.
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
from llmfoundry.gauntlet.paired import PairedComparison
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
    ChartLine,
    Rows,
    is_number,
    line_chart,
    metric_names,
    stretch_ends,
)
from llmfoundry.loggers.pages.page import breakable, page, part, table, together
from llmfoundry.loggers.pages.paired_tables import paired_tables
from llmfoundry.loggers.pages.report import STATUS, averages, metric_rows, read_evaluations
from llmfoundry.loggers.pages.run_time import EVALUATION, TRAINING, grown
from llmfoundry.recipe.typed import flat
from llmfoundry.recipe.yaml_file import read_yaml
from llmfoundry.redaction import public

POINTS = 4000  # maximal number of points of a chart
LEAST_POINTS = 100  # number of points that each line may have in any case
OWN_KEYS = ("run_name", "save_folder", "pause_at", "autoresume", "save_overwrite")
"""Recipe keys that do not influence the results."""
PAUSED = "paused"  # beginning of the status of a run that pause_at has stopped
_SWEPT_KEY = re.compile(r"(?:^|,)([\w./@+~-]+)=((?:(?!,[\w./@+~-]+=).)*)")
"""A key in the folder name of a sweep's run: key=value,key=value."""
MOST_AXES = 8  # maximal number of keys in the chart
DECIDING = (EVAL_BPB, EVAL_LOSS, TRAIN_BPB, TRAIN_LOSS)
"""Metrics that decide the best run: the first one that all runs have, and less is better. A loss is
comparable only between runs with the same tokenizer."""
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
    """Data of one run for the comparison.

    Attributes:
        folder: save folder of the run.
        name: name on the page, unique among the runs.
        status: a key of STATUS, "running", "not finished" or a text that begins with PAUSED.
        rows: rows of metrics.jsonl. HOURS is added: hours of training and evaluation so far,
            without pauses.
        settings: values of recipe.yaml as text, by dotted key.
        evaluation: result of the last gauntlet; empty without one.
    """

    folder: Path
    name: str
    status: str
    rows: Rows
    settings: dict[str, str]
    evaluation: dict[str, Any] = field(default_factory=dict)

    def last(self, metric: str) -> float | None:
        """Return the last logged value of a metric, finite or not; None without a value."""
        for row in reversed(self.rows):
            if is_number(row.get(metric)):
                return float(row[metric])
        return None

    def middle(self, metric: str) -> float | None:
        """Return the median of the finite values of a metric; None without any."""
        logged = [row[metric] for row in self.rows if is_number(row.get(metric))]
        finite = [value for value in logged if math.isfinite(value)]
        return median(finite) if finite else None


def read_run(folder: Path, name: str, *, is_held: bool) -> ComparedRun:
    """Read the data of a run from its save folder.

    Args:
        folder: save folder of the run.
        name: name on the page.
        is_held: whether a process is working in the folder.

    Raises:
        UserError: a file cannot be read, or has contents that no run writes.
    """
    # status
    run = _mapping(folder / "run.json")
    summary = run.get("summary")
    status = str(summary.get("status", "running")) if isinstance(summary, dict) else "running"
    if status == "running" and not is_held:
        status = "not finished"  # the process was killed, or its machine failed
    recipe = folder / "recipe.yaml"
    values = read_yaml(recipe) if recipe.exists() else {}
    if status == "killed" and values.get("pause_at") is not None:
        status = PAUSED

    # settings and evaluations
    settings = {key: _as_text(value) for key, value in flat(values) if key not in OWN_KEYS}
    evaluations = [result for result in _evaluations(folder) if result.get("tasks")]

    # metrics, with the hours of computation up to each row
    rows, seconds = metric_rows(folder), 0.0
    increments = {key: grown(rows, key) for key in (TRAINING, EVALUATION)}
    for row in rows:
        step_seconds = 0.0
        for key, seconds_of_key in increments.items():
            if key in row:
                step_seconds += next(seconds_of_key)
        seconds += step_seconds
        row[HOURS] = seconds / 3600
    last_evaluation = evaluations[-1] if evaluations else {}
    return ComparedRun(folder, name, status, rows, settings, last_evaluation)


def _mapping(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    try:
        value = read_json_if_there(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no object of JSON; restore or delete it")
    return value


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the gauntlet, oldest first."""
    for path in folder.glob("eval/*.json"):
        _mapping(path)  # raises a UserError that names a broken file
    return read_evaluations(folder)


def write_comparison(
    path: Path,
    runs: Sequence[ComparedRun],
    *,
    follows: bool,
    warnings: Sequence[str] = (),
    comparisons: Sequence[PairedComparison] = (),
) -> None:
    """Write the page.

    Args:
        path: path of the HTML file.
        runs: the runs, in the order of their colors.
        follows: whether the page will be written again; an open page then reloads itself.
        warnings: lines about runs that could not be read.
        comparisons: paired differences between evaluated runs.
    """
    n_running = sum(run.status == "running" for run in runs)
    is_open = follows or any(run.status in ("not begun", "not finished") for run in runs)
    sections = [
        ("Runs", run_table(runs, path.parent) + (part("listed", warnings) if warnings else "")),
        ("Settings and result", parallel_coordinates(runs)),
        ("Training", charts(runs)),
        ("Differing settings", settings_table(runs)),
        ("Evaluation", evaluation(runs)),
        ("Paired differences", paired_tables(comparisons) or _how_to_pair(runs)),
    ]
    html = page(
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        status=_overall_status(n_running, is_open=is_open),
        reached="",
        tiles=[],
        sections=sections,
        has_charts=True,
        written=milliseconds() if follows else 0,
    )
    atomic_write(path, html)


def _overall_status(n_running: int, *, is_open: bool) -> str:
    if n_running:
        return f"running: {n_running}"
    return "not finished" if is_open else "finished"


@dataclass(frozen=True)
class BestRuns:
    """The best runs, and the metric that decides.

    Attributes:
        metric: the metric, one of DECIDING.
        best: indices of the best runs, several if they tie.
        lines: sentences for the page about the result.
    """

    metric: str
    best: Sequence[int]
    lines: Sequence[str]


def verdict(runs: Sequence[ComparedRun]) -> BestRuns | None:
    """Find the runs with the lowest value of the deciding metric.

    Only finished runs are candidates. Without any, the paused runs are (successive halving pauses
    runs); without these, all runs that have not failed. A single finished run wins against paused
    runs. A run whose last value is not finite is never the best.

    Returns:
        None if there are fewer than two runs to compare, or no metric that all of them have.
    """
    finished = [n for n, run in enumerate(runs) if run.status == "finished"]
    paused = [n for n, run in enumerate(runs) if run.status.startswith(PAUSED)]
    others = [n for n, run in enumerate(runs) if run.status in _MAY_WIN]
    candidates = finished or paused or others
    if len({*candidates, *paused}) < 2:
        return None
    for metric in DECIDING:
        values = {n: runs[n].last(metric) for n in candidates}
        known = {n: value for n, value in values.items() if value is not None}
        if len(known) == len(candidates):
            finite = {n: value for n, value in known.items() if math.isfinite(value)}
            best = [n for n in finite if finite[n] == min(finite.values())]
            return BestRuns(metric, best, list(_sentences(runs, candidates, metric, best)))
    return None


_MAY_WIN = ("running", "not finished", "killed")


def _sentences(
    runs: Sequence[ComparedRun], candidates: Sequence[int], metric: str, best: Sequence[int]
) -> Iterator[str]:
    """Yield sentences about the best runs and the runs that were not compared."""
    # the best
    if best:
        names = _enumeration([runs[n].name for n in best])
        subject = names if len(best) == 1 else f"a tie of {names}"
        value = runs[best[0]].last(metric)
        yield f"best: {subject}, by the least {COLUMNS[metric]} at the end of each run: {value:.4f}"

    # diverged runs
    lost = [runs[n].name for n in candidates if not math.isfinite(runs[n].last(metric) or 0)]
    if lost:
        yield f"not finite at the end: {_enumeration(lost)}"

    # runs that are not candidates, by status
    names_by_status: dict[str, list[str]] = {}
    for n in sorted({*range(len(runs))} - {*candidates}):
        status = STATUS.get(runs[n].status, runs[n].status)
        names_by_status.setdefault(status, []).append(runs[n].name)
    for status, excluded in names_by_status.items():
        yield f"not compared, {status}: {_enumeration(excluded)}"
    if best and len({runs[n].rows[-1][BATCH] for n in candidates}) > 1:
        yield "the runs that are compared did not end at the same step"


def _enumeration(names: Sequence[str]) -> str:
    """Return names separated by commas; of more than six only the first five, and a count."""
    more = f" and {len(names) - 5} more" if len(names) > 6 else ""
    return ", ".join(names[: 5 if more else None]) + more


HEAD = ("run", "status", "steps", "tokens", "time", *COLUMNS.values(), "tokens/s", "MFU")


def run_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """Return a row of text for each run, with the columns of HEAD."""
    rows = []
    for run in runs:
        # progress
        steps, tokens, seconds = "0", "0", ""
        if run.rows:
            last_row = run.rows[-1]
            steps, tokens = f"{last_row[BATCH]:,}", short_count(last_row[TOKEN])
            seconds = duration(3600 * last_row[HOURS])

        # results and speed
        losses = []
        for metric in COLUMNS:
            value = run.last(metric)
            losses.append("" if value is None else f"{value:.4f}")
        speed, mfu = run.middle(SPEED_METRIC), run.middle(MFU)
        rows.append(
            (
                run.name,
                STATUS.get(run.status, run.status),
                steps,
                tokens,
                seconds,
                *losses,
                "" if speed is None else short_count(speed),
                "" if mfu is None else percent(mfu),
            )
        )
    return rows


def run_table(runs: Sequence[ComparedRun], beside: Path) -> Markup:
    """Return the table of runs with their colors and links to their reports; the best is marked.

    Args:
        runs: the runs.
        beside: folder of the page; links are relative to it.
    """
    # name cells: color, link and mark
    winners, rows = verdict(runs), []
    for i, (run, row) in enumerate(zip(runs, run_rows(runs), strict=True)):
        name = breakable(run.name)
        report = run.folder / "report.html"
        if report.exists():
            link = quote(os.path.relpath(report, beside))
            name = Markup('<a href="{}">{}</a>').format(link, name)
        is_best = winners is not None and i in winners.best
        mark = Markup(' <span class="hint">best</span>') if is_best else ""
        rows.append((part("swatch", i) + name + mark, *row[1:]))

    # columns with values
    used = [n for n in range(len(HEAD)) if n < 2 or any(row[n] for row in rows)]
    cells = [[row[n] for n in used] for row in rows]
    right = range(2, len(used))
    html = table([HEAD[n] for n in used], cells, right=right, is_wide=True)
    for line in winners.lines if winners is not None else ():
        html += Markup('<p class="hint">{}</p>').format(line)
    return html


def parallel_coordinates(runs: Sequence[ComparedRun]) -> Markup:
    """Return the chart of a sweep's keys against the result; empty with fewer than two keys."""
    winners = verdict(runs)
    known = {n: run for n, run in enumerate(runs) if run.settings}
    swept = _swept([*known.values()])
    swept_keys = [*next(iter(swept.values()), {})]
    if winners is None or len(swept_keys) < 2:
        return Markup()

    # axes: the keys, then the result
    settings = {n: run.settings | swept[run.name] for n, run in known.items()}
    keys = swept_keys[:MOST_AXES]
    values = [run.last(winners.metric) for run in known.values()]
    axes = []
    for key in keys:
        axes.append(coordinates.key_axis(key, [settings[n].get(key, "") for n in known]))
    axes.append(coordinates.result_axis(COLUMNS[winners.metric], values))

    # tooltips
    tooltips = {}
    for (n, run), value in zip(known.items(), values, strict=True):
        result = "none" if value is None else f"{value:.4f}"
        lines = [run.name + (", best" if n in winners.best else "")]
        lines += [f"{key}: {settings[n].get(key, '')}" for key in keys]
        lines.append(f"{COLUMNS[winners.metric]}: {result}")
        lines.append(STATUS.get(run.status, run.status))
        tooltips[n] = "\n".join(lines)

    n_hidden = len({*differing(runs)} - {*keys})
    more = f"; {n_hidden} more keys below" if n_hidden else ""
    hint = "a line is a run, the best is bold, dashed: no finite end" + more
    return coordinates.drawn("Keys against result", hint, axes, tooltips, winners.best)


def _swept(runs: Sequence[ComparedRun]) -> dict[str, dict[str, str]]:
    """Return the keys and values of a sweep by the name of each run, read from folder names.

    Keys with only one value are omitted. The result is empty if the folder names do not all have
    the same keys.
    """
    values_of = {run.name: dict(_SWEPT_KEY.findall(run.folder.name)) for run in runs}
    keys = [*next(iter(values_of.values()), {})]
    if any([*values] != keys for values in values_of.values()):
        return {}
    keys = [key for key in keys if len({values[key] for values in values_of.values()}) > 1]
    if not keys:
        return {}
    return {name: {key: values[key] for key in keys} for name, values in values_of.items()}


def charts(runs: Sequence[ComparedRun]) -> Markup:
    """Return the standard charts with a line for each run, then the averages of the gauntlet."""
    names = dict.fromkeys(name for run in runs for name in averages(run.evaluation))
    scores = [Chart(name.replace("_", " "), {"": f"{GAUNTLET}{name}"}) for name in names]
    logged = {name for run in runs for name in metric_names(run.rows)}
    figures = []
    for chart in (*CHARTS, *scores):
        if chart.metrics[""] in logged:
            figures.append(_overlaid(chart, runs))
    return together(figures, "charts") or Markup('<p class="hint">No step was logged.</p>')


def _overlaid(chart: Chart, runs: Sequence[ComparedRun]) -> Markup:
    """Return a chart of one metric with a line for each run.

    A run without values has an empty line, because the number of a line is its color.
    """
    (metric,) = chart.metrics.values()
    limit = max(LEAST_POINTS, POINTS // len(runs))
    lines, axes = [], []
    for run in runs:
        rows = [row for row in run.rows if is_number(row.get(metric))]
        points = [(float(row[TOKEN]), float(row[metric]) * chart.scale) for row in rows]
        lines.append(ChartLine(run.name, points, metric))
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
    """Return the x values of rows for each x axis that a reader can choose."""
    return {
        "tokens": [float(row[TOKEN]) for row in rows],
        "steps": [float(row[BATCH]) for row in rows],
        "hours": [float(f"{row[HOURS]:.6g}") for row in rows],
    }


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the recipe keys whose values differ between runs, in the order of the recipe.

    Runs without a recipe are ignored.
    """
    known = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in known for key in run.settings)
    return [key for key in keys if len({run.settings.get(key) for run in known}) > 1]


def settings_table(runs: Sequence[ComparedRun]) -> Markup:
    """Return the table of differing keys and their values in each run that has a recipe."""
    known = [run for run in runs if run.settings]
    rows = []
    for key in differing(runs):
        rows.append((key, *[run.settings.get(key, "") for run in known]))
    if not rows:
        return Markup('<p class="hint">None: the recipes are the same.</p>') if known else Markup()
    return table(("key", *(run.name for run in known)), rows, is_wide=True)


def evaluation(runs: Sequence[ComparedRun]) -> Markup:
    """Return the last gauntlet of each run, in the form of an evaluation page of several models.

    Runs without a gauntlet are included, because the index of a run is its color and number.
    """
    if not any(run.evaluation for run in runs):
        return Markup()
    results = [(run.name, run.evaluation or {"tasks": []}) for run in runs]
    sections = (
        eval_page.models_table(results, []),
        eval_page.not_comparable(results),
        eval_page.score_charts(results),
        eval_page.score_table(results),
        eval_page.task_table(results),
    )
    return Markup().join(sections)


def _how_to_pair(runs: Sequence[ComparedRun]) -> Markup:
    """Return a hint for runs that were evaluated, but not row by row."""
    if sum(bool(run.evaluation) for run in runs) < 2:
        return Markup()
    words = "Evaluations in training keep no answers of rows. For paired differences, run"
    command = 'python scripts/eval.py "models=[RUN1, RUN2]"'
    return Markup('<p class="hint">{} <code>{}</code></p>').format(words, command)


def _as_text(value: Any) -> str:
    return public("" if value is None else str(value))
