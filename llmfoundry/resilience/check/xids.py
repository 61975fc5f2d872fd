"""What a line of the kernel's log says of GPUs, NVSwitches and the machine, and what to do.

XIDs are errors that NVIDIA's driver writes to the kernel log:
`NVRM: Xid (PCI:0000:c1:00): 79, pid=4067, name=python, GPU has fallen off the bus.` The table has
NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors), whose immediate resolutions GPUd's table
repeats; codes from 162 on, for which it has none, are as GPUd acts on them.
The idea: the number decides, except where the text says more: 154 is the driver's own verdict, and
an NVLink 5 error that calls itself non-fatal (more than half of NVIDIA's rules) needs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
BY_VERDICT = {"reset": RESET, "reboot": REBOOT, "drain": RESET}
MANY = 3  # of one machine: repeats of what is otherwise a program's own fault

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\):? (?P<code>\d+)(?:, *(?P<text>.*))?"
)
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)  # "149, NETIR_BER_EVENT Nonfatal XC0 i0"
_SXID = re.compile(r"SXid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<code>\d+), *(?P<text>.*)")
_OTHERS = (  # each: what to look for, what it is, whether it takes the machine out, what to do
    (re.compile(r"NVRM: .*fallen off the bus"), "a GPU has fallen off the bus", True, REBOOT),
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
class Event:
    """One line that means something.

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


def events(lines: Iterable[str]) -> Iterator[Event]:
    """What the lines of a kernel log say, in their order; lines about nothing here are left out."""
    for line in lines:
        event = _gpu_event(line) or _switch_event(line)
        if event is None:
            for pattern, why, is_bad, action in _OTHERS:
                if pattern.search(line):
                    event = Event("", "", why, action, is_bad)
                    break
        if event is not None:
            yield event


def judge(lines: Iterable[str], node: str) -> list[Finding]:
    """A finding for each kind of event on each device, with how often it came."""
    counted: dict[Event, int] = {}
    for event in events(lines):
        counted[event] = counted.get(event, 0) + 1
    numbered = {event.what for event in counted if event.code}  # their XIDs say more
    found = []
    for event, times in counted.items():
        if event.why == _OTHERS[0][1] and numbered:
            continue
        repeats = event.action == RERUN and times >= MANY
        level = BAD if event.is_bad else NOTICE
        often = f", {times} times" if times > 1 else ""
        code = f"{event.code}: " if event.code else ""
        action = event.action + ("; it repeats here" if repeats else "")
        where = f"{node}, {event.what}" if event.what else node
        nodes = (node,) if event.is_bad else ()
        found.append(
            Finding("kernel log", level, where, f"{code}{event.why}{often}", action, nodes)
        )
    return found


def _gpu_event(line: str) -> Event | None:
    match = _XID.search(line)
    if match is None:
        return None
    code, gpu = int(match["code"]), f"GPU {match['pci'].lower()}"
    if code == VERDICT:
        return _verdict(gpu, match["text"] or "")
    action, why = XIDS.get(code, (WATCH, "unknown to this table; see NVIDIA's list of XIDs"))
    if code in NVLINK_5 and _NONFATAL.search(match["text"] or ""):
        action, why = WATCH, f"{why}, not fatal"
    return Event(gpu, f"XID {code}", why, action, action in TAKE_OUT)


def _verdict(gpu: str, text: str) -> Event | None:
    """Of the driver itself; what it changed to stands last."""
    wanted = text.rpartition(" to ")[2].strip()
    if "none" in wanted.lower():
        return Event(gpu, f"XID {VERDICT}", "the driver asks for nothing any more", WATCH, False)
    action = next((a for word, a in BY_VERDICT.items() if word in wanted.lower()), RESET)
    why = f"the driver asks for: {wanted or 'a recovery action'}"
    return Event(gpu, f"XID {VERDICT}", why, action, True)


def _switch_event(line: str) -> Event | None:
    match = _SXID.search(line)
    if match is None:
        return None
    is_fatal = (
        not match["text"].lower().startswith("non-fatal") and "fatal" in match["text"].lower()
    )
    action = FABRIC if is_fatal else WATCH
    switch = f"NVSwitch {match['pci'].lower()}"
    return Event(switch, f"SXid {match['code']}", match["text"].strip(), action, is_fatal)
