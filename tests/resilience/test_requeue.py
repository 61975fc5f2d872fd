"""What a supervisor reports of its job's requeue, by what Slurm says of the job."""

from __future__ import annotations

import pytest

from llmfoundry.resilience.supervise import slurm_nodes

SEEN = "JobId=7 JobState={} Reason=None Requeue=1 Restarts={} ExcNodeList=(null)"
"""As Slurm 22.05 printed it, of a job that `scontrol requeue` was putting back."""


@pytest.mark.parametrize(
    ("state", "restarts", "says"),
    [
        ("COMPLETING", 1, "requeued by Slurm itself"),
        ("COMPLETING", 0, "not requeued: Slurm reports the job as COMPLETING"),
        ("CANCELLED", 0, "not requeued: Slurm reports the job as CANCELLED"),
        ("RUNNING", 0, "requeued"),
    ],
)
def test_what_became_of_a_requeue_is_true(
    monkeypatch: pytest.MonkeyPatch, state: str, restarts: int, says: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_nodes, "_run", lambda *words: (SEEN.format(state, restarts), ""))
    assert slurm_nodes.requeue(()) == says
