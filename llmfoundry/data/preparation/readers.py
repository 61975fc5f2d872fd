"""`Reader`: a kind of source, cut into spans, read as (source, row, text); `FileReader`: files.

The corpus calls them. A span is a part that can be read by itself. Files are found in one fixed
order: as `data.paths` writes them, each folder's and glob's sorted by name. `FILE_TYPES` has a
function a format, by suffix: a stream of (row, text), and how a large file is cut. What cannot be
read raises a `UserError` that names the file and the line, row or byte. Files of rows are streamed;
only a text file, being one document, is read whole.
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

# Tests of the standard library hold deliberately broken sources; the packages are not part of it.
_NOT_STDLIB = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)
_HEAD = 4096  # bytes of a text file by which its encoding is judged
_HIDDEN_SHOWN = 3  # names of what is hidden
_LONGEST_FIELD = 2**31 - 1  # characters of a CSV field, Python's most; its default is 128 Ki
# Common Crawl's WET files: records of a head that begins with WARC/1.0 and ends with an empty line,
# as many bytes as its Content-Length specifies, two line ends. Records of type `conversion` hold a
# page, others are about the file. Small enough to read here rather than by a library.
_LONGEST_LINE = 1 << 16
_MOST_HEADERS = 1 << 10  # lines of a record; Common Crawl's have about ten


@dataclass(frozen=True)
class Span:
    """A part of a corpus that can be read by itself.

    Attributes:
        source: number of its file; 0 for a dataset.
        start: byte, row group, row, or shard, where it begins.
        stop: where it ends; None: with the file.
        n_bytes: of input, for progress and balance; None: unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    n_bytes: int | None = None


class Reader(Protocol):
    """A kind of source.

    Attributes:
        files: the files that it reads, in order; empty for a dataset.
        ignored: files of other kinds that lie in the named folders.
        hidden: files and folders that are left out for their names.
    """

    files: list[InputFile]
    ignored: int
    hidden: list[str]

    def facts(self) -> list[Any]:
        """What names its content without reading it."""

    def spans(self, longest: int | None) -> list[Span]:
        """All of it in parts, in order, of about `longest` bytes at most where that is possible."""

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, Any, str]]:
        """Yield (source, row or None, text).

        `seen` gets the bytes of input on the way, `on_bad_row` each row that cannot be read.
        """


