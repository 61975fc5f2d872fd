"""Answers to generated rows, and the files that an evaluation writes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmfoundry.gauntlet.aggregate import combine_tasks, grade
from llmfoundry.gauntlet.gauntlet import TaskAnswers
from llmfoundry.gauntlet.gauntlet_file import EvalGauntlet
from llmfoundry.gauntlet.questions import (
    Question,
    Refusal,
    Score,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.results import TaskResult

REQUESTS = (ScoreRequest((1, 2), (2,), "a"), ScoreRequest((1, 3), (3,), "b"))
Rights = Sequence[bool | None]


def answered(label: str, rights: Rights, categories: Sequence[str] = ()) -> TaskAnswers:
    """Answers to generated rows; None: the row cannot be scored."""
    task = TaskConfig(label, "x.jsonl", "multiple_choice", [0], has_categories=bool(categories))
    questions, scores = [], []
    for i, right in enumerate(rights):
        category = categories[i] if categories else None
        row = TaskRow((f"{label} {i}",), ("a", "b"), 0, f"x.jsonl:{i + 1}", category)
        problem = "too long" if right is None else ""
        questions.append(Question(row, () if problem else REQUESTS, problem=problem))
        values = (-1.0, -2.0) if right else (-2.0, -1.0)
        of_row: list[Score | Refusal] = [Score(value, False, False, value) for value in values]
        scores.append([] if problem else of_row)
    return TaskAnswers(task, 0, questions, scores, None)


def graded(part: TaskAnswers, *, size: int = 0) -> TaskResult:
    blank = TaskResult(part.task.label, 0, "", len(part.questions), None, None, 0.5, 0.5)
    blank = dataclasses.replace(blank, rows_total=size)
    return grade(blank, part.task, part.questions, part.scores, None)


def write(
    folder: Path, parts: Sequence[TaskAnswers], *, shuffled: bool = False, batch: int = 1
) -> Path:
    """results.json and rows.jsonl as scripts/eval.py writes them."""
    folder.mkdir(parents=True)
    result = combine_tasks([*map(graded, parts)], EvalGauntlet(), [])
    (folder / "results.json").write_text(
        json.dumps({"time/batch": batch, "gauntlet": result.to_json()})
    )
    lines = [line for part in parts for line in part.lines()]
    if shuffled:
        np.random.default_rng(1).shuffle(lines)
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder
