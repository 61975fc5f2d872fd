"""Where a run begins: which checkpoint, and that its weights are those that were saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from llmfoundry.builders.checkpoint import load_checkpoint, model_identity
from llmfoundry.builders.resume import (
    StartPoint,
    _changes,
    _refuse_changes,
    fill_weights,
    find_start,
    run_identity,
)
from llmfoundry.checkpoint.load import read_state
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.files import write_json
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.models.test_decoder import make_config
from tests.tiny import write_recipe
from tests.train.here import tensors, train_here

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/saved, whose checkpoints are of its first two steps."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("start")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("saved", "max_duration=2ba", "save_interval=1ba", "eval=off")
        yield folder


@pytest.fixture
def saved(place: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(place / "runs" / "saved", tmp_path / "saved"))


def start(folder: Path, *words: str, reported: list[str] | None = None) -> StartPoint:
    recipe = checked(TrainRecipe, "tiny.yaml", [f"save_folder={folder}", *words])
    recipe = recipe.resolve()
    run, note = Storage(folder), [].append if reported is None else reported.append
    return find_start(recipe, run, ALONE, note)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def test_a_run_resumes_from_its_own_newest_whole_checkpoint(saved: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(saved)
    assert (older.name, newest.name) == ("ba0000001", "ba0000002")
    assert start(saved) == StartPoint(Checkpoint.at(newest))
    assert start(saved, "load_path=" + str(older)) == StartPoint(
        Checkpoint.at(newest)
    )  # only where it has none
    assert start(saved, "save_overwrite=true") == StartPoint()
    assert start(tmp_path / "new") == StartPoint()
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    reported: list[str] = []
    assert start(saved, reported=reported) == StartPoint(Checkpoint.at(older))
    assert len(reported) == 1 and newest.name in reported[0]


def test_another_run_is_begun_from_by_its_path(saved: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(saved)
    new = tmp_path / "new"
    assert start(new, f"load_path={saved}") == StartPoint(Checkpoint.at(newest))
    weights = [f"load_path={older}", "load_weights_only=true"]
    assert start(new, *weights) == StartPoint(Checkpoint.at(older), weights_only=True)


def test_what_cannot_be_gone_on_with_says_what_to_write(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"save_folder: .*save_overwrite=true.*another run_name"):
        start(saved, "autoresume=false")
    for folder in checkpoints(saved):
        (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"save_folder: no checkpoint in .* can be used"):
        start(saved)
    with pytest.raises(UserError, match=r"load_path: .* holds no complete checkpoint"):
        start(tmp_path / "new", f"load_path={saved}")


def test_a_checkpoint_opens_with_the_tensors_that_torch_reads_in_it(
    place: Path, tmp_path: Path
) -> None:
    for folder in checkpoints(place / "runs" / "saved"):
        loaded = load_checkpoint(str(folder), ALONE, note=print)
        stored = tensors(folder, tmp_path / folder.name)["model"]
        found = loaded.root.model.state_dict()
        assert {*found} == {*stored} and loaded.is_trained
        assert all(torch.equal(found[name], stored[name]) for name in stored)
        assert loaded.state["batch"] == int(folder.name.removeprefix("ba"))
        assert loaded.tokenizer.vocab_size == 257  # bytes, and the end of text


OTHER = {  # of a recipe, by the key of its identity that it changes
    "precision": "precision=bf16",
    "global_train_batch_size": "global_train_batch_size=16",
    "data.attend_across_documents": "data.attend_across_documents=true",
    "optimizer.name": "optimizer.name=adamw",
    "optimizer.moments": "optimizer.moments=int8",
    "optimizer.disable_grad": "optimizer.disable_grad=[wte]",
}


def job(recipe: TrainRecipe, fingerprint: str) -> Any:
    """What an identity is of; no adapter, no quantised weights."""
    tokenizer, root = SimpleNamespace(fingerprint=fingerprint), SimpleNamespace(model=nn.Module())
    return SimpleNamespace(recipe=recipe, tokenizer=tokenizer, root=root, world=ALONE)


def refused(folder: Path, this: Any, *, weights_only: bool = False) -> list[str]:
    """Keys that a resume of `this` from a checkpoint is refused for."""
    found, nothing = StartPoint(Checkpoint.at(folder), weights_only), cast(Any, None)
    with pytest.raises(UserError) as error:
        fill_weights(this, found, nothing, run_identity(this), nothing, total=9)
    assert all("was trained with" in line for line in error.value.lines())
    return [line.partition(": ")[0] for line in error.value.lines()]


def test_each_setting_that_makes_it_another_run_is_refused_on_resume(saved: Path) -> None:
    newest = checkpoints(saved)[-1]
    then = read_state(Checkpoint.at(newest))["identity"]
    assert {k for k in then if not k.startswith("model.")} == {*OTHER, "tokenizer"}
    for key, word in OTHER.items():
        recipe = checked(TrainRecipe, "tiny.yaml", [word])
        recipe = recipe.resolve()
        recipe.model.fill(vocab_size=then["model.vocab_size"])
        assert refused(newest, job(recipe, then["tokenizer"])) == [key]
    recipe = checked(TrainRecipe, "tiny.yaml", [])
    recipe = recipe.resolve()
    recipe.model.fill(vocab_size=then["model.vocab_size"])
    assert refused(newest, job(recipe, "another")) == ["tokenizer"]


def test_each_setting_of_the_model_is_refused_on_resume_and_of_its_weights(saved: Path) -> None:
    newest = checkpoints(saved)[-1]
    state = read_state(Checkpoint.at(newest))
    recipe = checked(TrainRecipe, "tiny.yaml", [])
    recipe = recipe.resolve()
    recipe.model.fill(vocab_size=state["identity"]["model.vocab_size"])
    this = job(recipe, state["identity"]["tokenizer"])
    sections = {".".join(key.split(".")[:2]) for key in state["identity"]}
    assert {f"model.{field.name}" for field in fields(recipe.model)} <= sections
    for key in [key for key in state["identity"] if key.startswith("model.")]:
        write_json(newest / "state.json", state | {"identity": state["identity"] | {key: "other"}})
        for weights_only in (False, True):
            assert refused(newest, this, weights_only=weights_only) == [key]


def test_each_setting_of_fine_tuning_is_refused_on_resume(tmp_path: Path) -> None:
    def made(key: str = "", value: object = None) -> Any:
        recipe = FinetuneRecipe()
        recipe.adapter.name, recipe.adapter.r = "lora", 8
        recipe = recipe.resolve()
        section, _, name = key.rpartition(".")
        if key:
            setattr(getattr(recipe, section) if section else recipe, name, value)
        return job(recipe, "same")

    then = run_identity(made())
    write_json(tmp_path / "state.json", {"batch": 1, "identity": then, "order": {}})
    keys = [f"adapter.{field.name}" for field in fields(FinetuneRecipe().adapter)]
    for key in [*keys, "freeze", "preference.name"]:
        assert refused(tmp_path, made(key, "other")) == [key]
    narrow = made()
    narrow.root.model.packing = SimpleNamespace(double=True)
    assert refused(tmp_path, narrow) == ["model.quantize", "model.double_quantize"]


def test_a_models_identity_is_all_but_how_it_is_computed() -> None:
    ffn = {"ffn_type": "dmoe", "mlp_type": "glu", "moe_num_experts": 4, "moe_top_k": 2}
    same = make_config(ffn_config=ffn)
    for change in ({"attn_config": {"attn_impl": "torch"}}, {"ffn_config": {"moe_impl": "torch"}}):
        how = {"ffn_config": ffn | change.pop("ffn_config", {}), **change}
        assert model_identity(make_config(**how)) == model_identity(same)
    for change in (
        {"n_layers": 3},
        {"attn_config": {"clip_qkv": 6.0}},
        {"tie_word_embeddings": False},
    ):
        other = make_config(**{"ffn_config": ffn, **change})
        differ = {k for k, v in model_identity(other).items() if model_identity(same).get(k) != v}
        (key,) = change
        assert differ == {f"model.{key}" + (".clip_qkv" if key == "attn_config" else "")}


@pytest.mark.parametrize(
    ("words", "reported"), [((), 0), (("callbacks.watch.loss_spike=skip",), 1)]
)
def test_a_key_newer_than_the_checkpoint_is_reported_only_where_it_changes_something(
    saved: Path, words: tuple[str, ...], reported: int
) -> None:
    recipe = checked(TrainRecipe, "tiny.yaml", [])
    recipe = recipe.resolve()
    then = {k: v for k, v in recipe.training_settings().items() if not k.startswith("callbacks")}
    now = checked(TrainRecipe, "tiny.yaml", list(words))
    now = now.resolve()
    assert len(list(_changes(now, saved, {"settings": then}))) == reported


def test_a_checkpoint_without_keys_of_later_versions_has_their_defaults() -> None:
    new = {"model.attn_config.sinks": False, "model.attn_config.rope_hf_config.truncate": True,
           "adapter.trainable_token_indices": None}  # fmt: skip
    _refuse_changes(StartPoint(), {"order": {}, "identity": {"seed": 1}}, new)
    with pytest.raises(UserError, match=r"sinks: True, but checkpoint .* was trained with False"):
        _refuse_changes(
            StartPoint(), {"order": {}, "identity": {}}, {"model.attn_config.sinks": True}
        )
