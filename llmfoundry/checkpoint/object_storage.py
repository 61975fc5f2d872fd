"""Storage of a run in an object store (URL), with a working copy on each machine.

`open_run.py` opens it, for a recipe's `save_folder` or for a script that reads a run.

Saving: each rank writes its files to the disk of its machine and uploads them. Rank 0 uploads the
marker COMMIT when all ranks have reported that their files are in the store.

Reading: rank 0 lists the files of a checkpoint once and reads the small files, which it sends to
all machines. With all ranks on one machine, the ranks download the tensor files together, each a
part of them. With several machines, each rank reads the files that it verifies and the tensors that
it loads from the store, so no machine needs space for the complete checkpoint. Files in local
copies (`save_local_copies`) are not downloaded.
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

_NAME_CHARS = 40  # characters of the run's name in the name of its folder
_SENDING = 4  # parallel uploads of a rank; each uses several requests
_READING = 8  # threads of a rank that read
_FORGOTTEN_S = 86_400.0  # time after which a downloaded checkpoint is deleted if it is not used


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether a location in a recipe is a URL."""
    return "://" in str(place)


def open_run(url: str, options: FetchOptions, *, below: Path, key: str) -> ObjectStorage:
    """Open the run at a URL, with a working copy in a separate folder below `below`.

    Raises:
        UserError: the URL's protocol is unknown, or its package or a setting is missing.
    """
    store = Store(url, options, key=key)
    name = store.url.rpartition("/")[2][:_NAME_CHARS] or "run"
    digest = hashlib.blake2b(store.identity.encode(), digest_size=8).hexdigest()
    folder = below.expanduser().absolute() / f"{name}-{digest}"
    return ObjectStorage(store, folder)


