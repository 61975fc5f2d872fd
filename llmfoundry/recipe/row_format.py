"""`data.format: auto`: what the rows of one's own files are, by the columns of the first.

The data section asks for it while a recipe is read, so that all that depends on the format is
checked before anything starts. Only files of this machine are looked into.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

TEXT = "text"
SIGNATURES = (  # the first whose columns are all there
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
_MOST_BYTES = 1 << 22  # of a file, that are looked at for its first row
_MOST_FILES = 1000  # of a folder or a glob


def columns_of_rows(paths: list[str]) -> list[str] | None:
    """The columns of the first row that is found at `data.paths`; None: nothing is there yet.

    Empty: the files hold documents, or cannot be looked into, such as those at a URL.
    """
    if any("://" in name for name in paths):
        return []
    files = [path for name in paths for path in islice(_files(name), _MOST_FILES)]
    if any(path.suffix.lower() not in _COLUMNS for path in files):
        return []
    for path in files:
        try:
            names = _COLUMNS[path.suffix.lower()](path)
        except (OSError, ValueError, ImportError, RecursionError, csv.Error):
            continue  # whoever reads all of its rows says what is wrong with it
        if names:
            return names
    return [] if files else None


def format_of(columns: list[str]) -> str | None:
    """The format that rows of these columns have; None: none that is known."""
    named = {*columns}
    return next((name for name, needed in SIGNATURES if named.issuperset(needed)), None)


def _files(name: str) -> Iterator[Path]:
    """The files that an entry of `data.paths` names, sorted in each folder."""
    path = Path(os.path.expanduser(name))
    is_there = os.path.lexists(path)
    found = [path] if is_there else map(Path, sorted(glob.iglob(str(path), recursive=True)))
    for one in found:
        if one.is_dir():
            for here, folders, names in os.walk(one):
                folders.sort()
                yield from (Path(here, file) for file in sorted(names))
        else:
            yield one


def _beginning(path: Path) -> str:
    """The first characters of a file; nothing of a device or a pipe.

    Raises:
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return ""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode("utf-8-sig", errors="replace")


def _of_json(path: Path) -> list[str]:
    """Names in the first object of a .jsonl file, or of a .json file's list."""
    text = _beginning(path).lstrip().removeprefix("[").lstrip()
    row, _ = json.JSONDecoder().raw_decode(text)
    return [*row] if isinstance(row, dict) else []


def _of_csv(path: Path) -> list[str]:
    return next(csv.reader(io.StringIO(_beginning(path))), [])


def _of_parquet(path: Path) -> list[str]:
    from pyarrow.parquet import read_schema

    return list(read_schema(path).names) if stat.S_ISREG(os.stat(path).st_mode) else []


_COLUMNS: dict[str, Callable[[Path], list[str]]] = {
    ".jsonl": _of_json,
    ".json": _of_json,
    ".csv": _of_csv,
    ".parquet": _of_parquet,
}
