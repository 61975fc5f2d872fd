"""A model card's scores: what the run, or `scripts/eval.py` after it, measured of a checkpoint.

`convert` asks. A score stands with its 95 % interval and with what guessing gets; the categories
count from there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmfoundry.hf.card import CardScore
from llmfoundry.loggers.metrics import BATCH, read_metrics
from llmfoundry.loggers.pages.report import read_json_if_there
from llmfoundry.loggers.pages.score_charts import ShownScore, in_parts, percents, written
from llmfoundry.loggers.pages.titles import LOSS, title


def card_scores(checkpoint: Path, batch: int) -> list[CardScore]:
    """Losses of held-out text, averages, categories and tasks of a checkpoint's weights.

    Args:
        checkpoint: its folder.
        batch: of the checkpoint; measurements of others are not its.
    """
    run_folder = checkpoint.parents[1]
    asked = read_json_if_there(run_folder / "eval" / checkpoint.name / "results.json")
    result = asked.get("gauntlet") or read_json_if_there(
        run_folder / "eval" / f"{checkpoint.name}.json"
    )
    metrics = asked.get("metrics") or _logged(run_folder / "metrics.jsonl", batch)
    return [*_losses(metrics), *_categories(result), *_tasks(result)]


def _logged(path: Path, batch: int) -> dict[str, Any]:
    rows = read_metrics(path) if path.exists() else []
    return {key: value for row in rows if row[BATCH] == batch for key, value in row.items()}


def _losses(metrics: Mapping[str, Any]) -> Iterator[CardScore]:
    for name, value in metrics.items():
        known = title(name)
        if name.startswith("metrics/eval/") and known.group == LOSS:
            yield CardScore(known.text, f"{value:.4f}")


def _categories(result: Mapping[str, Any]) -> Iterator[CardScore]:
    """Averages, then categories, in which guessing counts as nothing."""
    errors, intervals = (result.get(key) or {} for key in ("stderrs", "intervals"))
    for kind in ("averages", "categories"):
        for name, value in (result.get(kind) or {}).items():
            score, within = in_parts(
                written(ShownScore(value, errors.get(name), intervals.get(name)))
            )
            yield CardScore(name.replace("_", " "), score, within, "0")


def _tasks(result: Mapping[str, Any]) -> Iterator[CardScore]:
    for task in result.get("tasks", ()):
        accuracy = ShownScore(task["accuracy"], task["stderr"], task.get("interval"))
        yield CardScore(
            f"{task['label']}, {task['num_fewshot']}-shot, {task['n']} questions",
            *in_parts(percents(accuracy)),
            f"{100 * task['chance']:.1f}%",
        )
