"""Runs of a scaling experiment: CSV tables, and the selection of the runs that are fitted."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from llmfoundry.errors import UserError

K = TypeVar("K", bound=Hashable)
MOST_BYTES, MOST = 64 << 20, 1e40  # maximum size of a table; maximum number in it


@dataclass(frozen=True)
class Point:
    """A finished or planned run. Unknown numbers are NaN.

    Attributes:
        name: name of the run's folder.
        family: kind of model.
        parameters: N of the law.
        tokens: D of the law, tokens of training.
        flops: C, forward and backward.
        loss: final loss on held-out text, in nats per token.
        held_out: whether the run tests the law and is not fitted.
        total: number of all parameters.
        active: parameters that a token uses.
        non_embedding: active parameters without embeddings.
        width: width of the model (d_model).
        lr: peak learning rate.
        batch_tokens: tokens per step.
        seed: seed of the run.
        seconds: seconds of training and evaluation.
        target: tokens or FLOPs of the grid, which a whole number of steps approximates.
    """

    name: str
    family: str
    parameters: float
    tokens: float
    flops: float
    loss: float = math.nan
    held_out: bool = False
    total: float = math.nan
    active: float = math.nan
    non_embedding: float = math.nan
    width: int = 0
    lr: float = math.nan
    batch_tokens: float = math.nan
    seed: int = 0
    seconds: float = math.nan
    target: float = math.nan


def to_csv(points: Sequence[Point]) -> str:
    """Return the runs as a CSV table that `read_points` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Point)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return text.getvalue()


def read_points(path: Path) -> list[Point]:
    """Read runs from a CSV file.

    Raises:
        UserError: the file cannot be read, or rows have errors; names the first row of each error.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"has more than {MOST_BYTES >> 20} MiB")
        rows = [*csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline=""))]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"fit: {path}: cannot be read: {error}; write a CSV file") from error
    problems, points = dict[str, str](), list[Point]()
    for number, row in enumerate(rows, 1):
        try:
            points.append(_point(row, number))
        except ValueError as error:
            problems.setdefault(str(error), f"fit: {path}: row {number}: {error}")
    if problems or not points:
        none = f"fit: {path}: has no rows; write a line of names, and one for each run"
        raise UserError(*(problems.values() or [none]))
    return points


def _point(row: Mapping[Any, Any], number: int) -> Point:
    """Return the run of a row with N, D or C, and the loss; C = 6 N D if one is missing.

    Raises:
        ValueError: a value is missing or is not a positive number.
    """
    # read the numbers
    values = {str(key).strip().lower(): value for key, value in row.items()}
    numbers = {}
    for name in ("parameters", "tokens", "flops", "loss"):
        if values.get(name):
            numbers[name] = _positive(name, values[name])
    lr = _positive("lr", values.get("lr") or "nan")
    batch_tokens = _positive("batch_tokens", values.get("batch_tokens") or "nan")
    for name in ("loss", "parameters"):
        if name not in numbers:
            raise ValueError(f"{name}: is missing; name a column so")
    if not {"tokens", "flops"} & set(numbers):
        raise ValueError("tokens: is missing; name a column tokens, or flops of which 6 N are one")

    # derive the missing one of tokens and FLOPs
    n = numbers["parameters"]
    tokens = numbers.get("tokens", numbers.get("flops", 0.0) / (6 * n))
    return Point(
        name=str(values.get("name") or f"row {number}"),
        family=str(values.get("family") or ""),
        parameters=n,
        tokens=tokens,
        flops=numbers.get("flops", 6 * n * tokens),
        loss=numbers["loss"],
        held_out=str(values.get("held_out")).strip().lower() in ("true", "1", "yes"),
        lr=lr,
        batch_tokens=batch_tokens,
        target=_positive("target", values.get("target") or f"{tokens}"),
    )


def _positive(name: str, value: str) -> float:
    """Parse a positive number; NaN for a diverged run (loss nan or inf) or an unknown setting."""
    text = str(value).strip().lower()
    is_unknown = text == "nan" and name in ("loss", "lr", "batch_tokens")
    if is_unknown or (name == "loss" and text == "inf"):
        return math.nan
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 / MOST < number < MOST:
        raise ValueError(f"{name}: {text[:40]!r} is not a positive number below {MOST:g}")
    return number


def fitted(points: Iterable[Point]) -> list[Point]:
    """Select the runs to fit: for each family, size and tokens, those of the best settings.

    The best learning rate and batch size have the smallest mean loss over their seeds, and no
    diverged run.
    """
    selected = list[Point]()
    for cell in cells(points).values():
        settings = grouped(cell, lambda run: (run.lr, run.batch_tokens)).values()
        finite_runs = [runs for runs in settings if all(math.isfinite(run.loss) for run in runs)]
        selected += min(finite_runs, key=lambda runs: fmean(run.loss for run in runs), default=[])
    return selected


def cells(points: Iterable[Point]) -> dict[Any, list[Point]]:
    """Group runs by family, size and number of tokens, without held-out runs."""
    runs = (point for point in points if not point.held_out)
    return grouped(runs, lambda run: (run.family, run.width or run.parameters, run.target))


def grouped(points: Iterable[Point], key: Callable[[Point], K]) -> dict[K, list[Point]]:
    """Group points by a key, in order."""
    groups: dict[K, list[Point]] = defaultdict(list)
    for point in points:
        groups[key(point)].append(point)
    return dict(groups)


def by_family(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Group points by family, in order."""
    return grouped(points, lambda point: point.family)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON supports them, with null for NaN and infinity."""
    cleaned: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return cleaned
