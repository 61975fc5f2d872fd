"""`scripts/migrate.py`: a file of LLM Foundry's becomes a recipe, with a report line by line."""

from __future__ import annotations

from pathlib import Path

from llmfoundry.command_text import as_called
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, read_guarded
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet
from llmfoundry.migrate.entry import MigrationStatus
from llmfoundry.migrate.migration import (
    GAUNTLET,
    Migration,
    gauntlet_text,
    migrate,
    read_theirs,
    recipe_text,
    report,
)
from llmfoundry.recipe.before_training import MigrateRecipe
from llmfoundry.recipe.paths import show
from llmfoundry.redaction import hide, public


def migrate_file(recipe: MigrateRecipe) -> None:
    """Read, report, write.

    Raises:
        UserError: the file is none of LLM Foundry's, nothing of it can be had here, or the result
            needs an edit, of which there is a line each.
    """
    result, output = prepare(recipe)
    for text in report(result):
        print(as_called(public(text)))
    for line in result.lines:
        if line.key.endswith("model.name") and line.verdict is MigrationStatus.REFUSED:
            raise UserError(f"{recipe.theirs}: {line.key}: {line.taken.why}; nothing was written")
    if not result.source.kind:
        raise UserError(
            f"{recipe.theirs}: starts neither training nor evaluation; there is no recipe to write"
        )
    beside = gauntlet_path(output, result)
    for target, text in _texts(result, output).items():
        _write(target, text)
    if result.gauntlet:
        _check_gauntlet(beside, result)
    if result.problems:
        raise UserError(*(f"{show(output)}: {problem}" for problem in result.problems))


def prepare(recipe: MigrateRecipe) -> tuple[Migration, Path]:
    """What would be written, and where.

    Raises:
        UserError: as `migrate_file`, before anything is written.
    """
    assert recipe.theirs is not None
    path = Path(recipe.theirs).expanduser()
    source = read_theirs(path)
    hide(source.values)
    output = _output(recipe, path)
    result = migrate(source, show(output.with_name(f"{output.stem}-gauntlet.yaml")))
    if output.exists() and path.exists() and output.samefile(path):
        raise UserError(f"output: {show(output)} is theirs itself; write another")
    if not recipe.overwrite:
        for target, text in _texts(result, output).items():
            if target.exists() and not _holds(target, text):
                raise UserError(
                    f"output: {show(target)} is there already; write another, or overwrite=true"
                )
    return result, output


def _texts(result: Migration, output: Path) -> dict[Path, str]:
    """The files that are written, by path, in this order."""
    texts, beside = dict[Path, str](), gauntlet_path(output, result)
    if result.gauntlet:
        texts[beside] = gauntlet_text(result, show(beside))
    if result.recipe_type is not None:
        texts[output] = recipe_text(result, show(output))
    return texts


def _holds(path: Path, text: str) -> bool:
    """Whether a file holds this text already, as after the same command."""
    try:
        return read_guarded(path) == text.encode()
    except (OSError, ValueError):
        return False


def gauntlet_path(output: Path, result: Migration) -> Path:
    """Where tasks go: beside the recipe, or, of a file of tasks alone, in its place."""
    is_alone = result.source.kind == GAUNTLET
    return output if is_alone else output.with_name(f"{output.stem}-gauntlet.yaml")


def _output(recipe: MigrateRecipe, path: Path) -> Path:
    if recipe.output is not None:
        return Path(recipe.output).expanduser()
    taken = Path(f"{path.stem}.yaml")
    return Path(f"{path.stem}-migrated.yaml") if taken.exists() else taken


def _write(path: Path, text: str) -> None:
    """Raises UserError where the folder cannot be written."""
    if _holds(path, text):
        print(f"{show(path)} holds this already")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise UserError(f"output: {show(path)}: {error.strerror}; write another path") from error
    except UnicodeEncodeError as error:
        raise UserError(f"theirs: has text that is not UTF-8 ({error.object!r:.60})") from error
    print(f"{show(path)} is written")


def _check_gauntlet(path: Path, result: Migration) -> None:
    """Add what our reader finds wrong with the tasks; categories alone wait for a file of tasks."""
    if "icl_tasks" not in result.gauntlet:
        print(f"eval_gauntlet: {show(path)}, in a file with icl_tasks, takes these categories")
        return
    try:
        read_gauntlet(path)
    except UserError as error:
        result.problems += error.problems
