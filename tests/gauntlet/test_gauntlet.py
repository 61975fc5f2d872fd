"""The whole path: a file of tasks, a model, a result; with the mistakes that a user can make."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet import Gauntlet, check_sources
from llmfoundry.gauntlet.models.own_decoder import OwnModel
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    PromptSettings,
    Score,
    ScoreRequest,
    TaskRow,
)
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.gauntlet.task_rows import part_of, row_order
from llmfoundry.models.decoder import Decoder, Root
from tests.models.test_decoder import make_config

TOKENIZER = Tokenizer(bytes_backend(), END_OF_TEXT)
CHOICES: list[dict[str, Any]] = [
    {"query": f"{i} plus {i} is", "choices": [str(2 * i), str(2 * i + 1), str(i)], "gold": i % 3}
    for i in range(1, 13)
]
SCHEMA = [
    {"context_options": [f"the cat {i}", f"the dog {i}"], "continuation": "purrs", "gold": i % 2}
    for i in range(8)
]
WRITTEN = [{"context": f"say {i}", "continuation": str(i)} for i in range(6)]
GENERATED = [{"context": f"say {i}", "answer": str(i), "aliases": [f"{i}."]} for i in range(5)]
TASKS = {
    "choices": ("multiple_choice", CHOICES, 2),
    "schema": ("schema", SCHEMA, 1),
    "written": ("language_modeling", WRITTEN, 0),
    "generated": ("generation_task_with_answers", GENERATED, 1),
}


@pytest.fixture(scope="module")
def root() -> Root:
    model = Decoder(make_config(vocab_size=257, max_seq_len=128)).eval()
    model.init_weights(3)
    return Root(model)


def subject(root: Root, *, batch_tokens: int = 512) -> OwnModel:
    return OwnModel(
        root,
        TOKENIZER,
        seq_len=128,
        device=torch.device("cpu"),
        batch_tokens=batch_tokens,
        autocast=nullcontext,
    )


def write(
    folder: Path,
    change: Callable[[dict[str, Any]], None] | None = None,
    *,
    shots: int | None = None,
) -> Path:
    """A gauntlet of one task of each type, in two categories."""
    tasks = []
    n_shots = {label: n if shots is None else shots for label, (_, _, n) in TASKS.items()}
    for label, (kind, rows, _) in TASKS.items():
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks.append(
            {
                "label": label,
                "dataset_uri": f"{label}.jsonl",
                "icl_task_type": kind,
                "num_fewshot": [n_shots[label]],
            }
        )
    names = {"choosing": ["choices", "schema"], "writing": ["written", "generated"]}
    categories = [
        {"name": name, "benchmarks": [{"name": n, "num_fewshot": n_shots[n]} for n in members]}
        for name, members in names.items()
    ]
    file = {"icl_tasks": tasks, "eval_gauntlet": {"categories": categories}}
    if change is not None:
        change(file)
    path = folder / "gauntlet.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


def read(path: Path, *, texts: Callable[[], list[str]] | None = None, **asking: Any) -> Gauntlet:
    return Gauntlet(
        path,
        PromptSettings(TOKENIZER, seq_len=128, **asking),
        validation_texts=texts,
        cache_folder=path.parent / "cache",
        say=print,
    )


def slow_choice(root: Root, context: str, choices: list[str]) -> list[float]:
    """Mean log-probability of the tokens of " choice" after the context, one choice at a time."""
    means = []
    for choice in choices:
        before = [TOKENIZER.eos_id, *TOKENIZER.encode(context)]
        answer = TOKENIZER.encode(f" {choice}")
        with torch.no_grad():
            hidden = root.model(torch.tensor([before + answer]))
            logprobs = root.model.head(hidden)[0].double().log_softmax(-1)
        places = range(len(before) - 1, len(before) + len(answer) - 1)
        lps = [logprobs[p, t].item() for p, t in zip(places, answer, strict=True)]
        means.append(sum(lps) / len(lps))
    return means


def test_every_task_type_is_scored_and_averaged(tmp_path: Path, root: Root) -> None:
    result, answers = read(write(tmp_path)).run(subject(root))
    by_label = {task.label: task for task in result.tasks}
    assert [by_label[label].n for label in TASKS] == [12, 8, 6, 5]
    assert by_label["choices"].chance == pytest.approx(1 / 3)
    assert all(task.failure is None for task in result.tasks)
    scores = [
        ((by_label["choices"].accuracy or 0) - 1 / 3) / (2 / 3),
        ((by_label["schema"].accuracy or 0) - 1 / 2) / (1 / 2),
    ]
    assert result.categories["choosing"] == pytest.approx(sum(scores) / 2)
    lines = [json.loads(line) for part in answers for line in part.lines()]
    assert len(lines) == 12 * 3 + 8 * 2 + 6 + 5
    assert {"text", "logprob"} <= set(lines[-1]), "a generated row has its text and its gold score"


def test_zero_shot_choices_are_those_of_a_loop_over_single_texts(
    tmp_path: Path, root: Root
) -> None:
    def zero(file: dict[str, Any]) -> None:
        file["icl_tasks"] = [{**file["icl_tasks"][0], "num_fewshot": [0]}]
        del file["eval_gauntlet"]

    result, answers = read(write(tmp_path, zero)).run(subject(root))
    expected = []
    for row in CHOICES:
        means = slow_choice(root, row["query"], row["choices"])
        expected.append(means.index(max(means)) == row["gold"])
    assert result.tasks[0].accuracy == sum(expected) / len(CHOICES)
    found = {
        q.row.contexts[0]: s for q, s in zip(answers[0].questions, answers[0].scores, strict=True)
    }
    for row in CHOICES:
        means = slow_choice(root, row["query"], row["choices"])
        sums = [score.logprob for score in found[str(row["query"])]]
        lengths = [len(f" {choice}") for choice in row["choices"]]  # type: ignore[attr-defined]
        assert sums == pytest.approx([m * n for m, n in zip(means, lengths, strict=True)], abs=1e-4)


def test_scores_depend_on_neither_the_batch_nor_the_cache(tmp_path: Path, root: Root) -> None:
    path = write(tmp_path)
    lines = []
    for batch_tokens in (64, 64, 8192):  # the second reads the prompts that the first has kept
        _, answers = read(path).run(subject(root, batch_tokens=batch_tokens))
        lines.append([json.loads(line) for part in answers for line in part.lines()])
    assert lines[0] == lines[1], "to the last digit"
    for a, b in zip(lines[0], lines[2], strict=True):
        for name in ("logprob", "best_logprob"):
            assert a.pop(name) == pytest.approx(b.pop(name), abs=1e-4)
        assert a == b


def test_a_model_that_outputs_nan_fails_each_task_by_name(tmp_path: Path) -> None:
    model = Decoder(make_config(vocab_size=257, max_seq_len=128)).eval()
    model.init_weights(3)
    with torch.no_grad():
        model.wte.weight.fill_(math.nan)
    result, _ = read(write(tmp_path)).run(subject(Root(model)))
    assert [task.accuracy for task in result.tasks] == [None] * 4
    assert result.average is None and set(result.categories.values()) == {None}
    for label in TASKS:
        assert any(p.startswith(f"{label}/") and "failed" in p for p in result.problems), label


def test_missing_rows_are_a_mistake_unless_they_are_allowed(tmp_path: Path, root: Root) -> None:
    def lose(file: dict[str, Any]) -> None:
        file["icl_tasks"][1]["dataset_uri"] = "nowhere.jsonl"

    path = write(tmp_path, lose)
    with pytest.raises(UserError, match=r"schema: dataset_uri: nothing at nowhere\.jsonl"):
        read(path)
    gauntlet = read(path, allow_missing=True)
    assert any("nowhere.jsonl" in problem for problem in gauntlet.problems)
    result, _ = gauntlet.run(subject(root))
    assert result.categories["choosing"] is None and result.average is None
    assert result.categories["writing"] is not None
    assert any("schema/1-shot" in p and "n/a" in p for p in result.problems)
    assert any("nowhere.jsonl" in p for p in result.to_json()["problems"])


@pytest.mark.parametrize("texts", [None, lambda: ["one document only\n" * 100]])
def test_a_task_that_held_out_text_cannot_feed_is_left_out_and_the_others_are_asked(
    tmp_path: Path, root: Root, texts: Callable[[], list[str]] | None
) -> None:
    def hold_out(file: dict[str, Any]) -> None:
        task = file["icl_tasks"][0]
        task |= {"dataset_uri": "heldout://continuations", "num_fewshot": [0]}
        file["eval_gauntlet"]["categories"][0]["benchmarks"][0]["num_fewshot"] = 0

    gauntlet = read(write(tmp_path, hold_out), texts=texts)
    (line,) = gauntlet.problems
    assert line.startswith("icl_tasks: choices: left out: its questions ")
    result, _ = gauntlet.run(subject(root))
    assert [task.label for task in result.tasks] == ["schema", "written", "generated"]
    assert all(task.accuracy is not None for task in result.tasks)
    assert result.average is None and line in result.problems


def test_rows_that_are_not_here_are_reported_before_anything_is_prepared(tmp_path: Path) -> None:
    def lose(file: dict[str, Any]) -> None:
        file["icl_tasks"][1]["dataset_uri"] = "nowhere.jsonl"
        file["icl_tasks"][2]["dataset_uri"] = "gone/*.jsonl"

    path = write(tmp_path, lose)
    with pytest.raises(UserError) as caught:
        check_sources(path, allow_missing=False)
    first, second = caught.value.problems
    assert "schema: dataset_uri: nothing at nowhere.jsonl" in first
    assert "written: dataset_uri: nothing at gone/*.jsonl" in second
    check_sources(path, allow_missing=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "'gold' is 2; write an index from 0"),
        ('{"query": "a", "gold": 0}', "has no field 'choices'"),
        ("{", "is not JSON"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path)
    with (tmp_path / "choices.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError) as caught:
        read(path)
    assert "choices.jsonl:13" in str(caught.value) and reason in str(caught.value)


def test_a_row_that_cannot_be_scored_is_named_and_the_rest_is_scored(
    tmp_path: Path, root: Root
) -> None:
    long = {"query": "a", "choices": ["b" * 200, "c", "d"], "gold": 1}
    endless = {"context": "a", "answer": "b" * 200}

    def result(name: str, more: list[dict[str, Any]]) -> tuple[GauntletResult, list[str]]:
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, shots=0)
        for label, row in zip(("choices", "generated"), more, strict=False):
            with (path.parent / f"{label}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        gauntlet = read(path, generate=False)
        found, answers = gauntlet.run(subject(root))
        again, _ = read(path, generate=False).run(subject(root))  # from the cache
        assert again.tasks == found.tasks
        lines = [line for answer in answers for line in answer.lines() if '"missing"' in line]
        assert all(p in gauntlet.problems for p in found.problems if "missing" in p)
        return found, lines

    whole, none = result("whole", [])
    found, lines = result("long", [long, endless])
    assert found.metrics() == whole.metrics() and not none
    by_label = {task.label: task for task in found.tasks}
    assert (by_label["choices"].n, by_label["choices"].missing) == (12, 1)
    assert [json.loads(line)["row"].rsplit("/", 1)[1] for line in lines] == [
        "choices.jsonl:13",
        "generated.jsonl:6",
    ]
    (said,) = (p for p in found.problems if p.startswith("choices/0-shot"))
    assert said.startswith(
        "choices/0-shot: 1 of 13 rows cannot be scored, and are missing from its score, choosing,"
        " default_average: an answer has 201 tokens, but max_seq_len leaves 128;"
    )
    assert said.endswith("choices.jsonl:13)")
    assert "1 not scored" in found.table()


def test_a_task_without_a_row_that_can_be_scored_fails_by_name(tmp_path: Path, root: Root) -> None:
    path = write(tmp_path, shots=0)
    rows = [{"query": "a", "choices": ["b" * 200, "c"], "gold": 1}] * 2
    (tmp_path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = read(path, generate=False).run(subject(root))
    failures = {task.label: task.failure or "" for task in found.tasks}
    assert failures.pop("choices").startswith("no row can be scored: an answer has 201 tokens")
    assert not any(failures.values())


def test_prompts_longer_than_the_window_lose_examples_first(tmp_path: Path, root: Root) -> None:
    def many(file: dict[str, Any]) -> None:
        file["icl_tasks"] = [{**file["icl_tasks"][0], "num_fewshot": [9]}]
        del file["eval_gauntlet"]

    result, answers = read(write(tmp_path, many)).run(subject(root))
    task = result.tasks[0]
    assert task.dropped > 0 and task.truncated == 0
    assert "examples dropped" in result.table()
    assert all(len(r.tokens) <= 128 for q in answers[0].questions for r in q.requests)


def test_answers_are_written_or_only_scored(tmp_path: Path, root: Root) -> None:
    path = write(tmp_path)
    written, scored = (
        read(path, generate=on).run(subject(root))[0].tasks[3] for on in (True, False)
    )
    assert written.metric == "InContextLearningGenerationExactMatchAccuracy"
    assert scored.metric == "TeacherForcedGreedyAccuracy"


def test_a_model_that_cannot_score_writes_though_answers_were_only_to_be_scored(
    tmp_path: Path,
) -> None:
    class Writer:
        can_score, tokens_computed = False, 0

        def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
            raise AssertionError

        def generate(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
            return [prompt.text.split()[-1] for prompt in prompts]

    def only(file: dict[str, Any]) -> None:
        file["icl_tasks"] = [file["icl_tasks"][3]]
        del file["eval_gauntlet"]

    gauntlet = read(write(tmp_path, only), generate=False, can_score=False)
    (task,) = gauntlet.run(Writer())[0].tasks
    assert (task.metric, task.accuracy) == ("InContextLearningGenerationExactMatchAccuracy", 1.0)


def test_a_share_asks_the_same_rows_each_time_and_fewer(tmp_path: Path, root: Root) -> None:
    gauntlet, own = read(write(tmp_path)), subject(root)
    whole, half, quarter = (gauntlet.run(own, share=share)[1] for share in (1.0, 0.5, 0.25))
    for w, h, q in zip(whole, half, quarter, strict=True):
        places = [[question.row.place for question in part.questions] for part in (w, h, q)]
        assert places[0][: len(places[1])] == places[1] and places[1][: len(places[2])] == places[2]
        assert len(places[1]) == part_of(len(places[0]), 0.5)
    again = gauntlet.run(own, share=0.5)[1]
    assert [list(a.lines()) for a in again] == [list(b.lines()) for b in half]


def test_a_limit_takes_each_category_by_its_share() -> None:
    rows = [TaskRow((f"{i}",), ("a", "b"), 0, f"f:{i}", category="big") for i in range(90)]
    rows += [TaskRow((f"{i} s",), ("a", "b"), 0, f"g:{i}", category="small") for i in range(10)]
    for n in (10, 20, 50):
        chosen = [rows[i].category for i in row_order(rows)[:n]]
        assert abs(chosen.count("small") - n / 10) <= 1
    order = row_order(rows)
    assert sorted(order) == list(range(100))
    backwards = row_order(rows[::-1])
    assert [rows[i] for i in order] == [rows[::-1][i] for i in backwards], (
        "the file's order is no matter"
    )


def test_a_limit_is_a_subset_that_says_how_large_the_task_is(tmp_path: Path, root: Root) -> None:
    path = write(tmp_path)
    few, _ = read(path, rows=3).run(subject(root))
    assert [(task.n, task.rows_total) for task in few.tasks] == [(3, 12), (3, 8), (3, 6), (3, 5)]
    assert "3/12" in few.table()
