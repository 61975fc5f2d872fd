"""Read recent lines of the kernel log, and judge errors of GPUs, NVSwitches and the machine.

`run_check` and `supervise/nodes.py` call `read_log`, `log_events` and `judge_log`. The source is a
file that the recipe names, or /dev/kmsg, `dmesg` or `journalctl`. Lines older than some hours are
ignored, because an error from before a repair is no reason to remove a machine.

XIDs are errors that NVIDIA's driver writes to the kernel log:
`NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus.` The table has
the immediate resolutions of NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors), and for codes
from 162 on those of GPUd. The code determines the action, with two exceptions that depend on the
text: 154 is the driver's own verdict, and an NVLink 5 error called non-fatal needs no action.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from llmfoundry.resilience.check.findings import BAD, NOTICE, Finding

REPLACE = "take the machine out of service; inspect or replace the GPU"
REBOOT = "take the machine out of service and reboot it; replace the GPU if it comes back"
RESET = "drain the machine and reset the GPU (nvidia-smi --gpu-reset); reboot if that fails"
FABRIC = "drain the machine, reset its GPUs, check NVSwitches and the fabric manager"
RERUN = (
    "start the program again; a GPU that repeats it alone is suspect, many GPUs are a defect of it"
)
WATCH = "nothing now; look at how often it comes"
TAKE_OUT = (REPLACE, REBOOT, RESET, FABRIC)
"""Actions that take a machine out of service."""

NVLINK_5 = range(144, 151)
XIDS: dict[int, tuple[str, str]] = {
    54: (REPLACE, "auxiliary power is not connected"),
    79: (REBOOT, "the GPU has fallen off the bus"),
    151: (REBOOT, "key rotation failed"),
    167: (REBOOT, "PCIe fatal timeout"),
    168: (REBOOT, "errors found in the write-protected part of memory"),
    173: (REBOOT, "fatal failure of the link between processor and GPU (C2C)"),
    46: (RESET, "the GPU has stopped processing"),
    48: (RESET, "uncorrectable (double-bit) ECC error"),
    62: (RESET, "the GPU's microcontroller has halted"),
    64: (RESET, "a row of memory could not be remapped, or a page not be retired"),
    95: (RESET, "uncontained memory error"),
    109: (RESET, "context switch timed out"),
    110: (RESET, "security fault"),
    119: (RESET, "the GPU's system processor (GSP) did not answer"),
    120: (RESET, "the GPU's system processor (GSP) failed"),
    136: (RESET, "link training failed"),
    140: (RESET, "unrecovered ECC error"),
    143: (RESET, "the GPU could not be initialised"),
    155: (RESET, "NVLink error defined by software"),
    156: (RESET, "resource retirement event"),
    158: (RESET, "GPU fatal timeout"),
    169: (RESET, "the GPU's security microcontroller has halted"),
    **dict.fromkeys((171, 172), (RESET, "uncorrectable memory error, more of an XID 48")),
    74: (FABRIC, "NVLink error"),
    **dict.fromkeys(NVLINK_5, (FABRIC, "NVLink 5 error")),
    8: (RERUN, "a kernel ran into its time limit"),
    13: (RERUN, "exception in a kernel (out of range, illegal instruction)"),
    25: (RERUN, "invalid or illegal push buffer"),
    31: (RERUN, "memory page fault"),
    **dict.fromkeys((11, 32), (RERUN, "invalid or corrupted push buffer")),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), (RERUN, "copy engine exception")),
    **dict.fromkeys(
        (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139),
        (RERUN, "exception in a video, image or optical-flow engine"),
    ),
    69: (RERUN, "exception in the graphics engine's class"),
    80: (RERUN, "corrupted data sent to the GPU"),
    94: (RERUN, "contained memory error: only the program that met it was ended"),
    **dict.fromkeys(range(126, 136), (RERUN, "copy engine exception")),
    **dict.fromkeys((37, 38), (WATCH, "error of the driver's firmware")),
    43: (WATCH, "a program's channel was stopped"),
    44: (WATCH, "a context switch failed"),
    45: (WATCH, "a program was ended, mostly after another error"),
    63: (WATCH, "a row of memory is remapped, or a page retired"),
    **dict.fromkeys((66, 67), (WATCH, "illegal access by the driver")),
    92: (WATCH, "many corrected (single-bit) ECC errors"),
    93: (WATCH, "the InfoROM is not protected against writes"),
    **dict.fromkeys((106, 107, 121, 137, 141, 152, 153, 157, 160, 161), (WATCH, "informational")),
    **dict.fromkeys(range(162, 166), (WATCH, "state of the power smoothing circuit")),
    **dict.fromkeys((166, 170), (WATCH, "traffic on NVLink before its encryption was set up")),
}
VERDICT = 154  # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
BY_VERDICT = {"none": WATCH, "reset": RESET, "reboot": REBOOT, "drain": RESET}
MANY = 3  # repeats on one machine of an error that is usually a program's fault

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\):? (?P<code>\d+)(?:, *(?P<text>.*))?"
)
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)  # "149, NETIR_BER_EVENT Nonfatal XC0 i0"
_SXID = re.compile(r"SXid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<code>\d+), *(?P<text>.*)")
FALLEN_OFF = "a GPU has fallen off the bus"
_OTHERS = (  # (pattern, description, whether the machine is bad, action)
    (re.compile(r"NVRM: .*fallen off the bus"), FALLEN_OFF, True, REBOOT),
    (re.compile(r"EDAC .*\bUE\b|Hardware Error.*[Uu]ncorrected"),
     "uncorrectable error of the machine's memory", True, REPLACE),
    (re.compile(r"segfault at .* in libnccl"), "NCCL crashed", False, RERUN),
    (re.compile(r"Out of memory: Killed process \d+"), "the kernel ended a process: no memory left",
     False, "look at who took the memory; fewer loader_workers, or a larger machine"),
    (re.compile(r"nfs: server \S+ not responding|LustreError"), "a file system did not answer",
     False, "look at the file server and the network"),
    (re.compile(r"mlx5_core .*(Link down|health compromised|port module event.*[Ee]rror)"),
     "a network card lost its link", False, "look at cable, card and switch port"),
)  # fmt: skip


@dataclass(frozen=True)
class LogEvent:
    """A line of the kernel log with a known meaning.

    Attributes:
        what: device, as `GPU 0000:c1:00`; empty: the machine.
        code: `XID 79` or `SXid 12028`; empty for other lines.
        why: description.
        action: what to do.
        is_bad: whether the machine must be taken out of service.
    """

    what: str
    code: str
    why: str
    action: str
    is_bad: bool


def log_events(lines: Iterable[str]) -> Iterator[LogEvent]:
    """Yield the events of a kernel log in order; lines without a known meaning are ignored."""
    for line in lines:
        if match := _XID.search(line):
            yield _gpu_event(int(match["code"]), match["pci"].lower(), match["text"] or "")
        elif match := _SXID.search(line):
            text = match["text"].strip()
            is_fatal = "fatal" in text.lower() and not text.lower().startswith("non-fatal")
            switch, code = f"NVSwitch {match['pci'].lower()}", f"SXid {match['code']}"
            yield LogEvent(switch, code, text, FABRIC if is_fatal else WATCH, is_fatal)
        else:
            matches = (other for other in _OTHERS if other[0].search(line))
            for _, why, is_bad, action in islice(matches, 1):
                yield LogEvent("", "", why, action, is_bad)


def judge_log(lines: Iterable[str], node: str) -> list[Finding]:
    """Return a finding for each kind of event on each device, with its number of occurrences."""
    counts = Counter(log_events(lines))
    has_codes = any(event.code for event in counts)
    findings = []
    for event, times in counts.items():
        if event.why == FALLEN_OFF and has_codes:
            continue  # the XID of the same error also has the GPU's address
        level = BAD if event.is_bad else NOTICE
        where = f"{node}, {event.what}" if event.what else node
        why = f"{event.code}: {event.why}" if event.code else event.why
        why += f", {times} times" if times > 1 else ""
        repeats = event.action == RERUN and times >= MANY
        action = event.action + ("; it repeats here" if repeats else "")
        nodes = (node,) if event.is_bad else ()
        findings.append(Finding("kernel log", level, where, why, action, nodes))
    return findings


def _gpu_event(code: int, pci: str, text: str) -> LogEvent:
    action, why = XIDS.get(code, (WATCH, "unknown to this table; see NVIDIA's list of XIDs"))
    if code in NVLINK_5 and _NONFATAL.search(text):
        action, why = WATCH, f"{why}, not fatal"
    if code == VERDICT:  # what it changed to comes last
        wanted = text.rpartition(" to ")[2].strip()
        action = next((a for word, a in BY_VERDICT.items() if word in wanted.lower()), RESET)
        why = f"the driver asks for: {wanted or 'a recovery action'}"
        if action == WATCH:
            why = "the driver asks for nothing any more"
    return LogEvent(f"GPU {pci}", f"XID {code}", why, action, action in TAKE_OUT)


_KMSG = Path("/dev/kmsg")
_COMMANDS = (
    ["dmesg", "--time-format", "iso", "--nopager"],
    ["journalctl", "--dmesg", "--output", "short-iso", "--no-pager", "--quiet"],
)
PATIENCE = 20  # timeout of each command in seconds
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*([+-]\d\d:?\d\d|Z)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TRADITIONAL = re.compile(  # times of syslog (without a year) and of dmesg -T
    rf"\[?(?:[A-Z][a-z]{{2}} )?({'|'.join(_MONTHS)}) +(\d{{1,2}}) (\d\d:\d\d:\d\d)(?: (\d{{4}})\])?"
)
_DAY = 86_400


def read_log(path: str | None, *, hours: float, start: int | None = None) -> tuple[list[str], str]:
    """Return recent lines of the kernel log and an empty string, or no lines and the reason.

    Args:
        path: file; None: the system's log.
        hours: maximum age of the lines.
        start: byte offset in the file; all later lines are returned, whatever their dates. A file
            that is smaller has been replaced and is read completely. None: use the dates.
    """
    if path is not None:
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            return [], f"health_check.kernel_log: {path}: {error.strerror}"
        new = data if start is None or start > len(data) else data[start:]
        lines = new.decode("utf-8", errors="replace").splitlines()
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
    why = f"the kernel's log may not be read here ({reason})"
    return [], f"{why}; name a file: health_check.kernel_log"


def log_size(path: str | None) -> int:
    """Return the size of a file in bytes; 0: it does not exist."""
    try:
        return 0 if path is None else Path(path).expanduser().stat().st_size
    except OSError:
        return 0


def recent(lines: Iterable[str], *, hours: float, now: float | None = None) -> Iterator[str]:
    """Yield lines from the last `hours`, and lines without a date."""
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
    """Return the seconds since 1970 of a date; without a year, of the last such date."""
    year = int(match[4] or datetime.fromtimestamp(now + _DAY).year)
    day = f"{_MONTHS.index(match[1]) + 1:02}-{int(match[2]):02}T{match[3]}"
    for candidate in [year] if match[4] else range(year, year - 9, -1):  # of 29 February
        try:
            seconds = datetime.fromisoformat(f"{candidate}-{day}").timestamp()
        except ValueError:  # no such day that year
            continue
        if match[4] or seconds <= now + _DAY:
            return seconds
    return now


def _seconds(match: re.Match[str]) -> float:
    """Return the seconds since 1970 of a date; without a zone, in the local time zone."""
    zone = (match[4] or "").replace("Z", "+00:00")
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}").timestamp()
    except ValueError:  # 31 February, or a zone that Python 3.10 cannot parse
        return time.time()


def _from_kernel(hours: float) -> Iterator[str]:
    """Yield recent lines of /dev/kmsg.

    A record is `6,1234,5678901,-;text`, with the time in microseconds since boot.

    Raises:
        OSError: this user has no permission to read it.
    """
    oldest = (time.clock_gettime(time.CLOCK_MONOTONIC) - 3600 * hours) * 1e6
    descriptor = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, 8192).decode(errors="replace")
            except BlockingIOError:  # no more records
                return
            except BrokenPipeError:  # the record was overwritten; read the next one
                continue
            head, _, text = record.partition(";")
            stamp = head.split(",")[2:3]
            if not stamp or not stamp[0].isdigit() or int(stamp[0]) >= oldest:
                yield text.splitlines()[0] if text else ""
    finally:
        os.close(descriptor)
