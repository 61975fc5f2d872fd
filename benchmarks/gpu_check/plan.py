"""What a GPU check does: steps in order of importance, each a list of items, an item a process.

`check.py` runs them. An item is a measurement of `measure.py`, a file of tests marked `gpu`, or a
run of `scripts/train.py` on a shipped recipe that `timing.py` times: the users' code path, not a
second loop. On a CPU the same plan is shrunk to minutes; what needs CUDA is listed as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmfoundry.recipe.front.paths import ROOT

ROWS = {"mpt-125m": 32, "mpt-1b": 16, "mpt-3b": 8, "dbrx-mini": 32}  # of 2048 tokens, a step
WARM_UP, STEPS = 4, 12  # of a run: not counted, counted
GPU_MARK = re.compile(r"mark\.gpu\b")
LAYOUTS = ROOT / "tests" / "distributed" / "test_matrix_on_gpus.py"
CUDA, SEVERAL = "cuda", "several GPUs"
DEVICE, FACTS, CORPUS = "device", "facts", "corpus"  # the step and items that others need
PATIENCE = 4  # times a GPU's time limits, on a CPU: other work may use it too
COMPILED, FULL = ("compile=true",), ("data.attend_across_documents=true",)
CHECKPOINTED = ("parallel.activation_checkpointing=true",)
SMALL = ["model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.vocab_size=512"]
SMALL += ["max_seq_len=64"]  # on a CPU
SMALL_EXPERTS = ["model.attn_config.kv_n_heads=1", "model.ffn_config.ffn_hidden_size=64"]


@dataclass(frozen=True)
class Item:
    """One process.

    Attributes:
        name: within its step.
        limit: seconds that it may take.
        measure: a function of `measure.py`, or "tests"; of a run "".
        settings: of the measurement.
        recipe: of a run.
        overrides: of a run.
        timing: settings of `timing.Timing`.
        needs: `cuda`, packages, or `SEVERAL`; without them it is listed as not for this machine.
        all_gpus: whether it sees every GPU, not the first alone.
        on: the device, where it is not the check's own.
    """

    name: str
    limit: float
    measure: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    overrides: Sequence[str] = ()
    timing: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    all_gpus: bool = False
    on: str = ""


@dataclass(frozen=True)
class Step:
    """Items that answer one question; `share`: of the time left, among the steps left."""

    name: str
    title: str
    share: float
    items: tuple[Item, ...] = ()


def steps(device: str) -> list[Step]:
    """All steps, for `cuda`, or shrunk for `cpu`."""
    small = device != CUDA
    found = [
        Step(DEVICE, "The device", 1, tuple(_device(small))),
        Step("tests", "Tests that need a GPU", 4, tuple(_tests(ops=False))),
        Step("layouts", "Parallel layouts", 2, tuple(_layouts())),
        Step("kernels", "Kernels against float64", 4, tuple(_tests(ops=True))),
        Step("experts", "Experts against a dense layer", 2, tuple(_experts(small))),
        Step("mfu", "Training speed", 10, tuple(_speeds(small))),
        Step("memory", "Memory against its estimate", 1, tuple(_memory(small))),
        Step("loss", "Chunks of the loss", 1, tuple(_loss(small))),
        Step("losses", "Losses against the CPU's", 2, tuple(_losses(small))),
        Step("bare", "Against a bare loop", 2, tuple(_bare(small))),
        Step("data", "Waiting for data", 0.1),
        Step("save", "Saving a checkpoint", 1, tuple(_save(small))),
        Step("profile", "Where a step's time goes", 2, tuple(_profiles(small))),
    ]
    if not small:
        return found
    return [replace(s, items=tuple(replace(i, limit=PATIENCE * i.limit) for i in s.items))
            for s in found]  # fmt: skip


def _device(small: bool) -> Iterator[Item]:
    yield Item(FACTS, 120, "facts", all_gpus=True)  # counts them
    yield Item("matrix products", 90, "products", {"small": small})
    yield Item(CORPUS, 120, "corpus", {"tokens": 1 << 16 if small else 1 << 22})


def gpu_tests(folder: Path = ROOT / "tests") -> list[Path]:
    """Files with tests that are marked `gpu`, but for those of layouts."""
    files = sorted(folder.glob("**/test_*.py"))
    return [f for f in files if f != LAYOUTS and GPU_MARK.search(f.read_text(encoding="utf-8"))]


def _tests(*, ops: bool) -> Iterator[Item]:
    for file in gpu_tests():
        if (file.parent.name == "ops") == ops:
            name = file.relative_to(ROOT / "tests").as_posix()
            limit = 600 if ops else 240
            yield Item(name, limit, "tests", {"file": str(file)}, needs=("pytest",))


def _layouts() -> Iterator[Item]:
    """The tests of layouts, by what carries the collectives."""
    only = {"file": str(LAYOUTS), "keyword": "gloo"}
    yield Item("two processes on one GPU, gloo", 400, "tests", only, needs=(CUDA, "pytest"))
    only = {"file": str(LAYOUTS), "keyword": "nccl"}
    needs, name = (CUDA, SEVERAL, "pytest"), "a GPU for each process, NCCL"
    yield Item(name, 400, "tests", only, needs=needs, all_gpus=True)


def _experts(small: bool) -> Iterator[Item]:
    shapes = {"DBRX": (8192, 6144, 10752), "dbrx-mini": (65536, 512, 896)}  # tokens, d, f
    for name, (tokens, d, f) in shapes.items():
        if small:
            tokens, d, f = 64, max(16, d // 512 * 8), max(16, f // 512 * 8)
        shape = {"tokens": tokens, "d": d, "f": f, "experts": 16, "top_k": 4}
        yield Item(name, 90, "experts", {**shape, "rounds": 2 if small else 5})


def training(
    name: str,
    *overrides: str,
    small: bool,
    limit: float = 120,
    needs: tuple[str, ...] = (),
    on: str = "",
    rows: int = 0,
    **timing: Any,
) -> Item:
    """A run of the recipe that `name` begins with, on the corpus of this check."""
    model, _, way = name.partition(", ")
    rows = rows or (4 if small else ROWS[model])
    timed: dict[str, Any] = (
        {"warm_up": 1, "steps": 2} if small else {"warm_up": WARM_UP, "steps": STEPS}
    )
    first = [f"global_train_batch_size={rows}"]
    if small:
        first += [*SMALL, *(SMALL_EXPERTS if model.startswith("dbrx") else [])]
    timed |= {**timing, "model": model, "way": way}
    return Item(name, limit, recipe=model, overrides=(*first, *overrides), timing=timed,
                needs=needs, on=on)  # fmt: skip


def _speeds(small: bool) -> Iterator[Item]:
    def item(model: str, way: str, *overrides: str, **options: Any) -> Item:
        return training(f"{model}, {way}", *overrides, small=small, **options)

    def attention(model: str, impl: str, **options: Any) -> Item:
        chosen = f"model.attn_config.attn_impl={impl}"
        return item(model, f"packed, {impl}", chosen, **options)

    if small:
        yield from (item(model, "packed") for model in ("mpt-125m", "dbrx-mini"))
        yield item("mpt-125m", "full rows", *FULL)
        yield item("mpt-125m", "packed, checkpointing", *CHECKPOINTED)
        yield attention("mpt-125m", "flex", needs=(CUDA,))
        yield item("mpt-125m", "packed, compiled", *COMPILED, limit=240)
        return
    models = ["mpt-125m", "mpt-1b", "dbrx-mini", "mpt-3b"]
    yield from (item(model, "packed", limit=180) for model in models)
    yield from (item(m, "packed, compiled", *COMPILED, limit=240) for m in models)
    yield from (item(model, "full rows", *FULL) for model in models)
    yield from (item(m, "packed, checkpointing", *CHECKPOINTED) for m in ("mpt-1b", "mpt-3b"))
    for model in ("mpt-1b", "mpt-125m"):
        yield attention(model, "varlen")
        yield attention(model, "flex", limit=150)
        yield attention(model, "flash", needs=("flash_attn",))
        yield attention(model, "flash3", needs=("flash_attn_interface",))
        yield attention(model, "sdpa")
    yield item("mpt-1b", "full rows, compiled", *FULL, *COMPILED, limit=180)
    yield item("mpt-3b", "packed, checkpointing, compiled", *CHECKPOINTED, *COMPILED, limit=180)
    yield item("mpt-125m", "packed, logged every 10 steps", "log_interval=10ba")


def _memory(small: bool) -> Iterator[Item]:
    """Beside all runs of other steps: the microbatch that `auto` chooses for a full device."""
    for model in () if small else ("mpt-125m", "dbrx-mini"):
        name = f"{model}, microbatch auto of 512 rows"
        yield training(name, small=small, rows=512, warm_up=1, steps=2)


def _loss(small: bool) -> Iterator[Item]:
    shapes = {"mpt-125m": (768, 50368), "mpt-1b": (2048, 50368), "dbrx-mini": (512, 100352)}
    for name, (d, vocabulary) in list(shapes.items())[: 1 if small else None]:
        size = (128, 64, 512) if small else (32768, d, vocabulary)
        settings = dict(zip(("tokens", "d", "vocabulary"), size, strict=True))
        yield Item(name, 60, "loss", settings)


def _losses(small: bool) -> Iterator[Item]:
    """The same rows and the same weights, a function of the seed, on both devices."""
    same = ["device_train_microbatch_size=4", "schedule.t_warmup=0ba"]
    same += [] if small else ["max_seq_len=256", "model.n_layers=4"]
    for model in ("mpt-125m", "dbrx-mini"):
        for precision, on in (("fp32", "cpu"), ("fp32", ""), ("amp_bf16", "")):
            name = f"{model}, {precision}, {'CPU' if on else 'device'}"
            yield training(name, *same, f"precision={precision}", small=small, rows=4, on=on,
                           warm_up=1, steps=5, limit=150)  # fmt: skip


def _bare(small: bool) -> Iterator[Item]:
    shape = {"d": 768, "heads": 12, "layers": 12, "vocab": 50368, "seq": 2048, "rows": 16}
    if small:
        shape = {"d": 64, "heads": 2, "layers": 2, "vocab": 512, "seq": 64, "rows": 4}
    same = ["model.no_bias=true", "optimizer=adamw", "optimizer.lr=6e-4", *FULL]
    for compiled in (False,) if small else (False, True):
        way = "compiled" if compiled else "not compiled"
        settings = {**shape, "steps": 4 if small else WARM_UP + STEPS, "compile": compiled}
        yield Item(f"bare loop, {way}", 120, "bare", settings)
        ours = [*same, *(COMPILED if compiled else ())]
        run = training(f"mpt-125m, {way}", *ours, small=small, rows=shape["rows"])
        yield replace(run, name=f"ours, {way}")


def _save(small: bool) -> Iterator[Item]:
    for way, background in (("in the background", "true"), ("synchronous", "false")):
        words = (f"save_async={background}", "save_interval=5ba")
        yield training(f"mpt-125m, {way}", *words, small=small, saves=True, warm_up=2, steps=9)


def _profiles(small: bool) -> Iterator[Item]:
    for model in ("mpt-125m",) if small else ("mpt-125m", "mpt-1b", "dbrx-mini"):
        yield training(f"{model}, packed", small=small, profile=True)
    if not small:
        yield training("mpt-125m, packed, compiled", *COMPILED, small=small, profile=True)
