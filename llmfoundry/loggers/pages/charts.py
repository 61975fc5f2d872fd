"""The report's charts: which metrics stand in which, what a browser draws them from, heat maps.

`report` calls `training_charts`, `experts` and `gauntlet_charts`. The idea: a handful of pictures
shows what everyone asks of a run; whatever else was logged has its own, in the group of `titles`. A
chart is its numbers: a series of any length becomes at most LIMIT stretches of as many points each,
of which mean, least and greatest are kept. A mean of means is then the mean that smoothing shows,
and the least and the greatest are the peaks that it hides. `templates/charts.js` draws them with
uPlot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from markupsafe import Markup

from llmfoundry.loggers.console import percent, short_count
from llmfoundry.loggers.metrics_file import TOKEN
from llmfoundry.loggers.pages.page import Cell, HeatMap, part, paths, table, together
from llmfoundry.loggers.pages.titles import ANSWERS, GROUPS, LOSS, OPTIMIZER, SPEED, title

Rows = list[dict[str, Any]]
Points = Sequence[tuple[float, float]]
Marks = Sequence[tuple[float, str]]
"""Tokens at which something happened, and what."""

TRAIN_LOSS, EVAL_LOSS = "loss/train/total", "metrics/eval/LanguageCrossEntropy"
LANGUAGE_LOSS = "loss/train/loss"  # the total without what routers add, where they add something
TRAIN_BPB, EVAL_BPB = "metrics/train/bits_per_byte", "metrics/eval/bits_per_byte"
EVAL_OBJECTIVE, REWARD_ACCURACY = "loss/eval/total", "rewards/eval/accuracies"
PAIRS, PAIRS_BY_TOKEN = "metrics/eval/PairAccuracy", "metrics/eval/PairAccuracyPerToken"
SPEED_METRIC, MFU = "throughput/tokens_per_sec", "throughput/device/mfu"
MEMORY, NORM = "memory/peak_allocated_mem", "l2_norm/grad/global"
GAUNTLET = "icl/metrics/eval_gauntlet/"
# Shown elsewhere, or the same as another up to a factor.
NOT_DRAWN = ("time/", "moe/", "throughput/", "metrics/eval/LanguagePerplexity")
_OPEN = (LOSS, ANSWERS, OPTIMIZER, SPEED)  # groups that a reader sees at once
MARKED = ("Loss", "Gradient norm", "Throughput")  # pictures that show what happened to the run
LIMIT = 800  # stretches of a line
DIGITS = 6  # of a value: more than a screen has pixels
STEEP = 0.05  # share of a line whose values do not decide the frame of a steep chart


@dataclass(frozen=True)
class Chart:
    """A picture: metrics (label → name), unit, how values read (FORMS), whether noise is smoothed.

    `steep`: the first twentieth of a line does not decide the frame. `is_one_if_equal`: lines that
    all are the same are drawn as one, without a name.
    """

    title: str
    metrics: dict[str, str]
    note: str = ""
    form: str = "number"
    smooth: bool = False
    from_zero: bool = False
    steep: bool = False
    scale: float = 1.0
    is_one_if_equal: bool = False


def training_charts(rows: Rows, marks: Marks = ()) -> Markup:
    """The standard pictures, then one for every metric that they do not show, by group."""
    if not rows:
        return Markup('<p class="hint">No step was logged.</p>')
    names = metric_names(rows)
    groups = _standard(names)
    standard = [chart for charts in groups.values() for chart in charts]
    shown = {name for chart in standard for name in chart.metrics.values()}
    for name in names:
        of_task = name.startswith(GAUNTLET) or _of_gauntlet(name)
        if name not in shown and not of_task and not name.startswith(NOT_DRAWN):
            known = title(name)
            chart = Chart(known.text.capitalize(), {"": name}, smooth=True)
            groups.setdefault(known.group, []).append(chart)
    drawn = ((group, chart_figures(groups.get(group, []), rows, marks)) for group in GROUPS)
    return Markup().join(_group(group, found, rows) for group, found in drawn)


def _group(group: str, drawn: Sequence[Markup], rows: Rows) -> Markup:
    """Pictures that a reader sees at once, or folded with their number; empty without any."""
    more = rates(rows) if group == SPEED else Markup()
    if not drawn and not more:
        return Markup()
    is_open = group in _OPEN
    many = "" if is_open else str(len(drawn))
    return part("folded", group, together(drawn, "charts") + more, many, "group", is_open)


def _standard(names: Sequence[str]) -> dict[str, list[Chart]]:
    """What everyone asks of a run, by group."""
    language = LANGUAGE_LOSS if LANGUAGE_LOSS in names else TRAIN_LOSS
    rates = {name[3:].replace("/group", ", group "): name for name in names if name[:3] == "lr-"}
    by_answer = any(name.startswith("rewards/") for name in names)
    losses = {"training": language, "validation": EVAL_OBJECTIVE if by_answer else EVAL_LOSS}
    bits = {"training": TRAIN_BPB, "validation": EVAL_BPB}
    falling: dict[str, Any] = {"smooth": True, "steep": True}
    unit = "of an answer or a pair" if by_answer else "nats/token"
    return {
        LOSS: [Chart("Loss", losses, unit, **falling), Chart("Bits per byte", bits, **falling)],
        ANSWERS: preference_charts() if by_answer else [],
        OPTIMIZER: [
            Chart("Learning rate", rates, from_zero=True, is_one_if_equal=True),
            Chart("Gradient norm", {"": NORM}, "global L2, before clipping", smooth=True),
        ],
        SPEED: [
            Chart(
                "Throughput",
                {"": SPEED_METRIC},
                "tokens/s",
                "count",
                smooth=True,
                from_zero=True,
            ),
            Chart("Peak memory", {"": MEMORY}, "GiB", "size", from_zero=True),
        ],
    }


def rates(rows: Rows) -> Markup:
    """Medians of everything that the throughput's picture shows up to a factor."""
    found = []
    for name in metric_names(rows):
        if name.startswith("throughput/") and name != SPEED_METRIC:
            value = median([row[name] for row in rows if is_number(row.get(name))])
            shown = percent(value) if name == MFU else short_count(value)
            label = Markup('<span title="{}">{}</span>').format(name, title(name).text)
            found.append((label, shown))
    return table(("median", ""), found, right=(1,))


