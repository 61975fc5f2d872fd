"""Measurements of a GPU check, each in a process of its own that `check.py` starts.

    python -m benchmarks.gpu_check.measure NAME FILE DEVICE SECONDS [SETTINGS as JSON]

Every row that a measurement yields is in FILE as soon as it is known, a JSON object a line. Imports
at the top need torch alone, so that `facts` can report which packages are missing.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
WARM_UP, BURN = 0.5, 2.0  # seconds: until clocks have settled, and of what is measured
CHUNKS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
MEDIAN, SPREAD = 450.0, 1.0  # tokens of a document, as of web pages: log-normal
OPTIONAL = ["pytest", "triton", "flash_attn", "flash_attn_interface", "megablocks", "grouped_gemm"]
NEEDED = {  # module: wheel, of what `scripts/train.py` imports beside torch
    "hydra": "hydra-core", "omegaconf": "omegaconf", "antlr4": "antlr4-python3-runtime",
    "yaml": "pyyaml", "numpy": "numpy", "psutil": "psutil", "tqdm": "tqdm", "msgspec": "msgspec",
    "tokenizers": "tokenizers", "packaging": "packaging", "fsspec": "fsspec",
}  # fmt: skip

Row = dict[str, Any]


def append(file: Path, row: Row) -> None:
    """Add a row, in one write: it is there when the process is killed."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(_plain(row), default=str) + "\n")


def _plain(value: Any) -> Any:
    """What JSON knows: NaN and the infinities as words, numbers of six digits."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def read(file: Path) -> list[Row]:
    """The rows so far; an unfinished line is left out."""
    rows = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def tried(row: Row, find: Callable[[], Row]) -> Row:
    """A row with what `find` finds, or with what went wrong; the next one may well succeed."""
    try:
        return {**row, **find()}
    except torch.OutOfMemoryError:
        return {**row, "not run": "out of memory"}
    except Exception as error:
        return {**row, "wrong": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def facts(device: torch.device) -> Iterator[Row]:
    """The device, the libraries, and the packages that are missing.

    Raises:
        SystemExit: CUDA is chosen and cannot be used; says why.
    """
    if device.type == "cuda" and (reason := _no_cuda()):
        raise SystemExit(reason)
    row: Row = {"device": device.type}
    row["lacking"] = [wheel for n, wheel in NEEDED.items() if importlib.util.find_spec(n) is None]
    row["modules"] = [n for n in OPTIONAL if importlib.util.find_spec(n) is not None]
    if row["lacking"]:
        yield row
        return
    from benchmarks.harness import libraries, machine
    from llmfoundry.models.counts import peak_flops
    from llmfoundry.recipe.front.paths import ROOT

    os.chdir(ROOT)  # whose commit is a fact
    row |= {**machine(), "libraries": libraries()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        row["free GiB"], row["memory GiB"] = (n / GIB for n in torch.cuda.mem_get_info(device))
        row["gpus"] = torch.cuda.device_count()
        row["capability"] = f"{found.major}.{found.minor}"
        row["multiprocessors"] = found.multi_processor_count
        row["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        row["peak TFLOP/s"] = (peak_flops(device) or 0) / 1e12 or None
    else:
        row["memory GiB"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield row


def _no_cuda() -> str:
    """Why CUDA cannot be used; empty: it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA; write device=cpu"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (nvidia-smi?); write device=cpu"
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        return f"the GPU does not compute: {str(error).splitlines()[0]}"
    return ""


def products(device: torch.device, *, small: bool) -> Iterator[Row]:
    """The rate of bf16 matrix products of several sizes, and of copies in memory."""
    for n in (256, 512) if small else (2048, 4096, 8192, 16384):
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        seconds = _sustained(partial(torch.matmul, a, b), device, 0.1 if small else BURN)
        rate = 2 * n**3 / seconds / 1e12
        yield {"product": f"{n} x {n} x {n}", "ms": seconds * 1e3, "TFLOP/s": rate}
    size = 1 << (22 if small else 30)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    seconds = _sustained(source.clone, device, 0.1 if small else 0.5)
    yield {"product": "copy in memory", "ms": seconds * 1e3, "GB/s": 2 * size / seconds / 1e9}


