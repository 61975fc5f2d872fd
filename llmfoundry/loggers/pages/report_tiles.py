"""The report's first numbers: what came out, on what, when, how long, and from how many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from statistics import median
from typing import Any

from llmfoundry.loggers.console import duration, format_gib, percent, short_count
from llmfoundry.loggers.metrics import BATCH, TOKEN, WALL
from llmfoundry.loggers.pages.page import Tile
from llmfoundry.loggers.pages.report_charts import (
    EVAL_BPB,
    EVAL_LOSS,
    EVAL_OBJECTIVE,
    MEMORY,
    MFU,
    PAIRS,
    REWARD_ACCURACY,
    SPEED_METRIC,
    TRAIN_LOSS,
    Rows,
    is_number,
)
from llmfoundry.loggers.pages.score_charts import ShownScore, in_parts, written

_TRAINING, _EVALUATION = "time/train", "time/val"


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
    training, evaluation = _last(rows, _TRAINING), _last(rows, _EVALUATION) or 0.0
    if training is not None:
        rest = f"{duration(evaluation)} of it evaluation" if evaluation >= 1 else ""
        yield Tile("duration", duration(training + evaluation), rest)
    walls = [row for row in rows if WALL in row]
    if walls:
        before = sum(walls[0].get(name, 0.0) for name in (_TRAINING, _EVALUATION))
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
