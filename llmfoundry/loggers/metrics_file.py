"""metrics.jsonl and samples.jsonl: one JSON object a line, the run's own record.

The tracker writes them, the report and anyone's notebook read them. The idea: after a kill and a
resume the file is the one that an uninterrupted run would have written, except for wall-clock
values, because lines beyond the checkpoint are dropped when the run resumes. Numbers keep every
digit.
JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity", "-Infinity", and
`read_metrics` turns them back into floats.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import open_guarded, parse_json

BATCH, TOKEN = "time/batch", "time/token"
WALL = "time/unix_ms"  # when a line was written: milliseconds since 1970
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_WAITING = 256 * 2**20  # bytes of lines kept while the disk is full
_APPEND = "to be appended when there is room, before the run continues"


def milliseconds() -> int:
    """Since 1970."""
    return int(time.time() * 1000)


class JsonLines:
    """An append-only file of JSON objects that each carry `time/batch`; a write call a line.

    A disk that is full, or gone, does not end training: lines wait in memory and are written once
    they can be. `warn` prints a line.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = path, warn
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._problem = ""  # why lines wait
        self._lost = 0

    def start(self, batch: int) -> int:
        """Open for a run that resumes after `batch`; 0 starts over. Returns the lines dropped.

        Raises:
            UserError: a line before the last is not a JSON object, or the file cannot be written.
        """
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            dropped = trim(self.path, batch)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"save_folder: {self.path} cannot be written ({error.strerror}); make room, or"
                " write another folder"
            ) from error
        return dropped

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        assert self._file is not None, "start() opens the file"
        text = json.dumps({k: plain(v) for k, v in row.items()}, allow_nan=False)
        if sum(map(len, self._waiting)) > _MAX_WAITING:
            self._lost += 1
        else:
            self._waiting.append(text.encode() + b"\n")
        self._write_waiting(self._file)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file is None:
            return
        self._write_waiting(self._file)
        lost = self._lost + len(self._waiting)
        if lost:
            why, kept = self._problem or "the disk was full", self._keep_waiting()
            where = f"; {len(self._waiting)} are in {kept}, {_APPEND}" if kept else ""
            self._warn(f"{self.path} lacks {lost} lines: {why}{where}")
        self._waiting.clear()
        self._lost, self._problem = 0, ""
        self._file.close()
        self._file = None

    def _keep_waiting(self) -> str:
        """Write the lines that wait where this machine has room; the file, empty: nowhere."""
        if not self._waiting:
            return ""
        prefix, name = f"{self.path.absolute().parent.name}-{self.path.stem}-", ""
        try:
            descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=self.path.suffix)
            with open(descriptor, "wb") as file:
                file.writelines(self._waiting)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            return ""
        return name

    def _write_waiting(self, file: FileIO) -> None:
        try:
            while self._waiting:
                append(file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._problem:
                self._warn(
                    f"{self.path} cannot be written: {error.strerror}; training continues, and its"
                    " lines wait in memory"
                )
            self._problem = str(error.strerror)
        else:
            if self._problem:
                self._warn(f"{self.path} is written again; {self._lost} lines were lost")
            self._problem = ""


def append(file: FileIO, data: bytes) -> None:
    """Write all of `data` at the end of a file opened unbuffered for appending, or none of it.

    A kill meanwhile leaves at most one torn record, the last.

    Raises:
        OSError: it could not be written; what had been is removed again.
    """
    before, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:
            written = file.write(rest)
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rest = rest[written:]
    except OSError:
        if len(rest) < len(data):
            file.truncate(before)
        raise


def trim(path: Path, batch: int) -> int:
    """Keep the lines up to `batch` (none if it is 0) and drop a torn last one.

    Lines are in the order of batches, so what goes is the file's end: it is truncated in one step,
    which needs no space on the disk. Returns the number of lines dropped.

    Raises:
        UserError: a line before the last is not a JSON object.
    """
    if not path.exists():
        return 0
    kept, dropped = 0, 0
    for end, row in _lines(path):
        if dropped or row is None or batch == 0 or row[BATCH] > batch:
            dropped += 1
        else:
            kept = end
    with path.open("r+b") as file:
        file.truncate(kept)
        file.seek(max(0, kept - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        os.fsync(file.fileno())
    return dropped


def read_metrics(
    path: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    marks: Sequence[str] = ("",),
) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl (or samples.jsonl), a torn last line left out.

    Only names that are `wanted` are kept: norms of every parameter can be hundreds a line. Lines
    with none of `marks` in them are not read: few of a long run's are evaluations.

    Raises:
        UserError: a line before the last is not a JSON object.
    """
    rows = (row for _, row in _lines(path, [mark.encode() for mark in marks]) if row is not None)
    return [{k: _restored(v) for k, v in row.items() if wanted(k)} for row in rows]


def find_lacking(
    path: Path, last_batch: int, steps: Callable[[str], Container[int]]
) -> Iterator[tuple[str, float, int, int]]:
    """Name, value, time in ms and batch of each value that a store lacks, in the file's order.

    Args:
        path: metrics.jsonl.
        last_batch: lines after this one do not count.
        steps: the batches for which the store has a metric.
    """
    written = int(path.stat().st_mtime * 1000)  # for lines of older versions, which have no time
    known: dict[str, Container[int]] = {}
    for row in read_metrics(path):
        batch, when = row.pop(BATCH), row.pop(WALL, written)
        for name, value in row.items() if batch <= last_batch else ():
            if name not in known:
                known[name] = steps(name)
            if batch not in known[name]:
                yield name, float(value), when, batch


def _lines(
    path: Path, marks: Sequence[bytes] = (b"",)
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(byte where it ends, object) of each line with one of `marks`; None for a torn last one."""
    end, broken = 0, ""
    try:
        opened = open_guarded(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    with opened as file:
        # Split at line feeds only: other separators may stand inside a JSON string.
        for number, raw in enumerate(file, 1):
            end += len(raw)
            if not raw.strip() or not any(mark in raw for mark in marks):
                continue
            if broken:
                raise UserError(broken)
            try:
                row = parse_json(raw.decode("utf-8"))
                if not isinstance(row, dict) or not isinstance(row.get(BATCH), int):
                    raise ValueError(f"no object with {BATCH}")
            except ValueError as error:
                broken = (
                    f"{path}:{number}: not a line of this file ({error}); delete the line, or"
                    " restore the file"
                )
            else:
                yield end, row
    if broken:
        yield end, None


def plain(value: Any) -> Any:
    """A float that JSON can hold: itself, or the name of a non-finite one."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _restored(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
