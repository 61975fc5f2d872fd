"""`Corpus`: the documents that the recipe's `data` section names, in one fixed order.

Read by the split, the tokenizer's training and the preparation. Each pass reads the files anew and
streams them, so a corpus may be larger than memory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmfoundry.data.readers import READERS, parquet_text, read_file, suffix_of
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

# Tests of the standard library hold deliberately broken sources; the packages are not part of it.
_NOT_STDLIB = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        source: its file, or the name of its dataset.
        row: line or row in it; None where the file is one document.
        text: what to train on; may be blank.
    """

    source: str
    row: int | None
    text: str

    @property
    def where(self) -> str:
        """Source and row, for messages."""
        return self.source if self.row is None else f"{self.source}:{self.row}"

    @property
    def blank(self) -> bool:
        """Nothing but white space: dropped, and counted, by whoever reads."""
        return not self.text or self.text.isspace()


class Corpus:
    """Documents of one recipe, read anew at each iteration.

    Attributes:
        files: the files behind it, in order; empty for huggingface.
        ignored: files of other kinds that lie in the named folders.

    Raises:
        UserError: a path that does not exist, is of no readable kind, or is named twice.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = replace(config)
        self.config.fill()
        self.files, self.ignored = _FILES[config.name](self.config)

    def __iter__(self) -> Iterator[Document]:
        """Every document, blank ones too.

        Raises:
            UserError: something cannot be read, or no document holds any text.
        """
        found = False
        read = self._read_dataset if self.config.name == "huggingface" else self._read_files
        for document in read():
            _check_text(document)
            found = found or not document.blank
            yield document
        if not found:
            raise UserError(f"{_KEY[self.config.name]}: holds no text; name a corpus that does")

    def fingerprint(self) -> str:
        """Names the corpus' content without reading it: paths, sizes and times of its files.

        A hub dataset is named by its id, subset and split: it is taken not to change.
        """
        config = self.config
        facts: list[Any] = [config.name, config.text_column, config.subset, config.split]
        files = self.files
        if config.name == "huggingface":
            facts.append(config.dataset)
            files = _files_below(_dataset_folder(config))
        for file in files:
            status = file.stat()
            facts.append([str(file), status.st_size, status.st_mtime_ns])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def size(self) -> int | None:
        """Bytes of text, for progress bars; None where only reading would tell."""
        if not self.files or any(suffix_of(f) in _UNSIZED for f in self.files):
            return None
        return sum(file.stat().st_size for file in self.files)

    def _read_files(self) -> Iterator[Document]:
        for file in self.files:
            for row, text in read_file(file, self.config.text_column or "text"):
                yield Document(str(file), row, text)

    def _read_dataset(self) -> Iterator[Document]:
        column, name = str(self.config.text_column), str(self.config.dataset)
        names = self._dataset.column_names
        if column not in names:
            line = f"data.text_column: {name} has no {column!r}; write one of: {', '.join(names)}"
            raise UserError(line)
        row = 0
        for table in self._dataset.select_columns([column]).with_format("arrow").iter(1024):
            for value in table.column(0):
                yield Document(name, row, parquet_text(f"{name}: row {row}", column, value))
                row += 1

    @cached_property
    def _dataset(self) -> Any:
        return _load_dataset(self.config)


def _check_text(document: Document) -> None:
    """JSON and Python strings may hold half a surrogate pair, which no tokenizer can read."""
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair (U+{ord(document.text[error.start]):04X})"
        raise UserError(
            f"{document.where}: character {error.start} is {half}, which is no text;"
            " correct the row"
        ) from error


def _stdlib_files(config: DataConfig) -> tuple[list[Path], int]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _files_below(root, leave_out=_NOT_STDLIB)
        if file.suffix == ".py" and file.is_file()
    ]
    return files, 0


def _named_files(config: DataConfig) -> tuple[list[Path], int]:
    """Files of data.paths, in the order written, each folder's and glob's sorted."""
    files: dict[Path, int] = {}
    ignored = 0
    for place, name in enumerate(config.paths):
        for path in _matches(name):
            _keep_cache_out(config, path)
            below = _files_below(path) if path.is_dir() else [path]
            readable = [file for file in below if suffix_of(file) in READERS]
            if path.is_dir():
                ignored += len(below) - len(readable)
            elif not readable:
                raise UserError(f"data.paths: {path}: {_unreadable(path)}")
            for file in readable:
                if (first := files.setdefault(file.resolve(), place)) != place:
                    raise UserError(
                        f"data.paths: {file} is named by {config.paths[first]!r} and {name!r};"
                        " its text would count double; write it once"
                    )
    if not files:
        kinds = " ".join(READERS)
        raise UserError(f"data.paths: no readable file in {config.paths}; it reads {kinds}")
    return list(files), ignored


def _keep_cache_out(config: DataConfig, path: Path) -> None:
    """Prepared files below a corpus folder would be read as text the next time."""
    cache = Path(config.cache_folder).expanduser().resolve()
    if path.is_dir() and cache.is_relative_to(path.resolve()):
        raise UserError(
            f"data.cache_folder: {config.cache_folder} lies in {path}, which data.paths names;"
            " choose a folder outside it"
        )


def _matches(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    if not glob.has_magic(name):
        raise UserError(f"data.paths: {name} does not exist; write a file, a folder or a glob")
    matched = sorted(glob.glob(str(path), recursive=True))
    if not matched:
        raise UserError(f"data.paths: no file matches {name!r}; correct the glob")
    return [Path(match) for match in matched]


def _unreadable(path: Path) -> str:
    suffix = suffix_of(path)
    what = f"cannot read {suffix} files" if suffix else "has no suffix"
    return f"{what}; convert it to one of: {' '.join(READERS)}"


def _no_files(config: DataConfig) -> tuple[list[Path], int]:
    return [], 0


def _files_below(folder: Path | None, *, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """All files below a folder, sorted by relative path, linked folders entered once."""
    files: list[Path] = []
    entered: set[str] = set()
    for here, folders, names in os.walk(folder or "", followlinks=True):
        real = os.path.realpath(here)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [name for name in folders if name not in leave_out]
        files += [Path(here, name) for name in names]
    return sorted(files)


def _dataset_folder(config: DataConfig) -> Path | None:
    """data.dataset as a local folder, or None for a hub id.

    Raises:
        UserError: it is written as a path, and no folder is there.
    """
    name = config.dataset or ""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name.startswith((".", "~", "/")) or path.exists():
        raise UserError(f"data.dataset: {name} is no folder; write a folder or a hub id")
    return None


def _load_dataset(config: DataConfig) -> Any:
    """The asked split, as `datasets` loads it.

    Raises:
        UserError: with the library's own reason in it.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data.name: huggingface needs `datasets`; write: pip install 'llmfoundry-recipes[data]'"
        ) from error
    folder, split = _dataset_folder(config), config.split or "train"
    saved = folder and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists())
    if saved and config.subset is not None:
        raise UserError("data.subset: has no effect on a dataset saved to a folder; remove it")
    try:
        if not saved:
            source = str(folder) if folder else config.dataset
            return datasets.load_dataset(source, config.subset, split=split)
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises a dozen unrelated types, its client's too
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"data.dataset: cannot load {config.dataset}, split {split!r}"
        raise UserError(f"{what}: {reason}") from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or split): loaded}
    if split not in splits:
        raise UserError(f"data.split: no {split!r}; write one of: {', '.join(splits)}")
    return splits[split]


# Disk sizes of these say nothing about the bytes of text in them.
_UNSIZED = {suffix for suffix in READERS if suffix not in (".txt", ".md", ".py")}

_FILES: dict[str, Callable[[DataConfig], tuple[list[Path], int]]] = {
    "python_stdlib": _stdlib_files,
    "files": _named_files,
    "huggingface": _no_files,
}

_KEY = {
    "python_stdlib": "data.name: python_stdlib",
    "files": "data.paths",
    "huggingface": "data.dataset",
}
