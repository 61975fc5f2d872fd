"""Readings of every GPU of this machine by NVML, NVIDIA's management library; no CUDA is touched.

The package nvidia-ml-py is ctypes alone and loads `libnvidia-ml.so.1`, which the driver brings. The
idea: each question is asked by itself, as an older driver lacks some of them and a GPU that has
fallen off the bus answers none.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import psutil

from llmfoundry.resilience.check.gpus import GpuReading, Process

Value = TypeVar("Value")

DBE_VOLATILE, PAGES_PENDING, RECOVERY_ACTION = 4, 31, 230  # numbers of nvmlDeviceGetFieldValues
NVLINK_REPLAYS, NVLINK_RECOVERIES = 52, 59  # totals over the links
LOST = 15
_COMPLETED = 3  # nvmlGpuFabricState_t
_FABRIC = {1: "not started", 2: "in progress"}


def opened() -> tuple[Any, str]:
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


def read() -> tuple[list[GpuReading], str]:
    """Every GPU that the driver knows, and "", or none and why not."""
    nvml, problem = opened()
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


def _processes(found: list[Any] | None) -> tuple[Process, ...] | None:
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
            others.append(Process(process.pid, name, process.usedGpuMemory or 0))
    return tuple(others)
