"""Documents of a recipe's `data` section, in a fixed order.

Entry point: `Corpus`, which is read by the holdout split, the training of a tokenizer and the
preparation. Each pass streams all documents, so a corpus may be larger than memory. The one idea: a
corpus is a list of spans that can be read independently, so that any number of processes can read
it without changing its order. `readers.py` has the reader of files; the readers of datasets and of
MDS shards are here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSShard
from llmfoundry.data.preparation.bad_rows import (
    BadRow,
    OnBadRow,
    raise_bad_row,
    text_of_row,
    too_long,
)
from llmfoundry.data.preparation.columns import (
    ROW,
    arrow_texts,
    as_text,
    columns_of,
    no_column,
    read_columns,
    row_text,
)
from llmfoundry.data.preparation.filters import Filter, build_filter
from llmfoundry.data.preparation.input_files import InputFile, ignore
from llmfoundry.data.preparation.readers import FileReader, FileRow, Reader, Span, files_below
from llmfoundry.data.shard_cache.shard_folder import FetchOptions
from llmfoundry.data.shard_index import open_shards, read_index, with_sample
from llmfoundry.data.token_shards import StreamIndex
from llmfoundry.errors import UserError, import_optional
from llmfoundry.recipe.data import DataConfig, FilterConfig, n_bytes

_ROWS = 1024  # rows read at a time


def check_first_document(config: DataConfig) -> None:
    """Read the first document of a corpus of local files; do nothing for other sources.

    Raises:
        UserError: there is no file, or the document cannot be read.
    """
    if config.name != "files" or any("://" in path for path in config.paths):
        return
    corpus = Corpus(config)
    if not corpus.files:
        raise UserError("data.paths: no file that can be read is there; write others")
    next(document for document in corpus if not document.blank)


@dataclass(frozen=True)
class Document:
    """Text of a corpus.

    Attributes:
        source: file, or name of the dataset.
        row: line or row; None if the file is a single document.
        text: the text; may be blank.
    """

    source: str
    row: FileRow | int | None
    text: str

    @property
    def where(self) -> str:
        """Return source and row, for errors."""
        return self.source if self.row is None else f"{self.source}:{self.row}"

    @property
    def blank(self) -> bool:
        """Return whether the text is empty or white space; callers drop and count it."""
        return not self.text or self.text.isspace()


class Corpus:
    """Documents of a recipe. Each iteration reads them again.

    Attributes:
        config: resolved data section of the recipe.
        files: input files in order; empty for a dataset.
        ignored: number of files of other types in the folders.
        hidden: files and folders that are skipped because of their names.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = replace(config)
        self.config.fill()
        kind, self._key = _KINDS[self.config.name]
        self._reader = kind(self.config)
        self.files, self.ignored = self._reader.files, self._reader.ignored
        self.hidden = self._reader.hidden
        self._longest = n_bytes(self.config.max_row_size)

    def __iter__(self) -> Iterator[Document]:
        """Yield every document, including blank ones.

        Raises:
            UserError: all documents are blank.
        """
        has_text = False
        for span in self.spans():
            for document in self.read(span):
                has_text = has_text or not document.blank
                yield document
        if not has_text:
            raise self.holds_no_text()

    def spans(self, longest: int | None = None) -> list[Span]:
        """Split the corpus into spans, in order, of at most about `longest` bytes if possible."""
        return self._reader.spans(longest)

    def read(
        self,
        span: Span,
        seen: Callable[[int], None] = ignore,
        on_bad_row: OnBadRow = raise_bad_row,
    ) -> Iterator[Document]:
        """Yield the documents of a span, including blank ones.

        Args:
            span: the span.
            seen: called with the number of input bytes read.
            on_bad_row: called with each row that cannot be read; its document is blank.
        """
        for source, row, text in self._reader.read(span, seen, on_bad_row):
            document = Document(source, row, text)
            checked = text_of_row(on_bad_row, self._checked_text, document)
            yield document if checked == text else replace(document, text=checked)

    def _checked_text(self, document: Document) -> str:
        """Return the text of a document.

        Raises:
            BadRow: it is too long or has a lone surrogate, which JSON strings may contain but no
                tokenizer can encode.
        """
        try:
            size = len(document.text.encode())
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair (U+{ord(document.text[error.start]):04X})"
            why = f"character {error.start} is {half}, which is not text; correct the row"
            raise BadRow(document.where, why, "half a surrogate pair") from error
        if size > self._longest:
            raise too_long(document.where, self._longest)
        return document.text

    def drops(self, document: Document) -> str | None:
        """Return why the filters drop a document; None if they retain it."""
        return "blank" if document.blank else self._filter(document.text)

    def holds_no_text(self) -> UserError:
        """Return the error for a corpus without documents."""
        return UserError(f"{self._key}: holds no text; name a corpus that does")

    def fingerprint(self) -> str:
        """Return a hash that identifies the content without reading it.

        It covers paths, sizes and modification times of files. A hub dataset is identified by id,
        subset and split, and assumed not to change.
        """
        config = self.config
        facts: list[Any] = [config.name, config.text_column, config.subset, config.split]
        facts += self._reader.facts()
        if config.filter != FilterConfig():
            facts.append(asdict(config.filter))
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_filter"}

    @cached_property
    def _filter(self) -> Filter:
        return build_filter(self.config.filter)


