"""A served decoder against its own plain forward pass: greedy answers, scores, the gauntlet's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from llmfoundry.gauntlet.models.endpoint import Endpoint
from llmfoundry.gauntlet.questions import GenerationPrompt, Score, ScoreRequest
from llmfoundry.inference.decoder_slots import DecoderSlots
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.models.decoder import Decoder, Root
from tests.hf.random_models import ALIBI, decoder, settings
from tests.inference.serving import EOS, Running, running

N_TOKENS = 257  # bytes, and the end of text
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Random, with ALiBi, and wide enough to give varied answers."""
    return decoder(settings(attn=ALIBI, vocab_size=N_TOKENS, max_seq_len=256)).eval()


@pytest.fixture(scope="module")
def server(model: Decoder) -> Iterator[Running]:
    rows = DecoderSlots(
        Root(model), slots=5, length=256, n_tokens=N_TOKENS, device=CPU, autocast=nullcontext
    )
    with running(SlotEngine(rows, chunk=40)) as found:
        yield found


@torch.no_grad()
def logprobs(model: Decoder, ids: list[int]) -> torch.Tensor:
    """(T, V) of the token after each, by one forward pass over all."""
    return model.head(model(torch.tensor([ids])))[0].double().log_softmax(-1)


def greedy(model: Decoder, ids: list[int], n: int) -> list[int]:
    """The likeliest continuation; nothing is kept from token to token."""
    said: list[int] = []
    while len(said) < n:
        token = int(logprobs(model, [*ids, *said])[-1].argmax())
        if token == EOS:
            break
        said.append(token)
    return said


def prompts(n: int) -> list[list[int]]:
    draw = random.Random(4)
    return [draw.choices(range(256), k=draw.choice([1, 3, 20, 60, 90])) for _ in range(n)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_greedy_answers_of_many_at_once_are_those_of_each_alone(
    model: Decoder, server: Running, stream: bool
) -> None:
    asked = prompts(24)
    sizes = [5 + 7 * (n % 6) for n in range(len(asked))]

    def tokens(n: int) -> list[bytes]:
        body: dict[str, Any] = {"prompt": asked[n], "max_tokens": sizes[n], "temperature": 0}
        body |= {"logprobs": 0}
        if not stream:
            return [*map(raw, server.complete(**body)["choices"][0]["logprobs"]["tokens"])]
        events = server.events("/v1/completions", body)
        return [raw(t) for e in events for t in e["choices"][0]["logprobs"]["tokens"]]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(tokens, range(len(asked))))
    expected = [greedy(model, ids, n) for ids, n in zip(asked, sizes, strict=True)]
    assert [b"".join(said) for said in found] == [bytes(said) for said in expected]
    assert len({bytes(said) for said in expected}) > 12


def raw(token: str) -> bytes:
    """The byte that a token of the tokenizer of bytes is shown as."""
    return bytes.fromhex(token[8:]) if token.startswith("bytes:") else token.encode()


def test_the_same_seed_draws_the_same_answer_in_any_company(server: Running) -> None:
    body = {"prompt": "once", "temperature": 0.9, "seed": 5, "max_tokens": 12, "n": 3}
    alone = [choice["text"] for choice in server.complete(**body)["choices"]]
    with ThreadPoolExecutor(6) as pool:
        crowd = [pool.submit(server.complete, "x" * n, max_tokens=30) for n in range(1, 6)]
        crowded = [choice["text"] for choice in server.complete(**body)["choices"]]
        assert all(future.result() for future in crowd)
    assert crowded == alone and len(set(alone)) == 3
    other = [choice["text"] for choice in server.complete(**body | {"seed": 77})["choices"]]
    assert other != alone


def test_equal_prompts_have_answers_of_their_own(server: Running) -> None:
    fields = {"temperature": 1, "max_tokens": 12}
    texts = [c["text"] for c in server.complete(["once"] * 4, **fields, n=2)["choices"]]
    assert len({*texts}) == 8
    seeded = [c["text"] for c in server.complete("once", **fields, seed=5, n=4)["choices"]]
    listed = server.complete(["once", "then", "once", "once"], **fields, seed=5)["choices"]
    assert [listed[n]["text"] for n in (0, 2, 3)] == seeded[:3]
    assert listed[1]["text"] == server.complete("then", **fields, seed=5)["choices"][0]["text"]


def test_log_probabilities_are_those_of_a_forward_pass(model: Decoder, server: Running) -> None:
    ids = prompts(1)[0] + [10, 200, 30]
    reply = server.complete(ids, echo=True, logprobs=3, max_tokens=2)["choices"][0]["logprobs"]
    drawn = greedy(model, ids, 2)
    rows = logprobs(model, [*ids, *drawn])
    expected = [rows[n, token].item() for n, token in enumerate([*ids, *drawn][1:])]
    assert reply["token_logprobs"][0] is None
    assert reply["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for n, top in enumerate(reply["top_logprobs"][1:]):
        likeliest = rows[n].topk(3).values.tolist()
        assert sorted(top.values())[-3:] == pytest.approx(likeliest[::-1], abs=1e-4)


def test_the_gauntlet_scores_the_server_as_it_scores_the_model(
    model: Decoder, server: Running
) -> None:
    def spell(ids: Any) -> str:
        return bytes(i for i in ids if i != EOS).decode()

    endpoint = Endpoint(f"{server.url}/v1", "m", spell=spell)
    assert endpoint.can_score
    pairs = [("Question: 1 + 1?\nAnswer:", " 2"), ("naïve “quotes” ☃", " çe"), ("a", "b")]
    pairs += [("x =", " 日本語"), ("日", "本"), ("naïve é", "ü"), ("a 😀", " 👩‍👧"), ("…", "“")]
    asked = [(EOS, *context.encode()) for context, _ in pairs]
    wanted = [target.encode() for _, target in pairs]
    requests = [
        ScoreRequest((*ids, *target[:-1]), tuple(target), target.decode())
        for ids, target in zip(asked, wanted, strict=True)
    ]
    for score, ids, target in zip(endpoint.score(requests), asked, wanted, strict=True):
        rows = logprobs(model, [*ids, *target])[len(ids) - 1 : -1]
        own = rows.gather(1, torch.tensor([*target])[:, None])[:, 0]
        assert isinstance(score, Score) and score.n_tokens == len(target)
        assert score.logprob == pytest.approx(own.sum().item(), abs=1e-3)
        assert score.best_logprob == pytest.approx(rows.amax(1).sum().item(), abs=1e-3)
        assert score.greedy == bool((own == rows.amax(1)).all())
    prompt = GenerationPrompt((EOS, *b"once"), "once", ("\n",), 8)
    (said,) = endpoint.generate([prompt])
    text = bytes(greedy(model, [EOS, *b"once"], 8)).decode(errors="replace")
    assert said == text.partition("\n")[0]
