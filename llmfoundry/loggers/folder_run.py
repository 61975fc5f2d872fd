"""File in a save folder with the id of its run in a tracker (MLflow, W&B or trackio).

A resumed run reads the id and continues the same run of the tracker. The id belongs to one folder:
a folder that was moved continues its run, and a copy whose original still exists starts a new run.
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
    """Run id in a file such as runs/mine/mlflow_run_id, and the folder that the id belongs to.

    Attributes:
        file: file with the id. The file `<name>.folder` next to it has the path of the folder.
        id: id of the run; "" if the folder has no run.
        copied_from: id of the original folder's run if this folder is a copy; else "".
    """

    file: Path
    id: str = ""
    copied_from: str = ""

    @classmethod
    def at(cls, file: Path) -> FolderRun:
        """Read the id in `file`, and find out whether the folder is a copy."""
        run_id, original = _text(file), _text(_folder_file(file))
        if run_id and original and _is_copy(file, run_id, Path(original)):
            return cls(file, copied_from=run_id)
        return cls(file, run_id)

    @property
    def is_pending(self) -> bool:
        """Return whether `id` is a temporary key: the run was about to be created."""
        return self.id.startswith(_PENDING)

    def keep_pending(self) -> str:
        """Store a temporary key for a run that is about to be created, and return it."""
        self.keep(self.id if self.is_pending else f"{_PENDING}{secrets.token_hex(16)}")
        return self.id

    def keep(self, run_id: str) -> None:
        """Store the id together with the path of this folder."""
        self.id = run_id
        here = str(self.file.parent.resolve())
        # write the folder first, so that a kill never leaves the id with the path of another folder
        if _text(_folder_file(self.file)) != here:
            atomic_write(_folder_file(self.file), f"{here}\n")
        if _text(self.file) != run_id:
            atomic_write(self.file, f"{run_id}\n")

    def forget(self) -> None:
        """Delete the id, so that the folder starts a new run."""
        self.file.unlink(missing_ok=True)
        _folder_file(self.file).unlink(missing_ok=True)


def _folder_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.folder")


def _is_copy(file: Path, run_id: str, original: Path) -> bool:
    """Return whether another folder exists that has the same id and owns it."""
    with suppress(OSError):
        return _text(original / file.name) == run_id and not os.path.samefile(original, file.parent)
    return False


def _text(file: Path) -> str:
    """Return the contents of a file; "" if it is missing, a pipe or not text."""
    with suppress(OSError, ValueError):
        return read_guarded(file).decode().strip()
    return ""
