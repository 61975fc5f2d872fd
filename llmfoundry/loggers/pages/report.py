"""report.html: the report of a run in a single HTML file.

The tracker calls `write_report` from time to time during training and at the end. The report is
made only from the save folder (metrics.jsonl, run.json, recipe.yaml, samples.jsonl, routing.jsonl,
events.jsonl, eval/*.json), so that it can be written at any time, also for a killed run. An open
page of a run that is training reloads itself and keeps its zoom (`templates/charts.js`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from llmfoundry.events import read_events
from llmfoundry.files import (
    atomic_write,
    read_object,
    read_text,
)
from llmfoundry.loggers.console import duration, format_gib, number, percent, printable, short_count
from llmfoundry.loggers.metrics_file import BATCH, TOKEN, WALL, milliseconds, read_metrics
from llmfoundry.loggers.pages.charts import (
    EVAL_BPB,
    EVAL_LOSS,
    EVAL_OBJECTIVE,
    MEMORY,
    MFU,
    PAIRS,
    REWARD_ACCURACY,
    SPEED_METRIC,
    TRAIN_LOSS,
    Marks,
    Rows,
    experts,
    gauntlet_charts,
    is_number,
    training_charts,
)
from llmfoundry.loggers.pages.page import Tile, page, pairs, part, table, together
from llmfoundry.loggers.pages.run_time import (
    CPU_ENERGY,
    ENERGY,
    EVALUATION,
    TRAINING,
    goodput_tile,
    grown,
    time_bar,
)
from llmfoundry.loggers.pages.score_tables import (
    ShownScore,
    accuracy_bar,
    before_and_after,
    changes,
    in_parts,
    percents,
    written,
)
from llmfoundry.loggers.pages.titles import GROUPS, title
from llmfoundry.loggers.run_record import read_run_record
from llmfoundry.redaction import public

STATUS = {"finished": "finished", "failed": "failed", "killed": "stopped"}
_MAX_SAMPLES, _MOST_MARKS, _MOST_ROWS = 40, 200, 1000
Events = Sequence[Mapping[str, Any]]


def write_report(run_folder: Path, *, summary: Mapping[str, Any] | None = None) -> Path:
    """Write run_folder/report.html and return its path.

    Args:
        run_folder: save folder of the run.
        summary: values by label, also `status`, that are added to the summary in run.json.
    """
    # read the folder
    run = read_run_record(run_folder)
    result = {**run.get("summary", {}), **(summary or {})}
    status = str(result.pop("status", "running"))
    rows = metric_rows(run_folder)
    evaluations = read_evaluations(run_folder)
    events = list(read_events(run_folder))

    # make the page; empty sections are omitted
    sections = [
        ("Before and after", before_and_after(changes(evaluations, rows))),
        ("Training", training_charts(rows, marks(events, rows))),
        ("Where the time went", time_bar(rows)),
        ("Events", event_table(events)),
        ("Experts", experts(rows, _read_rows(run_folder / "routing.jsonl"))),
        ("Evaluation", evaluation(rows, evaluations)),
        ("Samples", samples(_read_rows(run_folder / "samples.jsonl"))),
        ("Result", results(result)),
        ("Run", pairs((k, str(v)) for k, v in run.get("facts", []))),
        ("Recipe", recipe(run_folder / "recipe.yaml")),
        ("Environment", pairs((k, str(v)) for k, v in run.get("environment", {}).items())),
    ]
    html = page(
        title=str(run.get("name") or run_folder.resolve().name),
        status=STATUS.get(status, "not finished"),
        reached=_reached(rows),
        tiles=[*tiles(rows, evaluations, run), *goodput_tile(rows, events)],
        sections=sections,
        has_charts=True,
        written=milliseconds() if status == "running" else 0,
    )
    path = run_folder / "report.html"
    atomic_write(path, html)
    return path


def tiles(rows: Rows, evaluations: list[dict[str, Any]], run: Mapping[str, Any]) -> list[Tile]:
    """Return the headline numbers.

    Args:
        rows: rows of metrics.jsonl.
        evaluations: results of the gauntlet, oldest first.
        run: contents of run.json.
    """
    return [
        *_measured(rows),
        *(_averages(evaluations[-1]) if evaluations else ()),
        *_length(rows),
        *_speed(rows),
        *_hardware(run),
    ]


def averages(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the averages of a gauntlet result; old results have a single one without a name."""
    return result.get("averages") or {"average": result.get("average")}


