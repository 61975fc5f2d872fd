"""The table of targets: what can be done with a job on each, as functions.

`cli/commands/launch.py` and whoever lists runs look a record's target up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from llmfoundry.launch import hosts, kubernetes, slurm
from llmfoundry.launch.job import Job
from llmfoundry.launch.record import LaunchRecord, TargetState


class Stop(Protocol):
    """Asks a job to save and end, or ends it at once; what came of it, in words."""

    def __call__(self, record: LaunchRecord, *, now: bool) -> str:
        """Stop it."""


class Logs(Protocol):
    """Machine or rank, and line, of all that a job prints, as it comes with `follow`."""

    def __call__(self, record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
        """Read it."""


@dataclass(frozen=True)
class Target:
    """Where runs are launched."""

    render: Callable[[Job], str]
    """The target's own object, as text: what dry_run prints."""
    submit: Callable[[Job], LaunchRecord]
    """Give it to the target's client; a UserError says why that is not possible."""
    state: Callable[[LaunchRecord], TargetState]
    """What the target says of it, `unknown` where it does not answer."""
    stop: Stop
    logs: Logs


TARGETS: dict[str, Target] = {
    "local": Target(hosts.render, hosts.submit, hosts.state, hosts.stop, hosts.logs),
    "kubernetes": Target(
        kubernetes.render, kubernetes.submit, kubernetes.state, kubernetes.stop, kubernetes.logs
    ),
    "slurm": Target(slurm.render, slurm.submit, slurm.state, slurm.stop, slurm.logs),
    "ssh": Target(hosts.render, hosts.submit, hosts.state, hosts.stop, hosts.logs),
}
