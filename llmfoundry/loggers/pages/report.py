"""report.html: a run on one page that needs nothing but itself.

The tracker writes it while the run goes, now and then, and at its end; `write_report` rewrites it
at any time: it reads only the run's folder (metrics.jsonl, run.json, recipe.yaml, samples.jsonl,
routing.jsonl, events.jsonl, eval/*.json), so a run that was killed has its report too. An open page
of a run under way reloads itself and keeps its zoom (`templates/charts.js`).
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
from llmfoundry.loggers.pages.run_time import EVALUATION, TRAINING, goodput_tile, time_bar
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
    """Write run_folder/report.html anew and return its path.

    `summary` (label → value, `status` among them) is added to the contents of run.json.
    """
    run = read_run_record(run_folder)
    result = {**run.get("summary", {}), **(summary or {})}
    status = str(result.pop("status", "running"))
    rows = metric_rows(run_folder)
    evaluations = read_evaluations(run_folder)
    events = list(read_events(run_folder))
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
    """The numbers to read first.

    Args:
        rows: of metrics.jsonl.
        evaluations: the gauntlet's results, oldest first.
        run: run.json.
    """
    return [
        *_measured(rows),
        *(_averages(evaluations[-1]) if evaluations else ()),
        *_length(rows),
        *_speed(rows),
        *_hardware(run),
    ]


def averages(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Of a gauntlet's result; older ones have one, without a name."""
    return result.get("averages") or {"average": result.get("average")}


def _measured(rows: Rows) -> Iterator[Tile]:
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
    """Of the last evaluation only: an older average is not this model's."""
    if not result.get("categories"):
        return
    for name, value in averages(result).items():
        known = [(result.get(key) or {}).get(name) for key in ("stderrs", "intervals")]
        yield Tile(name.replace("_", " "), *in_parts(written(ShownScore(value, *known))))


def _length(rows: Rows) -> Iterator[Tile]:
    """Tokens, duration and dates."""
    if not rows:
        return
    yield Tile("tokens", short_count(rows[-1][TOKEN]), f"{rows[-1][BATCH]:,} batches")
    training, evaluation = _last(rows, TRAINING), _last(rows, EVALUATION) or 0.0
    if training is not None:
        rest = f"{duration(evaluation)} of it evaluation" if evaluation >= 1 else ""
        yield Tile("duration", duration(training + evaluation), rest)
    walls = [row for row in rows if WALL in row]
    if walls:
        before = sum(walls[0].get(name, 0.0) for name in (TRAINING, EVALUATION))
        begun = _utc(walls[0][WALL] / 1000 - before)
        ended = _utc(walls[-1][WALL] / 1000)
        days = begun.date() == ended.date()
        until = ended.strftime("%H:%M") if days else ended.strftime("%d %b %H:%M")
        yield Tile("date (UTC)", begun.strftime("%d %b %Y"), f"{begun:%H:%M} to {until}")


def _speed(rows: Rows) -> Iterator[Tile]:
    speed, use, memory = (_finite(rows, name) for name in (SPEED_METRIC, MFU, MEMORY))
    if speed:
        yield Tile("median tokens per second", short_count(median(speed)))
    if use:
        yield Tile("median MFU", percent(median(use)))
    if memory:
        yield Tile("peak memory", format_gib(max(memory)))


