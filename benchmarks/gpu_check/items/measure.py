"""The entry of an item's process that is not a run: one measurement, its rows in a file.

    python -m benchmarks.gpu_check.items.measure NAME FILE DEVICE SECONDS [SETTINGS as JSON]

The runner starts it. A measurement yields rows as it finds them, and looks at the time that it has
left itself, so that what it has no time for is said by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.items.rows import append
from llmfoundry.errors import one_line

Row = dict[str, Any]

MEASURES = {
    "facts": "benchmarks.gpu_check.items.facts:facts",
    "products": "benchmarks.gpu_check.items.device:products",
    "corpus": "benchmarks.gpu_check.items.device:corpus",
    "tests": "benchmarks.gpu_check.items.gpu_tests:tests",
    "attention": "benchmarks.gpu_check.items.exactness:attention",
    "mixture": "benchmarks.gpu_check.items.exactness:mixtures",
    "triton": "benchmarks.gpu_check.items.exactness:triton",
    "loss_error": "benchmarks.gpu_check.items.exactness:loss",
    "experts": "benchmarks.gpu_check.items.speed:experts",
    "loss": "benchmarks.gpu_check.items.speed:loss_chunks",
    "bare": "benchmarks.gpu_check.items.speed:bare",
}


@dataclass(frozen=True)
class Here:
    """What a measurement is given beside its settings.

    Attributes:
        device: where to.
        folder: of the check's files.
        file: of the rows.
        ends: of its time, by `time.monotonic`.
    """

    device: torch.device
    folder: Path
    file: Path
    ends: float

    def keep(self, row: Row) -> None:
        """Write a row; what is yielded is written so as well."""
        append(self.file, row)

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()


def tried(row: Row, find: Callable[[], Row]) -> Row:
    """A row with what `find` finds, or with what went wrong; the next one may well succeed."""
    try:
        return {**row, **find()}
    except torch.OutOfMemoryError:
        return {**row, "not run": "out of memory"}
    except Exception as error:
        return {**row, "wrong": f"{type(error).__name__}: {one_line(error)}"[:300]}


def main() -> None:
    """Measure; every row is in the file as soon as it is known."""
    if importlib.util.find_spec("psutil") is not None:
        importlib.import_module("llmfoundry.processes").end_with_starters()
    name, file, device, seconds, *settings = sys.argv[1:]
    here = Here(torch.device(device), Path.cwd(), Path(file), time.monotonic() + float(seconds))
    module, _, function = MEASURES[name].partition(":")
    found: Callable[..., Iterator[Row]] = getattr(importlib.import_module(module), function)
    for row in found(here, **json.loads(settings[0] if settings else "{}")):
        here.keep(row)
    sys.stdout.flush()
    os._exit(0)  # a broken context of CUDA may hang a process at its end


if __name__ == "__main__":
    main()
