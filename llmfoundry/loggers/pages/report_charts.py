"""The report's charts: which metrics stand in which picture, and the pictures in which group.

`report` calls `training_charts`, `experts` and `evaluation`. The idea: a handful of pictures shows
what everyone asks of a run; whatever else was logged has its own, in the group of `titles`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any

from llmfoundry.loggers.console import percent, short_count
from llmfoundry.loggers.metrics import TOKEN
from llmfoundry.loggers.pages.chart import Series, line_chart
from llmfoundry.loggers.pages.event_marks import Marks
from llmfoundry.loggers.pages.heat_map import load_maps
from llmfoundry.loggers.pages.page import table
from llmfoundry.loggers.pages.titles import ANSWERS, GROUPS, LOSS, OPTIMIZER, SPEED, title

Rows = list[dict[str, Any]]

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


@dataclass(frozen=True)
class Chart:
    """A picture: metrics (label → name), unit, how values read (FORMS), whether noise is smoothed.

    `steep`: the first twentieth of the run does not decide the frame. `is_one_if_equal`: lines that
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


MARKED = ("Loss", "Gradient norm", "Throughput")  # pictures that show what happened to the run


def training_charts(rows: Rows, marks: Marks = ()) -> str:
    """The standard pictures, then one for every metric that they do not show, by group."""
    if not rows:
        return '<p class="hint">No step was logged.</p>'
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
    parts = []
    for group in GROUPS:
        drawn = [
            text for chart in groups.get(group, []) if (text := chart_figure(chart, rows, marks))
        ]
        more = rates(rows) if group == SPEED else ""
        if drawn or more:
            opened = " open" if group in _OPEN else ""
            many = f'<span class="hint">{len(drawn)}</span>' if not opened else ""
            parts.append(
                f'<details class="group"{opened}><summary>{escape(group)} {many}</summary>'
                f'<div class="charts">{"".join(drawn)}</div>{more}</details>'
            )
    return "".join(parts)


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


def rates(rows: Rows) -> str:
    """Medians of everything that the throughput's picture shows up to a factor."""
    found = []
    for name in metric_names(rows):
        if name.startswith("throughput/") and name != SPEED_METRIC:
            value = median([row[name] for row in rows if is_number(row.get(name))])
            shown = percent(value) if name == MFU else short_count(value)
            found.append((f'<span title="{escape(name)}">{title(name).text}</span>', shown))
    return table(("median", ""), found, right=(1,), raw=(0,))


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


def experts(rows: Rows, loads: Rows) -> str:
    """How evenly routers spread the tokens: over all layers, then a heat map of each."""
    spread = {name: f"moe/load_{name}" for name in ("max", "min", "std")}
    charts = [
        Chart("Load of experts", spread, "over the mean: the most, the least, the deviation"),
        Chart("Router entropy", {"": "moe/router_entropy"}, "nats, mean over layers"),
    ]
    drawn = "".join(chart_figure(chart, rows) for chart in charts) + load_maps(loads)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def gauntlet_charts(rows: Rows, averages: Sequence[str]) -> str:
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
    drawn = "".join(chart_figure(chart, rows) for chart in charts)
    return f'<div class="charts apart">{drawn}</div>' if drawn else ""


def chart_figure(chart: Chart, rows: Rows, marks: Marks = ()) -> str:
    """The chart's figure over tokens; empty where none of its metrics was logged."""
    lines = []
    for label, name in chart.metrics.items():
        logged = [r for r in rows if is_number(r.get(name))]
        points = [(float(r[TOKEN]), float(r[name]) * chart.scale) for r in logged]
        if points:
            lines.append(replace(_series(label, points, smooth=chart.smooth), key=name))
    if chart.is_one_if_equal and all(line.points == lines[0].points for line in lines):
        lines = [replace(line, label="") for line in lines[:1]]
    return line_chart(
        chart.title,
        lines,
        x_end=float(rows[-1][TOKEN]) if rows else 0.0,
        form=chart.form,
        y_from_zero=chart.from_zero,
        y_skip=0.05 if chart.steep else 0.0,
        smooth=chart.smooth,
        note=chart.note,
        marks=marks if chart.title in MARKED else (),
    )


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
        n = counts[high] - counts[low]
        means.append((totals[high] - totals[low]) / n if n else math.nan)
    return means


def metric_names(rows: Rows) -> list[str]:
    """Every metric of the run, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def is_number(value: Any) -> bool:
    """Whether a metric has a value here, which may be infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def _of_gauntlet(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/[<category of rows>/]<metric>`."""
    parts = name.split("/")
    return parts[0] == "metrics" and len(parts) >= 4 and parts[2].endswith("-shot")


def _is_accuracy(name: str) -> bool:
    """Whether `metrics/<task>/<n>-shot/<Accuracy>`: one for each task."""
    return _of_gauntlet(name) and name.count("/") == 3 and name.endswith("Accuracy")
