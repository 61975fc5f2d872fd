"""What a user did wrong: the one exception that every package raises and every script prints.

A `UserError` becomes one line per problem on stderr and exit status 2, never a traceback; so does a
`RunFailure`, with its own. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """One or more problems, each a line that names the key, file or row; why; what to write."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a UserError names at least one problem"
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems  # one process's mistake may be reported by all

    def lines(self) -> list[str]:
        """The problems as a terminal can show them: each one line, none of them endless."""
        shown = [_printable(problem) for problem in self.problems[:MOST_LINES]]
        left = len(self.problems) - len(shown)
        return [*shown, f"... and {left:,} problems more"] if left else shown


def one_line(error: BaseException) -> str:
    """Why something failed: the system's own reason where one led to it, else the error's text."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return at.strerror + (f" ({at.filename})" if at.filename else "")
        at = at.__cause__ or at.__context__
    return " ".join(str(error).split()) or type(error).__name__


def disk_full(error: BaseException) -> bool:
    """Whether a full disk, or somebody's share of one, led to an error.

    What writes files for a library, as torch.save does, ends in the library's own error about them.
    """
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        at = at.__cause__ or at.__context__
    return False


def import_optional(module: str, where: str, *, extra: str = "", package: str = "") -> Any:
    """A module of a package that need not be installed; its absence is an error at `where`.

    Raises:
        UserError: it is not installed; names the extra of ours, or the package, that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'llmfoundry-recipes[{extra}]'" if extra else package
        missing = package or error.name or module
        raise UserError(
            f"{where} needs the package {missing}; write: pip install {install}"
        ) from error


class RunFailure(Exception):
    """What ended a run by no mistake of its user's, as a line; the same command may succeed."""

    status = 1
    """The exit status."""
    kind = ""
    """What `exit_status.record_end` calls it; empty: what it calls that status."""
    of_all = False
    """Whether every process ends with it, so that only one reports it."""


class NoRestart(RunFailure):
    """What ended a run that is not to be started again before somebody has looked, as a line."""

    of_all = True
    status = 93
    """The exit status, as NVIDIA's resiliency extension has it for "do not requeue"."""


class RestartNeeded(RunFailure):
    """The processes ran out of memory; started again, they use less of it, as a line."""

    status = 75
    """The exit status: run the same command again."""
    kind = "memory"


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Advise what to write where the block runs out of memory, the host's or a device's.

    Args:
        advice: the recipe's key, its value, and what to write instead.

    Raises:
        UserError: it did.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refuse_out_of_memory(error, advice)
        raise


def refuse_out_of_memory(error: MemoryError | RuntimeError, advice: str) -> None:
    """Raise a UserError with `advice` if memory is what was lacking; as `enough_memory` does."""
    if is_out_of_memory(error):
        raise UserError(f"{advice} ({requested_memory(error)})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what was lacking, the host's or a device's."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        text in _ONEDNN or any(sign in text for sign in _OUT_OF_MEMORY)
    )


def requested_memory(error: BaseException) -> str:
    """How much memory an allocation asked for that failed, else the error's beginning."""
    reason = str(error) or type(error).__name__
    asked = re.search(r"tried to allocate [\d.]+ \w+", reason, re.IGNORECASE)
    return asked[0].lower() if asked else " ".join(reason.split())[:100]


_OUT_OF_MEMORY = (
    "can't allocate memory",  # of PyTorch on the host
    "out of memory",  # of CUDA, of NCCL that quotes it
    "ALLOC_FAILED",  # of cuBLAS and cuDNN
    "ALLOCATION_FAILED",
    "bad_alloc",  # of C++
)
_ONEDNN = ("could not create a primitive", "could not execute a primitive")
"""Whole texts of oneDNN (CPUs' matrix products), which hold no status. What it has no kernel for
fails before, as "could not create a primitive descriptor ..."; all that can fail then is to get
memory for code and scratch."""


MOST_LINES, LONGEST_LINE = 50, 2000  # of what is shown


def _printable(text: str) -> str:
    if len(text) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        text = f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
