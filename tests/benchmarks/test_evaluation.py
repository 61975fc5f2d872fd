"""The benchmark of evaluators: what is asked has the tasks' shapes, and the answers agree."""

from __future__ import annotations

import pytest

from benchmarks import evaluation as evaluators
from benchmarks.evaluation import EOS, HARNESS, OURS, PADDED, SHAPES, VOCAB, Ran, requests, table
from llmfoundry.gauntlet.models.tree import grow


def test_requests_have_the_shapes_of_the_tasks_and_share_what_worked_examples_share() -> None:
    fixed, drawn = requests(90, fixed=True), requests(90, fixed=False)
    options = sum(shape.choices for shape in SHAPES.values())
    assert len(fixed) == len(drawn) == 10 * options
    assert fixed == requests(90, fixed=True)
    assert all(r.tokens[0] == EOS and max(r.tokens) < VOCAB for r in fixed + drawn)
    assert [r.targets for r in fixed] == [r.targets for r in drawn]
    computed = [grow(asked, seq_len=2048).tokens_computed for asked in (fixed, drawn)]
    assert computed[0] < 0.85 * computed[1]
    assert computed[1] < 0.6 * sum(len(r.tokens) for r in drawn)


def test_padded_rows_score_as_ours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 512}
    monkeypatch.setattr(evaluators, "MODEL", evaluators.MODEL | small)
    monkeypatch.setattr(evaluators, "SEQ", 512)
    model, asked = evaluators._model(), requests(54, fixed=True)
    ours, padded = evaluators._ours(model, asked), evaluators._padded(model, asked)
    assert len(ours.logprobs) == len(asked)
    assert len(padded.logprobs) == 20
    for i, logprob in padded.logprobs.items():
        assert ours.logprobs[i] == pytest.approx(logprob, abs=1e-4)
    assert padded.tokens == 512 * len(asked)
    assert ours.tokens < padded.tokens / 10


def test_the_table_compares_times_tokens_and_scores() -> None:
    done = {
        OURS: Ran(1_000, 2.0, {0: -1.0, 1: -2.0}),
        HARNESS: Ran(3_000, 6.0, {0: -1.0, 1: -2.5}),
        PADDED: Ran(50_000, 100.0, {1: -2.0}),
    }
    lines = [
        line.removeprefix(name).split()
        for name, line in zip(done, table(done, 10)[1:], strict=True)
    ]
    assert lines[0] == ["1,000", "2.0", "5.0", "3.00", "50.0", "0.0e+00"]
    assert lines[1] == ["3,000", "6.0", "1.7", "1.00", "16.7", "5.0e-01"]
    assert lines[2] == ["50,000", "100.0", "0.1", "0.06", "1.0", "0.0e+00"]
    del done[HARNESS]
    assert table(done, 10)[1].split()[4] == "n/a"