class HubReader:
    """Reader of one split of a Hugging Face dataset, on the hub or in a local folder."""

    def __init__(self, config: DataConfig) -> None:
        """Initialize; the first read opens the dataset."""
        self.files: list[InputFile] = []
        self.ignored = 0
        self.hidden: list[str] = []  # `datasets` skips hidden files without reporting them
        self._config = config
        self._name, self._column = str(config.dataset), str(config.text_column)
        self._folder = dataset_folder(config)

    def facts(self) -> list[Any]:
        """Return the dataset's name and, for a local folder, its files; hub datasets are fixed."""
        below = [] if self._folder is None else files_below(self._folder, hidden=[])
        files = [InputFile.here(file) for file in below]
        return [self._config.dataset, *(file.facts for file in files)]

    def spans(self, longest: int | None) -> list[Span]:
        """Return ranges of rows for a local folder, or complete files for a hub dataset."""
        if self._folder is None:
            return [Span(0, n, n + 1) for n in range(self._data.num_shards)]
        n_rows, size = len(self._data), self._row_bytes()
        rows = max(1, n_rows if longest is None else longest // size)
        bounds = [*range(0, n_rows, rows), n_rows]
        return [Span(0, start, stop, (stop - start) * size) for start, stop in pairwise(bounds)]

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (dataset, row, text); rows of a streamed file are numbered within the file."""
        read = self._mapped if self._folder else self._streamed
        for row, text in read(span, on_bad_row):
            seen(len(text))
            yield self._name, row, text

    def _mapped(self, span: Span, on_bad_row: OnBadRow) -> Iterator[tuple[int, str]]:
        assert span.stop is not None, span
        rows = self._chosen(self._data.select(range(span.start, span.stop)))
        return self._texts(self._name, rows, span.start, on_bad_row)

    def _streamed(self, span: Span, on_bad_row: OnBadRow) -> Iterator[tuple[int, str]]:
        file = self._data.shard(num_shards=self._data.num_shards, index=span.start)
        return self._texts(f"{self._name}: file {span.start}", file, 0, on_bad_row)

    def _texts(
        self, where: str, rows: Any, first: int, on_bad_row: OnBadRow
    ) -> Iterator[tuple[int, str]]:
        """Yield number and text of each row, read as Arrow types, which are exact."""
        row = first
        for table in _without_library_errors(where, rows.with_format("arrow").iter(_ROWS)):
            self._check(table.schema.names)
            for text in arrow_texts(f"{where}: row", row, self._column, table, on_bad_row):
                yield row, text
                row += 1

    @cached_property
    def _data(self) -> Any:
        data = _load(self._config, self._folder)
        names = data.column_names  # None for some streamed datasets until rows are read
        if names is not None:
            self._check(names)
        return data

    def _row_bytes(self) -> int:
        """Estimate the size of a row of a local folder."""
        first = self._chosen(self._data).with_format("arrow")[:_ROWS]
        return max(1, first.nbytes // max(1, len(first)))

    def _chosen(self, rows: Any) -> Any:
        """Return the rows with the columns that are read."""
        columns = read_columns(self._column)
        return rows if columns is None else rows.select_columns(columns)

    def _check(self, names: list[str]) -> None:
        if self._column == ROW:
            return
        for name, _ in columns_of(self._column):
            if name not in names:
                choices = ", ".join(names)
                raise UserError(
                    f"data.text_column: {self._name} has no {name!r}; write one of: {choices}"
                )


def dataset_folder(config: DataConfig) -> Path | None:
    """Return data.dataset as a local folder; None for a hub id.

    Raises:
        UserError: it looks like a path but is not a folder.
    """
    name = config.dataset or ""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name.startswith((".", "~", "/")) or path.exists():
        raise UserError(f"data.dataset: {name} is not a folder; write a folder or a hub id")
    return None


def _without_library_errors(where: str, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield rows, and raise any of the many error types of the library as a UserError."""
    try:
        yield from rows
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: cannot be read: {reason}") from error


def _load(config: DataConfig, folder: Path | None) -> Any:
    datasets = import_optional("datasets", "data.name: huggingface", extra="data")
    split = config.split or "train"
    saved = folder and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists())
    if saved and config.subset is not None:
        raise UserError("data.subset: has no effect on a dataset saved to a folder; remove it")
    try:
        if not folder:
            return datasets.load_dataset(config.dataset, config.subset, split=split, streaming=True)
        if not saved:
            return datasets.load_dataset(str(folder), config.subset, split=split)
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises a dozen unrelated types
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"data.dataset: cannot load {config.dataset}, split {split!r}"
        raise UserError(f"{what}: {reason}") from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or split): loaded}
    if split not in splits:
        raise UserError(f"data.split: no {split!r}; write one of: {', '.join(splits)}")
    return splits[split]


