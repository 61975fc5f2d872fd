"""report.html: a run on one page that needs nothing but itself.

The tracker writes it at the end of a run, `write_report` rewrites it at any time: it reads only the
run's folder (metrics.jsonl, run.json, recipe.yaml, samples.jsonl, routing.jsonl, events.jsonl,
eval/*.json), so a run that was killed has its report too. Charts come from `chart` and `heat_map`,
the page's frame from `page`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from llmfoundry.events import read_events
from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import number, printable, short_count
from llmfoundry.loggers.metrics import BATCH, TOKEN, read_metrics
from llmfoundry.loggers.pages.before_after import before_and_after, changes
from llmfoundry.loggers.pages.event_marks import event_table, marks
from llmfoundry.loggers.pages.goodput import goodput_tile
from llmfoundry.loggers.pages.page import page, pairs, table
from llmfoundry.loggers.pages.report_charts import Rows, experts, gauntlet_charts, training_charts
from llmfoundry.loggers.pages.report_tiles import averages, tiles
from llmfoundry.loggers.pages.score_charts import (
    ShownScore,
    accuracy_bar,
    in_parts,
    percents,
    written,
)
from llmfoundry.loggers.pages.time_bar import time_bar
from llmfoundry.loggers.pages.titles import GROUPS, title
from llmfoundry.redaction import public

STATUS = {"finished": "finished", "failed": "failed", "killed": "stopped"}
_MAX_SAMPLES = 40


def write_report(run_folder: Path, *, summary: Mapping[str, Any] | None = None) -> Path:
    """Write run_folder/report.html anew and return its path.

    `summary` (label → value, `status` among them) is added to the contents of run.json.
    """
    run = read_json_if_there(run_folder / "run.json")
    result = {**run.get("summary", {}), **(summary or {})}
    status = str(result.pop("status", "running"))
    rows = metric_rows(run_folder)
    evaluations = read_evaluations(run_folder)
    events = list(read_events(run_folder))
    sections = [
        ("Before and after", before_and_after(changes(evaluations, rows))),
        ("Training", training_charts(rows, marks(events, rows))),
        ("Where the time went", time_bar(rows)),
        ("Events", event_table(events) if events else ""),
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
        sections=[(name, body) for name, body in sections if body],
        is_live=True,
    )
    path = run_folder / "report.html"
    atomic_write(path, html)
    return path


def evaluation(rows: Rows, evaluations: list[dict[str, Any]]) -> str:
    """Categories and tasks over tokens, then the last result in full."""
    names = averages(evaluations[-1]) if evaluations else {}
    result = final_tables(evaluations[-1]) if evaluations else ""
    return gauntlet_charts(rows, list(names)) + result


def final_tables(result: Mapping[str, Any]) -> str:
    """Tasks with count, accuracy, standard error and chance; categories; what is missing."""
    after = f'<p class="hint">after {result[BATCH]} batches</p>'
    head = ("task", "shots", "n", "accuracy", "95% interval", "chance", "majority", "", "notes")
    tasks = table(head, [_task_row(task) for task in result["tasks"]], right=range(1, 7), raw=(7,))
    scores = list((result.get("categories") or {}).items())
    scores += list(averages(result).items()) if scores else []
    errors = result.get("stderrs") or {}
    intervals = result.get("intervals") or {}
    rows = [
        (n, *in_parts(written(ShownScore(s, errors.get(n), intervals.get(n))))) for n, s in scores
    ]
    categories = table(("category", "score", "95% interval"), rows, right=(1, 2))
    problems = "".join(f"<li>{escape(str(p))}</li>" for p in result.get("problems", []))
    listed = f'<ul class="problems">{problems}</ul>' if problems else ""
    return f'{after}<div class="tables">{tasks}{categories}</div>{listed}'


def samples(rows: Rows) -> str:
    """What the model wrote, newest first; older ones folded."""
    groups: dict[int, list[str]] = {}
    for row in rows:
        text = f"<b>{_sample(row['prompt'])}</b>{_sample(row['text'])}"
        if "expected" in row:
            text += f'\n<span class="hint">expected: {_sample(row["expected"])}</span>'
        groups.setdefault(row[BATCH], []).append(f"<pre>{text}</pre>")
    newest = sorted(groups, reverse=True)
    blocks = []
    for i, batch in enumerate(newest[:_MAX_SAMPLES]):
        opened = " open" if i == 0 else ""
        body = "".join(groups[batch])
        blocks.append(f"<details{opened}><summary>after {batch} batches</summary>{body}</details>")
    left = len(newest) - _MAX_SAMPLES
    if left > 0:
        blocks.append(f'<p class="hint">{left} earlier ones are in samples.jsonl.</p>')
    return "".join(blocks)


def results(found: Mapping[str, Any]) -> str:
    """What the run ended with: in words, by group, folded; the metric's own name is the tooltip."""
    groups: dict[str, list[tuple[str, str]]] = {}
    plain = []
    for name, value in found.items():
        known = title(name)
        if "/" not in name:
            plain.append((name, _text(value)))
            continue
        label = f'<span title="{escape(name)}">{escape(known.text)}</span>'
        groups.setdefault(known.group, []).append((label, _text(value)))
    parts = [pairs(plain)]
    for group in (name for name in GROUPS if name in groups):
        body = table(("", ""), groups[group], right=(1,), raw=(0,))
        parts.append(
            f"<details><summary>{escape(group)}"
            f' <span class="hint">{len(groups[group])}</span></summary>{body}</details>'
        )
    return "".join(parts)


def recipe(path: Path) -> str:
    """The recipe as it was saved, passwords hidden, folded."""
    if not path.exists():
        return ""
    text = escape(public(path.read_text(encoding="utf-8")))
    return f"<details><summary>{escape(path.name)}</summary><pre>{text}</pre></details>"


def is_drawn(name: str) -> bool:
    """Whether the report needs a metric: of norms and loads, which are hundreds, those of all."""
    if name.startswith("moe/layer_"):
        return False
    return not name.startswith("l2_norm/") or name.endswith("/global")


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The gauntlet's results, oldest first."""
    results = [read_json_if_there(path) for path in sorted(run_folder.glob("eval/*.json"))]
    return sorted((r for r in results if BATCH in r), key=lambda r: int(r[BATCH]))


def metric_rows(run_folder: Path) -> Rows:
    """What the report draws of metrics.jsonl."""
    return _read_rows(run_folder / "metrics.jsonl", is_drawn)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """A file's object; empty where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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


def _sample(text: str) -> str:
    return escape(printable(text))


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _reached(rows: Rows) -> str:
    """How far the run came."""
    if not rows:
        return ""
    return f"{rows[-1][BATCH]:,} batches, {short_count(rows[-1][TOKEN])} tokens"


def _read_rows(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Rows:
    return read_metrics(path, wanted) if path.exists() else []
