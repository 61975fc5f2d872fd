"""`ShardFolder`: the files of a data set, local or at a URL, as complete, verified local paths.

The readers of MDS and of token shards use a `ShardFolder` and never learn whether a file is read in
place or from the local shard cache. Shards never change, so a cache can be copied, kept and deleted
file by file at any time. `download.py` fetches files, on demand or ahead of use, `limits.py` keeps
the cache within its limits, `data/store.py` talks to the store.

Names and sizes do not distinguish one data set's files from another's, so a folder of copies
belongs to one remote and one index (`Copies`). They are named in `.copies.json`, and the index
itself lies beside it, unchanged. A run with others is refused before a copy is read or written; but
where every file has a hash to compare with, the hashes decide.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from llmfoundry.data import store_errors
from llmfoundry.data.file_spec import COPIES, INDEX, CompressedFile, FetchOptions, FileSpec
from llmfoundry.data.shard_cache.download import Prefetcher, ShardFetcher, damage
from llmfoundry.data.shard_cache.limits import ShardCache, reports_cache_folder, take_turn
from llmfoundry.data.store import Store
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, atomic_file, lock, open_guarded, parse_json

__all__ = ["CompressedFile", "FetchOptions", "FileSpec", "ShardFolder"]

_COPIES = "remote"  # the folder of copies, below the cache folder
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_RECORD = 1 << 16
_KEYS = ("remote", "index")  # of a record


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
    """A folder of files that never change. It may be pickled; a fork may use it, but for buckets.

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

    @property
    def is_in_place(self) -> bool:
        """Whether its files are read where they lie on this machine."""
        return self._place is not None

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
        path = self._place / name
        try:
            with open_guarded(path) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(path, error) from error

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
            with open_guarded(path) as file:
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


class Index(Protocol):
    """What is needed of an index.

    Attributes:
        digest: of all that it specifies.
        is_packed: some of its files are kept compressed.
        n_shards: files.
        unhashed: numbers of the files that have samples and no hash.
    """

    @property
    def digest(self) -> str: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def n_shards(self) -> int: ...
    @property
    def unhashed(self) -> Sequence[int]: ...

    def spec(self, n: int) -> FileSpec:
        """File number `n`."""

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Index:
        """Parse an index.json."""


AnyIndex = TypeVar("AnyIndex", bound=Index)


class Copies:
    """The copies in one folder, of one remote."""

    def __init__(self, folder: Path, remote: str, *, mode: int) -> None:
        """Nothing is read yet.

        Args:
            folder: of the copies.
            remote: what distinguishes their remote from all others, without secrets.
            mode: permissions of what is written down.
        """
        self._folder, self._remote, self._mode = folder, remote, mode
        self._record = folder / COPIES

    def claim(
        self, index: Index, *, hashes_decide: bool, is_same: Callable[[FileSpec], bool]
    ) -> None:
        """Whether these copies are of the remote and of this index; an unused folder becomes so.

        Args:
            index: of the remote.
            hashes_decide: each file is compared with its hash when it is opened.
            is_same: whether a copy is what the remote has; asked of some whose remote nobody knows.

        Raises:
            UserError: they are of another one.
            OSError: it cannot be written down.
        """
        mine = {"remote": self._remote, "index": index.digest}
        with self._locked() as (record, written):
            if written == mine:
                return
            if not written:
                self._adopt(index, hashes_decide=hashes_decide, is_same=is_same)
            elif not hashes_decide or not set(written.items()) & set(mine.items()):
                raise self._of_another(written)
            if record is not None:
                text = json.dumps(mine).encode() + b"\n"
                os.truncate(record.descriptor, 0)
                os.pwrite(record.descriptor, text, 0)

    def keep_index(self, data: bytes) -> None:
        """Keep the index of the folder, once it is claimed; a run starts with it without the store.

        Raises:
            OSError: it cannot be written.
        """
        path = self._folder / INDEX
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                return
        try:
            with atomic_file(path) as file:
                os.fchmod(file.fileno(), self._mode)
                file.write(data)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise

    def has_index(self) -> bool:
        """Whether an index was kept."""
        return (self._folder / INDEX).exists()

    def whole_index(self, parse: Callable[[bytes], AnyIndex]) -> AnyIndex | None:
        """The index that was kept, if it is that of the remote and all its files are here."""
        with contextlib.suppress(OSError, UserError):
            index = parse((self._folder / INDEX).read_bytes())
            written = _read(self._record.read_bytes()[:_LONGEST_RECORD])
            if written != {"remote": self._remote, "index": index.digest}:
                return None
            specs = map(index.spec, range(index.n_shards))
            if all((self._folder / s.name).stat().st_size == s.n_bytes for s in specs):
                return index
        return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[LockedFile | None, dict[str, str]]]:
        """The record and its contents; None: it is not ours to write."""
        try:
            record = lock(self._record, mode=self._mode)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            yield None, _read(self._record.read_bytes() if self._record.exists() else b"")
            return
        with record:
            yield record, _read(os.pread(record.descriptor, _LONGEST_RECORD, 0))

    def _adopt(
        self, index: Index, *, hashes_decide: bool, is_same: Callable[[FileSpec], bool]
    ) -> None:
        """Check copies of unknown origin: another program's, or copied by hand."""
        kept = self._folder / INDEX
        if kept.exists():
            try:
                theirs = type(index).from_bytes(kept.read_bytes(), source=str(kept)).digest
            except UserError:
                theirs = ""
            if theirs != index.digest:
                raise UserError(
                    f"{kept}: is the index of other data than {self._remote}/{INDEX}; write"
                    " another local, or remove what is there"
                )
        if hashes_decide:
            return
        here = [n for n in range(index.n_shards) if (self._folder / index.spec(n).name).exists()]
        for n in some_of(here):
            spec = index.spec(n)
            if not is_same(spec):
                raise UserError(
                    f"{self._folder / spec.name}: is not what {self._remote} has by that name;"
                    " write another local, or remove what is there"
                )

    def _of_another(self, written: dict[str, str]) -> UserError:
        if written["remote"] == self._remote:
            return UserError(
                f"{self._folder}: holds copies of {self._remote} from before its index was"
                " written anew, and without hashes nobody can know which are still right; remove"
                " the folder, or write another local"
            )
        return UserError(
            f"{self._folder}: holds copies of {written['remote']}, not of {self._remote}; write"
            " another local, or remove the folder"
        )


def some_of(numbers: Sequence[int]) -> list[int]:
    """The first, the middle and the last, as far as there are so many."""
    return [numbers[n] for n in sorted({0, len(numbers) // 2, len(numbers) - 1})] if numbers else []


def _read(text: bytes) -> dict[str, str]:
    """The contents of a record; nothing, if it is garbage."""
    with contextlib.suppress(ValueError):
        found = parse_json(text)
        if isinstance(found, dict) and all(isinstance(found.get(k), str) for k in _KEYS):
            return {key: found[key] for key in _KEYS}
    return {}
