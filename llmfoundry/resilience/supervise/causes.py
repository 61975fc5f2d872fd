"""Classify why an attempt ended: `find_cause`, a pure function of the evidence.

The supervisor collects the evidence. The best informed source is used first: a process that
reports its own error knows why it ended. A process that lost contact with another process does not.
The exit code that torchrun prints is the least informative source.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.events import names_in
from llmfoundry.exit_status import BAD_MACHINE, DONE, GIVE_UP, MEMORY, MISTAKE, SAVED

OUT_OF_MEMORY = "out of memory"
"""Cause with a bounded number of restarts: each attempt halves the microbatch, down to 1."""
KINDS = (
    *("done", "preemption", "user", "numerical", OUT_OF_MEMORY, "hang"),
    *("machine", "network", "given up", "unknown"),
)


@dataclass(frozen=True)
class Evidence:
    """Evidence of an ended attempt.

    Attributes:
        status: exit status of the command; negative: the signal that killed it.
        node: name of this machine.
        stop_signal: signal for which this supervisor stopped the run; empty: none.
        ends: records of processes at their end (`exit_status.record_end`), ordered by time.
        hang: event in which the hang monitor reported the hung ranks.
        watch: event for which the run saved and stopped itself, to be restarted elsewhere.
        kernel: (machine, reason, whether the machine is bad) of this machine's kernel log.
        gpu: event in which the run reported a GPU that makes its machine bad.
        stderr: last lines of standard error.
        expects_end: whether a complete run records that in `ends`.
        node_of: machine of each rank.
        lost: machines that the scheduler has lost, with its description.
        went_back: whether the run removed checkpoints in a rollback before a loss spike.
    """

    status: int
    node: str = ""
    stop_signal: str = ""
    ends: Sequence[dict[str, Any]] = ()
    hang: dict[str, Any] | None = None
    watch: dict[str, Any] | None = None
    kernel: Sequence[tuple[str, str, bool]] = ()
    gpu: dict[str, Any] | None = None
    stderr: Sequence[str] = ()
    expects_end: bool = False
    node_of: Mapping[int, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    went_back: bool = False


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        kind: one of KINDS.
        why: explanation of one line.
        nodes: suspected machines.
        is_saved: for a preemption: whether the run saved a checkpoint before it ended.
        step: for a value that is not finite: the step (from 1); 0: not known.
        is_first: for a value that is not finite: whether the initial weights were not finite.
    """

    kind: str
    why: str
    nodes: tuple[str, ...] = ()
    is_saved: bool = False
    step: int = 0
    is_first: bool = False


_MACHINE = re.compile(
    r"uncorrectable ECC|fallen off the bus|GPU is lost|NVRM: Xid|CUDA error: (?:unspecified launch"
    r"|hardware stack|misaligned|device not ready|unknown error)|CUDA driver error|Bus error"
    r"|Stale file handle|Input/output error|Transport endpoint",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"NCCL (?:error|WARN)|nccl(?:System|Remote|Internal)Error|ibv_\w+|RendezvousTimeoutError"
    r"|RendezvousConnectionError|connection (?:reset|refused|closed|aborted|timed out)"
    r"|connect(?:ion)? time|no route to host|network is unreachable|throttl|slow ?down"
    r"|service unavailable|read timed? ?out|did not meet at"
    r"|gaierror|getaddrinfo|name or service not known|temporary failure in name resolution"
    r"|nodename nor servname|no address associated with hostname|could not resolve host"
    r"|name resolution (?:failed|error)|NameResolutionError",
    re.IGNORECASE,
)
_LOST_RANKS = re.compile(
    r"ranks? (\d+(?:, \d+)*)(?: and \d+ more)? (?:ended before the others|did not come within)"
)
"""Message of `distributed.failures`."""
_NUMERICAL = re.compile(r"not finite(?: in step (\d+))?")
_BEGAN_WITH = "weights that the run began with"
_NEVER_MET = "MASTER_ADDR: "
"""Beginning of the message for a failed rendezvous (`distributed.process_group`)."""
_REPORT = re.compile(r"torch[./]distributed[./]elastic|^Failures:|^=+$|^-+$")
"""First line of torchrun's failure report."""
_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_HOST, _RANK = re.compile(r"^\s*host\s*:\s*(\S+)"), re.compile(r"^\s*rank\s*:\s*(\d+)")


