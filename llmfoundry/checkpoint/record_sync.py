"""The record of a run at a URL: its files but the checkpoints, uploaded as they change.

The main process writes recipe, metrics, report and tokenizer into the working copy, as in any run,
and a thread uploads the files that changed (`RecordSync`). Object stores cannot append, so a
growing file is uploaded in full each time. The pauses grow with it, so that uploads take at most a
tenth of the time. A checkpoint counts only after everything recorded before it was uploaded, so a
process that resumes from it finds what was done.

The hang monitor and the supervisor write events, stacks and their last lines into the working copy
while no process uploads them. `LocalEvents` keeps these lines while the working copy is made equal
to the store, so that they are uploaded then.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from llmfoundry.checkpoint.object_storage import ObjectStorage
from llmfoundry.checkpoint.run_lock import BEAT_S, LOCK, Lease
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, one_line
from llmfoundry.events import CHECKPOINTS, FOLDERS
from llmfoundry.events import NAME as EVENTS
from llmfoundry.exit_status import ENDS_FOLDER as SUPERVISED
from llmfoundry.files import parse_json


def read_record(run: Storage, world: World, note: Callable[[str], None]) -> None:
    """Download the record of a run at a URL; does nothing for a local run."""

    def fetch() -> None:
        assert isinstance(run, ObjectStorage)
        try:
            pull(run, only=READ)
        except UserError as error:  # maybe a folder with checkpoints only
            note(f"continuing without the run's record: {one_line(error)}")

    if isinstance(run, ObjectStorage):
        on_rank0(world, fetch)


def send_files(run: Storage, folder: Path, warn: Callable[[str], None]) -> None:
    """Upload the files that a script has written into the working copy of a run at a URL."""
    if not isinstance(run, ObjectStorage) or not folder.is_relative_to(run.folder):
        return
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            run.store.upload(run.name(path), path)
    except (UserError, OSError) as error:
        warn(f"{folder} was not sent to {run.place}: {one_line(error)}")


_EVERY_S = 30.0
_REST = 10  # pause between two uploads, in units of the last upload's duration
_THREADS = 8
READ = ("recipe.yaml", "metrics.jsonl", "run.json", "report.html", "events.jsonl", "eval")
"""Files and folders of a record that other scripts read."""


class RecordSync:
    """Background thread that uploads changes of a working copy to its store."""

    def __init__(self, run: ObjectStorage, lease: Lease, warn: Callable[[str], None]) -> None:
        """Create the sync without starting it; `warn` reports errors of the store."""
        self._run, self._lease, self._warn = run, lease, warn
        self._sent: dict[str, tuple[int, int]] = {}  # size and modification time, by name
        self._one = threading.Lock()
        self._ended = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="record sync", daemon=True)

    def begin(self) -> None:
        """Download the record, and upload changes from now on.

        Events of this machine that the store lacks are kept and uploaded.

        Raises:
            UserError: the store cannot be read.
        """
        local_events = LocalEvents(self._run.folder)
        names = pull(self._run, spare=FOLDERS)
        self._sent = {name: stamp for name, stamp in self._changed({}) if name in names}
        local_events.put_back()
        self._thread.start()

    def push(self) -> None:
        """Upload changed files, and delete missing files from the store.

        Raises:
            UserError: an upload fails.
        """
        with self._one:
            current = dict(self._changed({}))
            deleted = [name for name in self._sent if name not in current]
            for name, stamp in current.items():
                if self._sent.get(name) != stamp:
                    with suppress(FileNotFoundError):  # deleted in between
                        self._run.store.upload(name, self._run.folder / name)
                        self._sent[name] = stamp
            self._run.store.delete(deleted)
            for name in deleted:
                del self._sent[name]

    def close(self) -> None:
        """Upload the remaining changes; warn if that fails."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self.push()
        except (UserError, OSError) as error:
            self._warn(
                f"{one_line(error)}; the end of the record is only in {self._run.folder}, and the"
                " same command sends it"
            )

    def _changed(self, known: dict[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, path in _record_files(self._run.folder):
            with suppress(FileNotFoundError):
                status = path.stat()
                stamp = (status.st_size, status.st_mtime_ns)
                if known.get(name) != stamp:
                    yield name, stamp

    def _work(self) -> None:
        due = time.monotonic() + _EVERY_S
        while not self._ended.wait(min(BEAT_S, _EVERY_S)):
            try:
                self._lease.beat()
                if time.monotonic() >= due:
                    began = time.monotonic()
                    self.push()
                    due = time.monotonic() + max(_EVERY_S, _REST * (time.monotonic() - began))
                self._is_away = False
            except (UserError, OSError) as error:
                if not self._is_away:
                    self._warn(f"{one_line(error)}; training continues, and it is tried again")
                self._is_away = True


def pull(
    run: ObjectStorage, *, only: tuple[str, ...] | None = None, spare: tuple[str, ...] = ()
) -> set[str]:
    """Download the record of a run to its working copy, and return the names of its files.

    Args:
        run: at a URL.
        only: names of files and folders; None: all.
        spare: folders in which no file is deleted.

    Raises:
        UserError: the store cannot be read.
    """
    # delete local files that the store does not have
    listed = run.store.files(skip=(CHECKPOINTS,))
    wanted = {
        name: size
        for name, size in listed.items()
        if name != LOCK and (only is None or name.partition("/")[0] in only)
    }
    for name, path in list(_record_files(run.folder)):
        if name not in wanted and name.partition("/")[0] not in spare:
            path.unlink(missing_ok=True)

    # download in parallel
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pull") as pool:
        for future in [
            pool.submit(run.store.download, name, run.folder / name, size)
            for name, size in wanted.items()
        ]:
            future.result()
    return set(wanted)


def _record_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of a record's files, without partial files and checkpoints."""
    for at, folders, files in os.walk(folder):
        if Path(at) == folder:
            folders[:] = [name for name in folders if name != CHECKPOINTS]
        folders[:] = [name for name in folders if not name.endswith(".partial")]
        for file in files:
            path = Path(at, file)
            name = path.relative_to(folder).as_posix()
            if name != LOCK and not file.endswith(".partial") and not path.is_symlink():
                yield name, path


class LocalEvents:
    """Events in a working copy that its store may lack."""

    def __init__(self, folder: Path) -> None:
        """Read the events before the record is downloaded."""
        self._folder = folder
        self._first = _lines(folder / "metrics.jsonl")[:1]
        self._events = _lines(folder / EVENTS)

    def put_back(self) -> None:
        """Append the missing events to the downloaded record, if they are of the same run.

        The run is the same if the metrics begin with the same line, which contains its time. For a
        run without metrics, the events since the start of its supervisor belong to it.

        Raises:
            OSError: the events cannot be written.
        """
        is_same = bool(self._first) and self._first == _lines(self._folder / "metrics.jsonl")[:1]
        if not (is_same or SUPERVISED in os.environ):
            for name in FOLDERS:
                shutil.rmtree(self._folder / name, ignore_errors=True)
            return
        local_events = self._events if is_same else _of_supervisor(self._events)
        existing = set(_lines(self._folder / EVENTS))
        missing = [line for line in local_events if line not in existing]
        if missing:
            with (self._folder / EVENTS).open("ab") as file:
                file.write(b"\n".join(missing) + b"\n")


def _of_supervisor(lines: list[bytes]) -> list[bytes]:
    """Return the lines since the supervisor's first attempt; all lines after a requeue."""
    for index in range(len(lines) - 1, -1, -1):
        event = parse_json(lines[index])
        if event.get("kind") == "start" and event.get("attempt") == 1:
            return lines[index:]
    return lines


def _lines(path: Path) -> list[bytes]:
    """Return the valid lines of a file of JSON objects."""
    lines = []
    with suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError):
                lines += [line] if isinstance(parse_json(line), dict) else []
    return lines
