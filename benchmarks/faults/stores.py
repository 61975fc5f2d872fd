"""Faults of what a run talks to: stores of data and of checkpoints (a real S3 server), MLflow's.

The S3 server is that of tests/data, behind a proxy in this process that fails as it is told.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.machines import LOST, WARNED, Listener
from benchmarks.faults.outcome import Expected, Seen
from benchmarks.faults.processes import BACK_TO, BAD, LEFT_OUT, SPIKES
from benchmarks.faults.runs import LENGTH, RANKS, Place, Run
from benchmarks.faults.table import fault
from llmfoundry.recipe.front.paths import ROOT
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.shards import write_mds

_PATIENCE = 120.0  # seconds, for a folder to be there
_SLOW = "callbacks.plugins.pace.seconds=0.3"


class Store:
    """A store that answers, or does as it is told.

    Attributes:
        env: what a run needs to reach it.
    """

    def __init__(self, server: FaultyS3) -> None:
        """It answers."""
        self._answers, self._how = threading.Event(), ""
        self._answers.set()
        server.next_fault = self._fault  # type: ignore[method-assign]
        self.env = {"S3_ENDPOINT_URL": server.url, "AWS_ENDPOINT_URL": server.url}
        self.env |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}

    def fail(self, how: str) -> None:
        """Hang, or answer as `tests.data.s3_server` names it, until `answer`."""
        self._how = how
        self._answers.clear()

    def answer(self) -> None:
        """Answer again, those too that have waited."""
        self._answers.set()

    def _fault(self, key: str, method: str) -> str | None:
        if self._answers.is_set():
            return None
        if self._how != "hang":
            return self._how
        self._answers.wait()
        return "reset"


@contextmanager
def store(place: Place) -> Iterator[tuple[Store, tuple[str, ...]]]:
    """It, and the overrides of a run whose data are there, in shards of a few rows."""
    shards = place.folder / "shards"
    if not shards.exists():
        write_mds(shards / "train", "rows", rows=RANKS * LENGTH)
    with s3_server() as (server, put):
        for path in sorted(shards.rglob("*")):
            if path.is_file():
                put(f"data/{path.relative_to(shards).as_posix()}", path.read_bytes())
        words = ["data.name=shards", "data.paths=[]", f"data.remote=s3://{BUCKET}/data"]
        words += ["data.split=train", "data.prefetch=1b", "data.shuffle=false"]
        yield Store(server), tuple(words)


@fault(
    "data store hangs for ten seconds",
    Expected("data_wait", "log", detect_seconds=60),
)
def data_hangs(place: Place) -> Seen:
    """It accepts and does not answer: asked again after data.download_timeout, and no hang."""
    alone = ("slow_rank=off", "mfu_drop=off", "interval=4", "in_a_row=1")  # others compute here
    watch = [f"callbacks.watch.{word}" for word in alone]
    watch += ["save_interval=20ba"]  # steps beside which something is saved are not compared
    patient = ("data.download_timeout=3", "data.download_retry=50")
    with store(place) as (remote, words):
        name = "data-hangs"
        plain = place.undisturbed(*words[:1], "data.paths=[]", *_local(place))
        with place.start(
            name, *words, *watch, *patient, _cache(place, name), _SLOW, env=remote.env
        ) as run:
            run.wait_for(30)
            run.struck = time.time()
            remote.fail("hang")
            time.sleep(10)
            remote.answer()
            run.end()
            seen = run.seen(plain)
            told, _, _ = seen.detected_by.partition(",")  # any rank may be who waits longest
            return replace(seen, detected_by=told)


def _cache(place: Place, name: str) -> str:
    """Of this run alone: what another has fetched is not asked for."""
    return f"data.cache_folder={place.folder / f'cache-of-{name}'}"


def _local(place: Place) -> tuple[str, ...]:
    """The same rows from this machine's disk."""
    return (f"data.local={place.folder / 'shards'}", "data.split=train", "data.shuffle=false")


