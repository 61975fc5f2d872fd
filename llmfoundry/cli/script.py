"""Common runner of all scripts: parses the command line, loads and checks the recipe.

Entry point: `run`, which a script calls with the dataclass of its recipe. The module of the command
is imported only after the recipe is checked, so that `--help`, `--cfg job` and errors in a recipe
do not wait for the import of torch.
"""

from __future__ import annotations

import llmfoundry.cli.interrupt  # noqa: F401  first: Ctrl-C ends the slow imports quietly

# isort: split

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from llmfoundry import __version__
from llmfoundry.cli.command_line import CommandLine, parse, refuse_more
from llmfoundry.cli.completion import complete
from llmfoundry.cli.help import help_text, unknown_flag
from llmfoundry.cli.sweep_points import SweepRecipe, is_sweeps, sweep_config, sweep_points
from llmfoundry.command_text import as_called
from llmfoundry.errors import RunFailure, UserError, disk_full, one_line
from llmfoundry.exit_status import FAILED, GIVE_UP, MISTAKE, record_end
from llmfoundry.migrate.other_tools import register_other_tools
from llmfoundry.processes import allocator_settings, end_with_starters
from llmfoundry.recipe.load import checked, import_for_help, read
from llmfoundry.recipe.overrides import as_list
from llmfoundry.recipe.paths import recipe_name, shipped
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import is_named, notes, placed, require, to_yaml
from llmfoundry.redaction import mask_tracebacks, public
from llmfoundry.terminal import outlast_readers, quiet_libraries, show_loading

DISTRIBUTION = "llmfoundry-recipes"


def run(
    recipe_type: type[Any] | Callable[[CommandLine], type[Any]],
    target: str,
    argv: Sequence[str] | None = None,
    *,
    help: str | None = None,
) -> None:
    """Read the command line, load the recipe, and call `target` with it.

    Args:
        recipe_type: dataclass of the recipe, with `check()`; or a function that chooses it.
        target: `package.module:function`, called with the checked and resolved recipe.
        argv: the arguments; None: those of the process.
        help: docstring of the script, printed by --help.

    Raises:
        SystemExit: status 2 after a UserError (printed to stderr) or on a full disk, 130 after
            Ctrl-C, that of a RunFailure (1 unless it has its own), 1 after a sweep with a failed
            run.
    """
    recipe: Any = None  # until its command starts
    outlast_readers()
    register_other_tools()
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--complete"]:
        return print(*_completions(recipe_type, words[1:]), sep="\n")

    # settings of the process, before anything imports torch
    mask_tracebacks()
    end_with_starters()
    os.environ.update(allocator_settings(os.environ))
    try:
        # read the recipe, then run the command or print its plan
        command = parse(words)
        chosen = recipe_type if isinstance(recipe_type, type) else recipe_type(command)
        recipe = _answer(chosen, command, help or "")
        if recipe is not None:
            module, _, function = target.partition(":")
            quiet_libraries()
            show_loading()
            resolved = recipe.resolve() if hasattr(recipe, "resolve") else recipe
            if "--dry-run" in command.flags:
                from llmfoundry.cli.dry_run import print_plan  # slow: imports all commands

                print_plan(function, resolved, command.hardware)
            else:
                getattr(importlib.import_module(module), function)(resolved)
    except (UserError, RunFailure) as error:
        _exit(_report(error, recipe))
    except KeyboardInterrupt:
        _exit(130)
    except Exception as error:
        if disk_full(error):
            line = f"{one_line(error)}; make room there, and run the same command"
            print(public(line), file=sys.stderr)
            record_end(MISTAKE, "full", [public(line)])
            _exit(2)
        message = f"{type(error).__name__}: {error}"
        record_end(FAILED, "error", [public(line) for line in message.splitlines()])
        if not _one_of_several():
            raise
        sys.excepthook(*sys.exc_info())  # which masks secrets
        _exit(1)


def _report(error: UserError | RunFailure, recipe: Any) -> int:
    """Print and record why a command failed; return its exit status.

    Args:
        error: the failure.
        recipe: the checked recipe; None if the failure is in the recipe itself.
    """
    rank = int(os.environ.get("RANK", 0))
    # Every rank finds the same mistakes in a recipe. Later failures may be of a single rank.
    if rank == 0 or (recipe is not None and not getattr(error, "of_all", False)):
        prefix = f"[rank {rank}] " if rank else ""
        lines = error.lines() if isinstance(error, UserError) else [str(error)]
        lines = [f"{prefix}{as_called(public(placed(recipe, line)))}" for line in lines]
        print(*lines, sep="\n", file=sys.stderr)
    status = MISTAKE if isinstance(error, UserError) else error.status
    kinds = {MISTAKE: "mistake", FAILED: "lost", GIVE_UP: "given up"}
    kind = getattr(error, "kind", "") or kinds.get(status, "stopped")
    record_end(status, kind, [public(line) for line in str(error).splitlines()])
    return status


def _completions(
    recipe_type: type[Any] | Callable[[CommandLine], type[Any]], words: Sequence[str]
) -> list[str]:
    """Return the completions of the last word: keys of the recipe or of a sweep."""
    *before, word = words or [""]
    if not is_sweeps(word):
        sweep_keys = ["sweep=", "sweep."] if word and "sweep".startswith(word) else []
        return [*complete(recipe_type, words), *sweep_keys]
    # `sweep=` is short for `sweep.how=`
    completions = complete(SweepRecipe, [*before, word.replace("sweep=", "sweep.how=")])
    if word.startswith("sweep="):
        completions = [key.replace("sweep.how=", "sweep=") for key in completions]
    return completions


