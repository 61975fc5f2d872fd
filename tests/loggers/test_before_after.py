"""What a run changed: only of a run that was measured before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmfoundry.loggers.pages.report import write_report
from llmfoundry.loggers.pages.score_tables import changes, console_lines


def evaluation(batch: int, average: float | None, accuracy: float | None) -> dict[str, Any]:
    task = {"label": "sort", "num_fewshot": 0, "n": 50, "accuracy": accuracy, "stderr": 0.1}
    task |= {"chance": 0.0, "majority": 0.02}
    return {
        "time/batch": batch,
        "tasks": [task],
        "categories": {"lists": average},
        "averages": {"instructions": average},
    }


ROWS = [
    {"time/batch": 0, "time/token": 0, "metrics/eval/LanguageCrossEntropy": 4.0},
    {"time/batch": 5, "time/token": 9, "loss/train/total": 3.0},
    {"time/batch": 9, "time/token": 18, "metrics/eval/LanguageCrossEntropy": 0.5},
]


def test_the_first_evaluation_stands_beside_the_last() -> None:
    found = changes(
        [evaluation(0, 0.0, 0.02), evaluation(4, 0.3, 0.5), evaluation(9, 0.9, 0.94)], ROWS
    )
    assert [change.cells() for change in found] == [
        ("instructions", "0.0000", "0.9000", "+0.9000"),
        ("lists", "0.0000", "0.9000", "+0.9000"),
        ("sort, 0-shot", "2.0%", "94.0%", "+92.0"),
        ("validation loss", "4.0000", "0.5000", "-3.5000"),
    ]
    assert console_lines(found) == [
        ("instructions", "0.0000 → 0.9000 (+0.9000)"),
        ("validation loss", "4.0000 → 0.5000 (-3.5000)"),
    ]


def test_without_an_evaluation_before_the_first_step_nothing_is_said() -> None:
    assert changes([evaluation(4, 0.3, 0.5), evaluation(9, 0.9, 0.9)], ROWS[1:]) == []
    assert changes([evaluation(0, 0.3, 0.5)], ROWS[:1]) == []
    assert changes([], []) == []


def test_what_is_not_known_is_said_to_be() -> None:
    found = changes([evaluation(0, None, None), evaluation(9, 0.9, 0.5)], [])
    assert ("sort, 0-shot", "n/a", "50.0%", "") in [change.cells() for change in found]


def test_an_accuracy_of_one_question_has_no_error_and_a_report(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    content = evaluation(0, 1.0, 1.0)
    content["tasks"][0] |= {"n": 1, "stderr": None}
    (tmp_path / "eval" / "ba0000000.json").write_text(json.dumps(content))
    page = write_report(tmp_path).read_text()
    assert "100.0%" in page and "± 0.0" not in page


def test_the_report_has_the_table_and_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for batch, accuracy in ((0, 0.02), (9, 0.94)):
        content = json.dumps(evaluation(batch, accuracy, accuracy))
        (tmp_path / "eval" / f"ba{batch:07d}.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sample = {"time/batch": 9, "prompt": "Sort: b a", "text": "b a", "expected": "a <b>"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = write_report(tmp_path).read_text()
    assert "Before and after" in page
    assert "<td>sort, 0-shot</td>" in page
    assert "+92.0" in page
    assert "expected: a &lt;b&gt;" in page
