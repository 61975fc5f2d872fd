"""This process's GPU while it trains, by NVML: errors (XIDs), slow-downs, temperature, power.

`watch.py` starts one where there is a GPU. The idea: a thread waits for the driver's events and
reads the rest every few seconds, so that training never asks the driver anything; `take` gives the
worst of what was read since the last time, as an XID's last value says neither when nor how often.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from llmfoundry.resilience.check.nvml import SLOWED, WARM, open_nvml

SECONDS = 5.0  # between two readings
_SLOW = sum(SLOWED) | sum(WARM)


@dataclass
class GpuState:
    """The worst since the last look; 0: nothing, or not known.

    Attributes:
        xid: the first error that the driver reported.
        slowed: why the clock was lowered to protect the GPU: a mask of check/gpus.py's.
        lost: whether it has fallen off the bus.
        temperature: degrees Celsius, the highest.
        power: watts, the latest.
    """

    xid: int = 0
    slowed: int = 0
    lost: bool = False
    temperature: float = 0.0
    power: float = 0.0


class GpuReader:
    """Reads one GPU in a thread of its own.

    Attributes:
        problem: why nothing can be read; empty: it can.
    """

    def __init__(self, uuid: str, *, seconds: float = SECONDS) -> None:
        """Begin to read the GPU of this UUID, `GPU-…`, every so many seconds."""
        self._seconds = seconds
        self._state, self._lock, self._closed = GpuState(), threading.Lock(), threading.Event()
        self._was_lost = False
        self._thread = threading.Thread(target=self._run, name="gpu reader", daemon=True)
        self._nvml, self.problem = open_nvml()
        if self.problem:
            return
        try:
            self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self.problem = f"NVML: {error}"
        else:
            self._thread.start()

    def take(self) -> GpuState:
        """The worst since the last call."""
        with self._lock:
            found = self._state
            self._state = GpuState(power=found.power)
        return found

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._seconds)

    def _run(self) -> None:
        events = self._events()
        while not self._closed.is_set():
            xid = self._wait(events)
            found = self._read()
            with self._lock:
                state = self._state
                state.xid = state.xid or xid
                state.slowed |= found.slowed
                state.temperature = max(state.temperature, found.temperature)
                state.power = found.power
                state.lost = state.lost or (found.lost and not self._was_lost)
            self._was_lost = found.lost

    def _events(self) -> Any:
        """The driver's queue of this GPU's XIDs; None where it has none."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            kind = self._nvml.nvmlEventTypeXidCriticalError
            self._nvml.nvmlDeviceRegisterEvents(self._gpu, kind, events)
        except self._nvml.NVMLError:
            return None
        return events

    def _wait(self, events: Any) -> int:
        """The XID that comes next, 0 if none does in the time between two readings."""
        if events is None or self._was_lost:
            self._closed.wait(self._seconds)
            return 0
        try:
            return int(self._nvml.nvmlEventSetWait_v2(events, round(1e3 * self._seconds)).eventData)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) != self._nvml.NVML_ERROR_TIMEOUT:
                self._closed.wait(self._seconds)  # not at once again, for ever
            return 0

    def _read(self) -> GpuState:
        nvml, gpu, state = self._nvml, self._gpu, GpuState()
        for read in (self._slowed, self._temperature, self._power):
            try:
                read(nvml, gpu, state)
            except nvml.NVMLError as error:
                state.lost |= getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST
            except AttributeError:  # a pynvml without that function
                continue
        return state

    @staticmethod
    def _slowed(nvml: Any, gpu: Any, state: GpuState) -> None:
        state.slowed = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & _SLOW

    @staticmethod
    def _temperature(nvml: Any, gpu: Any, state: GpuState) -> None:
        state.temperature = float(nvml.nvmlDeviceGetTemperature(gpu, 0))

    @staticmethod
    def _power(nvml: Any, gpu: Any, state: GpuState) -> None:
        state.power = nvml.nvmlDeviceGetPowerUsage(gpu) / 1000