def _hardware(run: Mapping[str, Any]) -> Iterator[Tile]:
    """Accelerators by number and name, or the processor."""
    device = str(dict(run.get("facts", [])).get("device", "")).split(",")[0]
    name, cores = (
        run.get("environment", {}).get("processor"),
        run.get("environment", {}).get("cores"),
    )
    if device.endswith(" CPU") and name:
        processes = device.split()[0]
        many = f", {processes} processes" if processes != "1" else ""
        yield Tile("hardware", name, f"{cores} cores{many}" if cores else many.strip(", "))
    elif device:
        yield Tile("hardware", device)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _finite(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _last(rows: Rows, name: str) -> float | None:
    """The last value of a metric; None where it was never logged."""
    return next((row[name] for row in reversed(rows) if is_number(row.get(name))), None)


def marks(events: Events, rows: Sequence[Mapping[str, Any]]) -> Marks:
    """A mark for each of the newest events that belong to a step, of the rows of metrics.jsonl."""
    if not rows or not rows[-1][BATCH]:
        return []
    tokens = rows[-1][TOKEN] / rows[-1][BATCH]
    placed = [event for event in events if type(event.get("step")) is int]
    return [(event["step"] * tokens, _sentence(event)) for event in placed[-_MOST_MARKS:]]


def event_table(events: Events) -> Markup:
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


def evaluation(rows: Rows, evaluations: list[dict[str, Any]]) -> Markup:
    """Categories and tasks over tokens, then the last result in full."""
    names = averages(evaluations[-1]) if evaluations else {}
    result = final_tables(evaluations[-1]) if evaluations else Markup()
    return gauntlet_charts(rows, list(names)) + result


def final_tables(result: Mapping[str, Any]) -> Markup:
    """Tasks with count, accuracy, standard error and chance; categories; what is missing."""
    after = Markup('<p class="hint">after {} batches</p>').format(result[BATCH])
    head = ("task", "shots", "n", "accuracy", "95% interval", "chance", "majority", "", "notes")
    tasks = table(head, [_task_row(task) for task in result["tasks"]], right=range(1, 7))
    scores = list((result.get("categories") or {}).items())
    scores += list(averages(result).items()) if scores else []
    errors = result.get("stderrs") or {}
    intervals = result.get("intervals") or {}
    rows = [
        (n, *in_parts(written(ShownScore(s, errors.get(n), intervals.get(n))))) for n, s in scores
    ]
    categories = table(("category", "score", "95% interval"), rows, right=(1, 2))
    problems = result.get("problems")
    listed = part("listed", problems) if problems else Markup()
    return after + together([tasks, categories], "tables") + listed


def samples(rows: Rows) -> Markup:
    """What the model wrote, newest first; older ones folded."""
    groups: dict[int, list[tuple[str | None, ...]]] = {}
    for row in rows:
        texts = [row["prompt"], row["text"], row.get("expected")]
        shown = tuple(text if text is None else printable(text) for text in texts)
        groups.setdefault(row[BATCH], []).append(shown)
    newest = sorted(groups, reverse=True)
    blocks = [
        part("folded", f"after {batch} batches", part("samples", groups[batch]), is_open=i == 0)
        for i, batch in enumerate(newest[:_MAX_SAMPLES])
    ]
    left = len(newest) - _MAX_SAMPLES
    if left > 0:
        blocks.append(Markup(f'<p class="hint">{left} earlier ones are in samples.jsonl.</p>'))
    return Markup().join(blocks)


def results(found: Mapping[str, Any]) -> Markup:
    """What the run ended with: in words, by group, folded; the metric's own name is the tooltip."""
    groups: dict[str, list[tuple[str, str]]] = {}
    plain = []
    for name, value in found.items():
        known = title(name)
        if "/" not in name:
            plain.append((name, _text(value)))
            continue
        label = Markup('<span title="{}">{}</span>').format(name, known.text)
        groups.setdefault(known.group, []).append((label, _text(value)))
    return pairs(plain) + Markup().join(
        part("folded", group, table(("", ""), groups[group], right=(1,)), str(len(groups[group])))
        for group in GROUPS
        if group in groups
    )


def recipe(path: Path) -> Markup:
    """The recipe as it was saved, passwords hidden, folded."""
    if not path.exists():
        return Markup()
    text = Markup("<pre>{}</pre>").format(public(read_text(path)))
    return part("folded", path.name, text)


def is_drawn(name: str) -> bool:
    """Whether the report needs a metric: of norms and loads, which are hundreds, those of all."""
    if name.startswith("moe/layer_"):
        return False
    return not name.startswith("l2_norm/") or name.endswith("/global")


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The gauntlet's results, oldest first."""
    results = [read_object(path) for path in sorted(run_folder.glob("eval/*.json"))]
    return sorted((r for r in results if BATCH in r), key=lambda r: int(r[BATCH]))


def metric_rows(run_folder: Path) -> Rows:
    """What the report draws of metrics.jsonl."""
    return _read_rows(run_folder / "metrics.jsonl", is_drawn)


def _task_row(task: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy = ShownScore(task["accuracy"], task["stderr"], task.get("interval"))
    chance, majority = task["chance"], task["majority"]
    is_known = accuracy.value is not None
    drawn = accuracy_bar(accuracy, chance=chance, majority=majority) if is_known else ""
    notes = [f"{key}: {task[key]}" for key in ("ties", "truncated") if task.get(key)]
    notes += [f"failed: {task['failure']}"] if task.get("failure") else []
    return (
        str(task["label"]),
        str(task["num_fewshot"]),
        str(task["n"]),
        *in_parts(percents(accuracy)),
        f"{100 * chance:.1f}%",
        f"{100 * majority:.1f}%",
        drawn,
        ", ".join(notes),
    )


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _reached(rows: Rows) -> str:
    """How far the run came."""
    if not rows:
        return ""
    return f"{rows[-1][BATCH]:,} batches, {short_count(rows[-1][TOKEN])} tokens"


def _read_rows(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Rows:
    return read_metrics(path, wanted) if path.exists() else []
