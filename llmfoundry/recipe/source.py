"""One source of training text: a corpus of documents, or prepared shards.

The `data` section is a single source; with `name: mixture` it has several, in `data.streams`.
`format: auto` is resolved when a recipe is read, by the columns of the first row of local files, so
that all dependent keys are checked before anything starts. Remote files are not read.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.schema import PATH, Only, Range, Unless, check_fields, choice

CORPORA = ("python_stdlib", "files", "huggingface")
INSTRUCTIONS = "instructions"
SOURCES = (*CORPORA, "shards", INSTRUCTIONS)
AUTO = "auto"
TEXT = "text"
FORMATS = (TEXT, "prompt_response", "chat", "preference", "unpaired")
"""Formats of rows: a document; a prompt and an answer; messages; a prompt with a chosen and a
rejected answer; a prompt with an answer and whether it is desirable."""
COMPARED = ("preference", "unpaired")
"""Formats of preference data: only the last answer of each example is in the loss."""
_RENDERED = ("tools", "chat_template_kwargs")  # of rows of messages
COLUMNS = {
    "prompt_response": ("prompt", "response", "completion", *_RENDERED),
    "chat": ("messages", *_RENDERED),
    "preference": ("prompt", "chosen", "rejected", *_RENDERED),
    "unpaired": ("prompt", "completion", "label", *_RENDERED),
}
"""Columns that a row of each format may have."""
MAPPINGS = {
    "alpaca": ("prompt_response", ("instruction", "input", "output", "text")),
    "dolly": ("prompt_response", ("instruction", "input", "output", "context", "response")),
    "p3": ("prompt_response", ("inputs", "targets", "inputs_pretokenized", "targets_pretokenized")),
    "flan": ("prompt_response", ("inputs", "targets")),
    "openhermes": ("chat", ("conversations", *_RENDERED)),
    "sharegpt": ("chat", ("conversations", *_RENDERED)),
    "stackmathqa": ("chat", ("Q", "A")),
    "numina": ("chat", ("messages",)),
}
"""Published formats of supervised data: the format that each maps to, and its columns."""
_SUPERVISED = Unless("format", TEXT)
_SHOWN = 300  # characters of a file's column names


@dataclass
class SourceConfig:
    """A source of text."""

    name: Annotated[str, choice(SOURCES)] = "python_stdlib"
    """python_stdlib (the source files of the running Python, without tests), files, huggingface,
    shards (MDS or token shards), or instructions (generated chats with exact answers). The data
    section has mixture, too."""
    paths: Annotated[list[str], PATH, Only("name", "files")] = field(default_factory=list)
    """Files, folders or globs of .txt .md .py .jsonl .csv .parquet .warc.wet, text formats also as
    .gz or .zst, on this machine or at a URL (s3:// gs:// hf:// https:// …). Formats other than
    text: .jsonl .json .csv .parquet. Files and folders whose name begins with a dot, and folders
    whose name begins with two underscores (.venv, __pycache__), are read only if they are named."""
    dataset: Annotated[str | None, PATH, Only("name", "huggingface")] = None
    """A hub id, or a local folder that `datasets` loads."""
    subset: Annotated[str | None, Only("name", "huggingface")] = None
    """The dataset's configuration name."""
    split: Annotated[str | None, Only("name", ("huggingface", "shards"))] = None
    """huggingface: the split to read; default train. shards: a folder below remote or local, such
    as train; unset: the folder itself."""
    text_column: Annotated[
        str | None, (Only("name", ("files", "huggingface", "shards")), Only("format", (TEXT, AUTO)))
    ] = None
    """Field of the rows of .jsonl, .csv, .parquet and huggingface, or column of MDS shards, that
    holds the text; default text."""
    remote: Annotated[str | None, PATH, Only("name", "shards")] = None
    """The folder of the shards, at a URL (s3:// gs:// az:// oci:// hf:// https://) or a path."""
    local: Annotated[str | None, PATH, Only("name", "shards")] = None
    """The local shard cache of remote. Without remote: the folder of the shards. Unset with remote:
    a folder below data.cache_folder."""

    format: Annotated[str, choice((*FORMATS, *MAPPINGS, AUTO))] = TEXT
    """Format of a row. text: a document. prompt_response: prompt, and response or completion. chat:
    messages. preference: prompt, chosen, rejected. unpaired: prompt, completion, label. Formats of
    published data sets: alpaca, dolly, p3, flan, openhermes, sharegpt, stackmathqa, numina. auto,
    for files, also .gz and .zst: by the columns of the first readable row if the file is on this
    machine, else text."""
    columns: Annotated[
        dict[str, str],
        _SUPERVISED,
        Unless("preprocess", why="which names them"),
        Unless("name", INSTRUCTIONS),
    ] = field(default_factory=dict)
    """Other names of the columns, as {ours: theirs}: {prompt: question, response: answer}."""
    preprocess: Annotated[str | None, _SUPERVISED, Unless("name", INSTRUCTIONS)] = None
    """module:function or file.py:function that turns a row as it is read into a row of the format,
    or into None to leave it out."""
    tasks: Annotated[list[str], Only("name", INSTRUCTIONS)] = field(default_factory=list)
    """Tasks of the generated chats; unset: all."""
    rows: Annotated[int | None, Range(1, 10**8), Only("name", INSTRUCTIONS)] = None
    """Rows to generate, with the held-out rows; default 20000."""

    _columns_seen: ClassVar[tuple[str, ...]] = ()  # of an own file's first row, by `settle`

    @property
    def is_supervised(self) -> bool:
        """Whether some tokens of an example are outside the loss."""
        return self.format not in (TEXT, AUTO)

    @property
    def is_read_whole(self) -> bool:
        """Whether the source is read completely before training, so that a part can be held out."""
        return self.name != "shards" or self.is_supervised

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Columns that a row of the format may have."""
        return MAPPINGS[self.format][1] if self.format in MAPPINGS else COLUMNS[self.format]

    def settle(self) -> None:
        """Resolve `format: auto` by the first row of the files, if they exist."""
        if self.format != AUTO or self.name != "files" or self.preprocess is not None:
            return
        columns = [] if self.text_column is not None else columns_of_rows(self.paths)
        if not columns:
            self.format = AUTO if columns is None else TEXT
            return
        theirs = {*self.columns.values()}
        renamed = [*self.columns, *(name for name in columns if name not in theirs)]
        self.format = format_of(renamed) or AUTO
        self._columns_seen = (*columns,)  # type: ignore[misc]

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        if self.name in SOURCES:
            yield from self._check_source(key)

    def _check_source(self, key: str) -> Iterator[str]:
        yield from self._check_format(key)
        if self.name == "files" and not self.paths:
            yield f"{key}paths: files needs it; write a list of files, folders or globs"
        if self.name == "huggingface" and self.dataset is None:
            yield f"{key}dataset: huggingface needs it; write a hub id or a local folder"
        if self.name == "shards" and self.remote is None and self.local is None:
            yield f"{key}remote: shards needs it, or local; write the folder that has index.json"

    def _check_format(self, key: str) -> Iterator[str]:
        if self.name == INSTRUCTIONS and self.format not in ("chat", "preference", "unpaired"):
            yield f"{key}format: {self.format}; instructions are chat, preference or unpaired"
        if self.name == "python_stdlib" and self.is_supervised:
            yield f"{key}format: {self.format}, but python_stdlib is text; remove it"
        if self.format == AUTO:
            yield from self._check_auto(key)
        elif self.is_supervised and self.format in (*FORMATS, *MAPPINGS):
            yield from self._check_columns(key)

    def _check_auto(self, key: str) -> Iterator[str]:
        """Yield an error line for `format: auto` if nothing determines the format."""
        if self.name != "files":
            yield f"{key}format: auto looks at rows of files; with name: {self.name} write which"
        elif self.preprocess is not None:
            yield f"{key}format: auto, but {key}preprocess makes the rows; write their format"
        elif self._columns_seen:
            has = ", ".join(self._columns_seen)[:_SHOWN]
            yield (
                f"{key}format: auto finds none for rows that have {has}; write {key}text_column for"
                f" documents, or {key}format and {key}columns, as in {{prompt: question}}"
            )

    def _check_columns(self, key: str) -> Iterator[str]:
        for name in self.columns:
            if name not in self.columns_read:
                read = ", ".join(self.columns_read)
                yield f"{key}columns.{name}: rows of {self.format} have {read}; write ours: theirs"
        if self.preprocess is not None and not all(self.preprocess.rpartition(":")[::2]):
            yield f"{key}preprocess: {self.preprocess}; write module:function or file.py:function"
        if self.preprocess is not None and self.format in MAPPINGS:
            yield (
                f"{key}preprocess: has no effect on format: {self.format}, which has a function of"
                f" its own; write format: {MAPPINGS[self.format][0]}"
            )

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.format == AUTO:
            self.format = TEXT
        if self.name in ("files", "huggingface") and not self.is_supervised:
            set_defaults(self, text_column="text")
        if self.name == INSTRUCTIONS:
            set_defaults(self, rows=20_000)
        if self.name == "huggingface":
            set_defaults(self, split="train")


@dataclass
class StreamConfig(SourceConfig):
    """A source in a mixture. Either all streams have a proportion, or none."""

    name: Annotated[str, choice(SOURCES)] = "shards"
    """shards (MDS or token shards), python_stdlib, files, huggingface, or instructions. paths alone
    imply files, dataset alone huggingface."""
    format: Annotated[str, choice((*FORMATS, *MAPPINGS, AUTO))] = AUTO
    """Format of a row, as in data.format. auto: by the columns of the first row of files on this
    machine, else text."""
    proportion: Annotated[float | None, Range(0)] = None
    """Share of the sequences (or of data.proportion_unit), relative to the proportions of the other
    streams."""
    repeat: Annotated[float | None, Range(0, 2**20)] = None
    """How many times an epoch of the mixture passes over the stream; 0.5: over half of it. Default
    1. Excludes proportion and choose."""
    choose: Annotated[int | None, Range(0, 2**48)] = None
    """Number of the stream's sequences in an epoch of the mixture. Excludes proportion and
    repeat."""

    def settle(self) -> None:
        """Resolve the implied source, and `format: auto` as for a single source or else as text."""
        if self.name == "shards" and self.remote is None and self.local is None:
            implied = "files" if self.paths else "huggingface" if self.dataset else self.name
            self.name = implied
        super().settle()
        if self.format == AUTO and not self._columns_seen:
            self.format = TEXT

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid, conflicting or ineffective value."""
        yield from check_fields(key, self)
        yield from super().check(key)
        set_fields = [f for f in ("proportion", "repeat", "choose") if getattr(self, f) is not None]
        if len(set_fields) > 1:
            yield f"{key}{set_fields[1]}: and {set_fields[0]} exclude each other; remove one"


@contextmanager
def under_key(key: str) -> Iterator[None]:
    """Replace `data` by `key` in the errors of code that reads a stream as if it were `data`."""
    names = "|".join(field.name for field in fields(SourceConfig))
    # `data.` before the name of a field, unless it is the end of a path or of another key
    prefix = re.compile(rf"(?<![\w./-])data\.(?=(?:{names})\b)")
    try:
        yield
    except UserError as error:
        error.problems = tuple(prefix.sub(f"{key}.", problem) for problem in error.problems)
        error.args = ("\n".join(error.problems),)
        raise


SIGNATURES = (  # the first entry whose columns all exist is the format
    ("preference", ("chosen", "rejected")),
    ("unpaired", ("prompt", "completion", "label")),
    ("prompt_response", ("prompt", "response")),
    ("prompt_response", ("prompt", "completion")),
    ("chat", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("dolly", ("instruction", "response")),
    ("flan", ("inputs", "targets")),
    (TEXT, (TEXT,)),
)
_MOST_BYTES = 1 << 22  # bytes of a file that are read for its first row
_MOST_FILES = 1000  # files of a folder or a glob that are tried


def columns_of_rows(paths: list[str]) -> list[str] | None:
    """Return the columns of the first row of `data.paths`; None if no file exists.

    The list is empty if the files hold documents, or cannot be read here, such as files at a URL.
    """
    if any("://" in name for name in paths):
        return []
    files = [path for name in paths for path in islice(_files(name), _MOST_FILES)]
    if any(_suffix(path) not in _COLUMNS for path in files):
        return []
    for path in files:
        try:
            names = _COLUMNS[_suffix(path)](path)
        except Exception:  # of any library; the error is reported when all rows are read
            continue
        if names:
            return names
    return [] if files else None


def format_of(columns: list[str]) -> str | None:
    """Return the format of rows with these columns; None if no format matches."""
    existing = {*columns}
    for name, required in SIGNATURES:
        if existing.issuperset(required):
            return name
    return None


def is_hidden(name: str, *, is_folder: bool) -> bool:
    """Return whether a file or folder is only read if it is named; the rule of `datasets`."""
    return name.startswith(".") or (is_folder and name.startswith("__"))


def hidden_part(path: str, named: str) -> str:
    """Return the part of `path` up to a hidden file or folder that `named` does not name; else "".

    Args:
        path: a file or a folder; a folder ends with a slash.
        named: the folder or glob that the user wrote, which may name hidden files itself.
    """
    expected, hidden = _hidden_parts(named), _hidden_parts(path)
    return hidden[len(expected)] if len(hidden) > len(expected) else ""


def _hidden_parts(path: str) -> list[str]:
    """Return each prefix of a path that ends in a hidden file or folder."""
    names = path.split("/")
    last = len(names) - 1
    return [
        "/".join(names[: n + 1])
        for n, name in enumerate(names)
        if name.strip(".") and is_hidden(name, is_folder=n < last)
    ]


def glob_matches(pattern: str) -> tuple[list[str], list[str]]:
    """Return the matches of a glob on this machine, sorted, and the hidden files and folders.

    A match in a hidden folder is left out; the folder is in the second list.
    """
    matches, hidden = list[str](), list[str]()
    for match in sorted(glob.glob(pattern, recursive=True)):
        slash = "/" if os.path.isdir(match) else ""
        part = hidden_part(match + slash, pattern.rstrip("/") + slash)
        if part:
            hidden.append(part)
        else:
            matches.append(match)
    return matches, list(dict.fromkeys(hidden))


def _files(name: str) -> Iterator[Path]:
    """Yield the files of an entry of `data.paths`: a file, a folder or a glob; sorted by folder."""
    path = Path(os.path.expanduser(name))
    paths = [path]
    if not os.path.lexists(path):
        matches, _ = glob_matches(str(path))
        paths = [Path(match) for match in matches]
    for file_or_folder in paths:
        if not file_or_folder.is_dir():
            yield file_or_folder
            continue
        for folder, subfolders, names in os.walk(file_or_folder):
            # os.walk descends into the folders that are left in this list
            subfolders[:] = sorted(n for n in subfolders if not is_hidden(n, is_folder=True))
            for file in sorted(names):
                if not is_hidden(file, is_folder=False):
                    yield Path(folder, file)


def _suffix(path: Path) -> str:
    """Return the suffix of a file's name, the one before .gz or .zst if it is compressed."""
    suffix = path.suffix.lower()
    if suffix not in _OPEN:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner != ".parquet" else f"{inner}{suffix}"


def _beginning(path: Path) -> str:
    """Return the beginning of a file as text; empty for a device or a pipe.

    Raises:
        Exception: the file cannot be read or decompressed.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return ""
    with path.open("rb") as file, _OPEN.get(path.suffix.lower(), nullcontext)(file) as unpacked:
        return unpacked.read(_MOST_BYTES).decode("utf-8-sig", errors="replace")


def _unzstd(file: Any) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(file)


_OPEN: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".zst": _unzstd}


def _of_json(path: Path) -> list[str]:
    """Return the keys of the first object in a .jsonl file, or in the list of a .json file."""
    text = _beginning(path).lstrip()
    with suppress(ValueError):
        row, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
        if isinstance(row, dict):
            return [*row]
    for line in text.splitlines():  # the first row is damaged
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                return [*row]
    return []


def _of_csv(path: Path) -> list[str]:
    """Return the first row of a .csv file that is not blank, the names of its columns."""
    return next(filter(None, csv.reader(io.StringIO(_beginning(path)))), [])


def _of_parquet(path: Path) -> list[str]:
    """Return the names of the columns of a .parquet file."""
    from pyarrow.parquet import read_schema

    return list(read_schema(path).names) if stat.S_ISREG(os.stat(path).st_mode) else []


_COLUMNS: dict[str, Callable[[Path], list[str]]] = {
    ".jsonl": _of_json,
    ".json": _of_json,
    ".csv": _of_csv,
    ".parquet": _of_parquet,
}