def preference_charts() -> list[Chart]:
    """How chosen and rejected answers part."""
    sides, splits = ("chosen", "rejected"), {"train": "training", "eval": "validation"}
    both = {f"{side}, {name}": (side, split) for split, name in splits.items() for side in sides}
    rewards = {label: f"rewards/{split}/{side}" for label, (side, split) in both.items()}
    log_probs = {label: f"logps/{split}/{side}" for label, (side, split) in both.items()}
    shares = {name: f"rewards/{split}/accuracies" for split, name in splits.items()}
    shares |= {"likelier, validation": PAIRS, "likelier by token, validation": PAIRS_BY_TOKEN}
    margins = {name: f"rewards/{split}/margins" for split, name in splits.items()}
    note = "% of pairs: rewards, and log-probabilities, in order"
    return [
        Chart("Pairs distinguished", shares, note, "tenth", smooth=True, scale=100),
        Chart("Rewards", rewards, "beta times log of policy over reference", smooth=True),
        Chart("Reward margin", margins, "chosen less rejected", smooth=True),
        Chart("Log-probabilities of answers", log_probs, "nats", smooth=True),
        Chart("Cross-entropy", {"better answers, validation": EVAL_LOSS}, "nats/token"),
    ]


def gauntlet_charts(rows: Rows, averages: Sequence[str]) -> Markup:
    """Categories and tasks over tokens; averages have the first colors."""
    names = metric_names(rows)
    categories = {n.removeprefix(GAUNTLET): n for n in names if n.startswith(GAUNTLET)}
    tasks = {", ".join(n.split("/")[1:-1]): n for n in names if _is_accuracy(n)}
    first = {name: categories[name] for name in averages if name in categories}
    categories = {**first, **categories}
    charts = [
        Chart("Gauntlet", categories, "categories, above chance where the file specifies it"),
        Chart("Tasks", tasks, "accuracy in %", "tenth", scale=100),
    ]
    return together(chart_figures(charts, rows), "charts apart")


