"""Concurrent requests against one at a time, formulas, and slots that come and go."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmfoundry.errors import UserError
from llmfoundry.inference import engine as engine_module
from llmfoundry.inference.decoder_slots import DecoderSlots, stream_tokens
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.requests import Sampler, Sampling, SequenceRequest, TokenOutput
from llmfoundry.models import kv_cache
from llmfoundry.models.decoder import Root
from tests.gauntlet.test_generation import KINDS, model
from tests.selection import slow_but

CPU = torch.device("cpu")
TOKENS = 60  # of the embedding's rows
EOS = 0


def engine_of(
    root: Root, *, slots: int = 4, length: int = 64, chunk: int = 512, **options: Any
) -> SlotEngine:
    rows = DecoderSlots(
        root, slots=slots, length=length, n_tokens=TOKENS, device=CPU, autocast=nullcontext
    )
    return SlotEngine(rows, chunk=chunk, **options)


def run(engine: SlotEngine, requests: Sequence[SequenceRequest]) -> list[list[TokenOutput]]:
    """All news of each request."""
    news: dict[int, list[TokenOutput]] = {engine.add(request): [] for request in requests}
    while engine.busy:
        for one in engine.step():
            news[one.request].append(one)
    return list(news.values())


def tokens_of(news: Sequence[TokenOutput]) -> list[int]:
    return [one.token for one in news if one.token is not None]


def alone(root: Root, request: SequenceRequest) -> list[int]:
    """What `stream_tokens` draws, which computes the whole row anew for every token."""
    given: dict[str, Any] = {"device": CPU, "autocast": nullcontext, "n_tokens": TOKENS}
    return list(stream_tokens(root, request, **given))


def mixed_requests(count: int = 20, *, seed: int = 1) -> list[SequenceRequest]:
    """Prompts of 1 to 40 tokens, half of which begin alike, greedy and drawn."""
    draw = random.Random(seed)
    beginning = [draw.randrange(1, TOKENS) for _ in range(24)]
    requests = []
    for i in range(count):
        prompt = [draw.randrange(1, TOKENS) for _ in range(draw.randint(1, 40))]
        if i % 2:
            prompt = beginning + prompt[:15]
        how = Sampling() if i % 3 else Sampling(temperature=1.0, top_p=0.9, seed=i)
        requests.append(SequenceRequest(tuple(prompt), draw.randint(1, 20), how, frozenset({EOS})))
    return requests


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize(
    "name", slow_but(["alibi-gqa-window", "temperature", "overrides-chain"], KINDS)
)
def test_answers_are_those_of_one_request_at_a_time(name: str, chunk: int) -> None:
    root, requests = model(name).eval(), mixed_requests()
    expected = [alone(root, request) for request in requests]
    assert len({token for tokens in expected for token in tokens}) > 15
    found = run(engine_of(root, chunk=chunk), requests)
    assert [tokens_of(news) for news in found] == expected


def test_beyond_the_length_that_dynamic_angles_know_prompts_are_read_in_one_piece() -> None:
    root = model("rope-dynamic").eval()  # knows 6 tokens
    requests = mixed_requests()
    singly = [run(engine_of(root, slots=1), [request])[0] for request in requests]
    firsts = [alone(root, replace(request, max_new_tokens=1)) for request in requests]
    assert [tokens_of(news)[:1] for news in singly] == firsts
    found = run(engine_of(root, chunk=7), requests)
    assert [tokens_of(news) for news in found] == [tokens_of(news) for news in singly]


def test_requests_that_arrive_and_are_cancelled_meanwhile_change_no_answer() -> None:
    root, requests = model("alibi").eval(), mixed_requests(40)
    expected = [alone(root, request) for request in requests]
    engine, draw = engine_of(root, slots=5, chunk=16), random.Random(3)
    waiting = list(enumerate(requests))
    numbers: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    ended, cancelled = set[int](), set[int]()
    while waiting or engine.busy:
        for _ in range(min(draw.randint(0, 3), len(waiting))):
            i, request = waiting.pop(0)
            numbers[engine.add(request)] = i
        for one in engine.step():
            assert numbers[one.request] not in cancelled | ended
            found.setdefault(numbers[one.request], []).extend(tokens_of([one]))
            if one.finish is not None:
                ended.add(numbers[one.request])
        assert engine.running <= 5
        going = [number for number, i in numbers.items() if i not in cancelled | ended]
        if going and draw.random() < 0.2:
            number = draw.choice(going)
            before = engine.running + engine.waiting
            engine.cancel(number)
            assert engine.running + engine.waiting == before - 1
            cancelled.add(numbers[number])
    assert len(cancelled) > 5 and ended | cancelled == set(range(40))
    assert all(found[i] == expected[i] for i in ended)
    for i in cancelled & found.keys():
        assert found[i] == expected[i][: len(found[i])]


def shapes(root: Root, work: Callable[[], object]) -> list[int]:
    """Tokens of each forward pass."""
    seen: list[int] = []
    handle = root.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    work()
    handle.remove()
    return seen


def test_a_step_is_one_pass_over_the_new_tokens_of_all() -> None:
    root = model("rope").eval()
    requests = [SequenceRequest((7, 8, i), 4, Sampling()) for i in range(1, 4)]
    engine = engine_of(root, slots=2)
    assert shapes(root, lambda: run(engine, requests)) == [6, 2, 2, 2, 3, 1, 1, 1]


def test_a_slot_that_is_free_is_taken_in_the_next_step() -> None:
    root = model("rope").eval()
    engine = engine_of(root, slots=2)
    first, second, third = (engine.add(SequenceRequest((5, 6), 30)) for _ in range(3))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    engine.cancel(first)
    assert (engine.running, engine.waiting) == (1, 1)
    assert {one.request for one in engine.step()} == {second, third}
    engine.cancel(first)
    engine.cancel(99)
    assert engine.running == 2


def test_a_beginning_is_read_once_however_many_share_it() -> None:
    root, draw = model("rope").eval(), random.Random(2)
    shots = tuple(draw.randrange(1, TOKENS) for _ in range(40))
    requests = [SequenceRequest((*shots, i, i + 1), 3, Sampling()) for i in range(1, 13)]
    expected = [alone(root, request) for request in requests]
    engine = engine_of(root, slots=4)
    found: list[list[TokenOutput]] = []
    passes = shapes(root, lambda: found.extend(run(engine, requests)))
    assert sum(passes) == 42 + 11 * 2 + 12 * 2
    assert [tokens_of(news) for news in found] == expected


def test_short_requests_do_not_wait_for_a_long_prompt_to_be_read() -> None:
    root = model("rope").eval()
    engine = engine_of(root, slots=2, chunk=4)
    quick = engine.add(SequenceRequest((3,), 12))
    engine.step()
    engine.add(SequenceRequest(tuple(range(1, 41)), 1))
    for _ in range(9):
        assert [one.request for one in engine.step()] == [quick]


def whole_logprobs(root: Root, tokens: Sequence[int]) -> torch.Tensor:
    """(T, V) of a row on its own."""
    with torch.no_grad():
        hidden = root.model(torch.tensor([list(tokens)]))
        return root.model.head(hidden)[0, :, :TOKENS].log_softmax(-1)


@pytest.mark.parametrize("chunk", [512, 5])
def test_log_probabilities_are_the_models_own(chunk: int) -> None:
    root = model("learned").eval()
    how = Sampling(temperature=0.7, top_k=3, frequency_penalty=1.0, seed=4)
    requests = [
        replace(request, sampling=how, logprobs=i % 4, prompt_logprobs=i % 3 == 0)
        for i, request in enumerate(mixed_requests(12))
    ]
    for request, news in zip(requests, run(engine_of(root, chunk=chunk), requests), strict=True):
        drawn, n = tokens_of(news), len(request.prompt)
        whole = whole_logprobs(root, [*request.prompt, *drawn])
        for place, one in enumerate(news, start=n - 1):
            if one.token is None:
                continue
            assert one.logprob == pytest.approx(float(whole[place, one.token]), abs=1e-4)
            best = whole[place].topk(request.logprobs or 0)
            assert [i for i, _ in one.top] == best.indices.tolist()
            assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(one.prompt_logprobs is None for one in news[1:])
        judged = news[0].prompt_logprobs
        assert (judged is not None) == request.prompt_logprobs
        if judged is None:
            continue
        assert [each.token for each in judged] == list(request.prompt)
        assert judged[0].logprob is None
        for place, each in enumerate(judged[1:]):
            assert each.logprob == pytest.approx(float(whole[place, each.token]), abs=1e-4)
            assert len(each.top) == request.logprobs


def test_a_prompt_is_judged_without_an_answer() -> None:
    request = SequenceRequest((4, 5, 6), 0, logprobs=0, prompt_logprobs=True)
    (news,) = run(engine_of(model("rope").eval()), [request])
    assert [(one.token, one.finish) for one in news] == [(None, "length")]
    assert news[0].prompt_logprobs is not None and len(news[0].prompt_logprobs) == 3


def by_the_formula(logits: Sequence[float], how: Sampling, draws: int) -> Iterator[int]:
    """Greedy tokens under OpenAI's penalties, in plain Python, the same logits every time.

    mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
    """
    counts: Counter[int] = Counter()
    for _ in range(draws):
        penalized = [
            mu - counts[j] * how.frequency_penalty - float(counts[j] > 0) * how.presence_penalty
            for j, mu in enumerate(logits)
        ]
        best = max(range(len(logits)), key=lambda j: penalized[j])
        counts[best] += 1
        yield best


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 1.0), (0.3, 0.4), (-2.0, 0)])
def test_penalties_are_those_that_openai_defines(frequency: float, presence: float) -> None:
    logits = [3.0, 2.9, 2.45, 1.0, -1.0]
    how = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    sampler, found = Sampler(how), []
    for _ in range(12):
        found.append(sampler.draw(torch.tensor(logits)))
        sampler.count(found[-1])
    assert found == list(by_the_formula(logits, how, 12))
    assert len(set(found)) > 1 or frequency < 0


def test_the_end_of_an_answer_says_why() -> None:
    root, prompt = model("rope").eval(), (3, 4, 5)
    (whole,) = run(engine_of(root), [SequenceRequest(prompt, 9)])
    assert [one.finish for one in whole] == [None] * 8 + ["length"]
    tokens = tokens_of(whole)
    end = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    (cut,) = run(engine_of(root), [SequenceRequest(prompt, 9, stop_ids=frozenset({tokens[end]}))])
    assert tokens_of(cut) == tokens[:end]
    assert (cut[-1].token, cut[-1].finish) == (None, "stop")


def test_a_request_of_broken_numbers_ends_alone() -> None:
    """Token 9 makes its own sequence not a number; its slot is used again."""
    root = model("rope").eval()
    healthy = [SequenceRequest((3, i), 8, Sampling()) for i in range(10, 18)]
    expected = [alone(root, request) for request in healthy]
    assert all(9 not in tokens for tokens in expected)
    with torch.no_grad():
        root.model.wte.weight[9] = math.nan
    broken = SequenceRequest((*range(20, 40), 9, 5), 8)
    found = run(engine_of(root, slots=3), [healthy[0], broken, *healthy[1:]])
    assert [(one.token, one.finish) for one in found.pop(1)] == [(None, "error")]
    assert [tokens_of(news) for news in found] == expected


def test_broken_numbers_of_a_prompt_that_was_read_in_part_stay_nowhere() -> None:
    root = model("rope").eval()
    healthy = [SequenceRequest((3, i), 12, Sampling()) for i in range(10, 18)]
    long = SequenceRequest((*range(10, 50), 3), 12, Sampling())
    expected = [alone(root, request) for request in (*healthy, long)]
    assert all(9 not in tokens for tokens in expected)
    with torch.no_grad():
        root.model.wte.weight[9] = math.nan
    engine = engine_of(root, slots=4, chunk=3)
    news: dict[int, list[TokenOutput]] = {engine.add(long): []}
    while not any(news.values()):
        news = {number: engine.step() for number in news}
    broken = [engine.add(SequenceRequest((8, 9, *range(20, 50)), 8)) for _ in range(3)]
    for number in broken:  # each leaves in the middle of its prompt
        engine.step()
        engine.step()
        engine.cancel(number)
    numbers = [engine.add(request) for request in healthy]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for one in engine.step():
            assert one.finish != "error"
            if one.request in found:
                found[one.request] += tokens_of([one])
    assert [*found.values()] == expected[:-1]


def test_slots_that_the_host_has_no_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_host_memory", lambda: 2**20)
    engine_of(model("rope"), length=64)
    with pytest.raises(MemoryError, match=r"tried to allocate [\d.]+ GiB"):
        engine_of(model("rope"), length=64_000)


def test_minus_infinity_is_a_token_that_is_never_drawn() -> None:
    root = model("rope").eval()
    (likeliest,) = alone(root, SequenceRequest((1, 2, 3), 1))
    head = root.model.head

    def masked(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[..., likeliest] = -math.inf
        return logits

    root.model.head = masked  # type: ignore[method-assign]
    (news,) = run(engine_of(root), [SequenceRequest((1, 2, 3), 1, logprobs=TOKENS)])
    assert news[0].finish == "length" and news[0].token != likeliest
    assert dict(news[0].top)[likeliest] == -math.inf


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt": ()}, "prompt: is empty"),
        ({"prompt": (1, TOKENS)}, "prompt: has token 60; ids go from 0 to 59"),
        ({"prompt": (-1,)}, "prompt: has token -1"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1; write 0 or more"),
        ({"max_new_tokens": 63}, "63 after a prompt of 3 tokens, but 64 fit; write at most 62"),
        ({"prompt": (1,) * 70}, "prompt: has 70 tokens; write at most 64"),
        ({"logprobs": -1}, "logprobs: -1"),
        ({"prompt_logprobs": True}, "logprobs: is not set"),
        ({"sampling": Sampling(temperature=-1)}, "temperature: -1; write 0 or more"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature: nan"),
        ({"sampling": Sampling(top_p=0)}, "top_p: 0; write more than 0"),
        ({"sampling": Sampling(top_k=0)}, "top_k: 0"),
        ({"sampling": Sampling(presence_penalty=math.inf)}, "presence_penalty: inf"),
        ({"sampling": Sampling(seed=2**64)}, "seed: 18446744073709551616"),
    ],
)
def test_what_can_never_run_is_refused(change: dict[str, Any], problem: str) -> None:
    engine = engine_of(model("rope").eval())
    with pytest.raises(UserError, match=problem):
        engine.add(replace(SequenceRequest((1, 2, 3), 5), **change))
    assert not engine.busy


def test_a_full_slot_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SHARED", 1)
    root = model("alibi").eval()
    requests = [SequenceRequest((1, 2, 3), 62), SequenceRequest((*range(1, 60), *range(1, 6)), 1)]
    found = run(engine_of(root), [*requests, *requests])
    expected = [alone(root, request) for request in requests]
    assert [tokens_of(news) for news in found] == [*expected, *expected]