def _measured(rows: Rows) -> Iterator[Tile]:
    """Yield the last losses and accuracies."""
    by_answer = _last(rows, EVAL_OBJECTIVE) is not None
    forms: list[tuple[str, str, Callable[[float], str]]] = [
        ("validation loss", EVAL_OBJECTIVE if by_answer else EVAL_LOSS, lambda v: f"{v:.4f}"),
        ("validation bits per byte", EVAL_BPB, lambda v: f"{v:.4f}"),
        ("training loss", TRAIN_LOSS, lambda v: f"{v:.4f}"),
        ("reward accuracy", REWARD_ACCURACY, percent),
        ("likelier chosen answers", PAIRS, percent),
    ]
    for label, name, form in forms:
        value = _last(rows, name)
        if value is not None:
            yield Tile(label, form(value))


def _averages(result: Mapping[str, Any]) -> Iterator[Tile]:
    """Yield the averages of the last evaluation; older ones belong to earlier checkpoints."""
    if not result.get("categories"):
        return
    for name, value in averages(result).items():
        stderr = (result.get("stderrs") or {}).get(name)
        interval = (result.get("intervals") or {}).get(name)
        score, uncertainty = in_parts(written(ShownScore(value, stderr, interval)))
        yield Tile(name.replace("_", " "), score, uncertainty)


def _length(rows: Rows) -> Iterator[Tile]:
    """Yield tokens, duration and dates."""
    if not rows:
        return
    yield Tile("tokens", short_count(rows[-1][TOKEN]), f"{rows[-1][BATCH]:,} batches")

    # duration
    training, evaluation = _last(rows, TRAINING), _last(rows, EVALUATION) or 0.0
    if training is not None:
        rest = f"{duration(evaluation)} of it evaluation" if evaluation >= 1 else ""
        yield Tile("duration", duration(training + evaluation), rest)

    # dates: the run began before the first row was written
    walls = [row for row in rows if WALL in row]
    if walls:
        seconds_before = sum(walls[0].get(name, 0.0) for name in (TRAINING, EVALUATION))
        start = _utc(walls[0][WALL] / 1000 - seconds_before)
        end = _utc(walls[-1][WALL] / 1000)
        same_day = start.date() == end.date()
        until = end.strftime("%H:%M") if same_day else end.strftime("%d %b %H:%M")
        yield Tile("date (UTC)", start.strftime("%d %b %Y"), f"{start:%H:%M} to {until}")


def _speed(rows: Rows) -> Iterator[Tile]:
    """Yield the medians of throughput and MFU, and the peak memory."""
    speed, mfu, memory = _finite(rows, SPEED_METRIC), _finite(rows, MFU), _finite(rows, MEMORY)
    if speed:
        yield Tile("median tokens per second", short_count(median(speed)))
    if mfu:
        yield Tile("median MFU", percent(median(mfu)))
    if memory:
        yield Tile("peak memory", format_gib(max(memory)))
    for name, of in ((ENERGY, "GPUs"), (CPU_ENERGY, "processors")):
        energy = sum(grown(rows, name))  # each process counts from 0
        if energy:
            yield Tile(f"energy of the {of}", f"{energy:,.3g} kWh")


