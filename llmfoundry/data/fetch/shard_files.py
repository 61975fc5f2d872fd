"""Files of a data set, here or at a URL, as complete and verified files at local paths.

The readers of MDS and of token shards read through a `ShardFolder`; they never see whether a file
is read in place or is a copy. One idea: a folder of files that never change can be copied, kept and
deleted file by file by anyone at any time. `shard_fetch` copies, `shard_cache` keeps the account
of the machine's copies, `prefetch` copies ahead of use, `remote` talks to the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry.data import store_errors
from llmfoundry.data.fetch.copies import AnyIndex, Copies, Index
from llmfoundry.data.fetch.prefetch import Prefetcher
from llmfoundry.data.fetch.request_rate import take_turn
from llmfoundry.data.fetch.shard_cache import ShardCache, reports_cache_folder
from llmfoundry.data.fetch.shard_fetch import ShardFetcher, damage
from llmfoundry.data.file_spec import INDEX, CompressedFile, FetchOptions, FileSpec
from llmfoundry.data.store import Store
from llmfoundry.errors import UserError

__all__ = ["CompressedFile", "FetchOptions", "FileSpec", "ShardFolder"]

_COPIES = "remote"  # the folder of copies, below the cache folder


@dataclass
class _Process:
    """What only one process can use: threads, locks, connections."""

    pid: int
    folder: Path
    remote: Store
    copies: Copies
    fetcher: ShardFetcher
    prefetcher: Prefetcher


class ShardFolder:
    """A folder of files that never change. It may be pickled, and used by a forked process.

    Attributes:
        url: where the files are.
        silence: why the index was not read there; "": it was.
    """

    def __init__(self, url: str, options: FetchOptions, *, place: str | None, kept: Path | None):
        """Use `open`.

        Args:
            url: where the files are; for messages, too.
            options: how to fetch.
            place: the folder, if they are read there.
            kept: where copies go; None: a folder of the cache.
        """
        self.url = url
        self._options = options
        self._place = None if place is None else Path(place)
        self._kept = kept
        self.silence = ""
        self._checked: set[str] = set()
        self._process: _Process | None = None

    @classmethod
    def open(cls, remote: str | None, local: str | None, options: FetchOptions) -> ShardFolder:
        """The folder of these files; nothing is read yet.

        Args:
            remote: a URL, or a path on this machine.
            local: where its files are kept; without remote: where they are.
            options: how to fetch.
        """
        assert remote is not None or local is not None, "the recipe asks for one of them"
        options = replace(options, cache_folder=_absolute(options.cache_folder))
        here = None if local is None else _absolute(local)
        source = here if remote is None else remote.removeprefix("file://")
        assert source is not None, "one of them is given"
        if "://" in source:
            url = source.rstrip("/")
            return cls(url, options, place=None, kept=None if here is None else Path(here))
        source = _absolute(source)
        if here is None or here == source:
            return cls(source, options, place=source, kept=None)
        return cls(source, options, place=None, kept=Path(here))

    def read_index(self, parse: Callable[[bytes], AnyIndex]) -> AnyIndex:
        """The folder's index, from the store.

        Where the store cannot be asked, but all shards are here, that of an earlier time;
        `silence` then says why.

        Raises:
            UserError: it is not there, cannot be had, or is not that of the copies that are here.
        """
        if self._place is not None:
            index = parse(self.read(INDEX))
            self.claim(index)
            return index
        here = self._here()
        is_kept = here.copies.has_index()
        try:
            data = here.remote.read(INDEX, once=is_kept)
        except UserError as error:
            if not is_kept or store_errors.is_missing(error.__cause__ or error):
                raise
            kept = here.copies.whole_index(parse)
            if kept is not None:
                self.silence = f"{error}; its index is that of {here.folder}, which has all shards"
                return kept
            data = here.remote.read(INDEX)
        index = parse(data)
        self.claim(index)
        with reports_cache_folder(here.folder):
            here.copies.keep_index(data)
        return index

    def claim(self, index: Index) -> None:
        """Whether the copies on this machine, if any, are of this index: asked before one is read.

        Raises:
            UserError: they are of other data.
        """
        if self._place is not None and not index.is_packed:
            return
        here = self._here()
        with reports_cache_folder(here.folder):
            here.copies.claim(
                index,
                hashes_decide=self._options.validate_hash and not len(index.unhashed),
                is_same=here.fetcher.is_same,
            )

    def read(self, name: str) -> bytes:
        """A small file's bytes; never from a copy.

        Raises:
            UserError: it is not there, or cannot be had.
        """
        if self._place is None:
            return self._here().remote.read(name)
        try:
            return (self._place / name).read_bytes()
        except OSError as error:
            raise _unreadable(self._place / name, error) from error

    def get(self, spec: FileSpec) -> Path:
        """The complete and verified file; waits until it is here.

        Raises:
            UserError: it cannot be had; the shard, the cause, and what to do.
        """
        with self.pin(spec) as path:
            return path

    def pin(self, spec: FileSpec) -> AbstractContextManager[Path]:
        """`get`, and the file is not evicted while the context is open."""
        return self._pinned(spec)

    @contextlib.contextmanager
    def _pinned(self, spec: FileSpec) -> Iterator[Path]:
        if self._is_in_place(spec):
            yield self._get_in_place(spec)
            return
        here = self._here()
        here.prefetcher.ask(spec.name)
        with here.fetcher.hold(spec, check=here.prefetcher.check) as held:
            here.prefetcher.use(spec.name)
            yield held.path

    def prefetch(self, specs: Iterator[FileSpec]) -> None:
        """Fetch these files, in this order, before they are asked for; replaces the last queue.

        What is here already is left alone, so for a folder that is read in place it does nothing.

        Args:
            specs: may be endless; another thread takes from it.

        Raises:
            UserError: what a file of the last queue failed with, if it was not asked for since.
        """
        if self._options.prefetch > 0 and self._place is None:
            self._here().prefetcher.prefetch(specs)

    def close(self) -> None:
        """End what runs in the background."""
        if self._process is not None and self._process.pid == os.getpid():
            self._process.prefetcher.close()
        self._process = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process": None, "_checked": set()}

    def _is_in_place(self, spec: FileSpec) -> bool:
        if self._place is None:
            return False
        return spec.packed is None or (self._place / spec.name).exists()

    def _get_in_place(self, spec: FileSpec) -> Path:
        assert self._place is not None, "asked for a file that is read in place"
        path = self._place / spec.name
        checked = spec.name in self._checked or not self._options.validate_hash
        try:
            with path.open("rb") as file:
                wrong = damage(file, spec.n_bytes, () if checked else spec.hashes)
        except OSError as error:
            raise _unreadable(path, error) from error
        if wrong is not None:
            raise UserError(f"{path}: {wrong}; the file is damaged: copy or write it again")
        self._checked.add(spec.name)
        return path

    def _here(self) -> _Process:
        if self._process is None or self._process.pid != os.getpid():
            self._process = self._start()
        return self._process

    def _start(self) -> _Process:
        options = self._options
        folder = Path(options.cache_folder, _COPIES)
        cache = ShardCache(folder, limit=options.cache_limit)

        def turn() -> float:
            assert options.requests_per_second is not None
            with reports_cache_folder(folder):
                rate = options.requests_per_second
                return take_turn(folder / ".rate", per_second=rate, mode=cache.file_mode)

        limited = options.requests_per_second is not None and "://" in self.url
        remote = Store(
            self.url if "://" in self.url else f"file://{self.url}",
            options,
            before_request=turn if limited else float,
        )
        kept = self._kept or folder / _name(remote.identity)
        fetcher = ShardFetcher(remote, kept, cache=cache, options=options)
        prefetcher = Prefetcher(fetcher.fetch_ahead, budget=options.prefetch)
        with reports_cache_folder(kept):
            cache.make_folder(kept)
        copies = Copies(kept, remote.identity, mode=cache.file_mode)
        return _Process(os.getpid(), kept, remote, copies, fetcher, prefetcher)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _name(identity: str) -> str:
    """A folder's name: its last part, for people, and what distinguishes it from all others."""
    last = identity.split()[0].partition("?")[0].rpartition("/")[2] or "data"
    return f"{last[:40]}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot be read: {error.strerror}; check data.remote or local (or the stream's)"
        " and split"
    )
