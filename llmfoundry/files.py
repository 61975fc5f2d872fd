"""Files and folders that are there whole or not at all.

Every room writes its small files by `write_whole`, its streams by `whole_file`, its folders by
`whole`: what is written has a temporary name beside the target until all of it is on the disk. So
whoever reads meanwhile, and whoever comes after a crash, a power cut or a full disk, finds the old
content or the new.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

_MARK = re.compile(r"\.(?P<machine>[0-9a-f]{8})-(?P<process>\d{1,9})-[0-9a-f]{8}\.partial$")
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # what some mounts say of folders


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which is called `path` from the end of the block on.

    The name that it has meanwhile, `<name>.<machine>-<process>-<hex>.partial`, is taken by no other
    process or machine.

    Args:
        path: its folder exists; a folder may itself exist, if it is empty.

    Raises:
        OSError: it could not be written; what was at `path` is as before.
    """
    partial = path.with_name(f"{path.name}.{_own_mark()}-{uuid4().hex[:8]}.partial")
    try:
        yield partial
        publish(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write, which is called `path` from the end of the block on (`whole`)."""
    with whole(path) as partial, partial.open("wb") as file:
        yield file


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file at once (`whole`); text as UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Write a JSON file at once (`whole`); what JSON does not know is written by its `str`."""
    write_whole(path, json.dumps(value, indent=indent, default=str) + "\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read, or is no file: a pipe would be waited for.
        ValueError: it is not JSON, or nested beyond measure.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, f"{path} is not a file")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is not JSON, or nested beyond measure.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def publish(written: Path, path: Path) -> None:
    """Move what was written to its final name on the same disk, once all of it is on that disk.

    A file replaces a file, a folder an empty folder. A power cut after this has returned does not
    undo it.
    """
    sync_all(written)
    written.replace(path)
    sync(path.parent)


def sync_all(path: Path) -> None:
    """`sync` of a file, or of a folder and all that is below it."""
    for content in [*path.rglob("*"), path]:
        sync(content)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk; links are passed over."""
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNSYNCABLE):
            raise


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


def remove_partials(folder: Path, *, seconds: float = 3600.0) -> None:
    """Remove what killed processes left half written in a folder.

    What another machine's process writes, or one that lives, stays until it is older than that: it
    is published, or gone, long before.
    """
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            is_old = time.time() - partial.stat().st_mtime > seconds
            if is_old or _is_left(partial.name):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def _own_mark() -> str:
    """This machine and process, in the name of what is half written."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}-{os.getpid()}"


def _is_left(name: str) -> bool:
    """Whether what is half written is of a process of this machine that has ended."""
    found = _MARK.search(name)
    if found is None or not _own_mark().startswith(f"{found['machine']}-"):
        return False
    try:
        os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is another user's
        return False
    return False
