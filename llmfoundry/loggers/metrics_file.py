"""Reader and writer of metrics.jsonl and samples.jsonl: one JSON object per line.

The tracker writes them with `JsonLines`. The report and notebooks read them with `read_metrics`.
Lines after the checkpoint are deleted when a run resumes. After a kill and a resume, the file is
therefore the one of an uninterrupted run, except for wall-clock values. Numbers keep every digit.
JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", and
`read_metrics` converts them back to floats.
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
WALL = "time/unix_ms"  # time at which a line was written: milliseconds since 1970
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_WAITING = 256 * 2**20  # maximal bytes of lines queued while the disk is full
_APPEND = "to be appended when there is room, before the run continues"


def milliseconds() -> int:
    """Return the current time in milliseconds since 1970."""
    return int(time.time() * 1000)


class JsonLines:
    """Append-only file of JSON objects, each with `time/batch`. Each line is one write call.

    A full or missing disk does not end training: lines are queued in memory and written as soon as
    possible. `warn` prints a line.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = path, warn
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._problem = ""  # reason why lines are queued
        self._lost = 0

    def start(self, batch: int) -> int:
        """Open the file for a run that resumes after `batch`; 0 deletes all lines.

        Returns:
            The number of deleted lines.

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
        """Append one object, or queue it while the disk is full."""
        assert self._file is not None, "start() opens the file"
        plain_row = {name: plain(value) for name, value in row.items()}
        text = json.dumps(plain_row, allow_nan=False)
        if sum(map(len, self._waiting)) > _MAX_WAITING:
            self._lost += 1
        else:
            self._waiting.append(text.encode() + b"\n")
        self._write_waiting(self._file)

    def close(self) -> None:
        """Write queued lines, warn of lost ones and close the file; closing twice does nothing."""
        if self._file is None:
            return
        self._write_waiting(self._file)
        lost = self._lost + len(self._waiting)
        if lost:
            why, rescue_file = self._problem or "the disk was full", self._rescue_waiting()
            where = ""
            if rescue_file:
                where = f"; {len(self._waiting)} are in {rescue_file}, {_APPEND}"
            self._warn(f"{self.path} lacks {lost} lines: {why}{where}")
        self._waiting.clear()
        self._lost, self._problem = 0, ""
        self._file.close()
        self._file = None

    def _rescue_waiting(self) -> str:
        """Write the queued lines to a temporary file; return its path, or "" if that fails too."""
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
    """Append all of `data` to a file, or none of it.

    The file is opened unbuffered for appending. If the process is killed meanwhile, at most the
    last record is incomplete.

    Raises:
        OSError: `data` could not be written. A part that was written is removed again.
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
    """Delete the lines after `batch` (all lines if it is 0) and an incomplete last line.

    Lines are in the order of batches, so the deleted lines are the end of the file. Truncating it
    is one step that needs no disk space.

    Returns:
        The number of deleted lines.

    Raises:
        UserError: a line before the last is not a JSON object.
    """
    if not path.exists():
        return 0

    # find the new size of the file
    size, n_deleted = 0, 0
    for end, row in _lines(path):
        if n_deleted or row is None or batch == 0 or row[BATCH] > batch:
            n_deleted += 1
        else:
            size = end

    # truncate; the last line may lack its line feed
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(max(0, size - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        os.fsync(file.fileno())
    return n_deleted


def read_metrics(
    path: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    marks: Sequence[str] = ("",),
) -> list[dict[str, Any]]:
    """Return the objects of a metrics.jsonl (or samples.jsonl) without an incomplete last line.

    Args:
        path: the file.
        wanted: whether a metric of this name is returned. A line may have hundreds of other
            metrics, such as the norm of every parameter.
        marks: lines without any of these texts are skipped before they are parsed. Few lines of a
            long run are evaluations, for example.

    Raises:
        UserError: a line before the last is not a JSON object.
    """
    encoded_marks = [mark.encode() for mark in marks]
    rows = []
    for _, row in _lines(path, encoded_marks):
        if row is not None:
            rows.append({name: _restored(value) for name, value in row.items() if wanted(name)})
    return rows


def find_lacking(
    path: Path, last_batch: int, steps: Callable[[str], Container[int]]
) -> Iterator[tuple[str, float, int, int]]:
    """Yield name, value, time in ms and batch of each value that a store lacks, in file order.

    Args:
        path: metrics.jsonl.
        last_batch: lines after this step are ignored.
        steps: returns the batches for which the store has a value of a metric.
    """
    file_time = int(path.stat().st_mtime * 1000)  # lines of older versions have no time
    known: dict[str, Container[int]] = {}
    for row in read_metrics(path):
        batch, when = row.pop(BATCH), row.pop(WALL, file_time)
        if batch > last_batch:
            continue
        for name, value in row.items():
            if name not in known:
                known[name] = steps(name)
            if batch not in known[name]:
                yield name, float(value), when, batch


def _lines(
    path: Path, marks: Sequence[bytes] = (b"",)
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (end in bytes, object) of each line that contains one of `marks`.

    The object of an incomplete last line is None.
    """
    end, broken = 0, ""
    try:
        opened = open_guarded(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    with opened as file:
        # split at line feeds only: other separators may occur inside a JSON string
        for number, raw in enumerate(file, 1):
            end += len(raw)
            if not raw.strip() or not any(mark in raw for mark in marks):
                continue
            # a broken line is an error only if another line follows it
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
    """Return `value`, or the string for a float that JSON cannot represent (NaN, infinity)."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _restored(value: Any) -> Any:
    """Invert `plain`."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