def _sustained(step: Callable[[], Any], device: torch.device, burn: float) -> float:
    """Seconds of a step, the median over `burn` seconds after the clocks have settled."""
    from benchmarks.moe import timed

    spans: list[float] = []
    started = time.perf_counter()
    while (at := time.perf_counter() - started) < WARM_UP + burn or not spans:
        span = next(iter(timed(step, device).values()))
        if at > WARM_UP or not spans:
            spans.append(span)
    return statistics.median(spans[1:] or spans)


def corpus(device: torch.device, *, tokens: int, folder: Path = Path("corpus")) -> Iterator[Row]:
    """Random token shards for all runs, as `scripts/prepare_data.py` would write them.

    Document borders cost what they cost on text; ids are bytes, whose tokenizer needs no file.
    """
    import numpy as np

    from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
    from llmfoundry.data.preparation.write.token_writer import TokenWriter
    from llmfoundry.data.token_rows import StreamIndex
    from llmfoundry.files import write_json
    from llmfoundry.recipe.data import DataConfig
    from llmfoundry.recipe.tokenizer import TokenizerConfig

    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), DataConfig(), progress=False)
    generator, dtype, left, documents = np.random.default_rng(0), np.dtype("<u2"), tokens, 0
    started = time.perf_counter()
    folder.mkdir()
    with TokenWriter(folder, "part-00000", dtype, 1 << 26, ("sha1",)) as writer:
        while left > 0:
            length = max(1, int(generator.lognormal(np.log(MEDIAN), SPREAD)))
            ids = generator.integers(0, 256, length).tolist()
            writer.add([tokenizer.eos_id, *ids], n_bytes=length, starts_document=True)
            left, documents = left - length - 1, documents + 1
    made = tuple(writer.shards)
    index = StreamIndex(dtype.str, tokenizer.eos_id, tokenizer.fingerprint, made)
    write_json(folder / "index.json", index.to_dict())
    yield {"tokens": tokens, "documents": documents, "s": time.perf_counter() - started}


def experts(device: torch.device, *, rounds: int, **sizes: int) -> Iterator[Row]:
    """Each way to compute the layer in bf16, interleaved with a dense one of the same FLOPs."""
    from benchmarks.moe import DENSE, LayerShape, contenders
    from llmfoundry.plan.fit import available_memory

    shape = LayerShape(**{**sizes, "tokens": _tokens_that_fit(device, **sizes)})
    if not shape.tokens:
        free = available_memory(device) / GIB
        yield {"contender": "all", "not run": f"{free:.0f} GiB are free, too few for its weights"}
        return
    x = torch.randn(shape.tokens, shape.d, device=device).bfloat16().requires_grad_()
    layers = contenders(shape, torch.bfloat16, device.type)
    for name in [name for name in layers if name != DENSE]:
        row: Row = {"contender": name, "tokens": shape.tokens}
        yield tried(row, partial(_against_dense, shape, x, layers, name, rounds))
        gc.collect()


def _against_dense(
    shape: Any, x: torch.Tensor, layers: Mapping[str, Any], name: str, rounds: int
) -> Row:
    """Its time, also over the dense layer's in each round, its rate, and what it saves."""
    from benchmarks.moe import DENSE, saved_bytes, seconds

    found = seconds({DENSE: layers[DENSE], name: layers[name]}, x, rounds)
    mine, dense = ([next(iter(t.values())) for t in found[n]] for n in (name, DENSE))
    flops = 3 * 3 * 2 * shape.tokens * shape.top_k * shape.d * shape.f
    return {
        "ms": 1e3 * statistics.median(mine),
        "dense ms": 1e3 * statistics.median(dense),
        "of dense": statistics.median(a / b for a, b in zip(mine, dense, strict=True)),
        "TFLOP/s": flops / statistics.median(mine) / 1e12,
        "saved a token, d": round(saved_bytes(layers[name][0], x) / shape.tokens / shape.d, 1),
    }


