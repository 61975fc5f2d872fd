"""Datasets of the Hugging Face hub, and folders that `datasets` loads; called by the corpus.

A hub dataset is streamed, file by file, so that one of terabytes needs no disk here. A folder is
read where it lies: its Arrow tables are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmfoundry.data.preparation.read.bad_row import OnBadRow, text_of_row
from llmfoundry.data.preparation.read.inputs import files_below
from llmfoundry.data.preparation.read.open_files import InputFile
from llmfoundry.data.preparation.read.readers import (
    ROW,
    arrow_texts,
    columns_of,
    pick,
    read_columns,
)
from llmfoundry.data.preparation.read.spans import Span
from llmfoundry.errors import UserError, import_optional
from llmfoundry.recipe.data import DataConfig

_ROWS = 1024  # read at a time


class HubText:
    """The rows of one split."""

    def __init__(self, config: DataConfig) -> None:
        """Name the dataset; it is looked at when it is first read.

        Raises:
            UserError: it is written as a path, and no folder is there.
        """
        self.files: list[InputFile] = []
        self.ignored = 0
        self._config = config
        self._name, self._column = str(config.dataset), str(config.text_column)
        self._folder = dataset_folder(config)

    def facts(self) -> list[Any]:
        """Its name; of a folder also its files, while the hub is taken not to change."""
        below = [] if self._folder is None else files_below(self._folder)
        files = [InputFile.here(file) for file in below]
        return [self._config.dataset, *([file.name, file.size, file.stamp] for file in files)]

    def spans(self, longest: int | None) -> list[Span]:
        """Rows of a folder, or whole files of a hub dataset.

        Raises:
            UserError: it cannot be loaded, or lacks the column.
        """
        if self._folder is None:
            return [Span(0, n, n + 1) for n in range(self._data.num_shards)]
        n_rows, size = len(self._data), self._row_bytes()
        rows = max(1, n_rows if longest is None else longest // size)
        bounds = [*range(0, n_rows, rows), n_rows]
        return [Span(0, start, stop, (stop - start) * size) for start, stop in pairwise(bounds)]

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (dataset, row, text); rows of a streamed file are counted within it.

        Raises:
            UserError: something cannot be read.
        """
        if self._folder is None:
            rows = self._streamed(span.start, on_bad_row)
        else:
            rows = self._mapped(span, on_bad_row)
        for row, text in rows:
            seen(len(text))
            yield self._name, row, text

    def _mapped(self, span: Span, on_bad_row: OnBadRow) -> Iterator[tuple[int, str]]:
        assert span.stop is not None, span
        rows = self._data.select(range(span.start, span.stop))
        row = span.start
        tables = self._chosen(rows).with_format("arrow").iter(_ROWS)
        for table in _reached(self._name, tables):
            for text in arrow_texts(f"{self._name}: row", row, self._column, table, on_bad_row):
                yield row, text
                row += 1

    def _streamed(self, number: int, on_bad_row: OnBadRow) -> Iterator[tuple[int, str]]:
        file = self._data.shard(num_shards=self._data.num_shards, index=number)
        for row, values in enumerate(_reached(f"{self._name}: file {number}", file)):
            self._check(list(values))
            where = f"{self._name}: file {number}, row {row}"
            yield row, text_of_row(on_bad_row, pick, where, self._column, values)

    @cached_property
    def _data(self) -> Any:
        data = _load(self._config, self._folder)
        names = data.column_names  # unknown of some streamed ones until they are read
        if names is not None:
            self._check(names)
        return data

    def _row_bytes(self) -> int:
        """About how much text a row of a folder has."""
        first = self._chosen(self._data).with_format("arrow")[:_ROWS]
        return max(1, first.nbytes // max(1, len(first)))

    def _chosen(self, rows: Any) -> Any:
        """The rows with the columns that are read."""
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
    """data.dataset as a local folder, or None for a hub id.

    Raises:
        UserError: it is written as a path, and no folder is there.
    """
    name = config.dataset or ""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name.startswith((".", "~", "/")) or path.exists():
        raise UserError(f"data.dataset: {name} is not a folder; write a folder or a hub id")
    return None


def _reached(where: str, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows; the library raises a dozen unrelated types, its client's and its readers' too."""
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
    except Exception as error:  # the library raises a dozen unrelated types, its client's too
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"data.dataset: cannot load {config.dataset}, split {split!r}"
        raise UserError(f"{what}: {reason}") from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or split): loaded}
    if split not in splits:
        raise UserError(f"data.split: no {split!r}; write one of: {', '.join(splits)}")
    return splits[split]
