"""Concurrent requests on transformers' own classes, against each text read anew and `generate`."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmfoundry.inference.decoder_slots import DecoderSlots
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.hugging_face_slots import WAYS, HuggingFaceSlots
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.models.decoder import Root
from tests.gauntlet.hugging_face_models import (
    _CONFIGS,
    N_TOKENS,
    SEQ_LEN,
    plain_continuation,
    random_model,
)
from tests.inference.test_engine import run, tokens_of
from tests.models.test_hf_causal_lm import held, save_class
from tests.selection import slow_but

KINDS = {
    "llama": "together",
    "mistral": "together",  # windows of 40
    "gemma2": "together",  # some layers with windows of 24
    "gpt2": "together",
    "gpt_neox": "together",
    "gpt_neo": "together",
    "mpt": "together",  # ALiBi, which transformers' continuous batching computes wrongly
    "bloom": "together",
    "mamba": "apart",
}


def engine_of(model: Any, *, slots: int = 4, **options: Any) -> SlotEngine:
    return SlotEngine(HuggingFaceSlots(model, slots=slots, length=SEQ_LEN, **options))


def mixed_requests(count: int = 10) -> list[SequenceRequest]:
    """Prompts of 1 to 70 tokens and answers of 1 to 25."""
    draw = random.Random(1)
    requests = []
    for i in range(count):
        prompt = tuple(draw.randrange(1, N_TOKENS - 2) for _ in range((1, 5, 30, 70)[i % 4]))
        requests.append(SequenceRequest(prompt, draw.randint(1, 25), stop_ids=frozenset({0})))
    return requests


@pytest.mark.parametrize("kind", slow_but(["gpt_neox", "gpt_neo", "bloom"], KINDS))
def test_answers_are_those_of_each_text_read_anew(kind: str) -> None:
    model, requests = random_model(kind), mixed_requests()
    rows = HuggingFaceSlots(model, slots=4, length=SEQ_LEN)
    assert rows.way == KINDS[kind]
    found = run(SlotEngine(rows), requests)
    for request, news in zip(requests, found, strict=True):
        expected = plain_continuation(model, request.prompt, request.max_new_tokens, {0})
        assert tokens_of(news) == expected


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_what_generate_gives(way: str) -> None:
    model, requests = random_model("llama"), mixed_requests(6)
    model.generation_config.eos_token_id = 0
    found = run(engine_of(model, way=way), requests)
    for request, news in zip(requests, found, strict=True):
        prompt = torch.tensor([request.prompt])
        row = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            pad_token_id=0,
        )
        assert tokens_of(news) == [t for t in row[0, prompt.shape[1] :].tolist() if t]


def test_a_class_that_ignores_its_mask_is_not_given_padded_rows() -> None:
    model = random_model("llama")
    forward = model.model.forward

    def ignoring(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.model.forward = ignoring
    requests = mixed_requests(4)
    rows = HuggingFaceSlots(model, slots=4, length=SEQ_LEN)
    assert rows.way == "apart"
    for request, news in zip(requests, run(SlotEngine(rows), requests), strict=True):
        expected = plain_continuation(model, request.prompt, request.max_new_tokens, {0})
        assert tokens_of(news) == expected


def test_angles_of_long_texts_change_no_other_answer() -> None:
    """LongRoPE turns all of a text by other angles once it, or one in its pass, is long."""
    model = random_model("phi3")
    rows, requests = HuggingFaceSlots(model, slots=4, length=SEQ_LEN), mixed_requests(8)
    assert rows.way == "apart"
    for request, news in zip(requests, run(SlotEngine(rows), requests), strict=True):
        expected = plain_continuation(model, request.prompt, request.max_new_tokens, {0})
        assert tokens_of(news) == expected


def test_cancelled_requests_and_slots_that_are_used_again_change_no_answer() -> None:
    model, requests = random_model("mpt"), mixed_requests(14)
    engine, draw = engine_of(model, slots=3), random.Random(5)
    numbers = {engine.add(request): i for i, request in enumerate(requests)}
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    cancelled: set[int] = set()
    while engine.busy:
        for one in engine.step():
            found.setdefault(one.request, []).extend(tokens_of([one]))
            ended |= {one.request} if one.finish else set()
        if draw.random() < 0.15:
            number = draw.choice(list(numbers))
            engine.cancel(number)
            cancelled |= {number} - ended
    assert len(cancelled) > 2 and ended | cancelled == numbers.keys()
    for number in ended:
        request = requests[numbers[number]]
        expected = plain_continuation(model, request.prompt, request.max_new_tokens, {0})
        assert found[number] == expected


def test_log_probabilities_are_the_classes_own() -> None:
    model = random_model("gpt2")
    how = Sampling(temperature=1.0, seed=3)
    requests = [SequenceRequest(r.prompt, 5, how, frozenset(), 2, True) for r in mixed_requests(6)]
    for request, news in zip(requests, run(engine_of(model), requests), strict=True):
        drawn, n = tokens_of(news), len(request.prompt)
        with torch.no_grad():
            ids = torch.tensor([[*request.prompt, *drawn]])
            whole = model(ids, use_cache=False).logits[0].log_softmax(-1)
        for place, one in enumerate(news, start=n - 1):
            assert one.token is not None
            assert one.logprob == pytest.approx(float(whole[place, one.token]), abs=1e-4)
            assert [i for i, _ in one.top] == whole[place].topk(2).indices.tolist()
        judged = news[0].prompt_logprobs
        assert judged is not None
        for place, each in enumerate(judged[1:]):
            assert each.logprob == pytest.approx(float(whole[place, each.token]), abs=1e-4)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


def test_rows_whose_angles_depend_on_how_long_the_longest_is_are_read_apart() -> None:
    config = transformers.LlamaConfig(
        **{**_CONFIGS["llama"], "vocab_size": N_TOKENS}, rope_parameters=LONG, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    short = [SequenceRequest((i, i + 1, i + 2), 8) for i in range(5, 9)]  # never more than 12
    requests = [*short, *(r for r in mixed_requests(12) if len(r.prompt) > 12)]
    rows = HuggingFaceSlots(model, slots=4, length=SEQ_LEN)
    assert rows.way == "apart"
    for request, news in zip(requests, run(SlotEngine(rows), requests), strict=True):
        ends = set(request.stop_ids)
        expected = plain_continuation(model, request.prompt, request.max_new_tokens, ends)
        assert tokens_of(news) == expected


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {}),
        ("mamba", {}),
        ("llama", {"rope_parameters": LONG}),
    ],
)
def test_a_class_that_is_trained_writes_what_it_writes_alone(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As samples while training ask it: through the Root, without a cache."""
    theirs, root = save_class(kind, tmp_path, **changes), Root(held(tmp_path))
    requests = [
        replace(request, prompt=tuple(t % 100 for t in request.prompt[:30]), stop_ids=frozenset())
        for request in mixed_requests(8)
    ]
    rows = DecoderSlots(
        root, slots=3, length=60, n_tokens=None, device=torch.device("cpu"), autocast=nullcontext
    )
    for request, news in zip(requests, run(SlotEngine(rows), requests), strict=True):
        expected = plain_continuation(theirs, request.prompt, request.max_new_tokens, set())
        assert tokens_of(news) == expected
