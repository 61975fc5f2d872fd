"""metrics.jsonl and samples.jsonl: one JSON object a line, the run's own record.

The tracker writes them, the report and anyone's notebook read them. The idea: after a kill and a
resume the file is the one that an uninterrupted run would have written, wall-clock values aside,
because lines beyond the checkpoint are dropped when the run goes on. Numbers keep every digit.
JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity", "-Infinity", and
`read_metrics` turns them back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from llmfoundry.errors import UserError

BATCH, TOKEN = "time/batch", "time/token"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """An append-only file of JSON objects that each carry `time/batch`; flushed line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def start(self, batch: int) -> int:
        """Open for a run that goes on after `batch`; 0 begins anew. Returns the lines dropped."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        dropped = trim(self.path, batch)
        self._file = self.path.open("a", encoding="utf-8")
        return dropped

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        assert self._file is not None, "start() opens the file"
        text = json.dumps({k: plain(v) for k, v in row.items()}, allow_nan=False)
        # One write call: a kill leaves at most one torn line, the last.
        self._file.write(text + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def trim(path: Path, batch: int) -> int:
    """Keep the lines up to `batch` (none if it is 0) and drop a torn last one.

    The file is replaced as a whole, so a kill meanwhile leaves the old one. Returns the number of
    lines dropped.

    Raises:
        UserError: a line that is not the last is no JSON object.
    """
    if not path.exists():
        return 0
    lines, torn = _lines(path)
    kept = [line for line, row in lines if batch > 0 and row[BATCH] <= batch]
    dropped = len(lines) - len(kept) + torn
    if dropped or not path.read_bytes().endswith(b"\n"):
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in kept))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    return dropped


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl (or samples.jsonl), a torn last line left out.

    Raises:
        UserError: a line that is not the last is no JSON object.
    """
    return [row for _, row in _lines(path)[0]]


def _lines(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """(text, object) of each whole line, and the number of torn ones at the end (0 or 1)."""
    # Split at line feeds only: other separators may stand inside a JSON string.
    texts = path.read_bytes().split(b"\n")
    rows: list[tuple[str, dict[str, Any]]] = []
    for i, raw in enumerate(texts):
        if not raw.strip():
            continue
        try:
            text = raw.decode("utf-8")
            row = json.loads(text)
            if not isinstance(row, dict) or not isinstance(row.get(BATCH), int):
                raise ValueError(f"no object with {BATCH}")
        except ValueError as error:
            if not any(later.strip() for later in texts[i + 1 :]):
                return rows, 1
            raise UserError(
                f"{path}:{i + 1}: not a line of this file ({error}); delete the line, or restore"
                " the file"
            ) from error
        rows.append((text, {k: _restored(v) for k, v in row.items()}))
    return rows, 0


def plain(value: Any) -> Any:
    """A float that JSON can hold: itself, or the name of a non-finite one."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _restored(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
