"""Measurements of a GPU check, each in a process of its own that `check.py` starts.

    python -m benchmarks.gpu_check.measure NAME FILE DEVICE SETTINGS

SETTINGS are JSON. Every row of a measurement is in FILE as soon as it is known, a JSON object a
line. Imports at the top need torch alone, so that `facts` can report which packages are missing.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_check.plan import CORPUS, CUDA, REASON, Row, append
from llmfoundry.recipe.paths import ROOT

GIB = 2**30
PLUGIN = "benchmarks.gpu_check.timing"  # of a run of `scripts/train.py`
CHUNKS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
MEDIAN, SPREAD = 450.0, 1.0  # tokens of a document, as of web pages: log-normal
OPTIONAL = ["pytest", "triton", "flash_attn", "flash_attn_interface", "megablocks", "grouped_gemm"]
NEEDED = {  # module: wheel, of what `scripts/train.py` imports beside torch
    "hydra": "hydra-core", "omegaconf": "omegaconf", "antlr4": "antlr4-python3-runtime",
    "yaml": "pyyaml", "numpy": "numpy", "psutil": "psutil", "tqdm": "tqdm", "msgspec": "msgspec",
    "tokenizers": "tokenizers", "packaging": "packaging", "fsspec": "fsspec",
    "jinja2": "jinja2", "markupsafe": "markupsafe",
}  # fmt: skip


def facts(device: torch.device) -> Iterator[Row]:
    """The device, the libraries, and the packages that are missing.

    Raises:
        SystemExit: CUDA is chosen and cannot be used; says why.
    """
    if device.type == CUDA and (reason := _no_cuda()):
        raise SystemExit(reason)
    row: Row = {"device": device.type}
    row["lacking"] = [wheel for n, wheel in NEEDED.items() if importlib.util.find_spec(n) is None]
    row["modules"] = [n for n in OPTIONAL if importlib.util.find_spec(n) is not None]
    if row["lacking"]:
        yield row
        return
    from benchmarks.harness import libraries, machine
    from llmfoundry.models.counts import peak_flops

    os.chdir(ROOT)  # whose commit is a fact
    row |= {**machine(), "libraries": libraries()}
    if device.type == CUDA:
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
    burn = 0.1 if small else 2.0
    for n in (256, 512) if small else (2048, 4096, 8192, 16384):
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        seconds = _seconds(partial(torch.matmul, a, b), burn)
        rate = 2 * n**3 / seconds / 1e12
        yield {"product": f"{n} x {n} x {n}", "ms": seconds * 1e3, "TFLOP/s": rate}
    size = 1 << (22 if small else 30)
    seconds = _seconds(torch.ones(size, device=device, dtype=torch.uint8).clone, burn)
    yield {"product": "copy in memory", "ms": seconds * 1e3, "GB/s": 2 * size / seconds / 1e9}


def _seconds(step: Callable[[], Any], burn: float) -> float:
    """Of a call, the median over `burn` seconds after as many in which clocks settle."""
    from torch.utils.benchmark import Timer  # which needs setuptools

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    timer.blocked_autorange(min_run_time=burn)
    return float(timer.blocked_autorange(min_run_time=burn).median)


def corpus(device: torch.device, *, tokens: int, folder: Path = Path(CORPUS)) -> Iterator[Row]:
    """Random token shards for all runs, as `scripts/prepare_data.py` would write them.

    Document borders cost what they cost on text; ids are bytes, whose tokenizer needs no file.
    """
    import numpy as np

    from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
    from llmfoundry.data.token_shards import StreamIndex, TokenWriter
    from llmfoundry.files import write_json
    from llmfoundry.recipe.data import DataConfig, TokenizerConfig

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
    from benchmarks.harness import middle
    from benchmarks.moe import LayerShape, layer_rows

    shape = LayerShape(**sizes)
    flops = 3 * 3 * 2 * shape.tokens * shape.top_k * shape.d * shape.f
    ms = "ms, wall" if device.type == "cpu" else "ms, GPU"
    for row in layer_rows(shape, torch.bfloat16, device.type, rounds):
        yield {**row, "TFLOP/s": flops / middle(row[ms]) / 1e9}


def loss(device: torch.device, *, tokens: int, d: int, vocabulary: int) -> Iterator[Row]:
    """The loss with its gradients, as a step computes it, by tokens whose logits are in memory."""
    from llmfoundry.ops.loss import linear_cross_entropy

    hidden = torch.randn(tokens, d, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocabulary, d, device=device) * d**-0.5)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    flops, best = 3 * 2 * tokens * d * vocabulary, math.inf

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            total = linear_cross_entropy(hidden, weight, labels)
        torch.autograd.grad(total, [hidden, weight])

    for chunk in (*(n for n in CHUNKS if n <= tokens), None):
        row: Row = {"chunk": chunk or "as it is"}
        if device.type == CUDA:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with of_chunks(chunk):
                seconds = _seconds(step, 0.3)
        except torch.OutOfMemoryError:
            yield {**row, "not run": "out of memory"}
            continue
        best = min(best, seconds)
        row |= {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12}
        if device.type == CUDA:
            row["GiB"] = torch.cuda.max_memory_allocated(device) / GIB
        yield row | ({} if chunk else {"of best chunk": seconds / best})


def of_chunks(tokens: int | None) -> AbstractContextManager[object]:
    """The loss has the logits of so many tokens at a time in memory; None: its own choice."""
    from llmfoundry.ops import loss as head

    if tokens is None:
        return nullcontext()
    return mock.patch.object(head, "chunk_tokens", lambda *_, **__: tokens)


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


class TestRows:
    """A plugin of pytest: a row for each test, with what it records, as soon as it ended."""

    __test__ = False

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called after each of setup, call and teardown."""
        if report.when != "call" and report.passed:
            return
        row: Row = {"test": report.nodeid.rpartition("::")[2], "outcome": report.outcome}
        row |= {"s": report.duration, **dict(report.user_properties)}
        if report.skipped:
            row["reason"] = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            row["wrong"] = str(crash.message if crash else report.longrepr)[-REASON:].strip()
        append(self._file, row)


