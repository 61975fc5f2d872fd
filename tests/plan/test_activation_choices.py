"""Activations of DBRX at full size: what each choice saves by the estimate, and at which cost."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from llmfoundry.plan.count import count
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.memory import GIB, estimate
from llmfoundry.plan.seconds import speeds, step_seconds
from llmfoundry.recipe.hardware import GPUS
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe

GPUS_OF_RUN, ROWS = 512, 2
GPU = torch.device("cuda")


@cache
def memory_and_seconds(level: str, compression: str, target: str = "") -> tuple[float, float]:
    """GiB of a rank, and the seconds of a step on H100."""
    words = [
        f"parallel.activation_checkpointing={level}",
        f"parallel.activation_compression={compression}",
    ]
    if target:
        words.append(f"parallel.activation_checkpointing_target={{block: {target}}}")
    recipe = with_guessed_vocabulary(checked(TrainRecipe, "yamls/dbrx.yaml", words).resolve())
    need = estimate(recipe, GPUS_OF_RUN, device=GPU)
    step = step_seconds(recipe, GPUS_OF_RUN, ROWS, speeds(GPUS["H100"], recipe))
    return need.total(ROWS) / GIB, step.total


def test_selective_needs_less_than_none_with_and_without_compression() -> None:
    for compression in ("none", "int8"):
        kept = memory_and_seconds("none", compression)[0]
        assert memory_and_seconds("selective", compression)[0] < 0.95 * kept


def test_selective_keeps_the_inputs_of_experts_and_not_their_outputs() -> None:
    """Bytes of a sequence of 4,096 tokens in each of 40 blocks, by the shapes of the model."""
    words = ["parallel.activation_checkpointing=selective", "parallel.activation_compression=none"]
    recipe = with_guessed_vocabulary(checked(TrainRecipe, "yamls/dbrx.yaml", words).resolve())
    d, f, k = 6144, 10752, 4
    stream, qkv, attention = 4 * d, 2 * (d + 2 * 8 * 128), 2 * d + 4 * 48
    experts = 2 * k * (d + 2 * f)  # inputs, gates and up-projections
    expected = 4096 * (stream + qkv + attention + 2 * d + experts)
    (block,) = count(recipe, recipe.parallel.degrees(GPUS_OF_RUN), device=GPU).blocks
    assert block.kept.row == pytest.approx(expected, rel=0.01)


def test_dbrx_needs_two_and_a_half_times_less_memory_for_a_fifth_of_the_time() -> None:
    """Half of the blocks recomputed, and the activations of the others in int8."""
    plain, compressed = memory_and_seconds("none", "none"), memory_and_seconds("none", "int8")
    ranges = memory_and_seconds("whole", "int8", "first-20")
    assert plain[0] > 1.65 * compressed[0] and compressed[1] < 1.04 * plain[1]
    assert plain[0] > 2.5 * ranges[0] and ranges[1] < 1.21 * plain[1]
