"""What a plan and `auto` propose, a recipe accepts; both choose the same."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from benchmarks.layouts import spread
from benchmarks.published import llm_foundry
from llmfoundry.builders.trainer import check_layout, sketch
from llmfoundry.cli.dry_run import plan_training
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.plan import search
from llmfoundry.plan.count import Bytes
from llmfoundry.plan.fit import choose_fit
from llmfoundry.plan.layouts import CUDA, Cluster, own_layout, rank, refusals
from llmfoundry.plan.memory import MemoryEstimate, PeakPoint, estimate
from llmfoundry.plan.microbatch_sizes import (
    available_memory,
    memory_of_gpu,
    memory_of_process,
    rooms,
)
from llmfoundry.plan.search import Search, choices, memory_limits
from llmfoundry.plan.seconds import StepSeconds, speeds
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import COMPILE_MODES, PRECISIONS, TrainRecipe
from tests.selection import slow_but

MODELS = {  # with the GPUs of their plans
    "mpt-125m": "8xh100", "gpt2-124m": "8xh100", "mpt-1b": "8xh100", "llama-1b": "8xh100",
    "dbrx-1b": "8xh100", "starcoder2-3b": "8xh100", "mpt-7b": "8xh100", "mpt-7b-32k": "16xh100",
    "llama-8b": "64xh100", "dbrx-9b": "64xh100", "mpt-30b": "64xh100", "dbrx": "512xh100",
}  # fmt: skip
COMPILED = [
    ["compile=auto"],
    ["compile=false"],
    *(["compile=true", f"compile_mode={mode}", "parallel=ddp"] for mode in COMPILE_MODES),
]
FAST = ["mpt-125m"]
SMALL = ["parallel=fsdp", "max_seq_len=1024", "global_train_batch_size=128"]


def slow(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


def setting_of(recipe: Any, hardware: Hardware) -> Cluster:
    return Cluster(hardware.gpus, speeds(hardware.gpu, recipe), memory_of_gpu(hardware))


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory as a die says, so that every layout can be among the best."""

    def step_seconds(recipe: Any, world: int, rows: int, *_: Any, **__: Any) -> StepSeconds:
        die = random.Random(repr((recipe.parallel, recipe.compile_mode, rows)))
        return StepSeconds(die.uniform(1, 2), 0, 0, 0, 0, 0, 0)

    def any_estimate(recipe: Any, *_: Any, **__: Any) -> MemoryEstimate:
        row_bytes = random.Random(repr(recipe.parallel)).uniform(0, 2**32)
        return MemoryEstimate(1, 0, 0, 0, (PeakPoint(0, Bytes(0, row_bytes)),), 1, 0, 1)

    for module in ("search", "layouts"):
        monkeypatch.setattr(f"llmfoundry.plan.{module}.step_seconds", step_seconds)
    monkeypatch.setattr(search, "estimate", any_estimate)
    monkeypatch.setattr("llmfoundry.plan.layouts.weight_bytes", lambda *_: 0)


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("name", slow_but(["dbrx-1b"], MODELS))
def test_a_recipe_accepts_all_that_a_plan_may_propose(name: str) -> None:
    """The first five of each precision and compile mode, a sixth of the pairs for each model."""
    hardware, path = Hardware.parse("16xh100", "hardware"), YAMLS / f"{name}.yaml"
    pairs = [*itertools.product(PRECISIONS, COMPILED)]
    for precision, compiled in pairs[[*MODELS].index(name) % 6 :: 6]:
        words = [f"precision={precision}", *compiled]
        recipe, written = spread(name, words), checked(TrainRecipe, path, words)
        best = rank(recipe, setting_of(recipe, hardware), 5).best
        assert best
        for layout in best:
            again = checked(TrainRecipe, path, [*words, *layout.overrides(written)])
            check_layout(again.resolve(), World(0, hardware.gpus, 0, CUDA))
            assert precision != "amp_fp8" or again.parallel.tensor_parallel_degree == 1


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
def test_a_dry_run_accepts_what_a_plan_proposes(name: str) -> None:
    """The first five by estimated times and memory, as `train.py --dry-run=HARDWARE` reads them."""
    hardware = Hardware.parse(MODELS[name], "hardware")
    for precision in PRECISIONS if name not in FAST else PRECISIONS[1::2]:
        words = [f"precision={precision}"]
        recipe = spread(name, words)
        written = checked(TrainRecipe, YAMLS / f"{name}.yaml", words)
        for layout in rank(recipe, setting_of(recipe, hardware), 5).best:
            again = checked(
                TrainRecipe, YAMLS / f"{name}.yaml", [*words, *layout.overrides(written)]
            )
            rows = dict(plan_training(again.resolve(), hardware))
            assert f"microbatch {layout.microbatch}" in rows["device"]


