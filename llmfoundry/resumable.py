"""Folders that take long to write: all of one is there in the end, or what there is is resumed.

`commands/convert.py` writes exports and imports so. Beside OUTPUT stand meanwhile OUTPUT.unfinished
and OUTPUT.unfinished.journal, a line of JSON for each part that is on the disk. A killed process
leaves both; the same command then skips those parts. An error removes both, as does a command that
would write something else there. The journal is locked, so that one process writes at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError, disk_full
from llmfoundry.files import open_to_all, publish, try_lock


class Journal:
    """What is on the disk of an unfinished folder.

    Attributes:
        done: its parts by name, each with what was noted of it.
    """

    def __init__(self, path: Path, identity: str) -> None:
        """Read a journal, or begin it anew where it is of something else."""
        self._path = path
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a line may have been torn
        self.done: dict[str, Any] = {}
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()] or [None]
            for line in lines:
                self.done |= line
        except (ValueError, TypeError):
            first = None
        self.resumes = first == {"identity": identity}
        if not self.resumes:
            self.done, whole = {}, json.dumps({"identity": identity}).encode() + b"\n"
        path.write_bytes(whole)

    def add(self, parts: Mapping[str, Any]) -> None:
        """Note parts that are on the disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(parts).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.done |= parts


@contextmanager
def resumable_folder(
    output: Path, identity: str, *, note: Callable[[str], None]
) -> Iterator[tuple[Path, Journal]]:
    """A folder beside `output` that takes its name at the end, and the journal of what it holds.

    Args:
        output: must not exist, or be empty.
        identity: of all that is written; what was begun with another is removed.
        note: reports that something is resumed.

    Raises:
        UserError: the output holds something, or another process is writing it.
    """
    refuse_used(output)
    output = place_of(output)
    folder = output.with_name(f"{output.name}.unfinished")
    path = output.with_name(f"{output.name}.unfinished.journal")
    if folder.exists() and not path.is_file():
        raise UserError(f"output: {folder} is in the way; remove it, or write another output")
    locked = try_lock(path, mode=0o644)
    if locked is None:
        raise UserError(f"output: another process is writing {output}; wait for it")
    with locked:
        refuse_used(output)  # another process may just have finished
        journal = Journal(path, identity)
        if not (journal.resumes and folder.is_dir()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            journal.done.clear()
        elif journal.done:
            note(f"output: resuming {folder}, {len(journal.done)} parts of which are written")
        try:
            yield folder, journal
            open_to_all(folder)
            publish(folder, output)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
            if disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output)) from error
            raise
        path.unlink(missing_ok=True)


def place_of(output: Path) -> Path:
    """A folder to write, without links, once the folder around it is there.

    Raises:
        UserError: nothing can be written there.
    """
    place = output.resolve()  # "." has no name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {place.parent}: {error.strerror}; write another") from error
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise UserError(f"output: {place.parent} cannot be written; write another")
    return place


def refuse_used(output: Path) -> None:
    """Raise a UserError where something is at `output` that is not an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output: {output} exists and is not empty; write another folder")
