"""COMMIT file of a checkpoint: names, sizes and checksums (CRC-32) of all other files.

A folder without COMMIT is not a checkpoint. `storage.py` writes COMMIT as the last file of a save.
`verify.py` compares the files with it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import IO

from llmfoundry.files import read_json, sync, write_json

FileSums = dict[str, dict[str, int]]
"""Size in bytes and checksum (crc32) of files, by name."""
COMMIT = "COMMIT"
_MAX_BYTES = 1 << 28  # of COMMIT, which has about 100 bytes for each file
_BLOCK = 1 << 22  # bytes read at a time
_WRITER = re.compile(r"__([0-9]+)_")


def read_commit(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and checksum of every file of a checkpoint.

    Raises:
        OSError: COMMIT cannot be read.
        ValueError: COMMIT lacks a required file, or names a file outside of the folder.
    """
    listed = read_json(folder / COMMIT, most=_MAX_BYTES)
    if not isinstance(listed, dict) or not isinstance(listed.get("files"), dict):
        raise ValueError("it is not a list of files")
    files: dict[str, tuple[int, int]] = {}
    for name, entry in listed["files"].items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        size, crc = (entry.get(k) if isinstance(entry, dict) else None for k in ("bytes", "crc32"))
        if type(size) is not int or type(crc) is not int:
            raise ValueError(f"{name!r} has no size and checksum")
        files[name] = (size, crc)
    for name in (".metadata", "state.json", "recipe.yaml"):
        if name not in files:
            raise ValueError(f"it lacks {name}")
    return files


def sums_of_small_files(folder: Path) -> FileSums:
    """Return size and checksum of all files except tensors; the main process wrote them."""
    sums: FileSums = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != COMMIT and writer_of(file.name) < 0:
            with file.open("rb") as opened:
                entry = {"bytes": file.stat().st_size, "crc32": checksum(opened)}
            sums[file.relative_to(folder).as_posix()] = entry
    return sums


def write_commit(folder: Path, parts: Iterable[FileSums]) -> int:
    """Sync the small files to the disk, then write COMMIT.

    Each rank has synced its tensor files already.

    Args:
        folder: folder of the checkpoint.
        parts: files of each rank.

    Returns:
        The number of bytes of all files.
    """
    small = [path for path in folder.rglob("*") if writer_of(path.name) < 0]
    for path in [*small, folder, folder.parent, folder.parent.parent]:
        sync(path)
    files = {name: sums for part in parts for name, sums in part.items()}
    write_json(folder / COMMIT, {"version": 1, "files": files})
    return sum(map(itemgetter("bytes"), files.values()))


def writer_of(name: str) -> int:
    """Return the rank that wrote a tensor file; -1 for other files."""
    match = _WRITER.search(name)
    return int(match[1]) if match else -1


def checksum(file: IO[bytes], read: Callable[[], object] | None = None) -> int:
    """Return the CRC-32 of an open file; `read` is called after each block."""
    crc = 0
    while block := file.read(_BLOCK):
        crc = zlib.crc32(block, crc)
        if read is not None:
            read()
    return crc
