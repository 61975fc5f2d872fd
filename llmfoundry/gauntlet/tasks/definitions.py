"""Files of task definitions: benchmarks described once, for the gauntlets that choose among them.

`tasks.read_gauntlet` calls `read_definitions` for a file's key `definitions`, a path or a list of
them. Such a file has `tasks`, a list of entries as in icl_tasks but without num_fewshot, which is
the gauntlet's choice; an entry of icl_tasks with the same label starts from it.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.tasks.task_reader import find, place, read_section, translate
from llmfoundry.recipe.front import yamlfile


def read_definitions(
    files: Mapping[Path, Mapping[str, Any]], schema: type, notes: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """The entries, by label, in the files that the `definitions` of `files` name.

    Args:
        files: contents of gauntlet files by path; usually one.
        schema: `TaskConfig`, which the entries are checked with.
        notes: as in `translate`.

    Raises:
        UserError: every mistake in them.
    """
    defined: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for path, content in files.items():
        names = content.get("definitions") or []
        for name in names if isinstance(names, list) else [names]:
            source = find(str(name), beside=path, key=f"{path}: definitions")
            entries = yamlfile.read(source).get("tasks")
            if not isinstance(entries, list) or not entries:
                problems.append(f"{source}: tasks: is missing or empty; write a list of tasks")
                continue
            for i, entry in enumerate(entries):
                where = place(f"{source}: tasks", i, entry)
                task = _defined(entry, where, schema, problems, notes)
                _anchor(task, source)
                label = str(task.get("label"))
                if label in defined:
                    problems.append(f"{where}: label: is defined before; remove one")
                defined[label] = task
    if problems:
        raise UserError(*problems)
    return defined


def _defined(
    raw: Any, where: str, schema: type, problems: list[str], notes: dict[str, list[str]]
) -> dict[str, Any]:
    """One entry, checked and in our keys."""
    entry = translate(raw, where, problems, notes) if isinstance(raw, Mapping) else {}
    if "num_fewshot" in entry:
        problems.append(f"{where}: num_fewshot: is the gauntlet's choice; write it in icl_tasks")
    read_section(schema, {**entry, "num_fewshot": [0]} if entry else raw, where, problems)
    return entry


def _anchor(entry: dict[str, Any], source: Path) -> None:
    """Let dataset_uri be meant from the file of definitions, where its rows are beside that."""
    uri = entry.get("dataset_uri")
    if isinstance(uri, str) and "://" not in uri:
        beside = str(source.parent / uri)
        if Path(beside).exists() or glob.glob(beside):
            entry["dataset_uri"] = beside