def _tokens_that_fit(
    device: torch.device, *, tokens: int, d: int, f: int, experts: int, top_k: int
) -> int:
    """So many tokens, or half, a quarter, ... of them; 0 where the weights alone do not fit."""
    from llmfoundry.plan.fit import USABLE, available_memory

    stacked = 2 * 3 * experts * d * f
    # weights, their gradients, plain autograd's joined copy of two thirds and its gradient, dense
    fixed = stacked * 10 // 3 + 2 * 2 * 3 * top_k * d * f
    usable = USABLE * available_memory(device)
    while tokens and fixed + 2 * tokens * top_k * (12 * f + 8 * d) > usable:
        tokens = tokens // 2 if tokens > 256 else 0
    return tokens


def loss(device: torch.device, *, tokens: int, d: int, vocabulary: int) -> Iterator[Row]:
    """The loss with its gradients, as a step computes it, by tokens whose logits are in memory."""
    from llmfoundry.ops.loss import linear_cross_entropy

    hidden = torch.randn(tokens, d, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, d, device=device) * d**-0.5)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            total = linear_cross_entropy(hidden, weight, labels)
        torch.autograd.grad(total, [hidden, weight])

    def measured(chunk: int | None) -> Row:
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with of_chunks(chunk):
            seconds = _sustained(step, device, 0.3 if device.type == "cpu" else 1.0)
        row: Row = {
            "ms": 1e3 * seconds,
            "TFLOP/s": 3 * 2 * tokens * d * vocabulary / seconds / 1e12,
        }
        if device.type == "cuda":
            row["GiB"] = (torch.cuda.max_memory_allocated(device) - before) / GIB
        return row

    for chunk in (None, *(n for n in CHUNKS if n <= tokens)):
        yield tried({"chunk": chunk or "as it is"}, partial(measured, chunk))


@contextmanager
def of_chunks(tokens: int | None) -> Iterator[None]:
    """The loss has the logits of so many tokens at a time in memory; None: its own choice."""
    from llmfoundry.ops import loss as head

    original = head.chunk_tokens
    if tokens is not None:
        head.chunk_tokens = lambda *_, **__: tokens
    try:
        yield
    finally:
        head.chunk_tokens = original


def bare(device: torch.device, *, steps: int, compile: bool, **sizes: int) -> Iterator[Row]:
    """Steps of the shortest loop that one would write."""
    from benchmarks.contenders import Sizes, bare_steps

    shape = Sizes(**sizes)
    run = bare_steps(shape, precision="amp_bf16", steps=steps, compiled=compile, device=device.type)
    marks = [mark(device) for _ in run]
    wait_for(device)
    spans = [seconds_between(a, b) for a, b in itertools.pairwise(marks)]
    step = statistics.median(spans[min(3, len(spans) - 1) :])
    yield {"rows": shape.rows, "step ms": 1e3 * step, "tokens/s": shape.rows * shape.seq / step}


def mark(device: torch.device) -> Any:
    """A moment on the device's clock; nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: Any, after: Any) -> float:
    """Between two moments; on a GPU the later one is over."""
    if isinstance(before, float):
        return float(after - before)
    return float(before.elapsed_time(after)) / 1e3


def wait_for(device: torch.device) -> None:
    """Until the device is done with all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Run a measurement; its rows go to the file as they come."""
    if importlib.util.find_spec("psutil") is not None:
        importlib.import_module("llmfoundry.processes").end_with_starters()
    name, file, device, settings = sys.argv[1:]
    for row in globals()[name](torch.device(device), **json.loads(settings)):
        append(Path(file), row)
    sys.stdout.flush()
    os._exit(0)  # a broken context of CUDA may hang a process at its end


if __name__ == "__main__":
    main()
