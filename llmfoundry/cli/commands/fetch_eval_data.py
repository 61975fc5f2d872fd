"""Command of `scripts/fetch_eval_data.py`: download benchmark rows, which are not shipped."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.fetch import (
    MANIFEST,
    DataFile,
    Route,
    fetch,
    files_of_gauntlet,
    files_of_tasks,
    from_foundry,
    from_hub,
    read_table,
)
from llmfoundry.recipe.before_training import FetchRecipe
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import IS_REPOSITORY, ROOT, find_shipped, show

_LOCAL_DATA = (ROOT if IS_REPOSITORY else Path()) / "eval" / "local_data"


def fetch_eval_data(recipe: FetchRecipe) -> None:
    """Fetch the files of a gauntlet or of tasks; print a line for each.

    Raises:
        UserError: one line for each file that could not be fetched; all others are in the folder.
    """
    recipe.fill()
    table = read_table(find_shipped(recipe.table, "table"))
    wanted, unknown = _wanted(recipe, table)
    output = Path(recipe.output).expanduser() if recipe.output else _LOCAL_DATA
    missing = list(unknown)
    there = 0
    for outcome in fetch((table[name] for name in wanted), output=output, route=_route(recipe)):
        labels = ", ".join(wanted[outcome.file])
        if outcome.there:
            there += 1
            tqdm.write(f"{labels:32} {outcome.line}")
        else:
            missing.append(f"{labels}: {outcome.line}")
    count = f"{there:,} of {len(wanted) + len(unknown):,} files are in {show(output)}"
    print(f"{count}; checksums and sources: {show(output / MANIFEST)}")
    if missing:
        raise UserError(*missing)


def _wanted(
    recipe: FetchRecipe, table: dict[str, DataFile]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files to fetch with the labels of their tasks, and errors for unknown files."""
    if recipe.gauntlet is None:
        files = files_of_tasks(recipe.tasks)
    else:
        files, others = files_of_gauntlet(Path(recipe.gauntlet))
        for other in others:
            print(f"{other}: needs no fetching")
    lines = [
        f"{', '.join(labels)}: {file}: is not in {recipe.table}{nearest(file, table)}"
        for file, labels in files.items()
        if file not in table
    ]
    return {file: labels for file, labels in files.items() if file in table}, lines


def _route(recipe: FetchRecipe) -> Route:
    if recipe.from_foundry is not None:
        return from_foundry(Path(recipe.from_foundry).expanduser())
    return from_hub()