def _hardware(run: Mapping[str, Any]) -> Iterator[Tile]:
    """Yield number and name of the accelerators, or the processor."""
    device = str(dict(run.get("facts", [])).get("device", "")).split(",")[0]
    environment = run.get("environment", {})
    processor, cores = environment.get("processor"), environment.get("cores")
    if device.endswith(" CPU") and processor:
        count = device.split()[0]
        processes = f", {count} processes" if count != "1" else ""
        detail = f"{cores} cores{processes}" if cores else processes.strip(", ")
        yield Tile("hardware", processor, detail)
    elif device:
        yield Tile("hardware", device)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _finite(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric."""
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _last(rows: Rows, name: str) -> float | None:
    """Return the last value of a metric; None if it was never logged."""
    for row in reversed(rows):
        if is_number(row.get(name)):
            value: float = row[name]
            return value
    return None


def marks(events: Events, rows: Sequence[Mapping[str, Any]]) -> Marks:
    """Return chart marks for the newest events that have a step.

    The position in tokens is estimated from the mean number of tokens per step.
    """
    if not rows or not rows[-1][BATCH]:
        return []
    tokens_per_step = rows[-1][TOKEN] / rows[-1][BATCH]
    step_events = [event for event in events if type(event.get("step")) is int]
    newest = step_events[-_MOST_MARKS:]
    return [(event["step"] * tokens_per_step, _sentence(event)) for event in newest]


def event_table(events: Events) -> Markup:
    """Return the table of events, the newest first."""
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


def evaluation(rows: Rows, evaluations: list[dict[str, Any]]) -> Markup:
    """Return the charts of categories and tasks, then the tables of the last result."""
    names = averages(evaluations[-1]) if evaluations else {}
    result = final_tables(evaluations[-1]) if evaluations else Markup()
    return gauntlet_charts(rows, list(names)) + result


def final_tables(result: Mapping[str, Any]) -> Markup:
    """Return the tables of a result: tasks, categories and averages, then its problems."""
    after = Markup('<p class="hint">after {} batches</p>').format(result[BATCH])

    # tasks
    head = ("task", "shots", "n", "accuracy", "95% interval", "chance", "majority", "", "notes")
    tasks = table(head, [_task_row(task) for task in result["tasks"]], right=range(1, 7))

    # categories and averages
    scores = list((result.get("categories") or {}).items())
    if scores:
        scores += averages(result).items()
    stderrs = result.get("stderrs") or {}
    intervals = result.get("intervals") or {}
    rows = []
    for name, value in scores:
        score = ShownScore(value, stderrs.get(name), intervals.get(name))
        rows.append((name, *in_parts(written(score))))
    categories = table(("category", "score", "95% interval"), rows, right=(1, 2))

    problems = result.get("problems")
    problem_list = part("listed", problems) if problems else Markup()
    return after + together([tasks, categories], "tables") + problem_list


def samples(rows: Rows) -> Markup:
    """Return the generated texts, newest first; all but the newest are folded."""
    # texts by step
    texts_by_batch: dict[int, list[tuple[str | None, ...]]] = {}
    for row in rows:
        texts = [row["prompt"], row["text"], row.get("expected")]
        printable_texts = tuple(text if text is None else printable(text) for text in texts)
        texts_by_batch.setdefault(row[BATCH], []).append(printable_texts)

    # a block for each of the newest steps
    batches = sorted(texts_by_batch, reverse=True)
    blocks = []
    for i, batch in enumerate(batches[:_MAX_SAMPLES]):
        body = part("samples", texts_by_batch[batch])
        blocks.append(part("folded", f"after {batch} batches", body, is_open=i == 0))
    n_omitted = len(batches) - _MAX_SAMPLES
    if n_omitted > 0:
        blocks.append(Markup(f'<p class="hint">{n_omitted} earlier ones are in samples.jsonl.</p>'))
    return Markup().join(blocks)


def results(values: Mapping[str, Any]) -> Markup:
    """Return the tables of the final values of a run.

    Args:
        values: values by name. A name with a slash is a metric: the table shows the title of the
            metric, and its name as a tooltip. Metrics are in a folded table for each group.
    """
    # separate metrics from other values
    metric_rows_by_group: dict[str, list[tuple[str, str]]] = {}
    other_rows = []
    for name, value in values.items():
        if "/" not in name:
            other_rows.append((name, _text(value)))
            continue
        metric = title(name)
        label = Markup('<span title="{}">{}</span>').format(name, metric.text)
        metric_rows_by_group.setdefault(metric.group, []).append((label, _text(value)))

    # the other values come first, then the groups in their fixed order
    html = pairs(other_rows)
    for group in GROUPS:
        if group in metric_rows_by_group:
            rows = metric_rows_by_group[group]
            html += part("folded", group, table(("", ""), rows, right=(1,)), str(len(rows)))
    return html


def recipe(path: Path) -> Markup:
    """Return the text of the saved recipe, passwords masked, folded."""
    if not path.exists():
        return Markup()
    text = Markup("<pre>{}</pre>").format(public(read_text(path)))
    return part("folded", path.name, text)


def is_drawn(name: str) -> bool:
    """Return whether the report uses a metric.

    Norms of single parameters and loads of single layers, of which there are hundreds, are ignored.
    """
    if name.startswith("moe/layer_"):
        return False
    return not name.startswith("l2_norm/") or name.endswith("/global")


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """Return the results of the gauntlet in a save folder, oldest first."""
    results = [read_object(path) for path in sorted(run_folder.glob("eval/*.json"))]
    of_run = [result for result in results if BATCH in result]
    return sorted(of_run, key=lambda result: int(result[BATCH]))


def metric_rows(run_folder: Path) -> Rows:
    """Return the rows of metrics.jsonl with the metrics that the report uses."""
    return _read_rows(run_folder / "metrics.jsonl", is_drawn)


def _task_row(task: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy = ShownScore(task["accuracy"], task["stderr"], task.get("interval"))
    chance, majority = task["chance"], task["majority"]
    bar = ""
    if accuracy.value is not None:
        bar = accuracy_bar(accuracy, chance=chance, majority=majority)
    notes = [f"{key}: {task[key]}" for key in ("ties", "truncated") if task.get(key)]
    if task.get("failure"):
        notes.append(f"failed: {task['failure']}")
    return (
        str(task["label"]),
        str(task["num_fewshot"]),
        str(task["n"]),
        *in_parts(percents(accuracy)),
        f"{100 * chance:.1f}%",
        f"{100 * majority:.1f}%",
        bar,
        ", ".join(notes),
    )


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _reached(rows: Rows) -> str:
    """Return the progress of the run in words."""
    if not rows:
        return ""
    return f"{rows[-1][BATCH]:,} batches, {short_count(rows[-1][TOKEN])} tokens"


def _read_rows(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Rows:
    return read_metrics(path, wanted) if path.exists() else []
