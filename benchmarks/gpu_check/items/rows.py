"""Rows on their way from an item's process to the runner: a file of a JSON object a line.

A line is written with one call, so that what a process had found is there when it is killed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def append(file: Path, row: dict[str, Any]) -> None:
    """Add a row."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(_plain(row), default=str) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that was not finished is left out."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def _plain(value: Any) -> Any:
    """What JSON knows: NaN and the infinities as words, numbers of five digits."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value
