"""Which run of a tracker a run folder is: the id that the folder keeps.

MLflow, W&B and trackio use it, each with a file of its own. The id belongs to one folder. A folder
that was moved continues its run. A copy, whose original is still there, begins a run of its own.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmfoundry.files import atomic_write, read_guarded

_PENDING = "pending-"


@dataclass
class FolderRun:
    """The id in a file such as runs/mine/mlflow_run_id, and the folder that it was given to.

    Attributes:
        file: holds the id; beside it `<name>.folder` holds the path of the folder.
        id: of the run; empty: the folder has none.
        copied_from: the id of the original folder's run, if this folder is a copy; else empty.
    """

    file: Path
    id: str = ""
    copied_from: str = ""

    @classmethod
    def at(cls, file: Path) -> FolderRun:
        """Read what a folder keeps."""
        run_id, original = _text(file), _text(_folder_file(file))
        if run_id and original and _is_copy(file, run_id, Path(original)):
            return cls(file, copied_from=run_id)
        return cls(file, run_id)

    @property
    def is_pending(self) -> bool:
        """Whether `id` is a key, kept before the tracker gave an id."""
        return self.id.startswith(_PENDING)

    def keep_pending(self) -> str:
        """Keep a key for a run that is about to be created, and return it."""
        self.keep(self.id if self.is_pending else f"{_PENDING}{secrets.token_hex(16)}")
        return self.id

    def keep(self, run_id: str) -> None:
        """Keep the id, as this folder's."""
        self.id = run_id
        here = str(self.file.parent.resolve())
        # The folder first: an id is never taken for one of another folder.
        if _text(_folder_file(self.file)) != here:
            atomic_write(_folder_file(self.file), f"{here}\n")
        if _text(self.file) != run_id:
            atomic_write(self.file, f"{run_id}\n")

    def forget(self) -> None:
        """Delete the id: the folder begins another run."""
        self.file.unlink(missing_ok=True)
        _folder_file(self.file).unlink(missing_ok=True)


def _folder_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.folder")


def _is_copy(file: Path, run_id: str, original: Path) -> bool:
    """Whether another folder, to which the id was given, is still there and has the same id."""
    with suppress(OSError):
        return _text(original / file.name) == run_id and not os.path.samefile(original, file.parent)
    return False


def _text(file: Path) -> str:
    with suppress(OSError, ValueError):  # a pipe, or no text
        return read_guarded(file).decode().strip()
    return ""
