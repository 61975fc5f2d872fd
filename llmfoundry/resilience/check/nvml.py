"""Each GPU of this machine by NVML, NVIDIA's management library, and what its readings mean.

`run_check` calls `read_gpus` on one process of a node and `judge_gpus` on rank 0; `watch` uses
`open_nvml` and the masks. nvidia-ml-py is ctypes alone and loads the driver's `libnvidia-ml.so.1`:
no CUDA is touched. The idea: each value is read by itself, as an older driver lacks some and a GPU
that has fallen off the bus answers none; the driver's own verdict (recovery action) comes first,
and what cannot be read is None and reported as not checked, never as sound.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import psutil

from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding
from llmfoundry.resilience.check.kernel_log import FABRIC, REBOOT, REPLACE, RESET

RECOVERY = {  # nvmlDeviceGetFieldValues 230, of drivers from 570 on
    1: ("GPU reset", RESET),
    2: ("node reboot", REBOOT),
    3: ("drain of peer-to-peer traffic", RESET),
    4: ("drain and reset", RESET),
    5: ("recovery of the IMEX domain", FABRIC),
    6: ("bus reset", RESET),
    7: ("system reboot", REBOOT),
}
SLOWED = {0x8: "hardware slowdown", 0x40: "too hot (hardware)", 0x80: "external power brake"}
WARM = {0x20: "too hot (software)"}  # 0x4, the power cap, is usual under load
LEFT_OVER = 512 << 20  # bytes; NVRx waits for less than that before it starts a run again


@dataclass(frozen=True)
class GpuProcess:
    """A program on a GPU: id, name ("" where it is of another container), bytes that it holds."""

    pid: int
    name: str
    memory: int


@dataclass(frozen=True)
class GpuReading:
    """What NVML said of one GPU; None: it could not say.

    Attributes:
        index: NVML's number of it.
        name: `NVIDIA H100 80GB HBM3`.
        uuid: it, wherever it is plugged in.
        pci: its place on the bus, as the kernel log writes it.
        lost: the error, where nothing can be read at all.
        recovery_action: field 230; a key of RECOVERY, or 0.
        remap_pending: rows of memory wait for a reset to be remapped.
        remap_failed: no spare row was left.
        remapped_uncorrectable: rows that were remapped after an uncorrectable error.
        pages_pending: pages wait for a reset to be retired (before Ampere).
        uncorrectable: ECC errors since the last reset.
        links_down: numbers of the NVLinks that are not up.
        links_up: how many are.
        link_errors: NVLink replays and recoveries since the last reset.
        pcie_width: lanes.
        pcie_width_most: that card and slot can have.
        clocks_event_reasons: why the clock is not higher, a mask.
        fabric: the NVSwitch fabric's answer where it is not "completed"; "" where it is.
        processes: programs on it that are not this check's.
        temperature: degrees Celsius.
        power: watts.
    """

    index: int
    name: str = ""
    uuid: str = ""
    pci: str = ""
    lost: str = ""
    recovery_action: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_uncorrectable: int | None = None
    pages_pending: bool | None = None
    uncorrectable: int | None = None
    links_down: tuple[int, ...] | None = None
    links_up: int | None = None
    link_errors: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    clocks_event_reasons: int | None = None
    fabric: str | None = None
    processes: tuple[GpuProcess, ...] | None = field(default=None)
    temperature: int | None = None
    power: float | None = None


Answer = tuple[str, str, str]  # level, why, action


def judge_gpus(readings: Sequence[GpuReading], node: str) -> list[Finding]:
    """Every rule on every GPU of a machine; a GPU without a problem is one finding that says so."""
    found, links = [], links_missing(readings)
    for reading in readings:
        where = f"{node}, GPU {reading.index}" + (f" ({reading.pci})" if reading.pci else "")
        answers = [answer for rule in RULES for answer in rule(reading)]
        answers += [links[reading.index]] if reading.index in links else []
        if reading.lost:
            answers = [(BAD, f"lost: {reading.lost}", REBOOT)]
        if not any(level == BAD for level, _, _ in answers):
            answers.append((SOUND, _summary(reading), ""))
        if unread := _unread(reading):
            answers.append((UNCHECKED, f"the driver does not tell: {', '.join(unread)}", ""))
        for level, why, action in answers:
            found.append(_finding(level, where, why, action, node))
    return found


def judge_gpu_counts(counts: Mapping[str, int]) -> list[Finding]:
    """Machines with fewer GPUs than most have; `counts` is of each node's."""
    usual, often = Counter(counts.values()).most_common(1)[0] if counts else (0, 0)
    if often <= len(counts) / 2:
        return []
    why = f"GPUs, but {often} of {len(counts)} nodes have {usual}"
    few = ((node, n) for node, n in counts.items() if n < usual)
    return [_finding(BAD, node, f"{n} {why}", REBOOT, node) for node, n in few]


def _finding(level: str, where: str, why: str, action: str, node: str) -> Finding:
    return Finding("gpus", level, where, why, action, (node,) if level == BAD else ())


