"""Secrets of a recipe are in nothing that a run writes or prints, wherever they were written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked, load
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import as_written, require, to_yaml
from llmfoundry.redaction import public, public_override, public_values
from tests.tiny import write_recipe
from tests.warm_scripts import run_script

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://me:pa@ss@host/x?a=1", "at http://me:***@host/x?a=1"),
        ("postgresql://me:pa/ss@host/db", "postgresql://me:***@host/db"),
        ("https://token@host/x", "https://***@host/x"),
        ("url: /api?x=1&api_key=k (Caused", "url: /api?x=1&api_key=*** (Caused"),
        ("[https://h/a?sig=k, https://h/b]", "[https://h/a?sig=***, https://h/b]"),
        ("https://h?X-Amz-Security-Token=a%2Fb%3D&v=1", "https://h?X-Amz-Security-Token=***&v=1"),
        ("https://${oc.env:WHO}:kanarie@h", "https://${oc.env:WHO}:***@h"),
        ("https://${oc.env:WHO}:${oc.env:KEY}@h", "https://${oc.env:WHO}:${oc.env:KEY}@h"),
        ("az://box@account/x oci://box@space/y", "az://box@account/x oci://box@space/y"),
        ("sqlite:///runs/mlflow.db http://h:80/x@y", "sqlite:///runs/mlflow.db http://h:80/x@y"),
    ],
)
def test_what_is_masked_in_a_text(text: str, shown: str) -> None:
    assert public(text) == shown and public(shown) == shown


def test_storage_options_show_nothing_but_known_settings() -> None:
    options = {
        "s3": {"anon": True, "region": "eu", "endpoint_url": "https://h", "key": 12345678},
        "gs": {"token": "anon", "more": [{"private": "kanarie"}]},
        "az": {"account_key": "${oc.env:KEY,kanarie}", "other": "a${oc.env:KEY}"},
    }
    assert public_values({"data": {"storage_options": options}})["data"]["storage_options"] == {
        "s3": {"anon": True, "region": "eu", "endpoint_url": "https://h", "key": "***"},
        "gs": {"token": "anon", "more": [{"private": "***"}]},
        "az": {"account_key": "${oc.env:KEY}", "other": "***"},
    }


def test_a_webhooks_address_is_a_secret_as_a_whole(tmp_path: Path) -> None:
    secret = "https://hooks.example.com/services/T0/kanarie-webhook"
    word = f"supervise.webhook={secret}"
    recipe = load(TrainRecipe, write_recipe(tmp_path), [word])
    assert recipe.supervise.webhook == secret
    assert as_written(recipe)["supervise"]["webhook"] == "***" and "kanarie" not in to_yaml(recipe)
    assert public(f"no host at {secret}!") == "no host at ***!"
    assert public_override(word) == "supervise.webhook=***"
    assert public_override("supervise.webhook_form=json") == "supervise.webhook_form=json"
    kept = {"webhook": "${oc.env:SLACK_WEBHOOK}", "act": True}
    assert public_values({"supervise": kept}) == {"supervise": kept}


def test_a_secret_is_masked_wherever_another_library_repeats_it() -> None:
    word = "data.storage_options.s3.secret=kanarie-in-a-word"
    with pytest.raises(UserError):
        checked(TrainRecipe, None, [f"{word},two"])
    assert public("cannot log in with 'kanarie-in-a-word,two'") == "cannot log in with '***'"


def start(script: str, *words: str, cwd: Path, canary: str | None = None) -> str:
    """What a script prints, whatever its exit status."""
    done = run_script(script, words, cwd=cwd, variables={"HIDDEN": canary} if canary else {})
    return f"{done.stdout}{done.stderr}\nstatus {done.returncode}"


LITERAL, VARIABLE = "kanarie-as-it-is", "kanarie-by-variable"
WORDS = ("tiny.yaml", "max_duration=4ba")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run on local text whose recipe has one secret as it is and one by a variable."""
    folder = tmp_path_factory.mktemp("secrets")
    path = write_recipe(folder)
    recipe = yaml.safe_load(path.read_text())
    recipe["data"]["storage_options"] = {"s3": {"secret": LITERAL, "key": "${oc.env:HIDDEN}"}}
    recipe["logger"] = {"mlflow": True, "tensorboard": find_spec("tensorboard") is not None}
    path.write_text(yaml.safe_dump(recipe))
    return folder, [start("train.py", *WORDS, cwd=folder, canary=VARIABLE)]


def assert_no_secret(folder: Path, printed: list[str]) -> None:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files[folder / "tiny.yaml"]
    assert len(files) > 30 and any(path.suffix == ".db" for path in files)
    for canary in (LITERAL, VARIABLE):
        assert not [text for text in printed if canary in text]
        assert not [p for p, content in files.items() if canary in str(p)]
        assert not [p for p, content in files.items() if canary.encode() in content]


def test_nothing_that_a_run_writes_or_prints_holds_a_secret(
    trained: tuple[Path, list[str]],
) -> None:
    """Evaluation and export are on a machine where the variable is not set."""
    folder, printed = trained
    printed = [*printed, start("eval.py", "checkpoint=runs/tiny", cwd=folder)]
    export = ("to=hf", "architecture=llmfoundry", "output=exported")
    printed.append(start("convert.py", "checkpoint=runs/tiny", *export, cwd=folder))
    assert [text[-8:] for text in printed] == ["status 0"] * 3, printed
    refused = start("train.py", "runs/tiny/recipe.yaml", cwd=folder, canary=VARIABLE)
    assert refused.endswith("status 2") and refused.count("\n") == 2, refused
    assert "data.storage_options.s3.secret: has *** where a secret was not saved" in refused
    assert_no_secret(folder, [*printed, refused])


@pytest.mark.slow
def test_no_secret_is_in_a_resume_a_sweep_or_an_error(trained: tuple[Path, list[str]]) -> None:
    folder, _ = trained
    more = start("train.py", "tiny.yaml", "max_duration=5ba", cwd=folder, canary=VARIABLE)
    assert "resuming from" in more and more.endswith("status 0")
    remote = f"data.remote=https://me:{LITERAL}@127.0.0.1:9/x"
    bad = ("data.name=shards", "data.paths=[]", "data.download_retry=0", remote, "run_name=bad")
    printed = [more, start("train.py", *WORDS, *bad, cwd=folder, canary=VARIABLE)]
    both = f"data.storage_options.s3.secret={LITERAL},{VARIABLE}"
    printed.append(start("train.py", *WORDS, both, "-m", cwd=folder, canary=VARIABLE))
    assert [text[-8:] for text in printed] == ["status 0", "status 2", "status 0"], printed
    assert_no_secret(folder, printed)


@pytest.mark.slow
def test_a_variable_that_decides_the_model_must_be_as_it_was(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace("d_model: 32", "d_model: ${oc.env:HIDDEN}"))
    start("train.py", "tiny.yaml", "max_duration=1ba", cwd=tmp_path, canary="32")
    ask = ("generate.py", "checkpoint=runs/tiny", "prompt=a", "max_new_tokens=1")
    assert start(*ask, cwd=tmp_path, canary="32").endswith("status 0")
    other = start(*ask, cwd=tmp_path, canary="64")
    assert "model.d_model: 64" in other and "trained with 32" in other
    unset = start(*ask, cwd=tmp_path)
    assert "model.d_model: " in unset and "'HIDDEN' not found" in unset
    assert other.endswith("status 2") and unset.endswith("status 2")
    assert (other + unset).count("\n") == 4
