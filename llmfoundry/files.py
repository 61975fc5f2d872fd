"""Atomic writes, guarded reads, folders whose writing resumes, and locks that end with their owner.

Small files are written by `atomic_write`, streams by `atomic_file`, folders by `atomic_path`: under
a temporary name beside the target until all of it is on the disk. So a reader at any time, also
after a crash, a power cut or a full disk, finds the old content or the new.

A file that somebody else may have written is read by `open_guarded` or by what is built on it
(`read_json`, `read_object`, `read_text`): a pipe is refused and not waited for, and size and depth
are bounded.

The cache of shards locks the very file it means: exclusively while it is written or deleted, shared
while it is read; runs and preparations lock a file made for it. These are flock's locks, which the
kernel releases however a process ends. One rule: a lock counts only if the path still names the
locked file, since another process may have renamed or deleted it.

Folders that take long to write are `resumable_folder`: beside OUTPUT stand meanwhile
OUTPUT.unfinished and OUTPUT.unfinished.journal, a line of JSON for each part that is on the disk. A
killed process leaves both; the same command then skips those parts. An error removes both, as does
a command that would write something else there. The journal is locked, so that one process writes
at a time.
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
"""In a run's folder: who trains there holds it (`checkpoint/run_lock.py`)."""
SWEEP_LOCK = "sweep.lock"
"""In the folder of a sweep's runs: held by the sweep (`cli/sweep_runs.py`)."""
MOST_BYTES = 1 << 25
"""Of a guarded read: twice the largest index of weights that was published."""
DEEPEST = 64
"""Levels of lists and objects in JSON; what reads it goes down by calling itself."""
AGAIN = "copy or download it again"
TOO_DEEP = f"nested more than {DEEPEST} deep"
_NESTS = (dict, list)
_UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # what some mounts say of folders


_swept: set[Path] = set()
_being_written: set[str] = set()  # by this process


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which is called `path` once the block ends.

    Its name meanwhile, `<name>.<machine>-<process>-<hex>.partial`, is unique among processes and
    machines, so that two may write at once. What a killed process left by such a name is removed
    when another writes into the same folder.

    Args:
        path: its folder exists; a folder may itself exist, if it is empty.

    Raises:
        OSError: it could not be written; what was at `path` is as before.
        FileExistsError: `path` is a device, a pipe or a socket, which a new file would replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is a device, a pipe or a socket", str(path))
    if path.parent not in _swept:  # once: a folder may get thousands of files
        _swept.add(path.parent)
        _remove_marked(path.parent.glob("*.partial"))
    partial = path.with_name(f"{path.name}.{_own_mark()}-{uuid4().hex[:8]}.partial")
    _being_written.add(partial.name)
    try:
        yield partial
        publish(partial, path)
    finally:
        _being_written.discard(partial.name)
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write, which is called `path` once the block ends."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file at once (`atomic_path`); text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Write a JSON file; what JSON does not know is written by its `str`."""
    atomic_write(path, json.dumps(value, indent=indent, default=str) + "\n")


