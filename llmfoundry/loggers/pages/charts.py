"""Charts of the report: their metrics, their data for the browser, and heat maps.

`report` calls `training_charts`, `experts` and `gauntlet_charts`. A few standard charts show the
metrics that every reader needs. Each other logged metric has a chart in its group of `titles`.

A chart is embedded as numbers, which `templates/charts.js` draws with uPlot. A long series is
divided into at most LIMIT intervals with the same number of points, and each interval is reduced to
its mean, minimum and maximum. Smoothing averages the means; minimum and maximum keep the peaks that
smoothing hides.
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
"""(tokens, text) of each event that a chart marks."""

TRAIN_LOSS, EVAL_LOSS = "loss/train/total", "metrics/eval/LanguageCrossEntropy"
LANGUAGE_LOSS = "loss/train/loss"  # total loss without the auxiliary losses of routers
TRAIN_BPB, EVAL_BPB = "metrics/train/bits_per_byte", "metrics/eval/bits_per_byte"
EVAL_OBJECTIVE, REWARD_ACCURACY = "loss/eval/total", "rewards/eval/accuracies"
PAIRS, PAIRS_BY_TOKEN = "metrics/eval/PairAccuracy", "metrics/eval/PairAccuracyPerToken"
SPEED_METRIC, MFU = "throughput/tokens_per_sec", "throughput/device/mfu"
MEMORY, NORM = "memory/peak_allocated_mem", "l2_norm/grad/global"
GAUNTLET = "icl/metrics/eval_gauntlet/"
# metrics that are shown elsewhere, or that are a multiple of another metric
NOT_DRAWN = ("time/", "moe/", "throughput/", "metrics/eval/LanguagePerplexity")
_OPEN = (LOSS, ANSWERS, OPTIMIZER, SPEED)  # groups that are unfolded at first
MARKED = ("Loss", "Gradient norm", "Throughput")  # charts that mark events
LIMIT = 800  # maximal number of intervals of a line
DIGITS = 6  # significant digits of a value: more than the pixels of a screen
STEEP = 0.05  # fraction of a line, from its start, that a steep chart ignores for its y range


@dataclass(frozen=True)
class Chart:
    """A line chart of one or more metrics.

    Attributes:
        title: caption.
        metrics: metric names by label of the line.
        note: unit or explanation in the caption.
        form: number format of values, a key of FORMS in `templates/charts.js`.
        smooth: whether noise is smoothed at first.
        from_zero: whether the y axis starts at zero.
        steep: whether the first 5 % of a line are ignored for the range of the y axis.
        scale: factor of the values.
        is_one_if_equal: whether lines that are all equal are drawn as one line without a label.
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
    """Return the standard charts, then one chart for every other metric, by group."""
    if not rows:
        return Markup('<p class="hint">No step was logged.</p>')

    # standard charts, and the metrics that they show
    names = metric_names(rows)
    groups = _standard(names)
    covered = set[str]()
    for charts in groups.values():
        for chart in charts:
            covered.update(chart.metrics.values())

    # a chart for each other metric
    for name in names:
        is_task = name.startswith(GAUNTLET) or _is_gauntlet_metric(name)
        if name not in covered and not is_task and not name.startswith(NOT_DRAWN):
            metric = title(name)
            chart = Chart(metric.text.capitalize(), {"": name}, smooth=True)
            groups.setdefault(metric.group, []).append(chart)

    figures = {group: chart_figures(groups.get(group, []), rows, marks) for group in GROUPS}
    return Markup().join(_group(group, figures[group], rows) for group in GROUPS)


def _group(group: str, figures: Sequence[Markup], rows: Rows) -> Markup:
    """Return the charts of a group, unfolded or folded with their number; empty without charts."""
    more = rates(rows) if group == SPEED else Markup()
    if not figures and not more:
        return Markup()
    is_open = group in _OPEN
    count = "" if is_open else str(len(figures))
    return part("folded", group, together(figures, "charts") + more, count, "group", is_open)


