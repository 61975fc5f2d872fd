"""COMMIT: the names, sizes and checksums (CRC-32) of a checkpoint's files, which makes it count.

`save.py` has it written last, `verify.py` compares the files with it. It is also what readers lock:
while a process reads a checkpoint it holds a shared lock on COMMIT (`pin`), and a run that removes
old checkpoints leaves locked ones for the next time (`remove_unpinned`).
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from llmfoundry.checkpoint.remote_run import open_file, stored_run
from llmfoundry.files import LockedFile, sync, try_lock, write_json

Written = dict[str, dict[str, int]]
"""Bytes and checksum (crc32) of files, by name."""
COMMIT = "COMMIT"
_LONGEST = 1 << 28  # bytes; about a hundred for each file
_pinned: dict[Path, LockedFile] = {}  # what this process reads


def has_commit(folder: Path) -> bool:
    """Whether something is called COMMIT there; without it the folder never was a checkpoint."""
    run = stored_run(folder)
    if run is not None:
        return run.store.size(run.name(folder / COMMIT)) is not None
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


def record_of(folder: Path) -> Written:
    """All files of a checkpoint but its tensors: the main process wrote them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != COMMIT)
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "crc32": checksum(file)}
        for file in files
        if writer_of(file.name) < 0
    }


def listing(files: Written) -> dict[str, Any]:
    """The content of COMMIT."""
    return {"version": 1, "files": files}


def write_commit(folder: Path, files: Written) -> None:
    """Write COMMIT, last: with this name on the disk the checkpoint counts.

    Who wrote tensors has waited until they were on the disk.
    """
    record = [folder / name for name in files if writer_of(name) < 0]
    folders = {above for file in record for above in file.parents if folder in above.parents}
    for path in [*record, *folders, folder, folder.parent, folder.parent.parent]:
        sync(path)  # what libraries wrote, too
    write_json(folder / COMMIT, listing(files))


def pin(folder: Path) -> bool:
    """Keep a checkpoint from being pruned until `unpin`, or until this process ends.

    Returns:
        Whether it is still there. In an object store, and on a file system without locks, nothing
        can be kept: there a reader chooses again where a checkpoint has vanished.
    """
    if stored_run(folder) is not None or folder in _pinned:
        return True
    try:
        locked = try_lock(folder / COMMIT, shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    if locked is None:  # it is being removed
        return False
    _pinned[folder] = locked
    return True


def unpin(folder: Path) -> None:
    """All is read that is needed of a checkpoint."""
    locked = _pinned.pop(folder, None)
    if locked is not None:
        locked.release()


def remove_unpinned(folder: Path) -> bool:
    """Remove a checkpoint, or what there is of one, unless a process reads it; whether it went."""
    try:
        locked = try_lock(folder / COMMIT)
    except OSError:  # there is none, or the file system has no locks
        locked = None
    else:
        if locked is None:
            return False
    with locked or nullcontext():
        remove_folder(folder)
    return True


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint: its marker first, so that a half-deleted folder never counts."""
    (folder / COMMIT).unlink(missing_ok=True)
    shutil.rmtree(folder)


BLOCK = 1 << 22
"""Bytes that are read at once."""
_POLYNOMIAL = 0xEDB88320  # CRC-32's, its lowest power in the highest bit
_WRITER = re.compile(r"__([0-9]+)_")


class Piece(NamedTuple):
    """Bytes `begin` to `end` of a file of a checkpoint."""

    name: str
    begin: int
    end: int

    def cut(self, length: int) -> Iterator[Piece]:
        """Pieces of at most so many bytes."""
        for begin in range(self.begin, self.end, length):
            yield Piece(self.name, begin, min(begin + length, self.end))


def share(sizes: Mapping[str, int], rank: int, n_ranks: int) -> list[Piece]:
    """What one of `n_ranks` processes reads: its part of all bytes, equal to a byte.

    Files follow one another by the process that wrote them, so on as many processes each reads
    about what it wrote and is about to load, and finds it in its machine's memory then.

    Args:
        sizes: bytes of each file.
        rank: the process that asks.
        n_ranks: among how many the bytes are shared out.
    """
    total = sum(sizes.values())
    first, last = total * rank // n_ranks, total * (rank + 1) // n_ranks
    pieces, start = [], 0
    for name in sorted(sizes, key=lambda name: (writer_of(name), name)):
        begin, end = max(first - start, 0), min(last - start, sizes[name])
        if begin < end:
            pieces.append(Piece(name, begin, end))
        start += sizes[name]
    return pieces


def share_files(sizes: Mapping[str, int], rank: int, n_ranks: int) -> list[Piece]:
    """As `share`, but whole files, each read where it was written, and may have been kept."""
    return [
        Piece(name, 0, size)
        for name, size in sorted(sizes.items())
        if max(0, writer_of(name)) % n_ranks == rank and size
    ]


def writer_of(name: str) -> int:
    """The rank that wrote a file of tensors; -1 of any other."""
    found = _WRITER.search(name)
    return int(found[1]) if found else -1


def blocks(folder: Path, piece: Piece) -> Iterator[bytes]:
    """The bytes of a piece, a block at a time; fewer where the file ends before it."""
    with open_file(folder / piece.name) as file:
        file.seek(piece.begin)
        left = piece.end - piece.begin
        while left and (block := file.read(min(BLOCK, left))):
            yield block
            left -= len(block)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    for block in blocks(path.parent, Piece(path.name, 0, path.stat().st_size)):
        crc = zlib.crc32(block, crc)
    return crc


def joined(sums: Iterable[tuple[Piece, int]]) -> dict[str, int]:
    """CRC-32 of each file, of those of all its pieces in any order."""
    crcs: dict[str, int] = {}
    for piece, crc in sorted(sums):
        crcs[piece.name] = _followed(crcs.get(piece.name, 0), crc, piece.end - piece.begin)
    return crcs


def _followed(first: int, second: int, length: int) -> int:
    """CRC-32 of two texts in a row, of theirs; `length`: the second's, in bytes.

    As zlib's crc32_combine, which Python lacks: the first remainder times x^(8 length).
    """
    power, square, bits = 1 << 31, 1 << 30, 8 * length  # 1 and x
    while bits:
        if bits & 1:
            power = _times(power, square)
        square = _times(square, square)
        bits >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
