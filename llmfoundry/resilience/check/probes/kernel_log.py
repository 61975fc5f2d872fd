"""The recent lines of the kernel's log, from wherever this user may read them.

A file that the recipe names, else /dev/kmsg, else `dmesg`, else `journalctl`. Nothing is decided
here; `xids` does that. The idea: an error of last month, before a repair, is no reason to take a
machine out, so lines older than some hours are left out where their age can be told.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

_KMSG = Path("/dev/kmsg")
_COMMANDS = (
    ["dmesg", "--time-format", "iso", "--nopager"],
    ["journalctl", "--dmesg", "--output", "short-iso", "--no-pager", "--quiet"],
)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*([+-]\d\d:?\d\d|Z)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TRADITIONAL = re.compile(  # syslog's, which has no year, and that of dmesg -T
    rf"\[?(?:[A-Z][a-z]{{2}} )?({'|'.join(_MONTHS)}) +(\d{{1,2}}) (\d\d:\d\d:\d\d)(?: (\d{{4}})\])?"
)
_DAY = 86_400
PATIENCE = 20  # seconds, of each of these commands


def read(path: str | None, *, hours: float, start: int | None = None) -> tuple[list[str], str]:
    """Lines that are not older than `hours`, and "" or why there are none to be had.

    Args:
        path: a file; None: the kernel's own.
        hours: which may be a part of one.
        start: of a file, whatever the dates in it, all that is behind so many bytes; if it has
            fewer, another one has taken its place, and all of it.
    """
    if path is not None:
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            return [], f"health_check.kernel_log: {path}: {error.strerror}"
        behind = data if start is None or start > len(data) else data[start:]
        lines = behind.decode("utf-8", errors="replace").splitlines()
        return lines if start is not None else list(recent(lines, hours=hours)), ""
    try:
        return list(_from_kernel(hours)), ""
    except OSError as error:
        reason = f"{_KMSG}: {error.strerror}"
    for command in _COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = done.stdout.decode(errors="replace").splitlines()
        if lines:
            return list(recent(lines, hours=hours)), ""
    return (
        [],
        f"the kernel's log may not be read here ({reason}); name a file: health_check.kernel_log",
    )


def size(path: str | None) -> int:
    """Bytes of a file; 0: there is none."""
    try:
        return 0 if path is None else Path(path).expanduser().stat().st_size
    except OSError:
        return 0


def recent(lines: Iterable[str], *, hours: float, now: float | None = None) -> Iterator[str]:
    """Lines with a date of the last `hours`, and those without a date."""
    now = time.time() if now is None else now
    for line in lines:
        if match := _ISO.search(line[:60]):
            written = _seconds(match)
        elif match := _TRADITIONAL.match(line):
            written = _latest(match, now)
        else:
            written = now
        if written >= now - 3600 * hours:
            yield line


def _latest(match: re.Match[str], now: float) -> float:
    """Since 1970; a date without a year is of the last one in which it is not to come."""
    year = int(match[4] or datetime.fromtimestamp(now + _DAY).year)
    day = f"{_MONTHS.index(match[1]) + 1:02}-{int(match[2]):02}T{match[3]}"
    for candidate in [year] if match[4] else range(year, year - 9, -1):  # of 29 February
        try:
            found = datetime.fromisoformat(f"{candidate}-{day}").timestamp()
        except ValueError:  # no such day that year
            continue
        if match[4] or found <= now + _DAY:
            return found
    return now


def _seconds(match: re.Match[str]) -> float:
    """Since 1970; a date without a zone is of this machine's."""
    zone = (match[4] or "").replace("Z", "+00:00")
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}").timestamp()
    except ValueError:  # the 31st of February, a zone as Python 3.10 does not read it
        return time.time()


def _from_kernel(hours: float) -> Iterator[str]:
    """Records of /dev/kmsg: `6,1234,5678901,-;text`, microseconds since the machine was started.

    Raises:
        OSError: this user may not.
    """
    oldest = (time.clock_gettime(time.CLOCK_MONOTONIC) - 3600 * hours) * 1e6
    descriptor = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, 8192).decode(errors="replace")
            except BlockingIOError:  # that was the last
                return
            except BrokenPipeError:  # overwritten while it was read; the next one is there
                continue
            head, _, text = record.partition(";")
            stamp = head.split(",")[2:3]
            if not stamp or not stamp[0].isdigit() or int(stamp[0]) >= oldest:
                yield text.splitlines()[0] if text else ""
    finally:
        os.close(descriptor)
