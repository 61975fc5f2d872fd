"""Log-probabilities: against a slow reference, and whatever the packing."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gauntlet_stand_ins import constant_root, random_root
from torch import nn

from llmfoundry.gauntlet import score
from llmfoundry.gauntlet.prompts import Request
from llmfoundry.gauntlet.score import Score, score_requests
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.model import ModelConfig

VOCAB = 64


def some_requests(n: int = 40, longest: int = 30, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(n):
        text = [rng.randrange(1, VOCAB) for _ in range(rng.randint(2, longest))]
        answer = rng.randint(1, len(text))
        requests.append(Request((0, *text[:-1]), tuple(text[-answer:])))
    return requests


def run(root: nn.Module, requests: list[Request], **keys: Any) -> list[Score]:
    keys = {"seq_len": 32, "batch_rows": 4, "autocast": nullcontext, **keys}
    device = torch.device("cpu")
    return score_requests(root, requests, eos_id=0, device=device, **keys)


def tiny_root() -> Root:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=VOCAB, max_seq_len=64)
    config.fill(max_seq_len=64)
    model = Decoder(config)
    model.init_weights(seed=1)
    return Root(model)


def test_logprobs_and_greediness_equal_one_document_at_a_time_in_float64() -> None:
    root, requests = random_root(VOCAB), some_requests()
    # answers that really are the likeliest tokens, so that greedy is seen to be true
    for start in range(1, 6):
        tokens = [0, start]
        for _ in range(3):
            tokens.append(int(root.logprobs(tokens)[-1].argmax()))
        requests.append(Request(tuple(tokens[:-1]), tuple(tokens[-3:])))
    found = run(root, requests)
    assert sum(s.greedy for s in found) >= 5
    for request, answer in zip(requests, found, strict=True):
        logprobs = root.logprobs(request.tokens)[-len(request.targets) :]
        targets = torch.tensor(request.targets)
        expected = float(logprobs.gather(1, targets[:, None]).sum())
        assert answer.logprob == pytest.approx(expected, abs=1e-4)
        assert answer.greedy == bool((logprobs.argmax(1) == targets).all())
        assert not answer.tied


def test_packed_documents_of_a_decoder_score_as_if_alone() -> None:
    root, requests = tiny_root(), some_requests()
    found = run(root, requests)
    with torch.no_grad():
        for request, answer in zip(requests, found, strict=True):
            hidden = root.model(torch.tensor([request.tokens]))
            logprobs = root.model.head(hidden)[0].double().log_softmax(-1)
            targets = torch.tensor(request.targets)[:, None]
            expected = float(logprobs[-len(targets) :].gather(1, targets).sum())
            assert answer.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("batch_rows", "seq_len"), [(1, 32), (3, 32), (100, 32), (2, 64)])
def test_scores_do_not_depend_on_batch_size_or_row_length(batch_rows: int, seq_len: int) -> None:
    root, requests = tiny_root(), some_requests()
    expected = run(root, requests)
    found = run(root, requests, batch_rows=batch_rows, seq_len=seq_len)
    for a, b in zip(found, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert (a.greedy, a.tied) == (b.greedy, b.tied)


@pytest.mark.parametrize("world_size", [2, 3, 30])
def test_every_rank_makes_the_same_calls_and_has_all_scores(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = some_requests()
    expected = run(random_root(VOCAB), requests)
    board: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=60)

    def gather(parts: list[Any], mine: Any) -> None:
        board[int(threading.current_thread().name)] = mine
        barrier.wait()
        parts[:] = board
        barrier.wait()

    fake = SimpleNamespace(is_initialized=lambda: True, all_gather_object=gather)
    monkeypatch.setattr(score, "dist", fake)
    roots = [random_root(VOCAB) for _ in range(world_size)]
    results: list[Any] = [None] * world_size

    def work(rank: int) -> None:
        results[rank] = run(roots[rank], requests, batch_rows=2, rank=rank, world_size=world_size)

    threads = [threading.Thread(target=work, args=(r,), name=str(r)) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert roots[0].shapes and len(set(roots[0].shapes)) == 1
    assert all(root.shapes == roots[0].shapes for root in roots)
    for found in results:
        for a, b in zip(found, expected, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert (a.greedy, a.tied) == (b.greedy, b.tied)


def test_the_head_is_called_equally_often_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "HEAD_CHUNK", 7)
    requests = some_requests(n=30)
    rows = score.pack(score._documents(requests), 32)
    counts = [
        [call.chunks for call in score._calls(rows, requests, 32, 0, 2, rank, 3)]
        for rank in range(3)
    ]
    assert counts[0] == counts[1] == counts[2]
    assert max(counts[0]) > 1
    expected = run(random_root(VOCAB), requests)
    monkeypatch.setattr(score, "HEAD_CHUNK", 10_000)
    assert [s.greedy for s in run(random_root(VOCAB), requests)] == [s.greedy for s in expected]


def test_little_padding_is_computed_and_equal_inputs_are_computed_once() -> None:
    requests = some_requests(n=300)
    root = random_root(VOCAB)
    run(root, requests, seq_len=128)
    asked = sum(map(len, {r.tokens for r in requests}))
    assert sum(b * t for b, t in root.shapes) < 1.15 * asked + 4 * 128

    same = [Request((0, 5, 6), (target,)) for target in range(VOCAB)]
    root = random_root(VOCAB)
    found = run(root, same)
    assert root.shapes == [(1, 32)]
    assert sum(torch.tensor([s.logprob for s in found]).exp()) == pytest.approx(1, abs=1e-5)


def test_a_likeliest_token_that_is_not_alone_is_a_tie_and_not_greedy() -> None:
    (found,) = run(constant_root(VOCAB), [Request((0, 1), (2, 3))])
    assert found.tied
    assert not found.greedy


def test_the_models_training_flag_is_as_before() -> None:
    root = random_root(VOCAB)
    for flag in (True, False):
        root.train(flag)
        run(root, some_requests(n=2))
        assert root.training is flag


def test_logits_are_fp32_under_autocast_so_that_likeliest_tokens_do_not_tie() -> None:
    root, requests = tiny_root(), [Request((0, i), (j,)) for i in range(9) for j in range(VOCAB)]
    exact = run(root, requests)
    found = run(root, requests, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert sum(s.greedy for s in found) == 9
    assert not any(s.tied for s in found)
    for a, b in zip(found, exact, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=0.05)
    assert [s.logprob for s in found] != [s.logprob for s in exact]