def recovery_action(gpu: GpuReading) -> Iterator[Answer]:
    """The driver's own verdict, the best single check."""
    if gpu.recovery_action:
        what, action = RECOVERY.get(gpu.recovery_action, ("an unknown action", RESET))
        yield BAD, f"the driver asks for: {what}", action


def memory_rows(gpu: GpuReading) -> Iterator[Answer]:
    """Rows that wait to be remapped need a reset; no spare row left is the end of the card."""
    if gpu.remap_failed:
        yield BAD, "a row of memory could not be remapped: no spare rows are left", REPLACE
    if gpu.remap_pending:
        yield BAD, "rows of memory wait for a reset to be remapped", RESET
    if gpu.pages_pending:
        yield BAD, "pages of memory wait for a reset to be retired", RESET
    if gpu.remapped_uncorrectable and not gpu.remap_failed:
        rows = gpu.remapped_uncorrectable
        yield NOTICE, f"rows remapped after uncorrectable errors so far: {rows}", ""


def ecc(gpu: GpuReading) -> Iterator[Answer]:
    """An uncorrectable error since the last reset: what was in memory was wrong once."""
    if gpu.uncorrectable:
        yield BAD, f"uncorrectable ECC errors since the last reset: {gpu.uncorrectable}", RESET


def nvlink(gpu: GpuReading) -> Iterator[Answer]:
    """Links that had to be trained again, and switches that have not let the GPU in."""
    if gpu.link_errors:
        yield NOTICE, f"NVLink recoveries and replays since the last reset: {gpu.link_errors}", ""
    if gpu.fabric:
        yield BAD, f"NVSwitch fabric: {gpu.fabric}", FABRIC


def links_missing(readings: Sequence[GpuReading]) -> dict[int, Answer]:
    """By GPU: fewer NVLinks are up than on most others; NCCL takes another way, many times slower.

    Cards without a bridge have links that are never up, so only the others tell what is usual.
    """
    known = [gpu for gpu in readings if gpu.links_up is not None and not gpu.lost]
    usual, often = (
        Counter(gpu.links_up or 0 for gpu in known).most_common(1)[0] if known else (0, 0)
    )
    found: dict[int, Answer] = {}
    for gpu in known:
        up, down = gpu.links_up or 0, ", ".join(map(str, gpu.links_down or ()))
        if up < usual and often > len(known) / 2:
            why = f"NVLink: {up} links are up, {usual} of the other GPUs' (down: {down})"
            found[gpu.index] = (BAD, why, FABRIC)
        elif up and down:
            found[gpu.index] = (NOTICE, f"NVLink down: {down} ({up} are up)", FABRIC)
    return found


def pcie(gpu: GpuReading) -> Iterator[Answer]:
    """Lanes do not go away when a GPU is idle, as the link's generation does."""
    if gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_width < gpu.pcie_width_most:
        why = f"PCIe has {gpu.pcie_width} lanes of {gpu.pcie_width_most}"
        yield BAD, why, "drain the machine and reseat the card"


def throttling(gpu: GpuReading) -> Iterator[Answer]:
    """Slowed by its own protection: heat, power, a brake from outside."""
    mask = gpu.clocks_event_reasons or 0
    for reasons, level in ((SLOWED, BAD), (WARM, NOTICE)):
        names = [name for bit, name in reasons.items() if mask & bit]
        if names:
            heat = f", {gpu.temperature} degrees" if gpu.temperature is not None else ""
            yield level, f"slowed: {', '.join(names)}{heat}", "look at cooling and power supply"


def left_over(gpu: GpuReading) -> Iterator[Answer]:
    """Programs that hold memory which a run would need."""
    for process in gpu.processes or ():
        held = f"process {process.pid} ({process.name or 'of another container'})"
        why = f"{held} holds {process.memory / 2**30:.1f} GiB of its memory"
        is_bad = bool(process.name) and process.memory > LEFT_OVER
        yield BAD if is_bad else NOTICE, why, "end that process, or run elsewhere"


RULES: tuple[Callable[[GpuReading], Iterator[Answer]], ...] = (
    recovery_action,
    memory_rows,
    ecc,
    nvlink,
    pcie,
    throttling,
    left_over,
)

_CALLED = {"recovery_action": "recovery action", "uncorrectable": "ECC errors"}
_CALLED |= {"remap_pending": "row remapping", "pcie_width": "PCIe width"}
_CALLED |= {"clocks_event_reasons": "throttle reasons", "links_up": "NVLink"}
_CALLED |= {"processes": "processes"}


def _unread(gpu: GpuReading) -> list[str]:
    """What of the rules' input is missing; of a lost GPU all is."""
    missing = [f.name for f in fields(gpu) if getattr(gpu, f.name) is None]
    return [] if gpu.lost else [_CALLED[name] for name in missing if name in _CALLED]


def _summary(gpu: GpuReading) -> str:
    parts = [gpu.name or "GPU"]
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature} degrees")
    if gpu.power is not None:
        parts.append(f"{gpu.power:.0f} W")
    return ", ".join(parts)


