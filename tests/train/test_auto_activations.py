"""`auto` of checkpointing and compression: by the plan's seconds; kept by a run that resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.plan.fit import checkpointing_line, choose_fit, with_guessed_vocabulary
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import FRAMEWORK, USABLE
from llmfoundry.plan.search import ActivationChoice, cost
from llmfoundry.plan.seconds import speeds, step_seconds
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.hardware import GPUS
from llmfoundry.recipe.load import load
from llmfoundry.recipe.parallel import RECOMPUTED
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import losses, write_recipe
from tests.train.here import train_here

CUDA, H100, GIB = torch.device("cuda"), GPUS["H100"], 2**30


def make_recipe(name: str) -> TrainRecipe:
    recipe = load(TrainRecipe, YAMLS / f"{name}.yaml")
    recipe = recipe.resolve()
    recipe.parallel.activation_checkpointing = "auto"
    return with_guessed_vocabulary(recipe)


@pytest.mark.parametrize("room", [40, 79])
def test_auto_is_what_makes_the_shortest_step_of_all_that_fits(room: int) -> None:
    """Found again by trying each level and each number of blocks with every microbatch."""
    recipe, found = make_recipe("mpt-7b"), {}
    rows = recipe.global_train_batch_size // 8
    limit = int(USABLE * (room * GIB + FRAMEWORK))
    blocks = [ActivationChoice("whole", blocks=n) for n in range(1, recipe.model.n_layers)]
    for choice in [*map(ActivationChoice, RECOMPUTED), *blocks]:
        one = choice.apply(recipe)
        need = estimate(one, 8, device=CUDA)
        for n in divisors(rows):
            if need.total(n) <= limit:
                step = step_seconds(one, 8, n, speeds(H100, one))
                found[choice, n] = cost(step, need.total(n), limit), step.total
    best = min(found, key=lambda way: found[way])
    given: dict[str, Any] = {"world_size": 8, "available": room * GIB, "device": CUDA}
    given["reached"] = speeds(H100, recipe)
    fit = choose_fit(recipe, **given)
    assert (fit.choice, fit.microbatch) == best and fit.seconds == found[best][1]
    none = ActivationChoice("none")
    others = [
        (choice, n)
        for choice, n in found
        if choice.family != fit.choice.family and not (choice.blocks and (none, n) in found)
    ]
    second = min(others, key=lambda way: found[way])
    assert fit.second is not None and (fit.second.choice, fit.second.microbatch) == second
    for begun in (ActivationChoice("whole"), ActivationChoice("whole", blocks=30)):
        assert choose_fit(recipe, **given, begun_with=begun).choice == begun
    assert choose_fit(recipe, **given) == fit


def test_the_line_says_what_was_chosen_and_what_the_next_would_cost() -> None:
    recipe = make_recipe("mpt-7b")
    recipe.parallel.activation_compression = "auto"
    given: dict[str, Any] = {"world_size": 8, "device": CUDA, "reached": speeds(H100, recipe)}
    tight = choose_fit(recipe, available=26 * GIB, **given)
    line, second = checkpointing_line(recipe, tight), tight.second
    assert f"auto is {tight.choice.name}, " in line and " s a step by the plan, where " in line
    assert second is not None and f"where {second.choice.name} (a microbatch of" in line
    assert "and int8" in tight.choice.name + second.choice.name
    again = choose_fit(recipe, available=79 * GIB, **given, begun_with=second.choice)
    assert again.choice == second.choice
    assert "as the run began" in checkpointing_line(recipe, again, second.choice)


OPTIONS = (
    "max_duration=4ba", "schedule.t_warmup=1ba", "schedule.t_max=4ba", "eval=off",
    "model.d_model=128", "model.n_heads=4",
)  # fmt: skip
AUTO = ("parallel.activation_checkpointing=auto", "parallel.activation_compression=auto")


def test_a_compressed_run_resumes_bit_for_bit_and_auto_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    small = "parallel.activation_compression=int8"
    exact, whole = (train_here(name, *OPTIONS, *how) for name, how in (("a", ()), ("b", (small,))))
    train_here("c", *OPTIONS, small, "max_duration=2ba")
    capsys.readouterr()
    resumed = train_here("c", *OPTIONS, *AUTO)
    assert "auto is none and int8, as the run began" in capsys.readouterr().out
    assert losses(resumed) == losses(whole)
    assert losses(whole)[1] == losses(exact)[1] and losses(whole)[4] != losses(exact)[4]
    state = json.loads((resumed / "checkpoints" / "ba0000004" / "state.json").read_text())
    assert state["activation_compression"] == "int8"
