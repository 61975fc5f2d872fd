"""A run at a URL, and the folder of this machine in which it works, or is read.

`checkpoint.run_folder` opens one for a recipe's `save_folder`, `find_run` for what a script is to
read. The idea: all of the house knows folders alone. A folder that stands for a URL is known here,
by process; whoever looks for a checkpoint, or opens a file of one that is not on this disk, asks
here and gets it from the store. What is told to users has the URL (`named`).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from llmfoundry.data.fetch.object_store import ObjectStore
from llmfoundry.data.fetch.remote_file import open_parts
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.recipe.front.paths import show

CHECKPOINTS = "checkpoints"
CACHE = "~/.cache/llmfoundry"
_KEPT = 40  # characters of a run's name in its folder's


def _nothing() -> None:
    """Before a commit, of a run that is only read."""


@dataclass
class StoredRun:
    """One run of this process.

    Attributes:
        store: its URL.
        folder: the working copy.
        sizes: bytes of files in the store, by name, as far as they are known.
        local_copies: checkpoints that stay on each machine's disk.
        before_commit: called on the main process before a checkpoint counts; raises where it may
            not.
    """

    store: ObjectStore
    folder: Path
    sizes: dict[str, int] = field(default_factory=dict)
    local_copies: int = 0
    before_commit: Callable[[], None] = _nothing

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return self.store.url

    def name(self, path: Path) -> str:
        """A file's name in the store."""
        return path.relative_to(self.folder).as_posix()

    def learn(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Take over the sizes of a folder's files."""
        self.sizes |= {self.name(folder / file): size for file, size in sizes.items()}

    @property
    def is_written(self) -> bool:
        """Whether this process trains in it."""
        return self.before_commit is not _nothing

    def identity(self) -> str:
        """What tells this folder from that of any other machine, container or user."""
        status = self.folder.stat()
        return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


_opened: dict[Path, StoredRun] = {}


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a recipe's text names an address, rather than a file or a folder."""
    return "://" in str(place)


def open_run(url: str, options: FetchOptions, *, below: Path, key: str) -> StoredRun:
    """The run at a URL, which works in a folder of its own `below`; the same on a second call.

    Raises:
        UserError: the URL's protocol is not known, or its package or a setting is missing.
    """
    store = ObjectStore(url, options, key=key)
    name = store.url.rpartition("/")[2][:_KEPT] or "run"
    digest = hashlib.blake2b(store.identity.encode(), digest_size=8).hexdigest()
    folder = below.expanduser().absolute() / f"{name}-{digest}"
    return _opened.setdefault(folder, StoredRun(store, folder))


def find_run(url: str, key: str, *, options: FetchOptions | None = None) -> Path:
    """The folder that stands for a URL, of a run or of one checkpoint, to be read.

    Args:
        url: such as s3://bucket/runs/mine, or s3://bucket/runs/mine/checkpoints/ba0000100.
        key: the recipe's.
        options: how the store is asked; None: as the environment says.
    """
    options = options or FetchOptions()
    parts = url.rstrip("/").split("/")
    inner: list[str] = []
    if parts[-1].startswith("ba") and parts[-1][2:].isdecimal():
        inner = parts[-2:] if parts[-2] == CHECKPOINTS else parts[-1:]
    base = "/".join(parts[: len(parts) - len(inner)])
    run = open_run(base, options, below=Path(options.cache_folder) / "runs-read", key=key)
    return run.folder.joinpath(*inner)


def stored_run(path: Path) -> StoredRun | None:
    """The run at a URL that a folder or a file belongs to; None: what is there is all."""
    if not _opened:
        return None
    return next((_opened[at] for at in (path, *path.parents) if at in _opened), None)


def named(path: Path) -> str:
    """What a user calls a file or a folder: its URL, or its path."""
    run = stored_run(path)
    if run is None:
        return show(path)
    return run.url if path == run.folder else f"{run.url}/{run.name(path)}"


def open_file(path: Path) -> IO[bytes]:
    """A file of a checkpoint, to read at any place: here, or in the store.

    Raises:
        UserError: the store does not give it.
        OSError: it cannot be read here.
    """
    run = stored_run(path)
    if run is None or path.is_file():
        return path.open("rb")
    name = run.name(path)
    size = run.sizes.get(name)
    if size is None:
        size = run.store.size(name)
    if size is None:
        raise UserError(f"{named(path)}: is not there")
    return open_parts(run.store, name, size)


def local_size() -> int:
    """Processes of this machine, where a launcher tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def record(value: Mapping[str, object]) -> bytes:
    """A few facts as a file of a store."""
    return json.dumps(value).encode() + b"\n"
