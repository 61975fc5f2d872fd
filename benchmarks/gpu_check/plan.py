"""What a check does: steps in order of importance, each a list of items, an item a process.

`runner` starts them. An item is either a measurement of `measure`, or a run of `scripts/train.py`
on a shipped recipe with overrides, which `watch` times: the road that users take, not a second
loop. On a CPU the same plan is shrunk until it takes minutes; what needs CUDA is listed as such.
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
CUDA, SEVERAL = "cuda", "several GPUs"
DEVICE, CORPUS = "device", "corpus"  # the step that all others need, and its item for runs
PATIENCE = 4  # times the limits of a GPU's items: a CPU's

SMALL = [  # on a CPU: a layer or two, and rows of 64 tokens
    "model.d_model=64",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.vocab_size=512",
    "max_seq_len=64",
]
SMALL_EXPERTS = ["model.attn_config.kv_n_heads=1", "model.ffn_config.ffn_hidden_size=64"]


@dataclass(frozen=True)
class Item:
    """One process.

    Attributes:
        name: within its step.
        limit: seconds that it may take.
        measure: a name of `items.measure.MEASURES`; of a run "".
        settings: of the measurement.
        recipe: of a run.
        overrides: of a run.
        watch: settings of `watch`.
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
    watch: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    all_gpus: bool = False
    on: str = ""


@dataclass(frozen=True)
class Step:
    """Items that answer one question.

    Attributes:
        name: as `steps=` takes it.
        title: of the page's section.
        share: of the time that is left, beside the shares of the steps that follow.
        items: most important first; none: the numbers come from other steps.
    """

    name: str
    title: str
    share: float
    items: tuple[Item, ...] = ()


def steps(device: str) -> list[Step]:
    """All of them.

    Args:
        device: `cuda`, or `cpu`: shrunk.
    """
    small = device != CUDA
    found = [
        Step(DEVICE, "The device", 1, tuple(_device(small))),
        Step("tests", "Tests that need a GPU", 4, tuple(_tests())),
        Step("layouts", "Layouts of processes", 2, tuple(_layouts())),
        Step("kernels", "Kernels against float64", 4, tuple(_kernels(small))),
        Step("experts", "Experts beside a dense layer", 2, tuple(_experts(small))),
        Step("mfu", "Training speed", 10, tuple(_speeds(small))),
        Step("memory", "Memory beside its estimate", 1, tuple(_memory(small))),
        Step("loss", "Chunks of the loss", 1, tuple(_loss(small))),
        Step("losses", "Losses beside the CPU's", 2, tuple(_losses(small))),
        Step("bare", "Beside a bare loop", 2, tuple(_bare(small))),
        Step("data", "Waiting for data", 0.1),
        Step("save", "Saving a checkpoint", 1, tuple(_save(small))),
        Step("profile", "Where a step's time goes", 2, tuple(_profiles(small))),
    ]
    return [_patient(step) for step in found] if small else found


def _patient(step: Step) -> Step:
    """On a CPU, which others may use too, an item may take longer."""
    return replace(step, items=tuple(replace(i, limit=PATIENCE * i.limit) for i in step.items))


def _device(small: bool) -> Iterator[Item]:
    yield Item("facts", 120, "facts", all_gpus=True)  # counts them
    yield Item("matrix products", 90, "products", {"small": small})
    yield Item(CORPUS, 120, "corpus", {"tokens": 1 << 16 if small else 1 << 22})


def _tests() -> Iterator[Item]:
    for file in gpu_tests():
        if file == LAYOUTS:
            continue
        name = file.relative_to(ROOT / "tests").as_posix()
        yield Item(name, 240, "tests", {"file": str(file)}, needs=("pytest",))


LAYOUTS = ROOT / "tests" / "distributed" / "test_matrix_on_gpus.py"


def _layouts() -> Iterator[Item]:
    """The tests of layouts, by what carries the collectives."""
    only = {"file": str(LAYOUTS), "keyword": "gloo"}
    one, several = "two processes on one GPU, gloo", "a GPU for each process, NCCL"
    yield Item(one, 400, "tests", only, needs=(CUDA, "pytest"))
    only = {"file": str(LAYOUTS), "keyword": "nccl"}
    yield Item(several, 400, "tests", only, needs=(CUDA, SEVERAL, "pytest"), all_gpus=True)


