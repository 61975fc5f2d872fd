"""Models from outside: which names are, and how they are asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llmfoundry.api.external_models import check_outside, is_outside, open_outside
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.hugging_face import HuggingFaceModel
from llmfoundry.gauntlet.models.own_decoder import OwnModel
from llmfoundry.gauntlet.questions import GenerationPrompt
from llmfoundry.recipe.after_training import EvalRecipe
from tests.gauntlet.hugging_face_models import (
    plain_continuation,
    plain_logprobs,
    random_model,
    random_requests,
    save_model,
)

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
    settings = outside.settings
    assert settings.unit == "bytes" and settings.chat is not None
    text = "naïve 3 · 4"
    assert settings.tokenizer.encode(text) == [*text.encode()]  # no token is longer than a byte
    assert not settings.can_score  # chats give no log-probabilities
    _, notes = outside.load()
    assert notes == []


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="http://localhost:1/v1: refuses the connection"):
        open_outside(SERVER, EvalRecipe(), ALONE, seq_len=None, note=print)


@pytest.mark.parametrize(
    ("kind", "holder"),
    [(kind, OwnModel) for kind in ("llama", "gpt2", "mistral", "mpt")]
    + [(kind, HuggingFaceModel) for kind in ("gpt_neox", "bloom", "mamba")],
)
def test_a_hugging_face_model_is_computed_by_the_decoder_where_that_expresses_it(
    kind: str, holder: type, tmp_path: Path
) -> None:
    folder = str(save_model(tmp_path, kind, eos_token_id=[0, 17]))
    outside = open_outside(folder, EvalRecipe(), ALONE, seq_len=None, note=print)
    evaluated, notes = outside.load()
    assert isinstance(evaluated, holder)
    assert ["of transformers computes it" in note for note in notes] == [True] * len(notes)
    assert bool(notes) == (holder is HuggingFaceModel)
    model, tokenizer = random_model(kind), outside.settings.tokenizer
    requests = random_requests(longest=200)
    for request, score in zip(requests, evaluated.score(requests), strict=True):
        logprobs = plain_logprobs(model, request)
        targets = torch.tensor(request.targets)[:, None]
        assert score.logprob == pytest.approx(float(logprobs.gather(1, targets).sum()), abs=1e-4)
        assert score.best_logprob == pytest.approx(float(logprobs.amax(1).sum()), abs=1e-4)
        assert score.greedy == (logprobs.argmax(1).tolist() == list(request.targets))
    asked = [
        GenerationPrompt(request.tokens[: 3 + 5 * n], "", (), 12)
        for n, request in enumerate(requests)
    ]
    for prompt, text in zip(asked[:6], evaluated.generate(asked[:6]), strict=True):
        expected = plain_continuation(model, prompt.tokens, 12, {0, 17, tokenizer.eos_id})
        assert text == tokenizer.decode(expected)
