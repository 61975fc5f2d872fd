"""Kill a run at every point of its life, let it resume, and compare it with one left alone.

    python -m tests.checkpoint.killing --kills 300 --requests 8       (make test-slow)

The process imports all that training needs, once, and forks every start of a run from itself, so
that a start takes a fraction of a second; each fork then does what `scripts/train.py` does. One
idea: the moments that matter are those at which the run's folder changes. Python reports each
(audit events: open, rename, remove …), so the run is killed at the k-th change, for any k, again
and again the same; kills at moments of the clock are put between them, and signals that ask a run
to stop come in each of its phases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.tiny import losses, write_finetune, write_recipe

LENGTH = ("max_duration=10ba", "save_interval=3ba", "save_num_checkpoints_to_keep=2")
"""Four saves, the third of which deletes the first."""
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


@dataclass(frozen=True)
class Mode:
    """A way of running."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    recipe: str = "tiny.yaml"
    """finetune.yaml: adapters on runs/base, by scripts/finetune.py."""


MODES = {
    "synchronous": Mode(("save_async=false",)),
    "asynchronous": Mode(("save_async=true",)),
    "workers": Mode(("save_async=true", "data.loader_workers=1")),
    "mlflow": Mode(("save_async=true", "logger.mlflow=true", "logger.tensorboard=true")),
    "ddp": Mode(("save_async=true", "parallel=ddp"), ranks=2),
    "fsdp": Mode(("save_async=true", "parallel=fsdp"), ranks=2),
    "expert": Mode(
        (
            "save_async=true",
            "parallel=fsdp",
            "parallel.expert_parallel_degree=2",
            "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu,"
            " ffn_hidden_size: 16, moe_num_experts: 4, moe_top_k: 2}",
        ),
        ranks=2,
    ),
    "compiled": Mode(("save_async=true", "compile=true")),
    "lora": Mode(("save_async=true", "model.quantize=none"), recipe="finetune.yaml"),
    "qlora": Mode(("save_async=true",), recipe="finetune.yaml"),
    "qlora-fsdp": Mode(("save_async=true", "parallel=fsdp"), ranks=2, recipe="finetune.yaml"),
}
SHARES = {"asynchronous": 6, "ddp": 3, "fsdp": 4, "synchronous": 2, "workers": 1, "mlflow": 1}
"""How the kills are dealt among the modes."""
PHASES = ("_take", "_step", "_log", "_evaluate", "save")
"""Where signals come that ask for a stop: methods of the trainer."""


@dataclass(frozen=True)
class Blow:
    """What happens to a run: a signal to one of its ranks."""

    number: signal.Signals = signal.SIGKILL
    rank: int = 0
    change: int | None = None
    """At this change of the run's folder, counted from 1."""
    seconds: float | None = None
    """So long after the start."""
    phase: str | None = None
    """At the beginning of this method of the trainer."""


