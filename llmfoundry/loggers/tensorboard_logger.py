"""TensorBoard's side of a run: an event file in save_folder/tensorboard.

The tracker calls `tensorboard_target`, a `BackgroundWriter` the rest. The idea: an event file is a
sequence of records, so each request is one atomic append; a full disk tears nothing, and writing
continues when there is space. Events are the package tensorboard's own messages, framed by its own
`RecordWriter`. PyTorch's `SummaryWriter` is not used: it opens the file anew for each value (20,000
values: 1.21 s of CPU and 0.95 MB, here 0.08 s and 0.38 MB), and on a full disk its thread leaves a
torn record, prints a traceback, and begins no other file. A resume begins another file whose
SessionLog.START makes TensorBoard forget what earlier files say of the steps that are now repeated.
Its pages pass over the first START of all, so each file has one. (`SummaryWriter(purge_step=...)`
writes none at first: a first resume would show steps twice.)
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.loggers.background_queue import (
    LogTarget,
    MetricPoint,
    RunFacts,
    Samples,
    milliseconds,
)
from llmfoundry.loggers.console import printable
from llmfoundry.loggers.metrics_file import append
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public

FOLDER = "tensorboard"
FILE = "events.out.tfevents.{seconds:.6f}"  # read in the order of names; no host in it
_NUMBER = re.compile(r"\d+\.\d+")
TEXTS = (".yaml", ".json", ".txt")


class TensorBoardSession:
    """An open event file."""

    max_points = 10_000

    def __init__(self, folder: Path, first_batch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._first_batch = folder, first_batch
        self._read: Any = None
        path = folder / _next_name(folder)
        self._file = path.open("ab", buffering=0)
        now = milliseconds()
        start = _event(now, 0, file_version="brain.Event:2")
        start += _event(now, first_batch + 1, session_log={"status": "START"})
        try:
            append(self._file, start)
        except OSError:  # the next try makes a file of its own
            self._file.close()
            path.unlink()
            raise

    def steps(self, name: str) -> Container[int]:
        """The batches for which the folder's files have a value, as TensorBoard reads them."""
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

        if self._read is None:
            self._read = EventAccumulator(str(self._folder), size_guidance={"tensors": 0}).Reload()
        if name not in self._read.Tags()["tensors"]:
            return ()
        return {event.step for event in self._read.Tensors(name)}

    def send(self, points: Sequence[MetricPoint]) -> None:
        """One record for the metrics of a step."""
        records = []
        for (batch, when), group in groupby(points, lambda p: (p.batch, p.milliseconds)):
            values = [{"tag": p.name, "simple_value": p.value} for p in group]
            records.append(_event(when, batch, summary={"value": values}))
        append(self._file, b"".join(records))

    def samples(self, samples: Samples) -> None:
        """The texts of a step."""
        text = "\n\n---\n\n".join(literal(prompt + text) for prompt, text in samples.texts)
        append(self._file, _text(samples.milliseconds, samples.batch, "samples", text))

    def upload(self, path: Path) -> None:
        """Show a text; the report lies in the run's folder, and TensorBoard cannot show it."""
        if path.suffix in TEXTS:
            text = literal(public(path.read_text(encoding="utf-8")))
            append(self._file, _text(milliseconds(), self._first_batch, path.stem, text))

    def end(self, status: str) -> None:
        """Close the file; TensorBoard has no word for how a run ended."""
        self._file.close()


def tensorboard_target(config: LoggerConfig, run_folder: Path) -> LogTarget:
    """The run's folder of event files.

    Raises:
        UserError: the package is not installed.
    """
    if find_spec("tensorboard") is None:
        raise UserError(
            "logger.tensorboard: needs the package tensorboard;"
            " pip install 'llmfoundry-recipes[tensorboard]'"
        )
    folder = run_folder / FOLDER
    return LogTarget(
        f"TensorBoard ({folder})",
        partial(_open, folder),
        lambda run_folder: _forget(run_folder / FOLDER),
        lambda error: False,
    )


def _open(folder: Path, facts: RunFacts, say: Callable[[str], None]) -> TensorBoardSession:
    return TensorBoardSession(folder, facts.first_batch)


def _next_name(folder: Path) -> str:
    """Behind those that are there, also where the clock was set back since."""
    before = FILE.split("{")[0]
    found = [path.name.removeprefix(before) for path in folder.glob(f"{before}*")]
    known = [float(name) for name in found if _NUMBER.fullmatch(name)]
    return FILE.format(seconds=max([time.time(), *(seconds + 1e-3 for seconds in known)]))


def _forget(folder: Path) -> None:
    """Drop the event files of an earlier run."""
    for path in folder.glob(FILE.split("{")[0] + "*"):
        path.unlink()


def _event(when: int, step: int, **content: Any) -> bytes:
    """One record: length, checksums, and the Event message."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(
        Event(wall_time=when / 1000, step=step, **content).SerializeToString()
    )
    return buffer.getvalue()


def _text(when: int, step: int, tag: str, text: str) -> bytes:
    """A record for TensorBoard's text page."""
    tensor = {
        "dtype": "DT_STRING",
        "string_val": [text.encode()],
        "tensor_shape": {"dim": [{"size": 1}]},
    }
    value = {"tag": tag, "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}
    return _event(when, step, summary={"value": [value]})


def literal(text: str) -> str:
    """Markdown that shows `text` as it is: an indented block."""
    return "\n".join(f"    {line}" for line in printable(text).split("\n"))
