"""Read and judge this machine's GPUs through NVML, NVIDIA's management library.

`run_check` calls `read_gpus` on one rank of a node and `judge_gpus` on rank 0. The `watch` callback
of a training run has a `GpuReader` for the GPU of each rank. nvidia-ml-py loads the driver's
`libnvidia-ml.so.1` with ctypes and does not use CUDA. Each value is read separately, because older
drivers lack some values and a lost GPU has none. The driver's own verdict (recovery action) comes
first. A value that cannot be read is None and is reported as not checked, never as sound.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, UNCHECKED, Finding
from llmfoundry.resilience.check.kernel_log import FABRIC, REBOOT, REPLACE, RESET

DBE_VOLATILE, PAGES_PENDING, RECOVERY_ACTION = 4, 31, 230  # numbers of nvmlDeviceGetFieldValues
NVLINK_REPLAYS, NVLINK_RECOVERIES = 52, 59  # totals over the links
LOST = 15
READER_SECONDS = 5.0  # between two readings of a training run's GPU
_COMPLETED = 3  # nvmlGpuFabricState_t
_FABRIC = {1: "not started", 2: "in progress"}

RECOVERY = {  # values of field 230, which drivers from 570 on have
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
LEFT_OVER = 512 << 20  # bytes that another program may hold; NVRx uses the same limit


@dataclass(frozen=True)
class GpuProcess:
    """A program on a GPU: process id, name (empty: in another container), bytes of GPU memory."""

    pid: int
    name: str
    memory: int


@dataclass(frozen=True)
class GpuReading:
    """NVML's values of one GPU; None: not readable.

    Attributes:
        index: NVML's index.
        name: such as `NVIDIA H100 80GB HBM3`.
        uuid: identifier of the card.
        pci: PCI address, in the form of the kernel log.
        lost: error message if no value can be read.
        recovery_action: field 230; a key of RECOVERY, or 0.
        remapped_uncorrectable: rows remapped after an uncorrectable error.
        remap_pending: whether memory rows will be remapped at the next reset.
        remap_failed: whether no spare row was left.
        pages_pending: whether pages will be retired at the next reset (before Ampere).
        uncorrectable: ECC errors since the last reset.
        links_down: numbers of the NVLinks that are down.
        links_up: number of NVLinks that are up.
        link_errors: NVLink replays and recoveries since the last reset.
        pcie_width: current PCIe lanes.
        pcie_width_most: maximum PCIe lanes of card and slot.
        clocks_event_reasons: reasons for a reduced clock, as a bit mask.
        fabric: state of the NVSwitch fabric if it is not "completed"; empty: completed, or none.
        processes: programs on the GPU that do not belong to this check.
        temperature: in degrees Celsius.
        power: in watts.
    """

    index: int
    name: str = ""
    uuid: str = ""
    pci: str = ""
    lost: str = ""
    recovery_action: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    pages_pending: int | None = None
    uncorrectable: int | None = None
    links_down: Sequence[int] | None = None
    links_up: int | None = None
    link_errors: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    clocks_event_reasons: int | None = None
    fabric: str | None = None
    processes: Sequence[GpuProcess] | None = None
    temperature: int | None = None
    power: float | None = None


def open_nvml() -> tuple[Any, str]:
    """Return the module pynvml and an error message; the message is empty on success."""
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
    """Return the readings of all GPUs and an empty string, or no reading and the reason."""
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
    try:
        gpu = _Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        uncorrectable = gpu.field(DBE_VOLATILE)  # first, because it raises if the GPU is lost
        rows = gpu.ask("nvmlDeviceGetRemappedRows") or (None, None, None, None)
        states = [gpu.ask("nvmlDeviceGetNvLinkState", n) for n in range(gpu.most_links)]
        pci = gpu.ask("nvmlDeviceGetPciInfo")
        power = gpu.ask("nvmlDeviceGetPowerUsage")
        errors = [gpu.field(number) for number in (NVLINK_REPLAYS, NVLINK_RECOVERIES)]
        known_errors = [count for count in errors if count is not None]
        return GpuReading(
            index,
            name=gpu.ask("nvmlDeviceGetName") or "",
            uuid=gpu.ask("nvmlDeviceGetUUID") or "",
            pci=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}" if pci else "",
            recovery_action=gpu.field(RECOVERY_ACTION),
            remapped_uncorrectable=rows[1],
            remap_pending=rows[2],
            remap_failed=rows[3],
            pages_pending=gpu.field(PAGES_PENDING),
            uncorrectable=uncorrectable,
            links_down=[number for number, state in enumerate(states) if state == 0],
            links_up=sum(state == 1 for state in states),
            link_errors=sum(known_errors) if known_errors else None,
            pcie_width=gpu.ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_most=gpu.ask("nvmlDeviceGetMaxPcieLinkWidth"),
            clocks_event_reasons=gpu.ask("nvmlDeviceGetCurrentClocksEventReasons"),
            fabric=gpu.fabric(),
            processes=_others(gpu.ask("nvmlDeviceGetComputeRunningProcesses")),
            temperature=gpu.ask("nvmlDeviceGetTemperature", 0),
            power=None if power is None else power / 1000,
        )
    except nvml.NVMLError as error:
        return GpuReading(index, lost=str(error))


class _Gpu:
    """Queries of one GPU. They return None if driver or nvidia-ml-py lack the value.

    All queries raise NVMLError if the GPU is lost.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.most_links = getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call an NVML function for this GPU, and return its result."""
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError) as error:
            if getattr(error, "value", None) == LOST:
                raise
            return None

    def field(self, number: int) -> int | None:
        """Return one of the driver's numbered field values."""
        values = self.ask("nvmlDeviceGetFieldValues", [number])
        if values is None:
            return None
        (value,) = values
        if value.nvmlReturn == LOST:
            raise self._nvml.NVMLError(LOST)
        if value.nvmlReturn:
            return None
        kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
        return int(getattr(value.value, kinds.get(value.valueType, "ullVal")))

    def fabric(self) -> str | None:
        """Return why the GPU has not joined the NVSwitch fabric; empty: joined, or no fabric."""
        if not hasattr(self._nvml, "c_nvmlGpuFabricInfo_t"):
            return None
        info = self._nvml.c_nvmlGpuFabricInfo_t()
        if self.ask("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info)) is None:
            return None
        if info.state == _COMPLETED and info.status:
            return f"registration failed with status {info.status}"
        return _FABRIC.get(info.state, "")


def _others(processes: Sequence[Any] | None) -> list[GpuProcess] | None:
    """Return the programs that are not this process, its children, or ranks of its launcher."""
    if processes is None:
        return None
    ours = {os.getpid(), *([os.getppid()] if "RANK" in os.environ else [])}  # with the launcher
    others = []
    for process in processes:
        try:
            program = psutil.Process(process.pid)
            family = {process.pid, *(parent.pid for parent in program.parents())}
            name = program.name()
        except psutil.Error:
            family, name = set(), ""
        if not ours & family:
            others.append(GpuProcess(process.pid, name, process.usedGpuMemory or 0))
    return others


@dataclass
class GpuState:
    """Worst state of a training run's GPU since the last reading; 0: normal, or not known.

    Attributes:
        xid: first error that the driver reported.
        slowed: reasons for throttling, as a bit mask of SLOWED and WARM.
        lost: whether the GPU has fallen off the bus.
        temperature: maximum, in degrees Celsius.
        power: last value, in watts.
        energy: joules since the last reading.
    """

    xid: int = 0
    slowed: int = 0
    lost: bool = False
    temperature: float = 0.0
    power: float = 0.0
    energy: float = field(default=0.0, compare=False)


class GpuReader:
    """Reader of one GPU in a background thread, so that training does not wait for the driver.

    The thread waits for the driver's XID events, and reads other values every few seconds. NVML can
    also be queried for the last XID, but without its time and number.

    Attributes:
        problem: why the GPU cannot be read; empty: no problem.
    """

    def __init__(self, uuid: str, *, seconds: float = READER_SECONDS) -> None:
        """Start to read the GPU with a UUID (`GPU-…`) every `seconds`."""
        self._seconds = seconds
        self._state, self._lock, self._closed = GpuState(), threading.Lock(), threading.Event()
        self._was_lost = False
        self._energy_read: tuple[float, float | None] | None = None  # time, counter in joules
        self._thread = threading.Thread(target=self._run, name="gpu reader", daemon=True)
        self._nvml, self.problem = open_nvml()
        if self.problem:
            return
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self.problem = f"NVML: {error}"
        else:
            self._thread.start()

    def take(self) -> GpuState:
        """Return the worst state since the last call."""
        with self._lock:
            state = self._state
            self._state = GpuState(power=state.power)
        return state

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._seconds)

    def _run(self) -> None:
        events = self._events()
        while not self._closed.is_set():
            xid = self._next_xid(events)
            current = self._read()
            with self._lock:
                state = self._state
                state.xid = state.xid or xid
                state.slowed |= current.slowed
                state.temperature = max(state.temperature, current.temperature)
                state.power = current.power
                state.energy += current.energy
                state.lost = state.lost or (current.lost and not self._was_lost)
            self._was_lost = current.lost

    def _events(self) -> Any:
        """Return the driver's queue of XID events of this GPU; None: not supported."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            kind = self._nvml.nvmlEventTypeXidCriticalError
            self._nvml.nvmlDeviceRegisterEvents(self._handle, kind, events)
        except self._nvml.NVMLError:
            return None
        return events

    def _next_xid(self, events: Any) -> int:
        """Wait for the next XID until the next reading is due; return 0 if there is none."""
        if events is None or self._was_lost:
            self._closed.wait(self._seconds)
            return 0
        try:
            return int(self._nvml.nvmlEventSetWait_v2(events, round(1e3 * self._seconds)).eventData)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) != self._nvml.NVML_ERROR_TIMEOUT:
                self._closed.wait(self._seconds)  # avoid a busy loop
            return 0

    def _read(self) -> GpuState:
        gpu = _Gpu(self._nvml, self._handle)
        try:
            slowed = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
            temperature = gpu.ask("nvmlDeviceGetTemperature", 0) or 0
            power = (gpu.ask("nvmlDeviceGetPowerUsage") or 0) / 1000
            counter = gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        except self._nvml.NVMLError:
            return GpuState(lost=True)
        mask = slowed & (sum(SLOWED) | sum(WARM))
        energy = self._energy(power, None if counter is None else counter / 1000)
        return GpuState(slowed=mask, temperature=float(temperature), power=power, energy=energy)

    def _energy(self, power: float, counter: float | None) -> float:
        """Return the joules since the last call; 0 in the first.

        GPUs since Volta have a counter, in joules since the driver was loaded. Of older GPUs the
        power is integrated.
        """
        before, now = self._energy_read, time.monotonic()
        self._energy_read = now, counter
        if before is None:
            return 0.0
        if counter is not None and before[1] is not None:
            return max(0.0, counter - before[1])
        return power * (now - before[0])


Judgment = tuple[str, str, str]  # level, why, action


def judge_gpus(readings: Sequence[GpuReading], node: str) -> list[Finding]:
    """Return the findings on all GPUs of a machine; a GPU without a problem is a finding too."""
    findings, links = [], links_missing(readings)
    for gpu in readings:
        # problems of the GPU, or that it passed
        answers = [*_answers(gpu), *links.get(gpu.index, ())]
        if gpu.lost:
            answers = [(BAD, f"lost: {gpu.lost}", REBOOT)]
        if not any(level == BAD for level, _, _ in answers):
            heat = "" if gpu.temperature is None else f", {gpu.temperature} degrees"
            power = "" if gpu.power is None else f", {gpu.power:.0f} W"
            answers.append((SOUND, (gpu.name or "GPU") + heat + power, ""))

        # values that the driver does not report
        missing = [name for field, name in _NEEDED.items() if getattr(gpu, field) is None]
        if missing and not gpu.lost:
            answers.append((UNCHECKED, f"the driver does not report: {', '.join(missing)}", ""))
        where = f"{node}, GPU {gpu.index}" + (f" ({gpu.pci})" if gpu.pci else "")
        findings += [_finding(level, where, why, action, node) for level, why, action in answers]
    return findings


def judge_gpu_counts(counts: Mapping[str, int]) -> list[Finding]:
    """Return findings on nodes with fewer GPUs than most nodes; `counts` is by node."""
    usual, often = Counter(counts.values()).most_common(1)[0] if counts else (0, 0)
    if often <= len(counts) / 2:
        return []
    why = f"GPUs, but {often} of {len(counts)} nodes have {usual}"
    few = ((node, n) for node, n in counts.items() if n < usual)
    return [_finding(BAD, node, f"{n} {why}", REBOOT, node) for node, n in few]


def _finding(level: str, where: str, why: str, action: str, node: str) -> Finding:
    return Finding("gpus", level, where, why, action, (node,) if level == BAD else ())


def _answers(gpu: GpuReading) -> Iterator[Judgment]:
    """Yield the problems of one GPU; `links_missing` compares the GPUs of a node."""
    if gpu.recovery_action:  # the driver's own verdict, the best single check
        what, action = RECOVERY.get(gpu.recovery_action, ("an unknown action", RESET))
        yield BAD, f"the driver asks for: {what}", action
    if gpu.remap_failed:  # the end of the card
        yield BAD, "a row of memory could not be remapped: no spare rows are left", REPLACE
    if gpu.remap_pending:
        yield BAD, "rows of memory wait for a reset to be remapped", RESET
    if gpu.pages_pending:
        yield BAD, "pages of memory wait for a reset to be retired", RESET
    if gpu.remapped_uncorrectable and not gpu.remap_failed:
        rows = gpu.remapped_uncorrectable
        yield NOTICE, f"rows remapped after uncorrectable errors so far: {rows}", ""
    if gpu.uncorrectable:  # what was in memory was wrong once
        yield BAD, f"uncorrectable ECC errors since the last reset: {gpu.uncorrectable}", RESET
    if gpu.link_errors:
        yield NOTICE, f"NVLink recoveries and replays since the last reset: {gpu.link_errors}", ""
    if gpu.fabric:
        yield BAD, f"NVSwitch fabric: {gpu.fabric}", FABRIC
    # an idle GPU reduces the generation of the link, but not its lanes
    if gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_width < gpu.pcie_width_most:
        why = f"PCIe has {gpu.pcie_width} lanes of {gpu.pcie_width_most}"
        yield BAD, why, "drain the machine and reseat the card"
    for reasons, level in ((SLOWED, BAD), (WARM, NOTICE)):
        mask = gpu.clocks_event_reasons or 0
        if names := [name for bit, name in reasons.items() if mask & bit]:
            heat = f", {gpu.temperature} degrees" if gpu.temperature is not None else ""
            yield level, f"slowed: {', '.join(names)}{heat}", "look at cooling and power supply"
    for process in gpu.processes or ():
        held = f"process {process.pid} ({process.name or 'of another container'})"
        why = f"{held} holds {process.memory / 2**30:.1f} GiB of its memory"
        is_bad = bool(process.name) and process.memory > LEFT_OVER
        yield BAD if is_bad else NOTICE, why, "end that process, or run elsewhere"


_NEEDED = {  # values that the rules need, with their names in the report
    "recovery_action": "recovery action",
    "remap_pending": "row remapping",
    "uncorrectable": "ECC errors",
    "links_up": "NVLink",
    "pcie_width": "PCIe width",
    "clocks_event_reasons": "throttle reasons",
    "processes": "processes",
}


def links_missing(readings: Sequence[GpuReading]) -> dict[int, list[Judgment]]:
    """Return the problems of GPUs with fewer NVLinks up than most others, by index.

    NCCL is many times slower with a missing link. The other GPUs show the usual number, because
    cards without a bridge have links that are never up.
    """
    known = {gpu.index: (gpu.links_up, ", ".join(map(str, gpu.links_down or ())))
             for gpu in readings if gpu.links_up is not None and not gpu.lost}  # fmt: skip
    counts = Counter(up for up, _ in known.values())
    usual, often = counts.most_common(1)[0] if counts else (0, 0)
    problems: dict[int, list[Judgment]] = {}
    for index, (up, down) in known.items():
        if up < usual and often > len(known) / 2:
            why = f"NVLink: {up} links are up, {usual} of the other GPUs' (down: {down})"
            problems[index] = [(BAD, why, FABRIC)]
        elif up and down:
            problems[index] = [(NOTICE, f"NVLink down: {down} ({up} are up)", FABRIC)]
    return problems