def find_cause(evidence: Evidence) -> Cause:
    """Return the cause of an attempt's end."""
    # complete, or a launcher that does not wait for the run
    ends = evidence.ends
    if evidence.status == DONE and _is_complete(evidence):
        return Cause("done", "the run is complete")
    if evidence.status == DONE and not ends and not evidence.stop_signal:
        why = "the command ended with status 0, but no process has recorded a complete run"
        return Cause("user", f"{why}; write a supervise.launch that waits for the run")

    # the run stopped itself, or was stopped by a signal
    shortage = next((end for end in ends if end["kind"] == MEMORY), None)
    if shortage is not None and not evidence.stop_signal:
        return Cause(OUT_OF_MEMORY, _quoted(shortage))
    if evidence.watch is not None and not evidence.stop_signal:
        return Cause("machine", str(evidence.watch["what"]), _host(evidence.watch))
    saved = next((end for end in ends if end["status"] == SAVED and end is not shortage), None)
    if evidence.stop_signal or saved or evidence.status == SAVED:
        is_saved = saved is not None or evidence.status == SAVED
        how = "and saved" if is_saved else "before it could save"
        reported = saved["lines"][0] if saved and saved["lines"] else ""
        why = reported or f"stopped, {how}"
        if evidence.stop_signal:
            why = f"stopped by {evidence.stop_signal}, {how}"
        return Cause("preemption", why, is_saved=is_saved)
    given_up = next((end for end in ends if end["status"] == GIVE_UP), None)
    if given_up or evidence.status == GIVE_UP:
        return Cause("given up", _quoted(given_up) if given_up else "the run asks for no restart")

    # a failure: the best informed source first
    return (
        _reported(evidence)
        or _hardware_error(evidence)
        or _lost_by_scheduler(evidence)
        or _hang(evidence)
        or _in_output(evidence)
        or Cause("unknown", _exit_code(evidence) + _last_line(evidence), _crashed_host(evidence))
    )


def _is_complete(evidence: Evidence) -> bool:
    """Return whether status 0 means complete; some launchers return 0 for a failed run too."""
    return not evidence.expects_end or any(end["status"] == DONE for end in evidence.ends)


def _host(event: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(event["host"]),) if event.get("host") else ()


def _quoted(end: dict[str, Any]) -> str:
    return f"rank {end['rank']} on {end['node']}: {end['lines'][0] if end['lines'] else 'nothing'}"


def _reported(evidence: Evidence) -> Cause | None:
    """Return the cause that a process recorded or, without records, that exit codes show."""
    for end in evidence.ends:
        text = "\n".join(end["lines"])
        numerical = _NUMERICAL.search(text)
        if end["kind"] in ("mistake", "full", "error") and numerical:
            step = int(numerical[1] or 0)
            return Cause("numerical", _quoted(end), step=step, is_first=_BEGAN_WITH in text)
        if text.startswith(_NEVER_MET):
            return Cause("network", _quoted(end))
        if end["kind"] in ("mistake", "full"):
            return Cause("network" if _NETWORK.search(text) else "user", _quoted(end))
    codes = [evidence.status, *_exit_codes(evidence)]
    if BAD_MACHINE in codes:
        return Cause("machine", "the health check found a bad machine", (evidence.node,))
    if MISTAKE in codes:
        lines = reversed(evidence.stderr)
        last = next((line for line in lines if line.strip()), "see its output")
        return Cause("user", f"a mistake in the recipe or the command: {last.strip()[:300]}")
    return None


def _hardware_error(evidence: Evidence) -> Cause | None:
    """Return the cause that the kernel log or the GPU driver reports.

    Comes before hangs, because a lost GPU makes other ranks hang.
    """
    for node, why, is_bad in evidence.kernel:
        if is_bad:
            return Cause("machine", f"kernel log of {node}: {why}", (node,))
    if evidence.gpu is not None:
        return Cause("machine", str(evidence.gpu["what"]), _host(evidence.gpu))
    return None


