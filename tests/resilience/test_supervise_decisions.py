"""Why an attempt ended and what is done about it, as pure functions say of recorded facts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from llmfoundry.exit_status import FAILED, GIVE_UP, MISTAKE, SAVED
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.resilience.supervise.causes import KINDS, Cause, Evidence, find_cause
from llmfoundry.resilience.supervise.decide import (
    FINISH,
    RESTART,
    STOP,
    WITHOUT,
    Attempt,
    decide_restart,
)
from llmfoundry.resilience.supervise.nodes import launch_words


def end(kind: str, line: str, *, rank: int = 0, status: int = 1) -> dict[str, Any]:
    """What a process says at its end."""
    return {"rank": rank, "status": status, "kind": kind, "node": "n1", "lines": [line], "time": 0}


# The last lines of torch 2.13's torchrun when rank 1 was killed.
KILLED = """
Failures:
[1]:
  time      : 2026-11-23_12:29:42
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 21005)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_12:29:38
  host      : n2
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 21006)
""".splitlines()
LOST = end("lost", "rank 1 ended before the others (seen in llmfoundry/train/step.py:133)")
RESET = end("error", "RuntimeError: [gloo] Connection reset by peer")
HANG = {"what": "rank 3 on n4 hangs in phase data", "nodes": ["n4"], "action": "end"}


def killed(code: int) -> list[str]:
    return [line.format(code=code) for line in KILLED]


CASES = {
    "complete": (Evidence(0), "done", ()),
    "asked and saved": (Evidence(1, stop_signal="SIGTERM", ends=[end("stopped", "x", status=75)]),
                        "preemption", ()),
    "the agent killed, whose store all lose": (
        Evidence(-9, stderr=["[rank3] recvValue failed on SocketImpl: Connection reset by peer"]),
        "unknown", ()),
    "asked too early": (Evidence(-15, stop_signal="SIGTERM"), "preemption", ()),
    "a rank was asked": (Evidence(1, ends=[end("stopped", "stopped by SIGUSR1", status=75)]),
                         "preemption", ()),
    "slow rank": (Evidence(1, ends=[end("stopped", "stopped by rank 3", status=75)],
                           watch={"what": "rank 3 on n4 is slow", "host": "n4", "action": "stop"}),
                  "machine", ("n4",)),
    "typo": (Evidence(1, ends=[end("mistake", "data.paths[0]: is not there", status=2), LOST]),
             "user", ()),
    "typo, no word": (Evidence(2, stderr=["optimizer.lr: x is not a number"]), "user", ()),
    "full disk": (Evidence(1, ends=[end("full", "No space left", status=2)]), "user", ()),
    "no room for a step": (Evidence(1, ends=[LOST, end("memory", "step 5 ran out of memory",
                                                       status=75), LOST],
                                    hang=HANG, stderr=killed(75)), "out of memory", ()),
    "no room, and asked": (Evidence(1, stop_signal="SIGTERM", ends=[end("memory", "x", status=75)]),
                           "preemption", ()),
    "nan": (Evidence(1, ends=[end("mistake", "optimizer.lr: the loss or its gradient was not"
                                  " finite in step 7", status=2)]), "numerical", ()),
    "given up": (Evidence(1, ends=[end("given up", "20 spikes in a row", status=93)]),
                 "given up", ()),
    "store away": (Evidence(1, ends=[end("mistake", "data.remote: s3://b: Connection timed out",
                                         status=2)]), "network", ()),
    "hang": (Evidence(1, hang=HANG, ends=[LOST], stderr=killed(-9)), "hang", ("n4",)),
    "xid": (Evidence(1, node="n1", kernel=[("n1", "XID 79 the GPU has fallen off the bus", True)],
                     stderr=killed(-6)), "machine", ("n1",)),
    "lost gpu": (Evidence(1, node="n1", gpu={"what": "the GPU of rank 3 is lost", "host": "n2"},
                          stderr=killed(-6)), "machine", ("n2",)),
    "hang of a lost gpu": (Evidence(1, node="n1", hang=HANG, kernel=[("n1", "XID 79", True)],
                                    stderr=killed(-9)), "machine", ("n1",)),
    "harmless xid": (Evidence(1, kernel=[("n1", "XID 43 reset channel", False)], stderr=killed(-9)),
                     "unknown", ()),
    "ecc": (Evidence(1, ends=[end("error", "CUDA error: uncorrectable ECC error encountered")]),
            "machine", ("n1",)),
    "health check": (Evidence(1, node="n1", stderr=killed(3)), "machine", ("n1",)),
    "nccl": (Evidence(1, ends=[end("error", "DistBackendError: NCCL error: ncclSystemError")]),
             "network", ()),
    "never met": (Evidence(1, ends=[end("lost", "MASTER_ADDR: the processes did not meet at n9:1"
                                            " within 8 s: No route to host")]), "network", ()),
    "peer gone": (Evidence(1, ends=[RESET]), "network", ()),
    "killed": (Evidence(1, ends=[LOST, RESET], stderr=killed(-9)), "unknown", ()),
    "segfault": (Evidence(1, ends=[LOST], stderr=killed(-11)), "unknown", ("n2",)),
    "defect": (Evidence(1, ends=[end("error", "KeyError: 'x'", rank=3), RESET, LOST]),
               "unknown", ()),
    "agent killed": (Evidence(-9), "unknown", ()),
    "machine silent": (Evidence(1, ends=[LOST], node_of={0: "n1", 1: "n2"}), "machine", ("n2",)),
    "silent in a save": (Evidence(1, ends=[end("lost", "parallel.dist_timeout: rank 1 did not come"
                                               " within 600 s (waited for in x.py:1): it hangs")],
                                  node_of={0: "n1", 1: "n2"}), "machine", ("n2",)),
    "one process of two": (Evidence(1, ends=[LOST, end("lost", "x", rank=2)],
                                    node_of={0: "n1", 1: "n2", 2: "n2"}), "unknown", ()),
    "all on one machine": (Evidence(1, ends=[LOST], node_of={0: "n1", 1: "n1"}), "unknown", ()),
    "said by who is lost": (Evidence(1, ends=[end("mistake", "x: is not there", rank=1, status=2),
                                              LOST], node_of={0: "n1", 1: "n2"}), "user", ()),
    "lost to Slurm": (Evidence(1, ends=[LOST], hang=HANG, node_of={0: "n1", 1: "n2"},
                               lost={"n2": "Slurm holds n2 for down*"}), "machine", ("n2",)),
    "another is lost": (Evidence(1, hang=HANG, node_of={0: "n1", 1: "n4"}, lost={"n7": "x"}),
                        "hang", ("n4",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_causes_are_distinguished(name: str) -> None:
    evidence, kind, nodes = CASES[name]
    cause = find_cause(evidence)
    assert (cause.kind, cause.nodes) == (kind, nodes), cause
    assert cause.kind in KINDS and cause.why and "\n" not in cause.why


def test_the_reason_names_who_and_how() -> None:
    assert find_cause(Evidence(1, stderr=killed(-9))).why == "rank 1 was ended by SIGKILL"
    kernel = [("n1", "the kernel ended a process: no memory left", False)]
    assert "no memory left" in find_cause(Evidence(1, stderr=killed(-9), kernel=kernel)).why
    assert find_cause(Evidence(-9)).why == "the command was ended by SIGKILL"
    assert find_cause(CASES["defect"][0]).why == "rank 3 on n1: KeyError: 'x'"
    assert find_cause(CASES["asked and saved"][0]).is_saved
    assert not find_cause(CASES["asked too early"][0]).is_saved


def of(kind: str, *, progressed: bool = False, bad: tuple[str, ...] = ()) -> Attempt:
    return Attempt(Cause(kind, f"why of {kind}", bad), progressed, bad)


POLICY = SuperviseConfig()


@pytest.mark.parametrize(
    ("kind", "action", "status"),
    [
        ("done", FINISH, 0),
        ("preemption", STOP, SAVED),
        ("user", STOP, MISTAKE),
        ("given up", STOP, GIVE_UP),
        ("numerical", RESTART, 0),
        ("out of memory", RESTART, 0),
        ("machine", RESTART, 0),
        ("network", RESTART, 0),
        ("hang", RESTART, 0),
        ("unknown", RESTART, 0),
    ],
)
def test_the_first_attempt(kind: str, action: str, status: int) -> None:
    decision = decide_restart([of(kind)], POLICY)
    assert (decision.action, decision.status) == (action, status)


def test_a_loss_that_is_not_finite_twice_is_no_machines_error() -> None:
    assert decide_restart([of("numerical", progressed=True)], POLICY).action == RESTART
    twice = [of("numerical", progressed=True), of("numerical")]
    assert decide_restart(twice, POLICY).status == GIVE_UP
    passed = [*twice[:1], of("numerical", progressed=True)]  # it came further: another step
    assert decide_restart(passed, POLICY).action == RESTART


def test_three_attempts_without_progress_end_it_whatever_they_failed_of() -> None:
    kinds = ["machine", "network", "hang", "unknown"]
    for three in itertools.permutations(kinds, 3):
        attempts = [of(kind) for kind in three]
        assert [decide_restart(attempts[:n], POLICY).action for n in (1, 2)] == [RESTART, RESTART]
        assert (
            decide_restart(attempts, POLICY).action,
            decide_restart(attempts, POLICY).status,
        ) == (STOP, GIVE_UP)


def test_starts_with_half_the_microbatch_count_for_no_other_failure() -> None:
    """A microbatch of 64 takes six to become 1; a folder that remembers none of them ends it."""
    short = [of("out of memory")] * 6
    assert decide_restart(short, POLICY) == replace(decide_restart(short[:1], POLICY), wait=0)
    assert decide_restart([*short, of("unknown")], POLICY).action == RESTART
    assert decide_restart([of("unknown"), *short, of("hang")], POLICY).action == RESTART
    assert decide_restart([*short, *[of("hang")] * 3], POLICY).status == GIVE_UP
    assert decide_restart([of("out of memory")] * 25, POLICY).action == STOP
    assert not find_cause(CASES["no room, and asked"][0]).is_saved


def test_budgets_refill_only_after_progress() -> None:
    policy = SuperviseConfig(no_progress=100, max_restarts=3)
    often = [of("network")] * 3
    assert decide_restart(often, policy).action == RESTART
    assert decide_restart([*often, of("network")], policy).status == FAILED
    assert decide_restart([*often, of("network", progressed=True)], policy).action == RESTART
    refilled = [*often, of("network", progressed=True), *often[:2]]
    assert decide_restart(refilled, policy).action == RESTART
    assert decide_restart([*refilled, of("network")], policy).action == STOP
    assert decide_restart([of("unknown")] * 2, policy).action == RESTART
    assert decide_restart([of("unknown")] * 3, policy).action == STOP  # fewer tries
    assert decide_restart([of("machine")], SuperviseConfig(max_restarts=0)).status == FAILED


def test_failures_each_of_which_brought_the_run_further_are_bounded_by_the_day() -> None:
    hourly = replace(of("machine", progressed=True), seconds=3700.0, useful=3000.0)
    assert decide_restart([hourly] * 100, POLICY).action == RESTART  # 23 of them begin within a day
    half = replace(hourly, seconds=1800.0, useful=1500.0)
    assert decide_restart([hourly] * 100 + [half] * 4, POLICY).action == STOP
    assert decide_restart([half] * 24, POLICY).action == RESTART
    stopped = decide_restart([half] * 25, POLICY)
    assert (stopped.action, stopped.status) == (STOP, GIVE_UP)
    assert stopped.why.startswith("24 restarts within a day (supervise.max_restarts_per_day)")
    assert decide_restart([half] * 25, SuperviseConfig(max_restarts_per_day=100)).action == RESTART
    assert decide_restart([half], SuperviseConfig(max_restarts_per_day=0)).status == GIVE_UP


def test_a_run_that_spends_its_day_on_starts_is_given_up() -> None:
    """Though each attempt leaves a newer checkpoint: one of 900 s, 100 of them in kept steps."""
    slow = replace(of("hang", progressed=True), seconds=900.0, useful=100.0)
    assert decide_restart([slow] * 4, POLICY).action == RESTART  # too few to judge
    stopped = decide_restart([slow] * 5, POLICY)
    assert (stopped.action, stopped.status) == (STOP, GIVE_UP)
    assert "goodput is 11% over the last 5 attempts, 1.2 h" in stopped.why
    assert decide_restart([slow] * 5, SuperviseConfig(min_goodput=0.1)).action == RESTART
    assert decide_restart([slow] * 5, SuperviseConfig(min_goodput=0)).action == RESTART
    quick = replace(slow, seconds=60.0, useful=1.0)
    assert decide_restart([quick] * 20, POLICY).action == RESTART  # not an hour yet
    day = replace(slow, seconds=86_400.0, useful=80_000.0)
    assert (
        decide_restart([*[slow] * 4, day, slow], POLICY).action == RESTART
    )  # yesterday does not count


def not_finite(step: int, *, resumed: int, earlier: int, is_first: bool = False) -> Attempt:
    cause = Cause("numerical", "not finite", step=step, is_first=is_first)
    return Attempt(cause, resumed=resumed, earlier=earlier)


def test_weights_that_are_not_finite_after_a_resume_are_passed_over() -> None:
    first = decide_restart([not_finite(56, resumed=55, earlier=50)], POLICY)
    assert (first.action, first.resume_before) == (RESTART, 55)
    assert "first step after ba0000055, so it resumes from ba0000050" in first.why
    damaged = not_finite(0, resumed=55, earlier=50, is_first=True)
    assert decide_restart([damaged], POLICY).resume_before == 55
    later = not_finite(58, resumed=55, earlier=50)
    assert decide_restart([later], POLICY).resume_before is None  # once more from the same
    assert decide_restart([later, later], POLICY).status == GIVE_UP
    again = [not_finite(56, resumed=0, earlier=-1), damaged]
    assert decide_restart(again, POLICY).resume_before == 55  # does not count as the same again
    assert (
        decide_restart([*again, not_finite(56, resumed=50, earlier=45)], POLICY).status == GIVE_UP
    )
    none_before = not_finite(6, resumed=5, earlier=-1)
    assert decide_restart([none_before], POLICY).resume_before is None
    assert decide_restart([none_before] * 2, POLICY).status == GIVE_UP


def test_what_was_said_last_is_quoted_where_no_cause_is_known() -> None:
    said = ["step 3", "Fatal: the license has expired", "", *killed(-6)]
    why = find_cause(Evidence(1, stderr=said)).why
    assert why == (
        "rank 1 was ended by SIGABRT; the last line on standard error: Fatal: the license has"
        " expired"
    )
    long = find_cause(Evidence(1, stderr=["x" * 5000])).why
    assert long.endswith("standard error: " + "x" * 300)


@pytest.mark.parametrize(
    "line",
    [
        "socket.gaierror: [Errno -2] Name or service not known",
        "requests: Failed to resolve 'hub' ([Errno -3] Temporary failure in name resolution)",
        "OSError: [Errno 8] nodename nor servname provided, or not known",
        "curl: (6) Could not resolve host: hub.example",
    ],
)
def test_a_name_that_is_not_known_is_the_networks(line: str) -> None:
    assert find_cause(Evidence(1, ends=[end("error", line)])).kind == "network"
    assert find_cause(Evidence(1, stderr=[line])).kind == "network"
    mistake = end("mistake", f"data.remote: https://hub/x: {line}", status=2)
    assert find_cause(Evidence(1, ends=[mistake])).kind == "network"


def test_pauses_grow_without_progress_up_to_five_minutes() -> None:
    policy = SuperviseConfig(no_progress=100, max_restarts=100, wait_seconds=2.0)
    waits = [decide_restart([of("network")] * n, policy).wait for n in range(1, 12)]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert decide_restart([of("network")] * 5 + [of("network", progressed=True)], policy).wait == 2


def test_machines_are_taken_out_only_where_it_may_and_can() -> None:
    bad = [of("machine", bad=("n4",))]
    reported = decide_restart(bad, POLICY)
    assert (reported.action, reported.nodes) == (
        RESTART,
        (),
    ) and "the check finds n4 bad" in reported.why
    out = decide_restart(bad, SuperviseConfig(act=True), can_exclude=True)
    assert (out.action, out.nodes) == (WITHOUT, ("n4",))
    alone = decide_restart(bad, SuperviseConfig(act=True))
    assert (alone.action, alone.status) == (STOP, SAVED)
    assert (
        decide_restart([of("machine")], SuperviseConfig(act=True), can_exclude=True).action
        == RESTART
    )


def test_who_does_not_start_on_fewer_machines_is_started_elsewhere() -> None:
    """Also where its batch does not divide among those that are left: a mistake elsewhere."""
    for kind in ("user", "unknown", "network"):
        refused = Attempt(Cause(kind, "x"), without=("n4",))
        decision = decide_restart([of("machine", bad=("n4",)), refused], SuperviseConfig(act=True))
        assert (decision.action, decision.status) == (STOP, SAVED)
        assert "does not start here without n4" in decision.why


def test_the_launch_leaves_machines_out_where_there_are_any() -> None:
    launch = ["srun", "--nodes=2", "--exclude={exclude}", "torchrun"]
    assert launch_words(launch, []) == ["srun", "--nodes=2", "torchrun"]
    assert launch_words(launch, {"n4", "n2"})[2] == "--exclude=n2,n4"
    assert launch_words(["srun", "--nodes={nodes}"], [], 7) == ["srun", "--nodes=7"]