def _standard(names: Sequence[str]) -> dict[str, list[Chart]]:
    """Return the standard charts by group, given the names of the logged metrics."""
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
    """Return a table with the medians of throughput metrics that have no chart.

    They are multiples of the metric in the chart "Throughput".
    """
    cells = []
    for name in metric_names(rows):
        if name.startswith("throughput/") and name != SPEED_METRIC:
            value = median([row[name] for row in rows if is_number(row.get(name))])
            text = percent(value) if name == MFU else short_count(value)
            label = Markup('<span title="{}">{}</span>').format(name, title(name).text)
            cells.append((label, text))
    return table(("median", ""), cells, right=(1,))


def preference_charts() -> list[Chart]:
    """Return the charts of preference tuning: rewards of chosen and rejected answers."""
    rewards, log_probs, shares, margins = {}, {}, {}, {}
    for split, name in (("train", "training"), ("eval", "validation")):
        for side in ("chosen", "rejected"):
            rewards[f"{side}, {name}"] = f"rewards/{split}/{side}"
            log_probs[f"{side}, {name}"] = f"logps/{split}/{side}"
        shares[name] = f"rewards/{split}/accuracies"
        margins[name] = f"rewards/{split}/margins"
    shares |= {"likelier, validation": PAIRS, "likelier by token, validation": PAIRS_BY_TOKEN}
    note = "% of pairs: rewards, and log-probabilities, in order"
    return [
        Chart("Pairs distinguished", shares, note, "tenth", smooth=True, scale=100),
        Chart("Rewards", rewards, "beta times log of policy over reference", smooth=True),
        Chart("Reward margin", margins, "chosen less rejected", smooth=True),
        Chart("Log-probabilities of answers", log_probs, "nats", smooth=True),
        Chart("Cross-entropy", {"better answers, validation": EVAL_LOSS}, "nats/token"),
    ]


def gauntlet_charts(rows: Rows, averages: Sequence[str]) -> Markup:
    """Return the charts of gauntlet categories and tasks; averages have the first colors."""
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
    """Return the charts of the expert load: over all layers, then a heat map of each layer."""
    spread = {name: f"moe/load_{name}" for name in ("max", "min", "std")}
    charts = [
        Chart("Load of experts", spread, "over the mean: the most, the least, the deviation"),
        Chart("Router entropy", {"": "moe/router_entropy"}, "nats, mean over layers"),
    ]
    return together([*chart_figures(charts, rows), *load_maps(loads)], "charts")


def chart_figures(charts: Sequence[Chart], rows: Rows, marks: Marks = ()) -> list[Markup]:
    """Return the figures of those charts that have logged metrics, over tokens."""
    x_end = float(rows[-1][TOKEN]) if rows else 0.0
    figures = []
    for chart in charts:
        chart_marks = marks if chart.title in MARKED else ()
        figure = line_chart(chart, _lines(chart, rows), x_end=x_end, marks=chart_marks)
        if figure:
            figures.append(figure)
    return figures


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        label: name in the legend; "" for a single line, which the caption describes.
        points: (x, y) in order of x. A NaN or infinite y interrupts the line.
        key: name of the metric in metrics.jsonl.
    """

    label: str
    points: Points
    key: str = ""


def line_chart(
    chart: Chart,
    lines: Sequence[ChartLine],
    *,
    x_end: float,
    marks: Marks = (),
    limit: int = LIMIT,
    axes: Sequence[Mapping[str, Sequence[float]]] = (),
    ends: Mapping[str, float] | None = None,
) -> Markup:
    """Return a <figure> of lines over tokens from 0 to `x_end`; empty if no value is finite.

    The y axis is logarithmic at first if positive values span more than a factor of 30.

    Args:
        chart: caption and format.
        lines: the lines.
        x_end: end of the x axis in tokens, the same for all charts of a page.
        marks: events to mark.
        limit: maximal number of intervals per line.
        axes: for each line, the ends of its intervals along each x axis that a reader can choose.
        ends: end of each of these x axes.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    if not any(finite):
        return Markup()

    # values that determine the y range: without the steep start, if enough remain
    skip, x_end = STEEP if chart.steep else 0.0, x_end or 1.0
    in_range = [y for points in finite for x, y in points if x >= skip * points[-1][0]]
    if len(in_range) < 40:
        in_range = [y for points in finite for _, y in points]
    is_log = not chart.from_zero and 0 < 30 * min(in_range) < max(in_range)

    # data for charts.js
    data: dict[str, Any] = {"form": chart.form, "log": is_log, "zero": chart.from_zero}
    data |= {"skip": skip, "smooth": chart.smooth, "end": x_end}
    data["lines"] = [{"label": line.label, **stretches(line.points, limit)} for line in lines]
    if axes:
        data["ends"] = ends
        for line_data, line_axes in zip(data["lines"], axes, strict=True):
            line_data["axes"] = line_axes
    visible_marks = [{"x": x, "what": what} for x, what in marks if 0 <= x <= x_end]
    if visible_marks:
        data["marks"] = visible_marks
    tooltip = lines[0].key if len(lines) == 1 else ""
    return part("chart", chart.title, chart.note, tooltip, _legend(lines), data)


