"""Models from outside: which names are, and how they are asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmfoundry.assemble.subjects import check_outside, is_outside, open_outside
from llmfoundry.errors import UserError
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.scripts.after_training import EvalRecipe

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
SERVER = "http://localhost:1/v1#small"


def test_a_name_is_outside_by_its_prefix_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("hf:gpt2", "chat:" + SERVER, SERVER, "https://host/v1#m", tmp_path / "exported"):
        assert is_outside(str(name)), name
    for name in (tmp_path / "run", "runs/quickstart", "gpt2", "ftp://host#m"):
        assert not is_outside(str(name)), name


@pytest.mark.parametrize("name", ["http://localhost:1/v1", "chat:https://host/v1#"])
def test_an_address_without_a_model_is_refused_before_anyone_is_asked(name: str) -> None:
    with pytest.raises(UserError, match=r"models: .*: names no model; write ADDRESS#MODEL"):
        check_outside(name, None)


def test_a_hugging_face_model_that_reads_too_little_is_refused_without_its_weights(
    tmp_path: Path,
) -> None:
    config = {"model_type": "gpt2", "n_positions": 64, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_outside(f"hf:{tmp_path}", 64)
    with pytest.raises(UserError, match="64"):
        check_outside(f"hf:{tmp_path}", 65)


def test_a_chat_endpoint_is_asked_in_text_and_nothing_is_sent_before() -> None:
    name = f"chat:{SERVER}"
    check_outside(name, None)
    outside = open_outside(name, EvalRecipe(), ALONE, seq_len=None, note=print)
    asking = outside.asking
    assert asking.unit == "bytes" and asking.chat is not None
    text = "naïve 3 · 4"
    assert asking.tokenizer.encode(text) == [*text.encode()]  # no token is longer than a byte
    assert not asking.can_score  # chats give no log-probabilities
    _, notes = outside.load()
    assert notes == []


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="http://localhost:1/v1: refuses the connection"):
        open_outside(SERVER, EvalRecipe(), ALONE, seq_len=None, note=print)
