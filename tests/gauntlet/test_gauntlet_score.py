"""Log-probabilities: against one request at a time, whatever the rows, the batch and the ranks."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gauntlet_stand_ins import constant_root, random_root
from torch import Tensor, nn

from llmfoundry.gauntlet.models import own_decoder as score
from llmfoundry.gauntlet.models import tree
from llmfoundry.gauntlet.models.own_decoder import deal, score_requests
from llmfoundry.gauntlet.models.tree import TreeRow, grow
from llmfoundry.gauntlet.questions import Score, ScoreRequest
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.model import ModelConfig

VOCAB = 64
CPU = torch.device("cpu")


def request(tokens: tuple[int, ...], targets: tuple[int, ...]) -> ScoreRequest:
    return ScoreRequest(tokens, targets, "")


def some_requests(n: int = 40, longest: int = 30, seed: int = 0) -> list[ScoreRequest]:
    """Questions of several choices after shared worked examples, and texts that share nothing."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high)))

    shots, requests = text(3, 8), []
    while len(requests) < n:
        question = (0, *(shots if rng.random() < 0.6 else ()), *text(1, 8))
        for _ in range(rng.choice([1, 2, 4])):
            answer = text(1, longest - len(question) + 1)
            whole = (*question, *answer)
            requests.append(request(whole[:-1], whole[len(whole) - len(answer) :]))
        requests.append(request(question, text(1, 1)))  # a letter after the question
    return requests[:n]


def run(root: nn.Module, requests: list[ScoreRequest], **keys: Any) -> list[Score]:
    keys = {"seq_len": 32, "batch_tokens": 256, "autocast": nullcontext, **keys}
    return score_requests(root, requests, eos_id=0, device=CPU, **keys)


def tiny_root(**settings: Any) -> Root:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=VOCAB, max_seq_len=64)
    for name, value in settings.items():
        setattr(config.attn_config, name, value)
        config.learned_pos_emb = False
    config = config.resolve(max_seq_len=64)
    model = Decoder(config)
    model.init_weights(seed=1)
    return Root(model)


