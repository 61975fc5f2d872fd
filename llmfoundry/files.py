"""Atomic writes, guarded reads, file locks, and folders whose writing can be resumed.

Write small files with `atomic_write`, streams with `atomic_file`, folders with `atomic_path`. They
write to a temporary name next to the target and rename it when all data is on the disk. A reader
therefore finds the old or the new content at any time, also after a crash or a power cut.

Read files that other programs may have written with `open_guarded` or a function based on it
(`read_json`, `read_object`, `read_text`). They reject pipes instead of blocking, and limit the size
and the nesting depth.

Locks are flock locks, which the kernel releases however a process ends. The shard cache locks the
cached file itself: exclusive for writing or deleting, shared for reading. Runs and preparations
lock a separate file. A lock only counts if the path still names the locked file, because another
process may have renamed or deleted it.

Write folders that take long with `resumable_folder`. While it runs, there are OUTPUT.unfinished and
OUTPUT.unfinished.journal, with a line of JSON for each part on the disk. A killed process leaves
both, and the same command skips the finished parts. An error removes both, as does a command that
writes something else there. The journal is locked, so that one process writes at a time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from llmfoundry.errors import UserError, disk_full, one_line

_MARK = re.compile(r"\.(?P<machine>[0-9a-f]{8})-(?P<process>\d{1,9})-[0-9a-f]{8}\.partial$")
RUN_LOCK = "run.lock"
"""Lock file in a run's folder, held by the training process (`checkpoint/run_lock.py`)."""
SWEEP_LOCK = "sweep.lock"
"""Lock file in the folder of a sweep's runs, held by the sweep (`cli/sweep_runs.py`)."""
MOST_BYTES = 1 << 25
"""Size limit of a guarded read: twice the largest published weight index."""
DEEPEST = 64
"""Maximum nesting depth of JSON, because readers are recursive."""
AGAIN = "copy or download it again"
TOO_DEEP = f"nested more than {DEEPEST} deep"
_NESTS = (dict, list)
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # fsync errors of folders on some mounts


