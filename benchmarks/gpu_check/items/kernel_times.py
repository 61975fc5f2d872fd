"""The kernels of a profiled step: the ten largest, and the sum of each kind."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch.autograd import DeviceType

LARGEST = 10
KINDS = {  # the first that finds something in a kernel's name
    "attention": r"flash|fmha|attention|sdpa|flex",
    "grouped products": r"grouped|gather_kernel|glu_|combine_kernel",
    "collectives": r"nccl",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|addmm|\bmm\b|matmul|linear|mkldnn|onednn",
    "optimizer": r"adam|multi_tensor|foreach|lion|muon",
    "norms": r"norm",
    "softmax and loss": r"softmax|logsumexp|nll|cross_entropy|scatter|gather",
    "embedding": r"embedding|index",
    "copies and casts": r"memcpy|memset|copy|cast|\bto\b|_to_",
    "compiled": r"triton",
    "elementwise": r"elementwise|vectorized|reduce|add|mul|gelu|silu|fill|sum|cat",
}


def kernel_rows(profiler: Any, device: str) -> list[dict[str, Any]]:
    """A row for each of the largest kernels, then one for each kind, by time of the device.

    Args:
        profiler: a finished torch.profiler.profile, of one step.
        device: `cuda`: kernels; `cpu`: operators, by their own time.
    """
    times: dict[str, list[float]] = defaultdict(list)
    if device == "cuda":
        for event in profiler.events():
            annotates = getattr(event, "is_user_annotation", False)  # of kernels that are there too
            if event.device_type == DeviceType.CUDA and not annotates:
                times[event.name].append(event.time_range.elapsed_us())
    else:
        for event in profiler.key_averages():
            times[event.key] += [event.self_cpu_time_total / event.count] * event.count
    sums = {name: sum(each) for name, each in times.items()}
    total = sum(sums.values()) or 1.0
    largest = sorted(sums, key=lambda name: -sums[name])[:LARGEST]
    rows = [_row({"kernel": n, "calls": len(times[n])}, sums[n], total) for n in largest]
    kinds: dict[str, float] = defaultdict(float)
    for name, time in sums.items():
        kinds[kind(name)] += time
    by_time = sorted(kinds, key=lambda name: -kinds[name])
    return rows + [_row({"kind": name}, kinds[name], total) for name in by_time]


def kind(name: str) -> str:
    """Of a kernel, by its name."""
    found = (key for key, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "other")


def _row(named: dict[str, Any], time: float, total: float) -> dict[str, Any]:
    """A kernel's or a kind's time in ms, and its share of all kernels'."""
    return {**named, "ms": time / 1e3, "share": time / total}
