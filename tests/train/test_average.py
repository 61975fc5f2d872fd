"""`ema.decay` in whole runs: the average by hand, resumed, evaluated, exported, trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llmfoundry as lf
from llmfoundry.api.conversion import convert
from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.cli.commands.evaluate import evaluate
from llmfoundry.cli.commands.train import train
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import is_added
from llmfoundry.plan.memory import estimate
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, write_recipe
from tests.train.here import dtypes, rows, tensors, train_here

DECAY, STEPS = 0.3, 6
LENGTH = (f"max_duration={STEPS}ba", "schedule.t_warmup=1ba")
BRIEF = (*LENGTH, "eval_interval=2ba", "save_interval=1ba")
AVERAGED = (*BRIEF, f"ema.decay={DECAY}", "eval.weights=ema")
BITS = "metrics/eval/bits_per_byte"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/plain, and runs/ema that keeps and evaluates an average."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("average")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("plain", *BRIEF)
        train_here("ema", *AVERAGED)
        yield folder


def saved(run: str | Path, step: int, file: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, by kind and name."""
    return tensors(Path("runs") / run / f"checkpoints/ba{step:07d}", file / "tensors.pt")


def by_hand(run: str, first: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """The average over the checkpoints of all steps, in double precision."""
    average = {name: weight.double() for name, weight in first.items()}
    for step in range(1, STEPS + 1):
        keep = min(DECAY, (1 + step) / (10 + step))
        for name, weight in saved(run, step, file)["model"].items():
            average[name] = keep * average[name] + (1 - keep) * weight.double()
    return average


def initial(*words: str) -> dict[str, torch.Tensor]:
    return lf.build(lf.recipe("tiny.yaml", [*AVERAGED, *words])).module.state_dict()


def scores(run: str, **settings: Any) -> dict[str, Any]:
    """What scripts/eval.py writes."""
    words = [f"{key}={value}" for key, value in settings.items()]
    evaluate(checked(EvalRecipe, None, [f"checkpoint=runs/{run}", "output=scores", *words]))
    return json.loads(Path("scores/results.json").read_text())


def test_training_is_the_same_and_the_average_is_that_of_all_steps(
    place: Path, tmp_path: Path
) -> None:
    plain, averaged = saved("plain", STEPS, tmp_path), saved("ema", STEPS, tmp_path)
    for name, weight in plain["model"].items():
        assert torch.equal(weight, averaged["model"][name])
    expected = by_hand("ema", initial(), tmp_path)
    assert averaged["ema"].keys() == expected.keys()
    for name, average in averaged["ema"].items():
        torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-7)
        assert not torch.equal(average, averaged["model"][name])


def test_weights_in_bf16_have_an_average_in_fp32(place: Path, tmp_path: Path) -> None:
    words = ("precision=bf16", "eval.validation=true")
    run = train_here("bf16", *AVERAGED, *words)
    expected = by_hand("bf16", initial(*words), tmp_path)
    for name, average in saved("bf16", STEPS, tmp_path)["ema"].items():
        torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-7)
    kinds = dtypes(run / f"checkpoints/ba{STEPS:07d}")
    assert kinds["ema.wte.weight"] == "torch.float32"
    assert kinds["model.wte.weight"] == "torch.bfloat16"
    assert rows(run, BITS)[STEPS][BITS] == scores("bf16")["metrics"][BITS]


def test_a_killed_run_resumes_to_the_same_bits(place: Path, tmp_path: Path) -> None:
    shutil.copytree("runs/ema", "runs/killed")
    for step in range(4, STEPS + 1):
        shutil.rmtree(f"runs/killed/checkpoints/ba{step:07d}")
    train_here("killed", *AVERAGED)
    whole, resumed = saved("ema", STEPS, tmp_path), saved("killed", STEPS, tmp_path)
    for kind in ("model", "ema"):
        for name, value in whole[kind].items():
            assert torch.equal(value, resumed[kind][name]), (kind, name)
    assert rows(Path("runs/ema"), BITS)[STEPS][BITS] == rows(Path("runs/killed"), BITS)[STEPS][BITS]


def test_an_average_can_begin_in_a_run_that_had_none(place: Path, tmp_path: Path) -> None:
    shutil.copytree("runs/plain", "runs/later")
    for step in range(4, STEPS + 1):
        shutil.rmtree(f"runs/later/checkpoints/ba{step:07d}")
    train_here("later", *AVERAGED)
    average = saved("later", 3, tmp_path)["model"]
    expected = {name: weight.double() for name, weight in average.items()}
    for step in range(4, STEPS + 1):
        for name, weight in saved("later", step, tmp_path)["model"].items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight.double()
    for name, value in saved("later", STEPS, tmp_path)["ema"].items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=1e-7)


