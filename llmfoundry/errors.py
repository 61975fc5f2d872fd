"""Exceptions that scripts report as one line instead of a traceback.

A `UserError` is a mistake of the user: one line per problem on stderr and exit status 2. A
`RunFailure` ends a run without a mistake of the user, with its own exit status. Any other exception
is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """One or more problems, each a line: the key, file or row; the reason; what to write."""

    def __init__(self, *problems: str) -> None:
        assert problems, "a UserError names at least one problem"
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems  # pickled to report a rank's error on all ranks

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback: a mistake is not in our code."""
        return [f"UserError: {line}" for line in self.lines()]

    def lines(self) -> list[str]:
        """Return the problems as printable lines of limited number and length."""
        shown = [_printable(problem) for problem in self.problems[:MOST_LINES]]
        left = len(self.problems) - len(shown)
        return [*shown, f"... and {left:,} problems more"] if left else shown


def one_line(error: BaseException) -> str:
    """Return the reason of an error in one line: the first OSError in its chain, else its text."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return at.strerror + (f" ({at.filename})" if at.filename else "")
        at = at.__cause__ or at.__context__
    return " ".join(str(error).split()) or type(error).__name__


def disk_full(error: BaseException) -> bool:
    """Return whether a full disk or an exceeded quota caused an error.

    Searches the chain of causes, because libraries such as torch.save raise errors of their own.
    """
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        at = at.__cause__ or at.__context__
    return False


def import_optional(module: str, where: str, *, extra: str = "", package: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        where: what needs the package, for the error message.
        extra: extra of this project that installs the package.
        package: name of the package, if it has no extra.

    Raises:
        UserError: the package is not installed.
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
    """End of a run without a mistake of the user; the same command may succeed."""

    status = 1
    """The exit status."""
    kind = ""
    """Kind of end for `exit_status.record_end`; empty: derived from the status."""
    of_all = False
    """Whether all ranks raise it, so that only one rank reports it."""


class NoRestart(RunFailure):
    """End of a run that must not be restarted before a person has looked at it."""

    of_all = True
    status = 93
    """The exit status, as in NVIDIA's resiliency extension for "do not requeue"."""


class RestartNeeded(RunFailure):
    """Out of memory; the restarted run will use less memory."""

    status = 75
    """The exit status: run the same command again."""
    kind = "memory"


@contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Convert out-of-memory errors of the host or a device in the block to a UserError.

    Args:
        advice: the recipe's key, its value, and what to write instead.

    Raises:
        UserError: the block ran out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refuse_out_of_memory(error, advice)
        raise


def refuse_out_of_memory(error: MemoryError | RuntimeError, advice: str) -> None:
    """Raise a UserError with `advice` if an error is an out-of-memory error."""
    if is_out_of_memory(error):
        raise UserError(f"{advice} ({requested_memory(error)})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error of the host or a device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        text in _ONEDNN or any(sign in text for sign in _OUT_OF_MEMORY)
    )


def requested_memory(error: BaseException) -> str:
    """Return the size of a failed allocation from its error, else the beginning of the message."""
    reason = str(error) or type(error).__name__
    match = re.search(r"tried to allocate [\d.]+ \w+", reason, re.IGNORECASE)
    return match[0].lower() if match else " ".join(reason.split())[:100]


_OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch on the host
    "out of memory",  # CUDA, also quoted by NCCL
    "ALLOC_FAILED",  # cuBLAS and cuDNN
    "ALLOCATION_FAILED",
    "bad_alloc",  # C++
)
_ONEDNN = ("could not create a primitive", "could not execute a primitive")
"""Complete messages of oneDNN (matmuls on CPUs), which contain no status. A missing kernel fails
earlier ("could not create a primitive descriptor ..."), so these messages mean that memory for code
or scratch could not be allocated."""


MOST_LINES, LONGEST_LINE = 50, 2000  # limits of the printed problems


def _printable(text: str) -> str:
    if len(text) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        text = f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