def _lost_by_scheduler(evidence: Evidence) -> Cause | None:
    """Return the cause if the scheduler has lost machines of this attempt."""
    used = {*evidence.node_of.values()}
    nodes = [node for node in evidence.lost if node in used or not used]
    if not nodes:
        return None
    return Cause("machine", "; ".join(evidence.lost[node] for node in nodes), tuple(nodes))


def _hang(evidence: Evidence) -> Cause | None:
    if evidence.hang is None:
        return None
    return Cause("hang", str(evidence.hang["what"]), names_in(evidence.hang, "nodes"))


def _in_output(evidence: Evidence) -> Cause | None:
    """Return the cause that unexpected errors and standard error show."""
    # (line, machine, text to show) of recorded errors, then of standard error
    errors = [end for end in evidence.ends if end["kind"] == "error"]
    lines = [(line, end["node"], _quoted(end)) for end in errors for line in end["lines"]]
    lines += [(line, evidence.node, line.strip()[:300]) for line in evidence.stderr]

    # hardware first, then errors other than lost connections, which follow from another failure
    for line, node, quoted in lines:
        if _MACHINE.search(line):
            return Cause("machine", quoted, (node,))
    for end in errors:
        if not _NETWORK.search("\n".join(end["lines"])):
            return Cause("unknown", _quoted(end))
    silent = _silent_nodes(evidence)
    if silent is not None:
        return silent
    if evidence.status < 0 or any(code in (-9, -7, -11) for code in _exit_codes(evidence)):
        return None  # a rank or torchrun was killed, which explains lost connections
    for line, _, quoted in lines:
        if _NETWORK.search(line):
            return Cause("network", quoted)
    return None


def _silent_nodes(evidence: Evidence) -> Cause | None:
    """Return the cause if other ranks lost a machine none of whose ranks recorded its end."""
    recorded = {end["rank"] for end in evidence.ends}
    for end in evidence.ends:
        is_lost = end["kind"] == "lost" and end["lines"]
        match = _LOST_RANKS.search(end["lines"][0]) if is_lost else None
        if match is None:
            continue
        lost_ranks = [int(rank) for rank in match[1].split(", ")]
        nodes = {evidence.node_of[rank] for rank in lost_ranks if rank in evidence.node_of}
        silent = nodes - {node for rank, node in evidence.node_of.items() if rank in recorded}
        if silent and len(set(evidence.node_of.values())) > 1:
            names = tuple(sorted(silent))
            why = f"{_quoted(end)}; no process of {', '.join(names)} recorded its end"
            return Cause("machine", why, names)
    return None


def _exit_codes(evidence: Evidence) -> list[int]:
    """Return the exit codes of ranks in torchrun's report; the first failure is the last code."""
    return [int(code) for line in evidence.stderr for code in _EXIT.findall(line)]


def _exit_code(evidence: Evidence) -> str:
    """Return a description of the exit code of the first failure, with the name of a signal."""
    codes = _exit_codes(evidence)
    code = codes[-1] if codes else evidence.status
    ranks = [match[1] for line in evidence.stderr if (match := _RANK.search(line))]
    who = f"rank {ranks[-1]}" if ranks and codes else "the command"
    if code >= 0:
        return f"{who} ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = next((why for _, why, _ in evidence.kernel if "no memory left" in why), "")
    return f"{who} was ended by {name}" + (f" ({memory})" if memory else "")


def _last_line(evidence: Evidence) -> str:
    """Return the last line of standard error before torchrun's report, as a suffix."""
    tail = evidence.stderr
    report = next((n for n, line in enumerate(tail) if _REPORT.search(line)), None)
    lines = [line.strip() for line in tail[:report] if line.strip()]
    return f"; the last line on standard error: {lines[-1][:300]}" if lines else ""


def _crashed_host(evidence: Evidence) -> tuple[str, ...]:
    """Return the machine of the first failed rank, if a memory or instruction fault killed it."""
    codes = _exit_codes(evidence)
    hosts = [match[1] for line in evidence.stderr if (match := _HOST.search(line))]
    if not codes or codes[-1] not in (-7, -11, -4):  # bus error, segmentation, illegal instruction
        return ()
    return (hosts[-1],) if hosts and hosts[-1] != "localhost" else (evidence.node,)
