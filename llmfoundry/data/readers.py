"""Files to documents: one reader a suffix, each a stream of (row, text), called by the corpus.

Whatever cannot be read raises a `UserError` that names the file and the line, row or byte. Files
of rows are streamed; only a text file, being one document, is read whole.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError

_CHUNK = 1 << 20  # bytes read at a time
_NEEDS_EXTRA = "is not installed; write: pip install 'llmfoundry-recipes[data]'"

Rows = Iterator[tuple[int | None, str]]


def read_file(path: Path, text_column: str) -> Rows:
    """Yield (row, text) of one file.

    Row is None for a text file, the line from 1 for .jsonl, the row from 0 for .parquet.

    Raises:
        UserError: the file, or a row of it, cannot be read.
    """
    reader = READERS[suffix_of(path)]
    try:
        yield from reader(path, text_column)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def suffix_of(path: Path) -> str:
    """The suffix that chooses a reader, .gz and .zst with the one before; may be no key of it."""
    name = path.name.lower()
    return next((known for known in READERS if name.endswith(known)), path.suffix.lower())


def decode(path: Path, data: bytes, encoding: str = "utf-8", *, skipped: int = 0) -> str:
    """The text of `data`; a byte-order mark at its start is no part of it.

    Raises:
        UserError: naming the first byte that is not text, counted from `skipped`.
    """
    if data.startswith(codecs.BOM_UTF8):
        data, skipped = data[3:], skipped + 3
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        where = f"byte {skipped + error.start} (0x{data[error.start]:02x})"
        raise UserError(
            f"{path}: {where} is not {encoding}: {error.reason}; convert the file to UTF-8"
        ) from error


def _text(path: Path, text_column: str) -> Rows:
    yield None, decode(path, path.read_bytes())


def _python(path: Path, text_column: str) -> Rows:
    """Python sources may declare another encoding in their first two lines (PEP 263)."""
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        decode(path, data)  # names the byte where that is the reason
        raise UserError(f"{path}: {error.msg}; convert the file to UTF-8") from error
    yield None, decode(path, data, "utf-8" if encoding == "utf-8-sig" else encoding)


def _jsonl(path: Path, text_column: str) -> Rows:
    for line, data in enumerate(_lines(path), start=1):
        if data.strip():
            yield line, _jsonl_text(f"{path}:{line}", data, text_column)
        else:
            yield line, ""


def _jsonl_text(where: str, data: bytes, text_column: str) -> str:
    try:
        row = json.loads(data.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the line (0x{error.object[error.start]:02x})"
        raise UserError(f"{where}: {byte} is not UTF-8: {error.reason}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}; every line must hold one object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds {_kind(row)}; every line must hold one JSON object")
    if text_column not in row:
        raise UserError(f"{where}: {_no_column(text_column, list(row))}")
    return _as_text(where, text_column, row[text_column])


def _parquet(path: Path, text_column: str) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: pyarrow {_NEEDS_EXTRA}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_column not in names:
                raise UserError(f"{path}: {_no_column(text_column, names)}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_column]):
                for value in batch.column(0):
                    yield row, parquet_text(f"{path}: row {row}", text_column, value)
                    row += 1
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a whole parquet file: {error}") from error


def parquet_text(where: str, text_column: str, value: Any) -> str:
    """The text of one pyarrow scalar.

    Raises:
        UserError: it is null, no string, or not UTF-8.
    """
    try:
        return _as_text(where, text_column, value.as_py())
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start} is not UTF-8: {error.reason}") from error


def _as_text(where: str, text_column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise UserError(
        f"{where}: {text_column!r} holds {_kind(value)}, not text;"
        " correct the row or choose another data.text_column"
    )


def _no_column(text_column: str, names: list[str]) -> str:
    return f"no column {text_column!r}; set data.text_column to one of: {', '.join(names)}"


def _kind(value: Any) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their end, decompressed on the way; only the longest line is in memory."""
    rest: list[bytes] = []
    for chunk in _OPEN.get(path.suffix.lower(), _plain)(path):
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for line in others:
            yield b"".join(rest)
            rest = [line]
    if last := b"".join(rest):
        yield last


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _gzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: {_broken('gzip', error)}") from error


def _zstd(path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own stream reader takes a truncated file for a whole one."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: zstandard {_NEEDS_EXTRA}") from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    try:
        for chunk in _plain(path):
            while chunk:
                begun = True
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    except zstandard.ZstdError as error:
        raise UserError(f"{path}: {_broken('zstd', error)}") from error
    if begun:
        raise UserError(f"{path}: {_broken('zstd', 'it ends inside a frame')}")


def _broken(kind: str, why: object) -> str:
    return f"not a whole {kind} file: {why}; copy or download it again"


_OPEN: dict[str, Callable[[Path], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstd}

READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".txt": _text,
    ".md": _text,
    ".py": _python,
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".jsonl.zst": _jsonl,
    ".parquet": _parquet,
}
