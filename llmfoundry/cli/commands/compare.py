"""`scripts/compare.py`: runs side by side, as a table here and as a page (`loggers/pages/`)."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import RUN_LOCK, SWEEP_LOCK, is_locked
from llmfoundry.gauntlet.paired import (
    ModelAnswers,
    PairedComparison,
    compare_rows,
    latest_answers,
)
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.pages.comparison import (
    HEAD,
    ComparedRun,
    read_run,
    run_rows,
    verdict,
    write_comparison,
)
from llmfoundry.loggers.pages.page import is_ours
from llmfoundry.recipe.after_training import CompareRecipe
from llmfoundry.redaction import public
from llmfoundry.terminal import columns

RECORD = "metrics.jsonl"
INDEX = "index.html"
SECONDS = 15.0  # between two pages, with `follow`


def compare(recipe: CompareRecipe) -> None:
    """Write the page, until no run is under way with `follow`, and print the table.

    Raises:
        UserError: a folder is no run's and holds none, no run can be read, or the page cannot be
            written, or is another's.
    """
    output, said = page_path(recipe), set[str]()
    refuse_page(output)
    answers = RunAnswers()
    while True:
        runs, warnings = read_runs(recipe)
        comparisons, lines = answers.compare(runs)
        warnings += lines
        for line in warnings:
            if line not in said:
                print(public(line), file=sys.stderr, flush=True)
        said |= {*warnings}
        going = any(run.status == "running" for run in runs) or is_sweeping(recipe)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            follows = recipe.follow and going
            write_comparison(
                output, runs, follows=follows, warnings=warnings, comparisons=comparisons
            )
        except OSError as error:
            raise UserError(f"output: {output}: {error.strerror}; write another path") from error
        if not (recipe.follow and going):
            break
        time.sleep(SECONDS)
    print_runs(runs)
    for comparison in comparisons:
        Console().table(comparison.table())
    Console().banner([("page", str(output))])


class RunAnswers:
    """Answers of runs to the rows of their evaluations; files are read again if they change."""

    def __init__(self) -> None:
        """Start without answers."""
        self._known: dict[Path, tuple[object, ModelAnswers | None]] = {}

    def compare(self, runs: Sequence[ComparedRun]) -> tuple[list[PairedComparison], list[str]]:
        """Compare each run with the first, of the runs whose answers are in their folders.

        Returns:
            The paired differences, and a line for each evaluation that cannot be read.
        """
        answers: list[ModelAnswers] = []
        problems: list[str] = []
        for run in runs:
            try:
                of_run = self._read(run)
            except UserError as error:
                problems += [f"not compared row by row: {line}" for line in error.problems]
                continue
            answers += [of_run] if of_run is not None else []
        return [compare_rows(model, answers[0]) for model in answers[1:]], problems

    def _read(self, run: ComparedRun) -> ModelAnswers | None:
        paths = sorted(run.folder.glob("eval/*/*.json*"))
        state = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
        known_state, answers = self._known.get(run.folder, (None, None))
        if known_state != state:
            answers = latest_answers(run.name, run.folder)
            self._known[run.folder] = (state, answers)
        return answers


def print_runs(runs: Sequence[ComparedRun]) -> None:
    """A line for each run, the best marked, and the sentences that say which it is and why."""
    found = verdict(runs)
    rows = run_rows(runs)
    if found is not None:
        rows = [
            (f"{row[0]}  best" if n in found.best else row[0], *row[1:])
            for n, row in enumerate(rows)
        ]
    used = [n for n in range(len(HEAD)) if any(row[n] for row in rows)]
    shown = [[row[n] for n in used] for row in rows]
    lines = columns([HEAD[n] for n in used], shown, left=(0, 1))
    Console().table("\n".join([*lines, *(found.lines if found is not None else ())]))


def refuse_page(output: Path) -> None:
    """Before anything is read or written.

    Raises:
        UserError: what is there is no file, or a page of somebody else's.
    """
    if output.exists() and not output.is_file():  # root would put the page in a device's place
        raise UserError(f"output: {output}: is not a file; write another path")
    try:
        is_free = not output.exists() or is_ours(output)
    except OSError as error:
        raise UserError(f"output: {output}: {one_line(error)}; write another path") from error
    if not is_free:
        raise UserError(
            f"output: {output}: is not a page that this command wrote; move it, or write another"
            " path, output=compare.html"
        )


def is_sweeping(recipe: CompareRecipe) -> bool:
    """Whether a sweep is at work in one of the folders, perhaps between two of its runs."""
    folders = [Path(name).expanduser() for name in recipe.runs]
    return any(is_held(folder, SWEEP_LOCK) for folder in folders)


def page_path(recipe: CompareRecipe) -> Path:
    """Where the page goes: beside the runs of one folder, else into the working folder."""
    if recipe.output is not None:
        return Path(recipe.output).expanduser()
    given = [Path(name).expanduser() for name in recipe.runs]
    if len(given) == 1 and not is_run(given[0]):
        return given[0] / INDEX
    return Path("compare.html")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / RECORD).is_file()


def read_runs(recipe: CompareRecipe) -> tuple[list[ComparedRun], list[str]]:
    """The runs that were named, and those in folders that hold some, in this order.

    Returns:
        The runs, and a line for each that cannot be read.

    Raises:
        UserError: a folder is neither, or none of the runs can be read; all such are named.
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
    runs, unread = [], list[str]()
    for folder, name in zip(folders, run_names(folders), strict=True):
        try:
            runs.append(read_run(folder, name, is_held=is_held(folder)))
        except UserError as error:
            unread += error.problems
    if problems or not runs:
        raise UserError(*problems, *unread)
    return runs, [f"left out: {line}" for line in unread]


def run_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, as many parts as it takes to tell it from the others."""
    plain = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(1, max(map(len, plain), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in plain]
        if max(Counter(names).values(), default=1) == 1:
            break
    return names


def is_held(folder: Path, name: str = RUN_LOCK) -> bool:
    """Whether a process is at work in a folder."""
    return is_locked(folder / name)
