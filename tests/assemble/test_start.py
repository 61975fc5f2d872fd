"""Where a run begins: which checkpoint, and that its weights are those that were saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmfoundry.assemble.start import (
    Start,
    _changes,
    find_start,
    load_checkpoint,
    model_identity,
)
from llmfoundry.errors import UserError
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.front.load import checked
from llmfoundry.recipe.scripts.train import TrainRecipe
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


def start(folder: Path, *words: str, told: list[str] | None = None) -> Start:
    recipe = checked(TrainRecipe, "tiny.yaml", [f"save_folder={folder}", *words])
    recipe.fill()
    return find_start(recipe, ALONE, [].append if told is None else told.append)


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def test_a_run_goes_on_from_its_own_newest_whole_checkpoint(saved: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(saved)
    assert (older.name, newest.name) == ("ba0000001", "ba0000002")
    assert start(saved) == Start(newest)
    assert start(saved, "load_path=" + str(older)) == Start(newest)  # only where it has none
    assert start(saved, "save_overwrite=true") == Start()
    assert start(tmp_path / "new") == Start()
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    told: list[str] = []
    assert start(saved, told=told) == Start(older)
    assert len(told) == 1 and newest.name in told[0]


def test_another_run_is_begun_from_by_its_path(saved: Path, tmp_path: Path) -> None:
    older, newest = checkpoints(saved)
    new = tmp_path / "new"
    assert start(new, f"load_path={saved}") == Start(newest)
    weights = [f"load_path={older}", "load_weights_only=true"]
    assert start(new, *weights) == Start(older, weights_only=True)


def test_what_cannot_be_gone_on_with_says_what_to_write(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"save_folder: .*save_overwrite=true.*another run_name"):
        start(saved, "autoresume=false")
    for folder in checkpoints(saved):
        (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"save_folder: no checkpoint in .* can be used"):
        start(saved)
    with pytest.raises(UserError, match=r"load_path: .* holds no whole checkpoint"):
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


@pytest.mark.parametrize(("words", "told"), [((), 0), (("callbacks.watch.loss_spike=skip",), 1)])
def test_a_key_newer_than_the_checkpoint_is_told_only_where_it_changes_something(
    saved: Path, words: tuple[str, ...], told: int
) -> None:
    recipe = checked(TrainRecipe, "tiny.yaml", [])
    recipe.fill()
    then = {k: v for k, v in recipe.training_settings().items() if not k.startswith("callbacks")}
    now = checked(TrainRecipe, "tiny.yaml", list(words))
    now.fill()
    assert len(list(_changes(now, saved, {"settings": then}))) == told
