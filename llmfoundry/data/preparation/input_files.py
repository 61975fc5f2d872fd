"""Input files, here or at URLs: which a URL names, what is known of them, their bytes in order.

`readers` finds and reads them. The one idea: a reader sees chunks of bytes and never asks where
they come from, so every format can be read from every place, compressed or not.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.preparation.bad_rows import BadRow, OnBadRow, raise_bad_row, too_long
from llmfoundry.data.store import MissingError, Store
from llmfoundry.data.store_address import without_signature
from llmfoundry.errors import UserError, import_optional
from llmfoundry.recipe.source import hidden_part

_WEB = ("https://", "http://")
CHUNK = 1 << 20  # bytes read at a time
_LONGEST = 10**9  # bytes of a row; data.max_row_size
_ZSTD_CHUNK = 1 << 10  # becomes 32 MiB at most: four bytes are a block of 128 KiB, if it is all one
_ZSTD_WINDOW = 1 << 31  # bytes; of zstd --long=31, the largest
# What a name may stand for beside a file: reading it could wait forever.
_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISDIR: "a folder",
}


def ignore(n_bytes: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class InputFile:
    """A file of a corpus.

    Attributes:
        name: path or URL, without a signature.
        size: bytes.
        stamp: version of the content: time of the last change in nanoseconds, or the store's
            version of the object.
        signed: the URL with its signature, if it has one.
    """

    name: str
    size: int
    stamp: int | str
    signed: str = ""

    @property
    def facts(self) -> list[str | int]:
        """Return the values that identify the file and its version."""
        return [self.name, self.size, self.stamp]

    @classmethod
    def here(cls, path: Path) -> InputFile:
        """Return a local file.

        Raises:
            UserError: the file cannot be read, or its path is not UTF-8.
        """
        if path_text(str(path)) != str(path):
            raise UserError(f"{path_text(str(path))}: this path is not UTF-8; rename it")
        with read_errors(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = next((n for known, n in _KINDS.items() if known(status.st_mode)), "no file")
            raise UserError(f"{path}: is {kind}; write its content to a file")
        return cls(str(path), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class InputRange:
    """A file to read, or a part of it.

    Attributes:
        file: which.
        start: where the part begins: a byte of lines, a row group of parquet.
        stop: where it ends; None: with the file.
        n_bytes: size of the range in the file.
        longest: limit on the bytes of a decompressed row; `data.max_row_size`.
        seen: called with the number of bytes read since the last call, for a progress bar.
        options: options of downloads.
        on_bad_row: called with each row that cannot be read; blank text replaces the row.
    """

    file: InputFile
    start: int = 0
    stop: int | None = None
    n_bytes: int = 0
    longest: int = _LONGEST
    seen: Callable[[int], None] = ignore
    options: FetchOptions = field(default_factory=FetchOptions)
    on_bad_row: OnBadRow = raise_bad_row

    @property
    def name(self) -> str:
        """Return the path or URL of the file."""
        return self.file.name

    def open(self) -> IO[bytes]:
        """Open the file; it is seekable."""
        if "://" in self.name:
            return open_url(self.file.signed or self.name, self.file.size, self.options)
        with read_errors(self.name):
            return Path(self.name).open("rb")

    def chunks(self, place: int = 0) -> Iterator[bytes]:
        """Yield the stored bytes from offset `place` to the end of the file, also after `stop`."""
        left = self.n_bytes
        with self.open() as file, read_errors(self.name):
            if place:
                file.seek(place)
            while chunk := file.read(CHUNK):
                self.seen(min(left, len(chunk)))
                left = max(0, left - len(chunk))
                yield chunk

    def unpacked(self, place: int = 0) -> Iterator[bytes]:
        """Yield the bytes of `chunks`, or of a whole .gz or .zst file, decompressed."""
        for name in file_names(self.name.lower()):
            if unpack := _UNPACK.get(name[name.rfind(".") :]):
                return unpack(self)
        return self.chunks(place)

    def whole(self) -> bytes:
        """Return all bytes of the file, decompressed."""
        parts, size = [], 0
        for part in self.unpacked():
            parts.append(part)
            size += len(part)
            if size > self.longest:
                raise self.too_long(self.name)
        return b"".join(parts)

    def too_long(self, where: str) -> BadRow:
        """Return the error for a row that exceeds the length limit."""
        return too_long(where, self.longest)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that begin within the range, without line ends.

        A line that exceeds the length limit is reported as a bad row and yielded as a blank line.
        """
        place = max(0, self.start - 1)
        lines = self._split(self.unpacked(place))
        if self.start:  # skip the end of a line that begins in the previous range
            place += next(lines, (b"", 0))[1] + 1
        for number, (line, size) in enumerate(lines, start=1):
            if self.stop is not None and place >= self.stop:
                return
            if size > self.longest:
                before = self.lines_before() if self.start else 0
                self.on_bad_row(self.too_long(f"{self.name}:{before + number}"))
            yield line
            place += size + 1

    def lines_before(self) -> int:
        """Return the number of lines before the range; the first call reads them. For messages."""
        return self._n_lines_before

    @cached_property
    def _n_lines_before(self) -> int:
        with self.open() as file:
            left, count = self.start, 0
            while left and (chunk := file.read(min(CHUNK, left))):
                left, count = left - len(chunk), count + chunk.count(b"\n")
        # A line that begins before the range and ends in it belongs to the previous range.
        return count if not self.start or chunk.endswith(b"\n") else count + 1

    def _split(self, chunks: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield each line and its size; a line that is too long is yielded as b""."""
        rest: list[bytes] = []
        size = 0
        for chunk in chunks:
            *complete, last = chunk.split(b"\n")
            for part in complete:
                size += len(part)
                yield b"".join([*rest, part]) if size <= self.longest else b"", size
                rest, size = [], 0
            size += len(last)
            rest = [*rest, last] if size <= self.longest else []
            del chunk, last  # free memory before the next chunk is decompressed
        if size:
            yield b"".join(rest) if size <= self.longest else b"", size


def path_text(path: str) -> str:
    r"""Return a path as text; bytes that are not UTF-8 are written as \udcff."""
    return path.encode(errors="backslashreplace").decode()


@contextmanager
def read_errors(name: str | Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from error


def decode(name: str, data: bytes, encoding: str = "utf-8", *, is_start: bool = True) -> str:
    """The text of `data`; where a file starts with it, without the byte-order mark."""
    skipped = 0
    if is_start and data.startswith(codecs.BOM_UTF8):
        data, skipped = data[3:], 3
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        byte = error.object[error.start : error.start + 1].hex()
        where = f"byte {skipped + error.start} (0x{byte})"
        if is_start and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            where = f"it is UTF-16, by its byte-order mark: {where}"
        raise UserError(
            f"{name}: {where} is not {encoding}: {error.reason}; convert the file to UTF-8"
        ) from error
    except (LookupError, ValueError, OverflowError) as error:  # of encodings that a file declares
        raise UserError(f"{name}: is not {encoding}: {error}; convert the file to UTF-8") from error


def as_file(chunks: Iterable[bytes]) -> io.BufferedReader:
    """Chunks as a file that can be read once."""
    return io.BufferedReader(_Chunks(iter(chunks)), CHUNK)


class _Chunks(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        now = self._rest[: len(buffer)]
        buffer[: len(now)] = now
        self._rest = self._rest[len(now) :]
        return len(now)


def _gunzip(source: InputRange) -> Iterator[bytes]:
    try:
        with as_file(source.chunks()) as packed, gzip.GzipFile(fileobj=packed) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{source.name}: {_broken('gzip', error)}") from error


def _unzstd(source: InputRange) -> Iterator[bytes]:
    """Frame by frame: the library's own stream reader takes a truncated file for a complete one.

    And in small steps, because it has no bound for what a step makes.
    """
    zstandard = import_optional("zstandard", f"{source.name}:", extra="data")
    library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame, begun = library.decompressobj(), False
    try:
        for chunk in source.chunks():
            for start in range(0, len(chunk), _ZSTD_CHUNK):
                packed = chunk[start : start + _ZSTD_CHUNK]
                while packed:
                    begun = True
                    yield frame.decompress(packed)
                    packed = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame, begun = library.decompressobj(), False
    except zstandard.ZstdError as error:
        raise UserError(f"{source.name}: {_broken('zstd', error)}") from error
    if begun:
        raise UserError(f"{source.name}: {_broken('zstd', 'it ends inside a frame')}")


def _broken(kind: str, why: object) -> str:
    return f"not a complete {kind} file: {why}; copy or download it again"


_UNPACK: dict[str, Callable[[InputRange], Iterator[bytes]]] = {".gz": _gunzip, ".zst": _unzstd}
PACKED = ("", *_UNPACK)
"""Suffixes that may follow the suffix of a text file."""


def file_names(name: str) -> list[str]:
    """Return the names whose suffix may be the file's; a web address also without its query."""
    if not name.startswith(_WEB):
        return [name]
    without_query = name.partition("?")[0]
    return list(dict.fromkeys([without_query, name]))  # each once


@dataclass(frozen=True)
class Listing:
    """Files at the URL of a file, a folder or a glob.

    Attributes:
        is_file: whether the URL names a single file.
        files: sorted by name.
        hidden: URLs of files and folders that are left out.
    """

    is_file: bool
    files: list[InputFile]
    hidden: list[str]


def list_url(url: str, options: FetchOptions, *, key: str = "data.paths") -> Listing:
    """Return the files at a URL.

    Raises:
        MissingError: no file is there.
        UserError: the store cannot be reached.
    """
    store = Store(url, options, key=key)
    single, found = store.find()
    if not found:
        raise MissingError(f"{key}: {url}: no file is there; correct the URL")
    base, root = url.rstrip("/"), store.root
    named = f"{base}/"
    if glob.has_magic(url):
        named, base, root = base, _before_magic(base), _before_magic(root)
    files, hidden = [], dict[str, None]()
    for name, entry in found.items():
        place = base + name.removeprefix(root)
        if not single and (part := hidden_part(place, named)):
            hidden[part] = None
            continue
        if entry.size is None:  # it would be read as empty
            raise UserError(
                f"{key}: {url}: its server does not say how long {name} is; copy it here"
            )
        name = without_signature(place)
        files.append(InputFile(name, entry.size, entry.version, place if name != place else ""))
    return Listing(single, files, list(hidden))


def open_url(url: str, size: int, options: FetchOptions) -> io.BufferedReader:
    """Open a remote file of known size for random access."""
    path, mark, query = url.partition("?") if url.startswith(_WEB) else (url, "", "")
    folder, _, name = path.rpartition("/")
    return Store(folder, options).open(f"{name}{mark}{query}", size)


def _before_magic(path: str) -> str:
    """Return the part of a glob before its first special character."""
    return path[: min(path.find(c) for c in "*?[" if c in path)]