def test_the_average_is_evaluated_and_the_training_goes_on_as_without(place: Path) -> None:
    plain, averaged = rows(Path("runs/plain"), BITS), rows(Path("runs/ema"), BITS)
    assert [averaged[step][BITS] != plain[step][BITS] for step in (2, 4, STEPS)] == [True] * 3
    loss = "loss/train/total"
    with_average, without = rows(Path("runs/ema"), loss), rows(Path("runs/plain"), loss)
    assert [row[loss] for row in with_average.values()] == [row[loss] for row in without.values()]
    # without a choice as the run measures itself, else what is chosen
    assert scores("ema")["metrics"][BITS] == averaged[STEPS][BITS]
    assert scores("ema", **{"eval.weights": "ema"})["metrics"][BITS] == averaged[STEPS][BITS]
    chosen = scores("ema", **{"eval.weights": "trained"})
    assert chosen["metrics"][BITS] == plain[STEPS][BITS]


def test_scores_of_other_weights_have_a_folder_of_their_own(place: Path) -> None:
    for weights in ("ema", "trained"):
        words = ["checkpoint=runs/ema", f"eval.weights={weights}"]
        evaluate(checked(EvalRecipe, None, words))
    found = {folder.name for folder in Path("runs/ema/eval").iterdir()}
    assert found == {f"ba{STEPS:07d}", f"ba{STEPS:07d}-trained"}


def test_an_export_has_the_chosen_weights(place: Path, tmp_path: Path) -> None:
    both = saved("ema", STEPS, tmp_path)
    for choice, kind in (("", "ema"), ("weights=ema", "ema"), ("weights=trained", "model")):
        output = tmp_path / (choice or "default")
        words = ["checkpoint=runs/ema", "to=hf", f"output={output}", "architecture=llmfoundry"]
        convert(checked(ConvertRecipe, None, [*words, *filter(None, [choice])]))
        written = load_file(output / "model.safetensors")
        [embedding] = [value for name, value in written.items() if name.endswith("wte.weight")]
        assert torch.equal(embedding, both[kind]["wte.weight"])


def test_a_program_loads_either(place: Path, tmp_path: Path) -> None:
    both = saved("ema", STEPS, tmp_path)
    for weights, kind in ((None, "ema"), ("ema", "ema"), ("trained", "model")):
        model = lf.load("runs/ema", weights=weights)
        assert torch.equal(model.module.state_dict()["wte.weight"], both[kind]["wte.weight"])
    assert torch.equal(lf.load("runs/plain").module.wte.weight, both["model"]["wte.weight"])
    with pytest.raises(UserError, match=r"is loaded with its trained weights; write lf\.load"):
        lf.evaluate(lf.load("runs/ema", weights="trained"), weights="ema")


def test_a_run_begins_with_an_average(place: Path, tmp_path: Path) -> None:
    words = ("load_path=runs/ema", "load_weights_only=true", "eval_first=true")
    brief = ("max_duration=1ba", "save_interval=0ba")
    run = train_here("begun", *words, *brief, "load_weights=ema")
    assert rows(run, BITS)[0][BITS] == rows(Path("runs/ema"), BITS)[STEPS][BITS]
    run = train_here("begun-trained", *words, *brief)
    assert rows(run, BITS)[0][BITS] == rows(Path("runs/plain"), BITS)[STEPS][BITS]


def test_an_adapter_has_an_average_of_what_it_trains(place: Path, tmp_path: Path) -> None:
    adapter = {"name": "lora", "r": 4, "init_lora_weights": "pissa"}
    finetune_recipe(place, model={"pretrained": "runs/plain"}, adapter=adapter)
    words = ["run_name=adapted", *AVERAGED]
    train(checked(FinetuneRecipe, "finetune.yaml", words).resolve())
    found = saved("adapted", STEPS, tmp_path)
    trained = {name for name in found["model"] if is_added(name) and "initial" not in name}
    assert found["ema"].keys() and found["ema"].keys() <= trained
    model = load_checkpoint("runs/adapted", ALONE, note=print).root.model.state_dict()
    for name, average in found["ema"].items():
        assert torch.equal(model[name], average)
    assert (
        rows(Path("runs/adapted"), BITS)[STEPS][BITS]
        == scores("adapted", **{"eval.weights": "ema"})["metrics"][BITS]
    )


def test_an_average_that_is_not_there_is_refused_in_one_line(place: Path) -> None:
    with pytest.raises(UserError, match=r"weights: ema, but .*ba0000006 holds no averaged weights"):
        lf.load("runs/plain", weights="ema")
    with pytest.raises(UserError, match=r"eval.weights: ema, but no average is kept; write ema"):
        checked(TrainRecipe, "tiny.yaml", ["eval.weights=ema"])
    words = ["run_name=none", "load_path=runs/plain", "load_weights_only=true", "load_weights=ema"]
    with pytest.raises(UserError, match=r"load_weights: ema, but .* holds no averaged weights"):
        train(checked(TrainRecipe, "tiny.yaml", words).resolve())


def test_the_memory_estimate_counts_four_bytes_per_weight() -> None:
    recipe = lf.recipe("quickstart").resolve()
    recipe.model.fill(vocab_size=2048)
    without = estimate(recipe, 1)
    recipe.ema.decay = 0.999
    assert estimate(recipe, 1).total(1) - without.total(1) == 4 * without.parameters