ADAPTERS = ["adapter=none", "adapter=lora", "adapter=lora model.quantize=nf4"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", slow_but(ADAPTERS[1:2], ADAPTERS))
@pytest.mark.parametrize("name", slow_but(["mpt-125m"], MODELS))
def test_a_recipe_accepts_all_that_auto_may_choose_in_fine_tuning(name: str, adapter: str) -> None:
    """The first five for each adapter, compiled and not."""
    for processes, compiled in ((8, "true"), (8, "false")):
        words = ["model.pretrained=runs/any", *adapter.split(), f"compile={compiled}",
                 f"parallel.data_parallel_shard_degree={processes}", "max_seq_len=1024",
                 "parallel.activation_checkpointing=auto", "precision=amp_bf16",
                 "parallel.activation_compression=auto"]  # fmt: skip
        recipe = checked(FinetuneRecipe, YAMLS / "finetune" / "llama-8b-sft.yaml", words).resolve()
        recipe.model = spread(name, []).model
        setting = Search(recipe, processes, CUDA, sketch(recipe))
        limit = memory_limits(80 * 2**30, CUDA)[-1]
        for fit in setting.fits(choices(recipe, CUDA), limit)[:5]:
            chosen = fit.choice.apply(recipe)
            assert refusals(chosen, recipe.user_recipe) == []
            check_layout(chosen, World(0, processes, 0, CUDA))


RECIPES = ["mpt-125m", "gpt2-124m", "mpt-1b", "llama-1b", "dbrx-1b"]


@pytest.mark.parametrize("hardware", ["8xh100", slow("8xa100-40gb"), slow("8xl40s")])
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_and_a_plan_choose_the_same(
    name: str, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run reads the free memory of its GPU; a plan knows its data sheet."""
    gpus = Hardware.parse(hardware, "hardware")
    recipe = spread(name, [*SMALL, "compile=true"])
    free = int(gpus.gpu.memory_gib * 2**30) - 2**29  # what is left beside a CUDA context
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    fit = choose_fit(
        recipe,
        world_size=8,
        available=available_memory(CUDA),
        device=CUDA,
        reached=speeds(gpus.gpu, recipe),
    )
    own = own_layout(recipe, setting_of(recipe, gpus))
    assert (own.choice, own.microbatch) == (fit.choice, fit.microbatch)
    assert own.step.total == fit.seconds


@pytest.mark.parametrize("name", slow_but(["mpt-125m"], RECIPES))
def test_a_plan_chooses_for_the_degrees_of_a_run_what_the_run_chooses(name: str) -> None:
    hardware = Hardware.parse("2xh100", "hardware")
    recipe = spread(name, [*SMALL, "compile=true"])
    setting = setting_of(recipe, hardware)
    own = own_layout(recipe, setting)
    same = [
        layout
        for layout in rank(recipe, setting, 1000).best
        if layout.is_compiled
        and layout.recipe.parallel.written_degrees == own.recipe.parallel.written_degrees
        and layout.recipe.parallel.reshard_after_forward
        == own.recipe.parallel.reshard_after_forward
    ]
    assert same and (same[0].choice, same[0].microbatch) == (own.choice, own.microbatch)
    assert same[0].step.total == pytest.approx(own.step.total)


@pytest.mark.parametrize("name", ["quickstart", "mpt-125m", "gpt2-124m", "dbrx-tiny", "dbrx-mini"])
def test_a_run_and_its_dry_run_choose_the_same_on_a_cpu(name: str) -> None:
    recipe = spread(name, ["parallel.activation_checkpointing=auto"])
    cpu = torch.device("cpu")
    fit = choose_fit(recipe, world_size=1, available=memory_of_process(ALONE), device=cpu)
    user_recipe = checked(
        TrainRecipe, YAMLS / f"{name}.yaml", ["parallel.activation_checkpointing=auto"]
    )
    rows = [text for _, text in plan_training(user_recipe.resolve())]
    assert any(f"microbatch {fit.microbatch}" in text for text in rows)
    assert any(f"auto is {fit.choice.name}," in text for text in rows)


NEAR = ("mpt-3b 2048 none", "mpt-30b 8192 whole")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_published_runs_fit_or_lie_within_three_percent(every: bool) -> None:
    """LLM Foundry ran all of these: the rows that are nearest to the memory, or all 209."""
    models = () if every else [name.split()[0] for name in NEAR]
    rows = [row for row in llm_foundry(models) if every or row.name in NEAR]
    assert len(rows) >= (209 if every else 8)
    excess = []
    for row in rows:
        size = row.recipe.device_train_microbatch_size
        assert isinstance(size, int)
        need = estimate(row.recipe, row.hardware.gpus, device=CUDA).total(size)
        excess.append(need / rooms(memory_of_gpu(row.hardware), CUDA)[-1])
    assert max(excess) <= 1.03 and sum(share > 1 for share in excess) <= 1
