"""Models distributed over processes: the scores and texts of eval, generate, chat and serve.

Each layout is compared with a single process. The gauntlet has all kinds of tasks, and one of three
rows, so that some of four ranks have none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import run, write_recipe

ROWS = {
    "times": [
        {"query": f"{i} times 3 is", "choices": [str(3 * i), str(2 * i)], "gold": 0}
        for i in range(1, 12)
    ],
    "lines": [{"context": f"line {i} of", "continuation": "document"} for i in range(3)],
    "say": [{"context": f"say {i}:", "answer": str(i)} for i in range(3)],
}
TYPES = {
    "times": "multiple_choice",
    "lines": "language_modeling",
    "say": "generation_task_with_answers",
}
GAUNTLET = {
    "icl_tasks": [
        {
            "label": label,
            "icl_task_type": kind,
            "num_fewshot": [1 if label == "times" else 0],
            "dataset_uri": f"{label}.jsonl",
        }
        | ({"max_new_tokens": 5} if label == "say" else {})
        for label, kind in TYPES.items()
    ],
    "eval_gauntlet": {
        "categories": [{"name": "all", "benchmarks": [{"name": "times", "num_fewshot": 1}]}]
    },
}
MODEL = ("model.n_heads=4", "model.vocab_size=300", "max_duration=2ba")
FSDP = ("parallel=fsdp",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small dense model, a gauntlet, and the scores of one process."""
    folder = tmp_path_factory.mktemp("sharded")
    write_recipe(folder)
    (folder / "gauntlet.yaml").write_text(yaml.safe_dump(GAUNTLET))
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("train.py", "tiny.yaml", "run_name=dense", *MODEL, cwd=folder)
    evaluate(folder, "dense")
    return folder


def evaluate(folder: Path, name: str, *words: str, processes: int = 1) -> Path:
    """Evaluate a run on so many processes; return the folder of the results."""
    output = folder / "-".join([name, str(processes), *words]).replace("/", "-")
    arguments = ("eval.gauntlet=gauntlet.yaml", f"output={output}", *words)
    done = run("eval.py", f"runs/{name}", *arguments, cwd=folder, processes=processes)
    assert ("on each of" in done.stdout) == bool(words), "the start names a sharded layout"
    return output


def results(output: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics and the rows of an evaluation."""
    metrics = json.loads((output / "results.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    return metrics, rows


def assert_same_scores(output: Path, expected: Path) -> None:
    """Compare all numbers to 1e-5, and everything else exactly."""
    metrics, rows = results(output)
    expected_metrics, expected_rows = results(expected)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def test_an_evaluation_under_fsdp_has_the_scores_of_one_process(folder: Path) -> None:
    assert_same_scores(evaluate(folder, "dense", *FSDP, processes=2), folder / "dense-1")
