"""The GPU's reader, beside a module that answers as pynvml does."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry.resilience.check.nvml import GpuReader, GpuState


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Library:
    """One GPU; `xids` are what its driver reports next, `lost`: it has fallen off the bus."""

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 10, 15
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.xids: queue.Queue[int] = queue.Queue()
        self.lost, self.reasons, self.readings = False, 0x4, 0
        self.joules: float | None = 5000.0  # since the driver was loaded; None: no counter
        self.registered: list[tuple[str, int]] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError(6)
        return uuid

    def nvmlEventSetCreate(self) -> Any:
        return self

    def nvmlDeviceRegisterEvents(self, gpu: str, kind: int, events: Any) -> None:
        self.registered.append((gpu, kind))

    def nvmlEventSetWait_v2(self, events: Any, milliseconds: int) -> Any:
        try:
            return SimpleNamespace(eventData=self.xids.get(timeout=milliseconds / 1e3))
        except queue.Empty:
            raise NVMLError(10) from None

    def _answer(self, value: Any) -> Any:
        if self.lost:
            raise NVMLError(15)
        return value

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: str) -> int:
        self.readings += 1
        return int(self._answer(self.reasons))

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        return int(self._answer(61))

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return int(self._answer(350_500))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        if self.joules is None:
            raise NVMLError(3)
        return int(self._answer(1000 * self.joules))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_worst_since_the_last_look_is_given_once(library: Library) -> None:
    reader = GpuReader("GPU-1", seconds=0.01)
    until(lambda: library.readings > 2)
    assert reader.take() == GpuState(temperature=61.0, power=350.5)  # the power cap is usual
    assert library.registered == [("GPU-1", 8)]
    library.xids.put(79)
    library.reasons = 0x44
    until(library.xids.empty)
    library.reasons, begin = 0x4, library.readings + 2
    library.xids.put(45)  # what follows from the first
    until(lambda: library.xids.empty() and library.readings > begin)
    found = reader.take()
    assert found.xid == 79
    assert reader.take().xid == 0
    reader.close()
    before = library.readings
    time.sleep(0.05)
    assert library.readings == before


def test_energy_is_the_growth_of_the_counter(library: Library) -> None:
    reader = GpuReader("GPU-1", seconds=0.01)
    until(lambda: library.readings > 2)
    assert reader.take().energy == 0.0
    library.joules = 5012.5
    begin = library.readings
    until(lambda: library.readings > begin + 2)
    assert reader.take().energy == 12.5
    assert reader.take().energy == 0.0
    reader.close()


def test_without_a_counter_power_is_integrated(library: Library) -> None:
    library.joules = None
    began = time.monotonic()
    reader = GpuReader("GPU-1", seconds=0.01)
    until(lambda: library.readings > 10)
    reader.close()
    energy, longest = reader.take().energy, time.monotonic() - began
    assert 350.5 * 9 * 0.009 < energy < 350.5 * longest


def test_a_gpu_is_lost_once(library: Library) -> None:
    reader = GpuReader("GPU-1", seconds=0.01)
    library.lost = True
    seen: list[bool] = []

    def lost() -> bool:
        seen.append(reader.take().lost)
        return any(seen)

    until(lost)
    begin = library.readings
    until(lambda: library.readings > begin + 3)
    assert not reader.take().lost
    reader.close()


def test_what_cannot_be_read_is_reported(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuReader("GPU-2").problem == "NVML: error 6"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in GpuReader("GPU-1").problem