def stretches(points: Points, limit: int = LIMIT) -> dict[str, list[float | None]]:
    """Reduce a series to at most `limit` intervals.

    Returns:
        x: the last x of each interval. y: the mean of its finite values; None without any. low and
        high: their minimum and maximum; missing if every interval is one point.
    """
    ends = stretch_ends(len(points), limit)
    series: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    for start, stop in pairwise([0, *(end + 1 for end in ends)]):
        values = [y for _, y in points[start:stop] if math.isfinite(y)]
        series["x"].append(_rounded(points[stop - 1][0], 12))
        series["y"].append(_rounded(math.fsum(values) / len(values)) if values else None)
        series["low"].append(_rounded(min(values)) if values else None)
        series["high"].append(_rounded(max(values)) if values else None)
    if len(points) <= limit:
        del series["low"], series["high"]
    return series


def stretch_ends(n: int, limit: int = LIMIT) -> list[int]:
    """Return the index of the last point of each interval, for `n` points."""
    n_intervals = min(n, limit)
    return [(i + 1) * n // n_intervals - 1 for i in range(n_intervals)]


def _rounded(value: float, digits: int = DIGITS) -> float:
    """Round to significant digits; return an int if the result is integral, which is shorter."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _lines(chart: Chart, rows: Rows) -> list[ChartLine]:
    """Return a line for each of the chart's metrics that was logged."""
    lines = []
    for label, name in chart.metrics.items():
        logged = [row for row in rows if is_number(row.get(name))]
        points = [(float(row[TOKEN]), float(row[name]) * chart.scale) for row in logged]
        lines += [ChartLine(label, points, name)] if points else []
    if chart.is_one_if_equal and all(line.points == lines[0].points for line in lines):
        lines = [ChartLine("", line.points, line.key) for line in lines[:1]]
    return lines


def _legend(lines: Sequence[ChartLine]) -> list[dict[str, str]]:
    """Return the legend: labels, and the number of values that are not finite.

    A line without either has an empty label. Without any text there is no legend.
    """
    items = []
    for line in lines:
        n_broken = sum(not math.isfinite(y) for _, y in line.points)
        note = f"; {n_broken} not finite" if n_broken else ""
        items.append({"key": line.key, "label": line.label + note})
    return items if any(item["label"] for item in items) else []


MAX_COLUMNS, MAX_LAYERS = 70, 8
LEVELS = 6  # opacity levels of each color
FULL = 2.0  # base-2 logarithm of the relative load at which a color is opaque
LESS, MORE = "s0", "s1"  # colors of the page


def load_maps(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return heat maps of the expert load over time, for at most eight layers.

    A perfectly balanced layer is a blank map. A cell is blue if the load of the expert is below
    the mean and orange if it is above. Colors are opaque at a quarter of the mean and at four times
    the mean. A column is the sum of several steps. Expert 0 is the lowest row.
    """
    if not rows:
        return []

    # columns: groups of successive rows
    n_layers, n = len(rows[0]["load"]), min(len(rows), MAX_COLUMNS)
    bounds = pairwise(i * len(rows) // n for i in range(n + 1))
    groups = [rows[start:stop] for start, stop in bounds]

    # labels of the x axis: tokens at each quarter
    labels = [(0.0, "0")]
    for i in range(1, 5):
        tokens = groups[max(0, n * i // 4 - 1)][-1][TOKEN]
        labels.append((100 * i / 4, short_count(tokens)))

    # layers: all, or eight evenly spaced ones
    layers = list(range(n_layers))
    if n_layers > MAX_LAYERS:
        spacing = (n_layers - 1) / (MAX_LAYERS - 1)
        layers = sorted({round(i * spacing) for i in range(MAX_LAYERS)})
    maps = []
    for layer in layers:
        columns = [_relative([row["load"][layer] for row in group]) for group in groups]
        maps.append(_load_map(layer, columns, labels))
    return maps


def _load_map(
    layer: int, columns: Sequence[Sequence[float]], labels: Sequence[tuple[float, str]]
) -> Markup:
    """Return the heat map of one layer.

    Args:
        layer: index of the layer.
        columns: relative load of every expert, for each column.
        labels: labels of the x axis.
    """
    # cells by color and opacity; balanced cells are not drawn
    n_experts, cells = len(columns[0]), dict[tuple[str, float], list[Cell]]()
    for x, column in enumerate(columns):
        for expert, relative in enumerate(column):
            step = level(relative)
            if step:
                color = MORE if step > 0 else LESS, abs(step) / LEVELS
                cells.setdefault(color, []).append((x, n_experts - 1 - expert))

    # labels of about eight experts; tooltips of the columns
    labeled = range(0, n_experts, max(1, n_experts // 8))
    expert_labels = [(100 * (1 - (e + 0.5) / n_experts), str(e)) for e in labeled]
    tooltips = [(x, 0, 1, n_experts, _extremes(column)) for x, column in enumerate(columns)]
    return HeatMap(
        f"Load of experts, layer {layer}",
        "orange: above the mean, up to 4 times; blue: below, to a quarter; x: tokens",
        len(columns),
        n_experts,
        paths(cells),
        expert_labels,
        labels,
        tooltips,
    ).drawn()


def _extremes(column: Sequence[float]) -> str:
    most, least = max(column), min(column)
    return (
        f"most: expert {column.index(most)}, {most:.2f} of the mean\n"
        f"least: expert {column.index(least)}, {least:.2f}"
    )


def level(relative: float) -> int:
    """Return the color of a relative load: 0 near 1, LEVELS for opaque orange, -LEVELS for blue."""
    if relative <= 0:
        return -LEVELS
    return max(-LEVELS, min(LEVELS, round(math.log2(relative) / FULL * LEVELS)))


def _relative(loads: Sequence[Sequence[float]]) -> list[float]:
    """Return the load of each expert, summed over steps and divided by the mean of all experts."""
    totals = [float(sum(expert)) for expert in zip(*loads, strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean if mean else 1.0 for total in totals]


def metric_names(rows: Rows) -> list[str]:
    """Return the names of all metrics of the run, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def is_number(value: Any) -> bool:
    """Return whether the value of a metric is a number, which may be infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_gauntlet_metric(name: str) -> bool:
    """Return whether a name has the form `metrics/<task>/<n>-shot/[<category>/]<metric>`."""
    parts = name.split("/")
    return parts[0] == "metrics" and len(parts) >= 4 and parts[2].endswith("-shot")


def _is_accuracy(name: str) -> bool:
    """Return whether a name has the form `metrics/<task>/<n>-shot/<Accuracy>`: one per task."""
    return _is_gauntlet_metric(name) and name.count("/") == 3 and name.endswith("Accuracy")
