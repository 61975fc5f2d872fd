"""Choice of `compile: auto`: compiled blocks must save more time than their compilation takes.

Entry point: `choose_compile`, which `builders/compilation.py` calls when a run begins, and
`cli/dry_run.py`. Blocks are compiled on CUDA only. The gain per step is the difference of the two
estimated step times. If the GPU is unknown, and in fine-tuning, it is the smallest measured gain.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from llmfoundry.loggers.console import duration
from llmfoundry.models.counts import flops_per_token
from llmfoundry.plan.seconds import speeds, step_seconds
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.hardware import Gpu
from llmfoundry.recipe.model import HFModelConfig, ResolvedModelConfig
from llmfoundry.recipe.train import AUTO, ResolvedTrainRecipe

FIRST_STEP = 60.0
"""Seconds in which one kind of block is compiled, forward and backward pass."""
STARTS = 2
"""Number of starts of a run that its steps must pay for, because every restart compiles again."""
GAIN = 0.07
"""Smallest measured reduction of a step's time: mpt-1b on an H200 (52 to 56 % MFU); mpt-125m and
dbrx-mini gain 9 and 18 %."""
REACHED = 4e14
"""FLOP/s of an unknown GPU. Most reach less, so that their steps take longer and save more."""


class CompileChoice(NamedTuple):
    """Whether blocks are compiled, and why."""

    is_on: bool
    reason: str

    def line(self) -> str:
        """Return a log line."""
        return f"compile: auto is {'on' if self.is_on else 'off'}, {self.reason}"


def choose_compile(
    recipe: ResolvedTrainRecipe,
    *,
    device: torch.device,
    world_size: int,
    steps: int,
    microbatch: int,
    gpu: Gpu | None,
) -> CompileChoice:
    """Choose whether a run compiles its blocks.

    The result is a pure function of values that are equal on all ranks, so all ranks agree.

    Args:
        recipe: resolved recipe; activation checkpointing and compression are decided.
        device: device of the run.
        world_size: number of ranks.
        steps: remaining steps of the run.
        microbatch: sequences of a rank's microbatch.
        gpu: data sheet of the GPU; None: unknown.
    """
    # what is not compiled
    if device.type != "cuda":
        return CompileChoice(False, "as it is for GPUs")
    if isinstance(recipe.model, HFModelConfig):
        return CompileChoice(False, "as the model is a transformers class")
    compiled = with_compile(recipe)
    for problem in compiled.compile_problems():
        return CompileChoice(False, f"as compile: true is not possible: {problem}")

    # does it pay
    if gpu is None or isinstance(recipe, ResolvedFinetuneRecipe):
        flops = flops_per_token(recipe.model, recipe.max_seq_len) / world_size
        tokens = recipe.global_train_batch_size * recipe.max_seq_len
        gain = GAIN * tokens * flops / REACHED
    else:
        reached = speeds(gpu, recipe)
        plain, faster = (
            step_seconds(way, world_size, microbatch, reached).total for way in (recipe, compiled)
        )
        gain = plain - faster
    return pays(steps, gain, _kinds_of_blocks(recipe.model))


def _kinds_of_blocks(model: ResolvedModelConfig) -> int:
    """Return the number of kinds of blocks that are compiled separately."""
    dense = model.ffn_config.first_k_dense_replace or 0
    layers = enumerate(model.layers())
    return len({(layer.window, layer.rotary, number < dense) for number, layer in layers})


def pays(steps: int, gain: float, kinds: int) -> CompileChoice:
    """Return whether `steps` that each save `gain` seconds repay compiling `kinds` of blocks."""
    saved, cost = max(0.0, steps * gain), STARTS * FIRST_STEP * kinds
    facts = (
        f"{steps:,} steps would save about {duration(saved)}, and compiling takes"
        f" {duration(cost / STARTS)} at each start"
    )
    return CompileChoice(saved > cost, f"as {facts}")


def with_compile(recipe: ResolvedTrainRecipe) -> ResolvedTrainRecipe:
    """Return a copy of a recipe with compiled blocks."""
    return dataclasses.replace(recipe, compile=True, compile_mode="default")


def planned_steps(recipe: ResolvedTrainRecipe) -> int | None:
    """Return the number of steps of a run; None: its length is in epochs of unread data."""
    length, size = Duration.parse(recipe.max_duration), recipe.global_train_batch_size
    if length.unit == "ep":
        return None
    return Clock(size, size * recipe.max_seq_len, 1.0, length).total


def may_compile(recipe: ResolvedTrainRecipe, device: torch.device) -> bool:
    """Return whether blocks are compiled, or may be if `compile: auto` is not decided yet."""
    return recipe.compile is True or (recipe.compile == AUTO and device.type == "cuda")