Value = TypeVar("Value")

DBE_VOLATILE, PAGES_PENDING, RECOVERY_ACTION = 4, 31, 230  # numbers of nvmlDeviceGetFieldValues
NVLINK_REPLAYS, NVLINK_RECOVERIES = 52, 59  # totals over the links
LOST = 15
_COMPLETED = 3  # nvmlGpuFabricState_t
_FABRIC = {1: "not started", 2: "in progress"}


def open_nvml() -> tuple[Any, str]:
    """The module that asks the driver, and "", or why it cannot be asked."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed; write: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return nvml, f"NVML: {error}"
    return nvml, ""


def read_gpus() -> tuple[list[GpuReading], str]:
    """Every GPU that the driver knows, and "", or none and why not."""
    nvml, problem = open_nvml()
    if problem:
        return [], problem
    try:
        count = nvml.nvmlDeviceGetCount()
        return [_read(nvml, index) for index in range(count)], "" if count else "NVML knows no GPU"
    except nvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> GpuReading:
    """All that a GPU tells."""
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        _field(nvml, gpu, DBE_VOLATILE)
    except nvml.NVMLError as error:
        return GpuReading(index, lost=str(error))

    def ask(call: Callable[[], Value]) -> Value | None:
        try:
            return call()
        except (nvml.NVMLError, AttributeError) as error:  # a pynvml without that function
            if getattr(error, "value", None) == LOST:
                raise
            return None

    try:
        rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
        up, down = _links(nvml, gpu, ask)
        pages = _field(nvml, gpu, PAGES_PENDING)
        return GpuReading(
            index,
            name=ask(lambda: nvml.nvmlDeviceGetName(gpu)) or "",
            uuid=ask(lambda: nvml.nvmlDeviceGetUUID(gpu)) or "",
            pci=_pci(ask(lambda: nvml.nvmlDeviceGetPciInfo(gpu))),
            recovery_action=_field(nvml, gpu, RECOVERY_ACTION),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            remapped_uncorrectable=None if rows is None else rows[1],
            pages_pending=None if pages is None else bool(pages),
            uncorrectable=_field(nvml, gpu, DBE_VOLATILE),
            links_down=down,
            links_up=up,
            link_errors=_link_errors(nvml, gpu),
            pcie_width=ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
            pcie_width_most=ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
            clocks_event_reasons=ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
            fabric=ask(lambda: _fabric(nvml, gpu)),
            processes=_processes(ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))),
            temperature=ask(lambda: nvml.nvmlDeviceGetTemperature(gpu, 0)),
            power=ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        )
    except nvml.NVMLError as error:
        return GpuReading(index, lost=str(error))


def _field(nvml: Any, gpu: Any, number: int) -> int | None:
    """One of the driver's numbered values; None where it has it not.

    Raises:
        NVMLError: the GPU is lost.
    """
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [number])
    except nvml.NVMLError as error:
        if error.value == LOST:
            raise
        return None
    if value.nvmlReturn == LOST:
        raise nvml.NVMLError(LOST)
    if value.nvmlReturn:
        return None
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    return int(getattr(value.value, kinds.get(value.valueType, "ullVal")))


def _links(
    nvml: Any, gpu: Any, ask: Callable[[Callable[[], Any]], Any]
) -> tuple[int | None, tuple[int, ...] | None]:
    """How many NVLinks are up, and the numbers of those that are not; a GPU without any has 0."""
    most = getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)
    states = [ask(partial(nvml.nvmlDeviceGetNvLinkState, gpu, number)) for number in range(most)]
    down = tuple(n for n, state in enumerate(states) if state == 0)
    return sum(state == 1 for state in states), down


def _link_errors(nvml: Any, gpu: Any) -> int | None:
    counts = [_field(nvml, gpu, number) for number in (NVLINK_REPLAYS, NVLINK_RECOVERIES)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _fabric(nvml: Any, gpu: Any) -> str:
    """What keeps the GPU out of the NVSwitch fabric; "" where nothing does, or there is none."""
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    if info.state == _COMPLETED and info.status:
        return f"registration failed with status {info.status}"
    return _FABRIC.get(info.state, "")


def _pci(info: Any) -> str:
    """`0000:c1:00`, as the kernel log writes it."""
    return "" if info is None else f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}"


def _processes(found: list[Any] | None) -> tuple[GpuProcess, ...] | None:
    """Programs that neither are this one nor were started by, or beside, it."""
    if found is None:
        return None
    ours = {os.getpid()}
    if "RANK" in os.environ:  # the others have the same launcher
        ours.add(os.getppid())
    others = []
    for process in found:
        try:
            program = psutil.Process(process.pid)
            family = {process.pid, *(parent.pid for parent in program.parents())}
            name = program.name()
        except psutil.Error:
            family, name = set(), ""
        if not ours & family:
            others.append(GpuProcess(process.pid, name, process.usedGpuMemory or 0))
    return tuple(others)
