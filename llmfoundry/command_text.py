"""Commands as a user types them, in help, messages and tables.

Texts name commands as the repository has them, `python scripts/eval.py`; they are printed as the
user would write them. The console command marks its processes, and so those that they start.
"""

from __future__ import annotations

import os
import re
import shlex

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


def _quoted(word: str) -> str:
    """As `shlex.quote`, with `key=` before the quotes."""
    key, equals, value = word.partition("=")
    if equals and key.replace(".", "").isidentifier():
        return f"{key}={shlex.quote(value)}"
    return shlex.quote(word)
