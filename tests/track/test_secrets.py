"""Secrets of a recipe are in nothing that a run writes or prints, wherever they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.load import load
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, require, to_yaml

CANARY = "kanarie"
# Every place of a recipe that can hold a secret, and what it is written with there.
PLACES = {
    "data.storage_options.s3.secret": "{}",
    "data.storage_options.s3.client_kwargs.aws_session_token": "{}",
    "data.storage_options.s3.endpoint_url": "https://me:{}@localhost:1",
    "data.storage_options.https.headers.Authorization": "{}",
    "data.validation.remote": "https://localhost:1/x?X-Amz-Signature={}&v=1",
    "data.streams.web.remote": "https://{}@localhost:1/shards",
    "data.paths": "https://localhost:1/a.jsonl?sv=1&sig={}",
    "logger.tracking_uri": "postgresql+psycopg://me:{}@localhost:1/mlflow",
    "load_path": "https://localhost:1/run?access_token={}",
    "tokenizer.path": "https://me:{}@localhost:1/tokenizer",
    "eval.gauntlet": "https://localhost:1/g.yaml?api_key={}",
}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = [value] if last == "paths" else value
    return tree


def write(path: Path, written: str) -> Path:
    values = {key: form.format(written) for key, form in PLACES.items()}
    path.write_text(yaml.safe_dump(nested(values), width=1000))
    return path


@pytest.mark.parametrize("how", ["literal", "variable"])
def test_no_field_of_a_recipe_gives_its_secret_away(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN", CANARY)
    recipe = load(
        TrainRecipe, write(tmp_path / "r.yaml", CANARY if how == "literal" else "${oc.env:HIDDEN}")
    )
    assert recipe.logger.tracking_uri == f"postgresql+psycopg://me:{CANARY}@localhost:1/mlflow"
    saved = to_yaml(recipe)
    assert CANARY not in saved and saved.count(
        "***" if how == "literal" else "${oc.env:HIDDEN}"
    ) == len(PLACES)
    assert CANARY not in to_yaml(recipe, resolve=True)
    (tmp_path / "recipe.yaml").write_text(saved)
    if how == "variable":
        assert load(TrainRecipe, tmp_path / "recipe.yaml") == recipe
        return
    again = load(TrainRecipe, tmp_path / "recipe.yaml")
    assert "***" not in str(again)  # used as a password
    with pytest.raises(UserError) as caught:
        require(again)
    named = {line.split(": ")[1] for line in caught.value.problems}
    assert named == {key if key != "data.paths" else "data.paths[0]" for key in PLACES}
    assert all("write ${oc.env:NAME} there" in line for line in caught.value.problems)
    assert as_written(again) == as_written(recipe)  # and can be compared
