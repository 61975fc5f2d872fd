"""The runs of a scaling experiment: as rows, from and to files, and which of them are fitted."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.files import parse_json

NAMES = {
    "parameters": ("parameters", "params", "n", "model size"),
    "tokens": ("tokens", "d", "training tokens"),
    "flops": ("flops", "c", "training flop", "compute"),
    "loss": ("loss", "l"),
}
"""Columns of others' files, whatever their case."""
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Point:
    """A run, done or to be done; numbers that are not known are NaN.

    Attributes:
        name: of its folder.
        family: the kind of model.
        parameters: N of the law.
        tokens: D, that it trains on.
        flops: C, counted forward and backward.
        loss: on held-out text at the end, nats a token.
        held_out: whether it tests the law, and is not fitted.
        total: parameters, of which a token meets `active`, `non_embedding` without embeddings.
        width: of the model.
        lr: the peak learning rate.
        batch_tokens: tokens of a step.
        seed: of the run.
        seconds: that it trained and evaluated.
        target: what the grid asked for, tokens or FLOPs, which whole steps come near to.
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
    """A table that `read_points` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Point)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return text.getvalue()


def read_points(path: Path) -> list[Point]:
    """Runs of a CSV, or of a JSON list of objects.

    Raises:
        UserError: it cannot be read, or a row lacks a number; names the first row of each kind.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"has more than {MOST_BYTES >> 20} MiB")
        text = content.decode("utf-8-sig")
        rows = parse_json(text) if path.suffix == ".json" else _csv_rows(text)
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"fit: {path}: cannot be read: {error}; write a CSV or JSON file"
        ) from error
    if isinstance(rows, dict):  # scaling.json
        rows = rows.get("points")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"fit: {path}: has no rows; write a line of names, and one for each run")
    problems: dict[str, str] = {}
    points = []
    for number, row in enumerate(rows, 1):
        try:
            points.append(_point(row, number))
        except ValueError as error:
            problems.setdefault(str(error), f"fit: {path}: row {number}: {error}")
    if problems:
        raise UserError(*problems.values())
    return points


def _csv_rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _point(row: Mapping[Any, Any], number: int) -> Point:
    """A run of others: N, D or C, and the loss."""
    known = {str(key).strip().lower(): value for key, value in row.items()}
    found: dict[str, float] = {}
    for name, others in NAMES.items():
        values = [known[other] for other in others if known.get(other) not in (None, "")]
        if values:
            found[name] = _positive(name, values[0])
    if "loss" not in found or "parameters" not in found:
        missing = "loss" if "loss" not in found else "parameters"
        raise ValueError(f"{missing}: is missing; name a column {' or '.join(NAMES[missing])}")
    if not {"tokens", "flops"} & set(found):
        raise ValueError("tokens: is missing; name a column tokens, or flops of which 6 N are one")
    n = found["parameters"]
    tokens = found.get("tokens", found.get("flops", 0.0) / (6 * n))
    return Point(
        name=str(known.get("name") or f"row {number}"),
        family=str(known.get("family") or ""),
        parameters=n,
        tokens=tokens,
        flops=found.get("flops", 6 * n * tokens),
        loss=found["loss"],
        held_out=str(known.get("held_out")).strip().lower() in ("true", "1", "yes"),
        lr=float(number),  # each row is a run to fit, of whatever learning rate
        target=tokens,
    )


def _positive(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if name == "loss" and str(value).strip().lower() in ("nan", "inf"):
        return math.nan  # a run that diverged
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: {str(value)[:40]!r} is not a positive number")
    return number


def fitted(points: Sequence[Point]) -> list[Point]:
    """Of each family, size and number of tokens the runs of the best learning rate and batch.

    Which is the one with the least mean loss over its seeds; a run that diverged is none.
    """
    cells: dict[Any, dict[Any, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if not point.held_out:
            cell = point.family, point.width or point.parameters, point.target
            cells[cell][point.lr, point.batch_tokens].append(point)
    return [point for cell in cells.values() for point in _best(cell)]


def _best(cell: Mapping[Any, list[Point]]) -> list[Point]:
    whole = [runs for runs in cell.values() if all(math.isfinite(run.loss) for run in runs)]
    return min(whole, key=lambda runs: fmean(run.loss for run in runs), default=[])


def by_family(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points of each family, in order."""
    found: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        found[point.family].append(point)
    return dict(found)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: NaN and infinity, which it has not, are null."""
    cleaned: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return cleaned


def swept(points: Sequence[Point], key: str) -> Iterator[list[Point]]:
    """Runs that differ in `key` alone, lr or batch_tokens, in three values at least.

    Of other swept keys the value of the best run counts.
    """
    other = {"lr": "batch_tokens", "batch_tokens": "lr"}[key]
    for runs in by_family(points).values():
        cells: dict[Any, list[Point]] = defaultdict(list)
        for run in runs:
            if math.isfinite(run.loss) and not run.held_out:
                cells[run.width, run.target].append(run)
        for cell in cells.values():
            best = min(cell, key=lambda run: run.loss)
            alike = [run for run in cell if getattr(run, other) == getattr(best, other)]
            if len({getattr(run, key) for run in alike}) >= 3:
                yield alike
