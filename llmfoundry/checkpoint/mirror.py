"""A run's record at its URL: recipe, metrics, report, tokenizer and all else but checkpoints.

The main process writes these files in the working copy, as any run does, and a thread sends those
that have changed. Stores cannot append, so a file that grows is sent whole each time, and the
pauses grow with it: at most a tenth of the time is spent on sending. Before a checkpoint counts,
all that was recorded before it is sent, so that whoever resumes there finds what was done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmfoundry.checkpoint.locks import BEAT_S, Lease
from llmfoundry.checkpoint.locks import LEASE_NAME as LOCK
from llmfoundry.checkpoint.remote_events import FOLDERS, Beside
from llmfoundry.checkpoint.remote_run import CHECKPOINTS, StoredRun
from llmfoundry.errors import UserError, one_line

_EVERY_S = 30.0
_REST = 10  # times as long as sending took
_THREADS = 8
READ = ("recipe.yaml", "metrics.jsonl", "run.json", "report.html", "events.jsonl", "eval")
"""What of a record other scripts look at."""


class Mirror:
    """Keeps a store's files as those of a working copy."""

    def __init__(self, run: StoredRun, lease: Lease, warn: Callable[[str], None]) -> None:
        """Nothing is sent yet; `warn` reports a store that fails."""
        self._run, self._lease, self._warn = run, lease, warn
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of change, by name
        self._one = threading.Lock()
        self._ended = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def begin(self) -> None:
        """Make the working copy what the store has, and follow it from then on.

        What was written beside the run meanwhile stays, and is sent.

        Raises:
            UserError: the store cannot be read.
        """
        beside = Beside(self._run.folder)
        names = pull(self._run, spare=FOLDERS)
        self._sent = {name: stamp for name, stamp in self._changed({}) if name in names}
        beside.put_back()
        self._thread.start()

    def push(self) -> None:
        """Send what has changed, and remove what is gone.

        Raises:
            UserError: the store does not take it.
        """
        with self._one:
            now = dict(self._changed({}))
            gone = [name for name in self._sent if name not in now]
            for name, stamp in now.items():
                if self._sent.get(name) != stamp:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        self._run.store.upload(name, self._run.folder / name)
                        self._sent[name] = stamp
            self._run.store.delete(gone)
            for name in gone:
                del self._sent[name]

    def close(self) -> None:
        """Send the rest; a warning where the store does not take it."""
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
        for name, path in _files(self._run.folder):
            with contextlib.suppress(FileNotFoundError):
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
    run: StoredRun, *, only: tuple[str, ...] | None = None, spare: tuple[str, ...] = ()
) -> set[str]:
    """Make a working copy's record what the store has; the names of its files.

    Args:
        run: at a URL.
        only: files and folders of these names; None: all.
        spare: folders of which nothing is removed.

    Raises:
        UserError: the store cannot be read.
    """
    listed = run.store.files(skip=(CHECKPOINTS,))
    wanted = {
        name: size
        for name, size in listed.items()
        if name != LOCK and (only is None or name.partition("/")[0] in only)
    }
    for name, path in list(_files(run.folder)):
        if name not in wanted and name.partition("/")[0] not in spare:
            path.unlink(missing_ok=True)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pull") as pool:
        for future in [
            pool.submit(run.store.download, name, run.folder / name, size)
            for name, size in wanted.items()
        ]:
            future.result()
    return set(wanted)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """A record's files, by name; nothing that is being written, and no checkpoint."""
    for at, folders, files in os.walk(folder):
        if Path(at) == folder:
            folders[:] = [name for name in folders if name != CHECKPOINTS]
        folders[:] = [name for name in folders if not name.endswith(".partial")]
        for file in files:
            path = Path(at, file)
            name = path.relative_to(folder).as_posix()
            if name != LOCK and not file.endswith(".partial") and not path.is_symlink():
                yield name, path
