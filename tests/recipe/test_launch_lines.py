"""Every recipe's launch lines fit the GPUs that its head names, by the estimate of every run.

Each day tries a fifth of the recipes, or `pytest -m "slow or not slow"` all.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from llmfoundry.builders.trainer import sketch
from llmfoundry.plan import fit
from llmfoundry.plan.fit import choose_fit, with_guessed_vocabulary
from llmfoundry.plan.microbatch_sizes import memory_of_gpu
from llmfoundry.plan.search import Fit
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import load
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.paths import ROOT, YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.day import part_of_the_day

RECIPES = sorted([*YAMLS.glob("*.yaml"), *YAMLS.glob("finetune/*.yaml")])
HARDWARE = re.compile(r"\b(From )?(One|\d+) GPUs? of (\d+) GB")
LAPTOP = 8 * 2**30
SHAPES = {  # of models on the hub: a recipe of ours that has theirs
    "runs/quickstart": "quickstart",
    "runs/quickstart-sft": "quickstart",
    "mosaicml/mpt-7b": "mpt-7b",
    "databricks/dbrx-instruct": "dbrx",
    "meta-llama/Llama-3.1-8B": "llama-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-8b",
    "Qwen/Qwen3-8B": "llama-8b",
    "openai/gpt-oss-20b": "dbrx-mini",  # with another model
}
SLOW = (
    "dbrx-18b",
    "dbrx-35b",
    "dbrx-73b",
    "dbrx-lora",
    "llama-8b-128k",
    "qwen3-lora",
    "gpt-oss-lora",
    "llama-8b-qlora",
    "deepseek-v2-lite",
)
"""Recipes whose counts take seconds, and are like others'."""
QWEN3 = {"n_layers": 36, "vocab_size": 151_936}  # and its feed-forward layer's width is 12,288


class Launch(NamedTuple):
    """One line of a recipe's head: the words behind the recipe's path, on so many processes."""

    path: Path
    words: tuple[str, ...]
    processes: int
    memory: int | None  # free bytes of a GPU; None: a CPU

    def __str__(self) -> str:
        return f"{self.path.stem}-{self.processes}"


def launches(path: Path) -> list[Launch]:
    """The launch lines in the head of a recipe."""
    head = path.read_text().split("defaults:")[0].replace("\n# ", " ")
    named = HARDWARE.search(head)
    memory = None
    if named is not None:
        memory = memory_of_gpu(Hardware.parse(f"1x{named[3]}gb", "hardware"))
    count = 1 if named is None or named[2] == "One" else int(named[2])
    found = []
    for line in path.read_text().split("defaults:")[0].splitlines():
        if not line.startswith("#   "):
            continue
        words = shlex.split(line.removeprefix("#   "))
        at = words.index(str(path.relative_to(ROOT)))
        numbers = [int(word) for word in words[:at] if word.isdigit()]
        if words[0] == "python":
            assert named is None or not named[1], f"{path}: a cluster's recipe begins with srun"
            processes = count
        else:
            assert words[0] in ("srun", "torchrun"), line
            processes = numbers[0] * (numbers[1] if len(numbers) > 1 else 1)
        found.append(Launch(path, tuple(words[at + 1 :]), processes, memory))
    assert found, f"{path}: no launch line"
    return found


def fitted(launch: Launch) -> Fit:
    """What the run would choose; raises UserError where it does not fit or divide."""
    memory = LAPTOP if launch.memory is None else launch.memory
    device = torch.device("cpu" if launch.memory is None else "cuda")
    if launch.path.parent.name != "finetune":
        recipe = with_guessed_vocabulary(load(TrainRecipe, launch.path, launch.words).resolve())
        return choose_fit(recipe, world_size=launch.processes, available=memory, device=device)
    written = load(FinetuneRecipe, launch.path, launch.words)
    tuned = written.resolve()
    tuned.model = shape(written)  # type: ignore[assignment]
    return choose_fit(
        tuned,
        world_size=launch.processes,
        available=memory,
        device=device,
        meta_model=sketch(tuned),
    )


def shape(written: FinetuneRecipe) -> ModelConfig:
    """The shape of the model that a recipe fine-tunes."""
    pretrained = str(written.model.pretrained)
    if pretrained.startswith("runs/my"):
        pretrained = "meta-llama/Llama-3.1-8B-Instruct"
    words = ("model=gpt-oss-20b",) if pretrained.startswith("openai") else ()
    ours = with_guessed_vocabulary(
        load(TrainRecipe, YAMLS / f"{SHAPES[pretrained]}.yaml", words).resolve()
    ).model
    if pretrained.startswith("Qwen"):
        ffn = dataclasses.replace(ours.ffn_config, ffn_hidden_size=12_288)
        ours = dataclasses.replace(ours, ffn_config=ffn, **QWEN3)
    return ours


TODAY = part_of_the_day([path for path in RECIPES if path.stem not in SLOW], 5)


@pytest.mark.parametrize(
    "path",
    [path if path in TODAY else pytest.param(path, marks=pytest.mark.slow) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_a_launch_line_fits_what_the_head_names(path: Path) -> None:
    for launch in launches(path):
        assert fitted(launch).microbatch >= 1, str(launch)


def test_what_would_not_fit_or_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards alone of DBRX on too few, and ranks that rows do not divide among."""
    monkeypatch.setattr(fit, "largest_fitting_recipe", lambda *_: None)  # reads all recipes
    words, memory = ("parallel=fsdp", "parallel.expert_parallel_degree=1"), 80 * 10**9
    for name, processes in {"dbrx": 32, "mpt-125m": 512, "mpt-7b-64k": 64}.items():
        launch = Launch(YAMLS / f"{name}.yaml", words, processes, memory)
        with pytest.raises(Exception, match=r"^(model: .* needs about|global_train_batch_size: )"):
            fitted(launch)
