"""`OutputFolder`: the folder that a preparation writes to, here or at a URL.

Every file and folder appears atomically: here by renaming, elsewhere because stores show an
object when it is complete and what declares a folder complete is written last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.data.fetch import remote_errors
from llmfoundry.data.fetch.remote_backends import Backend, backend_for
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, publish
from llmfoundry.retry import backoff, retry

T = TypeVar("T")
_RETRIES, _TIMEOUT_S = 5, 60.0


@dataclass(frozen=True)
class OutputFolder:
    """A folder, made when the first file comes. Picklable.

    Attributes:
        folder: path or URL.
        storage_options: what fsspec's file systems take, by protocol.
    """

    folder: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def here(self) -> Path | None:
        """Its path, if it is on this machine."""
        return None if "://" in self.folder else Path(self.folder)

    def names(self) -> list[str]:
        """What lies in it, sorted; nothing if it is not there."""
        if self.here is not None:
            return sorted(os.listdir(self.here)) if self.here.is_dir() else []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in self._ask(self._list))

    def names_below(self, name: str) -> list[str]:
        """What lies in a folder of it."""
        return OutputFolder(f"{self.folder}/{name}", self.storage_options).names()

    def read(self, name: str) -> bytes | None:
        """A small file; None: there is none."""
        try:
            if self.here is not None:
                return (self.here / name).read_bytes()
            return self._ask(lambda files, root: bytes(files.cat_file(f"{root}/{name}")))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """A small file; on the disk when this returns."""
        if self.here is None:
            self._ask(lambda files, root: files.pipe_file(f"{root}/{name}", data))
            return
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)

    def put(self, folder: Path, name: str) -> None:
        """Move a folder of this machine there, in place of what is there by this name."""
        self.remove(name)
        if self.here is not None:
            (self.here / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                publish(folder, self.here / name)
            except OSError:  # another attempt at the same task was first, and made the same
                if not (self.here / name).is_dir():
                    raise
            return
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            self._upload(file, f"{name}/{file.relative_to(folder).as_posix()}")

    def remove(self, name: str) -> None:
        """A file or folder; nothing happens if there is none."""
        if self.here is None:
            self._ask(lambda files, root: _remove(files, f"{root}/{name}"))
        elif (self.here / name).is_dir():
            shutil.rmtree(self.here / name)
        else:
            (self.here / name).unlink(missing_ok=True)

    @contextmanager
    def scratch(self, below: str) -> Iterator[Path]:
        """A folder of this machine to make something in, gone afterwards.

        Where the place is here, it is in its folder `below`, so that `put` only renames.
        """
        parent = None
        if self.here is not None:
            parent = self.here / below
            parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent) as folder:
            yield Path(folder)

    def _upload(self, file: Path, name: str) -> None:
        self._ask(lambda files, root: files.put_file(str(file), f"{root}/{name}"))

    def _list(self, files: Any, root: str) -> list[str]:
        try:
            return [str(name) for name in files.ls(root, detail=False)]
        except FileNotFoundError:
            return []

    def _ask(self, call: Callable[[Any, str], T]) -> T:
        """What `call(file system, folder)` returns, patiently.

        Raises:
            FileNotFoundError: nothing is there.
            UserError: the store cannot be reached, or refuses.
        """
        backend = backend_for(self.folder, self.storage_options, _TIMEOUT_S)

        def again(error: Exception, failures: int) -> float:
            if remote_errors.is_missing(error):
                raise FileNotFoundError(self.folder) from error
            if failures > _RETRIES or not remote_errors.is_passing(error):
                raise self._failed(backend, error, failures) from error
            return backoff(failures)

        return retry(lambda: call(backend.file_system(), backend.root), again=again)

    def _failed(self, backend: Backend, error: Exception, attempts: int) -> UserError:
        line = remote_errors.remote_problem(
            error, kind=backend.kind, attempts=attempts, timeout=_TIMEOUT_S
        )
        return UserError(f"{self.folder}: {line}")


SCRATCH = "scratch-"
"""What the names of folders begin with that a killed process may leave."""


def _remove(files: Any, path: str) -> None:
    try:
        files.rm(path, recursive=True)
    except FileNotFoundError:
        return
