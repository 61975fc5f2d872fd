"""COMMIT: the names, sizes and checksums of a checkpoint's files, which makes it count.

`checkpointer.py` writes it last, `verify.py` holds the files against it.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry.files import sync, sync_all, write_json
from llmfoundry.train.checkpoints.crc import checksum

COMMIT = "COMMIT"
_LONGEST = 1 << 28  # bytes; about a hundred for each file


def has_commit(folder: Path) -> bool:
    """Whether something is called COMMIT there; without it the folder never was a checkpoint."""
    try:
        (folder / COMMIT).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_commit(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes and checksum of every file of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a list of a whole checkpoint's files, all inside of its folder.
    """
    path = folder / COMMIT
    if not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > _LONGEST:
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


def whole_size(folder: Path) -> int:
    """Bytes of a checkpoint's files."""
    files = json.loads((folder / COMMIT).read_text())["files"]
    return sum(file["bytes"] for file in files.values())


def write_sums(folder: Path, rank: int, n_ranks: int) -> None:
    """Checksums of this process's share of the files, into sums.<rank>.json."""
    files = sorted(f for f in folder.rglob("*") if not f.name.startswith("sums.") and f.is_file())
    sums = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "crc32": checksum(f)}
        for f in files[rank::n_ranks]
    }
    write_json(folder / f"sums.{rank}.json", sums)


def write_commit(folder: Path, n_ranks: int) -> None:
    """Merge the sums into COMMIT, last: with this name on the disk the checkpoint counts."""
    files: dict[str, Any] = {}
    for rank in range(n_ranks):
        part = folder / f"sums.{rank}.json"
        files |= json.loads(part.read_text())
        part.unlink()
    sync_all(folder)  # what libraries wrote, too
    for above in (folder.parent, folder.parent.parent):
        sync(above)
    write_json(folder / COMMIT, {"version": 1, "files": files})
