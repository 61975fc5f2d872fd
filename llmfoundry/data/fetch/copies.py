"""Whose copies a folder holds: the remote and its index, written down beside them.

`ShardFolder` asks before it reads or writes a copy. One idea: names and sizes do not distinguish
one data set's files from another's, so a folder of copies belongs to one remote and one index. They
are named in `.copies.json`, and the index itself lies beside it, unchanged. A run with others is
refused; but where every file has a hash to compare with, the hashes decide.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from llmfoundry.data.file_spec import COPIES, INDEX, FileSpec
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, atomic_file, lock

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_RECORD = 1 << 16


class Index(Protocol):
    """What is needed of an index.

    Attributes:
        digest: of all that it specifies.
        is_packed: some of its files are kept compressed.
        n_shards: files.
        unhashed: numbers of the files that have samples and no hash.
    """

    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def is_packed(self) -> bool: ...  # noqa: D102
    @property
    def n_shards(self) -> int: ...  # noqa: D102
    @property
    def unhashed(self) -> Sequence[int]: ...  # noqa: D102

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
                theirs = type(index).from_bytes(kept.read_bytes(), source=INDEX).digest
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
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(found.get(k), str) for k in _KEYS):
            return {key: found[key] for key in _KEYS}
    return {}


_KEYS = ("remote", "index")