def check(found: list[Score], expected: list[Score]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.best_logprob == pytest.approx(b.best_logprob, abs=1e-4)
        assert a.mean_probability == pytest.approx(b.mean_probability, abs=1e-5)
        assert a.least_best == pytest.approx(b.least_best, abs=1e-5)
        assert (a.greedy, a.tied) == (b.greedy, b.tied)


def judged(logprobs: Tensor, targets: tuple[int, ...]) -> Score:
    """By the definition, of logprobs (len(targets), V) in which no two are alike."""
    rows = list(zip(logprobs, targets, strict=True))
    return Score(
        sum(float(row[target]) for row, target in rows),
        all(int(row.argmax()) == target for row, target in rows),
        False,
        sum(float(row.max()) for row, _ in rows),
        sum(float(row[target].exp()) for row, target in rows) / len(rows),
        min(float(row.max().exp()) for row, _ in rows),
    )


def test_scores_equal_one_document_at_a_time_in_float64() -> None:
    root, requests = random_root(VOCAB), some_requests()
    # answers that really are the likeliest tokens, so that greedy is seen to be true
    for start in range(1, 6):
        tokens = [0, start]
        for _ in range(3):
            tokens.append(int(root.logprobs(tokens)[-1].argmax()))
        requests.append(request(tuple(tokens[:-1]), tuple(tokens[-3:])))
    found = run(root, requests)
    assert sum(s.greedy for s in found) >= 5
    check(found, [judged(root.logprobs(r.tokens)[-len(r.targets) :], r.targets) for r in requests])


@pytest.mark.parametrize("kind", ["learned", "alibi", "rope"])
def test_requests_in_a_tree_score_as_if_alone(kind: str) -> None:
    root = tiny_root() if kind == "learned" else tiny_root(**{kind: True})
    requests = some_requests()
    expected = []
    with torch.no_grad():
        for each in requests:
            hidden = root.model(torch.tensor([each.tokens]))
            logprobs = root.model.head(hidden)[0].double().log_softmax(-1)
            expected.append(judged(logprobs[-len(each.targets) :], each.targets))
    check(run(root, requests), expected)


@pytest.mark.parametrize("batch_tokens", [1, 2_000, 64_000])
def test_scores_do_not_depend_on_the_batch(batch_tokens: int) -> None:
    root, requests = tiny_root(rope=True), some_requests(n=400)
    found = run(root, requests, batch_tokens=batch_tokens)
    check(found, run(root, requests, batch_tokens=6_000))


@pytest.mark.parametrize("row_tokens", [64, 200])
def test_scores_do_not_depend_on_where_rows_end(
    row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, requests = tiny_root(rope=True), some_requests(n=100)
    expected = run(root, requests)
    monkeypatch.setattr(tree, "ROW_TOKENS", row_tokens)
    check(run(root, requests), expected)


def on_ranks(
    world_size: int, requests: list[ScoreRequest], **keys: Any
) -> tuple[list[Any], list[Any]]:
    """Roots and scores of processes that are threads here and add what they have by a board."""
    board: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=60)

    def all_reduce(sums: Tensor, group: None) -> None:
        board[int(threading.current_thread().name)] = sums.clone()
        barrier.wait()
        sums.copy_(torch.stack(board).sum(0))
        barrier.wait()

    fake = SimpleNamespace(is_initialized=lambda: True, all_reduce=all_reduce)
    roots = [random_root(VOCAB) for _ in range(world_size)]
    results: list[Any] = [None] * world_size

    def work(rank: int) -> None:
        results[rank] = run(roots[rank], requests, data_rank=rank, data_size=world_size, **keys)

    threads = [threading.Thread(target=work, args=(r,), name=str(r)) for r in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "dist", fake)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return roots, results


@pytest.mark.parametrize("world_size", [2, 4, 30])
def test_every_rank_makes_the_same_calls_and_has_all_scores(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "ROW_TOKENS", 64)
    requests = some_requests(n=80)
    expected = run(random_root(VOCAB), requests)
    roots, results = on_ranks(world_size, requests, batch_tokens=150)
    assert roots[0].shapes and all(root.shapes == roots[0].shapes for root in roots)
    for found in results:
        check(found, expected)


def test_ranks_without_a_row_of_their_own_take_part() -> None:
    requests = some_requests(n=3)
    roots, results = on_ranks(4, requests)
    assert [root.shapes for root in roots] == [[(1, 64)]] * 4
    for found in results:
        check(found, run(random_root(VOCAB), requests))


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_work_is_dealt_evenly_and_little_of_it_is_empty(seed: int, world_size: int) -> None:
    rng = random.Random(seed)
    rows = []
    for start in range(rng.randint(1, 90)):
        width = rng.choice([64, 128, 4096, 4096, 4096])
        rows.append(TreeRow(start, start + 1, width, width, width * rng.randint(1, 100), 9))
    dealt = [list(deal(rows, 10_000, rank, world_size)) for rank in range(world_size)]
    shapes = [[(s.height, s.width, s.chunks) for s in shares] for shares in dealt]
    assert all(each == shapes[0] for each in shapes)
    assert all(height == 1 or height * width <= 10_000 for height, width, _ in shapes[0])
    given = [row for shares in dealt for share in shares for row in share.rows]
    assert sorted(given, key=lambda row: row.start) == rows
    assert all(row.width <= share.width for each in dealt for share in each for row in share.rows)
    computed = world_size * sum(height * width for height, width, _ in shapes[0])
    assert computed < sum(row.width for row in rows) + world_size * 4096
    work = [sum(row.work for share in shares for row in share.rows) for shares in dealt]
    assert max(work) - min(work) <= 4096 * 100


def test_the_head_is_called_equally_often_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ROW_TOKENS", 64)
    requests = some_requests(n=60)
    expected = run(random_root(VOCAB), requests)
    monkeypatch.setattr(score, "HEAD_CHUNK", 7)
    rows = grow(requests, seq_len=32).rows
    chunks = [[share.chunks for share in deal(rows, 200, rank, 3)] for rank in range(3)]
    assert chunks[0] == chunks[1] == chunks[2]
    assert max(chunks[0]) > 1
    check(run(random_root(VOCAB), requests), expected)


def test_a_place_that_many_requests_score_goes_through_the_head_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = random_root(VOCAB)
    seen: list[int] = []
    head = root.model.head

    def counted(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(root.model, "head", counted)
    same = [request((0, 5, 6), (target,)) for target in range(VOCAB)]
    longer = [request((0, 5, 6, 9), (9, target)) for target in range(3)]
    found = run(root, same + longer)
    assert root.shapes == [(1, 64)]
    assert sum(seen) == 2  # after 6, and after 9
    assert sum(torch.tensor([s.logprob for s in found[:VOCAB]]).exp()) == pytest.approx(1, abs=1e-5)
    after = root.logprobs((0, 5, 6, 9))[-2:]
    check(found[VOCAB:], [judged(after, (9, target)) for target in range(3)])


def test_a_likeliest_token_that_is_not_alone_is_a_tie_and_not_greedy() -> None:
    (found,) = run(constant_root(VOCAB), [request((0, 1), (2, 3))])
    assert found.tied
    assert not found.greedy
    assert found.best_logprob == pytest.approx(found.logprob)
    assert found.logprob == pytest.approx(-2 * torch.tensor(float(VOCAB)).log())


def test_a_model_of_nans_scores_nan_and_never_greedy() -> None:
    root = constant_root(VOCAB)
    root.model.head_weight.fill_(float("nan"))
    for found in run(root, some_requests(n=5)):
        assert found.logprob != found.logprob
        assert not found.greedy
        assert not found.tied


def test_the_models_training_flag_is_as_before() -> None:
    root = random_root(VOCAB)
    for flag in (True, False):
        root.train(flag)
        run(root, some_requests(n=2))
        assert root.training is flag


def test_logits_are_fp32_under_autocast_so_that_likeliest_tokens_do_not_tie() -> None:
    root, requests = tiny_root(), [request((0, i), (j,)) for i in range(9) for j in range(VOCAB)]
    exact = run(root, requests)
    found = run(root, requests, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert sum(s.greedy for s in found) == 9
    assert not any(s.tied for s in found)
    for a, b in zip(found, exact, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=0.05)
    assert [s.logprob for s in found] != [s.logprob for s in exact]


def test_a_forest_that_was_grown_before_gives_the_same_scores() -> None:
    root, requests = random_root(VOCAB), some_requests()
    forest = grow(requests, seq_len=32)
    assert run(root, requests, forest=forest) == run(root, requests)
    with pytest.raises(AssertionError, match="other requests"):
        run(root, requests[:3], forest=forest)


def test_no_request_is_no_call() -> None:
    root = random_root(VOCAB)
    assert run(root, []) == []
    assert root.shapes == []
