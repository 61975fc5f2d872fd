"""Which files a recipe's `data` section means, here and at URLs, in one fixed order.

Called by the corpus. Order: as written, each folder's and glob's files sorted by name.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.preparation.read.open_files import InputFile
from llmfoundry.data.preparation.read.readers import is_readable, readable_kinds, suffix_of
from llmfoundry.data.preparation.read.remote_input import list_url
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

# Tests of the standard library hold deliberately broken sources; the packages are not part of it.
_NOT_STDLIB = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)


def find_files(config: DataConfig) -> tuple[list[InputFile], int]:
    """The files, and how many of other kinds lie in the named folders.

    Raises:
        UserError: a path that does not exist, is of no readable kind, or is named twice.
    """
    return _FILES[config.name](config)


def files_below(folder: Path, *, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """All files below a folder, sorted by relative path, linked folders entered once."""
    files: list[Path] = []
    entered: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(here)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [name for name in folders if name not in leave_out]
        files += [Path(here, name) for name in names]
    return sorted(files)


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed would be left out without a word."""
    raise UserError(f"{error.filename}: cannot be read: {error.strerror or error}") from error


def _stdlib_files(config: DataConfig) -> tuple[list[InputFile], int]:
    root = Path(sysconfig.get_path("stdlib"))
    below = files_below(root, leave_out=_NOT_STDLIB)
    return [InputFile.here(file) for file in below if file.suffix == ".py" and file.is_file()], 0


def _named_files(config: DataConfig) -> tuple[list[InputFile], int]:
    """Files of data.paths, in the order written, each folder's and glob's sorted."""
    places: dict[str, int] = {}  # by what a link stands for
    files: dict[str, InputFile] = {}
    ignored, reads = 0, readable_kinds(config.text_column)
    for place, name in enumerate(config.paths):
        for is_folder, below in _matches(config, name):
            read = [file for file in below if is_readable(file.name, config.text_column)]
            if is_folder:
                ignored += len(below) - len(read)
            elif not read:
                raise UserError(f"data.paths: {below[0].name}: {_unreadable(below[0].name, reads)}")
            for file in read:
                real = file.name if "://" in file.name else os.path.realpath(file.name)
                if (first := places.setdefault(real, place)) != place:
                    raise UserError(
                        f"data.paths: {file.name} is named by {config.paths[first]!r} and {name!r};"
                        " its text would count double; write it once"
                    )
                files.setdefault(real, file)
    if not files:
        raise UserError(f"data.paths: no readable file in {config.paths}; it reads {reads}")
    return list(files.values()), ignored


def _matches(config: DataConfig, name: str) -> Iterator[tuple[bool, list[InputFile]]]:
    """For each folder or file that an entry of data.paths names: is it a folder, and its files."""
    if "://" in name:
        single, files = list_url(name, FetchOptions.from_config(config))
        yield not single, [InputFile(*file) for file in files]
        return
    for path in _paths(name):
        _keep_cache_out(config, path)
        below = files_below(path) if path.is_dir() else [path]
        yield path.is_dir(), [_known(file, config.text_column) for file in below]


def _known(path: Path, text_column: str | None) -> InputFile:
    """A file by its own name, also where it is a link, in a folder by the folder's one name."""
    path = path.parent.resolve() / path.name
    return (
        InputFile.here(path) if is_readable(path.name, text_column) else InputFile(str(path), 0, 0)
    )


def _paths(name: str) -> list[Path]:
    try:
        path = Path(name).expanduser()
        if os.path.lexists(path):
            return [path]
        matched = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(name) else []
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL, ~nobody
        raise UserError(f"data.paths: {name[:80]!r}: {error}; correct the path") from error
    if not glob.has_magic(name):
        raise UserError(f"data.paths: {name} does not exist; write a file, a folder or a glob")
    if not matched:
        raise UserError(f"data.paths: no file matches {name!r}; correct the glob")
    return [Path(match) for match in matched]


def _keep_cache_out(config: DataConfig, path: Path) -> None:
    """Prepared files below a corpus folder would be read as text the next time."""
    cache = Path(config.cache_folder).expanduser().resolve()
    if path.is_dir() and cache.is_relative_to(path.resolve()):
        raise UserError(
            f"data.cache_folder: {config.cache_folder} lies in {path}, which data.paths names;"
            " choose a folder outside it"
        )


def _unreadable(name: str, reads: str) -> str:
    suffix = suffix_of(name)
    what = f"cannot read {suffix} files" if suffix else "has no suffix"
    return f"{what}; convert it to one of: {reads}"


_FILES: dict[str, Callable[[DataConfig], tuple[list[InputFile], int]]] = {
    "python_stdlib": _stdlib_files,
    "files": _named_files,
}
