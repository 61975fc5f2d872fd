"""From which checkpoint an attempt at a run may resume, as the supervisor that starts it says.

`resilience/supervise` writes it into the environment of the attempt, `builders/resume.py` reads it.
The idea: the supervisor knows what was saved before; a process that finds less than that, on
another machine perhaps, must not begin anew without a word.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_SAVED, _BEFORE = "LLMFOUNDRY_SAVED_BATCH", "LLMFOUNDRY_RESUME_BEFORE"


@dataclass(frozen=True)
class ResumeLimits:
    """What a supervisor knows of a run's checkpoints.

    Attributes:
        saved: the batch of the newest that has to be there; -1: none has.
        before: resume from one of fewer batches than this; None: from the newest.
    """

    saved: int = -1
    before: int | None = None

    @property
    def until(self) -> int | None:
        """The most batches that may be done where it resumes; None: any number."""
        return None if self.before is None else self.before - 1

    def environment(self) -> dict[str, str]:
        """The variables that tell an attempt."""
        return {_SAVED: str(self.saved), _BEFORE: "" if self.before is None else str(self.before)}


def resume_limits() -> ResumeLimits:
    """What this process's supervisor says; no limits where it has none.

    Where torchrun has started the processes again by itself, others may be there since.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return ResumeLimits()
    saved, before = os.environ.get(_SAVED, ""), os.environ.get(_BEFORE, "")
    return ResumeLimits(
        saved=int(saved) if saved.isdecimal() else -1,
        before=int(before) if before.isdecimal() else None,
    )
