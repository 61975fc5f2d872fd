"""eval.icl_max_fraction: the share of the rows is worked out by hand here, and kept by the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry.builders import evaluation
from llmfoundry.builders.evaluation import EvalBudget, ladder
from llmfoundry.distributed.process_group import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
TOKENS = 10_000


class SlowGauntlet:
    """Takes a second for 100 tokens; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def tokens(self, share: float = 1.0) -> int:
        return round(TOKENS * share)

    def run(self, subject: Any, *, share: float) -> tuple[Any, list[Any]]:
        self.asked.append(share)
        return SimpleNamespace(cost=SimpleNamespace(seconds=self.tokens(share) / 100)), []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now.seconds)
    return now


def budget(folder: Path, reported: list[str], fraction: float = 0.2, **options: Any) -> EvalBudget:
    return EvalBudget(fraction, folder, ALONE, reported.append, **{"resumed": False, **options})


@pytest.mark.parametrize(
    ("trained", "fraction", "share"),
    [
        (100, 0.2, 1 / 8),  # 100 s of training allow 25 s, with caution 20: a fifth of 100 s
        (400, 0.2, 1 / 2),  # 80 of 100 s
        (500, 0.2, 1.0),
        (5000, 0.2, 1.0),
        (100, 0.5, 1 / 2),  # half of the wall time: as long as the training
    ],
)
def test_the_share_fits_into_the_fraction_of_the_wall_time(
    trained: float, fraction: float, share: float, tmp_path: Path, clock: SimpleNamespace
) -> None:
    gauntlet, reported = SlowGauntlet(), list[str]()
    asked: Any = gauntlet
    chosen = budget(tmp_path, reported, fraction)
    clock.seconds += trained
    assert chosen.share(asked, asked) == share
    spent = share * TOKENS / 100
    assert share == 1 or spent <= fraction * (trained + spent)
    assert len(reported) == 1 and f"asks {100 * share:.2g} % of each task's rows" in reported[0]
    assert "about 100.0 s after" in reported[0]


def test_training_is_counted_from_the_last_evaluation(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    chosen, gauntlet = budget(tmp_path, []), SlowGauntlet()
    asked: Any = gauntlet
    clock.seconds += 5000
    chosen.restart()
    clock.seconds += 100
    assert chosen.share(asked, asked) == 1 / 8


def test_all_evaluations_of_a_run_ask_the_same_also_after_a_resume(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    first, gauntlet = budget(tmp_path, []), SlowGauntlet()
    asked: Any = gauntlet
    clock.seconds += 100
    assert first.share(asked, asked) == 1 / 8
    probes = len(gauntlet.asked)
    clock.seconds += 10_000
    assert first.share(asked, asked) == 1 / 8
    assert budget(tmp_path, [], resumed=True).share(asked, asked) == 1 / 8
    assert len(gauntlet.asked) == probes
    # another fraction, or another run in this folder, is decided anew
    other = budget(tmp_path, [], fraction=0.5, resumed=True)
    clock.seconds += 100
    assert other.share(asked, asked) == 1 / 2
    anew = budget(tmp_path, [], fraction=0.5)
    clock.seconds += 20
    assert anew.share(asked, asked) == 1 / 8
    assert json.loads((tmp_path / evaluation.FILE).read_text())["share"] == 1 / 8


def test_shares_are_of_a_ladder() -> None:
    steps = [2.0**-n for n in range(21)]
    for share in (3.0, 1.0, 0.999, 0.5, 0.499, 0.3, 0.01, 1e-4, 1e-5):
        assert ladder(share) == next(step for step in steps if step <= share)
    assert ladder(0.0) == steps[-1]