def tests(device: torch.device, *, file: Path, files: list[str]) -> Iterator[Row]:
    """`pytest -m gpu` on some files."""
    import pytest

    words = ["-m", "gpu", "-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider", *files]
    status = pytest.main(words, plugins=[TestRows(file)])
    if status > pytest.ExitCode.TESTS_FAILED:
        yield {"test": "pytest", "wrong": f"ended with status {int(status)}; see the log"}


def train(
    device: torch.device, *, file: Path, recipe: str, words: list[str], timing: dict[str, Any]
) -> Iterator[Row]:
    """A run of `scripts/train.py` on the corpus, beside which it is; `timing.Timing` ends it."""
    sys.argv = [str(ROOT / "scripts" / "train.py"), *run_words(file, recipe, words, timing)]
    runpy.run_path(sys.argv[0], run_name="__main__")
    yield {"wrong": "the run ended before it was timed"}


def run_words(
    file: Path, recipe: str, words: list[str], timing: Mapping[str, Any]
) -> Iterator[str]:
    """The words of the command of such a run, whose folder is beside `file`."""
    yield from (recipe, f"run_name={file.stem}", f"save_folder={file.with_suffix('.run')}")
    yield from ("data=mds", "data.remote=null", f"data.local={file.parent / CORPUS}")
    yield from ("data.split=null", "data.validation=null", "tokenizer=bytes", "logger=none")
    yield from ("eval=off", "save_interval=0ba", "compile=false", f"plugins=[{PLUGIN}]")
    for key, value in {"file": str(file), **timing}.items():
        written = f"'{value}'" if isinstance(value, str) else json.dumps(value)
        yield f"callbacks.plugins.gpu_check.{key}={written}"
    yield from words


def mark(device: torch.device) -> Any:
    """A moment on the device's clock; nothing waits for it."""
    if device.type != CUDA:
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
    if device.type == CUDA:
        torch.cuda.synchronize(device)


def main() -> None:
    """Run a measurement; its rows go to the file as they come."""
    if importlib.util.find_spec("psutil") is not None:
        importlib.import_module("llmfoundry.processes").end_with_starters()
    name, file, device, settings = sys.argv[1:]
    given = json.loads(settings) | ({"file": Path(file)} if name in ("tests", "train") else {})
    for row in globals()[name](torch.device(device), **given):
        append(Path(file), row)
    sys.stdout.flush()
    os._exit(0)  # a broken context of CUDA may hang a process at its end


if __name__ == "__main__":
    main()
