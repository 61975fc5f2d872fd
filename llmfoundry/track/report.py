"""report.html: a run on one page that needs nothing but itself.

The tracker writes it at the end of a run, `write_report` rewrites it at any time: it reads only the
run's folder (metrics.jsonl, run.json, recipe.yaml, samples.jsonl, routing.jsonl, eval/*.json), so a
run that was killed has its report too. Charts come from `chart` and `heat_map`, the page's frame
from `report_page`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from llmfoundry.files import write_whole
from llmfoundry.masking import public
from llmfoundry.track.chart import Series, line_chart
from llmfoundry.track.console import printable
from llmfoundry.track.format import count, number, percent, size
from llmfoundry.track.heat_map import load_maps
from llmfoundry.track.metrics import BATCH, TOKEN, read_metrics
from llmfoundry.track.report_page import bar, page, pairs, table

Rows = list[dict[str, Any]]

TRAIN_LOSS, EVAL_LOSS = "loss/train/total", "metrics/eval/LanguageCrossEntropy"
LANGUAGE_LOSS = "loss/train/loss"  # the total without what routers add, where they add something
TRAIN_BPB, EVAL_BPB = "metrics/train/bits_per_byte", "metrics/eval/bits_per_byte"
SPEED, MFU = "throughput/tokens_per_sec", "throughput/device/mfu"
MEMORY, NORM = "memory/peak_allocated_mem", "l2_norm/grad/global"
GAUNTLET = "icl/metrics/eval_gauntlet/"
# Shown elsewhere, or the same as another up to a factor.
NOT_DRAWN = ("time/", "moe/", "throughput/device/tokens_per_sec", "metrics/eval/LanguagePerplexity")
STATUS = {"finished": "finished", "failed": "failed", "killed": "stopped"}
_MAX_SAMPLES = 40


@dataclass(frozen=True)
class Chart:
    """A picture: metrics (label → name), unit, how values read, whether noise is smoothed.

    `steep`: the first twentieth of the run does not decide the frame.
    """

    title: str
    metrics: dict[str, str]
    note: str = ""
    form: Callable[[float], str] = number
    smooth: bool = False
    from_zero: bool = False
    steep: bool = False
    scale: float = 1.0


def write_report(run_folder: Path, *, summary: Mapping[str, Any] | None = None) -> Path:
    """Write run_folder/report.html anew and return its path.

    `summary` (label → value, `status` among them) is added to what run.json says.
    """
    run = read_json(run_folder / "run.json")
    result = {**run.get("summary", {}), **(summary or {})}
    status = str(result.pop("status", "running"))
    rows = _read_rows(run_folder / "metrics.jsonl", is_drawn)
    evaluations = read_evaluations(run_folder)
    sections = [
        ("Training", training_charts(rows)),
        ("Experts", experts(rows, _read_rows(run_folder / "routing.jsonl"))),
        ("Evaluation", evaluation(rows, evaluations)),
        ("Samples", samples(_read_rows(run_folder / "samples.jsonl"))),
        ("Result", pairs((k, _text(v)) for k, v in result.items())),
        ("Run", pairs((k, str(v)) for k, v in run.get("facts", []))),
        ("Recipe", recipe(run_folder / "recipe.yaml")),
        ("Environment", pairs((k, str(v)) for k, v in run.get("environment", {}).items())),
    ]
    html = page(
        title=str(run.get("name") or run_folder.resolve().name),
        status=STATUS.get(status, "not finished"),
        reached=_reached(rows),
        tiles=tiles(rows, evaluations),
        sections=[(name, body) for name, body in sections if body],
    )
    path = run_folder / "report.html"
    write_whole(path, html)
    return path


def tiles(rows: Rows, evaluations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The numbers to read first: label and value of what was measured."""
    forms: list[tuple[str, str, Callable[[float], str]]] = [
        ("validation loss", EVAL_LOSS, lambda v: f"{v:.4f}"),
        ("validation bits per byte", EVAL_BPB, lambda v: f"{v:.4f}"),
        ("training loss", TRAIN_LOSS, lambda v: f"{v:.4f}"),
    ]
    found = [(label, form(v)) for label, name, form in forms if (v := last(rows, name)) is not None]
    if evaluations and evaluations[-1].get("categories"):
        # Of the last evaluation only: an older average is not this model's.
        found += [(name, _score(value)) for name, value in _averages(evaluations[-1]).items()]
    speed = [row[SPEED] for row in rows if math.isfinite(row.get(SPEED, math.nan))]
    use = [row[MFU] for row in rows if math.isfinite(row.get(MFU, math.nan))]
    memory = [row[MEMORY] for row in rows if math.isfinite(row.get(MEMORY, math.nan))]
    found += [("median tokens per second", count(median(speed)))] if speed else []
    found += [("median MFU", percent(median(use)))] if use else []
    found += [("peak memory", size(max(memory)))] if memory else []
    return found


