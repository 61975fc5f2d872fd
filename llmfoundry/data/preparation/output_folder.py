"""`OutputFolder`: the folder that a preparation writes to, here or at a URL.

Every file and folder appears atomically: here by renaming, elsewhere because stores show an
object when it is complete and what declares a folder complete is written last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import MissingError, Store
from llmfoundry.files import atomic_write, publish


@dataclass(frozen=True)
class OutputFolder:
    """A folder, made when the first file comes. Picklable.

    Attributes:
        folder: path or URL.
        storage_options: rights, by protocol.
    """

    folder: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def here(self) -> Path | None:
        """Return the path of a local folder; None for a store."""
        return None if "://" in self.folder else Path(self.folder)

    def names(self) -> list[str]:
        """Return the sorted names in the folder; empty if the folder does not exist."""
        if self.here is not None:
            return sorted(os.listdir(self.here)) if self.here.is_dir() else []
        return self._store().names()

    def names_below(self, name: str) -> list[str]:
        """Return the sorted names in the subfolder `name`."""
        return OutputFolder(f"{self.folder}/{name}", self.storage_options).names()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if the file does not exist."""
        try:
            if self.here is not None:
                return (self.here / name).read_bytes()
            return self._store().read(name)
        except (FileNotFoundError, MissingError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file. The data is on the disk when this returns."""
        if self.here is None:
            self._store().write(name, data)
            return
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)

    def put(self, folder: Path, name: str) -> None:
        """Move a local folder to the output as `name`; an existing file or folder is replaced."""
        self.remove(name)
        if self.here is not None:
            (self.here / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                publish(folder, self.here / name)
            except OSError:  # another attempt at the same task has put the same content there
                if not (self.here / name).is_dir():
                    raise
            return
        store = self._store(name)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            store.upload(file.relative_to(folder).as_posix(), file)

    def remove(self, name: str) -> None:
        """Delete a file or folder, if it exists."""
        if self.here is None:
            store = self._store()
            store.delete(store.files(name) or [name])
        elif (self.here / name).is_dir():
            shutil.rmtree(self.here / name)
        else:
            (self.here / name).unlink(missing_ok=True)

    @contextmanager
    def scratch(self, below: str) -> Iterator[Path]:
        """Yield a temporary local folder, which is deleted afterwards.

        If the output is local, the temporary folder is in its subfolder `below`, so that `put`
        only renames it.
        """
        parent = None
        if self.here is not None:
            parent = self.here / below
            parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent) as folder:
            yield Path(folder)

    def _store(self, name: str = "") -> Store:
        """Return the store of the output folder, or of its subfolder `name`."""
        options = FetchOptions(storage_options=dict(self.storage_options))
        return Store(f"{self.folder}/{name}".rstrip("/"), options, key="prepare.output")


SCRATCH = "scratch-"
"""Prefix of temporary folders, which remain if the process is killed."""
