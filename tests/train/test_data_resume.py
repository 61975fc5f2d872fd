"""A mixture through the whole run: any ranks and workers, a stop, other proportions after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmfoundry.builders.data import RunData, learning_corpus, open_data
from llmfoundry.builders.trainer import build_clock, build_loader, mixture_lines
from llmfoundry.data.loader import Loader
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.load import load
from llmfoundry.recipe.train import TrainRecipe
from tests.shards import bytes_tokenizer, texts, write_mds, write_tokens
from tests.tiny import RECIPE, losses, run

STREAMS = ("web", "code", "books")


def write(folder: Path, **changes: Any) -> None:
    """mix.yaml: a corpus, token shards and MDS in a mixture with a phase."""
    if not (folder / "code").exists():
        write_tokens(folder / "code", "code", documents=60)
        write_mds(folder / "books", "books", rows=30)
        lines = [json.dumps({"text": text}) for text in texts("web", 60)]
        (folder / "web.jsonl").write_text("\n".join(lines))
    data = {
        "name": "mixture",
        "streams": {
            "web": {"name": "files", "paths": [str(folder / "web.jsonl")], "proportion": 2},
            "code": {"local": str(folder / "code"), "proportion": 1},
            "books": {"local": str(folder / "books"), "proportion": 1},
        },
        "phases": [{"at": "8ba", "proportions": {"books": 1, "code": 1}}],
        "validation": {"local": str(folder / "books")},
        "cache_folder": str(folder / "cache"),
    }
    recipe = RECIPE | {"data": data | changes}
    (folder / "mix.yaml").write_text(yaml.safe_dump(recipe))


def stop_at(run_folder: Path, batch: int) -> dict[str, Any]:
    """Leave the checkpoints up to `batch`; what that one says of the data."""
    for checkpoint in (run_folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("ba")) > batch:
            shutil.rmtree(checkpoint)
    state = run_folder / "checkpoints" / f"ba{batch:07d}" / "state.json"
    return json.loads(state.read_text())["order"]


def opened(folder: Path, **changes: Any) -> tuple[TrainRecipe, RunData, Loader]:
    """What build_trainer makes of mix.yaml's data."""
    write(folder, **changes)
    recipe = load(TrainRecipe, folder / "mix.yaml").resolve()
    world, tokenizer = World(0, 1, 0, torch.device("cpu")), bytes_tokenizer()
    data = open_data(recipe, tokenizer, world)
    clock = build_clock(recipe, data)
    return recipe, data, build_loader(recipe, data, clock, tokenizer, world)


def given(loader: Loader, step: int) -> dict[str, int]:
    return dict(zip(loader.mixture.names, loader.mixture.consumed(step), strict=True))


def test_a_recipe_becomes_its_mixture(tmp_path: Path) -> None:
    recipe, data, loader = opened(tmp_path)
    assert data.epoch_rows == loader.n_rows == sum(stream.n_rows for stream in data.streams)
    assert given(loader, 8) == {"web": 16, "code": 8, "books": 8}
    assert given(loader, 10) == {"web": 16, "code": 12, "books": 12}
    lines = mixture_lines(loader, 8)
    assert any(line.startswith("data.streams.web: ") and "50.0% of" in line for line in lines)
    # a token of the bytes tokenizer is a byte, but for the end of each document
    assert data.bytes_per_token == pytest.approx(1, abs=0.05)
    corpus = next(line for line in data.summary.splitlines() if line.startswith("data.streams.web"))
    assert "60 documents" in corpus
    n_rows = data.validation.n_rows(recipe.max_seq_len, partial=True)
    (books,) = (stream for stream in loader.streams if stream.name == "books")
    held_out_rows = books.n_rows  # data.validation is the same folder
    assert n_rows > held_out_rows
    assert len(data.validation_texts()) > held_out_rows
    assert learning_corpus(recipe.data).paths == [str(tmp_path / "web.jsonl")]


def test_a_stop_resumes_with_other_proportions(tmp_path: Path) -> None:
    _, _, before = opened(tmp_path)
    state = json.loads(json.dumps(before.state(6)))
    phases = [{"at": "9ba", "proportions": {"web": 1}}]
    _, _, after = opened(tmp_path, phases=phases)
    after.resume(state, 6)
    for step in range(6, 9):  # the same until the phase that was changed
        assert torch.equal(after.batch(step).tokens, before.batch(step).tokens) == (step < 8)
    assert given(after, 12)["web"] == given(after, 9)["web"] + 12


def test_phases_and_corpora_that_cannot_be_are_refused(tmp_path: Path) -> None:
    phases = [
        {"at": "0.5dur", "proportions": {"web": 1}},
        {"at": "2ba", "proportions": {"code": 1}},
    ]
    with pytest.raises(UserError, match=r"^data\.phases\[1\]\.at: 2ba lies before the phase"):
        opened(tmp_path, phases=phases)
    alone = {"code": {"local": str(tmp_path / "code"), "proportion": 1}}
    with pytest.raises(UserError, match=r"^data\.filter: has no effect on shards"):
        opened(tmp_path, streams=alone, phases=[], filter={"min_chars": 5})
    shards = DataConfig(name="shards", local=str(tmp_path / "code"))
    with pytest.raises(UserError, match=r"^tokenizer\.name: train learns from documents"):
        learning_corpus(shards)


@pytest.mark.slow
def test_a_stopped_mixture_resumes_with_other_ranks_and_workers(tmp_path: Path) -> None:
    write(tmp_path)
    done = run("train.py", "mix.yaml", "run_name=mix", cwd=tmp_path)
    assert "data.streams.web: " in done.stdout
    expected = losses(tmp_path / "runs/mix")
    order = stop_at(tmp_path / "runs/mix", 4)
    assert order["mixture"]["consumed"] == {"web": 8, "code": 4, "books": 4}
    more = ["autoresume=true", "data.loader_workers=1"]
    run("train.py", "mix.yaml", "run_name=mix", *more, cwd=tmp_path, processes=2)
    assert losses(tmp_path / "runs/mix") == pytest.approx(expected, abs=1e-4)
    assert stop_at(tmp_path / "runs/mix", 12)["mixture"]["consumed"] == {
        "web": 16, "code": 16, "books": 16
    }  # fmt: skip
