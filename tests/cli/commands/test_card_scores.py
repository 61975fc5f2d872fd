"""A model card's scores: from what the run, or scripts/eval.py after it, wrote of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from llmfoundry.api.conversion import card_scores
from llmfoundry.hf.card import CardScore


def test_scores_of_a_checkpoint_stand_with_their_errors_and_chance(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "ba0000009"
    task = {"label": "copa", "num_fewshot": 2, "n": 50, "accuracy": 0.54, "stderr": 0.07}
    result = {
        "time/batch": 9,
        "tasks": [{**task, "chance": 0.5}],
        "averages": {"core_average": 0.08},
        "categories": {"one": None},
        "stderrs": {"core_average": 0.14},
    }
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "ba0000009.json").write_text(json.dumps(result))
    rows = [{"time/batch": b, "metrics/eval/bits_per_byte": b / 10} for b in (5, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert card_scores(checkpoint, 9) == [
        CardScore("validation bits per byte", "0.9000"),
        CardScore("core average", "0.0800", "± 0.1400", "0"),
        CardScore("one", "n/a", "", "0"),
        CardScore("copa, 2-shot, 50 questions", "54.0%", "± 7.0", "50.0%"),
    ]
    assert card_scores(checkpoint.with_name("ba0000007"), 7) == []


def test_what_eval_asked_of_the_checkpoint_comes_before_what_the_run_did(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "ba0000009"
    in_run = {"tasks": [], "averages": {"core_average": 0.08}, "categories": {}}
    asked = in_run | {"averages": {"core_average": 0.09}, "stderrs": {}}
    folder = tmp_path / "eval" / "ba0000009"
    folder.mkdir(parents=True)
    (tmp_path / "eval" / "ba0000009.json").write_text(json.dumps(in_run))
    metrics = {"metrics/eval/bits_per_byte": 0.5, "metrics/eval/rows": 7}
    (folder / "results.json").write_text(json.dumps({"gauntlet": asked, "metrics": metrics}))
    logged = {"time/batch": 9, "metrics/eval/bits_per_byte": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(logged) + "\n")
    assert card_scores(checkpoint, 9) == [
        CardScore("validation bits per byte", "0.5000"),
        CardScore("core average", "0.0900", "", "0"),
    ]
