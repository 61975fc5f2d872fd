"""Why an attempt at a run ended: a pure function of what it left behind.

The idea: whoever knows more is believed first. A process that tells its mistake knows why it ended;
one that says that it lost another does not; a number that torchrun prints says least.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.events import names_in
from llmfoundry.exit_status import BAD_MACHINE, DONE, GIVE_UP, MISTAKE, SAVED

KINDS = (
    "done",
    "preemption",
    "user",
    "numerical",
    "hang",
    "machine",
    "network",
    "given up",
    "unknown",
)


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind.

    Attributes:
        status: of the command that was started; negative: the signal that ended it.
        node: this machine.
        asked: the signal at which this supervisor asked the run to stop; empty: none.
        ends: what processes said at their end, as `ends.record_end` writes it; in order of time.
        hang: the event in which a monitor named who hangs.
        watch: the event for which the run itself saved and stopped, to be started elsewhere.
        kernel: machine, why, and whether that takes the machine out, of this machine's kernel log.
        gpu: the event in which the run told of a GPU that takes its machine out.
        tail: the last lines of standard error.
        places: which machine each process was on.
        lost: machines that the scheduler holds for lost, and what it says.
        went_back: whether the run has removed checkpoints, as it went back before a spike.
    """

    status: int
    node: str = ""
    asked: str = ""
    ends: Sequence[dict[str, Any]] = ()
    hang: dict[str, Any] | None = None
    watch: dict[str, Any] | None = None
    kernel: Sequence[tuple[str, str, bool]] = ()
    gpu: dict[str, Any] | None = None
    tail: Sequence[str] = ()
    expects_word: bool = False
    """Whether a run that is complete says so in `ends`."""
    places: Mapping[int, str] = field(default_factory=dict)
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
        step: of what was not finite: the step (from 1); 0: it is not known.
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
"""As `distributed.failures` says it."""
_NUMERICAL = re.compile(r"not finite(?: in step (\d+))?")
_BEGAN_WITH = "weights that the run began with"
_NEVER_MET = "MASTER_ADDR: "
"""As `train.step` and `distributed.launch` say it."""
_REPORT = re.compile(r"torch[./]distributed[./]elastic|^Failures:|^=+$|^-+$")
"""Where torchrun begins to say that something has failed."""
_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_HOST, _RANK = re.compile(r"^\s*host\s*:\s*(\S+)"), re.compile(r"^\s*rank\s*:\s*(\d+)")


def find_cause(evidence: Evidence) -> Cause:
    """Why an attempt ended."""
    ends = evidence.ends
    if evidence.status == DONE and _is_complete(evidence):
        return Cause("done", "the run is complete")
    if evidence.status == DONE and not ends and not evidence.asked:
        why = "the command ended with status 0, but no process has said that a run is complete"
        return Cause("user", f"{why}; write a supervise.launch that waits for the run")
    if evidence.watch is not None and not evidence.asked:
        host = evidence.watch.get("host")
        return Cause("machine", str(evidence.watch["what"]), (str(host),) if host else ())
    saved = next((end for end in ends if end["status"] == SAVED), None)
    if evidence.asked or saved or evidence.status == SAVED:
        is_saved = saved is not None or evidence.status == SAVED
        how = "and saved" if is_saved else "before it could save"
        told = saved["lines"][0] if saved and saved["lines"] else ""
        why = f"stopped by {evidence.asked}, {how}" if evidence.asked else told or f"stopped, {how}"
        return Cause("preemption", why, is_saved=is_saved)
    given_up = next((end for end in ends if end["status"] == GIVE_UP), None)
    if given_up or evidence.status == GIVE_UP:
        return Cause("given up", _said(given_up) if given_up else "the run asks for no restart")
    return (
        _told(evidence)
        or _broken(evidence)
        or _lost(evidence)
        or _hung(evidence)
        or _seen(evidence)
        or Cause("unknown", _number(evidence) + _last_line(evidence), _first_host(evidence))
    )


def _is_complete(evidence: Evidence) -> bool:
    """Whether status 0 is to be believed: some launchers have it whatever became of the run."""
    return not evidence.expects_word or any(end["status"] == DONE for end in evidence.ends)


def _said(end: dict[str, Any]) -> str:
    return f"rank {end['rank']} on {end['node']}: {end['lines'][0] if end['lines'] else 'nothing'}"


