"""`scripts/migrate.py`: a file of LLM Foundry's becomes a recipe, with a report line by line."""

from __future__ import annotations

from pathlib import Path

from llmfoundry.command_text import as_called
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, read_guarded
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet
from llmfoundry.migrate.entry import MigrationStatus
from llmfoundry.migrate.migration import GAUNTLET, Migration, migrate, read_theirs
from llmfoundry.migrate.written import gauntlet_text, recipe_text, report
from llmfoundry.recipe.before_training import MigrateRecipe
from llmfoundry.recipe.paths import show
from llmfoundry.redaction import hide, public


def migrate_file(recipe: MigrateRecipe) -> None:
    """Read a file of LLM Foundry, print a report and write the recipe.

    Raises:
        UserError: the file is not LLM Foundry's or nothing in it has a counterpart here; or the
            recipe was written and needs edits by hand, with a line for each.
    """
    # read and report
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

    # write the recipe, and the gauntlet's file
    for target, text in _texts(result, output).items():
        _write(target, text)
    if result.gauntlet:
        _check_gauntlet(gauntlet_path(output, result), result)
    if result.problems:
        raise UserError(*(f"{show(output)}: {problem}" for problem in result.problems))


def prepare(recipe: MigrateRecipe) -> tuple[Migration, Path]:
    """Return the migration and the path of the recipe; write nothing.

    Raises:
        UserError: the file cannot be migrated, or a file of the result already exists.
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
    """Return the texts of the files to write by path, in the order of writing."""
    texts, gauntlet = dict[Path, str](), gauntlet_path(output, result)
    if result.gauntlet:
        texts[gauntlet] = gauntlet_text(result, show(gauntlet))
    if result.recipe_type is not None:
        texts[output] = recipe_text(result, show(output))
    return texts


def _holds(path: Path, text: str) -> bool:
    """Return whether a file already has this text, for example from the same command."""
    try:
        return read_guarded(path) == text.encode()
    except (OSError, ValueError):
        return False


def gauntlet_path(output: Path, result: Migration) -> Path:
    """Return the path of the gauntlet's file.

    It is next to the recipe. A migrated file that only has tasks has no recipe, so that the
    gauntlet is the output.
    """
    if result.source.kind == GAUNTLET:
        return output
    return output.with_name(f"{output.stem}-gauntlet.yaml")


def _output(recipe: MigrateRecipe, path: Path) -> Path:
    """Return the path of the recipe: `output`, or the name of the migrated file."""
    if recipe.output is not None:
        return Path(recipe.output).expanduser()
    same_name = Path(f"{path.stem}.yaml")
    return Path(f"{path.stem}-migrated.yaml") if same_name.exists() else same_name


def _write(path: Path, text: str) -> None:
    """Write a file, unless it already has this text.

    Raises:
        UserError: the file cannot be written.
    """
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
    """Read the written gauntlet and add its problems to the result's.

    A file that only has categories is not read: it must first be joined with a list of tasks.
    """
    if "icl_tasks" not in result.gauntlet:
        print(f"eval_gauntlet: {show(path)}, in a file with icl_tasks, takes these categories")
        return
    try:
        read_gauntlet(path)
    except UserError as error:
        result.problems += error.problems