def training_charts(rows: Rows) -> str:
    """The standard pictures, then one for every metric that they do not show."""
    if not rows:
        return '<p class="hint">No step was logged.</p>'
    names = _names(rows)
    language = LANGUAGE_LOSS if LANGUAGE_LOSS in names else TRAIN_LOSS
    rates = {name.removeprefix("lr-"): name for name in names if name.startswith("lr-")}
    losses = {"training": language, "validation": EVAL_LOSS}
    speed, use = {"tokens per second": SPEED}, {"MFU": MFU}
    bits = {"training": TRAIN_BPB, "validation": EVAL_BPB}
    charts = [
        Chart("Loss", losses, "nats/token", smooth=True, steep=True),
        Chart("Bits per byte", bits, smooth=True, steep=True),
        Chart("Learning rate", rates, from_zero=True),
        Chart("Gradient norm", {"gradient norm": NORM}, "global L2, before clipping", smooth=True),
        Chart("Throughput", speed, "tokens/s", count, smooth=True, from_zero=True),
        Chart("Model FLOPs utilisation", use, "%", _tenth, smooth=True, from_zero=True, scale=100),
        Chart("Peak memory", {"memory": MEMORY}, "GiB", size, from_zero=True),
    ]
    shown = {name for chart in charts for name in chart.metrics.values()}
    others = [n for n in names if n not in shown and not n.startswith(NOT_DRAWN)]
    others = [n for n in others if not n.startswith(GAUNTLET) and not _of_gauntlet(n)]
    charts += [Chart(name, {name: name}, smooth=True) for name in others]
    return f'<div class="charts">{"".join(draw(chart, rows) for chart in charts)}</div>'


def experts(rows: Rows, loads: Rows) -> str:
    """How evenly routers spread the tokens: over all layers, then a heat map of each."""
    spread = {name: f"moe/load_{name}" for name in ("max", "min", "std")}
    charts = [
        Chart("Load of experts", spread, "over the mean: the most, the least, the deviation"),
        Chart("Router entropy", {"entropy": "moe/router_entropy"}, "nats, mean over layers"),
    ]
    drawn = "".join(draw(chart, rows) for chart in charts) + load_maps(loads)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def evaluation(rows: Rows, evaluations: list[dict[str, Any]]) -> str:
    """Categories and tasks over tokens, then the last result in full."""
    names = _names(rows)
    categories = {n.removeprefix(GAUNTLET): n for n in names if n.startswith(GAUNTLET)}
    tasks = {"/".join(n.split("/")[1:-1]): n for n in names if _is_accuracy(n)}
    averages = _averages(evaluations[-1]) if evaluations else {}
    first = {name: categories[name] for name in averages if name in categories}
    categories = {**first, **categories}  # averages have the first colours
    charts = [
        Chart("Gauntlet", categories, "categories, above chance where the file says so"),
        Chart("Tasks", tasks, "accuracy in %", _tenth, scale=100),
    ]
    drawn = "".join(draw(chart, rows) for chart in charts)
    result = final_tables(evaluations[-1]) if evaluations else ""
    return (f'<div class="charts">{drawn}</div>' if drawn else "") + result


def final_tables(result: Mapping[str, Any]) -> str:
    """Tasks with count, accuracy, standard error and chance; categories; what is missing."""
    after = f'<p class="hint">after {result[BATCH]} batches</p>'
    head = ("task", "shots", "n", "accuracy", "± stderr", "chance", "majority", "", "notes")
    tasks = table(head, [_task_row(task) for task in result["tasks"]], right=range(1, 7), raw=(7,))
    scores = list((result.get("categories") or {}).items())
    scores += list(_averages(result).items()) if scores else []
    errors = result.get("stderrs") or {}
    rows = [(name, _score(s), _error(errors.get(name))) for name, s in scores]
    categories = table(("category", "score", "± stderr"), rows, right=(1, 2))
    problems = "".join(f"<li>{escape(str(p))}</li>" for p in result.get("problems", []))
    listed = f'<ul class="problems">{problems}</ul>' if problems else ""
    return f'{after}<div class="tables">{tasks}{categories}</div>{listed}'


def samples(rows: Rows) -> str:
    """What the model wrote, newest first; older ones folded."""
    groups: dict[int, list[str]] = {}
    for row in rows:
        text = f"<b>{_sample(row['prompt'])}</b>{_sample(row['text'])}"
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


