"""Signals that ask for a stop: one request may come as several."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from llmfoundry.distributed.process_group import ALONE
from llmfoundry.train import signals
from llmfoundry.train.signals import StopSignal


def hear(numbers: Sequence[signal.Signals]) -> int:
    """What becomes of a process that gets these: its status; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        with StopSignal(ALONE) as stop:
            for number in numbers:
                os.kill(os.getpid(), number)
            os._exit(0 if stop.agreed() == numbers[0].name else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_slurm_and_torchrun_may_both_signal() -> None:
    assert hear([signal.SIGTERM, signal.SIGTERM]) == 0
    assert hear([signal.SIGUSR1, signal.SIGTERM]) == 0


def test_who_asks_again_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hear([signal.SIGINT, signal.SIGINT]) == -signal.SIGINT
    monkeypatch.setattr(signals, "_SAME_REQUEST", 0.0)  # seconds have passed
    assert hear([signal.SIGTERM, signal.SIGTERM]) == -signal.SIGTERM