class FileReader:
    """The documents of files, here and at URLs, each by the `FILE_TYPES` of its suffix."""

    def __init__(self, config: DataConfig) -> None:
        found = find_files(config)
        self.files, self.ignored, self.hidden = found.files, found.ignored, found.hidden
        self._column = config.text_column or "text"
        self._longest = n_bytes(config.max_row_size)
        self._options = FetchOptions.from_config(config)

    def facts(self) -> list[Any]:
        """Paths, sizes and times; and the code of plugins that read them."""
        kinds = {_kinds(tuple(FILE_TYPES))[suffix_of(file.name)] for file in self.files}
        codes = {FILE_TYPES.origins[kind].code for kind in kinds} - {""}
        return [*(file.facts for file in self.files), *sorted(codes)]

    def spans(self, longest: int | None) -> list[Span]:
        """Lines can be cut anywhere, parquet between row groups; compressed files, CSV not."""
        found = []
        for number, file in enumerate(self.files):
            kind = FILE_TYPES.get(suffix_of(file.name))  # none: a compressed file
            if longest is None or file.size <= longest or kind is None or kind.cut is None:
                found.append(Span(number, n_bytes=file.size))
            else:
                parts = kind.cut(self._input(Span(number, n_bytes=file.size)), longest)
                found += [Span(number, *part) for part in parts]
        return found

    def read(
        self,
        span: Span,
        seen: Callable[[int], None] = ignore,
        on_bad_row: OnBadRow = raise_bad_row,
    ) -> Iterator[tuple[str, FileRow | int | None, str]]:
        """Yield (file, row, text).

        Row is None of a text file, the line from 1 of .jsonl and .csv, the row from 0 of .parquet,
        the record from 1 of .warc.wet.
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
    """What data.paths names.

    Attributes:
        files: to read, in order.
        ignored: how many of other kinds lie in the named folders.
        hidden: files and folders that are left out for their names.
    """

    files: list[InputFile]
    ignored: int = 0
    hidden: list[str] = field(default_factory=list)


def find_files(config: DataConfig) -> MatchedFiles:
    """Find the files of a corpus."""
    return _stdlib_files() if config.name == "python_stdlib" else _named_files(config)


def left_out(ignored: int, hidden: Sequence[str]) -> Iterator[str]:
    """For people: what lies in the named folders and is not read."""
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
    """All files below a folder, sorted by relative path, linked folders entered once.

    Args:
        folder: to look into.
        leave_out: names of folders.
        hidden: gets what is hidden, which is left out; None: that is read, too.
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
    """Those that are not hidden; `hidden` gets the paths of the others."""
    visible = []
    for name in names:
        if is_hidden(name, is_folder=are_folders):
            hidden.append(os.path.join(here, name))
        else:
            visible.append(name)
    return visible


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed would be left out without a word."""
    raise UserError(f"{error.filename}: cannot be read: {error.strerror or error}") from error


def _stdlib_files() -> MatchedFiles:
    root = Path(sysconfig.get_path("stdlib"))
    below = files_below(root, leave_out=_NOT_STDLIB)
    return MatchedFiles(
        [InputFile.here(file) for file in below if file.suffix == ".py" and file.is_file()]
    )


def _named_files(config: DataConfig) -> MatchedFiles:
    """Files of data.paths, in the order written, each folder's and glob's sorted."""
    places: dict[str, int] = {}  # by what a link stands for
    files: dict[str, InputFile] = {}
    ignored, hidden, reads = 0, list[str](), readable_kinds(config.text_column)
    for place, name in enumerate(config.paths):
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
                if (first := places.setdefault(real, place)) != place:
                    raise UserError(
                        f"data.paths: {file.name} is named by {config.paths[first]!r} and {name!r};"
                        " its text would count double; write it once"
                    )
                files.setdefault(real, file)
    if not files:
        more = "".join(f"; {line}" for line in left_out(0, hidden))
        raise UserError(f"data.paths: no readable file in {config.paths}; it reads {reads}{more}")
    named = {os.path.realpath(os.path.expanduser(name)) for name in config.paths} | {*config.paths}
    unnamed = {path for path in hidden if path not in named and os.path.realpath(path) not in named}
    return MatchedFiles(list(files.values()), ignored, sorted(map(path_text, unnamed)))


def _matches(
    config: DataConfig, name: str, hidden: list[str]
) -> Iterator[tuple[bool, list[InputFile]]]:
    """For each folder or file that an entry of data.paths names: is it a folder, and its files.

    `hidden` gets the paths of what is left out.
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
    """A file by its own name, also where it is a link, in a folder by the folder's one name."""
    path = path.parent.resolve() / path.name
    return (
        InputFile.here(path) if is_readable(path.name, text_column) else InputFile(str(path), 0, 0)
    )


def _paths(name: str, hidden: list[str]) -> list[Path]:
    try:
        path = Path(name).expanduser()
        if os.path.lexists(path):
            return [path]
        matched, out = glob_matches(str(path)) if glob.has_magic(name) else ([], [])
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, ~nobody
        raise UserError(f"data.paths: {name[:80]!r}: {error}; correct the path") from error
    if not glob.has_magic(name):
        raise UserError(f"data.paths: {name} does not exist; write a file, a folder or a glob")
    if not matched:
        more = "".join(f"; {line}" for line in left_out(0, out))
        raise UserError(f"data.paths: no file matches {name!r}; correct the glob{more}")
    hidden += out
    return [Path(match) for match in matched]


def _keep_cache_out(config: DataConfig, path: Path) -> None:
    """Prepared files below a corpus folder would be read as text the next time."""
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
    """A place in a file of rows; counted within the part that is read, shown within the file."""

    source: InputRange
    number: int

    def __str__(self) -> str:
        return str(self.number + (self.source.lines_before() if self.source.start else 0))


@dataclass(frozen=True)
class _Place:
    """File and row, for a message: a text that costs a reading of the file is not made before."""

    row: FileRow

    def __str__(self) -> str:
        return f"{self.row.source.name}:{self.row}"


Rows = Iterator[tuple[FileRow | int | None, str]]


def is_readable(name: str, text_column: str | None) -> bool:
    """Whether there is a reader for a file: of documents, or of rows of any columns."""
    kind = file_type(name)
    return kind is not None and kind.serves(text_column)


def file_type(name: str) -> FileType | None:
    """What reads a file, by its suffix."""
    kind = _kinds(tuple(FILE_TYPES)).get(suffix_of(name))
    return None if kind is None else FILE_TYPES[kind]


