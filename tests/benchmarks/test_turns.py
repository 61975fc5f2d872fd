"""Contenders by turns: who runs when, what a line of output counts for, and whose ratio it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.record import table
from benchmarks.turns import Measured, by_turns, shown, speeds, timed

PRINTS = """
import sys, time
print("getting ready, 1,234 parameters")
for step in range(1, 4):
    time.sleep(0.05)
    print(f"{step}/3  loss 1.0", flush=True)
sys.exit(int(sys.argv[1]))
"""


def measured(rate: float, cpu: float = 1.0) -> Measured:
    return Measured(rate, cpu, first_step=2.0, memory=3 << 29, parameters=None)


def test_every_contender_has_its_turn_in_every_round() -> None:
    ran: list[str] = []

    def run(command: Sequence[str]) -> int:
        ran.extend(command)
        return len(ran)

    found = by_turns(lambda turn: {"a": [f"a{turn}"], "b": [f"b{turn}"]}, run, rounds=2)
    assert ran == ["a0", "b0", "a1", "b1"] and found == {"a": [1, 3], "b": [2, 4]}


def test_ratios_are_of_each_round_and_of_a_contenders_own_yardstick() -> None:
    results = {
        "ours": [measured(30.0, 8.0), measured(10.0, 9.0), measured(40.0, 6.0)],
        "bare": [measured(10.0, 4.0), measured(20.0, 3.0), measured(20.0, 2.0)],
        "compiled": [measured(60.0), measured(5.0), measured(20.0)],
    }
    yardsticks = {"ours": "bare", "bare": "bare", "compiled": "ours"}
    rows = speeds(results, yardsticks.__getitem__, "it")
    assert [row["of it, tok/s"] for row in rows] == [[0.5, 2.0, 3.0], [1, 1, 1], [0.5, 0.5, 2.0]]
    assert rows[0]["of it, tok/CPU-s"] == [2.0, 3.0, 3.0] and rows[0]["tok/s"] == [10, 30, 40]
    lines = table(rows, shown("it"))
    assert lines[1].split() == ["ours", "30", "2.00", "8", "3.00", "2.0", "1.50"]


def test_a_contender_in_another_folder_finds_the_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import benchmarks.turns, llmfoundry; print('step 1 0.1')"
    assert len(timed([sys.executable, "-c", program], tmp_path, least=1).ends) == 1


def test_a_process_is_timed_by_the_lines_of_its_steps(tmp_path: Path) -> None:
    run = timed([sys.executable, "-c", PRINTS, "0"], tmp_path, least=3)
    assert len(run.ends) == 3 == len(run.cpu_ends) and run.ends == sorted(run.ends)
    assert run.ends[2] - run.ends[0] >= 0.1 and run.memory > 1 << 20
    assert "1,234 parameters" in run.said
    for command, least in (([sys.executable, "-c", PRINTS, "0"], 4), ([*"ab"], 1)):
        with pytest.raises((RuntimeError, FileNotFoundError)):
            timed(command, tmp_path, least=least)
    with pytest.raises(RuntimeError, match="getting ready"):
        timed([sys.executable, "-c", PRINTS, "1"], tmp_path, least=3)