class ShardReader:
    """Reader of one column of MDS shards, in the order of the shards."""

    def __init__(self, config: DataConfig) -> None:
        self.files: list[InputFile] = []
        self.ignored, self.hidden = 0, list[str]()
        self._column = config.text_column or "text"
        self._folder = open_shards(config, FetchOptions.from_config(config))

    def facts(self) -> list[Any]:
        """Return the fingerprint of the index, and the column."""
        return [self._index.fingerprint, self._column]

    def spans(self, longest: int | None) -> list[Span]:
        """Return one span per shard."""
        sizes = self._index.raw_bytes.tolist()
        return [Span(0, n, n + 1, size) for n, size in enumerate(sizes)]

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (shard, sample, text)."""
        name = self._index.names[span.start]
        columns = self._index.columns(span.start).names
        if self._column not in (*columns, ROW):
            raise UserError(f"{name}: {no_column(self._column, list(columns))}")
        with self._folder.pin(self._index.spec(span.start)) as path:
            shard = MDSShard(path, self._index, span.start)
            for row in range(len(shard)):
                where = f"{name}:{row}"
                text = text_of_row(on_bad_row, self._text, shard, where, row, columns)
                seen(len(text))
                yield name, row, text

    def _text(self, shard: MDSShard, where: str, row: int, columns: Iterable[str]) -> str:
        if self._column == ROW:
            return row_text(where, {column: shard.read(row, column) for column in columns})
        return as_text(where, self._column, shard.read(row, self._column))

    @cached_property
    def _index(self) -> MDSIndex:
        index = read_index(self._folder)
        if isinstance(index, StreamIndex):
            raise UserError(
                "data.remote: its token shards hold no text to prepare; name MDS shards with a"
                " column of text"
            )
        return with_sample(self._folder, index)


_KINDS: dict[str, tuple[Callable[[DataConfig], Reader], str]] = {
    "python_stdlib": (FileReader, "data.name: python_stdlib"),
    "files": (FileReader, "data.paths"),
    "huggingface": (HubReader, "data.dataset"),
    "shards": (ShardReader, "data"),
}
"""Reader by data.name, and the key that the error about a corpus without text names."""