def recipe(path: Path) -> str:
    """The recipe as it was saved, passwords hidden, folded."""
    if not path.exists():
        return ""
    text = escape(public(path.read_text(encoding="utf-8")))
    return f"<details><summary>{escape(path.name)}</summary><pre>{text}</pre></details>"


def draw(chart: Chart, rows: Rows) -> str:
    """The chart's figure over tokens; empty where none of its metrics was logged."""
    lines = []
    for label, name in chart.metrics.items():
        logged = [r for r in rows if _is_number(r.get(name))]
        points = [(float(r[TOKEN]), float(r[name]) * chart.scale) for r in logged]
        if points:
            lines.append(_series(label, points, smooth=chart.smooth))
    return line_chart(
        chart.title,
        lines,
        x_end=float(rows[-1][TOKEN]) if rows else 0.0,
        y_form=chart.form,
        y_from_zero=chart.from_zero,
        y_skip=0.05 if chart.steep else 0.0,
        note=chart.note,
    )


def is_drawn(name: str) -> bool:
    """Whether the report needs a metric: of norms and loads, which are hundreds, those of all."""
    if name.startswith("moe/layer_"):
        return False
    return not name.startswith("l2_norm/") or name.endswith("/global")


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values among the `window` around each place, fewer at both ends.

    The stretch is the same to both sides, so that the mean does not lag behind a falling curve.
    """
    finite = [math.isfinite(v) for v in values]
    totals = [0.0, *accumulate(v if ok else 0.0 for v, ok in zip(values, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    means = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        low, high = i - reach, i + reach + 1
        held = counts[high] - counts[low]
        means.append((totals[high] - totals[low]) / held if held else math.nan)
    return means


def last(rows: Rows, name: str) -> float | None:
    """The last value of a metric; None where it was never logged."""
    return next((row[name] for row in reversed(rows) if _is_number(row.get(name))), None)


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The gauntlet's results, oldest first."""
    results = [read_json(path) for path in sorted(run_folder.glob("eval/*.json"))]
    return sorted((r for r in results if BATCH in r), key=lambda r: int(r[BATCH]))


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; empty where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _series(label: str, points: list[tuple[float, float]], *, smooth: bool) -> Series:
    """A long noisy series with a moving mean over a fiftieth of it."""
    if not smooth or len(points) < 200:
        return Series(label, points)
    window = 2 * (len(points) // 100) + 1
    means = moving_mean([y for _, y in points], window)
    # At the very ends the mean is of a few points: noise, drawn bold.
    trend = [(x, mean) for (x, _), mean in zip(points, means, strict=True)]
    trend = trend[window // 4 : len(trend) - window // 4]
    return Series(label, points, trend, f"bold: mean of {window} logged steps")


def _task_row(task: Mapping[str, Any]) -> tuple[str, ...]:
    accuracy, stderr, chance = task["accuracy"], task["stderr"], task["chance"]
    known = accuracy is not None
    notes = [f"{key}: {task[key]}" for key in ("ties", "truncated") if task.get(key)]
    notes += [f"failed: {task['failure']}"] if task.get("failure") else []
    return (
        str(task["label"]),
        str(task["num_fewshot"]),
        str(task["n"]),
        f"{100 * accuracy:.1f}%" if known else "n/a",
        f"± {100 * stderr:.1f}" if known else "",
        f"{100 * chance:.1f}%",
        f"{100 * task['majority']:.1f}%",
        bar(accuracy, mark=chance) if known else "",
        ", ".join(notes),
    )


def _sample(text: str) -> str:
    return escape(printable(text))


def _tenth(value: float) -> str:
    return f"{value:.1f}"


def _score(score: float | None) -> str:
    return "n/a" if score is None else f"{score:.4f}"


def _error(stderr: float | None) -> str:
    return "" if stderr is None else f"± {stderr:.4f}"


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _reached(rows: Rows) -> str:
    """How far the run came."""
    if not rows:
        return ""
    return f"{rows[-1][BATCH]} batches, {count(rows[-1][TOKEN])} tokens"


def _names(rows: Rows) -> list[str]:
    """Every metric of the run, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _of_gauntlet(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/[<category of rows>/]<metric>`."""
    parts = name.split("/")
    return parts[0] == "metrics" and len(parts) >= 4 and parts[2].endswith("-shot")


def _is_accuracy(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/<Accuracy>`: one for each task."""
    return _of_gauntlet(name) and name.count("/") == 3 and name.endswith("Accuracy")


def _averages(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Of a gauntlet's result; older ones have one, without a name."""
    return result.get("averages") or {"average": result.get("average")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_rows(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Rows:
    return read_metrics(path, wanted) if path.exists() else []
