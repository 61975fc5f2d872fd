"""After a sweep: the best value at the edge of its grid, and the command of the best in full."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmfoundry.cli.command_line import parse
from llmfoundry.cli.sweep_advice import advice
from llmfoundry.cli.sweep_points import sweep_config, sweep_points
from llmfoundry.loggers.pages.comparison import ComparedRun
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.cli.test_sweep import sweep
from tests.front import Front

QUICKSTART = str(YAMLS / "quickstart.yaml")
FULL = "train the best in full: python scripts/train.py"


def lines(losses: list[float], *words: str, statuses: list[str] | None = None) -> list[str]:
    """The advice after a sweep with these losses of its points, in their order."""
    command = parse([QUICKSTART, *words])
    points = sweep_points(TrainRecipe, command, sweep_config(command))
    statuses = statuses or ["finished"] * len(points)
    runs = [
        ComparedRun(Path(p.place), p.place, status, [{"time/batch": 1, "loss/train/total": x}], {})
        for p, x, status in zip(points, losses, statuses, strict=True)
    ]
    return [*advice(points, runs, TrainRecipe, ["python", "scripts/train.py", QUICKSTART])]


LR = "optimizer.lr: the best value, "
EDGES = {  # words: losses, and what is said of the edge
    "optimizer.lr=2e-3,4e-3,8e-3": [
        ((3, 2, 1), f"{LR}0.008, is the largest of the sweep, .* with 0.016 among its values"),
        ((1, 2, 3), f"{LR}0.002, is the smallest of the sweep, .* with 0.001 among its values"),
        ((2, 1, 3), None),
        ((2, 1, float("nan")), None),  # a value that diverged was tried
        ((1, 1, 3), None),  # a tie
    ],
    "optimizer.lr=8e-3,2e-3,4e-3": [((1, 3, 2), f"{LR}0.008, is the largest .* with 0.016 among")],
    "global_train_batch_size=2,4,8": [
        ((3, 2, 1), "global_train_batch_size: the best value, 8, .* with 16 among"),
        ((1, 2, 3), "global_train_batch_size: the best value, 2, .* with 1 among"),
    ],
    "optimizer.weight_decay=0,0.1,0.2": [
        ((1, 2, 3), None),  # there is nothing below 0
        ((3, 2, 1), "optimizer.weight_decay: the best value, 0.2, .* with 0.4 among"),
    ],
    "optimizer.momentum=0.5,0.9": [((2, 1), None)],  # 1.62 is no momentum
    "seed=1,2,3": [((1, 2, 3), None)],
    "schedule=cosine,wsd": [((1, 2), None)],
    "compile=true,false": [((1, 2), None)],
}


@pytest.mark.parametrize("word", EDGES)
def test_a_best_value_at_the_edge_of_the_grid_is_named(word: str) -> None:
    for losses, message in EDGES[word]:
        found = lines([float(loss) for loss in losses], word)
        assert len(found) == (message is not None), (losses, found)
        assert message is None or re.search(message, found[0]), found


def test_a_value_whose_run_failed_was_tried() -> None:
    statuses = ["finished", "finished", "exit 2"]  # it diverged
    assert not lines([2.0, 1.0, 0.5], "optimizer.lr=2e-3,4e-3,8e-3", statuses=statuses)
    found = lines([0.5, 2.0, 1.0], "optimizer.lr=2e-3,4e-3,8e-3", statuses=statuses[::-1])
    assert len(found) == 1 and "0.008, is the largest of the sweep" in found[0]


def test_each_key_of_a_grid_is_looked_at() -> None:
    found = lines([4.0, 3.0, 2.0, 1.0], "optimizer.lr=2e-3,4e-3", "max_seq_len=256,512")
    assert [line.partition(":")[0] for line in found] == ["optimizer.lr", "max_seq_len"]


def test_the_best_of_a_short_sweep_can_be_trained_in_full(front: Front) -> None:
    words = ("max_duration=30ba", "eval=off", "data.paths=[a b]", "data=files", "run_name=lr")
    *_, line = lines([2.0, 1.0], "optimizer.lr=2e-3,4e-3", *words)
    assert line.startswith(FULL) and "max_duration" not in line
    printed = shlex.split(line.removeprefix(FULL))
    assert {"optimizer.lr=0.004", "eval=off", "run_name=lr-best"} <= {*printed}
    composed = front(*printed, "--cfg", "job")
    assert composed.status == 0
    assert "max_duration: 1900ba" in composed.out and "run_name: lr-best" in composed.out


def test_a_sweep_at_full_length_needs_no_other_run() -> None:
    assert not [line for line in lines([1.0, 2.0], "seed=1,2") if line.startswith(FULL)]
    words = ("max_duration=10ba,20ba",)
    assert not [line for line in lines([2.0, 1.0], *words) if line.startswith(FULL)]


def test_a_sweep_prints_both(tmp_path: Path) -> None:
    words = (QUICKSTART, "optimizer.lr=1e-3,2e-3", "max_duration=9ba", "-m", "save_folder=here/x")
    got, _ = sweep(tmp_path, *words, loss="1 / recipe.optimizer.lr")
    assert got.returncode == 0, got.stderr
    printed = got.stdout.splitlines()
    assert "with 0.004 among its values" in printed[-4]
    assert printed[-3] == (
        f"train the best in full: python scripts/script.py {QUICKSTART} optimizer.lr=0.002"
        " save_folder=here/x-best run_name=quickstart-best"
    )
