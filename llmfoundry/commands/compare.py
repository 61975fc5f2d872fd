"""`scripts/compare.py`: runs side by side, as a table here and as a page (`loggers/pages/`)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmfoundry.checkpoint.locks import LOCK
from llmfoundry.errors import UserError
from llmfoundry.files import try_lock
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.pages.comparison import (
    HEAD,
    ComparedRun,
    read_run,
    run_rows,
    write_comparison,
)
from llmfoundry.recipe.after_training import CompareRecipe
from llmfoundry.terminal import columns

RECORD = "metrics.jsonl"
SECONDS = 15.0  # between two pages, with `follow`


def compare(recipe: CompareRecipe) -> None:
    """Write the page, until no run is under way with `follow`, and print the table.

    Raises:
        UserError: a folder is no run's and holds none, or the page cannot be written.
    """
    console, output = Console(), page_path(recipe)
    if output.exists() and not output.is_file():  # root would put the page in a device's place
        raise UserError(f"output: {output}: is not a file; write another path")
    while True:
        runs = read_runs(recipe)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_comparison(output, runs, follows=recipe.follow)
        except OSError as error:
            raise UserError(f"output: {output}: {error.strerror}; write another path") from error
        if not (recipe.follow and any(run.status == "running" for run in runs)):
            break
        time.sleep(SECONDS)
    rows = run_rows(runs)
    used = [n for n in range(len(HEAD)) if any(row[n] for row in rows)]
    shown = [[row[n] for n in used] for row in rows]
    console.table("\n".join(columns([HEAD[n] for n in used], shown, left=(0, 1))))
    console.banner([("page", str(output))])


def page_path(recipe: CompareRecipe) -> Path:
    """Where the page goes: beside the runs of one folder, else into the working folder."""
    if recipe.output is not None:
        return Path(recipe.output).expanduser()
    given = [Path(name).expanduser() for name in recipe.runs]
    if len(given) == 1 and not is_run(given[0]):
        return given[0] / "index.html"
    return Path("compare.html")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / RECORD).is_file()


def read_runs(recipe: CompareRecipe) -> list[ComparedRun]:
    """The runs that were named, and those in folders that hold some, in this order.

    Raises:
        UserError: a folder is neither, or what it holds cannot be read; all such are named.
    """
    folders: list[Path] = []
    problems: list[str] = []
    for name in recipe.runs:
        folder = Path(name).expanduser()
        inside = sorted(path.parent for path in folder.glob(f"*/{RECORD}") if path.is_file())
        found = [folder] if is_run(folder) else inside
        if not found:
            what = f"has no {RECORD}, nor has a folder in it"
            if not folder.is_dir():
                what = "is not a folder" if folder.exists() else "is not there"
            problems.append(f"runs: {folder} {what}; write a run's folder, or one that holds runs")
        folders += [each for each in found if each not in folders]
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            runs.append(read_run(folder, name, is_held=is_held(folder)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, as many parts as it takes to tell it from the others."""
    plain = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(1, max(map(len, plain), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in plain]
        if max(Counter(names).values(), default=1) == 1:
            break
    return names


def is_held(folder: Path) -> bool:
    """Whether a process of this machine, or of one that shares its files, is at work there."""
    path = folder / LOCK
    if not path.exists():
        return False
    try:
        lock = try_lock(path, shared=True)
    except OSError:
        return False
    if lock is not None:
        lock.release()
    return lock is None