def _exit(status: int) -> NoReturn:
    """Exit after an error; as one of several ranks, without waiting for the others.

    A normal exit would wait for Python threads and for pending collectives, up to
    parallel.dist_timeout, while the other ranks wait for this process to exit.
    """
    if _one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _one_of_several() -> bool:
    """Return whether a launcher has started several processes."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _answer(recipe_type: type[Any], command: CommandLine, help: str) -> Any:
    """Handle the flags; return the checked recipe if the command is to run, else None."""
    schema = Schema.of(recipe_type)
    if command.unknown_flags:
        raise UserError(*(unknown_flag(schema, *flag) for flag in command.unknown_flags))
    _take_folder(recipe_type, command)

    # flags that only print
    if "--version" in command.flags:
        print(versions())
        return None
    if "--help" in command.flags:
        import_for_help(schema, command.recipe, command.overrides)
        if command.topic is not None and is_sweeps(f"{command.topic}."):
            schema = Schema.of(SweepRecipe)
        print(as_called(help_text(schema, command, help)))
        return None

    # flags that need a recipe
    _check_installation()
    _need_recipe(schema, command)
    if "-m" in command.flags or any(map(is_sweeps, command.overrides)):
        return _sweep(recipe_type, command)
    if "--cfg" in command.flags:
        return _print(recipe_type, command)
    recipe = checked(recipe_type, command.recipe, command.overrides)
    if "RANK" not in os.environ and os.environ.get("SLURM_PROCID", "0") == "0":
        for note in notes(recipe):
            print(as_called(public(note)), file=sys.stderr, flush=True)
    return recipe


def _sweep(recipe_type: type[Any], command: CommandLine) -> None:
    """Run the points of a sweep, or print their recipes (--cfg job) or names (--dry-run)."""
    config = sweep_config(command)
    if "--cfg" in command.flags:
        for point in sweep_points(recipe_type, command, config):
            print(f"---\n# {public(point.place)}")
            _print(recipe_type, replace(command, overrides=point.overrides))
        return
    if "RANK" in os.environ:
        raise UserError("-m: starts processes of its own; run it without torchrun")
    points = sweep_points(recipe_type, command, config)
    if "--dry-run" in command.flags:
        print(*(public(point.place) for point in points), sep="\n")
        rungs = config.rungs(len(points))
        if len(rungs) > 1:
            print(f"paused at {', '.join(rungs[:-1])}; one of {config.factor} continues each time")
        print(f"dry run: {len(points)} runs were checked; nothing was written or started")
        return
    from llmfoundry.cli.sweep_runs import sweep

    words = [sys.executable, sys.argv[0]]
    if command.recipe is not None:
        words.append(command.recipe)
    if sweep(points, words, config, recipe_type):
        sys.exit(FAILED)


def _take_folder(recipe_type: type[Any], command: CommandLine) -> None:
    """Convert a path without a key to an override, for scripts that work on a run or a file.

    Raises:
        UserError: there are several paths for one key.
    """
    # the key of the recipe that takes such a path, and whether the path is a recipe's instead
    folders_key = getattr(recipe_type, "FOLDERS_KEY", None)
    folder_key = getattr(recipe_type, "FOLDER_KEY", None)
    file_key = getattr(recipe_type, "FILE_KEY", None)
    key, word = folders_key or folder_key or file_key, command.recipe
    is_recipe = word is not None and file_key is None and word.endswith((".yaml", ".yml"))
    if folders_key is None or is_recipe:
        refuse_more(command)
    if key is None or word is None or is_recipe:
        return
    if any(override.startswith(f"{key}=") for override in command.overrides):
        raise UserError(f"{word}: is {key}, which is given a second time; remove one of the two")

    # replace the path by an override
    command.recipe = None
    value = as_list([word, *command.more]) if folders_key else word
    command.overrides.insert(0, f"{key}={value}")


def versions() -> str:
    """Return the versions of the project and its main dependencies, one per line."""
    lines = []
    for name in (DISTRIBUTION, "torch", "transformers"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} {__version__ if name == DISTRIBUTION else 'is not installed'}")
    return "\n".join([*lines, f"Python {platform.python_version()} on {platform.platform()}"])


def _print(recipe_type: type[Any], command: CommandLine) -> None:
    """Print the complete recipe, even if it is not valid.

    Raises:
        UserError: problems of the recipe, after it is printed.
    """
    recipe, problems = read(recipe_type, command.recipe, command.overrides)
    require(recipe)
    if not is_named(recipe) and "--resolve" not in command.flags:
        recipe.run_name = None  # a copy under another name is another run
    print(to_yaml(recipe, resolve="--resolve" in command.flags), end="")
    if problems:
        raise UserError(*problems)


def _need_recipe(schema: Schema, command: CommandLine) -> None:
    """Check that a training run has a recipe or a name; the default name is that of the recipe.

    Raises:
        UserError: it has neither.
    """
    has_name = any(word.startswith("run_name=") for word in command.overrides)
    if "run_name" in schema.keys and command.recipe is None and not has_name:
        recipes = ", ".join(recipe_name(path) for path in shipped(schema))
        raise UserError(f"no recipe given; write one as the first argument: {recipes}")


def _check_installation() -> None:
    """Check that LLM Foundry is not installed, whose package has the same import name.

    Raises:
        UserError: both are installed.
    """
    installed = []
    for name in ("llm-foundry", DISTRIBUTION):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        installed.append(name)
    if len(installed) == 2:
        raise UserError(
            "llm-foundry and llmfoundry-recipes are both installed and share the import name"
            " llmfoundry; write `pip uninstall llm-foundry`, then install this project again"
        )
