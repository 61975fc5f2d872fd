"""A machine that comes too early waits for the others; its own processes' failures are its end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from llmfoundry.distributed import rendezvous
from llmfoundry.events import read_events
from llmfoundry.exit_status import ENDS_FOLDER, SAVED, STOP_FILE, STOPS
from llmfoundry.telemetry import BEATS


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers of pytest, and hide a supervisor's folders."""
    monkeypatch.delenv(BEATS, raising=False)
    monkeypatch.delenv(ENDS_FOLDER, raising=False)
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_closed_meeting_is_asked_again_and_no_other_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Exception | None] = [RendezvousClosedError(), RendezvousClosedError(), None]
    asked = list[list[str]]()

    def main(words: list[str]) -> None:
        asked.append(words)
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(torchrun, "main", main)
    monkeypatch.setattr(rendezvous, "_PAUSE", 0.0)
    rendezvous.main(["--nnodes=2"])
    assert asked == [["--nnodes=2"]] * 3
    assert capsys.readouterr().err.count("waiting for the other machines") == 1
    answers[:] = [RuntimeError("a process has failed")]
    with pytest.raises(RuntimeError, match="a process has failed"):
        rendezvous.main([])
    monkeypatch.setattr(rendezvous, "SECONDS", -1.0)
    answers[:] = [RendezvousClosedError()]
    with pytest.raises(RendezvousClosedError):
        rendezvous.main([])


@pytest.mark.parametrize("reason", ["the supervisor was asked to stop", "a process has saved"])
def test_a_pending_stop_ends_the_wait_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reason: str,
) -> None:
    """The supervisor signals the training processes, and torchrun may lose the others first."""
    monkeypatch.setenv(BEATS, str(tmp_path))
    monkeypatch.setenv(ENDS_FOLDER, str(tmp_path))
    end = {"rank": 1, "status": SAVED, "kind": "stopped", "time": 0.0, "node": "b", "lines": []}
    meetings = 0

    def main(words: list[str]) -> None:
        nonlocal meetings
        meetings += 1
        # a stop signal kills the process at once, also while PyTorch waits for a connection
        assert {signal.getsignal(number) for number in STOPS} == {signal.SIG_DFL}
        signal.signal(signal.SIGTERM, lambda *_: None)  # torchrun sets handlers
        if meetings == 2 and reason == "a process has saved":
            (tmp_path / "rank-1.json").write_text(json.dumps(end))
        elif meetings == 2:
            (tmp_path / STOP_FILE).touch()
        raise RendezvousClosedError

    monkeypatch.setattr(torchrun, "main", main)
    monkeypatch.setattr(rendezvous, "_PAUSE", 0.0)
    with pytest.raises(SystemExit, match="1"):
        rendezvous.main([])
    assert meetings == 2
    assert capsys.readouterr().err.endswith("the run stops: not waiting for the other machines\n")


def test_a_name_that_does_not_resolve_is_an_event_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the resolver of this machine: .invalid never resolves (RFC 6761)."""
    monkeypatch.setenv(ENDS_FOLDER, str(tmp_path / "supervise/attempt-1"))
    monkeypatch.setattr(rendezvous, "_PAUSE", 0.01)
    monkeypatch.setattr(rendezvous, "_UNRESOLVED_SECONDS", 0.0)
    deadline = time.monotonic() + 0.5
    rendezvous._wait_for_name(["--rdzv-endpoint=a-node-0-0.a.invalid:29400"], deadline)
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["action"]) == ("rendezvous", "wait")
    assert event["what"].startswith("a-node-0-0.a.invalid, where the machines meet, does not")
    began = time.monotonic()
    rendezvous._wait_for_name(["--rdzv-endpoint=localhost:29400"], began + 60)
    rendezvous._wait_for_name(["--rdzv-endpoint=[::1]:29400"], began + 60)
    assert time.monotonic() - began < 30
