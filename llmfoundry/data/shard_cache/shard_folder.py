"""Files of a dataset, local or at a URL, as complete and verified local paths.

Entry point: `ShardFolder`, which the readers of MDS and of token shards use. They do not know
whether a file is read in place or from the local shard cache. Shards never change, so files of a
cache can be copied and deleted at any time. `download.py` downloads files, on demand or ahead of
use. `limits.py` keeps the cache within its limits. `data/store.py` sends the requests.

Names and sizes do not identify a dataset, so a local shard cache belongs to one remote and one
index (`Copies`). The file `.copies.json` records both, and a copy of the index is next to it. A
mismatch is an error before any file is read or written, unless the index has a hash of every file:
then the hashes decide.
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

_COPIES = "remote"  # name of the local shard cache in the cache folder
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_RECORD = 1 << 16
_KEYS = ("remote", "index")  # keys of .copies.json


@dataclass
class _Process:
    """Threads, locks and connections, which belong to one process."""

    pid: int
    folder: Path
    remote: Store
    copies: Copies
    fetcher: ShardFetcher
    prefetcher: Prefetcher


class ShardFolder:
    """Folder of files that never change.

    It can be pickled, and used after a fork unless it is in a bucket.

    Attributes:
        url: URL or path of the files.
        silence: why the index was read from the local shard cache; "": it was read from `url`.
    """

    def __init__(
        self,
        url: str,
        options: FetchOptions,
        *,
        in_place_folder: Path | None,
        cache_folder: Path | None,
    ):
        """Initialize; callers use `open`.

        Args:
            url: URL or path of the files.
            options: options of downloads.
            in_place_folder: folder whose files are read in place; None: files are downloaded.
            cache_folder: folder of the local shard cache; None: a subfolder of the cache folder of
                `options`.
        """
        self.url = url
        self._options = options
        self._in_place_folder = in_place_folder
        self._cache_folder = cache_folder
        self.silence = ""
        self._checked: set[str] = set()
        self._process: _Process | None = None

    @classmethod
    def open(cls, remote: str | None, local: str | None, options: FetchOptions) -> ShardFolder:
        """Return the folder of a recipe's `remote` and `local`; nothing is read yet.

        Args:
            remote: URL or local path of the files.
            local: local shard cache of `remote`; without `remote`, path of the files.
            options: options of downloads.
        """
        assert remote is not None or local is not None, "the recipe checks this"
        options = replace(options, cache_folder=_absolute(options.cache_folder))
        local_path = None if local is None else _absolute(local)
        source = local_path if remote is None else remote.removeprefix("file://")
        assert source is not None
        cache_folder = None if local_path is None else Path(local_path)
        if "://" in source:
            url = source.rstrip("/")
            return cls(url, options, in_place_folder=None, cache_folder=cache_folder)
        source = _absolute(source)
        if local_path is None or local_path == source:
            return cls(source, options, in_place_folder=Path(source), cache_folder=None)
        return cls(source, options, in_place_folder=None, cache_folder=cache_folder)

    @property
    def is_in_place(self) -> bool:
        """Return whether files are read in place, without a local shard cache."""
        return self._in_place_folder is not None

    def read_index(self, parse: Callable[[bytes], AnyIndex]) -> AnyIndex:
        """Return the parsed index of the store.

        If the store cannot be reached but the local shard cache is complete, the index there is
        used, and `silence` has the reason.

        Raises:
            UserError: the index is missing, cannot be read, or does not match the local shard
                cache.
        """
        if self._in_place_folder is not None:
            index = parse(self.read(INDEX))
            self.claim(index)
            return index

        # with a copy of the index, one request is enough to find that the store is unreachable
        process = self._this_process()
        has_copy = process.copies.has_index()
        try:
            data = process.remote.read(INDEX, once=has_copy)
        except UserError as error:
            if not has_copy or store_errors.is_missing(error.__cause__ or error):
                raise
            copied_index = process.copies.whole_index(parse)
            if copied_index is not None:
                reason = f"its index is that of {process.folder}, which has all shards"
                self.silence = f"{error}; {reason}"
                return copied_index
            data = process.remote.read(INDEX)

        # check and store it
        index = parse(data)
        self.claim(index)
        with reports_cache_folder(process.folder):
            process.copies.keep_index(data)
        return index

    def claim(self, index: Index) -> None:
        """Check that the local shard cache belongs to an index, before any file is read.

        Raises:
            UserError: the cache belongs to other data.
        """
        if self._in_place_folder is not None and not index.is_packed:
            return
        process = self._this_process()
        with reports_cache_folder(process.folder):
            process.copies.claim(
                index,
                hashes_decide=self._options.validate_hash and not len(index.unhashed),
                is_same=process.fetcher.is_same,
            )

    def read(self, name: str) -> bytes:
        """Return the content of a small file, never from the local shard cache.

        Raises:
            UserError: the file is missing or cannot be read.
        """
        if self._in_place_folder is None:
            return self._this_process().remote.read(name)
        path = self._in_place_folder / name
        try:
            with open_guarded(path) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(path, error) from error

    def get(self, spec: FileSpec) -> Path:
        """Return the path of the complete and verified file; wait for its download.

        Raises:
            UserError: the file cannot be downloaded or is damaged.
        """
        with self.pin(spec) as path:
            return path

    def pin(self, spec: FileSpec) -> AbstractContextManager[Path]:
        """Return a context with the path of `get`, in which the file is not evicted."""
        return self._pinned(spec)

    @contextlib.contextmanager
    def _pinned(self, spec: FileSpec) -> Iterator[Path]:
        if self._is_in_place(spec):
            yield self._get_in_place(spec)
            return
        process = self._this_process()
        process.prefetcher.ask(spec.name)
        with process.fetcher.hold(spec, check=process.prefetcher.check) as file:
            process.prefetcher.use(spec.name)
            yield file.path

    def prefetch(self, specs: Iterator[FileSpec]) -> None:
        """Download files in this order before they are used; replace the previous queue.

        Existing files are skipped. A folder that is read in place has nothing to prefetch.

        Args:
            specs: files; may be endless. A background thread consumes it.

        Raises:
            UserError: a file of the previous queue failed and was not requested since.
        """
        if self._options.prefetch > 0 and self._in_place_folder is None:
            self._this_process().prefetcher.prefetch(specs)

    def close(self) -> None:
        """Stop the background threads."""
        if self._process is not None and self._process.pid == os.getpid():
            self._process.prefetcher.close()
        self._process = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process": None, "_checked": set()}

    def _is_in_place(self, spec: FileSpec) -> bool:
        if self._in_place_folder is None:
            return False
        # a compressed file is decompressed to the local shard cache
        return spec.packed is None or (self._in_place_folder / spec.name).exists()

    def _get_in_place(self, spec: FileSpec) -> Path:
        """Return the path of a file that is read in place, verified on first access."""
        assert self._in_place_folder is not None, "callers check `_is_in_place`"
        path = self._in_place_folder / spec.name
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

    def _this_process(self) -> _Process:
        """Return the objects of this process; create them on first use and after a fork."""
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
        cache_folder = self._cache_folder or folder / _name(remote.identity)
        fetcher = ShardFetcher(remote, cache_folder, cache=cache, options=options)
        prefetcher = Prefetcher(fetcher.fetch_ahead, budget=options.prefetch)
        with reports_cache_folder(cache_folder):
            cache.make_folder(cache_folder)
        copies = Copies(cache_folder, remote.identity, mode=cache.file_mode)
        return _Process(os.getpid(), cache_folder, remote, copies, fetcher, prefetcher)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _name(identity: str) -> str:
    """Return the name of a local shard cache: last part of the remote, for people, and a hash."""
    last = identity.split()[0].partition("?")[0].rpartition("/")[2] or "data"
    return f"{last[:40]}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot be read: {error.strerror}; check data.remote or local (or the stream's)"
        " and split"
    )


class Index(Protocol):
    """Interface of an index.

    Attributes:
        digest: hash of its content.
        is_packed: some files are stored compressed.
        n_shards: number of files.
        unhashed: numbers of the files that have samples but no hash.
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
        """Return the specification of file number `n`."""

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Index:
        """Parse an index.json."""


