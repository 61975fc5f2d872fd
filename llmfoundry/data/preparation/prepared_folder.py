"""Folders made once, atomically, also if other processes make them at the same time.

The tokenizer's training and the preparation keep their results under data.cache_folder this way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, lock, publish


def cache_key(**facts: Any) -> str:
    """A folder name for what these facts determine."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None], *, keep: str | None = None) -> None:
    """Make `folder` by `build(temporary folder)` and a rename, unless it is there.

    Of several processes one builds while the others wait; what a killed one left is removed, or
    gone on with.

    Args:
        folder: what to make.
        build: fills a folder.
        keep: name of a folder that `build` leaves in its own if it can resume from what is there
            when it is called again; removed in the end.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_build(folder):
            if not folder.is_dir():
                _build(folder, build, keep)
    except OSError as error:
        raise UserError(
            f"data.cache_folder: cannot write {folder.parent}: {error.strerror or error};"
            " free space there or choose another folder"
        ) from error


def lock_build(folder: Path) -> LockedFile:
    """Wait until nobody else makes or removes `folder`, and keep others from it."""
    return lock(folder.with_name(f"{folder.name}.lock"), mode=0o644)


def _build(folder: Path, build: Callable[[Path], None], keep: str | None) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp.{os.getpid()}")
    for leftover in folder.parent.glob(f"{folder.name}.tmp.*"):
        if keep and (leftover / keep).is_dir() and not temporary.exists():
            leftover.rename(temporary)
        else:
            shutil.rmtree(leftover)
    temporary.mkdir(exist_ok=True)
    try:
        build(temporary)
        if keep:
            shutil.rmtree(temporary / keep)
        publish(temporary, folder)
    finally:
        if not (keep and (temporary / keep).is_dir()):
            shutil.rmtree(temporary, ignore_errors=True)