def open_guarded(path: Path) -> IO[bytes]:
    """Open a regular file for reading; the caller closes it.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # asked first, as opening a device may act
        raise OSError(errno.EINVAL, "is not a file", str(path))
    # Without waiting for a writer, where a pipe has taken the place of the file meanwhile.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_guarded(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        OSError: `open_guarded` refuses it.
        ValueError: it is longer.
    """
    with open_guarded(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"has more than {most:,} bytes")
    return data


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: `read_guarded` or `parse_json` refuses it.
    """
    return parse_json(read_guarded(path, most=most))


def read_json_if_there(path: Path) -> Any:
    """What a JSON file holds (`read_json`); an empty dict where there is no file."""
    return read_json(path) if path.exists() else {}


def parse_json(
    text: str | bytes, *, of_pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """What JSON says; of bytes, UTF-16 and UTF-32 are read too, and a byte order mark.

    Args:
        text: to read.
        of_pairs: makes an object of its keys and values; None: a dict.

    Raises:
        ValueError: it is not JSON, or is nested deeper than `DEEPEST`; or of `of_pairs`.
    """
    if isinstance(text, bytes):
        text = _decoded(text)
    if not text.strip():
        raise ValueError("it is empty")
    try:
        found = json.loads(text, object_pairs_hook=of_pairs)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [found]
    for _ in range(DEEPEST):
        inner = (c.values() if isinstance(c, dict) else c for c in level if isinstance(c, _NESTS))
        level = [value for values in inner for value in values if isinstance(value, _NESTS)]
        if not level:
            return found
    raise ValueError(TOO_DEEP)


def read_object(path: Path, *, instead: str = AGAIN, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file that somebody else wrote.

    Args:
        path: the file.
        instead: what to do where it cannot be used: download it again.
        most: bytes that it may have.

    Raises:
        UserError: it cannot be read, is not JSON, or holds no object.
    """
    with _readable(path, instead):
        data = read_guarded(path, most=most)
    try:
        found = parse_json(data)
        if b"\\ud" in data.lower():  # spelled pairs are sound; a half has no UTF-8
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        reason = one_line(error).partition("; ")[0]  # of Python's, without its advice
        raise UserError(f"{path}: is not JSON: {reason}; {instead}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no settings by name; {instead}")
    return found


def read_object_if_there(path: Path, *, instead: str = AGAIN) -> dict[str, Any]:
    """The same (`read_object`); empty where nothing has that name."""
    return read_object(path, instead=instead) if path.exists() else {}


def read_text(
    path: Path, *, is_json: bool = False, instead: str = AGAIN, most: int = MOST_BYTES
) -> str:
    """The text of a file that somebody else wrote: UTF-8, or what JSON may be in.

    Raises:
        UserError: it cannot be read, or is no such text.
    """
    with _readable(path, instead):
        data = read_guarded(path, most=most)
    try:
        return _decoded(data) if is_json else data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds no UTF-8 text; {instead}") from error


def _decoded(data: bytes) -> str:
    """The text of JSON; unlike in `json.loads`, half of a surrogate pair is an error."""
    return data.decode(json.detect_encoding(data))


@contextmanager
def _readable(path: Path, instead: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; {instead}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {instead}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}; {instead}") from error


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

    Some libraries make theirs from temporary files, which only their owner may read.
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
                _remove(partial)


def _remove_marked(partials: Iterable[Path]) -> None:
    """Remove those of killed processes; of other names, which are not ours, none."""
    for partial in partials:
        if _is_left(partial.name):
            with suppress(OSError):
                _remove(partial)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _own_mark() -> str:
    """This machine and process, in the name of what is half written."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}-{os.getpid()}"


def _is_left(name: str) -> bool:
    """Whether what is half written is of a process of this machine that has ended."""
    found = _MARK.search(name)
    if found is None or not _own_mark().startswith(f"{found['machine']}-"):
        return False
    if int(found["process"]) == os.getpid():  # of a process before, which had the same number
        return name not in _being_written
    try:
        os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is another user's
        return False
    return False


_held: set[int] = set()


def _close_inherited() -> None:
    # A forked child shares its parent's locks and would keep them alive after the parent's end.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


class LockedFile:
    """An open and locked file, until `release`.

    Attributes:
        path: its name; set by the code that renames it.
        descriptor: the open file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._process = os.getpid()
        _held.add(descriptor)

    def share(self) -> bool:
        """Turn an exclusive lock into a shared one; False: another process was faster, it is lost.

        The kernel releases the one before it grants the other.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def is_current(self) -> bool:
        """Whether the path still names this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock and close; a second time, or in a forked child, it does nothing."""
        if self._process == os.getpid() and self.descriptor in _held:
            _held.discard(self.descriptor)
            # Unlocked, not only closed: a child that is being forked may still have the file open.
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)

    def __enter__(self) -> LockedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, mode: int | None = None) -> LockedFile | None:
    """Lock a file, or None if another has it or it is no longer what `path` names.

    Args:
        path: the file.
        shared: together with other readers.
        mode: make the file with these permissions if it is not there, and open it for writing.

    Raises:
        FileNotFoundError: it is not there, and no mode was given.
    """
    return _lock(path, shared, mode, fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a process of this machine, or of one that shares its files, has a file locked."""
    with suppress(OSError):  # it has no locks
        if path.is_file():  # a pipe would wait
            locked = try_lock(path, shared=True)
            if locked is not None:
                locked.release()
            return locked is None
    return False