AnyIndex = TypeVar("AnyIndex", bound=Index)


class Copies:
    """Local shard cache of one remote, and its record `.copies.json`."""

    def __init__(self, folder: Path, remote: str, *, mode: int) -> None:
        """Initialize without reading.

        Args:
            folder: the local shard cache.
            remote: identity of the remote (`Store.identity`).
            mode: permissions of the files written here.
        """
        self._folder, self._remote, self._mode = folder, remote, mode
        self._record = folder / COPIES

    def claim(
        self, index: Index, *, hashes_decide: bool, is_same: Callable[[FileSpec], bool]
    ) -> None:
        """Check that the cache belongs to the remote and an index; record both in an empty one.

        Args:
            index: index of the remote.
            hashes_decide: each file is compared with its hash when it is opened. A cache of the
                same remote or of the same index is then accepted.
            is_same: downloads a file and compares it; called for a few files of unknown origin.

        Raises:
            UserError: the cache belongs to other data.
            OSError: the record cannot be written.
        """
        expected = {"remote": self._remote, "index": index.digest}
        with self._locked() as (record, recorded):
            if recorded == expected:
                return
            if not recorded:
                self._adopt(index, hashes_decide=hashes_decide, is_same=is_same)
            elif not hashes_decide or not set(recorded.items()) & set(expected.items()):
                raise self._mismatch(recorded)
            if record is not None:
                text = json.dumps(expected).encode() + b"\n"
                os.truncate(record.descriptor, 0)
                os.pwrite(record.descriptor, text, 0)

    def keep_index(self, data: bytes) -> None:
        """Store a copy of the index, with which a run can start if the store is unreachable.

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
        """Return whether there is a copy of the index."""
        return (self._folder / INDEX).exists()

    def whole_index(self, parse: Callable[[bytes], AnyIndex]) -> AnyIndex | None:
        """Return the copied index if it belongs to the remote and all its files are here."""
        with contextlib.suppress(OSError, UserError):
            index = parse((self._folder / INDEX).read_bytes())
            recorded = _read(self._record.read_bytes()[:_LONGEST_RECORD])
            if recorded != {"remote": self._remote, "index": index.digest}:
                return None
            specs = map(index.spec, range(index.n_shards))
            if all((self._folder / s.name).stat().st_size == s.n_bytes for s in specs):
                return index
        return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[LockedFile | None, dict[str, str]]]:
        """Yield the locked record (None: it is read-only) and its contents."""
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
        """Check files of unknown origin, written by another program or copied by hand.

        Raises:
            UserError: the index or a file differs from that of the remote.
        """
        # an index in the folder
        copy = self._folder / INDEX
        if copy.exists():
            try:
                copy_digest = type(index).from_bytes(copy.read_bytes(), source=str(copy)).digest
            except UserError:
                copy_digest = ""
            if copy_digest != index.digest:
                raise UserError(
                    f"{copy}: is the index of other data than {self._remote}/{INDEX}; write"
                    " another local, or remove what is there"
                )

        # without hashes, a few files
        if hashes_decide:
            return
        existing = []
        for n in range(index.n_shards):
            if (self._folder / index.spec(n).name).exists():
                existing.append(n)
        for n in some_of(existing):
            spec = index.spec(n)
            if not is_same(spec):
                raise UserError(
                    f"{self._folder / spec.name}: is not what {self._remote} has by that name;"
                    " write another local, or remove what is there"
                )

    def _mismatch(self, recorded: dict[str, str]) -> UserError:
        """Return the error for a cache of another remote or index."""
        if recorded["remote"] == self._remote:
            return UserError(
                f"{self._folder}: holds copies of {self._remote} from before its index was"
                " written anew, and without hashes nobody can know which are still right; remove"
                " the folder, or write another local"
            )
        return UserError(
            f"{self._folder}: holds copies of {recorded['remote']}, not of {self._remote}; write"
            " another local, or remove the folder"
        )


def some_of(numbers: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last of some numbers, without duplicates."""
    if not numbers:
        return []
    indices = sorted({0, len(numbers) // 2, len(numbers) - 1})
    return [numbers[n] for n in indices]


def _read(text: bytes) -> dict[str, str]:
    """Parse a record; an invalid one is empty."""
    with contextlib.suppress(ValueError):
        record = parse_json(text)
        if isinstance(record, dict) and all(isinstance(record.get(k), str) for k in _KEYS):
            return {key: record[key] for key in _KEYS}
    return {}
