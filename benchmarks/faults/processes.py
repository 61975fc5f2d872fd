"""Faults of processes, numbers and recipes."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace

import psutil

from benchmarks.faults.outcome import ENDED, NONE, SKIPPED, Expected, Seen
from benchmarks.faults.runs import SAVE, STOPPED, Place, Run
from benchmarks.faults.table import fault

LOST = 2 * SAVE
"""Steps at most: a save in the background may not be whole yet when the next is due."""


@fault(
    "rank killed",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def rank_killed(place: Place) -> Seen:
    """As the kernel does where memory runs out, or somebody by mistake."""
    return _killed(place, "rank-killed", 2 * SAVE + 3)


@fault(
    "rank killed while saving",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def rank_killed_while_saving(place: Place) -> Seen:
    """The others' saves wait for it, in the background: they must not hold the end up."""
    return _killed(place, "killed-while-saving", 2 * SAVE, "parallel=fsdp")


def _killed(place: Place, name: str, step: int, *overrides: str) -> Seen:
    whole = place.undisturbed(*overrides)
    with place.start(name, *overrides) as run:
        run.wait_for(step - 1)
        rank = run.ranks()[1]
        run.wait_for(step)
        run.strike(rank)
        run.end()
        return run.seen(whole)


@fault(
    "agent (torchrun) killed",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def agent_killed(place: Place) -> Seen:
    """The ranks are orphans, which must not go on beside those of the next start.

    A save under way may tell first that it has failed: the agent has the store by which all met.
    """
    whole = place.undisturbed()
    with place.start("agent-killed") as run:
        run.wait_for(12)
        run.strike(run.launcher())
        run.end()
        return run.seen(whole, but=("save_failed",))


@fault(
    "rank stopped (SIGSTOP)",
    Expected("hang, rank 1", "end, restart", detect_seconds=STOPPED + 10, lost_steps=LOST),
)
def rank_stopped(place: Place) -> Seen:
    """It neither ends nor goes on; all others wait for it."""
    whole = place.undisturbed()
    with place.start("rank-stopped") as run:
        run.wait_for(12)
        run.strike(run.ranks()[1], signal.SIGSTOP)
        run.end()
        return run.seen(whole)


@fault(
    "rank slowed by half",
    Expected("slow_rank, rank 2", "log", detect_seconds=60),
)
def rank_slowed(place: Place) -> Seen:
    """Its blocks take twice as long; a machine that is only slow is told of, and no more."""
    watch = ("callbacks.watch.interval=5", "callbacks.watch.slow_rank_above=1.5")
    return _inside(place, "rank-slowed", "slow_rank={step: 21}", *watch)


@fault(
    "NaN in one rank, once",
    Expected("supervisor: numerical", "restart", detect_seconds=30, lost_steps=LOST),
)
def not_a_number(place: Place) -> Seen:
    """A silent error of one machine: the same steps again are sound."""
    return _inside(place, "nan", "poison={step: 23}")


@fault(
    "out of memory in one rank",
    Expected("supervisor: user", "stop", detect_seconds=30, losses=ENDED, status=2),
)
def out_of_memory(place: Place) -> Seen:
    """PyTorch cannot allocate: the same again would fail again, and the line says what to write."""
    return _inside(place, "out-of-memory", "out_of_memory={step: 23}")


BAD = 31  # the first step with noise in its rows
BACK_TO = 20  # the newest checkpoint that is roll_back_steps (6) older
LEFT_OUT = BAD - BACK_TO + 5
SPIKES = ("callbacks.watch.spike_window=16", "schedule.t_warmup=2ba")


@fault(
    "bad data, loss_spike=roll_back",
    Expected("loss_spike", "roll_back", detect_seconds=20, lost_steps=BAD - BACK_TO),
)
def bad_data_rolled_back(place: Place) -> Seen:
    """It ends as the run that never had the batches, which is compared with here."""
    without = f"callbacks.plugins.without_rows={{step: {BACK_TO + 1}, steps: {LEFT_OUT}}}"
    whole = place.undisturbed(*SPIKES, without)
    with _with_bad_data(place, "roll_back", "roll_back_steps=6", "roll_back_skip=5") as run:
        return run.seen(whole)


@fault(
    "bad data, loss_spike=skip",
    Expected("loss_spike", "skip", detect_seconds=20, losses=SKIPPED),
)
def bad_data_skipped(place: Place) -> Seen:
    """Its three updates are left out."""
    with _with_bad_data(place, "skip") as run:
        return run.seen({}, losses_are=SKIPPED)


def _with_bad_data(place: Place, policy: str, *watch: str) -> Run:
    bad = f"callbacks.plugins.bad_rows={{step: {BAD}}}"
    words = [f"callbacks.watch.{word}" for word in (f"loss_spike={policy}", *watch)]
    run = place.start(f"bad-data-{policy}", bad, *SPIKES, *words)
    run.end()
    run.struck = next(step.time for step in run.steps() if step.number == BAD - 1)
    return run


@fault(
    "all ranks throttled to a quarter",
    Expected("mfu_drop", "log", detect_seconds=90),
)
def throttled(place: Place) -> Seen:
    """As heat or a power limit does, by SIGSTOP and SIGCONT; all processes alike.

    Steps beside which a checkpoint is written are not compared: here no round would be left.
    """
    whole = place.undisturbed()
    watch = ("callbacks.watch.interval=4", "callbacks.watch.slow_rank=off")
    with place.start("throttled", *watch, "save_interval=60ba") as run:
        run.wait_for(40)
        ranks, run.struck = list(run.ranks().values()), time.time()
        while run.process.poll() is None:
            for request, seconds in ((signal.SIGSTOP, 0.3), (signal.SIGCONT, 0.1)):
                for rank in ranks:
                    with suppress(psutil.Error):
                        rank.send_signal(request)
                time.sleep(seconds)
        return run.seen(whole)


@fault(
    "preemption (SIGTERM), and started again",
    Expected("supervisor: preemption", "stop", detect_seconds=30, lost_steps=0),
)
def preempted(place: Place) -> Seen:
    """It saves before it ends with status 75, at which a scheduler starts it again."""
    whole = place.undisturbed()
    with place.start("preempted") as run:
        run.wait_for(12)
        run.strike(psutil.Process(run.process.pid), signal.SIGTERM)
        status, struck = run.end(), run.struck
    with place.start("preempted") as run:
        run.struck = struck
        run.end()
        seen = run.seen(whole)
    return seen if status == 75 else replace(seen, status=status)


@fault(
    "ended by the kernel for memory (SIGKILL)",
    Expected("supervisor: unknown", "restart", detect_seconds=30, lost_steps=LOST),
)
def ended_for_memory(place: Place) -> Seen:
    """The kernel's log says why, and so does the decision. The log is a file of ours here."""
    whole, log = place.undisturbed(), place.folder / "kernel.log"
    log.touch()
    with place.start("ended-for-memory", f"health_check.kernel_log={log}") as run:
        run.wait_for(12)
        rank = run.ranks()[3]
        line = f"Out of memory: Killed process {rank.pid} (python) total-vm:9999kB"
        log.write_text(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} kernel: {line}\n")
        run.strike(rank)
        run.end()
        seen = run.seen(whole)
    return seen if "no memory left" in seen.notes else replace(seen, detected_by="supervisor: ?")


@fault(
    "typo in a key",
    Expected("the recipe's check", "stop", detect_seconds=30, losses=NONE, status=2),
)
def typo(place: Place) -> Seen:
    """Nothing is started, and the line names the key that was meant."""
    with place.start("typo", "save_intervall=5ba") as run:
        began, status = run.struck, run.end()
        is_named = "save_interval" in run.said() and not run.folder.exists()
        who = "the recipe's check" if is_named else ""
        after = time.time() - began
        return Seen(who, "stop", after, None, None, NONE, status, run.said().strip())


@fault(
    "mistake that only the run finds",
    Expected("supervisor: user", "stop", detect_seconds=60, losses=NONE, status=2),
)
def mistake(place: Place) -> Seen:
    """It is not tried again."""
    with place.start("mistake", "data.paths=[nowhere]") as run:
        run.end()
        return run.seen({})


@fault(
    "newest checkpoint damaged, and a rank killed",
    Expected("supervisor: unknown", "restart", detect_seconds=30, lost_steps=LOST + SAVE),
)
def damaged(place: Place) -> Seen:
    """A few bytes are flipped while nobody looks; the run goes on from the one before."""
    whole = place.undisturbed()
    with place.start("damaged") as run:
        run.wait_for(3 * SAVE + 2)
        launcher, ranks = run.launcher(), run.ranks()
        launcher.suspend()  # until the bytes are flipped
        run.strike(ranks[1])
        deadline = time.monotonic() + 60
        while any(_is_alive(rank) for rank in ranks.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        newest = max((run.folder / "checkpoints").glob("ba*/COMMIT")).parent
        path = max(newest.glob("*.distcp"), key=lambda one: one.stat().st_size)
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
        path.write_bytes(content)
        launcher.resume()
        run.end()
        seen = run.seen(whole)
        is_refused = f"{newest.name} is refused" in run.said()
    return seen if is_refused else replace(seen, losses=f"{newest.name} was not refused")


@fault(
    "a second supervisor on the same run",
    Expected("supervisor: user", "stop", detect_seconds=60, losses=ENDED, status=75),
)
def second_supervisor(place: Place) -> Seen:
    """The second ends with a mistake of the user's; the first goes on, and is then asked to end."""
    whole = place.undisturbed()
    with place.start("twice", "callbacks.plugins.pace.seconds=3") as first:
        first.wait_for(1)
        with place.start("twice") as second:
            first.struck, status = time.time(), second.end()
        first.wait_for(len(first.steps()) + 1)
        first.process.terminate()
        first.end()
        seen = first.seen(whole)
    notes = f"the second ended with status {status}, the first went on; {seen.notes}"
    return replace(seen, notes=notes, status=seen.status if status == 2 else status)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _inside(place: Place, name: str, plugin: str, *overrides: str) -> Seen:
    """A fault of the plugin's."""
    chosen, _, settings = plugin.partition("=")
    whole = place.undisturbed()
    with place.start(name, f"callbacks.plugins.{chosen}={settings}", *overrides) as run:
        run.end()
        return run.seen(whole)
