"""The command line of every script: [RECIPE.yaml] [key=value ...] and a few flags, in any order.

`key=value`, `group=option` and `~key` are read with Hydra's grammar, as the lists of a sweep are.
Two rules differ from Hydra's. The schema alone says which keys exist, so a leading `+` changes
nothing. And a text field takes all that follows `=` as it stands (`prompt=Well, why (not)?`);
quotes around the whole are dropped, and null is null. So does a list of texts that is written as
one text, which the grammar cannot read (`data.paths=my file (1).jsonl`).

Texts name commands as the repository has them, `python scripts/eval.py`; they are printed as the
user would write them. The console command marks its processes, and so those that they start.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.paths import is_recipe
from llmfoundry.recipe.schema import Key, Schema

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep, Override

SETTINGS = {
    "key=value": "set a key: optimizer.lr=1e-3, data.paths=[a,b]",
    "group=option": "choose a file of a group in place of the recipe's section",
    "~key": "take a key out of the recipe, so that it has its default; zsh wants quotes, '~key'",
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
    """What the user asked for."""

    recipe: str | None = None
    more: list[str] = field(default_factory=list)
    """Words without a key after the first, which a script of several folders takes."""
    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    hardware: Hardware | None = None
    """Of `--dry-run=64xh100`."""
    topic: str | None = None
    """The KEY of `--help KEY`."""
    unknown_flags: list[tuple[str, str | None]] = field(default_factory=list)
    """Each with what follows it, which may be its value; to be refused once the keys are known."""


def parse(argv: Sequence[str]) -> CommandLine:
    """Sort arguments into recipe, overrides and flags.

    Raises:
        UserError: an argument that is not one of them.
    """
    command = CommandLine()
    words: list[str] = []
    arguments = list(argv)
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
    for word in words:
        _place(command, word)
    return command


def _is_value(word: str) -> bool:
    """Whether a word behind an unknown flag is neither a setting nor a flag."""
    return not word.startswith("-") and "=" not in word


def _place(command: CommandLine, word: str) -> None:
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
    """What follows the one path of a script.

    Raises:
        UserError: something does.
    """
    if command.recipe is not None and command.more:
        kind = "recipes" if command.recipe.endswith((".yaml", ".yml")) else "words without a key"
        raise UserError(
            f"two {kind}, {command.recipe} and {command.more[0]}; write one, and settings as"
            " key=value"
        )


def _is_recipe(word: str) -> bool:
    """Whether a word is a path; a sweep's folder, and so what lies in it, may hold a `=`."""
    if word.startswith("~"):
        return word.startswith("~/")
    key = word.partition("=")[0]
    looks = "/" in key and word.endswith((".yaml", ".yml"))
    return "=" not in word or looks or os.path.exists(word)


_MARK = "LLMFOUNDRY_CONSOLE"
_TORCHRUN = re.compile(r"(torchrun [^\n]*?)scripts/(\w+)\.py")
_SCRIPT = re.compile(r"(?:python )?(?<![\w/])scripts/(\w+)\.py")  # not of another folder


def mark_console() -> None:
    """From here on, and in every process that begins here, commands are the console's."""
    os.environ[_MARK] = "1"


def by_console() -> bool:
    """Whether the console command was called."""
    return _MARK in os.environ


def as_called(text: str) -> str:
    """A text with the commands in it as the user calls them, `llmfoundry eval` by the console."""
    if not by_console():
        return text
    return _SCRIPT.sub(r"llmfoundry \1", _TORCHRUN.sub(r"\1-m llmfoundry \2", text))


def command_line(script: str, *words: str) -> str:
    """A command to copy into a shell: of `scripts/<script>.py` with these words, quoted."""
    return as_called(f"python scripts/{script}.py {' '.join(map(_quoted, words))}")


def as_list(words: Sequence[str]) -> str:
    """Words as the value of a key that takes a list of texts."""
    escaped = (word.replace("\\", "\\\\").replace("'", "\\'") for word in words)
    return "[" + ",".join(f"'{word}'" for word in escaped) + "]"


def _quoted(word: str) -> str:
    """As `shlex.quote`, with `key=` before the quotes."""
    key, equals, value = word.partition("=")
    if equals and key.replace(".", "").isidentifier():
        return f"{key}={shlex.quote(value)}"
    return shlex.quote(word)


DEFAULT = object()
LONGEST = 20_000
"""Characters that are read with the grammar; more belong into a file."""
MOST_POINTS = 10_000
"""Runs of a sweep."""