def experts(rows: Rows, loads: Rows) -> Markup:
    """How evenly routers spread the tokens: over all layers, then a heat map of each."""
    spread = {name: f"moe/load_{name}" for name in ("max", "min", "std")}
    charts = [
        Chart("Load of experts", spread, "over the mean: the most, the least, the deviation"),
        Chart("Router entropy", {"": "moe/router_entropy"}, "nats, mean over layers"),
    ]
    return together([*chart_figures(charts, rows), *load_maps(loads)], "charts")


def chart_figures(charts: Sequence[Chart], rows: Rows, marks: Marks = ()) -> list[Markup]:
    """Those charts of which anything was logged, over tokens."""
    x_end = float(rows[-1][TOKEN]) if rows else 0.0
    found = (
        line_chart(
            chart, _lines(chart, rows), x_end=x_end, marks=marks if chart.title in MARKED else ()
        )
        for chart in charts
    )
    return [drawn for drawn in found if drawn]


@dataclass(frozen=True)
class Line:
    """(x, y) points in order of x; y may be NaN or infinite, which breaks the line.

    `key` is the metric's name in metrics.jsonl. A single line needs no label: it is the caption's.
    """

    label: str
    points: Points
    key: str = ""


def line_chart(
    chart: Chart,
    lines: Sequence[Line],
    *,
    x_end: float,
    marks: Marks = (),
    limit: int = LIMIT,
    axes: Sequence[Mapping[str, Sequence[float]]] = (),
    ends: Mapping[str, float] | None = None,
) -> Markup:
    """A <figure> of lines from 0 to `x_end`, in tokens, as in all charts of a page.

    `axes` are for each line the ends of its `limit` stretches along every axis that a reader may
    choose, and `ends` the longest line's ends along them. The y axis begins as a logarithmic one
    where positive values span more than a factor of 30. Empty if no value is finite.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    if not any(finite):
        return Markup()
    skip, x_end = STEEP if chart.steep else 0.0, x_end or 1.0
    framed = [y for points in finite for x, y in points if x >= skip * points[-1][0]]
    framed = framed if len(framed) >= 40 else [y for points in finite for _, y in points]
    is_log = not chart.from_zero and 0 < 30 * min(framed) < max(framed)
    data: dict[str, Any] = {"form": chart.form, "log": is_log, "zero": chart.from_zero}
    data |= {"skip": skip, "smooth": chart.smooth, "end": x_end}
    data["lines"] = [{"label": line.label, **stretches(line.points, limit)} for line in lines]
    if axes:
        data["ends"] = ends
        for one, along in zip(data["lines"], axes, strict=True):
            one["axes"] = along
    placed = [{"x": x, "what": what} for x, what in marks if 0 <= x <= x_end]
    data |= {"marks": placed} if placed else {}
    tooltip = lines[0].key if len(lines) == 1 else ""
    return part("chart", chart.title, chart.note, tooltip, _legend(lines), data)


def stretches(points: Points, limit: int = LIMIT) -> dict[str, list[float | None]]:
    """Places and values of a series: x and y; of a long one also the least and greatest.

    Returns:
        x: the end of each stretch. y: the mean of its finite values, None without any. low and
        high: left out where every stretch is one point.
    """
    ends = stretch_ends(len(points), limit)
    found: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    for start, stop in pairwise([0, *(end + 1 for end in ends)]):
        values = [y for _, y in points[start:stop] if math.isfinite(y)]
        found["x"].append(_short(points[stop - 1][0], 12))
        found["y"].append(_short(math.fsum(values) / len(values)) if values else None)
        found["low"].append(_short(min(values)) if values else None)
        found["high"].append(_short(max(values)) if values else None)
    if len(points) <= limit:
        del found["low"], found["high"]
    return found


def stretch_ends(n: int, limit: int = LIMIT) -> list[int]:
    """The last of the `n` points of each of at most `limit` stretches."""
    stretched = min(n, limit)
    return [(i + 1) * n // stretched - 1 for i in range(stretched)]


def _short(value: float, digits: int = DIGITS) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _lines(chart: Chart, rows: Rows) -> list[Line]:
    """What was logged of each of the chart's metrics."""
    lines = []
    for label, name in chart.metrics.items():
        logged = [row for row in rows if is_number(row.get(name))]
        points = [(float(row[TOKEN]), float(row[name]) * chart.scale) for row in logged]
        lines += [Line(label, points, name)] if points else []
    if chart.is_one_if_equal and all(line.points == lines[0].points for line in lines):
        lines = [Line("", line.points, line.key) for line in lines[:1]]
    return lines


