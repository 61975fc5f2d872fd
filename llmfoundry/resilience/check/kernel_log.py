"""The kernel's log: its recent lines, and what they mean for GPUs, NVSwitches and the machine.

`run_check` and `supervise/nodes.py` call `read_log`, `log_events` and `judge_log`. Lines come
from a file that the recipe names, else /dev/kmsg, `dmesg` or `journalctl`; lines older than some
hours are left out, as an error from before a repair is no reason to take a machine out.

XIDs are errors that NVIDIA's driver writes to the kernel log:
`NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus.` The table has
NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors), whose immediate resolutions GPUd's table
repeats; codes from 162 on, for which it has none, are as GPUd acts on them. The number decides,
except where the text has more: 154 is the driver's own verdict, and an NVLink 5 error called
non-fatal (more than half of NVIDIA's rules) needs nothing.
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
"""Actions for which a machine does no more work."""

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
MANY = 3  # of one machine: repeats of what is otherwise a program's own fault

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\):? (?P<code>\d+)(?:, *(?P<text>.*))?"
)
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)  # "149, NETIR_BER_EVENT Nonfatal XC0 i0"
_SXID = re.compile(r"SXid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<code>\d+), *(?P<text>.*)")
FALLEN_OFF = "a GPU has fallen off the bus"
_OTHERS = (  # each: what to look for, what it is, whether it takes the machine out, what to do
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
    """One line with a meaning.

    Attributes:
        what: the device, `GPU 0000:c1:00`, or empty for the machine.
        code: the XID, as `XID 79` or `SXid 12028`; empty for other lines.
        why: what it is.
        action: what to do.
        is_bad: whether it takes the machine out of service.
    """

    what: str
    code: str
    why: str
    action: str
    is_bad: bool


def log_events(lines: Iterable[str]) -> Iterator[LogEvent]:
    """What the lines of a kernel log mean, in their order; other lines are left out."""
    for line in lines:
        if match := _XID.search(line):
            yield _gpu_event(int(match["code"]), match["pci"].lower(), match["text"] or "")
        elif match := _SXID.search(line):
            text = match["text"].strip()
            is_fatal = "fatal" in text.lower() and not text.lower().startswith("non-fatal")
            switch, code = f"NVSwitch {match['pci'].lower()}", f"SXid {match['code']}"
            yield LogEvent(switch, code, text, FABRIC if is_fatal else WATCH, is_fatal)
        else:
            found = (other for other in _OTHERS if other[0].search(line))
            for _, why, is_bad, action in islice(found, 1):
                yield LogEvent("", "", why, action, is_bad)


def judge_log(lines: Iterable[str], node: str) -> list[Finding]:
    """A finding for each kind of event on each device, with how often it came."""
    counted = Counter(log_events(lines))
    has_codes = any(event.code for event in counted)
    found = []
    for event, times in counted.items():
        if event.why == FALLEN_OFF and has_codes:
            continue  # an XID has the GPU's address too
        level = BAD if event.is_bad else NOTICE
        where = f"{node}, {event.what}" if event.what else node
        why = f"{event.code}: {event.why}" if event.code else event.why
        why += f", {times} times" if times > 1 else ""
        repeats = event.action == RERUN and times >= MANY
        action = event.action + ("; it repeats here" if repeats else "")
        nodes = (node,) if event.is_bad else ()
        found.append(Finding("kernel log", level, where, why, action, nodes))
    return found


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
PATIENCE = 20  # seconds, of each of these commands
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*([+-]\d\d:?\d\d|Z)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TRADITIONAL = re.compile(  # syslog's, which has no year, and that of dmesg -T
    rf"\[?(?:[A-Z][a-z]{{2}} )?({'|'.join(_MONTHS)}) +(\d{{1,2}}) (\d\d:\d\d:\d\d)(?: (\d{{4}})\])?"
)
_DAY = 86_400


def read_log(path: str | None, *, hours: float, start: int | None = None) -> tuple[list[str], str]:
    """Lines that are not older than `hours`, and "" or why there are none.

    Args:
        path: a file; None: the kernel's own.
        hours: which may be a part of one.
        start: of a file, whatever the dates in it: all after so many bytes; all of a file that has
            fewer, as it has replaced the one that was measured.
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
        if lines := done.stdout.decode(errors="replace").splitlines():
            return list(recent(lines, hours=hours)), ""
    why = f"the kernel's log may not be read here ({reason})"
    return [], f"{why}; name a file: health_check.kernel_log"


def log_size(path: str | None) -> int:
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
    """Since 1970; a date without a year is of the latest year in which it is not in the future."""
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
    """Since 1970; a date without a zone is in this machine's."""
    zone = (match[4] or "").replace("Z", "+00:00")
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}").timestamp()
    except ValueError:  # the 31st of February, a zone as Python 3.10 does not read it
        return time.time()


def _from_kernel(hours: float) -> Iterator[str]:
    """Records of /dev/kmsg: `6,1234,5678901,-;text`, microseconds since the machine was started.

    Raises:
        OSError: this user may not read it.
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
