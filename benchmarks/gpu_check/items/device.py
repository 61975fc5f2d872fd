"""What the device's matrix products reach, and the corpus of the runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_check.items.corpus import write_corpus
from benchmarks.gpu_check.items.measure import Here, Row
from benchmarks.moe import timed

GIB = 2**30
WARM_UP, BURN = 0.5, 2.0  # seconds: of a clock that rises, and of what is measured


def products(here: Here, *, small: bool) -> Iterator[Row]:
    """The rate of bf16 matrix products of several sizes, and of copies in memory."""
    for n in (256, 512) if small else (2048, 4096, 8192, 16384):
        a, b = (torch.randn(n, n, device=here.device, dtype=torch.bfloat16) for _ in range(2))
        burn = 0.1 if small else BURN
        seconds = sustained(lambda a=a, b=b: a @ b, here.device, burn)  # type: ignore[misc]
        yield {
            "product": f"{n} x {n} x {n}",
            "ms": seconds * 1e3,
            "TFLOP/s": 2 * n**3 / seconds / 1e12,
        }
    size = 1 << (22 if small else 30)
    source = torch.ones(size, device=here.device, dtype=torch.uint8)
    seconds = sustained(source.clone, here.device, 0.1 if small else 0.5)
    yield {"product": "copy in memory", "ms": seconds * 1e3, "GB/s": 2 * size / seconds / 1e9}


def corpus(here: Here, *, tokens: int) -> Iterator[Row]:
    """The token shards that every run reads."""
    started = time.perf_counter()
    documents = write_corpus(here.folder / "corpus", tokens=tokens)
    yield {"tokens": tokens, "documents": documents, "s": time.perf_counter() - started}


def sustained(step: Callable[[], Any], device: torch.device, burn: float) -> float:
    """Seconds of a step, the median over `burn` seconds after the clocks have settled."""
    spans: list[float] = []
    started = time.perf_counter()
    while (at := time.perf_counter() - started) < WARM_UP + burn or not spans:
        span = next(iter(timed(step, device).values()))
        if at > WARM_UP or not spans:
            spans.append(span)
    return statistics.median(spans[1:] or spans)
