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
    """Write the comparison page and print the table.

    With `follow`, the page is rewritten until no run is training.

    Raises:
        UserError: a folder is neither a run nor a folder of runs, no run can be read, or the page
            cannot be written or would replace another file.
    """
    output, printed = page_path(recipe), set[str]()
    refuse_page(output)
    answers = RunAnswers()
    while True:
        # read the runs; print each warning once
        runs, warnings = read_runs(recipe)
        comparisons, lines = answers.compare(runs)
        warnings += lines
        for line in warnings:
            if line not in printed:
                print(public(line), file=sys.stderr, flush=True)
        printed |= {*warnings}

        # write the page; a page that follows reloads itself in the browser
        is_running = any(run.status == "running" for run in runs) or is_sweeping(recipe)
        follows = recipe.follow and is_running
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_comparison(
                output, runs, follows=follows, warnings=warnings, comparisons=comparisons
            )
        except OSError as error:
            raise UserError(f"output: {output}: {error.strerror}; write another path") from error
        if not follows:
            break
        time.sleep(SECONDS)

    # print the result
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
                run_answers = self._read(run)
            except UserError as error:
                problems += [f"not compared row by row: {line}" for line in error.problems]
                continue
            if run_answers is not None:
                answers.append(run_answers)
        return [compare_rows(model, answers[0]) for model in answers[1:]], problems

    def _read(self, run: ComparedRun) -> ModelAnswers | None:
        """Return the answers of a run's latest evaluation; unchanged files are not read again."""
        paths = sorted(run.folder.glob("eval/*/*.json*"))
        state = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
        known_state, answers = self._known.get(run.folder, (None, None))
        if known_state != state:
            answers = latest_answers(run.name, run.folder)
            self._known[run.folder] = (state, answers)
        return answers


def print_runs(runs: Sequence[ComparedRun]) -> None:
    """Print a table of the runs, with the best run marked, and the reason why it is the best."""
    # mark the best runs in the first column
    result = verdict(runs)
    rows = []
    for index, (name, *cells) in enumerate(run_rows(runs)):
        is_best = result is not None and index in result.best
        rows.append((f"{name}  best" if is_best else name, *cells))

    # leave out empty columns
    used = [n for n in range(len(HEAD)) if any(row[n] for row in rows)]
    used_cells = [[row[n] for n in used] for row in rows]
    lines = columns([HEAD[n] for n in used], used_cells, left=(0, 1))
    if result is not None:
        lines = [*lines, *result.lines]
    Console().table("\n".join(lines))


def refuse_page(output: Path) -> None:
    """Check that the page would not replace another file, before runs are read.

    Raises:
        UserError: the path exists and is not a page of this command.
    """
    if output.exists() and not output.is_file():  # as root, the page could replace a device
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
    """Return whether a sweep is running in one of the folders, possibly between two of its runs."""
    folders = [Path(name).expanduser() for name in recipe.runs]
    return any(is_held(folder, SWEEP_LOCK) for folder in folders)


def page_path(recipe: CompareRecipe) -> Path:
    """Return the path of the page: in the folder of runs if there is one, else compare.html."""
    if recipe.output is not None:
        return Path(recipe.output).expanduser()
    folders = [Path(name).expanduser() for name in recipe.runs]
    if len(folders) == 1 and not is_run(folders[0]):
        return folders[0] / INDEX
    return Path("compare.html")


def is_run(folder: Path) -> bool:
    """Return whether a folder is the folder of a run."""
    return (folder / RECORD).is_file()


def read_runs(recipe: CompareRecipe) -> tuple[list[ComparedRun], list[str]]:
    """Read the runs of `recipe.runs`, which has folders of runs and folders that contain runs.

    Returns:
        The runs in the order of the recipe, and a line for each run that cannot be read.

    Raises:
        UserError: a folder has no run, or no run can be read; with a line for each.
    """
    # find the folders of the runs
    folders: list[Path] = []
    problems: list[str] = []
    for name in recipe.runs:
        folder = Path(name).expanduser()
        inside = sorted(path.parent for path in folder.glob(f"*/{RECORD}") if path.is_file())
        run_folders = [folder] if is_run(folder) else inside
        if not run_folders:
            why = f"has no {RECORD}, nor has a folder in it"
            if not folder.is_dir():
                why = "is not a folder" if folder.exists() else "is not there"
            problems.append(f"runs: {folder} {why}; write a run's folder, or one that holds runs")
        folders += [run_folder for run_folder in run_folders if run_folder not in folders]

    # read them
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
    """Return names of runs: the last parts of their paths, as few as make all names different."""
    all_parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(1, max(map(len, all_parts), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in all_parts]
        if max(Counter(names).values(), default=1) == 1:
            break
    return names


def is_held(folder: Path, name: str = RUN_LOCK) -> bool:
    """Return whether a process holds the lock of a folder."""
    return is_locked(folder / name)