def start(folder: Path, name: str, mode: Mode, blow: Blow) -> list[int]:
    """One start of the run `name`; how each rank ended: an exit status, or minus a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(mode.ranks):
        pid = os.fork()
        if pid == 0:
            _become_run(folder, name, mode, rank, port, blow)
        pids.append(pid)
    return _wait(pids, blow)


def _become_run(folder: Path, name: str, mode: Mode, rank: int, port: int, blow: Blow) -> None:
    """What a forked process does: the script, in a session of its own. Never returns."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open(f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["script", mode.recipe, f"run_name={name}", *LENGTH, *mode.overrides]
        if mode.ranks > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(mode.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        if rank == blow.rank:
            changes = _arm(blow, folder / "runs" / name)
        from llmfoundry.cli.script import run
        from llmfoundry.recipe.finetune import FinetuneRecipe
        from llmfoundry.recipe.train import TrainRecipe

        schema = TrainRecipe if mode.recipe == "tiny.yaml" else FinetuneRecipe
        run(schema, "llmfoundry.cli.commands.train:train")
        status = 0
        if rank == blow.rank:
            Path(f"{name}.changes").write_text(str(next(changes) - 1))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _arm(blow: Blow, run_folder: Path) -> Iterator[int]:
    """Prepare the blow; what counts the changes of the folder."""
    if blow.phase is not None:
        from llmfoundry.train.trainer import Trainer

        method = getattr(Trainer, blow.phase)

        def struck(self: Trainer, *arguments: Any) -> Any:
            setattr(Trainer, blow.phase or "", method)
            os.kill(os.getpid(), blow.number)
            return method(self, *arguments)

        setattr(Trainer, blow.phase, struck)
    if blow.seconds is not None:
        threading.Timer(blow.seconds, os.kill, (os.getpid(), blow.number)).start()
    changes = itertools.count(1)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes(event, arguments, str(run_folder)) and next(changes) == blow.change:
            os.kill(os.getpid(), blow.number)

    sys.addaudithook(hear)
    return changes


def _changes(event: str, arguments: tuple[Any, ...], run_folder: str) -> bool:
    """Whether an audit event is about to change something in the run's folder."""
    if event == "open":
        path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not writes:
            return False
    elif event not in CHANGES:
        return False
    path = arguments[0]
    return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(run_folder)


def _wait(pids: Sequence[int], blow: Blow) -> list[int]:
    """How the ranks ended; once one was killed, the others have 3 seconds, as under a launcher."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + 120
    while len(ended) < len(pids):
        for pid in set(pids) - ended.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
                if ended[pid] != 0:
                    deadline = min(deadline, time.monotonic() + 3)
        if time.monotonic() > deadline:
            for pid in set(pids) - ended.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [ended[pid] for pid in pids]


def final(folder: Path, name: str) -> dict[str, Any]:
    """What must not depend on what happened to a run: every loss, and its last weights."""
    run_folder = folder / "runs" / name
    commit = json.loads((run_folder / "checkpoints" / "ba0000010" / "COMMIT").read_text())
    weights = {key: value for key, value in commit["files"].items() if key.endswith(".distcp")}
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["time/batch"] for row in rows if "loss/train/total" in row]
    return {"losses": losses(run_folder), "steps": steps, "weights": weights}


def kills(mode: Mode, changes: int, seconds: float, points: int, draw: random.Random) -> list[Blow]:
    """Four fifths at changes of the folder, evenly spread; the others at moments of the clock."""
    at_changes = min(changes, points - points // 5)
    first = draw.random()
    found = [
        Blow(change=1 + int((n + first) * changes / at_changes), rank=0) for n in range(at_changes)
    ]
    clock = points - at_changes
    found += [
        Blow(seconds=seconds * (n + draw.random()) / clock, rank=n % mode.ranks)
        for n in range(clock)
    ]
    return found


def requests(mode: Mode, seconds: float, points: int) -> list[Blow]:
    """Signals that ask for a stop: in each phase, at moments of the clock, and between."""
    numbers = itertools.cycle([signal.SIGTERM, signal.SIGINT])
    ranks = itertools.cycle(range(mode.ranks))
    found = [Blow(next(numbers), next(ranks), phase=phase) for phase in PHASES]
    times = range(1, 1 + max(0, points - len(found)))
    found += [Blow(next(numbers), next(ranks), seconds=seconds * n / len(times)) for n in times]
    return found[:points]


def strike(folder: Path, name: str, mode: Mode, blow: Blow, whole: dict[str, Any]) -> str:
    """Start, strike, and start again until the run is complete; how it ended."""
    statuses = start(folder, name, mode, blow)
    struck = -blow.number in statuses
    torn = damaged(folder / "runs" / name)
    if torn:
        return f"{torn} after the blow"
    for _ in range(3):
        again = start(folder, name, mode, Blow())
        if not any(again):
            break
    else:
        return f"does not resume: {again}"
    if final(folder, name) != whole:
        return "another end"
    left = [path.name for path in (folder / "runs" / name / "checkpoints").iterdir()]
    if sorted(left) != ["ba0000009", "ba0000010"]:
        return f"left {left}"
    shutil.rmtree(folder / "runs" / name)
    return "equal" if struck or blow.number != signal.SIGKILL else "equal, not hit"


def damaged(run_folder: Path) -> str:
    """What is wrong with a checkpoint that counts; empty: all of them are whole."""
    from llmfoundry.checkpoint.storage import Storage
    from llmfoundry.checkpoint.verify import find_damage

    run = Storage(run_folder)
    counting = [run.checkpoint(f.name) for f in run.checkpoints() if run.has_commit(f)]
    problems = ((found.name, find_damage(found)) for found in counting)
    return "; ".join(f"{place}: {problem}" for place, problem in problems if problem)


def attack(folder: Path, name: str, points: int, seed: int | None) -> Counter[str]:
    """All points of a mode, kills or (without a seed) requests to stop; how often it ended how."""
    mode = MODES[name]
    began = time.monotonic()
    shutil.rmtree(folder / "runs" / f"{name}-whole", ignore_errors=True)
    assert start(folder, f"{name}-whole", mode, Blow()) == [0] * mode.ranks, "the run left alone"
    seconds = time.monotonic() - began
    whole = final(folder, f"{name}-whole")
    changes = int((folder / f"{name}-whole.changes").read_text())
    ends = Counter[str]()
    if seed is None:
        planned = requests(mode, seconds, points)
    else:
        planned = kills(mode, changes, seconds, points, random.Random(f"{seed} {name}"))
    for number, blow in enumerate(planned):
        label = f"{name}-{'request' if seed is None else 'kill'}-{number}"
        end = strike(folder, label, mode, blow, whole)
        ends[end] += 1
        if not end.startswith("equal"):
            print(f"{name}, {blow}: {end}; see {folder}/{label}.0.log", flush=True)
    kind = "requests to stop" if seed is None else f"kills over {changes} changes"
    print(f"{name}: {len(planned)} {kind}, {seconds:.1f} s a run: {dict(ends)}", flush=True)
    return ends


def _train_base(folder: Path, name: str, *overrides: str) -> None:
    """What adapters stand on, in a process of its own as every run is."""
    assert start(folder, name, Mode(overrides), Blow()) == [0], "the base"


def main() -> None:
    """Strike as often as asked; exit status 1 if any run ended otherwise than one left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=17, help="over all modes")
    parser.add_argument("--requests", type=int, default=0, help="to stop, in each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(SHARES), choices=MODES)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    folder = Path(tempfile.mkdtemp(prefix="killing-"))
    write_recipe(folder)
    import torch.distributed.checkpoint

    import llmfoundry.cli.commands.train  # noqa: F401

    torch.set_num_threads(1)
    if any(MODES[name].recipe == "finetune.yaml" for name in arguments.modes):
        write_finetune(folder, partial(_train_base, folder))
    shares = sum(SHARES.get(name, 1) for name in arguments.modes)
    ends = Counter[str]()
    for name in arguments.modes:
        share = round(arguments.kills * SHARES.get(name, 1) / shares)
        ends += attack(folder, name, share, arguments.seed) if share else Counter()
        ends += attack(folder, name, arguments.requests, None) if arguments.requests else Counter()
    bad = sum(count for end, count in ends.items() if not end.startswith("equal"))
    print(f"{ends.total()} points, {ends['equal']} hit, {bad} runs with another end")
    if not bad:
        shutil.rmtree(folder)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