def split(
    overrides: Sequence[str], schema: Schema, groups: dict[str, list[str]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The groups' options and the keys' values in `overrides`; the last of a key counts.

    The value DEFAULT asks for the schema's own (written `~key`).

    Raises:
        UserError: an override cannot be read; all such are named.
    """
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        key, text = key_and_text(override)
        if override.startswith("~"):
            values[key] = DEFAULT
        elif key in groups and text != "null" and not text.startswith("{"):
            chosen[key] = text
        else:
            try:
                values[key] = _value(key, text, schema.find(key))
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*problems)
    return chosen, values


def key_and_text(override: str) -> tuple[str, str]:
    """`("model.n_layers", "4")` of `+model.n_layers=4`.

    Raises:
        UserError: it has no key, or no `=`.
    """
    key, equals, text = override.lstrip("+").partition("=")
    if override.startswith("~"):
        key = key[1:]
        if not key or equals:
            raise UserError(f"'{override}' is not a setting; write ~key to give it its default")
    elif not key or not equals:
        raise UserError(f"'{override}' is not a setting; write key=value")
    return key.strip(), text


def choices(override: str, groups: dict[str, list[str]]) -> list[str]:
    """The overrides that `key=a,b` or `key=range(1,4)` stands for in a sweep; itself, if only one.

    Raises:
        UserError: it is a kind of sweep that has no end.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep
    from hydra.errors import HydraException

    key, text = key_and_text(override)
    parsed = None if override.startswith("~") else _parse(text)
    if parsed is None or not parsed.is_sweep_override():
        return [override]
    swept = parsed._value
    if isinstance(swept, RangeSweep) and swept.step:
        start, stop = float(swept.start or 0), float(swept.stop or 0)
        if not abs(stop - start) <= MOST_POINTS * abs(swept.step):
            raise UserError(f"{override}: has more than {MOST_POINTS:,} points; write fewer")
    if isinstance(swept, Glob):
        return [f"{key}={option}" for option in parsed._value.filter(groups.get(key, []))]
    try:
        return [f"{key}={element}" for element in parsed.sweep_string_iterator()]
    except HydraException as error:
        raise UserError(
            f"{override}: cannot be listed; write {key}=a,b or a range(), or draw from it,"
            " sweep=random sweep.n=8"
        ) from error


def draw(override: str, groups: dict[str, list[str]], at: float) -> str:
    """One of what `override` stands for, of an interval too, at a share from 0 to below 1.

    `interval(a,b)` is even, `tag(log,interval(a,b))` even in the logarithm, `int(interval(a,b))` of
    whole numbers, both ends among them. Floats have four digits, as folders are named after them.

    Raises:
        UserError: an interval that is none.
    """
    key, swept = key_and_text(override)[0], _interval(override)
    if swept is None:
        options = list(dict.fromkeys(choices(override, groups)))
        return options[int(at * len(options))]
    low, high, is_log = swept.start, swept.end, "log" in swept.tags
    if low is None or high is None or not low < high or (is_log and low <= 0):
        ends = "0 < a < b" if is_log else "a < b"
        raise UserError(f"{override}: is no interval; write interval(a,b) with {ends}")
    if is_int := isinstance(low, int):
        low, high = low - 0.5 * (not is_log), high + (1 if is_log else 0.5)
    value = low * (high / low) ** at if is_log else low + (high - low) * at
    if is_int:
        return f"{key}={min(int(swept.end or 0), math.floor(value if is_log else value + 0.5))}"
    return f"{key}={min(max(float(f'{value:.4g}'), low), high):g}"


def is_interval(override: str) -> bool:
    """Whether it stands for values without end."""
    return _interval(override) is not None


def _interval(override: str) -> IntervalSweep | None:
    from hydra.core.override_parser.types import IntervalSweep

    parsed = None if override.startswith("~") else _parse(key_and_text(override)[1])
    swept = None if parsed is None else parsed._value
    return swept if isinstance(swept, IntervalSweep) else None


def _value(key: str, text: str, declared: Key | None) -> Any:
    is_text = declared is not None and {*declared.types} <= {str, types.NoneType}
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_text and text != "null" and not quoted:
        return text
    parsed = _parse(text)
    if parsed is not None and not parsed.is_sweep_override():
        return parsed.value()
    is_texts = declared is not None and list[str] in declared.types
    if is_text or (parsed is None and is_texts and not text.startswith("[")):
        return text
    if parsed is None and is_texts and (texts := _plain_texts(text)):
        return texts
    if parsed is None and is_texts:
        raise UserError(f'{key}={text}: cannot be read; quote its texts, {key}=\'["...","..."]\'')
    if parsed is None:
        raise UserError(f"{key}={text}: cannot be read; quote a text as {key}='\"...\"'")
    raise UserError(f"{key}={text}: several values; add -m to run each, or write a list, [{text}]")


def _plain_texts(text: str) -> list[str]:
    """The entries of a list of texts without quotes, such as a sweep's folders: [A,sw/lr=0.01].

    Empty where quotes or brackets say where an entry ends, which is the grammar's to read.
    """
    entries = [entry.strip() for entry in text[1:-1].split(",")]
    is_plain = text[-1:] == "]" and not any(mark in text[1:-1] for mark in "[]{}'\"\\")
    return entries if is_plain and all(entries) and len(text) <= LONGEST else []


def _parse(text: str) -> Override | None:
    """The value as Hydra's grammar reads it; None where it does not.

    Raises:
        UserError: a sweep stands inside a list, where Hydra would not run it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(text) > LONGEST:
        return None
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}")
    except (HydraException, ValueError, RecursionError):  # the last of numbers and lists too long
        return None
    inside = getattr(parsed._value, "list", parsed._value)  # a,b is a sweep of its own
    if isinstance(inside, list | dict) and _holds_sweep(inside):
        raise UserError(f"{text}: a range() or interval() among other values; write its values")
    return parsed


def _holds_sweep(value: Any) -> bool:
    from hydra.core.override_parser.types import Sweep

    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep) or any(map(_holds_sweep, inner))