_swept: set[Path] = set()
_being_written: set[str] = set()  # names of partial files of this process


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` after the block.

    The temporary name, `<name>.<machine>-<process>-<hex>.partial`, is unique among processes and
    machines, so that two of them can write at the same time. Partial files of killed processes are
    removed when another process writes into the same folder.

    Args:
        path: target. Its parent folder exists. An existing target folder must be empty.

    Raises:
        OSError: writing failed; `path` is unchanged.
        FileExistsError: `path` is a device, a pipe or a socket, which a new file would replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is a device, a pipe or a socket", str(path))
    if path.parent not in _swept:  # only once, because a folder may get thousands of files
        _swept.add(path.parent)
        _remove_marked(path.parent.glob("*.partial"))
    partial = path.with_name(f"{path.name}.{_own_mark()}-{uuid4().hex[:8]}.partial")
    _being_written.add(partial.name)
    try:
        yield partial
        publish(partial, path)
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        _being_written.discard(partial.name)
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file, which is renamed to `path` after the block (`atomic_path`)."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file atomically (`atomic_path`); text is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Write a JSON file atomically; other types than JSON's are converted by `str`."""
    atomic_write(path, json.dumps(value, indent=indent, default=str) + "\n")


def open_guarded(path: Path) -> IO[bytes]:
    """Open a regular file for reading; the caller closes it.

    Raises:
        OSError: the file cannot be read, or is a pipe, a device or a folder.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # before opening, which may act on a device
        raise OSError(errno.EINVAL, "is not a file", str(path))
    # O_NONBLOCK does not block if the file was replaced by a pipe meanwhile
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_guarded(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file.
        most: maximum size in bytes.

    Raises:
        OSError: `open_guarded` rejects the file.
        ValueError: the file is larger than `most`.
    """
    with open_guarded(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"has more than {most:,} bytes")
    return data


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: `read_guarded` or `parse_json` rejects the file.
    """
    return parse_json(read_guarded(path, most=most))


def read_json_if_there(path: Path) -> Any:
    """Return the value in a JSON file (`read_json`); an empty dict if the file does not exist."""
    return read_json(path) if path.exists() else {}


def parse_json(
    text: str | bytes, *, of_pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: text, or bytes in UTF-8, UTF-16 or UTF-32 with or without a byte order mark.
        of_pairs: converts the (key, value) pairs of an object; None: to a dict.

    Raises:
        ValueError: the text is not JSON, or is nested deeper than `DEEPEST`; or from `of_pairs`.
    """
    if isinstance(text, bytes):
        text = _decoded(text)
    if not text.strip():
        raise ValueError("it is empty")
    try:
        result = json.loads(text, object_pairs_hook=of_pairs)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None

    # descend level by level to check the depth
    level = [result]
    for _ in range(DEEPEST):
        next_level = list[Any]()
        for container in level:
            if isinstance(container, _NESTS):
                values = container.values() if isinstance(container, dict) else container
                next_level += [value for value in values if isinstance(value, _NESTS)]
        level = next_level
        if not level:
            return result
    raise ValueError(TOO_DEEP)


def read_object(path: Path, *, instead: str = AGAIN, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file that another program wrote.

    Args:
        path: the file.
        instead: advice for the error message, such as `download it again`.
        most: maximum size in bytes.

    Raises:
        UserError: the file cannot be read, is not JSON, or contains no object.
    """
    with _readable(path, instead):
        data = read_guarded(path, most=most)
    try:
        value = parse_json(data)
        if b"\\ud" in data.lower():  # reject half of an escaped surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        reason = one_line(error).partition("; ")[0]  # Python's message without its advice
        raise UserError(f"{path}: is not JSON: {reason}; {instead}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no settings by name; {instead}")
    return value


def read_object_if_there(path: Path, *, instead: str = AGAIN) -> dict[str, Any]:
    """Return the JSON object in a file (`read_object`); empty if the file does not exist."""
    return read_object(path, instead=instead) if path.exists() else {}


def read_text(
    path: Path, *, is_json: bool = False, instead: str = AGAIN, most: int = MOST_BYTES
) -> str:
    """Return the text of a file that another program wrote.

    Args:
        path: the file.
        is_json: accept the encodings of JSON (UTF-8, UTF-16, UTF-32) instead of only UTF-8.
        instead: advice for the error message.
        most: maximum size in bytes.

    Raises:
        UserError: the file cannot be read, or has another encoding.
    """
    with _readable(path, instead):
        data = read_guarded(path, most=most)
    try:
        return _decoded(data) if is_json else data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds no UTF-8 text; {instead}") from error


def _decoded(data: bytes) -> str:
    """Decode JSON bytes; unlike `json.loads`, reject half of a surrogate pair."""
    return data.decode(json.detect_encoding(data))


@contextmanager
def _readable(path: Path, instead: str) -> Iterator[None]:
    """Convert read errors in the block to a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; {instead}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {instead}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}; {instead}") from error


def publish(written: Path, path: Path) -> None:
    """Sync a file or folder, and rename it to its final name on the same disk.

    A file replaces a file, a folder replaces an empty folder. The rename is on the disk when this
    function returns, so a power cut does not undo it.
    """
    sync_all(written)
    written.replace(path)
    sync(path.parent)


def sync_all(path: Path) -> None:
    """Sync a file, or a folder with its whole content."""
    for content in [*path.rglob("*"), path]:
        sync(content)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk; skip symbolic links."""
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
    """Give a file, or all files in a folder, the default permissions of new files (umask).

    Some libraries create files from temporary files, which only their owner can read.
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
    """Remove partial files of killed processes from a folder.

    Args:
        folder: the folder.
        seconds: age after which partial files of running processes, and of other machines, are
            removed too. A process finishes long before.
    """
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            is_old = time.time() - partial.stat().st_mtime > seconds
            if is_old or _is_left(partial.name):
                _remove(partial)


def _remove_marked(partials: Iterable[Path]) -> None:
    """Remove the partial files of killed processes of this machine; ignore other names."""
    for partial in partials:
        if _is_left(partial.name):
            with suppress(OSError):
                _remove(partial)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _own_mark() -> str:
    """Return the part of a partial file's name for this machine and process."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}-{os.getpid()}"


def _is_left(name: str) -> bool:
    """Return whether a partial file is of a process of this machine that has ended."""
    match = _MARK.search(name)
    if match is None or not _own_mark().startswith(f"{match['machine']}-"):
        return False
    if int(match["process"]) == os.getpid():  # maybe an earlier process with the same id
        return name not in _being_written
    try:
        os.kill(int(match["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    return False


_held: set[int] = set()


def _close_inherited() -> None:
    # a forked child shares its parent's locks and would hold them after the parent has ended
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


class LockedFile:
    """An open and locked file; `release` unlocks and closes it.

    Attributes:
        path: path of the file; updated by code that renames it.
        descriptor: of the open file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._process = os.getpid()
        _held.add(descriptor)

    def share(self) -> bool:
        """Convert an exclusive lock into a shared lock.

        The kernel releases the first lock before it grants the second.

        Returns:
            False if another process took the lock in between; the lock is then lost.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def is_current(self) -> bool:
        """Return whether the path still names this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock and close the file. Does nothing the second time, and in a forked child."""
        if self._process == os.getpid() and self.descriptor in _held:
            _held.discard(self.descriptor)
            # closing alone is not enough: a child that is being forked may have the file open
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)

    def __enter__(self) -> LockedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, mode: int | None = None) -> LockedFile | None:
    """Lock a file without waiting.

    Args:
        path: the file.
        shared: take a shared lock.
        mode: create a missing file with these permissions, and open it for writing.

    Returns:
        None if another process has the lock, or if `path` no longer names the file.

    Raises:
        FileNotFoundError: the file does not exist, and there is no `mode`.
    """
    return _lock(path, shared, mode, fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Return whether a process on any machine that shares the file system has a file locked."""
    with suppress(OSError):  # the file system has no locks
        if path.is_file():  # opening a pipe would block
            locked = try_lock(path, shared=True)
            if locked is not None:
                locked.release()
            return locked is None
    return False


@contextmanager
def one_at_a_time(path: Path, *, key: str, busy: str, instead: str) -> Iterator[None]:
    """Hold the lock of a file during the block; create its folder if it is missing.

    Args:
        path: the lock file.
        key: the recipe's key of the folder, for error messages.
        busy: message if another process holds the lock: `another sweep runs there; wait`.
        instead: advice if the folder cannot be written: `write another`.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        locked = try_lock(path, mode=0o644)
    except OSError as error:
        raise UserError(
            f"{key}: {path.parent} cannot be written: {one_line(error)}; {instead}"
        ) from error
    if locked is None:
        raise UserError(f"{key}: {path.parent}: {busy}")
    with locked:
        yield


def lock(path: Path, *, mode: int) -> LockedFile:
    """Wait for the exclusive lock of a file that processes hold briefly; create it if missing."""
    while True:
        locked = _lock(path, False, mode, 0)
        if locked is not None:
            return locked


def _lock(path: Path, shared: bool, mode: int | None, wait: int) -> LockedFile | None:
    descriptor = _open(path, mode)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | wait)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    locked = LockedFile(path, descriptor)
    if not locked.is_current():
        locked.release()
        return None
    return locked


def _open(path: Path, mode: int | None) -> int:
    if mode is None:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)  # open() applies the umask
            return descriptor
        with suppress(FileNotFoundError):  # deleted in between: try to create it again
            return os.open(path, os.O_RDWR)
        if path.is_symlink():  # to a missing file
            return os.open(path, os.O_RDWR | os.O_CREAT, mode)


class Journal:
    """Journal of an unfinished folder: the parts that are on the disk.

    Attributes:
        done: finished parts by name, each with its recorded value.
    """

    def __init__(self, path: Path, identity: str) -> None:
        """Read a journal; start a new one if it belongs to another identity."""
        self._path = path
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]  # the last line may be incomplete
        self.done: dict[str, Any] = {}
        try:
            first, *lines = [json.loads(line) for line in complete.splitlines()] or [None]
            for line in lines:
                self.done |= line
        except (ValueError, TypeError):
            first = None
        self.resumes = first == {"identity": identity}
        if not self.resumes:
            self.done, complete = {}, json.dumps({"identity": identity}).encode() + b"\n"
        path.write_bytes(complete)

    def add(self, parts: Mapping[str, Any]) -> None:
        """Record parts that are on the disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(parts).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.done |= parts


@contextmanager
def resumable_folder(
    output: Path, identity: str, *, note: Callable[[str], None]
) -> Iterator[tuple[Path, Journal]]:
    """Yield a folder that is renamed to `output` at the end, and the journal of its parts.

    Args:
        output: must not exist, or be empty.
        identity: of the content; an unfinished folder with another identity is removed.
        note: called with a message if an unfinished folder is resumed.

    Raises:
        UserError: the output is not empty, or another process is writing it.
    """
    refuse_used(output)
    output = place_of(output)
    folder, path = _unfinished(output)
    try:
        if folder.exists() and not path.is_file():
            raise UserError(f"output: {folder} is in the way; remove it, or write another output")
        locked = try_lock(path, mode=0o644)
    except OSError as error:  # for example, the name is too long
        raise UserError(f"output: {output}: {error.strerror}; write another") from error
    if locked is None:
        raise UserError(f"output: another process is writing {output}; wait for it")
    with locked:
        refuse_used(output)  # another process may just have finished
        journal = Journal(path, identity)
        if not (journal.resumes and folder.is_dir()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            journal.done.clear()
        elif journal.done:
            note(f"output: resuming {folder}, {len(journal.done)} parts of which are written")
        _remove_marked(folder.rglob("*.partial"))
        try:
            yield folder, journal
            open_to_all(folder)
            publish(folder, output)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
            if disk_full(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output)) from error
            raise
        path.unlink(missing_ok=True)


def place_of(output: Path) -> Path:
    """Resolve the path of a folder to write, and create its parent.

    Raises:
        UserError: the parent cannot be written.
    """
    place = output.resolve()  # "." has no name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {place.parent}: {error.strerror}; write another") from error
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise UserError(f"output: {place.parent} cannot be written; write another")
    return place


def refuse_used(output: Path) -> None:
    """Raise a UserError if `output` exists and is not an empty folder.

    Outputs get their name when they are complete. The message names the kind of the output, so a
    repeated command reports that its work is done. Its journal is removed.
    """
    run = output.absolute().parents[1] if len(output.absolute().parents) > 1 else output
    if output.absolute().parent.name == "checkpoints" and (run / "recipe.yaml").is_file():
        raise UserError(
            f"output: {output} lies among the checkpoints of {run}; write another folder"
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    folder, journal = _unfinished(output.resolve())
    if not folder.exists() and journal.is_file():  # its process was killed between two renames
        locked = try_lock(journal)
        if locked is not None:
            with locked:
                journal.unlink(missing_ok=True)
    what = _what_is(output)
    use = f": it holds {what}; use that, or write" if what else "; write"
    raise UserError(f"output: {output} exists and is not empty{use} another folder")


def _unfinished(output: Path) -> tuple[Path, Path]:
    """Return the unfinished folder of an output, and its journal."""
    folder = output.parent / f"{output.name}.unfinished"  # "/" has no name to replace
    return folder, folder.with_name(f"{folder.name}.journal")


def _what_is(output: Path) -> str:
    """Return the kind of output in a folder; empty: unknown."""
    if any(output.glob("checkpoints/*/COMMIT")):
        return "a run with a complete checkpoint"
    if (output / "adapter_config.json").is_file():
        return "an adapter"
    return "a Hugging Face model" if (output / "config.json").is_file() else ""
