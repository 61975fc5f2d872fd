"""Parser of every script's command line: [RECIPE.yaml] [key=value ...] and flags, in any order.

Entry point: `parse`, which sorts the arguments. `recipe/overrides.py` parses `key=value` with the
grammar of Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmfoundry.errors import UserError
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.paths import is_recipe

SETTINGS = {
    "key=value": "set a key: optimizer.lr=1e-3, data.paths=a.txt, 'data.paths=[a.txt,b.txt]'",
    "group=option": "choose a file of a group in place of the recipe's section",
    "~key": "take a key out of the recipe, so that it has its default; zsh needs quotes, '~key'",
}
FLAGS = {
    "--help": "this text; --help KEY explains a key or a section",
    "--cfg job": "print the whole recipe, defaults and all; redirect it for a flat copy to edit",
    "--dry-run": "compose and check the recipe, print what would happen, and write nothing;"
    " --dry-run=64xh100 (64x80gb: memory alone): of a training run on GPUs that are not here",
    "--version": "versions of the project, torch, transformers and Python",
    "--resolve": "with --cfg job: with ${...} replaced by their values",
    "-m": "sweep: run every combination of values in key=a,b, each in a process of its own; with"
    " --cfg job or --dry-run none is run. sweep=random sweep.n=8 draws as many, also from"
    " interval(a,b), tag(log,interval(a,b)); sweep=halving pauses them on the way, and the better"
    " third continues (sweep.factor=3); sweep.seed=17",
}
_SAME = {"-h": "--help", "-c": "--cfg", "--multirun": "-m", "-V": "--version"}
_KNOWN = {flag.split()[0] for flag in FLAGS}


@dataclass
class CommandLine:
    """Parsed command line."""

    recipe: str | None = None
    more: list[str] = field(default_factory=list)
    """Further paths, for scripts that accept several folders."""
    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    hardware: Hardware | None = None
    """Value of `--dry-run=64xh100`."""
    topic: str | None = None
    """The KEY of `--help KEY`."""
    unknown_flags: list[tuple[str, str | None]] = field(default_factory=list)
    """Unknown flags with the next argument, which may be a value. They are rejected once the keys
    of the recipe are known, which the error suggests."""


def parse(argv: Sequence[str]) -> CommandLine:
    """Sort arguments into recipe, overrides and flags.

    Raises:
        UserError: an argument is not valid.
    """
    command = CommandLine()
    words: list[str] = []
    arguments = list(argv)

    # flags; the meaning of other words depends on --help, which may come later
    while arguments:
        argument = arguments.pop(0)
        if not argument.isascii() and argument != argument.encode(errors="ignore").decode():
            raise UserError(f"{argument!r} is not UTF-8 text; write it so")
        if not argument.startswith("-"):
            words.append(argument)
            continue
        flag, _, value = argument.partition("=")
        flag = _SAME.get(flag, flag)
        if flag not in _KNOWN:
            is_next = not value and arguments and _is_value(arguments[0])
            command.unknown_flags.append((argument, arguments.pop(0) if is_next else None))
            continue
        if flag == "--cfg" and (value or (arguments.pop(0) if arguments else "")) != "job":
            raise UserError("--cfg: write --cfg job")
        if value and flag == "--dry-run":
            command.hardware = Hardware.parse(value, "--dry-run")
        elif value and flag != "--cfg":
            raise UserError(f"{flag}: takes no value after a '='")
        command.flags.add(flag)

    # paths and overrides
    for word in words:
        _place(command, word)
    return command


def _is_value(word: str) -> bool:
    """Return whether a word after an unknown flag is neither an override nor a flag."""
    return not word.startswith("-") and "=" not in word


def _place(command: CommandLine, word: str) -> None:
    """Add a word to the command line as override, help topic or path."""
    if not word.strip():
        raise UserError("an argument is empty; write a recipe's path or key=value")
    if not _is_recipe(word):
        command.overrides.append(word)
    elif "--help" in command.flags and not (is_recipe(word) or "/" in word):
        command.topic = word
    elif command.recipe is not None:
        command.more.append(word)
    else:
        command.recipe = word


def refuse_more(command: CommandLine) -> None:
    """Reject a second path, for scripts that accept one.

    Raises:
        UserError: there is a second path.
    """
    if command.recipe is not None and command.more:
        kind = "recipes" if command.recipe.endswith((".yaml", ".yml")) else "words without a key"
        raise UserError(
            f"two {kind}, {command.recipe} and {command.more[0]}; write one, and settings as"
            " key=value"
        )


def _is_recipe(word: str) -> bool:
    """Return whether a word is a path. Paths in the folder of a sweep may contain `=`."""
    if word.startswith("~"):
        return word.startswith("~/")
    key = word.partition("=")[0]
    looks = "/" in key and word.endswith((".yaml", ".yml"))
    return "=" not in word or looks or os.path.exists(word)
