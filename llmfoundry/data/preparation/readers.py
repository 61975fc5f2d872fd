"""Readers of a corpus: split a source into spans, and yield (source, row, text) of a span.

Entry points: `Reader`, the interface that `Corpus` uses, and `FileReader` for files. A span can be
read independently. Files have a fixed order: that of `data.paths`, and sorted by name within each
folder and glob. `FILE_TYPES` has the reader of each file type, by suffix, and the function that
splits a large file. Input that cannot be read raises a `UserError` with file and line, row or byte.
Files of rows are streamed. A text file, which is one document, is read completely.
"""

from __future__ import annotations

import codecs
import csv
import functools
import glob
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.preparation.bad_rows import (
    BadRow,
    OnBadRow,
    WrongFormatError,
    bad_row,
    raise_bad_row,
    shortened,
    text_of_row,
)
from llmfoundry.data.preparation.columns import ROW, check_columns, kind_of, pick, unique_keys
from llmfoundry.data.preparation.input_files import (
    CHUNK,
    PACKED,
    InputFile,
    InputRange,
    as_file,
    decode,
    file_names,
    ignore,
    list_url,
    path_text,
)
from llmfoundry.data.preparation.parquet import cut_parquet, parquet_rows
from llmfoundry.errors import UserError
from llmfoundry.recipe.choice_table import ChoiceRecord, ChoiceTable, load_code
from llmfoundry.recipe.data import DataConfig, n_bytes
from llmfoundry.recipe.source import glob_matches, hidden_part, is_hidden

# Tests of the standard library contain deliberately broken sources; packages are not part of it.
_NOT_STDLIB = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)
_HEAD = 4096  # first bytes of a text file, which are checked for UTF-16
_HIDDEN_SHOWN = 3  # hidden names in a message
_LONGEST_FIELD = (
    2**31 - 1
)  # characters of a CSV field; the maximum of Python, whose default is less
# A WET file of Common Crawl has records: headers that begin with WARC/1.0 and end with an empty
# line, Content-Length bytes, two line ends. Records of type `conversion` contain a page, others
# metadata. The format is simple enough to parse here, without a library.
_LONGEST_LINE = 1 << 16
_MOST_HEADERS = 1 << 10  # lines of a record; Common Crawl's have about ten


