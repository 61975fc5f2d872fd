"""Where a command's words go: a terminal, a log file, or a pipe whose reader may leave.

`cli/script.py` calls `outlast_readers` first of all, a training run and its supervisor
`outlast_full_disks`; `progress` is the one bar of the project, `columns` its one table. The idea:
only a terminal gets what moves. A log file gets lines, and a pipe that nobody reads any more
(`| head`) gets nothing, without an error: the command runs to its end. So it does where standard
error is a log on a full disk; standard output may be what a command is for, and only a run of days
loses lines of it.
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
TENTHS = 10  # lines of a log file for what a terminal shows as a bar


def outlast_readers() -> None:
    """Let standard output and error lose their readers without harm; files stay as they are.

    Those that are closed become /dev/null: the next file that is opened would take their numbers,
    and whatever a library prints would land in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least that is free
    _outlast("stdout", may_be_full=False)
    _outlast("stderr", may_be_full=True)


def outlast_full_disks() -> None:
    """Lose lines of standard output, rather than fail, where it is a log that cannot be written."""
    _outlast("stdout", may_be_full=True)


def _outlast(name: str, *, may_be_full: bool) -> None:
    stream = getattr(sys, name)
    if stream is None or stream is not getattr(sys, f"__{name}__"):
        return
    if not (_may_go(stream) or (may_be_full and _is_log(stream))):
        return
    with suppress(OSError):  # what cannot be written cannot be kept either
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
    """Whether it has a file, or a device, behind it."""
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return True


def _may_go(stream: TextIO) -> bool:
    """Whether it is a pipe or a terminal, whose other end others may close."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


_CLOSED = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # there may be some later


class _Lasting(io.FileIO):
    """A pipe or terminal that becomes /dev/null once its other end is closed; or a full log."""

    def write(self, data: Any) -> int:
        """All of `data`, as far as anybody knows."""
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
    r"""Untrusted text (a model's) as a stream may get it: a terminal obeys no character of it.

    On a terminal control characters but line ends and tabs become escapes, such as `\x1b`; files
    and pipes get the text as it is.
    """
    if not stream.isatty():
        return text
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def is_watched() -> bool:
    """Whether a person looks on: standard error, on which bars are drawn, is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def quiet_libraries() -> None:
    """Ask libraries for no bars where nobody looks on, and torchao for errors alone.

    transformers imports torchao wherever it is installed, which then warns in four lines of kernels
    that it cannot load on a CPU and of its own use of torch. Called before they are imported.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not is_watched():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def show_loading() -> None:
    """Say at once that PyTorch is being imported, which takes seconds.

    On a terminal alone, where a person waits: a log file's reader does not, and whoever reads
    standard error as data is not disturbed. Processes of torchrun come after one that has shown it.
    """
    if is_watched() and "RANK" not in os.environ:
        print("loading PyTorch ...", file=sys.stderr, flush=True)


def progress(
    total: int, what: str, unit: str, *, done: int = 0, scaled: bool = False, shown: bool = True
) -> tqdm[Any]:
    """A bar on standard error: on a terminal it moves, in a log file it is a line each tenth.

    Args:
        total: how many there are.
        what: is being done.
        unit: of what is counted.
        done: of them before.
        scaled: write 1.2M for 1,200,000.
        shown: false: not at all.
    """
    from tqdm import tqdm

    class Lines(tqdm):
        """A bar whose every showing is a line of its own."""

        last_tenth = -1

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            tenth = int(TENTHS * self.n / self.total) if self.total else TENTHS
            if tenth > self.last_tenth:
                self.last_tenth = tenth
                self.fp.write(f"{self}\n")
                self.fp.flush()

        def clear(self, nolock: bool = False) -> None:
            """There is nothing to wipe."""

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
    """The lines of a table, each column as wide as it must be.

    Args:
        head: names of the columns.
        rows: their texts.
        left: columns whose texts begin at one place; those of the others, numbers, end at one.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        places = enumerate(zip(row, widths, strict=True))
        cells = (f"{c:<{width}}" if n in left else f"{c:>{width}}" for n, (c, width) in places)
        lines.append("  ".join(cells).rstrip())
    return lines
