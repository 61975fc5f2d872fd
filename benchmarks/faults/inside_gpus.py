"""A plugin for runs whose ranks are to have GPUs: `GpuReader` reads the library that stands in.

What watches a GPU starts where PyTorch trains on one. Here each rank trains on a CPU, and its GPU
is the one of its rank among those of tests/resilience/fake_nvml.cpp.
"""

from __future__ import annotations

from llmfoundry.resilience.check.nvml import GpuReader
from llmfoundry.resilience.watch.watch import Watch
from llmfoundry.train.trainer import Trainer

_start = Watch.on_start


def _with_gpu(self: Watch, trainer: Trainer) -> None:
    _start(self, trainer)
    self._gpu = GpuReader(f"GPU-0000-{trainer.world.rank + 1}", seconds=0.5)
    assert not self._gpu.problem, self._gpu.problem


Watch.on_start = _with_gpu  # type: ignore[method-assign]
