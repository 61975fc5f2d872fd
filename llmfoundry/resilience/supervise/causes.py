"""Why an attempt at a run ended: `find_cause`, a pure function of what the attempt left behind.

The supervisor gathers the evidence and calls it. The idea: the best informed source is believed
first. A process that reports its own mistake knows why it ended; one that lost another does not;
the exit code that torchrun prints is the least informative.
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
"""A cause that ends by itself: each start has half the microbatch of the one before, down to 1."""
KINDS = (
    *("done", "preemption", "user", "numerical", OUT_OF_MEMORY, "hang"),
    *("machine", "network", "given up", "unknown"),
)


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind.

    Attributes:
        status: of the command that was started; negative: the signal that ended it.
        node: this machine.
        stop_signal: at which this supervisor made the run stop; empty: none.
        ends: what processes recorded at their end (`exit_status.record_end`), in order of time.
        hang: the event in which a monitor named who hangs.
        watch: the event for which the run itself saved and stopped, to be started elsewhere.
        kernel: machine, why, and whether that takes the machine out, of this machine's kernel log.
        gpu: the event in which the run reported a GPU that takes its machine out.
        stderr: the last lines of standard error.
        expects_end: whether a run that is complete records that in `ends`.
        node_of: the machine of each rank.
        lost: machines that the scheduler has lost, and what it reports of them.
        went_back: whether the run has removed checkpoints, as it rolled back before a spike.
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
        why: for people, a line.
        nodes: machines that are suspected.
        is_saved: of a preemption: whether the run was saved at its end.
        step: of what was not finite: the step (from 1); 0: not known.
        is_first: of what was not finite: whether the weights that the attempt began with are.
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
"""As `distributed.failures` words it."""
_NUMERICAL = re.compile(r"not finite(?: in step (\d+))?")
_BEGAN_WITH = "weights that the run began with"
_NEVER_MET = "MASTER_ADDR: "
"""As `train.step` and `distributed.launch` word it."""
_REPORT = re.compile(r"torch[./]distributed[./]elastic|^Failures:|^=+$|^-+$")
"""Where torchrun's report of a failure begins."""
_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_HOST, _RANK = re.compile(r"^\s*host\s*:\s*(\S+)"), re.compile(r"^\s*rank\s*:\s*(\d+)")


def find_cause(evidence: Evidence) -> Cause:
    """Why an attempt ended."""
    ends = evidence.ends
    if evidence.status == DONE and _is_complete(evidence):
        return Cause("done", "the run is complete")
    if evidence.status == DONE and not ends and not evidence.stop_signal:
        why = "the command ended with status 0, but no process has recorded a complete run"
        return Cause("user", f"{why}; write a supervise.launch that waits for the run")
    short = next((end for end in ends if end["kind"] == MEMORY), None)
    if short is not None and not evidence.stop_signal:
        return Cause(OUT_OF_MEMORY, _quoted(short))
    if evidence.watch is not None and not evidence.stop_signal:
        return Cause("machine", str(evidence.watch["what"]), _host(evidence.watch))
    saved = next((end for end in ends if end["status"] == SAVED and end is not short), None)
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
    return (
        _reported(evidence)
        or _hardware_error(evidence)
        or _lost_by_scheduler(evidence)
        or _hang(evidence)
        or _in_output(evidence)
        or Cause("unknown", _exit_code(evidence) + _last_line(evidence), _crashed_host(evidence))
    )


def _is_complete(evidence: Evidence) -> bool:
    """Whether status 0 is to be believed: some launchers have it whatever became of the run."""
    return not evidence.expects_end or any(end["status"] == DONE for end in evidence.ends)


def _host(event: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(event["host"]),) if event.get("host") else ()


def _quoted(end: dict[str, Any]) -> str:
    return f"rank {end['rank']} on {end['node']}: {end['lines'][0] if end['lines'] else 'nothing'}"


def _reported(evidence: Evidence) -> Cause | None:
    """What a process that knows its mistake recorded; without records, its exit status."""
    for end in evidence.ends:
        text = "\n".join(end["lines"])
        found = _NUMERICAL.search(text)
        if end["kind"] in ("mistake", "full", "error") and found:
            step = int(found[1] or 0)
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
    """What the kernel's log and the GPUs' driver report; a lost GPU makes others hang."""
    for node, why, is_bad in evidence.kernel:
        if is_bad:
            return Cause("machine", f"kernel log of {node}: {why}", (node,))
    if evidence.gpu is not None:
        return Cause("machine", str(evidence.gpu["what"]), _host(evidence.gpu))
    return None


def _lost_by_scheduler(evidence: Evidence) -> Cause | None:
    """Machines of this attempt that the scheduler has lost."""
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
    """What unexpected errors and standard error show."""
    errors = [end for end in evidence.ends if end["kind"] == "error"]
    lines = [(line, end["node"], _quoted(end)) for end in errors for line in end["lines"]]
    lines += [(line, evidence.node, line.strip()[:300]) for line in evidence.stderr]
    for line, node, quoted in lines:
        if _MACHINE.search(line):
            return Cause("machine", quoted, (node,))
    for end in errors:  # its own, by which others lost it
        if not _NETWORK.search("\n".join(end["lines"])):
            return Cause("unknown", _quoted(end))
    silent = _silent_nodes(evidence)
    if silent is not None:
        return silent
    if evidence.status < 0 or any(code in (-9, -7, -11) for code in _exit_codes(evidence)):
        return None  # a rank or the agent was killed: lost connections follow from that
    for line, _, quoted in lines:
        if _NETWORK.search(line):
            return Cause("network", quoted)
    return None


def _silent_nodes(evidence: Evidence) -> Cause | None:
    """Machines none of whose processes recorded an end, as others lost them."""
    ended = {end["rank"] for end in evidence.ends}
    for end in evidence.ends:
        is_lost = end["kind"] == "lost" and end["lines"]
        named = _LOST_RANKS.search(end["lines"][0]) if is_lost else None
        if named is None:
            continue
        ranks = [int(rank) for rank in named[1].split(", ")]
        nodes = {evidence.node_of[rank] for rank in ranks if rank in evidence.node_of}
        silent = nodes - {node for rank, node in evidence.node_of.items() if rank in ended}
        if silent and len(set(evidence.node_of.values())) > 1:
            names = tuple(sorted(silent))
            why = f"{_quoted(end)}; no process of {', '.join(names)} recorded its end"
            return Cause("machine", why, names)
    return None


def _exit_codes(evidence: Evidence) -> list[int]:
    """Of ranks, as torchrun's report on standard error has them; that of the first failure last."""
    return [int(code) for line in evidence.stderr for code in _EXIT.findall(line)]


def _exit_code(evidence: Evidence) -> str:
    """The code with which the first process ended, as a word where it is a signal."""
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
    """The last line on standard error before torchrun's report."""
    tail = evidence.stderr
    report = next((n for n, line in enumerate(tail) if _REPORT.search(line)), None)
    lines = [line.strip() for line in tail[:report] if line.strip()]
    return f"; the last line on standard error: {lines[-1][:300]}" if lines else ""


def _crashed_host(evidence: Evidence) -> tuple[str, ...]:
    """The machine of the first process that failed, if a fault of memory or code ended it."""
    codes = _exit_codes(evidence)
    hosts = [match[1] for line in evidence.stderr if (match := _HOST.search(line))]
    if not codes or codes[-1] not in (-7, -11, -4):  # bus error, segmentation, illegal instruction
        return ()
    return (hosts[-1],) if hosts and hosts[-1] != "localhost" else (evidence.node,)
