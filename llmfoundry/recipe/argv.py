"""The command line of every script: [RECIPE.yaml] [key=value ...] and a few flags, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest

FLAGS = {
    "--help": "this text; --help KEY explains a key or a section",
    "--cfg job": "print the whole recipe, defaults and all; redirect it for a flat copy to edit",
    "--resolve": "with --cfg job: with ${...} replaced by their values",
    "-m": "sweep: run every combination of values in key=a,b, each in a process of its own",
}
_SAME = {"-h": "--help", "-c": "--cfg", "--multirun": "-m"}


@dataclass
class CommandLine:
    """What the user asked for."""

    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    topic: str | None = None
    """The KEY of `--help KEY`."""


def parse(argv: Sequence[str]) -> CommandLine:
    """Sort arguments into recipe, overrides and flags.

    Raises:
        UserError: an unknown flag, or a second recipe.
    """
    command = CommandLine()
    words: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="ignore").decode():
            raise UserError(f"{argument!r} is not UTF-8 text; write it so")
        if not argument.startswith("-"):
            words.append(argument)
            continue
        flag, _, value = argument.partition("=")
        flag = _SAME.get(flag, flag)
        if flag == "--cfg" and (value or next(arguments, "")) != "job":
            raise UserError("--cfg: write --cfg job")
        if flag not in ("--help", "--cfg", "--resolve", "-m"):
            hint = nearest(flag, ["--help", "--cfg", "--resolve", "--multirun"])
            setting = f"; settings have no dashes: {argument.lstrip('-')}" if value else hint
            raise UserError(f"unknown flag '{argument}'{setting} (flags: {', '.join(FLAGS)})")
        if value and flag != "--cfg":
            raise UserError(f"{flag}: takes no value after a '='")
        command.flags.add(flag)
    for word in words:
        _place(command, word)
    return command


def _place(command: CommandLine, word: str) -> None:
    if not word.strip():
        raise UserError("an argument is empty; write a recipe's path or key=value")
    if not _is_recipe(word):
        command.overrides.append(word)
    elif "--help" in command.flags and not word.endswith((".yaml", ".yml")):
        command.topic = word
    elif command.recipe is not None:
        raise UserError(
            f"two recipes, {command.recipe} and {word}; write one, and settings as key=value"
        )
    else:
        command.recipe = word


def _is_recipe(word: str) -> bool:
    """Whether a word is a path; a sweep's folder, and so its recipe's path, may hold a `=`."""
    if word.startswith("~"):
        return word.startswith("~/")
    key = word.partition("=")[0]
    looks = "/" in key and word.endswith((".yaml", ".yml"))
    return "=" not in word or looks or os.path.isfile(word)
