"""Table of launch targets and their functions.

`cli/commands/launch.py` and `runs.py` look up the target of a launch record here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from llmfoundry.launch import hosts, kubernetes, slurm
from llmfoundry.launch.job import Job
from llmfoundry.launch.record import LaunchRecord, TargetState


class Stop(Protocol):
    """Function that stops a job."""

    def __call__(self, record: LaunchRecord, *, now: bool) -> str:
        """Request that a job saves and ends, or kill it (`now`); return what was done."""


class Logs(Protocol):
    """Function that reads a job's output."""

    def __call__(self, record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
        """Yield (machine or rank, line); with `follow` also new lines as they appear."""


@dataclass(frozen=True)
class Target:
    """A place where runs can be launched, as a set of functions."""

    render: Callable[[Job], str]
    """Return the text that is submitted (script, YAML); printed by dry_run."""
    submit: Callable[[Job], LaunchRecord]
    """Submit the job with the target's client; raises UserError if it is rejected."""
    state: Callable[[LaunchRecord], TargetState]
    """Return the state of a job; `unknown` if the target does not answer."""
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