@fault(
    "data store answers 503, for longer than it is asked",
    Expected("supervisor: network", "restart", detect_seconds=90, lost_steps=LOST),
)
def data_busy(place: Place) -> Seen:
    """The run ends with a line of it, and is started again."""
    impatient = ("data.download_timeout=3", "data.download_retry=2")
    with store(place) as (remote, words):
        plain = place.undisturbed(*words[:1], "data.paths=[]", *_local(place))
        name = "data-busy"
        with place.start(
            name, *words, *impatient, _cache(place, name), _SLOW, env=remote.env
        ) as run:
            run.wait_for(30)
            run.struck = time.time()
            remote.fail("slow down")
            run.wait_for_event()
            remote.answer()
            run.end()
            return run.seen(plain)


@fault(
    "checkpoint store gone until a save has failed",
    Expected("save_failed", "log", detect_seconds=60),
)
def checkpoints_gone(place: Place) -> Seen:
    """Connections are reset; training goes on, and the next save is whole."""
    whole = place.undisturbed()
    with store(place) as (remote, _):
        words = [f"save_folder=s3://{BUCKET}/runs/mine", "save_local_folder=here"]
        words += ["data.download_retry=1", "data.download_timeout=3", _SLOW]
        with place.start("checkpoints-gone", *words, env=remote.env) as run:
            run.folder = _working_copy(place.folder / "here", run)
            run.wait_for(12)
            run.struck = time.time()
            remote.fail("reset")
            run.wait_for_event()
            remote.answer()
            run.end()
            seen = run.seen(whole)
            told = [action for action in seen.action.split(", ") if action != "log"]
            return replace(seen, action=", ".join(["log", *told]) if seen.action else "")


@fault(
    "bad data, loss_spike=roll_back, checkpoints in a store",
    Expected("loss_spike", "roll_back", detect_seconds=30, lost_steps=BAD - BACK_TO),
)
def rolled_back_in_a_store(place: Place) -> Seen:
    """What was saved since is removed there, and all read the older checkpoint from there."""
    without = f"callbacks.plugins.without_rows={{step: {BACK_TO + 1}, steps: {LEFT_OUT}}}"
    whole = place.undisturbed(*SPIKES, without)
    watch = ("loss_spike=roll_back", "roll_back_steps=6", "roll_back_skip=5")
    words = [f"callbacks.watch.{word}" for word in watch]
    words += [*SPIKES, f"callbacks.plugins.bad_rows={{step: {BAD}}}"]
    words += [f"save_folder=s3://{BUCKET}/runs/mine", "save_local_folder=here-too"]
    with store(place) as (remote, _), place.start("back-in-store", *words, env=remote.env) as run:
        run.folder = _working_copy(place.folder / "here-too", run)
        run.end()
        run.struck = next(step.time for step in run.steps() if step.number == BAD - 1)
        return run.seen(whole, but=("save_failed",))  # save_max_wait, on a busy machine


def _working_copy(above: Path, run: Run) -> Path:
    """Where the run works on this machine."""
    deadline = time.monotonic() + _PATIENCE
    while run.process.poll() is None and time.monotonic() < deadline:
        for folder in above.glob("mine-*"):
            return folder
        time.sleep(0.1)
    raise RuntimeError(f"no working copy:\n{run.said()[-3000:]}")


@fault("MLflow's server killed, and later there again", Expected(WARNED, "", detect_seconds=60))
def mlflow_gone(place: Place) -> Seen:
    """Training does not wait for it; what it lacks is told, and sent by scripts/track.py."""
    from tests.loggers.test_mlflow_server import Server

    whole = place.undisturbed()
    folder = place.folder / "mlflow"
    folder.mkdir()
    server = Server(folder)
    server.start()
    words = ("logger.mlflow=true", f"logger.tracking_uri={server.address}", _SLOW)
    try:
        with place.start("mlflow-gone", *words) as run:
            run.wait_for(12)
            run.struck = time.time()
            server.kill()
            heard = Listener(run, ") fails: ")
            run.end()
            lacking = "metrics.jsonl has every value" in run.said()
            seen = heard.seen(run.seen(whole))
        server.start()
        track = [sys.executable, str(ROOT / "scripts" / "track.py"), f"run={run.folder}"]
        subprocess.run(track, cwd=place.folder, check=True, capture_output=True)
        has_all = dict(server.losses(run.folder)) == whole
    finally:
        server.kill()
    return replace(seen, action="" if lacking and has_all else "MLflow lacks values")
