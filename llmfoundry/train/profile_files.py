"""The folder of a run's traces and snapshots: bounded, and never a reason for the run to end.

`profiler.py` and `memory_snapshot.py` write there. A file is there as a whole or not at all, and
what could not be written is a line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from llmfoundry.distributed.launch import World
from llmfoundry.errors import one_line
from llmfoundry.files import atomic_file, remove_partials

FOLDER = "profile"
"""Below a run's folder."""
GIB = 2**30


class TooLargeError(Exception):
    """The folder has no room for what is being written."""


class BoundedFile:
    """A file that takes so many bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        """Write all of it, or raise TooLargeError."""
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise TooLargeError
        return self._file.write(data)

    def flush(self) -> None:
        """Pass it on."""
        self._file.flush()


class ProfileFiles:
    """Writes files of one process to the folder of a run."""

    def __init__(self, run_folder: Path, world: World, *, max_gib: float) -> None:
        """`max_gib`: all files together, those of earlier attempts too."""
        self.folder, self.world, self._max_gib = run_folder / FOLDER, world, max_gib

    def tidy(self) -> None:
        """Remove what a killed process left half written."""
        if self.folder.is_dir():
            remove_partials(self.folder)

    def name(self, kind: str, step: int, suffix: str) -> str:
        """A file's name: of which step (from 1) and rank."""
        return f"{kind}-step-{step}-rank-{self.world.rank}{suffix}"

    def write(self, name: str, fill: Callable[[BoundedFile], None]) -> str:
        """Write a file; why it could not be written, empty where it was."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sizes = (path.stat().st_size for path in self.folder.iterdir() if path.name != name)
            room = int(self._max_gib * GIB) - sum(sizes)
            with atomic_file(self.folder / name) as file:
                fill(BoundedFile(file, room))
        except TooLargeError:
            return (
                f"profile.max_gib: {name} is left out, as {self.folder} would hold more than"
                f" {self._max_gib:g} GiB; remove files there, or write more"
            )
        except OSError as error:
            return f"{self.folder / name} could not be written: {one_line(error)}"
        return ""

    def report(self, note: Callable[[str], None], line: str) -> None:
        """Show a line; only the main process has a console, others write to standard error."""
        if self.world.is_main:
            note(line)
        else:
            print(f"rank {self.world.rank}: {line}", file=sys.stderr, flush=True)
