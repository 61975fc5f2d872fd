"""Files that are there whole or not at all.

Every room writes its small files by `write_whole`, its streams by `whole_file`: the bytes go to a
file beside the target, which gets the name once all is there. Whoever reads meanwhile, and whoever
comes after a crash or a full disk, finds the old file or the new one.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4


@contextmanager
def whole_file(path: Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """A binary file to write, which gets its name at the end of the block.

    The name that it has meanwhile, `<name>.<hex>.partial`, is taken by no other process or machine.

    Args:
        path: the file; its folder exists.
        sync: return only once the bytes are on the disk (fsync), for what a later step relies on.

    Raises:
        OSError: the file could not be written; what was at `path` is as before.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write a file at once (`whole_file`); text as UTF-8."""
    with whole_file(path, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_to_all(path: Path) -> None:
    """Give a file, or every file of a folder, the rights of any new file there (umask).

    Some libraries make theirs through temporary files, which only their owner may read.
    """
    folder = path if path.is_dir() else path.parent
    probe = folder / f"{uuid4().hex}.partial"  # umask() would change it for other threads
    try:
        probe.touch(exist_ok=False)
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    """Write a JSON file at once (`whole_file`); what JSON does not know is written by its `str`."""
    write_whole(path, json.dumps(value, indent=1, default=str) + "\n", sync=sync)