@contextmanager
def one_at_a_time(path: Path, *, key: str, busy: str, instead: str) -> Iterator[None]:
    """Hold the lock of a file, whose folder is made if need be, while the block runs.

    Args:
        path: the lock file.
        key: the recipe's key of the folder, for the errors.
        busy: what another process does there, and what to do: another sweep runs there; wait.
        instead: what to do where the folder cannot be written: write another.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
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
    """Wait for the exclusive lock of a file that is made if need be and held for moments only."""
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
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)  # open() has taken the umask away from it
            return descriptor
        with suppress(FileNotFoundError):  # deleted just now: make it after all
            return os.open(path, os.O_RDWR)
        if path.is_symlink():  # to a file that is still to be made
            return os.open(path, os.O_RDWR | os.O_CREAT, mode)


class Journal:
    """What is on the disk of an unfinished folder.

    Attributes:
        done: its parts by name, each with what was noted of it.
    """

    def __init__(self, path: Path, identity: str) -> None:
        """Read a journal, or begin it anew where it is of something else."""
        self._path = path
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a line may have been torn
        self.done: dict[str, Any] = {}
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()] or [None]
            for line in lines:
                self.done |= line
        except (ValueError, TypeError):
            first = None
        self.resumes = first == {"identity": identity}
        if not self.resumes:
            self.done, whole = {}, json.dumps({"identity": identity}).encode() + b"\n"
        path.write_bytes(whole)

    def add(self, parts: Mapping[str, Any]) -> None:
        """Note parts that are on the disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(parts).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.done |= parts


@contextmanager
def resumable_folder(
    output: Path, identity: str, *, note: Callable[[str], None]
) -> Iterator[tuple[Path, Journal]]:
    """A folder beside `output` that takes its name at the end, and the journal of what it holds.

    Args:
        output: must not exist, or be empty.
        identity: of all that is written; what was begun with another is removed.
        note: reports that something is resumed.

    Raises:
        UserError: the output holds something, or another process is writing it.
    """
    refuse_used(output)
    output = place_of(output)
    folder, path = _unfinished(output)
    try:
        if folder.exists() and not path.is_file():
            raise UserError(f"output: {folder} is in the way; remove it, or write another output")
        locked = try_lock(path, mode=0o644)
    except OSError as error:  # its name is too long, or its folder of a kind that takes no files
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
    """A folder to write, without links, once the folder around it is there.

    Raises:
        UserError: nothing can be written there.
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
    """Raise a UserError where something is at `output` that is not an empty folder.

    It says what is there: outputs take their name once they are whole, so the same command as
    before is told that its work is done. A journal of that is removed.
    """
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
    """The folder that takes the output's name in the end, and its journal."""
    folder = output.parent / f"{output.name}.unfinished"  # "/" has no name to replace
    return folder, folder.with_name(f"{folder.name}.journal")


def _what_is(output: Path) -> str:
    """Which kind of output a folder is; empty: none that is known."""
    if any(output.glob("checkpoints/*/COMMIT")):
        return "a run with a complete checkpoint"
    if (output / "adapter_config.json").is_file():
        return "an adapter"
    return "a Hugging Face model" if (output / "config.json").is_file() else ""
