"""What a GPU check does: steps in order of importance, each a list of measurements with results.

`check.py` runs every item in a process of its own and fills in what it found; all of it is
`gpu-check.json`. An item is a function of `measure.py`: tests marked `gpu`, a kernel or a loop, or
`train`, a run of `scripts/train.py` on a shipped recipe that `timing.py` times: the users' code
path, not a second loop. On a CPU the same plan is shrunk to minutes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry.recipe.paths import ROOT

CUDA, DEVICE, FACTS, CORPUS = "cuda", "device", "facts", "corpus"
WAITING, OK, FAILED, NO_TIME, NOT_HERE = "waiting", "ok", "failed", "no time", "not here"
DONE = (OK, FAILED)
GPU_MARK = re.compile(r"mark\.gpu\b")
LAYOUTS = ROOT / "tests" / "distributed" / "test_matrix_on_gpus.py"
ROWS = {"mpt-125m": 32, "mpt-1b": 16, "mpt-3b": 8, "dbrx-mini": 32}  # of 2048 tokens, a step
SMALL = ("mpt-125m", "dbrx-mini")  # the recipes of a CPU's check, with this:
SHRUNK = ["model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=512"]
SHRUNK += ["max_seq_len=64"]
SHRUNK_EXPERTS = ["model.attn_config.kv_n_heads=1", "model.ffn_config.ffn_hidden_size=64"]
PATIENCE = 4  # times a GPU's time limits, on a CPU: other work may use it too
COMPILED, FULL = ("compile=true",), ("data.attend_across_documents=true",)
NOT_AUTO = ("parallel.activation_checkpointing=none",)
CHECKPOINTED = ("parallel.activation_checkpointing=true",)
NEEDS = {"flex": CUDA, "varlen": CUDA, "flash": "flash_attn", "flash3": "flash_attn_interface"}
RUN = ("rows", "row tokens", "microbatch")
REASON = 300  # characters of a reason

Row = dict[str, Any]
"""What an item measured; under `wrong` what is not right, under `not run` why it is not."""


@dataclass
class Item:
    """One process and its result.

    Attributes:
        name: within its step.
        measure: a function of `measure.py`.
        settings: its arguments.
        limit: seconds that it may take.
        needs: `cuda` or packages; without them it is listed as not for this machine.
        device: where it is not the check's own.
        all_gpus: whether it sees every GPU, not the first alone.
        state: one of the words above.
        reason: why it is not `ok`.
        seconds: of wall time.
        rows: what it measured, also where it was ended before its time.
        log: the last lines that it printed, where it failed.
    """

    name: str
    measure: str
    settings: dict[str, Any] = field(default_factory=dict)
    limit: float = 120
    needs: tuple[str, ...] = ()
    device: str = ""
    all_gpus: bool = False
    state: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    log: str = ""


@dataclass
class Step:
    """Items that answer one question, in the order in which they run.

    Attributes:
        share: of the time left, among the steps left.
        hint: what the numbers are.
        columns: of the page's table; empty: all that the rows have.
    """

    name: str
    title: str
    share: float
    items: list[Item]
    hint: str = ""
    columns: tuple[str, ...] = ()


@dataclass
class Results:
    """All of a check.

    Attributes:
        device: `cuda` or `cpu`.
        minutes: the budget.
        started: date and time.
        steps: in order of importance.
        status: running, finished or stopped.
        seconds: so far.
        facts: of device and libraries, as the first item found them.
    """

    device: str
    minutes: float
    started: str
    steps: list[Step]
    status: str = "running"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str) -> Step:
        """The step of a name; an empty one where there is none."""
        return next((step for step in self.steps if step.name == name), Step(name, name, 0, []))

    def items(self) -> Iterator[tuple[Step, Item]]:
        """Every item with its step."""
        yield from ((step, item) for step in self.steps for item in step.items)

    def rows(self, *steps: str) -> Iterator[tuple[Step, Item, Row]]:
        """Every row, of some steps or of all."""
        for step, item in self.items():
            yield from ((step, item, row) for row in item.rows if not steps or step.name in steps)


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


def steps(device: str) -> list[Step]:
    """All steps, for `cuda`, or shrunk for `cpu`."""
    small = device != CUDA
    found = [
        Step(DEVICE, "The device", 1, [*_device(small)],
             "bf16 matrix products for two seconds each; shares of products refer to the best."),
        Step("tests", "Tests that need a GPU", 4, [_tests("marked gpu", gpu_tests(ops=False))],
             "pytest -m gpu."),
        Step("layouts", "Parallel layouts", 2,
             [_tests("processes on one GPU and on several", [LAYOUTS], CUDA, all_gpus=True)],
             "Largest relative differences of a loss and of a gradient norm from a plain loop."),
        Step("kernels", "Kernels against float64", 4, [_tests("of ops", gpu_tests(ops=True))],
             "pytest -m gpu: largest errors against float64, as shares of the largest value."),
        Step("experts", "Experts against a dense layer", 2, [*_experts(small)],
             "Forward and backward in bf16, interleaved with a dense layer of as many FLOPs."),
        Step("mfu", "Training speed", 10, [*_speeds(small)],
             "Steps of shipped recipes by scripts/train.py in amp_bf16: the median after the first"
             " ones. FLOPs: two a multiply-add, backward twice forward, no recomputation.",
             (*RUN, "attention", "step ms", "tokens/s", "TFLOP/s", "of products", "of peak",
              "peak GiB", "first step, s")),
        Step("memory", "Memory against its estimate", 1, [*_memory(small)],
             "Peak of tensors and what the run had estimated in advance, of every timed run.",
             ("microbatch", "estimate GiB", "peak GiB", "reserved GiB", "estimate of peak")),
        Step("activations", "Fewer activations", 4, [*_activations(small)],
             "Each way to keep fewer activations: bytes and milliseconds beside the plan's.",
             ("microbatch", "estimate GiB", "peak GiB", "estimate of peak", "plan ms", "step ms",
              "plan of step")),
        Step("loss", "Chunks of the loss", 1, [*_loss(small)],
             "Output head and cross-entropy with gradients, by tokens whose logits are in memory."),
        Step("losses", "Losses against the CPU's", 2, [*_losses(small)],
             "The same rows and weights on both devices; differences from the CPU's in fp32.",
             ("losses", "fp32 off by", "amp_bf16 off by")),
        Step("bare", "Against a bare loop", 2, [*_bare(small)],
             "mpt-125m's shape without biases on full rows; the loop is the shortest one.",
             ("step ms", "tokens/s", "TFLOP/s", "of bare loop")),
        Step("data", "Waiting for data", 0.1, [],
             "How long the loop waited for rows in each run above.",
             ("data wait, ms", "step ms", "data wait of step")),
        Step("save", "Saving a checkpoint", 1, [*_save(small)],
             "What the steps after a save took more than others.",
             ("checkpoint GiB", "step ms", "blocked s", "waited at the end, s")),
        Step("profile", "Where a step's time goes", 2, [*_profiles(small)],
             "One step by torch.profiler: its largest kernels, and kinds of kernels.",
             ("kernel", "kind", "calls", "ms", "share")),
    ]  # fmt: skip
    for item in (item for step in found if small for item in step.items):
        item.limit *= PATIENCE
    return found


def _device(small: bool) -> Iterator[Item]:
    yield Item(FACTS, "facts", all_gpus=True)  # counts them
    yield Item("matrix products", "products", {"small": small}, 90)
    yield Item(CORPUS, "corpus", {"tokens": 1 << 16 if small else 1 << 22})


def gpu_tests(*, ops: bool) -> list[Path]:
    """Files with tests that are marked `gpu`, of `tests/ops` or of the others but for layouts."""
    files = sorted((ROOT / "tests").glob("**/test_*.py"))
    marked = (f for f in files if f != LAYOUTS and GPU_MARK.search(f.read_text(encoding="utf-8")))
    return [file for file in marked if (file.parent.name == "ops") == ops]


def _tests(name: str, files: list[Path], *needs: str, all_gpus: bool = False) -> Item:
    settings = {"files": [str(file) for file in files]}
    return Item(name, "tests", settings, 600, ("pytest", *needs), all_gpus=all_gpus)


def _experts(small: bool) -> Iterator[Item]:
    shapes = {"DBRX": (8192, 6144, 10752), "dbrx-mini": (65536, 512, 896)}  # tokens, d, f
    for name, (tokens, d, f) in shapes.items():
        if small:
            tokens, d, f = 64, max(16, d // 512 * 8), max(16, f // 512 * 8)
        shape = {"tokens": tokens, "d": d, "f": f, "experts": 16, "top_k": 4}
        yield Item(name, "experts", {**shape, "rounds": 2 if small else 5}, 90)


def training(name: str, *words: str, small: bool, rows: int = 0, **timing: Any) -> Item:
    """A run of the recipe that its name begins with, timed after some steps."""
    recipe = name.partition(",")[0]
    first = [f"global_train_batch_size={rows or (4 if small else ROWS[recipe])}"]
    if small:
        first += [*SHRUNK, *(SHRUNK_EXPERTS if recipe.startswith("dbrx") else [])]
    timing = {"warm_up": 1 if small else 4, "steps": 2 if small else 12} | timing
    settings = {"recipe": recipe, "words": [*first, *words], "timing": timing}
    return Item(name, "train", settings, 240)


def _speeds(small: bool) -> Iterator[Item]:
    every, two = ("mpt-125m", "mpt-1b", "dbrx-mini", "mpt-3b"), ("mpt-1b", "mpt-125m")
    ways: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("packed", (), every),
        ("packed, compiled", COMPILED, every),
        ("full rows", FULL, every),
        ("packed, checkpointing", CHECKPOINTED, ("mpt-1b", "mpt-3b")),
        *((f"packed, {impl}", (f"model.attn_config.attn_impl={impl}",), two)
          for impl in (*NEEDS, "sdpa")),
        ("full rows, compiled", (*FULL, *COMPILED), ("mpt-1b",)),
        ("packed, checkpointing, compiled", (*CHECKPOINTED, *COMPILED), ("mpt-3b",)),
        ("packed, logged every 10 steps", ("log_interval=10ba",), ("mpt-125m",)),
    ]  # fmt: skip
    for way, words, models in ways:
        for model in (model for model in models if model in SMALL or not small):
            item = training(f"{model}, {way}", *words, small=small)
            item.needs = tuple(NEEDS[impl] for impl in NEEDS if way.endswith(f", {impl}"))
            yield item


def _memory(small: bool) -> Iterator[Item]:
    """Beside all runs of other steps: the microbatch that `auto` chooses for a full device."""
    for model in () if small else SMALL:
        name = f"{model}, microbatch auto of 512 rows"
        yield training(name, small=small, rows=512, warm_up=1, steps=2)


def _activations(small: bool) -> Iterator[Item]:
    """What a model keeps from the forward pass to the backward pass, all rows of a step at once."""
    whole = "parallel.activation_checkpointing=whole"
    target, compress = "parallel.activation_checkpointing_target", "parallel.activation_compression"
    ways = {
        "nothing": NOT_AUTO,
        "selective": ("parallel.activation_checkpointing=selective",),
        "block": (whole,),
        "attention": (whole, f"{target}=attention"),
        "feed_forward": (whole, f"{target}=feed_forward"),
        "first blocks": (whole, f"{target}={{block: first-6}}"),
        "int8": (*NOT_AUTO, f"{compress}=int8"),
        "fp8": (*NOT_AUTO, f"{compress}=fp8"),
        "selective and int8": ("parallel.activation_checkpointing=selective", f"{compress}=int8"),
        "compiled": (*COMPILED, *NOT_AUTO),
        "compiled, budget 0.5": (*COMPILED, *NOT_AUTO, "parallel.activation_memory_budget=0.5"),
    }
    rows = 4 if small else 8
    for model in ("mpt-125m",) if small else ("mpt-1b", "dbrx-mini"):
        for way, words in ways.items():
            at_once = f"device_train_microbatch_size={rows}"
            yield training(f"{model}, {way}", *words, at_once, small=small, rows=rows, steps=6)


def _loss(small: bool) -> Iterator[Item]:
    shapes = {"mpt-125m": (768, 50368), "mpt-1b": (2048, 50368), "dbrx-mini": (512, 100352)}
    for name, (d, vocabulary) in list(shapes.items())[: 1 if small else None]:
        size = (128, 64, 512) if small else (32768, d, vocabulary)
        yield Item(name, "loss", dict(zip(("tokens", "d", "vocabulary"), size, strict=True)), 60)


def _losses(small: bool) -> Iterator[Item]:
    """The same rows and the same weights, those that a CPU draws, on both devices."""
    same = ["device_train_microbatch_size=4", "schedule.t_warmup=0ba"]
    same += [] if small else ["max_seq_len=256", "model.n_layers=4"]
    for model in SMALL:
        for precision, device in (("fp32", "cpu"), ("fp32", ""), ("amp_bf16", "")):
            name = f"{model}, {precision}, {'CPU' if device else 'device'}"
            words = (*same, f"precision={precision}")
            times = {"warm_up": 1, "steps": 5, "weights_of_cpu": True}
            item = training(name, *words, small=small, rows=4, **times)
            item.device = device
            yield item


def _bare(small: bool) -> Iterator[Item]:
    shape = {"d": 768, "heads": 12, "layers": 12, "vocab": 50368, "seq": 2048, "rows": 16}
    if small:
        shape = {"d": 64, "heads": 2, "layers": 2, "vocab": 512, "seq": 64, "rows": 4}
    same = ["model.no_bias=true", "optimizer=adamw", "optimizer.lr=6e-4", *FULL]
    for compiled in (False,) if small else (False, True):
        way = "compiled" if compiled else "not compiled"
        settings = {**shape, "steps": 4 if small else 16, "compile": compiled}
        yield Item(f"bare loop, {way}", "bare", settings)
        words = [*same, *(COMPILED if compiled else ())]
        run = training(f"mpt-125m, {way}", *words, small=small, rows=shape["rows"])
        run.name = f"ours, {way}"
        yield run


def _save(small: bool) -> Iterator[Item]:
    for way, background in (("in the background", "true"), ("synchronous", "false")):
        words = (f"save_async={background}", "save_interval=5ba")
        yield training(f"mpt-125m, {way}", *words, small=small, saves=True, warm_up=2, steps=9)


def _profiles(small: bool) -> Iterator[Item]:
    for model in ("mpt-125m",) if small else ("mpt-125m", "mpt-1b", "dbrx-mini"):
        yield training(f"{model}, packed", small=small, profile=True)
    if not small:
        yield training("mpt-125m, packed, compiled", *COMPILED, small=small, profile=True)
