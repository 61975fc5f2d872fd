"""Which files of rows a gauntlet needs, and what is known of each: `eval/fetch.yaml`.

`commands.fetch_eval_data` calls it. A file is named by its path below the data folder, as in
LLM Foundry: `world_knowledge/arc_easy.jsonl`. Tasks may share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.fetch.maps import MAPS
from llmfoundry.gauntlet.tasks.gauntlet_file import read_gauntlet
from llmfoundry.gauntlet.tasks.task_reader import read_section
from llmfoundry.recipe.front.paths import find_file, show
from llmfoundry.recipe.front.yamlfile import read_yaml
from llmfoundry.recipe.values.checks import nearest, one_of

FOLDER = "local_data/"
"""What ends the part of a dataset_uri before a file's name."""


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hugging Face hub, or a local folder that `datasets` loads."""

    id: str
    split: str
    mapping: str
    """A name in `maps.MAPS`."""
    config: str | None = None
    revision: str | None = None
    """Branch, tag or commit; refs/convert/parquet where the data set is a loading script."""
    sample: int | None = None
    """Rows to draw, always the same; unset: all."""


@dataclass(frozen=True)
class DataFile:
    """A file that tasks read, as LLM Foundry has it, and where else its rows are."""

    file: str
    rows: int
    bytes: int | None = None
    sha256: str | None = None
    licence: str | None = None
    hub: HubSource | None = None
    differs: str | None = None
    """Why the hub's rows make another version of the task."""


def read_table(path: Path) -> dict[str, DataFile]:
    """The entries of a fetch table, by file.

    Raises:
        UserError: every unknown key, missing key and unknown mapping.
    """
    entries = read_yaml(path).get("files")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{show(path)}: files: is missing or empty; write a list of files")
    problems: list[str] = []
    table: dict[str, DataFile] = {}
    for i, raw in enumerate(entries):
        where = f"{show(path)}: files[{i}]"
        file = read_section(DataFile, raw, where, problems)
        if file is not None and file.hub is not None:
            problems.extend(one_of(f"{where}: hub.mapping", file.hub.mapping, MAPS))
        if file is not None and file.file in table:
            problems.append(f"{where}: file: {file.file} is there before; remove one")
        elif file is not None:
            table[file.file] = file
    if problems:
        raise UserError(*problems)
    return table


def files_of_gauntlet(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The files that a gauntlet's tasks read, each with their labels; and tasks that read others.

    Raises:
        UserError: the gauntlet file has a mistake.
    """
    tasks = read_gauntlet(path).tasks
    return _by_file((task.label, task.dataset_uri) for task in tasks)


def files_of_tasks(labels: Iterable[str], folder: str = "eval/tasks") -> dict[str, list[str]]:
    """The files that the tasks of these labels read, as the YAMLs in `folder` define them.

    Raises:
        UserError: a label is defined nowhere; names the nearest.
    """
    defined = {
        str(task["label"]): str(task["dataset_uri"])
        for path in sorted(find_file(folder, "tasks").glob("*.yaml"))
        for task in read_yaml(path)["tasks"]
    }
    unknown = [
        f"tasks: {label}: is not defined in {folder}{nearest(label, defined)}"
        for label in labels
        if label not in defined
    ]
    if unknown:
        raise UserError(*unknown)
    files, others = _by_file((label, defined[label]) for label in labels)
    if others:
        raise UserError(*(f"tasks: {task}; it needs no fetching" for task in others))
    return files


def _by_file(tasks: Iterable[tuple[str, str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Labels by file below the data folder, and `label reads URI` for all other tasks."""
    files: dict[str, list[str]] = {}
    others = []
    for label, uri in tasks:
        _, found, file = uri.replace("\\", "/").rpartition(FOLDER)
        if not found or "://" in uri:
            others.append(f"{label} reads {uri}")
        elif label not in files.setdefault(file, []):
            files[file].append(label)
    return files, others
