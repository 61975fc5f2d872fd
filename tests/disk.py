"""What a power cut would leave: which files are on the disk, and when they got their names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def skip_fsync() -> None:
    """In this process and its forks no file waits for the disk: no test cuts the power.

    What has to be synchronised, and when, is what `Disk` sees.
    """
    os.fsync = os.fstat  # type: ignore[assignment]  # a closed descriptor is an error still


class Disk:
    """Watches `os.fsync` and renames, in order.

    Attributes:
        events: ("synced", path) of files and folders, and ("named", path) of what was renamed.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        fsync, replace = os.fsync, os.replace

        def noted_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.events.append(("synced", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

        def noted_replace(source: str | Path, target: str | Path, **how: int) -> None:
            replace(source, target, **how)
            self.events.append(("named", Path(target).resolve()))

        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_replace)  # Path.replace calls it

    def place(self, what: str, path: Path) -> int:
        """The number of the last such event."""
        return max(i for i, event in enumerate(self.events) if event == (what, path.resolve()))
