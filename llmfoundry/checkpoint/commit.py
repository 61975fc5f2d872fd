"""COMMIT: the names, sizes and checksums (CRC-32) of a checkpoint's files, which makes it count.

`storage.py` writes it as the last step of a save, `verify.py` compares the files with it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from llmfoundry.files import sync, write_json

FileSums = dict[str, dict[str, int]]
"""Bytes and checksum (crc32) of files, by name."""
COMMIT = "COMMIT"
_MAX_BYTES = 1 << 28  # about a hundred for each file
_BLOCK = 1 << 22  # bytes that are read at once
_WRITER = re.compile(r"__([0-9]+)_")


def read_commit(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes and checksum of every file of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a list of a complete checkpoint's files, all inside of its folder.
    """
    path = folder / COMMIT
    if not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("it is too long")
    try:
        listed = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is not a list of files") from None
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
    """All files of a checkpoint but its tensors: the main process wrote them."""
    sums: FileSums = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.name != COMMIT and writer_of(file.name) < 0:
            with file.open("rb") as opened:
                crc = checksum(blocks(opened))
            sums[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "crc32": crc}
    return sums


def commit_content(files: FileSums) -> dict[str, Any]:
    """The content of COMMIT."""
    return {"version": 1, "files": files}


def write_commit(folder: Path, files: FileSums) -> None:
    """Write COMMIT, last: with this name on the disk the checkpoint counts.

    Who wrote tensors has waited until they were on the disk.
    """
    small = [folder / name for name in files if writer_of(name) < 0]
    folders = {above for file in small for above in file.parents if folder in above.parents}
    for path in [*small, *folders, folder, folder.parent, folder.parent.parent]:
        sync(path)  # what libraries wrote, too
    write_json(folder / COMMIT, commit_content(files))


def writer_of(name: str) -> int:
    """The rank that wrote a file of tensors; -1 of any other."""
    found = _WRITER.search(name)
    return int(found[1]) if found else -1


def blocks(file: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a file, a block at a time."""
    return iter(lambda: file.read(_BLOCK), b"")


def checksum(blocks: Iterator[bytes]) -> int:
    """CRC-32 of a file's blocks."""
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc
