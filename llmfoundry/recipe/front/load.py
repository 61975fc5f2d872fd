"""The front of every script: path and overrides in, a typed and checked recipe out.

A script calls `run` with its recipe's dataclass; rooms that read a saved recipe call `load`. The
command itself is imported only once the recipe is known to be sound, so that `--help`, `--cfg job`
and every mistake in a recipe are answered without torch.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llmfoundry import __version__
from llmfoundry.errors import MOST_LINES, RunFailure, UserError, one_line
from llmfoundry.masking import hide, hide_override, mask_tracebacks, public
from llmfoundry.processes import end_with_starters
from llmfoundry.recipe.front.argv import CommandLine, parse
from llmfoundry.recipe.front.called import as_called
from llmfoundry.recipe.front.paths import find_recipe, recipe_name, shipped
from llmfoundry.recipe.front.typed import Problem, build, is_named, keys, remember, require, to_yaml
from llmfoundry.terminal import outlast_readers, quiet_libraries, tell_loading

T = TypeVar("T")
DISTRIBUTION = "llmfoundry-recipes"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, somebody's share of it, a file


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
        target: `package.module:function`, called with the checked, unfilled recipe.
        argv: the arguments; unset: those of the process.
        help: the script's docstring, printed by --help.

    Raises:
        SystemExit: 2 after a UserError (its lines on stderr) or on a full disk, 130 after Ctrl-C, 1
            after a RunFailure, or a sweep in which a run failed.
    """
    started = False
    outlast_readers()
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--complete"]:
        from llmfoundry.recipe.front.help.complete import complete

        return print(*complete(recipe_type, words[1:]), sep="\n")
    mask_tracebacks()
    end_with_starters()
    try:
        command = parse(words)
        chosen = recipe_type if isinstance(recipe_type, type) else recipe_type(command)
        recipe = _answer(chosen, command, help or "")
        if recipe is not None:
            started = True
            module, _, function = target.partition(":")
            quiet_libraries()
            tell_loading()
            if "--dry-run" in command.flags:
                beside = f"{module.rpartition('.')[0]}.dry_run"
                importlib.import_module(beside).plan(function, recipe)
            else:
                getattr(importlib.import_module(module), function)(recipe)
    except (UserError, RunFailure) as error:
        rank = int(os.environ.get("RANK", 0))
        # Every process finds the same mistakes in a recipe; later ones may be a single rank's.
        if rank == 0 or started:
            prefix = f"[rank {rank}] " if rank else ""
            lines = error.lines() if isinstance(error, UserError) else [str(error)]
            lines = [f"{prefix}{as_called(public(line))}" for line in lines]
            print(*lines, sep="\n", file=sys.stderr)
        _exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        _exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            line = f"{one_line(error)}; make room there, and run the same command"
            print(public(line), file=sys.stderr)
            _exit(2)
        if not _one_of_several():
            raise
        sys.excepthook(*sys.exc_info())  # which masks secrets
        _exit(1)


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


def load(recipe_type: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """The typed recipe at `path` with `overrides`; neither checked nor filled.

    What cannot be had here, such as a variable that is not set, keeps its default until `require`
    asks for it: who generates text needs no key to the training data.

    Raises:
        UserError: all unknown keys and wrong types, or the first file that cannot be read.
    """
    return _load(recipe_type, path, overrides)[0]


def checked(recipe_type: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """As `load`, all of it is required, and every line of its `check` is a problem too."""
    recipe, problems = _load(recipe_type, path, overrides)
    require(recipe)
    if problems:
        raise UserError(*problems)
    return recipe


def _load(
    recipe_type: type[T], path: str | Path | None, overrides: Sequence[str]
) -> tuple[T, list[str]]:
    """The typed recipe, and what `check` found."""
    from llmfoundry.recipe.front.compose import compose

    for word in overrides:
        hide_override(word)
    file = None if path is None else find_recipe(path)
    composed = compose(recipe_type, file, overrides)
    raw = composed.raw()
    hide(raw)
    if file is not None and raw.get("run_name", "") is None:
        composed.config.run_name = file.stem
    values, pending = composed.resolved()
    hide(values)
    problems: list[Problem] = []
    recipe = build(recipe_type, values, problems)
    problems = [problem for problem in problems if problem.key not in pending]
    problems = list(_with_hints(recipe_type, problems, values))
    if problems:
        shown, others = problems[:MOST_LINES], problems[MOST_LINES:]
        places = [composed.where(problem.key) for problem in shown]  # each is looked for in files
        lines = [where + problem.line for where, problem in zip(places, shown, strict=True)]
        raise UserError(*lines, *(problem.line for problem in others))
    remember(recipe, raw, pending)
    found = [composed.where(line.split(":")[0]) + line for line in recipe.check()]  # type: ignore[attr-defined]
    return recipe, found


def _with_hints(
    recipe_type: type, problems: list[Problem], values: dict[str, Any]
) -> Iterator[Problem]:
    """Problems, of unknown keys with what to write in their place; of those shown."""
    from llmfoundry.recipe.front.help.hints import unknown_key

    for number, problem in enumerate(problems):
        if problem.is_unknown and number < MOST_LINES:
            yield from unknown_key(recipe_type, problem.key, _at(values, problem.key))
        else:
            yield problem


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; None where a list lies between."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _answer(recipe_type: type[Any], command: CommandLine, help: str) -> Any:
    """Do what the flags ask; the checked recipe where a run remains to be done, else None."""
    if command.unknown_flags:
        from llmfoundry.recipe.front.help.hints import unknown_flag

        raise UserError(*(unknown_flag(recipe_type, *flag) for flag in command.unknown_flags))
    _take_folder(recipe_type, command)
    if "--version" in command.flags:
        print(versions())
        return None
    if "--help" in command.flags:
        from llmfoundry.recipe.front.help.explain import explain

        print(as_called(explain(recipe_type, command, help)))
        return None
    _check_installation()
    _need_recipe(recipe_type, command)
    if "-m" in command.flags:
        from llmfoundry.recipe.front.sweep import sweep

        failed = sweep(recipe_type, command)
        return sys.exit(1) if failed else None
    if "--cfg" in command.flags:
        return _print(recipe_type, command)
    return checked(recipe_type, command.recipe, command.overrides)


def _take_folder(recipe_type: type[Any], command: CommandLine) -> None:
    """Scripts that work on a run take its folder, or what stands for it, without a key."""
    key, word = getattr(recipe_type, "FOLDER_KEY", None), command.recipe
    if key is None or word is None or word.endswith((".yaml", ".yml")):
        return
    if any(override.startswith(f"{key}=") for override in command.overrides):
        raise UserError(f"{word}: is {key}, which is given a second time; remove one of the two")
    command.recipe = None
    command.overrides.insert(0, f"{key}={word}")


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
    recipe, problems = _load(recipe_type, command.recipe, command.overrides)
    require(recipe)
    if not is_named(recipe) and "--resolve" not in command.flags:
        recipe.run_name = None  # a copy under another name is another run
    print(to_yaml(recipe, resolve="--resolve" in command.flags), end="")
    if problems:
        raise UserError(*problems)


def _need_recipe(recipe_type: type, command: CommandLine) -> None:
    """A training run takes its name from its recipe's file."""
    named = any(word.startswith("run_name=") for word in command.overrides)
    if "run_name" in keys(recipe_type) and command.recipe is None and not named:
        recipes = ", ".join(recipe_name(path) for path in shipped(recipe_type))
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
