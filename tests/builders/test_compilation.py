"""`compile: auto`: on where it pays, off where it cannot be, and kept by a resumed run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.builders import compilation, trainer
from llmfoundry.builders.compilation import settle_compile
from llmfoundry.builders.resume import StartPoint
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.plan.compile_choice import FIRST_STEP, GAIN, REACHED, choose_compile, may_compile
from llmfoundry.plan.search import Fit
from llmfoundry.plan.seconds import speeds, step_seconds
from llmfoundry.recipe.hardware import GPUS
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from tests.tiny import write_recipe
from tests.train.here import train_here

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NONE = ("parallel.activation_checkpointing=none", "parallel.activation_compression=none")


def recipe_of(name: str, *overrides: str) -> ResolvedTrainRecipe:
    recipe = checked(TrainRecipe, f"yamls/{name}.yaml", [*NONE, *overrides]).resolve()
    recipe.model.fill(vocab_size=50_304)
    return recipe


def choose(recipe: ResolvedTrainRecipe, **settings: Any) -> tuple[bool, str]:
    defaults = {"device": GPU, "world_size": 8, "steps": 10_000, "microbatch": 4, "gpu": None}
    return choose_compile(recipe, **(defaults | settings))


@pytest.mark.parametrize("gpu", [None, "H100"])
def test_a_run_compiles_once_its_steps_save_twice_the_time_of_compiling(gpu: str | None) -> None:
    recipe = recipe_of("mpt-125m")
    sheet = None if gpu is None else GPUS[gpu]
    if sheet is None:
        # 6 FLOPs a token and parameter, and 12 a token, key and channel (Chowdhery et al., 2022)
        matrices = 12 * (4 * 768**2 + 8 * 768**2) + 768 * 50_304
        flops = 6 * matrices + 12 * 12 * 768 * 2048
        gain = GAIN * 256 * 2048 * flops / (8 * REACHED)
    else:
        plain, compiled = (
            step_seconds(dataclasses.replace(recipe, compile=on), 8, 4, speeds(sheet, recipe)).total
            for on in (False, True)
        )
        gain = plain - compiled
    enough = 2 * FIRST_STEP / gain
    assert choose(recipe, steps=int(enough * 1.05), gpu=sheet)[0]
    assert not choose(recipe, steps=int(enough * 0.95), gpu=sheet)[0]


def test_every_kind_of_block_is_compiled_at_each_start() -> None:
    once = choose(recipe_of("dbrx-mini"))[1]
    dense = ("model.ffn_config.first_k_dense_replace=2", "model.ffn_config.dense_hidden_size=512")
    twice = choose(recipe_of("dbrx-mini", *dense))[1]
    assert "compiling takes 1m00s at each" in once and "takes 2m00s at each" in twice


def test_what_compile_true_refuses_is_off_with_the_reason() -> None:
    shared = recipe_of(
        "dbrx-mini",
        "parallel=fsdp",
        "parallel.expert_parallel_degree=8",
        "parallel.activation_checkpointing=selective",
    )
    is_on, reason = choose(shared)
    assert not is_on and "selective is not compiled where FSDP cuts" in reason
    recomputed = recipe_of(
        "dbrx-mini",
        "parallel.activation_checkpointing=whole",
        "parallel.activation_compression=int8",
    )
    assert "would choose other experts the second time" in choose(recomputed)[1]
    assert not choose(recipe_of("mpt-125m"), device=CPU)[0]


def settle(recipe: ResolvedTrainRecipe, device: torch.device, start: StartPoint) -> list[str]:
    """Lines that the choice reports."""
    lines: list[str] = []
    world = World(0, 1, 0, device)
    settle_compile(recipe, world, start, steps=10**6, microbatch=4, note=lines.append)
    return lines


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked for its name or a kernel."""
    monkeypatch.setattr(compilation, "gpu_here", lambda device: None)
    monkeypatch.setattr(compilation, "check_compiler", lambda mode, device: None)


def test_the_choice_is_reported_on_gpus_and_set_in_the_recipe(no_gpu: None) -> None:
    recipe = recipe_of("mpt-125m")
    assert may_compile(recipe, GPU) and not may_compile(recipe, CPU)
    (line,) = settle(recipe, GPU, StartPoint())
    assert line.startswith("compile: auto is on, as 1,000,000 steps would save about ")
    assert recipe.compile is True and recipe.compile_mode == "default"
    assert recipe.user_recipe.compile == "auto"
    on_cpu = recipe_of("mpt-125m")
    assert settle(on_cpu, CPU, StartPoint()) == []
    assert on_cpu.compile is False and on_cpu.compile_mode is None


def test_a_compiler_that_does_not_work_turns_it_off(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mode: str, device: torch.device) -> None:
        raise UserError("compile: torch.compile cannot build kernels here")

    monkeypatch.setattr(compilation, "check_compiler", refuse)
    recipe = recipe_of("mpt-125m")
    (line,) = settle(recipe, GPU, StartPoint())
    assert line == "compile: auto is off, as compile: torch.compile cannot build kernels here"
    assert recipe.compile is False


@pytest.mark.parametrize(("state", "is_on"), [({"compile": True}, True), ({}, False)])
def test_a_resumed_run_keeps_the_choice(
    state: dict[str, bool], is_on: bool, no_gpu: None, tmp_path: Path
) -> None:
    """Checkpoints without one are of runs that were not compiled."""
    folder = tmp_path / "checkpoints/ba0000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"batch": 1, "identity": {}, **state}))
    checkpoint = Checkpoint(Storage(tmp_path), folder)
    recipe = recipe_of("mpt-125m")
    (line,) = settle(recipe, GPU, StartPoint(checkpoint))
    assert line == f"compile: auto is {'on' if is_on else 'off'}, as the run began"
    assert recipe.compile is is_on
    fresh = recipe_of("mpt-125m")
    settle(fresh, GPU, StartPoint(checkpoint, weights_only=True))
    assert fresh.compile is True


def test_a_checkpoint_has_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = train_here("cpu", "max_duration=1ba", "schedule.t_warmup=0ba", "eval=off")
    (state,) = folder.glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["compile"] is False


def test_the_choice_is_made_before_a_limit_of_an_earlier_start_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a run that is compiled would forget the microbatch with which it ran out of memory."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    compiles: list[bool | str] = []

    def settle(recipe: ResolvedTrainRecipe, fit: Fit, *arguments: Any, **settings: Any) -> Fit:
        compiles.append(recipe.compile)
        return fit

    monkeypatch.setattr(trainer, "settle_microbatch", settle)
    train_here("order", "max_duration=1ba", "schedule.t_warmup=0ba", "eval=off")
    assert compiles == [False]
