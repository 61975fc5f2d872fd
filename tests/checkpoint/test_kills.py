"""A run that is killed or asked to stop anywhere, and resumes, ends as one left alone: bit-equal.

`tests/checkpoint/killing.py` strikes; it runs in a process of its own, which forks the runs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiny import ENV, ROOT


def strike(*arguments: str) -> str:
    """What the script printed; it fails unless all runs ended as the one left alone."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.killing", *arguments],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("asynchronous", "workers"), ("fsdp",)])
def test_a_dozen_kills_leave_the_losses_and_weights_as_they_were(modes: tuple[str, ...]) -> None:
    assert "6 points, " in strike("--kills", "6", "--modes", *modes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["fsdp", "expert"])
def test_twenty_kills_around_saves_leave_every_checkpoint_that_counts_whole(mode: str) -> None:
    assert "20 points, " in strike("--kills", "20", "--modes", mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "qlora", "qlora-fsdp"])
def test_kills_while_an_adapter_trains_leave_losses_and_weights_as_they_were(mode: str) -> None:
    assert "6 points, " in strike("--kills", "6", "--modes", mode)


@pytest.mark.slow
def test_a_request_to_stop_in_each_phase_is_followed_and_changes_nothing() -> None:
    strike("--kills", "0", "--requests", "5", "--modes", "asynchronous")


@pytest.mark.slow  # half an hour
@pytest.mark.timeout(7200)
def test_three_hundred_kills_and_signals_in_every_mode() -> None:
    strike("--kills", "300", "--requests", "8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_request_to_stop_while_blocks_are_compiled() -> None:
    strike("--kills", "2", "--requests", "8", "--modes", "compiled")
