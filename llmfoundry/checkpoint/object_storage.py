"""A run at a URL, and the folder of this machine in which it works, or is read.

`open_run.py` opens one, for a recipe's `save_folder` or for what a script is to read.

Saving: no process sees what another has written. Each writes its files on its own machine's disk
and sends them itself; the main process writes the marker once all have reported that theirs are
there.

Reading: the main process lists the checkpoint's files once and reads the small ones,
which all machines get from it. Where one machine has all of a run's processes, they fetch the
tensors together, each other files; where there are more, every process reads from the store the
files that it verifies and the tensors that it loads, and no machine has to hold all of it, but for
what it has kept by `save_local_copies`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from llmfoundry.checkpoint.commit import (
    COMMIT,
    FileSums,
    read_commit,
    sums_of_small_files,
    write_commit,
)
from llmfoundry.checkpoint.dcp import holds_tensors
from llmfoundry.checkpoint.storage import (
    NO_COMMIT,
    Checkpoint,
    Storage,
    batch_of,
    is_checkpoint,
    local_size,
    make_empty,
)
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import DamagedError, Store
from llmfoundry.distributed.collectives import (
    all_reduce_min,
    on_all_ranks,
    on_rank0,
    with_keepalive,
)
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, one_line
from llmfoundry.events import CHECKPOINTS
from llmfoundry.files import atomic_write

_NAME_CHARS = 40  # of a run's name in its folder's
_SENDING = 4  # files of a process that are sent at a time; each in several requests
_READING = 8  # threads of a process that read
_FORGOTTEN_S = 86_400.0  # a checkpoint that was only read is kept for a day after its last use


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a recipe's text names an address, rather than a file or a folder."""
    return "://" in str(place)


def open_run(url: str, options: FetchOptions, *, below: Path, key: str) -> ObjectStorage:
    """The run at a URL, which works in a folder of its own `below`.

    Raises:
        UserError: the URL's protocol is not known, or its package or a setting is missing.
    """
    store = Store(url, options, key=key)
    name = store.url.rpartition("/")[2][:_NAME_CHARS] or "run"
    digest = hashlib.blake2b(store.identity.encode(), digest_size=8).hexdigest()
    folder = below.expanduser().absolute() / f"{name}-{digest}"
    return ObjectStorage(store, folder)


def find_run(
    url: str, key: str, *, options: FetchOptions | None = None
) -> ObjectStorage | Checkpoint:
    """What is at a URL, to be read: a run, or one checkpoint.

    Args:
        url: such as s3://bucket/runs/mine, or s3://bucket/runs/mine/checkpoints/ba0000100.
        key: the recipe's.
        options: of requests to the store; None: from the environment.
    """
    options = options or FetchOptions()
    parts = url.rstrip("/").split("/")
    inner: list[str] = []
    if is_checkpoint(Path(parts[-1])):
        inner = parts[-2:] if parts[-2] == CHECKPOINTS else parts[-1:]
    base = "/".join(parts[: len(parts) - len(inner)])
    run = open_run(base, options, below=Path(options.cache_folder) / "runs-read", key=key)
    return Checkpoint(run, run.folder.joinpath(*inner)) if inner else run


