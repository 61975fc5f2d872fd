"""W&B gets the run: offline for real, online from a small server of its protocol; or says why not.

Each run is a process of its own, as wandb starts another one and works at exit. What it leaves on
the disk is read by its own command, `wandb sync`.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loggers.hearing import closed_port
from tests.loggers.wandb_server import WandbServer

pytest.importorskip("wandb", reason="the extra wandb is not installed")

RUN = """
import json, sys, time; from pathlib import Path
from llmfoundry.loggers import wandb_logger
from tests.loggers.hearing import *
folder, heard = Path(sys.argv[1]), Hears()
first, last, mode = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
hooks = sys.exit, sys.excepthook
wandb_logger.FINISH_SECONDS, wandb_logger._LOOK_SECONDS = map(float, sys.argv[6:])
sender = writer('wandb', folder, heard, wandb_mode=mode)
sender.start(facts(folder, first, params={'seed': 17, 'optimizer.lr': 6e-4}, tags={'torch': '2'}))
def train(first, last):
    for batch in range(first + 1, last + 1):
        sender.log(batch, {'loss/train/total': 1 / batch, 'time/token': batch * 8})
        if batch % 5 == 0:
            sender.samples(batch, [('def f(', f'x<{batch}):')])
train(first, last)
"""
FINISH = """
began = time.monotonic()
finish(sender, timeout=float(sys.argv[5]))
assert (sys.exit, sys.excepthook) == hooks
print(json.dumps([heard, time.monotonic() - began]))
"""


def environment(home: Path, address: str, key: str = "a" * 40) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "NETRC"))}
    known = {"WANDB_API_KEY": key} if key else {}
    return {**kept, **known, "WANDB_BASE_URL": address, "HOME": str(home)}


def run(
    folder: Path, first: int, last: int, mode: str, address: str, **more: Any
) -> tuple[list[str], float, float]:
    """What the run said, seconds that closing took, and those that the process then took to end."""
    between, timeout = more.pop("between", ""), more.pop("timeout", 30.0)
    code = RUN + between + FINISH
    finish_seconds, look_seconds = more.pop("finish_seconds", 60.0), more.pop("look_seconds", 20)
    arguments = [str(folder), str(first), str(last), mode]
    arguments += [str(seconds) for seconds in (timeout, finish_seconds, look_seconds)]
    done = subprocess.run(
        [sys.executable, "-c", code + "print(time.time())", *arguments],
        env=environment(folder.parent, address, more.pop("key", "a" * 40)),
        capture_output=True,
        text=True,
        timeout=90,
        **more,
    )
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    said, last_moment = done.stdout.splitlines()  # and not a line of wandb's own
    heard, seconds = json.loads(said)
    heard = [line for line in heard if "sending the rest" not in line]  # a busy machine
    return heard, seconds, ended - float(last_moment)


def sync(folder: Path, server: WandbServer) -> None:
    for path in sorted(folder.glob("wandb/*run-*")):
        command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(path)]
        env = environment(folder.parent, server.address)
        subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    made = WandbServer()
    yield made
    made.stop()


def losses(server: WandbServer) -> list[tuple[int, float]]:
    rows = [r for r in server.rows if "loss/train/total" in r]
    return [(r["time/batch"], r["loss/train/total"]) for r in rows]


def test_an_offline_run_is_whole_in_its_folder(tmp_path: Path, server: WandbServer) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("seed: 17\nuri: http://me:secret@host\n")
    upload = "sender.file(folder / 'recipe.yaml')\n"
    nowhere = f"http://127.0.0.1:{closed_port()}"
    heard, _, _ = run(folder, 0, 12, "offline", nowhere, key="", between=upload)
    assert heard == []
    sync(folder, server)
    assert losses(server) == [(b, 1 / b) for b in range(1, 13)]
    run_id = (folder / "wandb_run_id").read_text().strip()
    assert [v["name"] for v in server.runs] == [run_id] * len(server.runs)
    assert server.runs[0]["displayName"] == "tiny" and server.runs[0]["project"] == "llmfoundry"
    config = json.loads(server.runs[0]["config"])
    assert config["optimizer.lr"]["value"] == 6e-4 and config["run.torch"]["value"] == "2"
    assert "secret" not in server.files["recipe.yaml"] and "seed: 17" in server.files["recipe.yaml"]
    pages = [text for name, text in server.files.items() if "samples" in name]
    assert any("<pre><b>def f(</b>x&lt;10):</pre>" in page for page in pages)
    assert server.exit_codes[-1] == 0


def test_an_offline_run_that_begins_late_has_what_was_logged_before(
    tmp_path: Path, server: WandbServer
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    rows = [{"time/batch": b, "loss/train/total": 1 / b} for b in range(1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(folder, 9, 12, "offline", server.address)
    sync(folder, server)
    assert losses(server) == [(b, 1 / b) for b in range(1, 13)]


def test_a_resumed_run_resumes_in_the_same_one_and_repeats_nothing(
    tmp_path: Path, server: WandbServer
) -> None:
    folder = tmp_path / "tiny"
    for first, last in ((0, 14), (9, 20)):  # the second was resumed after 9
        heard, _, exit_seconds = run(folder, first, last, "online", server.address)
        assert heard == [] and exit_seconds < 15
    assert losses(server) == [(b, 1 / b) for b in range(1, 21)]
    assert [row["_step"] for row in server.rows] == list(range(1, 21))
    assert len({v["name"] for v in server.runs}) == 1
    run(folder, 0, 1, "online", server.address)  # from the first batch: another run
    assert len({v["name"] for v in server.runs}) == 2


@pytest.mark.slow
def test_offline_folders_of_a_resumed_run_become_one_run(
    tmp_path: Path, server: WandbServer
) -> None:
    for first, last in ((0, 14), (9, 20)):
        run(tmp_path / "tiny", first, last, "offline", server.address)
    assert server.requests == 0
    sync(tmp_path / "tiny", server)
    assert len({v["name"] for v in server.runs}) == 1
    # Those after the checkpoint twice, with equal values at the same place of the x axis.
    assert losses(server) == [(b, 1 / b) for b in (*range(1, 15), *range(10, 21))]


@pytest.mark.slow
def test_a_server_that_goes_away_is_said_once_and_the_folder_keeps_the_rest(
    tmp_path: Path, server: WandbServer
) -> None:
    folder = tmp_path / "tiny"
    between = (
        "until = time.monotonic() + 120\n"
        "while not heard and time.monotonic() < until:\n"
        "    last += 1; train(last - 1, last); time.sleep(0.05)\n"
        "train(last, last + 3)\n"
    )

    def kill() -> None:
        while not server.runs:
            time.sleep(0.02)
        time.sleep(0.5)
        server.stop()

    threading.Thread(target=kill, daemon=True).start()
    quick = {"finish_seconds": 2, "look_seconds": 0.1}
    heard, seconds, exit_seconds = run(
        folder, 0, 5, "online", server.address, between=between, **quick
    )
    assert "does not answer" in heard[0] and "training continues" in heard[0] and "W&B" in heard[0]
    assert len(heard) == 2 and "`wandb sync --include-online" in heard[1]
    assert seconds < 25 and exit_seconds < 15
    again = WandbServer()
    sync(folder, again)
    assert [b for b, _ in losses(again)] == list(range(1, len(losses(again)) + 1))
    assert len(losses(again)) >= 8
    again.stop()


def test_a_server_that_was_never_there_ends_in_time(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}"
    heard, seconds, exit_seconds = run(tmp_path / "tiny", 0, 5, "online", nowhere, timeout=2.0)
    assert "W&B" in heard[-1] and "lacks 10 metric values" in heard[-1]
    assert seconds < 15 and exit_seconds < 15


def test_without_a_login_nothing_is_asked_and_one_line_says_so(
    tmp_path: Path, server: WandbServer
) -> None:
    main, terminal = pty.openpty()  # where wandb would ask
    wait = (
        "until = time.monotonic() + 120\n"
        "while not heard and time.monotonic() < until: time.sleep(0.01)\n"
    )
    heard, seconds, exit_seconds = run(
        tmp_path / "tiny",
        0,
        5,
        "online",
        server.address,
        key="",
        between=wait,
        stdin=terminal,
    )
    os.close(main), os.close(terminal)
    assert "W&B (online, project llmfoundry) refuses the run: No API key" in heard[0]
    assert "training continues" in heard[0]
    assert len(heard) == 2 and "lacks 10 metric values" in heard[1]
    assert seconds < 15 and exit_seconds < 15