def _told(evidence: Evidence) -> Cause | None:
    """What a process that knows says."""
    for end in evidence.ends:
        text = "\n".join(end["lines"])
        found = _NUMERICAL.search(text)
        if end["kind"] in ("mistake", "full", "error") and found:
            step = int(found[1] or 0)
            return Cause("numerical", _said(end), step=step, is_first=_BEGAN_WITH in text)
        if text.startswith(_NEVER_MET):
            return Cause("network", _said(end))
        if end["kind"] in ("mistake", "full"):
            kind = "network" if _NETWORK.search(text) else "user"
            return Cause(kind, _said(end))
    numbers = [int(n) for line in evidence.tail for n in _EXIT.findall(line)]
    if BAD_MACHINE in (evidence.status, *numbers):
        return Cause("machine", "the health check found a bad machine", (evidence.node,))
    if MISTAKE in (evidence.status, *numbers):
        last = next((line for line in reversed(evidence.tail) if line.strip()), "see its output")
        return Cause("user", f"a mistake in the recipe or the command: {last.strip()[:300]}")
    return None


def _broken(evidence: Evidence) -> Cause | None:
    """What the kernel's log and the GPUs' driver say; of a lost GPU others hear nothing more."""
    for node, why, is_bad in evidence.kernel:
        if is_bad:
            return Cause("machine", f"kernel log of {node}: {why}", (node,))
    if evidence.gpu is not None:
        host = evidence.gpu.get("host")
        return Cause("machine", str(evidence.gpu["what"]), (str(host),) if host else ())
    return None


def _lost(evidence: Evidence) -> Cause | None:
    """Machines of this attempt that the scheduler has lost."""
    used = {*evidence.places.values()}
    nodes = [node for node in evidence.lost if node in used or not used]
    if not nodes:
        return None
    return Cause("machine", "; ".join(evidence.lost[node] for node in nodes), tuple(nodes))


def _gone(evidence: Evidence) -> Cause | None:
    """Machines none of whose processes said a word, as others lost them."""
    said = {end["rank"] for end in evidence.ends}
    for end in evidence.ends:
        named = (
            _LOST_RANKS.search(end["lines"][0]) if end["kind"] == "lost" and end["lines"] else None
        )
        if named is None:
            continue
        ranks = [int(rank) for rank in named[1].split(", ")]
        nodes = {evidence.places[rank] for rank in ranks if rank in evidence.places}
        talked = {node for rank, node in evidence.places.items() if rank in said}
        silent = tuple(sorted(nodes - talked))
        if silent and len(set(evidence.places.values())) > 1:
            why = f"{_said(end)}; nobody on {', '.join(silent)} said a word"
            return Cause("machine", why, silent)
    return None


def _hung(evidence: Evidence) -> Cause | None:
    if evidence.hang is None:
        return None
    return Cause("hang", str(evidence.hang["what"]), names_in(evidence.hang, "nodes"))


def _seen(evidence: Evidence) -> Cause | None:
    """What errors without a cure and the output say."""
    errors = [end for end in evidence.ends if end["kind"] == "error"]
    lines = [(line, end["node"], _said(end)) for end in errors for line in end["lines"]]
    lines += [(line, evidence.node, line.strip()[:300]) for line in evidence.tail]
    for line, node, said in lines:
        if _MACHINE.search(line):
            return Cause("machine", said, (node,))
    for end in errors:  # of its own, which others lost it by
        if not _NETWORK.search("\n".join(end["lines"])):
            return Cause("unknown", _said(end))
    gone = _gone(evidence)
    if gone is not None:
        return gone
    if evidence.status < 0 or any(code in (-9, -7, -11) for code in _codes(evidence)):
        return None  # a rank or the agent was killed: that others lost a connection says nothing
    for line, _, said in lines:
        if _NETWORK.search(line):
            return Cause("network", said)
    return None


def _codes(evidence: Evidence) -> list[int]:
    return [int(code) for line in evidence.tail for code in _EXIT.findall(line)]


def _number(evidence: Evidence) -> str:
    """The number with which the first process ended, as a word where it is a signal."""
    codes = _codes(evidence)
    code = codes[-1] if codes else evidence.status  # torchrun names the first failure last
    ranks = [match[1] for line in evidence.tail if (match := _RANK.search(line))]
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
    """What was said last on standard error, before torchrun's report of it."""
    ends = (n for n, line in enumerate(evidence.tail) if _REPORT.search(line))
    said = [line.strip() for line in evidence.tail[: next(ends, None)] if line.strip()]
    return f"; the last line on standard error: {said[-1][:300]}" if said else ""


def _first_host(evidence: Evidence) -> tuple[str, ...]:
    """The machine of the first process that failed, if it was ended by no mistake of its own."""
    codes = _codes(evidence)
    hosts = [match[1] for line in evidence.tail if (match := _HOST.search(line))]
    if not codes or codes[-1] not in (-7, -11, -4):  # bus error, segmentation, illegal instruction
        return ()
    return (hosts[-1],) if hosts and hosts[-1] != "localhost" else (evidence.node,)