class ObjectStorage(Storage):
    """An object store, and a folder of each machine in which files are written before sending.

    Attributes:
        store: its URL.
        folder: the working copy.
        local_copies: checkpoints that stay on each machine's disk.
        before_commit: called on the main process before a checkpoint counts; raises where it may
            not.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        """No request is sent yet."""
        super().__init__(folder)
        self.store, self.place, self.local_copies = store, store.url, 0
        self.before_commit: Callable[[], None] = lambda: None
        self._sizes: dict[str, int] = {}  # bytes of files in the store, as far as they are known
        self._committed: dict[str, bool] = {}  # by a checkpoint's name: whether it has a marker

    def name(self, path: Path) -> str:
        """A file's name in the store."""
        return path.relative_to(self.folder).as_posix()

    def identity(self) -> str:
        """What distinguishes this folder from that of any other machine, container or user."""
        status = self.folder.stat()
        return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"

    def _folder_names(self, above: Path) -> list[str]:
        return self.store.folders(self.name(above))

    def has_commit(self, folder: Path) -> bool:  # noqa: D102
        return self.store.size(self.name(folder / COMMIT)) is not None

    def _look_up(self, folder: Path) -> Callable[[str], int | None] | str:
        """Fetch all files but the tensors; the sizes of all that the store has.

        Raises:
            UserError: the store cannot be read.
            ValueError: the checkpoint's marker cannot be read.
        """
        prefix = self.name(folder) + "/"
        listed = self.store.files(self.name(folder))
        sizes = {name.removeprefix(prefix): size for name, size in listed.items()}
        if COMMIT not in sizes:
            return NO_COMMIT
        _begin_copy(folder, self.store.read(prefix + COMMIT))
        for name in read_commit(folder):
            if name in sizes and not holds_tensors(name):
                self.store.download(prefix + name, folder / name, sizes[name])
        return sizes.get

    def fetch(self, folder: Path, sizes: Mapping[str, int], world: World) -> None:
        """Put what is needed of a checkpoint on this machine's disk; every process calls it.

        Args:
            folder: the checkpoint's, with its small files on the main process.
            sizes: bytes of the files that are needed.
            world: this process.

        Raises:
            UserError: the store does not give it.
        """
        self._sizes |= {self.name(folder / file): size for file, size in sizes.items()}
        self._share_small_files(folder, sizes, world)
        tensors = sorted(name for name in sizes if holds_tensors(name))
        lacking = [name for name in tensors if not _is_here(folder / name, sizes[name])]
        if world.size != local_size():
            return
        on_all_ranks(world, lambda: None)  # all have looked before one of them fetches

        def download() -> None:
            with self._reported(folder):
                for name in lacking[world.local_rank :: world.size]:
                    self.store.download(self.name(folder / name), folder / name, sizes[name])

        def all_done(done: bool) -> bool:
            return bool(all_reduce_min(world, int(done)))

        on_all_ranks(world, with_keepalive(download, all_done, world.timeout))

    def _share_small_files(self, folder: Path, sizes: Mapping[str, int], world: World) -> None:
        """Give the small files that the main process has to every other machine."""
        if world.size == local_size():
            return
        names = [COMMIT, *(name for name in sizes if not holds_tensors(name))]
        files = on_rank0(world, lambda: {name: (folder / name).read_bytes() for name in names})

        def write() -> None:
            if world.local_rank or world.is_main:
                return
            with self._reported(folder):
                _begin_copy(folder, files.pop(COMMIT))
                for name, content in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(folder / name, content)

        on_all_ranks(world, write)

    @contextmanager
    def _reported(self, folder: Path) -> Iterator[None]:
        """What goes wrong on one machine, as a line that all get."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written: {one_line(error)}; make room there"
            ) from error
        except DamagedError as error:
            raise UserError(
                f"{self.shown(folder)}: a file {error}; choose another checkpoint"
            ) from error

    def drop_copies(self, folder: Path, names: Iterable[str]) -> bool:  # noqa: D102
        found = False
        for name in names:
            with suppress(FileNotFoundError):
                (folder / name).unlink()
                found = True
        return found

    def open(self, path: Path) -> IO[bytes]:  # noqa: D102
        if path.is_file():
            return path.open("rb")
        name = self.name(path)
        size = self._sizes[name] if name in self._sizes else self.store.size(name)
        if size is None:
            raise UserError(f"{self.shown(path)}: is not there")
        return self.store.open(name, size)

    def reading_threads(self, cores: int) -> int:
        """Several, whatever the cores: a store is waited for."""
        return _READING

    def lock(self, folder: Path) -> bool:  # noqa: D102
        return True

    def prepare(self, folder: Path, mailbox: Mailbox) -> None:  # noqa: D102
        def make() -> None:
            if not mailbox.world.local_rank:
                make_empty(folder)
            if mailbox.is_main:
                self._remove(folder.name)

        mailbox.run(make)

    def commit(self, folder: Path, written: FileSums, mailbox: Mailbox) -> int:  # noqa: D102
        own = mailbox.run(
            lambda: written | (sums_of_small_files(folder) if mailbox.is_main else {})
        )
        every = mailbox.gather(own)
        mailbox.run_long(lambda: self._send(folder, own))
        n_bytes = mailbox.run(lambda: self._mark(folder, every), only_main=True)
        self._keep_copies(folder, mailbox)
        return n_bytes or 0

    def _send(self, folder: Path, own: Iterable[str]) -> None:
        """This process's own files, several at a time."""
        with ThreadPoolExecutor(_SENDING, thread_name_prefix="send") as pool:
            files = [folder / name for name in own]
            sent = [pool.submit(self.store.upload, self.name(f), f) for f in files]
            for future in sent:
                future.result()

    def _mark(self, folder: Path, every: list[FileSums]) -> int:
        """Write the marker, last of all, if the run is still this process's; bytes of all files."""
        self.before_commit()
        n_bytes = write_commit(folder, every)
        self.store.upload(self.name(folder / COMMIT), folder / COMMIT)
        self._committed[folder.name] = True
        return n_bytes

    def _keep_copies(self, folder: Path, mailbox: Mailbox) -> None:
        """Leave on this machine's disk the newest few checkpoints, of what it has written."""
        if self.local_copies:
            marker = (folder / COMMIT).read_bytes() if mailbox.is_main else b""
            marker = mailbox.scatter([marker] * mailbox.world.size)
        if mailbox.world.local_rank:
            return
        with suppress(OSError):
            if self.local_copies and not mailbox.is_main:
                atomic_write(folder / COMMIT, marker)  # without it a resume trusts no file here
            here = sorted((f for f in folder.parent.iterdir() if f.is_dir()), reverse=True)
            for old in here[self.local_copies :]:
                shutil.rmtree(old, ignore_errors=True)

    def discard(self, folder: Path, world: World) -> None:  # noqa: D102
        if not world.local_rank:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main and not self._committed.get(folder.name):  # else it does count
            with suppress(UserError):  # the next save, or the next start, removes it
                self._remove(folder.name)

    def is_complete(self, folder: Path) -> bool:
        """Whether the store has a checkpoint's marker, which is uploaded last."""
        if folder.name not in self._committed:
            self._committed[folder.name] = self.has_commit(folder)
        return self._committed[folder.name]

    def was_interrupted(self, folder: Path) -> bool:  # noqa: D102
        return not self.is_complete(folder)

    def remove(self, folder: Path) -> None:  # noqa: D102
        self._remove(folder.name)

    def forget_after(self, batch: int, world: World) -> None:  # noqa: D102
        newer = [f for f in self.checkpoints() if batch_of(f) > batch]
        for folder in newer:
            if not world.local_rank:
                shutil.rmtree(folder, ignore_errors=True)
            if world.is_main:
                self._remove(folder.name)

    def remove_all(self) -> None:  # noqa: D102
        files = self.store.files(CHECKPOINTS)
        markers = [name for name in files if name.endswith(f"/{COMMIT}")]
        self.store.delete(markers)
        self.store.delete([name for name in files if name not in markers])
        self._committed.clear()
        super().remove_all()

    def newest(self) -> str | None:  # noqa: D102
        try:
            found = next(filter(self.has_commit, self.checkpoints()), None)
        except UserError:  # the store is what failed; what this process has saved, it knows
            return max((name for name, there in self._committed.items() if there), default=None)
        return None if found is None else found.name

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, or what there is of one: its marker first."""
        files = self.store.files(f"{CHECKPOINTS}/{name}")
        marker = f"{CHECKPOINTS}/{name}/{COMMIT}"
        if marker in files:
            self.store.delete([marker])
        self.store.delete([file for file in files if file != marker])
        self._committed.pop(name, None)


def _begin_copy(folder: Path, marker: bytes) -> None:
    """Make a folder that holds files of this very checkpoint, and none of an earlier one."""
    with suppress(OSError):
        if (folder / COMMIT).read_bytes() == marker:
            os.utime(folder)
            return
    make_empty(folder)
    for other in folder.parent.iterdir():
        if other.is_dir() and other.stat().st_mtime < time.time() - _FORGOTTEN_S:
            shutil.rmtree(other, ignore_errors=True)
    atomic_write(folder / COMMIT, marker)


def _is_here(path: Path, size: int) -> bool:
    """Whether a file lies on this disk in full; one of another size is removed."""
    try:
        if path.stat().st_size == size:
            return True
        path.unlink()
    except FileNotFoundError:
        pass
    return False
