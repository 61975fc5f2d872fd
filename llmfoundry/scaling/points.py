"""The runs of a scaling experiment: as rows, from and to a table, and which of them are fitted."""

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
MOST_BYTES, MOST = 64 << 20, 1e40  # of a table; of a number in it


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
    """Runs of a CSV.

    Raises:
        UserError: it cannot be read, or a row lacks a number; names the first row of each kind.
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
    """A run of others: N, D or C, and the loss."""
    known = {str(key).strip().lower(): value for key, value in row.items()}
    names = ("parameters", "tokens", "flops", "loss")
    found = {name: _positive(name, known[name]) for name in names if known.get(name)}
    swept = {name: _positive(name, known.get(name) or "nan") for name in ("lr", "batch_tokens")}
    for name in ("loss", "parameters"):
        if name not in found:
            raise ValueError(f"{name}: is missing; name a column so")
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
        lr=swept["lr"],
        batch_tokens=swept["batch_tokens"],
        target=_positive("target", known.get("target") or f"{tokens}"),
    )


def _positive(name: str, value: str) -> float:
    text = str(value).strip().lower()
    if (text == "nan" and name in ("loss", "lr", "batch_tokens")) or (name, text) == (
        "loss",
        "inf",
    ):
        return math.nan  # a run that diverged; what is not known
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 / MOST < number < MOST:
        raise ValueError(f"{name}: {text[:40]!r} is not a positive number below {MOST:g}")
    return number


def fitted(points: Iterable[Point]) -> list[Point]:
    """Of each family, size and number of tokens the runs of the best learning rate and batch.

    Which is the one with the least mean loss over its seeds; a run that diverged is none.
    """
    best = list[Point]()
    for cell in cells(points).values():
        tried = grouped(cell, lambda run: (run.lr, run.batch_tokens)).values()
        whole = [runs for runs in tried if all(math.isfinite(run.loss) for run in runs)]
        best += min(whole, key=lambda runs: fmean(run.loss for run in runs), default=[])
    return best


def cells(points: Iterable[Point]) -> dict[Any, list[Point]]:
    """Runs of a family, size and number of tokens, but for those held out."""
    tried = (point for point in points if not point.held_out)
    return grouped(tried, lambda run: (run.family, run.width or run.parameters, run.target))


def grouped(points: Iterable[Point], key: Callable[[Point], K]) -> dict[K, list[Point]]:
    """Points by a key, in order."""
    found: dict[K, list[Point]] = defaultdict(list)
    for point in points:
        found[key(point)].append(point)
    return dict(found)


def by_family(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points of each family, in order."""
    return grouped(points, lambda point: point.family)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: NaN and infinity, which it has not, are null."""
    cleaned: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return cleaned