def suffix_of(name: str) -> str:
    """What chooses a reader: the suffix, .gz and .zst with the one before; may be missing in it."""
    known = _kinds(tuple(FILE_TYPES))
    names = [name[name.rfind("/") + 1 :].lower() for name in file_names(name)]
    for last in names:
        if found := [suffix for suffix in known if last.endswith(suffix)]:
            return max(found, key=len)
    first = names[0]
    return first[first.rfind(".") :] if "." in first else ""


@functools.cache
def _kinds(names: tuple[str, ...]) -> dict[str, str]:
    """The kind of file by its suffix, with .gz and .zst and without."""
    packed = {name: PACKED if FILE_TYPES[name].packed else ("",) for name in names}
    return {f"{name}{end}": name for name in names for end in packed[name]}


def readable_kinds(text_column: str | None) -> str:
    """The kinds of files that are read, for people."""
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
    """Python sources may declare another encoding in their first two lines (PEP 263)."""
    name, data = source.name, source.whole()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        decode(name, data)  # names the byte where that is the reason
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
    """Equal parts of a file of lines: where each begins and ends, and its bytes."""
    size = source.file.size
    parts = -(-size // longest)
    for start, stop in pairwise(size * n // parts for n in range(parts + 1)):
        yield start, stop, stop - start


def _jsonl_text(where: _Place, data: bytes, text_column: str) -> str:
    try:
        row = json.loads(data.removeprefix(codecs.BOM_UTF8), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the line (0x{error.object[error.start]:02x})"
        raise BadRow(where, f"{byte} is not UTF-8: {error.reason}", "not UTF-8") from error
    except WrongFormatError as error:
        raise bad_row(where, error) from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # of a long integer: how a program could allow it
        why = f"not JSON: {reason}; every line must hold one object"
        raise BadRow(where, why, "not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(where, f"holds {kind_of(row)}; every line must hold one JSON object")
    return pick(where, text_column, row)


def _json(source: InputRange, text_column: str) -> Rows:
    """A list of objects, numbered from 1; or lines, which many files of this name hold."""
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
    """RFC 4180, the first line naming the columns; a field may go over several lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    number, size = 1, 0  # of the row that is read

    def lines() -> Iterator[str]:
        nonlocal size
        for n, line in enumerate(source.lines(), start=1):
            size += len(line) + 1
            if size > source.longest:
                raise source.too_long(f"{source.name}:{number}")
            yield decode(f"{source.name}:{n}", line, is_start=n == 1) + "\n"

    rows = csv.reader(lines(), strict=True)
    try:
        names = next(rows, [])
        if not names:  # an empty file, as of the other kinds
            return
        check_columns(f"{source.name}:1", text_column, names)
        while True:
            number, size = rows.line_num + 1, 0
            if (row := next(rows, None)) is None:
                return
            where = f"{source.name}:{number}"
            yield (
                number,
                text_of_row(source.on_bad_row, _fields_text, where, names, row, text_column)
                if row
                else "",
            )
    except csv.Error as error:
        raise UserError(f"{source.name}:{number}: not CSV: {error}") from error


def _fields_text(where: str, names: list[str], row: list[str], text_column: str) -> str:
    if len(row) != len(names):
        why = f"has {len(row)} fields, line 1 names {len(names)}; correct the row"
        raise BadRow(where, why, "another number of fields")
    return pick(where, text_column, dict(zip(names, row, strict=True)))


def _wet(source: InputRange, text_column: str) -> Rows:
    """A page a record, counted from 1."""
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
            while length:  # no more memory than there are bytes, whatever length is named
                part = file.read(min(length, CHUNK))
                if not part:
                    raise UserError(f"{where}: the file ends within it; download it again")
                length -= len(part)
                content += [part] if is_page else []
            if is_page:
                yield record, decode(where, b"".join(content), is_start=False)


def _headers(file: BinaryIO, where: str) -> dict[str, str]:
    """Up to the empty line; names in lower case."""
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
"""Of a file and the most bytes of a part: each part's `Span.start`, `stop` and `n_bytes`."""


@dataclass(frozen=True)
class FileType(ChoiceRecord):
    """A kind of file: `make(source, text_column)` yields (row, text)."""

    rows: bool = field(default=False, kw_only=True)
    """Whether it holds rows of columns, of which `pick` takes the text."""
    documents: bool = field(default=True, kw_only=True)
    """Whether it is read as text; false: only as rows of columns."""
    packed: bool = field(default=True, kw_only=True)
    """Whether its name may also end with .gz or .zst; parquet is compressed within."""
    cut: Cut | None = field(default=None, kw_only=True)
    """How a large file is cut; None: not at all."""

    def serves(self, text_column: str | None) -> bool:
        """Whether it gives what is asked for."""
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
