"""A machine that comes too early waits for the others; its own processes' failures are its end."""

from __future__ import annotations

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from llmfoundry.distributed import rendezvous


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
