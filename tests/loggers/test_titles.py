"""Metrics in words: what a run logs has a title, and what nobody knows keeps its name."""

from __future__ import annotations

import pytest

from llmfoundry.loggers.metrics_file import BATCH
from llmfoundry.loggers.pages.score_tables import changes
from llmfoundry.loggers.pages.titles import GROUPS, OTHERS, Title, title


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss/train/total", Title("training loss", "Loss")),
        ("metrics/eval/bits_per_byte", Title("validation bits per byte", "Loss")),
        ("rewards/eval/accuracies", Title("pairs distinguished by reward, validation", "Answers")),
        ("logps/train/chosen", Title("log-probability of chosen answers, training", "Answers")),
        ("l2_norm/grad/global", Title("norm of the gradient", "Optimizer")),
        ("lr-DecoupledAdamW/group0", Title("learning rate, DecoupledAdamW/group0", "Optimizer")),
        ("moe/load_max", Title("load of the busiest expert, over the mean", "Experts")),
        (
            "metrics/copa/2-shot/InContextLearningMultipleChoiceAccuracy",
            Title("copa, 2-shot: accuracy", "Tasks"),
        ),
        (
            "metrics/mmlu/5-shot/law/InContextLearningMCExpectedCalibrationError",
            Title("mmlu, 5-shot: law, calibration error, as LLM Foundry has it", "Tasks"),
        ),
        ("metrics/copa/2-shot/of_a_plugin", Title("copa, 2-shot: of_a_plugin", "Tasks")),
        ("my/own", Title("my/own", OTHERS)),
        ("{evil}", Title("{evil}", OTHERS)),
    ],
)
def test_a_metric_has_a_title_and_a_group(name: str, expected: Title) -> None:
    assert title(name) == expected
    assert expected.group in GROUPS


def test_before_and_after_names_its_measures_in_words() -> None:
    rows = [{BATCH: batch, "metrics/eval/PairAccuracy": 0.5 + batch / 10} for batch in (0, 2)]
    (change,) = changes([], rows)
    assert change.name == "pairs of likelier chosen answers"
