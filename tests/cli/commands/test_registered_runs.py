"""Runs, exports and evaluations under names of a registry, as users start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmfoundry.builders.registry import Tag, versions
from llmfoundry.errors import UserError
from llmfoundry.loggers.mlflow_logger import open_client
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import finetune_recipe, run, write_recipe

REGISTERED = ("logger.mlflow=true", "logger.tracking_uri=sqlite:///runs/mlflow.db")


def test_the_best_checkpoint_outlives_pruning_and_its_name_is_taken_everywhere(
    tmp_path: Path,
) -> None:
    """`best` is the worst here (mode=max), so that it is an early one, which would be pruned."""
    recipe = write_recipe(tmp_path)
    words = ["run_name=a", *REGISTERED, "eval_interval=4ba", "save_num_checkpoints_to_keep=1"]
    run("train.py", recipe, *words, "registry.name=tiny", "registry.best.mode=max", cwd=tmp_path)
    left = sorted(path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir())
    assert left == ["ba0000004", "ba0000012"]
    client = open_client(f"sqlite:///{tmp_path}/runs/mlflow.db")
    names = {v.tags[Tag.STEP]: str(v.version) for v in versions(client, "tiny")}
    assert str(client.get_registered_model("tiny").aliases["best"]) == names["4"]

    done = run("eval.py", "models:/tiny@best", cwd=tmp_path)
    assert "models:/tiny/1 has the scores, the best" in done.stdout
    results = json.loads((tmp_path / "runs/a/eval/ba0000004/results.json").read_text())
    assert results["time/batch"] == 4
    to = ["to=hf", "output=out", "registry.name=tiny-hf"]
    done = run("convert.py", "models:/tiny@best", *to, cwd=tmp_path)
    assert "out is version 1 of tiny-hf" in done.stdout
    plain = run("generate.py", "runs/a/checkpoints/ba0000004", "temperature=0", cwd=tmp_path)
    named = run("generate.py", "models:/tiny@best", "temperature=0", cwd=tmp_path)
    exported = run("generate.py", "models:/tiny-hf/latest", "temperature=0", cwd=tmp_path)
    assert named.stdout == plain.stdout == exported.stdout
    begun = ["run_name=b", "load_path=models:/tiny/latest", "max_duration=13ba"]
    done = run("train.py", recipe, *begun, cwd=tmp_path)
    assert "load_path: models:/tiny/latest is models:/tiny/" in done.stdout
    tuned = finetune_recipe(tmp_path, model={"pretrained": "models:/tiny@best"})
    run("finetune.py", tuned, "run_name=c", "max_duration=1ba", cwd=tmp_path)
    assert (
        f"pretrained: {tmp_path}/runs/a/checkpoints/ba0000004"
        in (tmp_path / "runs" / "c" / "recipe.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["registry.name=a/b"], "registry.name: 'a/b' can be no model's name"),
        (["registry.best.metric=x"], "registry.best.metric: has no effect without registry.name"),
        (["registry.name=a", "logger.mlflow=false"], "registry.name: versions are kept where"),
        (["registry.name=a", "registry.best.mode=up"], "registry.best.mode: "),
    ],
)
def test_keys_without_effect_and_names_that_cannot_be_are_refused(
    words: list[str], line: str
) -> None:
    with pytest.raises(UserError) as error:
        checked(TrainRecipe, Path("yamls/quickstart.yaml"), words)
    assert any(problem.startswith(line) for problem in error.value.problems)


def test_exports_alone_are_registered() -> None:
    given = ["checkpoint=x", "output=y", "registry.name=a"]
    with pytest.raises(UserError, match=r"registry.name: is of an export; write to=hf"):
        checked(ConvertRecipe, None, [*given, "from=hf"])
    with pytest.raises(UserError, match=r"registry.upload: has no effect without registry.name"):
        checked(ConvertRecipe, None, ["checkpoint=x", "output=y", "to=hf", "registry.upload=true"])
    with pytest.raises(UserError, match=r"registry.name: .* can be no model's name"):
        checked(ConvertRecipe, None, [*given[:2], "to=hf", "registry.name='a:b'"])
