"""The front of every script: path and overrides in, a typed and checked recipe out.

A script calls `run` with its recipe's dataclass. The command itself is imported only once the
recipe is known to be sound, so that `--help`, `--cfg job` and every mistake in a recipe are
answered without torch.
"""

from __future__ import annotations

from llmfoundry.cli import interrupt  # noqa: F401  first: Ctrl-C ends the slow imports quietly

# isort: split

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from llmfoundry import __version__
from llmfoundry.cli.command_line import CommandLine, parse, refuse_more
from llmfoundry.cli.completion import complete
from llmfoundry.cli.help import help_text, unknown_flag
from llmfoundry.cli.other_tools import register_other_tools
from llmfoundry.cli.sweep_points import SweepRecipe, is_sweeps, sweep_config, sweep_points
from llmfoundry.command_text import as_called
from llmfoundry.errors import RunFailure, UserError, disk_full, one_line
from llmfoundry.exit_status import FAILED, GIVE_UP, MISTAKE, record_end
from llmfoundry.processes import end_with_starters
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
        recipe_type: the script's recipe, a dataclass with `check()`; or what chooses it.
        target: `package.module:function`, called with the checked recipe, defaults resolved.
        argv: the arguments; unset: those of the process.
        help: the script's docstring, printed by --help.

    Raises:
        SystemExit: 2 after a UserError (its lines on stderr) or on a full disk, 130 after Ctrl-C, 1
            after a RunFailure, but for those with a status of their own, or a sweep in which a run
            failed.
    """
    recipe: Any = None  # until its command starts
    outlast_readers()
    register_other_tools()
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--complete"]:
        return print(*_completions(recipe_type, words[1:]), sep="\n")
    mask_tracebacks()
    end_with_starters()
    os.environ.update(allocator_settings(os.environ))  # a plugin may import torch
    try:
        command = parse(words)
        chosen = recipe_type if isinstance(recipe_type, type) else recipe_type(command)
        recipe = _answer(chosen, command, help or "")
        if recipe is not None:
            module, _, function = target.partition(":")
            quiet_libraries()
            show_loading()
            resolved = recipe.resolve() if hasattr(recipe, "resolve") else recipe
            if "--dry-run" in command.flags:
                from llmfoundry.cli.dry_run import print_plan  # imports what the commands do

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
    """What the last word can become: of the recipe, or of the sweep, which is in no recipe."""
    *before, word = words or [""]
    if not is_sweeps(word):
        own = ["sweep=", "sweep."] if word and "sweep".startswith(word) else []
        return [*complete(recipe_type, words), *own]
    found = complete(SweepRecipe, [*before, word.replace("sweep=", "sweep.how=")])
    return [each.replace("sweep.how=", word[:6]) if word[5] == "=" else each for each in found]


def _exit(status: int) -> NoReturn:
    """End this process after an error; as one of several without waiting for any other.

    Python would first wait for its threads, and PyTorch for messages under way: for as long as
    parallel.dist_timeout, while the others wait for this one's end to end themselves.
    """
    if _one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _answer(recipe_type: type[Any], command: CommandLine, help: str) -> Any:
    """Do what the flags ask; the checked recipe where a run remains to be done, else None."""
    schema = Schema.of(recipe_type)
    if command.unknown_flags:
        raise UserError(*(unknown_flag(schema, *flag) for flag in command.unknown_flags))
    _take_folder(recipe_type, command)
    if "--version" in command.flags:
        print(versions())
        return None
    if "--help" in command.flags:
        import_for_help(schema, command.recipe, command.overrides)
        if command.topic is not None and is_sweeps(f"{command.topic}."):
            schema = Schema.of(SweepRecipe)
        print(as_called(help_text(schema, command, help)))
        return None
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
    """Run every point, or only print or list them."""
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
        if len(rungs := config.rungs(len(points))) > 1:
            print(f"paused at {', '.join(rungs[:-1])}; one of {config.factor} continues each time")
        print(f"dry run: {len(points)} runs were checked; nothing was written or started")
        return
    from llmfoundry.cli.sweep_runs import sweep

    words = [sys.executable, sys.argv[0], *([] if command.recipe is None else [command.recipe])]
    if sweep(points, words, config):
        sys.exit(FAILED)


def _take_folder(recipe_type: type[Any], command: CommandLine) -> None:
    """Scripts that work on a run, or on another tool's file, take its path without a key."""
    names = ("FOLDERS_KEY", "FOLDER_KEY", "FILE_KEY")
    folders, folder, file = (getattr(recipe_type, name, None) for name in names)
    key, word = folders or folder or file, command.recipe
    is_recipe = word is not None and file is None and word.endswith((".yaml", ".yml"))
    if folders is None or is_recipe:
        refuse_more(command)
    if key is None or word is None or is_recipe:
        return
    if any(override.startswith(f"{key}=") for override in command.overrides):
        raise UserError(f"{word}: is {key}, which is given a second time; remove one of the two")
    command.recipe = None
    written = as_list([word, *command.more]) if folders else word
    command.overrides.insert(0, f"{key}={written}")


def versions() -> str:
    """A line for each part that decides what a run does."""
    lines = []
    for name in (DISTRIBUTION, "torch", "transformers"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} {__version__ if name == DISTRIBUTION else 'is not installed'}")
    return "\n".join([*lines, f"Python {platform.python_version()} on {platform.platform()}"])


def _print(recipe_type: type[Any], command: CommandLine) -> None:
    """The whole recipe on stdout, even if `check` finds problems, which then follow."""
    recipe, problems = read(recipe_type, command.recipe, command.overrides)
    require(recipe)
    if not is_named(recipe) and "--resolve" not in command.flags:
        recipe.run_name = None  # a copy under another name is another run
    print(to_yaml(recipe, resolve="--resolve" in command.flags), end="")
    if problems:
        raise UserError(*problems)


def _need_recipe(schema: Schema, command: CommandLine) -> None:
    """A training run takes its name from its recipe's file."""
    named = any(word.startswith("run_name=") for word in command.overrides)
    if "run_name" in schema.keys and command.recipe is None and not named:
        recipes = ", ".join(recipe_name(path) for path in shipped(schema))
        raise UserError(f"no recipe given; write one as the first argument: {recipes}")


def _check_installation() -> None:
    """LLM Foundry's own distribution brings a package of the same name."""
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


ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
ALLOCATOR_VARIABLES = (
    ALLOCATOR_VARIABLE,
    "PYTORCH_CUDA_ALLOC_CONF",  # older names, which still count
    "PYTORCH_HIP_ALLOC_CONF",
)


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment before PyTorch is imported: nothing where the user set some.

    Rows of experts and of packed documents are of another length in each step; in segments of fixed
    sizes the gaps between them add up, and a step that fits runs out of memory.
    """
    is_set = any(name in environment for name in ALLOCATOR_VARIABLES)
    return {} if is_set else {ALLOCATOR_VARIABLE: "expandable_segments:True"}
