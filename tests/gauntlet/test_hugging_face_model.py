"""Models of transformers as subjects, beside the same models called plainly, text by text."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from hugging_face_models import (
    SEQ_LEN,
    plain_continuation,
    plain_logprobs,
    random_model,
    random_requests,
    save_model,
    save_tokenizer,
)

from llmfoundry.data.text.tokenizer import Tokenizer, special_tokens
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.hugging_face import HuggingFaceModel
from llmfoundry.gauntlet.questions import GenerationPrompt
from llmfoundry.hf.open_class import HuggingFaceTokenizer
from tests.gauntlet.hugging_face_models import load_hugging_face

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.load(folder)


def subject_of(model: Any, tokenizer: Tokenizer, **changes: Any) -> HuggingFaceModel:
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_tokens": 500, **changes}
    return HuggingFaceModel(model, tokenizer, **settings)


def assert_plain(model: Any, subject: HuggingFaceModel, *, longest: int = 60) -> None:
    """Scores are those of each request read on its own."""
    requests = random_requests(longest=longest)
    for request, score in zip(requests, subject.score(requests), strict=True):
        logprobs = plain_logprobs(model, request)
        targets = torch.tensor(request.targets)[:, None]
        assert score.logprob == pytest.approx(float(logprobs.gather(1, targets).sum()), abs=1e-4)
        assert score.best_logprob == pytest.approx(float(logprobs.amax(1).sum()), abs=1e-4)
        assert score.greedy == (logprobs.argmax(1).tolist() == list(request.targets))
        assert not score.tied


KINDS = ["gpt_neox", "llama", "gpt2", "gemma2", "mpt", "bloom", "mamba", "mistral", "gpt_neo"]


@pytest.mark.parametrize("longest", [60, 200])  # and beyond windows of 24 to 64 tokens
@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_give_the_plain_scores(
    kind: str, longest: int, tokenizer: Tokenizer
) -> None:
    model = random_model(kind)
    assert_plain(model, subject_of(model, tokenizer), longest=longest)


@pytest.mark.parametrize("batch_tokens", [1, 100, 64_000])
def test_scores_do_not_depend_on_the_batch(batch_tokens: int, tokenizer: Tokenizer) -> None:
    requests = random_requests()
    model = random_model("llama")
    usual = subject_of(model, tokenizer).score(requests)
    other = subject_of(model, tokenizer, batch_tokens=batch_tokens).score(requests)
    for a, b in zip(usual, other, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    assert subject_of(model, tokenizer).score([]) == []


def test_bf16_scores_are_near_those_of_fp32_and_do_not_tie(tokenizer: Tokenizer) -> None:
    requests = random_requests()
    exact = subject_of(random_model("llama"), tokenizer).score(requests)
    amp = subject_of(random_model("llama"), tokenizer, autocast=True)
    half = subject_of(random_model("llama").bfloat16(), tokenizer)
    for subject in (amp, half):
        scores = subject.score(requests)
        deltas = [abs(a.logprob - b.logprob) for a, b in zip(exact, scores, strict=True)]
        assert 1e-5 < max(deltas) < 0.5, "bf16 rounds, but not more than that"
        assert not any(score.tied for score in scores)


def test_a_model_that_outputs_nan_is_neither_greedy_nor_tied(tokenizer: Tokenizer) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    subject = subject_of(model, tokenizer)
    for score in subject.score(random_requests()):
        assert math.isnan(score.logprob)
        assert not (score.greedy or score.tied)
    with pytest.raises(FloatingPointError, match="1 of 1 prompts"):
        subject.generate([GenerationPrompt((1, 2), "", (), 3)])


def prompts() -> list[GenerationPrompt]:
    """Of several lengths, to be continued by several lengths."""
    tokens = [request.tokens[: 3 + 5 * n] for n, request in enumerate(random_requests()[:6])]
    return [GenerationPrompt(each, "", (), 5 + n % 3) for n, each in enumerate(tokens)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mamba"])
def test_continuations_are_those_of_single_prompts_without_a_cache(
    kind: str, tokenizer: Tokenizer
) -> None:
    model = random_model(kind)
    subject = subject_of(model, tokenizer)
    asked = prompts()
    for prompt, text in zip(asked, subject.generate(asked), strict=True):
        n, eos_ids = prompt.max_new_tokens, {tokenizer.eos_id, 0}
        expected = plain_continuation(model, prompt.tokens, n, eos_ids)
        assert text == tokenizer.decode(expected)


def test_a_continuation_ends_before_its_stop_and_its_length_is_its_own(
    tokenizer: Tokenizer,
) -> None:
    model = random_model("llama")
    subject = subject_of(model, tokenizer)
    (whole,) = subject.generate([GenerationPrompt((7, 8, 9), "", (), 30)])
    assert len(whole) > 20
    stop = whole[10:13]
    before = whole[: whole.index(stop)]
    asked = [
        GenerationPrompt((7, 8, 9), "", ("never there", stop), 30),
        GenerationPrompt((7, 8, 9), "", (), 2),
        GenerationPrompt((7, 8, 9), "", (), 0),
        GenerationPrompt((7, 8, 9), "", (), 30),
    ]
    assert subject.generate(asked)[::2] == [before, ""]
    assert subject.generate(asked)[3] == whole
    short = tokenizer.decode(plain_continuation(model, (7, 8, 9), 2, {0}))
    assert subject.generate(asked)[1] == short


def test_a_prompt_is_continued_up_to_the_models_window(tokenizer: Tokenizer) -> None:
    model = random_model("gpt2")  # its positions end: one token more would be an error
    subject = subject_of(model, tokenizer)
    tokens = tuple(range(1, SEQ_LEN - 2))
    (text,) = subject.generate([GenerationPrompt(tokens, "", (), 100)])
    assert text == tokenizer.decode(plain_continuation(model, tokens, 3, {0, tokenizer.eos_id}))


def test_a_folders_settings_do_not_make_generation_random(tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 9.0}
    folder = save_model(tmp_path, "llama", eos_token_id=[0, 17], **sampling)
    subject, tokenizer = load_hugging_face(
        str(folder), device=CPU, precision="fp32", batch_tokens=500
    )
    for prompt in prompts():
        expected = plain_continuation(subject.model, prompt.tokens, 12, {0, 17, tokenizer.eos_id})
        asked = GenerationPrompt(prompt.tokens, "", (), 12)
        assert subject.generate([asked]) == [tokenizer.decode(expected)]


@pytest.mark.parametrize("bos", [True, False])
def test_the_tokenizer_encodes_as_transformers_does(bos: bool, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, bos=bos)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = HuggingFaceTokenizer("here", transformers.AutoTokenizer.from_pretrained(str(tmp_path)))
    text = "Question: What is 12?\n\nAnswer: the author"
    special = special_tokens(ours)
    assert [*special.before, *ours.encode(text)] == theirs(text).input_ids
    assert len(special.before) == int(bos) and special.after == ()
    assert special.prefix == (theirs.bos_token_id if bos else theirs.eos_token_id)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.decode(ours.encode(text)) == text
    assert ours.fingerprint == Tokenizer.load(tmp_path).fingerprint


def test_a_folder_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "gpt_neox")
    subject, tokenizer = load_hugging_face(
        str(folder), device=CPU, precision="fp32", batch_tokens=500
    )
    assert subject.seq_len == SEQ_LEN
    assert special_tokens(tokenizer).before == ()
    assert_plain(random_model("gpt_neox"), subject)


def spoil(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if what == "no config":
        (folder / "config.json").unlink()
    elif what == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif what == "a pipe":
        (folder / "generation_config.json").unlink()
        os.mkfifo(folder / "generation_config.json")
    elif what == "odd ends":
        (folder / "generation_config.json").write_text('{"eos_token_id": [0, {"a": 1}]}')
    elif what == "long template":
        with (folder / "chat_template.jinja").open("wb") as file:
            file.truncate(1 << 36)
    elif what == "broken settings":
        (folder / "special_tokens_map.json").write_text("")
    elif what == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        changes = {
            "unknown type": {"model_type": "zorp"},
            "no causal model": {"model_type": "t5"},
            "a layer more": {"num_hidden_layers": 3},
            "absurd layers": {"num_hidden_layers": 10**9},
            "absurd layers inside": {"text_config": {"num_hidden_layers": 1e9}},
            "its own code": {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
        }
        (folder / "config.json").write_text(json.dumps(config | changes[what]))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no config", "config.json: is missing; write a folder"),
        ("no tokenizer", "has no tokenizer"),
        ("no weights", "holds no weights"),
        ("unknown type", "has model type `zorp` but Transformers does not recognize"),
        ("no causal model", "is a t5 model, of which transformers"),
        ("absurd layers", r"num_hidden_layers 1e\+09, and no model has more"),
        ("absurd layers inside", r"text_config.num_hidden_layers 1e\+09, and no model has more"),
        ("its own code", "brings its own Python files, which are not run here"),
        ("a pipe", "generation_config.json: is not a file"),
        ("odd ends", r"generation_config.json: eos_token_id: \[0, {'a': 1}\] is no id"),
        ("long template", "chat_template.jinja: has more than 33,554,432 bytes"),
        ("broken settings", "special_tokens_map.json: is not JSON: it is empty"),
        ("a layer more", r"lack the weights gpt_neox.layers.2.* and 9 more, which would be random"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_in_a_line(
    what: str, says: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, "gpt_neox")
    spoil(folder, what)
    with pytest.raises(UserError, match=says) as raised:
        load_hugging_face(str(folder), device=CPU, precision="fp32", batch_tokens=500)
    assert str(folder) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_the_hub_without_a_network_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^owner/model: .*; connect to the network, or") as raised:
        load_hugging_face("owner/model", device=CPU, precision="fp32", batch_tokens=500)
    assert len(str(raised.value).splitlines()) == 1


def answer(rank: int, folder: Path) -> None:
    """Write down a model's answers, as one of two processes; with rank -1 as the only one."""
    if rank >= 0:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    save_tokenizer(folder / f"tokenizer{rank}")
    subject = subject_of(random_model("llama"), Tokenizer.load(folder / f"tokenizer{rank}"))
    scores = [vars(score) for score in subject.score(random_requests())]
    texts = subject.generate(prompts())
    (folder / f"rank{rank}.json").write_text(json.dumps([scores, texts]))
    if rank >= 0:
        dist.destroy_process_group()


def answer_second(_: int, folder: Path, n_threads: int) -> None:
    torch.set_num_threads(n_threads)  # sums of other lengths would round otherwise
    answer(1, folder)


@pytest.mark.slow
def test_two_processes_give_exactly_what_one_does(tmp_path: Path) -> None:
    answer(-1, tmp_path)
    other = mp.spawn(answer_second, args=(tmp_path, torch.get_num_threads()), nprocs=1, join=False)
    answer(0, tmp_path)
    other.join()
    results = [(tmp_path / f"rank{rank}.json").read_text() for rank in (-1, 0, 1)]
    assert results[0] == results[1] == results[2]
    assert len(json.loads(results[0])[0]) == len(random_requests())