def _legend(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Names; none for a line without a name, which is the caption's, unless it is broken."""
    items = []
    for line in lines:
        broken = sum(not math.isfinite(y) for _, y in line.points)
        missing = f"; {broken} not finite" if broken else ""
        items.append({"key": line.key, "label": line.label + missing})
    return items if any(item["label"] for item in items) else []


MAX_COLUMNS, MAX_LAYERS = 70, 8
LEVELS = 6  # of each color
FULL = 2.0  # base-2 logarithm of the relative load at which a color is full
LESS, MORE = "s0", "s1"  # colors of the page


def load_maps(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """A heat map for each layer, for eight of them where there are more: loads of experts in time.

    Perfect balance is a blank picture. A cell is blue where an expert got less than the mean and
    orange where it got more, fully colored at a quarter of the mean and at four times it, so that
    what catches the eye is imbalance. A column is several steps; expert 0 is the lowest.
    """
    if not rows:
        return []
    n_layers, n = len(rows[0]["load"]), min(len(rows), MAX_COLUMNS)
    shown = {round(i * (n_layers - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)}
    bounds = pairwise(i * len(rows) // n for i in range(n + 1))
    groups = [rows[start:stop] for start, stop in bounds]
    places = [(100 * i / 4, groups[max(0, n * i // 4 - 1)][-1][TOKEN]) for i in range(1, 5)]
    labels = [(0.0, "0"), *((at, short_count(tokens)) for at, tokens in places)]
    return [
        _load_map(
            layer, [_relative([row["load"][layer] for row in group]) for group in groups], labels
        )
        for layer in (sorted(shown) if n_layers > MAX_LAYERS else range(n_layers))
    ]


def _load_map(
    layer: int, columns: Sequence[Sequence[float]], labels: Sequence[tuple[float, str]]
) -> Markup:
    """Of one layer: of every column the relative load of every expert."""
    n_experts, cells = len(columns[0]), dict[tuple[str, float], list[Cell]]()
    for x, column in enumerate(columns):
        for expert, relative in enumerate(column):
            if step := level(relative):
                color = MORE if step > 0 else LESS, abs(step) / LEVELS
                cells.setdefault(color, []).append((x, n_experts - 1 - expert))
    named = range(0, n_experts, max(1, n_experts // 8))
    return HeatMap(
        f"Load of experts, layer {layer}",
        "orange: above the mean, up to 4 times; blue: below, to a quarter; x: tokens",
        len(columns),
        n_experts,
        paths(cells),
        [(100 * (1 - (expert + 0.5) / n_experts), str(expert)) for expert in named],
        labels,
        [(x, 0, 1, n_experts, _extremes(column)) for x, column in enumerate(columns)],
    ).drawn()


def _extremes(column: Sequence[float]) -> str:
    most, least = max(column), min(column)
    return (
        f"most: expert {column.index(most)}, {most:.2f} of the mean\n"
        f"least: expert {column.index(least)}, {least:.2f}"
    )


def level(relative: float) -> int:
    """Color of a load over the mean: 0 near 1, up to LEVELS of orange, down to -LEVELS of blue."""
    if relative <= 0:
        return -LEVELS
    return max(-LEVELS, min(LEVELS, round(math.log2(relative) / FULL * LEVELS)))


def _relative(loads: Sequence[Sequence[float]]) -> list[float]:
    """Loads of several steps together, over their mean."""
    totals = [float(sum(expert)) for expert in zip(*loads, strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean if mean else 1.0 for total in totals]


def metric_names(rows: Rows) -> list[str]:
    """Every metric of the run, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def is_number(value: Any) -> bool:
    """Whether a metric has a value here, which may be infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_gauntlet(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/[<category of rows>/]<metric>`."""
    parts = name.split("/")
    return parts[0] == "metrics" and len(parts) >= 4 and parts[2].endswith("-shot")


def _is_accuracy(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/<Accuracy>`: one for each task."""
    return _of_gauntlet(name) and name.count("/") == 3 and name.endswith("Accuracy")