@dataclass(frozen=True)
class Span:
    """Part of a corpus that can be read independently.

    Attributes:
        source: number of the file; 0 for a dataset.
        start: first byte, row group, row or shard.
        stop: end (exclusive); None: the end of the file.
        n_bytes: size of the input, for progress and load balance; None: unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    n_bytes: int | None = None


class Reader(Protocol):
    """Interface of readers.

    Attributes:
        files: input files in order; empty for a dataset.
        ignored: number of files of other types in the folders.
        hidden: files and folders that are skipped because of their names.
    """

    files: list[InputFile]
    ignored: int
    hidden: list[str]

    def facts(self) -> list[Any]:
        """Return values that identify the content without reading it."""

    def spans(self, longest: int | None) -> list[Span]:
        """Split the source into spans, in order, of at most about `longest` bytes if possible."""

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, Any, str]]:
        """Yield (source, row or None, text).

        `seen` is called with the number of input bytes read, `on_bad_row` with each bad row.
        """


class FileReader:
    """Reader of files, local or at URLs, by the `FILE_TYPES` of their suffixes."""

    def __init__(self, config: DataConfig) -> None:
        matched = find_files(config)
        self.files, self.ignored, self.hidden = matched.files, matched.ignored, matched.hidden
        self._column = config.text_column or "text"
        self._longest = n_bytes(config.max_row_size)
        self._options = FetchOptions.from_config(config)

    def facts(self) -> list[Any]:
        """Return paths, sizes and times of the files, and the code of plugins that read them."""
        kinds = {_kinds(tuple(FILE_TYPES))[suffix_of(file.name)] for file in self.files}
        codes = {FILE_TYPES.origins[kind].code for kind in kinds} - {""}
        return [*(file.facts for file in self.files), *sorted(codes)]

    def spans(self, longest: int | None) -> list[Span]:
        """Split large files: .jsonl at lines, .parquet at row groups, others not at all."""
        spans = []
        for number, file in enumerate(self.files):
            kind = FILE_TYPES.get(suffix_of(file.name))  # None for a compressed file
            if longest is None or file.size <= longest or kind is None or kind.cut is None:
                spans.append(Span(number, n_bytes=file.size))
            else:
                parts = kind.cut(self._input(Span(number, n_bytes=file.size)), longest)
                spans += [Span(number, *part) for part in parts]
        return spans

    def read(
        self,
        span: Span,
        seen: Callable[[int], None] = ignore,
        on_bad_row: OnBadRow = raise_bad_row,
    ) -> Iterator[tuple[str, FileRow | int | None, str]]:
        """Yield (file, row, text).

        The row is None for a text file, the line from 1 for .jsonl and .csv, the row from 0 for
        .parquet, and the record from 1 for .warc.wet.
        """
        source = replace(self._input(span), seen=seen, on_bad_row=on_bad_row)
        kind = file_type(source.name)
        assert kind is not None, source.name
        for row, text in load_code(kind.make)(source, self._column):
            yield source.name, row, text

    def _input(self, span: Span) -> InputRange:
        return InputRange(
            file=self.files[span.source],
            start=span.start,
            stop=span.stop,
            n_bytes=span.n_bytes or 0,
            longest=self._longest,
            options=self._options,
        )


@dataclass
class MatchedFiles:
    """Files that data.paths matches.

    Attributes:
        files: files to read, in order.
        ignored: number of files of other types in the folders.
        hidden: files and folders that are skipped because of their names.
    """

    files: list[InputFile]
    ignored: int = 0
    hidden: list[str] = field(default_factory=list)


def find_files(config: DataConfig) -> MatchedFiles:
    """Find the files of a corpus."""
    return _stdlib_files() if config.name == "python_stdlib" else _named_files(config)


def left_out(ignored: int, hidden: Sequence[str]) -> Iterator[str]:
    """Yield messages about ignored and hidden files."""
    if ignored:
        yield f"{ignored:,} files of other kinds left out of the folders named"
    if hidden:
        names = list(dict.fromkeys(path[path.rfind("/") + 1 :] for path in hidden))
        more = " …" if len(names) > _HIDDEN_SHOWN else ""
        one = len(hidden) == 1
        count = "1 hidden file or folder" if one else f"{len(hidden):,} hidden files and folders"
        yield (
            f"{count} left out"
            f" ({shortened(', '.join(names[:_HIDDEN_SHOWN]))}{more}); to read one, name it in"
            " data.paths"
        )


def files_below(
    folder: Path, *, leave_out: frozenset[str] = frozenset(), hidden: list[str] | None = None
) -> list[Path]:
    """Return all files below a folder, sorted by path; linked folders are entered once.

    Args:
        folder: the folder.
        leave_out: names of folders to skip.
        hidden: list to which skipped hidden paths are appended; None: hidden files are returned.
    """
    files: list[Path] = []
    entered: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(here)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [name for name in folders if name not in leave_out]
        if hidden is not None:
            folders[:] = _visible(here, folders, hidden, are_folders=True)
            names = _visible(here, names, hidden, are_folders=False)
        files += [Path(here, name) for name in names]
    return sorted(files)


def _visible(here: str, names: list[str], hidden: list[str], *, are_folders: bool) -> list[str]:
    """Return the names that are not hidden; append the paths of the others to `hidden`."""
    visible = []
    for name in names:
        if is_hidden(name, is_folder=are_folders):
            hidden.append(os.path.join(here, name))
        else:
            visible.append(name)
    return visible


def _refuse(error: OSError) -> None:
    """Raise an error for a folder that cannot be listed, which os.walk would skip silently."""
    raise UserError(f"{error.filename}: cannot be read: {error.strerror or error}") from error


def _stdlib_files() -> MatchedFiles:
    root = Path(sysconfig.get_path("stdlib"))
    below = files_below(root, leave_out=_NOT_STDLIB)
    return MatchedFiles(
        [InputFile.here(file) for file in below if file.suffix == ".py" and file.is_file()]
    )


def _named_files(config: DataConfig) -> MatchedFiles:
    """Find the files of data.paths, in that order; files of a folder or glob are sorted.

    Raises:
        UserError: a path does not exist, is matched twice or cannot be read.
    """
    entries: dict[str, int] = {}  # number of the entry of data.paths, by real path
    files: dict[str, InputFile] = {}
    ignored, hidden, reads = 0, list[str](), readable_kinds(config.text_column)
    for entry, name in enumerate(config.paths):
        for is_folder, below in _matches(config, name, hidden):
            read = [file for file in below if is_readable(file.name, config.text_column)]
            if is_folder:
                ignored += len(below) - len(read)
            elif not read:
                suffix = suffix_of(below[0].name)
                why = f"cannot read {suffix} files" if suffix else "has no suffix"
                raise UserError(
                    f"data.paths: {below[0].name}: {why}; convert it to one of: {reads}"
                )
            for file in read:
                real = file.name if "://" in file.name else os.path.realpath(file.name)
                if (first := entries.setdefault(real, entry)) != entry:
                    raise UserError(
                        f"data.paths: {file.name} is named by {config.paths[first]!r} and {name!r};"
                        " its text would count double; write it once"
                    )
                files.setdefault(real, file)
    if not files:
        more = "".join(f"; {line}" for line in left_out(0, hidden))
        raise UserError(f"data.paths: no readable file in {config.paths}; it reads {reads}{more}")

    # a hidden file that is an entry itself was read, so it is not reported
    explicit = {os.path.realpath(os.path.expanduser(name)) for name in config.paths}
    explicit |= {*config.paths}
    skipped = {p for p in hidden if p not in explicit and os.path.realpath(p) not in explicit}
    return MatchedFiles(list(files.values()), ignored, sorted(map(path_text, skipped)))


def _matches(
    config: DataConfig, name: str, hidden: list[str]
) -> Iterator[tuple[bool, list[InputFile]]]:
    """Yield, for each folder or file that an entry of data.paths matches, is_folder and its files.

    Paths of hidden files are appended to `hidden`.
    """
    if "://" in name:
        listing = list_url(name, FetchOptions.from_config(config))
        hidden += listing.hidden
        yield not listing.is_file, listing.files
        return
    for path in _paths(name, hidden):
        _keep_cache_out(config, path)
        below = files_below(path, hidden=hidden) if path.is_dir() else [path]
        yield path.is_dir(), [_known(file, config.text_column) for file in below]


def _known(path: Path, text_column: str | None) -> InputFile:
    """Return a file in its resolved folder; a link keeps its own name, which has the suffix."""
    path = path.parent.resolve() / path.name
    return (
        InputFile.here(path) if is_readable(path.name, text_column) else InputFile(str(path), 0, 0)
    )


def _paths(name: str, hidden: list[str]) -> list[Path]:
    """Return the local paths that an entry of data.paths matches."""
    try:
        path = Path(name).expanduser()
        if os.path.lexists(path):
            return [path]
        matched, out = glob_matches(str(path)) if glob.has_magic(name) else ([], [])
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, unknown ~user
        raise UserError(f"data.paths: {name[:80]!r}: {error}; correct the path") from error
    if not glob.has_magic(name):
        raise UserError(f"data.paths: {name} does not exist; write a file, a folder or a glob")
    if not matched:
        more = "".join(f"; {line}" for line in left_out(0, out))
        raise UserError(f"data.paths: no file matches {name!r}; correct the glob{more}")
    hidden += out
    return [Path(match) for match in matched]


def _keep_cache_out(config: DataConfig, path: Path) -> None:
    """Check that the cache is not in a corpus folder, whose next reading would include it.

    Raises:
        UserError: it is.
    """
    if not path.is_dir():
        return
    cache, folder = Path(config.cache_folder).expanduser().resolve(), path.resolve()
    if cache.is_relative_to(folder) and not hidden_part(f"{cache}/", f"{folder}/"):
        raise UserError(
            f"data.cache_folder: {config.cache_folder} lies in {path}, which data.paths names;"
            " choose a folder outside it"
        )


@dataclass(frozen=True)
class FileRow:
    """Row of a file: counted within the span that is read, printed as the row of the file."""

    source: InputRange
    number: int

    def __str__(self) -> str:
        return str(self.number + (self.source.lines_before() if self.source.start else 0))


@dataclass(frozen=True)
class _Place:
    """File and row of an error. The text is created on demand, since it may read the file."""

    row: FileRow

    def __str__(self) -> str:
        return f"{self.row.source.name}:{self.row}"


Rows = Iterator[tuple[FileRow | int | None, str]]


def is_readable(name: str, text_column: str | None) -> bool:
    """Return whether there is a reader for a file and `text_column`."""
    kind = file_type(name)
    return kind is not None and kind.serves(text_column)


def file_type(name: str) -> FileType | None:
    """Return the type of a file, by its suffix; None if it is unknown."""
    kind = _kinds(tuple(FILE_TYPES)).get(suffix_of(name))
    return None if kind is None else FILE_TYPES[kind]


def suffix_of(name: str) -> str:
    """Return the suffix that selects the reader, including one before .gz and .zst.

    It need not be a known suffix. "": the name has none.
    """
    known = _kinds(tuple(FILE_TYPES))
    names = [name[name.rfind("/") + 1 :].lower() for name in file_names(name)]
    for last in names:
        matches = [suffix for suffix in known if last.endswith(suffix)]
        if matches:
            return max(matches, key=len)
    first = names[0]
    return first[first.rfind(".") :] if "." in first else ""


@functools.cache
def _kinds(names: tuple[str, ...]) -> dict[str, str]:
    """Return the name of the file type by suffix, with and without .gz and .zst."""
    packed = {name: PACKED if FILE_TYPES[name].packed else ("",) for name in names}
    return {f"{name}{end}": name for name in names for end in packed[name]}


def readable_kinds(text_column: str | None) -> str:
    """Return a text with the file types that can be read."""
    kinds = {name: kind for name, kind in FILE_TYPES.items() if kind.serves(text_column)}
    packed = " ".join(name for name, kind in kinds.items() if kind.packed)
    others = " ".join(name for name, kind in kinds.items() if not kind.packed)
    return f"{packed} (each also .gz or .zst) {others}"


def _text(source: InputRange, text_column: str) -> Rows:
    data = source.whole()
    text, head = decode(source.name, data), data[:_HEAD]
    if head.count(0) > len(head) // 4:  # English in UTF-16 is also valid UTF-8
        raise UserError(
            f"{source.name}: {head.count(0) / len(head):.0%} of its bytes are zero, as in UTF-16;"
            " convert the file to UTF-8"
        )
    yield None, text


def _python(source: InputRange, text_column: str) -> Rows:
    """Read a Python source, which may declare its encoding in the first two lines (PEP 263)."""
    name, data = source.name, source.whole()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        decode(name, data)  # raises an error with the invalid byte, if there is one
        raise UserError(f"{name}: {error.msg[:80]}; convert the file to UTF-8") from error
    yield None, decode(name, data, "utf-8" if encoding == "utf-8-sig" else encoding)


def _jsonl(source: InputRange, text_column: str) -> Rows:
    yield from _line_texts(source, source.lines(), text_column)


def _line_texts(source: InputRange, lines: Iterable[bytes], text_column: str) -> Rows:
    for number, line in enumerate(lines, start=1):
        row = FileRow(source, number)
        if line.strip():
            place = _Place(row)
            yield row, text_of_row(source.on_bad_row, _jsonl_text, place, line, text_column)
        else:
            yield row, ""


def _cut_lines(source: InputRange, longest: int) -> Iterator[tuple[int, int, int]]:
    """Split a file of lines into equal parts; yield start, stop and size of each."""
    size = source.file.size
    parts = -(-size // longest)
    for start, stop in pairwise(size * n // parts for n in range(parts + 1)):
        yield start, stop, stop - start


def _jsonl_text(where: _Place, data: bytes, text_column: str) -> str:
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()  # json would also read UTF-16
        row = json.loads(text, object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the line (0x{error.object[error.start]:02x})"
        raise BadRow(where, f"{byte} is not UTF-8: {error.reason}", "not UTF-8") from error
    except WrongFormatError as error:
        raise bad_row(where, error) from error
    except (ValueError, RecursionError) as error:
        # after ";", the error about a long integer explains how a program can raise the limit
        reason = str(error).partition(";")[0]
        why = f"not JSON: {reason}; every line must hold one object"
        raise BadRow(where, why, "not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(where, f"holds {kind_of(row)}; every line must hold one JSON object")
    return pick(where, text_column, row)


def _json(source: InputRange, text_column: str) -> Rows:
    """Read a list of objects, numbered from 1; or lines, which many .json files contain."""
    data = source.whole().removeprefix(codecs.BOM_UTF8)
    if not data.lstrip().startswith(b"["):
        lines = data.split(b"\n")
        if data.lstrip().startswith(b"{\n") and len([*filter(bytes.strip, lines)]) > 1:
            raise UserError(
                f"{source.name}: holds one object over several lines; write a list of objects, or"
                " one object a line"
            )
        yield from _line_texts(source, lines, text_column)
        return
    text = decode(source.name, data)
    try:
        rows = json.loads(text, object_pairs_hook=unique_keys)
    except WrongFormatError as error:
        raise UserError(f"{source.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{source.name}: not JSON: {reason}; it must hold a list") from error
    for number, row in enumerate(rows, start=1):
        where = f"{source.name}:{number}"
        yield number, text_of_row(source.on_bad_row, _entry_text, where, row, text_column)


def _entry_text(where: str, row: Any, text_column: str) -> str:
    if not isinstance(row, dict):
        raise BadRow(where, f"holds {kind_of(row)}, not a JSON object")
    return pick(where, text_column, row)


def _csv(source: InputRange, text_column: str) -> Rows:
    """Read a CSV file (RFC 4180) with a header; a field may contain line ends."""
    csv.field_size_limit(_LONGEST_FIELD)
    number, size = 1, 0  # of the current row

    def lines() -> Iterator[str]:
        nonlocal size
        for n, line in enumerate(source.lines(), start=1):
            size += len(line) + 1
            if size > source.longest:
                raise source.too_long(f"{source.name}:{number}")
            yield decode(f"{source.name}:{n}", line, is_start=n == 1) + "\n"

    rows = csv.reader(lines(), strict=True)
    try:
        names = next(filter(None, rows), [])  # blank lines may come first
        if not names:  # an empty file is not an error, as for other types
            return
        header = rows.line_num
        check_columns(f"{source.name}:{header}", text_column, names)
        while True:
            number, size = rows.line_num + 1, 0
            if (row := next(rows, None)) is None:
                return
            where = f"{source.name}:{number}"
            yield (
                number,
                text_of_row(source.on_bad_row, _fields_text, where, header, names, row, text_column)
                if row
                else "",
            )
    except csv.Error as error:
        raise UserError(f"{source.name}:{number}: not CSV: {error}") from error


def _fields_text(
    where: str, header: int, names: list[str], row: list[str], text_column: str
) -> str:
    if len(row) != len(names):
        why = f"has {len(row)} fields, line {header} names {len(names)}; correct the row"
        raise BadRow(where, why, "another number of fields")
    return pick(where, text_column, dict(zip(names, row, strict=True)))


def _wet(source: InputRange, text_column: str) -> Rows:
    """Read a WET file: one page per record, numbered from 1."""
    record = 0
    with as_file(source.unpacked()) as file:
        while first := file.readline(_LONGEST_LINE):
            if not first.strip():
                continue  # the line ends after a record
            record += 1
            where = f"{source.name}: record {record}"
            if not first.startswith(b"WARC/"):
                raise UserError(
                    f"{where}: begins with {first[:20]!r}, not WARC/; download it again"
                )
            headers = _headers(file, where)
            length, is_page = _length(headers, where), headers.get("warc-type") == "conversion"
            if is_page and length > source.longest:
                raise source.too_long(where)
            content = []
            while length:  # in chunks, so that a wrong length does not allocate memory
                part = file.read(min(length, CHUNK))
                if not part:
                    raise UserError(f"{where}: the file ends within it; download it again")
                length -= len(part)
                content += [part] if is_page else []
            if is_page:
                yield record, decode(where, b"".join(content), is_start=False)


def _headers(file: BinaryIO, where: str) -> dict[str, str]:
    """Read the headers of a record up to the empty line; their names become lower case."""
    headers: dict[str, str] = {}
    while (line := file.readline(_LONGEST_LINE)).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MOST_HEADERS:
            raise UserError(f"{where}: has no end of headers; download the file again")
    if not line:
        raise UserError(f"{where}: the file ends within its headers; download it again")
    return headers


def _length(headers: dict[str, str], where: str) -> int:
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 20):
        raise UserError(f"{where}: Content-Length is {length[:40]!r}; download the file again")
    return int(length)


Cut = Callable[[InputRange, int], Iterator[tuple[int, int, int]]]
"""Splits a file into parts of a maximal size; yields `Span.start`, `stop` and `n_bytes` of each."""


@dataclass(frozen=True)
class FileType(ChoiceRecord):
    """File type: `make(source, text_column)` yields (row, text)."""

    rows: bool = field(default=False, kw_only=True)
    """Whether files have rows with columns, from which `pick` takes the text."""
    documents: bool = field(default=True, kw_only=True)
    """Whether files can be read as documents; false: only as rows with columns."""
    packed: bool = field(default=True, kw_only=True)
    """Whether the file name may also end with .gz or .zst; parquet is compressed internally."""
    cut: Cut | None = field(default=None, kw_only=True)
    """Function that splits a large file; None: files cannot be split."""

    def serves(self, text_column: str | None) -> bool:
        """Return whether the type can be read with this `text_column`."""
        return self.rows if text_column == ROW else self.documents


FILE_TYPES = ChoiceTable(
    "data.paths",
    FileType,
    {
        ".txt": FileType(_text),
        ".md": FileType(_text),
        ".py": FileType(_python),
        ".jsonl": FileType(_jsonl, rows=True, cut=_cut_lines),
        ".json": FileType(_json, rows=True, documents=False),
        ".csv": FileType(_csv, rows=True),
        ".warc.wet": FileType(_wet),
        ".parquet": FileType(parquet_rows, rows=True, packed=False, cut=cut_parquet),
    },
)
