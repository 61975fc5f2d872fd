"""Speeds of parts on their own: the layer of experts, the loss by chunks, a bare loop."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import Sizes, bare_steps
from benchmarks.gpu_check.items.device import GIB, sustained
from benchmarks.gpu_check.items.measure import Here, Row, tried
from benchmarks.gpu_check.items.watch import mark, seconds_between, wait_for
from benchmarks.moe import DENSE, LayerShape, contenders, saved_bytes, seconds
from llmfoundry.ops import loss
from llmfoundry.ops.loss import linear_cross_entropy
from llmfoundry.plan.fit import USABLE, available_memory

LOW = torch.bfloat16
CHUNKS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
WARM_UP = 3  # steps of the bare loop


def experts(
    here: Here, *, tokens: int, d: int, f: int, experts: int, top_k: int, rounds: int
) -> Iterator[Row]:
    """Each way to compute the layer by turns with a dense one of as many active FLOPs, in bf16."""
    shape = LayerShape(_tokens_that_fit(here, tokens, d, f, experts, top_k), d, f, experts, top_k)
    if not shape.tokens:
        free = available_memory(here.device) / GIB
        yield {"contender": "all", "not run": f"{free:.0f} GiB are free, too few for its weights"}
        return
    x = torch.randn(shape.tokens, d, device=here.device).to(LOW).requires_grad_()
    layers = contenders(shape, LOW, here.device.type)
    for name in [name for name in layers if name != DENSE]:
        row: Row = {"contender": name, "tokens": shape.tokens}
        yield tried(row, partial(_beside_dense, shape, x, layers, name, rounds))
        gc.collect()


def _beside_dense(
    shape: LayerShape, x: Tensor, layers: Mapping[str, Any], name: str, rounds: int
) -> Row:
    """One of them: time, also over the dense layer's in each round, rate, and what it saves."""
    found = seconds({DENSE: layers[DENSE], name: layers[name]}, x, rounds)
    mine, dense = ([next(iter(t.values())) for t in found[n]] for n in (name, DENSE))
    saved = saved_bytes(layers[name][0], x) / shape.tokens / shape.d
    flops = 3 * 3 * 2 * shape.tokens * shape.top_k * shape.d * shape.f
    return {
        "ms": 1e3 * statistics.median(mine),
        "dense ms": 1e3 * statistics.median(dense),
        "of dense": statistics.median(a / b for a, b in zip(mine, dense, strict=True)),
        "TFLOP/s": flops / statistics.median(mine) / 1e12,
        "saved a token, d": round(saved, 1),
    }


def _tokens_that_fit(here: Here, tokens: int, d: int, f: int, experts: int, top_k: int) -> int:
    """So many tokens, or half, a quarter, ... of them; 0 where the weights alone do not fit."""
    stacked = 2 * 3 * experts * d * f
    # weights, their gradients, plain autograd's joined copy of two thirds and its gradient, dense
    fixed = stacked * 10 // 3 + 2 * 2 * 3 * top_k * d * f
    usable = USABLE * available_memory(here.device)
    while tokens and fixed + 2 * tokens * top_k * (12 * f + 8 * d) > usable:
        tokens = tokens // 2 if tokens > 256 else 0
    return tokens


def loss_chunks(here: Here, *, tokens: int, d: int, vocabulary: int) -> Iterator[Row]:
    """The loss with its gradients, as a step computes it, by tokens whose logits are held."""
    hidden = torch.randn(tokens, d, device=here.device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, d, device=here.device) * d**-0.5)
    labels = torch.randint(0, vocabulary, (tokens,), device=here.device)

    def step() -> None:
        with torch.autocast(here.device.type, dtype=LOW):
            total = linear_cross_entropy(hidden, weight, labels)
        torch.autograd.grad(total, [hidden, weight])

    flops = 3 * 2 * tokens * d * vocabulary

    def measured(chunk: int | None) -> Row:
        with of_chunks(chunk):
            found = _timed_loss(step, here.device)
        return {**found, "TFLOP/s": flops / found["ms"] / 1e9}

    for chunk in (None, *(n for n in CHUNKS if n <= tokens)):
        yield tried({"chunk": chunk or "as it is"}, partial(measured, chunk))


def _timed_loss(step: Any, device: torch.device) -> Row:
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    found: Row = {"ms": 1e3 * sustained(step, device, 0.3 if device.type == "cpu" else 1.0)}
    if device.type == "cuda":
        found["GiB"] = (torch.cuda.max_memory_allocated(device) - before) / GIB
    return found


@contextmanager
def of_chunks(tokens: int | None) -> Iterator[None]:
    """The loss holds the logits of so many tokens at a time; None: as it decides itself."""
    decides = loss.chunk_tokens
    if tokens is not None:
        loss.chunk_tokens = lambda *_, **__: tokens
    try:
        yield
    finally:
        loss.chunk_tokens = decides


def bare(here: Here, *, steps: int, compile: bool, **sizes: int) -> Iterator[Row]:
    """Steps of the shortest loop that one would write."""
    shape = Sizes(**sizes)
    run = bare_steps(
        shape, precision="amp_bf16", steps=steps, compiled=compile, device=here.device.type
    )
    marks = [mark(here.device) for _ in run]
    wait_for(here.device)
    spans = [seconds_between(a, b) for a, b in itertools.pairwise(marks)]
    step = statistics.median(spans[min(WARM_UP, len(spans) - 1) :])
    yield {"rows": shape.rows, "step ms": 1e3 * step, "tokens/s": shape.rows * shape.seq / step}
