"""Commands in help, messages and tables, in the form that the user types.

Texts in the code contain commands of the repository, such as `python scripts/eval.py`. They are
converted to `llmfoundry eval` if the console command is used. The console command sets an
environment variable, which its child processes inherit.
"""

from __future__ import annotations

import os
import re
import shlex

_MARK = "LLMFOUNDRY_CONSOLE"
_TORCHRUN = re.compile(r"(torchrun [^\n]*?)scripts/(\w+)\.py")
_SCRIPT = re.compile(r"(?:python )?(?<![\w/])scripts/(\w+)\.py")  # not in another folder


def mark_console() -> None:
    """Print commands as the console command's, in this process and its child processes."""
    os.environ[_MARK] = "1"


def by_console() -> bool:
    """Return whether the console command was called."""
    return _MARK in os.environ


def as_called(text: str) -> str:
    """Convert the commands in a text to the form that the user types."""
    if not by_console():
        return text
    return _SCRIPT.sub(r"llmfoundry \1", _TORCHRUN.sub(r"\1-m llmfoundry \2", text))


def command_line(script: str, *words: str) -> str:
    """Return a command for a shell: `scripts/<script>.py` with quoted words."""
    return as_called(f"python scripts/{script}.py {' '.join(map(_quoted, words))}")


def _quoted(word: str) -> str:
    """Quote a word as `shlex.quote` does, with `key=` before the quotes."""
    key, equals, value = word.partition("=")
    if equals and key.replace(".", "").isidentifier():
        return f"{key}={shlex.quote(value)}"
    return shlex.quote(word)