def gpu_tests(folder: Path = ROOT / "tests") -> list[Path]:
    """Files with tests that are marked `gpu`: of kernels first, as it happens by their names."""
    files = sorted(folder.glob("**/test_*.py"))
    found = [file for file in files if GPU_MARK.search(file.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda file: file.parent.name != "ops")


def _kernels(small: bool) -> Iterator[Item]:
    for impl, needs in {
        "sdpa": (),
        "varlen": (CUDA,),
        "flex": (CUDA,),
        "flash": (CUDA, "flash_attn"),
        "flash3": (CUDA, "flash_attn_interface"),
        "torch": (),
    }.items():
        settings = {"impl": impl, "small": small}
        yield Item(f"attention: {impl}", 150, "attention", settings, needs=needs)
    yield Item("experts: grouped_mm", 90, "mixture", {"impl": "grouped_mm", "small": small})
    megablocks = {"impl": "megablocks", "small": small}
    yield Item(
        "experts: megablocks", 90, "mixture", megablocks, needs=(CUDA, "megablocks", "grouped_gemm")
    )
    yield Item("experts: Triton kernels", 120, "triton", needs=(CUDA, "triton"))
    yield Item("loss", 60, "loss_error", {"small": small})


def _experts(small: bool) -> Iterator[Item]:
    shapes = {  # tokens, d, f, experts, choices
        "DBRX": (8192, 6144, 10752, 16, 4),
        "dbrx-mini": (65536, 512, 896, 16, 4),
    }
    for name, (tokens, d, f, experts, top_k) in shapes.items():
        shape = {"tokens": tokens, "d": d, "f": f, "experts": experts, "top_k": top_k}
        if small:
            shape |= {"tokens": 64, "d": max(16, d // 512 * 8), "f": max(16, f // 512 * 8)}
        yield Item(name, 90, "experts", {**shape, "rounds": 2 if small else 5})


def training(
    name: str,
    model: str,
    *overrides: str,
    small: bool,
    limit: float = 120,
    needs: tuple[str, ...] = (),
    on: str = "",
    rows: int = 0,
    **watch: Any,
) -> Item:
    """A run of a shipped recipe on the corpus of this check."""
    rows = rows or (4 if small else ROWS[model])
    timed = {"warm_up": 1, "steps": 2} if small else {"warm_up": WARM_UP, "steps": STEPS}
    timed |= watch
    first = [f"global_train_batch_size={rows}"]
    if small:
        first += [*SMALL, *(SMALL_EXPERTS if model.startswith("dbrx") else [])]
    return Item(
        name,
        limit,
        recipe=model,
        overrides=(*first, *overrides),
        watch={**timed, "model": model, "way": name.partition(", ")[2]},
        needs=needs,
        on=on,
    )


COMPILED = ("compile=true",)
WHOLE = ("data.attend_across_documents=true",)
CHECKPOINTED = ("parallel.activation_checkpointing=true",)


def _speeds(small: bool) -> Iterator[Item]:
    def item(model: str, way: str, *overrides: str, **options: Any) -> Item:
        return training(f"{model}, {way}", model, *overrides, small=small, **options)

    def attention(model: str, impl: str, **options: Any) -> Item:
        chosen = f"model.attn_config.attn_impl={impl}"
        return item(model, f"packed, {impl}", chosen, **options)

    models = ["mpt-125m", "mpt-1b", "dbrx-mini", "mpt-3b"]
    if small:
        yield from (item(model, "packed") for model in ("mpt-125m", "dbrx-mini"))
        yield item("mpt-125m", "whole rows", *WHOLE)
        yield item("mpt-125m", "packed, checkpointing", *CHECKPOINTED)
        yield attention("mpt-125m", "flex", needs=(CUDA,))
        yield item("mpt-125m", "packed, compiled", *COMPILED, limit=240)
        return
    yield from (item(model, "packed", limit=180) for model in models)
    yield from (item(m, "packed, compiled", *COMPILED, limit=240) for m in models)
    yield from (item(model, "whole rows", *WHOLE) for model in models)
    yield item("mpt-1b", "packed, checkpointing", *CHECKPOINTED)
    yield item("mpt-3b", "packed, checkpointing", *CHECKPOINTED)
    for model in ("mpt-1b", "mpt-125m"):
        yield attention(model, "varlen")
        yield attention(model, "flex", limit=150)
        yield attention(model, "flash", needs=("flash_attn",))
        yield attention(model, "flash3", needs=("flash_attn_interface",))
        yield attention(model, "sdpa")
    yield item("mpt-1b", "whole rows, compiled", *WHOLE, *COMPILED, limit=180)
    yield item("mpt-3b", "packed, checkpointing, compiled", *CHECKPOINTED, *COMPILED, limit=180)
    yield item("mpt-125m", "packed, logged every 10 steps", "log_interval=10ba")


def _memory(small: bool) -> Iterator[Item]:
    """Besides all runs of other steps: the microbatch that `auto` chooses for a full device."""
    for model in () if small else ("mpt-125m", "dbrx-mini"):
        name = f"{model}, microbatch auto of 512 rows"
        yield training(name, model, small=small, rows=512, warm_up=1, steps=2)


def _loss(small: bool) -> Iterator[Item]:
    shapes = {"mpt-125m": (768, 50368), "mpt-1b": (2048, 50368), "dbrx-mini": (512, 100352)}
    for name, (d, vocabulary) in list(shapes.items())[: 1 if small else None]:
        size = (128, 64, 512) if small else (32768, d, vocabulary)
        settings = dict(zip(("tokens", "d", "vocabulary"), size, strict=True))
        yield Item(name, 60, "loss", settings)


def _losses(small: bool) -> Iterator[Item]:
    """The same rows and the same weights, a function of the seed, on both devices."""
    short = ["max_seq_len=256", "device_train_microbatch_size=4", "schedule.t_warmup=0ba"]
    for model in ("mpt-125m", "dbrx-mini"):
        cut = ["model.n_layers=4"] if not small else []
        for precision, on in (("fp32", "cpu"), ("fp32", ""), ("amp_bf16", "")):
            yield training(
                f"{model}, {precision}, {'CPU' if on else 'device'}",
                model,
                *(short if not small else short[1:]),
                *cut,
                f"precision={precision}",
                small=small,
                rows=4,
                on=on,
                warm_up=1,
                steps=5,
                limit=150,
            )


def _bare(small: bool) -> Iterator[Item]:
    shape = {"d": 768, "heads": 12, "layers": 12, "vocab": 50368, "seq": 2048, "rows": 16}
    if small:
        shape = {"d": 64, "heads": 2, "layers": 2, "vocab": 512, "seq": 64, "rows": 4}
    same = [
        "model.no_bias=true",
        "optimizer=adamw",
        "optimizer.lr=6e-4",
        *WHOLE,
    ]
    for compiled in (False,) if small else (False, True):
        way = "compiled" if compiled else "not compiled"
        settings = {**shape, "steps": 4 if small else WARM_UP + STEPS, "compile": compiled}
        yield Item(f"bare loop, {way}", 120, "bare", settings)
        ours = [*same, *(COMPILED if compiled else ())]
        yield training(f"ours, {way}", "mpt-125m", *ours, small=small, rows=shape["rows"])


def _save(small: bool) -> Iterator[Item]:
    for name, background in (("in the background", "true"), ("waited for", "false")):
        yield training(
            f"mpt-125m, {name}",
            "mpt-125m",
            f"save_async={background}",
            "save_interval=5ba",
            small=small,
            saves=True,
            warm_up=2,
            steps=9,
        )


def _profiles(small: bool) -> Iterator[Item]:
    for model in ("mpt-125m",) if small else ("mpt-125m", "mpt-1b", "dbrx-mini"):
        yield training(f"{model}, packed", model, small=small, profile=True)
    if not small:
        yield training(
            "mpt-125m, packed, compiled", "mpt-125m", *COMPILED, small=small, profile=True
        )
