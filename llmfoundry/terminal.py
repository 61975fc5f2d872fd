"""Output of commands to a terminal, a log file or a pipe; progress bars and tables.

`cli/script.py` calls `outlast_readers` first; a training run and its supervisor also call
`outlast_full_disks`. `progress` is the project's progress bar and `columns` its table. Only a
terminal gets moving bars, and a log file gets lines. If the reader of a pipe has ended (`| head`),
or if standard error is a log on a full disk, the output is dropped and the command continues.
Standard output to a full disk is an error, because it may be the result of the command. Only
training runs drop it.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import stat
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
TENTHS = 10  # lines in a log file in place of a progress bar


def outlast_readers() -> None:
    """Drop standard output and error when their reader has ended, without an error.

    Closed streams are opened to /dev/null. Otherwise the next opened file would get their
    descriptor, and output of libraries would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets this descriptor
    _outlast("stdout", may_be_full=False)
    _outlast("stderr", may_be_full=True)


def outlast_full_disks() -> None:
    """Drop lines of standard output if its log file cannot be written, instead of failing."""
    _outlast("stdout", may_be_full=True)


def _outlast(name: str, *, may_be_full: bool) -> None:
    """Replace a standard stream by one that drops output which cannot be written."""
    stream = getattr(sys, name)
    if stream is None or stream is not getattr(sys, f"__{name}__"):
        return
    if not (_may_go(stream) or (may_be_full and _is_log(stream))):
        return
    with suppress(OSError):  # output that cannot be written is lost
        stream.flush()
    lasting = io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, lasting)


def _is_log(stream: TextIO) -> bool:
    """Return whether a stream has a file descriptor."""
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return True


def _may_go(stream: TextIO) -> bool:
    """Return whether a stream is a pipe, socket or terminal, whose other end may be closed."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


_CLOSED = (errno.EPIPE, errno.EIO)  # errors of a closed pipe, of a closed terminal
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk


class _Lasting(io.FileIO):
    """File that drops data on a full disk, and becomes /dev/null once its other end is closed."""

    def write(self, data: Any) -> int:
        """Write or drop `data`, and return its size in either case."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return memoryview(data).nbytes
            if error.errno not in _CLOSED:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return memoryview(data).nbytes


def shown_on(stream: TextIO, text: str) -> str:
    r"""Return untrusted text, such as a model's output, in a form that is safe for a stream.

    On a terminal, control characters other than newlines and tabs are replaced by escapes such as
    `\x1b`. Files and pipes get the text unchanged.
    """
    if not stream.isatty():
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def is_watched() -> bool:
    """Return whether standard error, where progress bars are drawn, is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def to_stderr(line: str) -> None:
    """Print a line to standard error; the usual `note` of a command whose output is on stdout."""
    print(line, file=sys.stderr, flush=True)


def ignore_line(line: str) -> None:
    """Print nothing; the `note` of all ranks but rank 0, and of a plan."""


def quiet_libraries() -> None:
    """Disable progress bars of libraries without a terminal, and warnings of torchao.

    transformers imports torchao if it is installed, which then prints four lines of warnings about
    missing kernels and its use of torch. Call this before the imports.
    """
    quiet_torchao()
    if not is_watched():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def quiet_torchao() -> None:
    """Let torchao, and what it uses of torch, report errors alone."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def show_loading() -> None:
    """Print on a terminal that PyTorch is being imported, which takes seconds.

    Nothing is printed to files and pipes, or by ranks of torchrun.
    """
    if is_watched() and "RANK" not in os.environ:
        print("loading PyTorch ...", file=sys.stderr, flush=True)


def progress(
    total: int, what: str, unit: str, *, done: int = 0, scaled: bool = False, shown: bool = True
) -> tqdm[Any]:
    """Return a progress bar on standard error; in a log file, a line for each tenth.

    Args:
        total: number of items.
        what: description.
        unit: of the items.
        done: items that were done before.
        scaled: print 1.2M for 1,200,000.
        shown: whether to print the bar.
    """
    from tqdm import tqdm

    class Lines(tqdm):
        """Progress bar that prints a line for each update."""

        last_tenth = -1

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            tenth = int(TENTHS * self.n / self.total) if self.total else TENTHS
            if tenth > self.last_tenth:
                self.last_tenth = tenth
                self.fp.write(f"{self}\n")
                self.fp.flush()

        def clear(self, nolock: bool = False) -> None:
            """Do nothing, because there is no bar to erase."""

        def close(self) -> None:
            if not self.disable:
                self.display()
                self.disable = True
                type(self)._decr_instances(self)  # type: ignore[attr-defined]

    plain = None if is_watched() else "{desc}: {percentage:.0f}% of {total_fmt}{unit}, {elapsed}"
    return (tqdm if is_watched() else Lines)(
        total=total,
        desc=what,
        unit=unit,
        initial=done,
        unit_scale=scaled,
        file=sys.stderr,
        disable=not shown,
        bar_format=plain,
        dynamic_ncols=True,
        leave=False,
    )


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        head: names of the columns.
        rows: cells of each row.
        left: indices of left-aligned columns; the others, with numbers, are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(f"{cell:<{width}}" if index in left else f"{cell:>{width}}")
        lines.append("  ".join(cells).rstrip())
    return lines
