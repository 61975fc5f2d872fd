"""Write the generated evaluation sets of a recipe into files.

`python -m llmfoundry.gauntlet.tasks.generated.write eval/generated.yaml` writes one jsonl file for
each set of that recipe into the folder beside it, eval/generated/; the same recipe gives the same
bytes. A gauntlet file can also ask for rows that are in no file, by addresses such as
generated://deduction?level=3: see `generated.sets`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.tasks.generated.sets import GENERATORS, SetConfig, make_set, read_set


def read_recipe(path: Path) -> dict[str, SetConfig]:
    """The sets of a recipe by the names of their files; `file` is the generator's name if unset.

    Raises:
        UserError: no list of sets; unknown keys and generators, wrong values; a file named twice.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: cannot be read as YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("sets"), list):
        raise UserError(f"{path}: sets: is missing; write a list of sets")
    sets: dict[str, SetConfig] = {}
    problems: list[str] = []
    for i, entry in enumerate(content["sets"]):
        where = f"{path}: sets[{i}]"
        try:
            name, config = _read_entry(entry, where)
        except UserError as error:
            problems += error.problems
            continue
        if name in sets:
            problems.append(f"{where}: file: {name} is there already; write another name")
        sets[name] = config
    if problems:
        raise UserError(*problems)
    return sets


def write_sets(recipe: Path) -> list[Path]:
    """Write every set of a recipe into the folder of its name; the files written."""
    folder = recipe.with_suffix("")
    folder.mkdir(exist_ok=True)
    written = []
    for name, config in read_recipe(recipe).items():
        path = folder / f"{name}.jsonl"
        path.write_text(make_set(config, f"{recipe}: {name}"), encoding="utf-8", newline="\n")
        written.append(path)
    return written


def _read_entry(entry: Any, where: str) -> tuple[str, SetConfig]:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: is not a mapping of keys to values; write {{name: ..., ...}}")
    given = {str(key): value for key, value in entry.items()}
    if "name" not in given:
        raise UserError(f"{where}: name: is missing; write one of {', '.join(GENERATORS)}")
    name = given.pop("name")
    file = given.pop("file", name)
    config = read_set(name, given, where)
    if not isinstance(file, str) or not file or Path(file).name != file:
        raise UserError(f"{where}: file: {file!r}; write a name, without folder and ending")
    return file, config


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    if len(arguments) != 1:
        print(
            "write one recipe:"
            " python -m llmfoundry.gauntlet.tasks.generated.write eval/generated.yaml"
        )
        return 2
    try:
        for path in write_sets(Path(arguments[0])):
            print(path)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