def find_run(
    url: str, key: str, *, options: FetchOptions | None = None
) -> ObjectStorage | Checkpoint:
    """Open the run or checkpoint at a URL for reading.

    Args:
        url: such as s3://bucket/runs/mine, or s3://bucket/runs/mine/checkpoints/ba0000100.
        key: recipe key, for error messages.
        options: options of requests to the store; None: from the environment.
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
    """Storage in an object store, with a working copy in a folder of each machine.

    Attributes:
        store: client of the store.
        folder: working copy.
        local_copies: number of checkpoints that remain on each machine's disk.
        before_commit: called on rank 0 before a checkpoint is marked as complete; raises if this
            process no longer owns the run.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        """Create the storage without a request to the store."""
        super().__init__(folder)
        self.store, self.place, self.local_copies = store, store.url, 0
        self.before_commit: Callable[[], None] = lambda: None
        self._sizes: dict[str, int] = {}  # known sizes of files in the store
        self._committed: dict[str, bool] = {}  # whether a checkpoint has a marker, by name

    def name(self, path: Path) -> str:
        """Return the name of a file in the store."""
        return path.relative_to(self.folder).as_posix()

    def identity(self) -> str:
        """Return an identifier of this folder that no other machine, container or user has."""
        status = self.folder.stat()
        return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"

    def _folder_names(self, above: Path) -> list[str]:
        return self.store.folders(self.name(above))

    def has_commit(self, folder: Path) -> bool:  # noqa: D102
        return self.store.size(self.name(folder / COMMIT)) is not None

    def _look_up(self, folder: Path) -> Callable[[str], int | None] | str:
        """Download the small files of a checkpoint, and return a function from file name to size.

        Returns:
            NO_COMMIT if the checkpoint has no marker.

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
        """Download the needed files of a checkpoint to this machine; collective.

        Args:
            folder: folder of the checkpoint; on rank 0 it contains the small files.
            sizes: sizes in bytes of the needed files.
            world: this rank.

        Raises:
            UserError: a download fails.
        """
        self._sizes |= {self.name(folder / file): size for file, size in sizes.items()}
        self._share_small_files(folder, sizes, world)

        # with several machines, tensors are read from the store when they are needed
        tensors = sorted(name for name in sizes if holds_tensors(name))
        missing = [name for name in tensors if not _is_here(folder / name, sizes[name])]
        if world.size != local_size():
            return

        # with one machine, the ranks download a part of the files each
        on_all_ranks(world, lambda: None)  # no download before all ranks have listed the files

        def download() -> None:
            with self._reported(folder):
                for name in missing[world.local_rank :: world.size]:
                    self.store.download(self.name(folder / name), folder / name, sizes[name])

        def all_done(done: bool) -> bool:
            return bool(all_reduce_min(world, int(done)))

        on_all_ranks(world, with_keepalive(download, all_done, world.timeout))

    def _share_small_files(self, folder: Path, sizes: Mapping[str, int], world: World) -> None:
        """Send rank 0's small files of a checkpoint to all other machines."""
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
        """Convert errors of one rank in the block to a UserError, which all ranks raise."""
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
        dropped = False
        for name in names:
            with suppress(FileNotFoundError):
                (folder / name).unlink()
                dropped = True
        return dropped

    def open(self, path: Path) -> IO[bytes]:  # noqa: D102
        if path.is_file():
            return path.open("rb")
        name = self.name(path)
        size = self._sizes[name] if name in self._sizes else self.store.size(name)
        if size is None:
            raise UserError(f"{self.shown(path)}: is not there")
        return self.store.open(name, size)

    def reading_threads(self, cores: int) -> int:
        """Return the number of reading threads, which mostly wait for the store."""
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
        # checksums of this rank's files; rank 0 adds the small files
        local_sums = mailbox.run(
            lambda: written | (sums_of_small_files(folder) if mailbox.is_main else {})
        )
        all_sums = mailbox.gather(local_sums)

        # upload all files, then the marker
        mailbox.run_long(lambda: self._send(folder, local_sums))
        n_bytes = mailbox.run(lambda: self._mark(folder, all_sums), only_main=True)
        self._keep_copies(folder, mailbox)
        return n_bytes or 0

    def _send(self, folder: Path, names: Iterable[str]) -> None:
        """Upload this rank's files, several in parallel."""
        with ThreadPoolExecutor(_SENDING, thread_name_prefix="send") as pool:
            files = [folder / name for name in names]
            uploads = [pool.submit(self.store.upload, self.name(file), file) for file in files]
            for future in uploads:
                future.result()

    def _mark(self, folder: Path, all_sums: list[FileSums]) -> int:
        """Upload the marker as the last file, and return the bytes of all files."""
        self.before_commit()
        n_bytes = write_commit(folder, all_sums)
        self.store.upload(self.name(folder / COMMIT), folder / COMMIT)
        self._committed[folder.name] = True
        return n_bytes

    def _keep_copies(self, folder: Path, mailbox: Mailbox) -> None:
        """Delete this machine's local copies except for the newest `local_copies`."""
        if self.local_copies:
            marker = (folder / COMMIT).read_bytes() if mailbox.is_main else b""
            marker = mailbox.scatter([marker] * mailbox.world.size)
        if mailbox.world.local_rank:
            return
        with suppress(OSError):
            if self.local_copies and not mailbox.is_main:
                atomic_write(folder / COMMIT, marker)  # a resume only uses copies with a marker
            copies = sorted((f for f in folder.parent.iterdir() if f.is_dir()), reverse=True)
            for old in copies[self.local_copies :]:
                shutil.rmtree(old, ignore_errors=True)

    def discard(self, folder: Path, world: World) -> None:  # noqa: D102
        if not world.local_rank:
            shutil.rmtree(folder, ignore_errors=True)
        if world.is_main and not self._committed.get(folder.name):
            with suppress(UserError):  # otherwise the next save or start removes it
                self._remove(folder.name)

    def is_complete(self, folder: Path) -> bool:
        """Return whether the store has the marker of a checkpoint, which is uploaded last."""
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
            newest = next(filter(self.has_commit, self.checkpoints()), None)
        except UserError:  # the store failed: use what this process has saved
            return max(
                (name for name, is_there in self._committed.items() if is_there), default=None
            )
        return None if newest is None else newest.name

    def _remove(self, name: str) -> None:
        """Delete the files of a checkpoint, beginning with its marker."""
        files = self.store.files(f"{CHECKPOINTS}/{name}")
        marker = f"{CHECKPOINTS}/{name}/{COMMIT}"
        if marker in files:
            self.store.delete([marker])
        self.store.delete([file for file in files if file != marker])
        self._committed.pop(name, None)


def _begin_copy(folder: Path, marker: bytes) -> None:
    """Create the local folder of a checkpoint, and delete files of another checkpoint in it."""
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
    """Return whether a file on this disk is complete; delete it if its size differs."""
    try:
        if path.stat().st_size == size:
            return True
        path.unlink()
    except FileNotFoundError:
        pass
    return False
