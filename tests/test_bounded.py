"""The bounded child: what it may take, what it may do, and when it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from llmfoundry import bounded
from llmfoundry.bounded import OutOfBounds, run_bounded
from llmfoundry.errors import UserError
from tests import bounded_functions as functions


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)


def test_results_and_errors_are_those_of_the_function():
    assert run_bounded(functions.double, range(1000), file="f") == [2 * n for n in range(1000)]
    with pytest.raises(UserError, match="no way") as error:
        run_bounded(functions.refuse, ["way"], file="f")
    assert error.value.problems == ("no way", "nor this")
    with pytest.raises(ValueError, match=r"^seven$"):
        run_bounded(functions.bad_value, ["seven"], file="f")


def test_what_takes_too_long_is_one_line_with_the_item_and_the_next_call_works():
    with pytest.raises(OutOfBounds, match=r"^mine: took more than 0.3 s of CPU time") as error:
        run_bounded(functions.slow_at_two, [0, 1, 2, 3], file="mine")
    assert error.value.index == 2 and len(error.value.lines()) == 1
    with pytest.raises(OutOfBounds, match="CPU time"):  # within one operation of Python's
        run_bounded(functions.squares, [3], file="f")
    assert run_bounded(functions.double, [4], file="f") == [8]


def test_larger_items_have_more_time():
    assert run_bounded(functions.busy, [b"a" * 100_000], file="f") == [100_000]
    with pytest.raises(OutOfBounds, match="CPU time"):
        run_bounded(functions.busy, [b"a"], file="f")


def test_memory_and_wall_time_have_ends(monkeypatch):
    with pytest.raises(OutOfBounds, match=r"needed more than 1\.5 GiB of memory"):
        run_bounded(functions.grow, [9], file="f")
    monkeypatch.setattr(bounded, "WALL_SECONDS", 0.2)
    with pytest.raises(OutOfBounds, match="took too long"):
        run_bounded(functions.sleep, [30], file="f")


def test_memory_is_watched_where_the_system_bounds_none(monkeypatch):
    run_bounded(functions.double, [1], file="f")
    assert bounded._child is not None
    monkeypatch.setattr(bounded._child, "_watched", True)  # as on macOS
    assert run_bounded(functions.double, [1], file="f") == [2]
    monkeypatch.setattr(bounded, "MEMORY", 1 << 20)
    with pytest.raises(OutOfBounds, match="GiB of memory"):
        run_bounded(functions.sleep, [30], file="f")


@pytest.mark.parametrize("what", ["read", "write", "connect", "fork"])
def test_nothing_can_be_opened_or_started(what):
    assert run_bounded(functions.tries, [what], file="f")[0] in ("OSError", "BlockingIOError")


def test_no_secret_is_in_its_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    bounded._end()
    (names,) = run_bounded(functions.environment, [0], file="f")
    assert "HF_TOKEN" not in names and "HOME" not in names


def test_a_child_that_ends_itself_is_one_line():
    for function, given, said in [
        (functions.end, 3, "status 3"),
        (functions.kill, signal.SIGKILL, "SIGKILL"),
        (functions.kill, signal.SIGSEGV, "SIGSEGV"),
    ]:
        with pytest.raises(OutOfBounds, match=said) as error:
            run_bounded(function, [given], file="f")
        assert len(error.value.lines()) == 1
    (child,) = run_bounded(functions.pid, [0], file="f")
    os.kill(child, signal.SIGKILL)  # between two calls: no one's fault
    psutil.Process(child).wait()
    assert run_bounded(functions.double, [1], file="f") == [2]


@pytest.mark.parametrize("function", [functions.foreign, functions.function])
def test_only_data_comes_back(function):
    with pytest.raises(UserError, match="f: made its process answer with no data"):
        run_bounded(function, [1], file="f")


def test_threads_and_forks_share_nothing():
    with ThreadPoolExecutor(4) as pool:
        asked = [range(n, n + 50) for n in range(40)]
        found = pool.map(lambda items: run_bounded(functions.double, items, file="f"), asked)
        assert [*found] == [[2 * n for n in items] for items in asked]
    (mine,) = run_bounded(functions.pid, [0], file="f")
    held, let = threading.Event(), threading.Event()

    def hold() -> None:
        with bounded._lock:
            held.set()
            let.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with multiprocessing.get_context("fork").Pool(1) as pool:  # while the lock is taken
        theirs = pool.apply(run_bounded, (functions.pid, [0]), {"file": "f"})
    let.set()
    thread.join()
    assert theirs != [mine] == run_bounded(functions.pid, [0], file="f")


_PARENT = """
import sys
from llmfoundry import bounded
from tests import bounded_functions as functions
print(*bounded.run_bounded(functions.pid, [0], file="f"), flush=True)
bounded.run_bounded(functions.{function}, [{given}], file="f")
"""


@pytest.mark.parametrize(
    ("sent", "function"), [(signal.SIGKILL, "sleep"), (signal.SIGKILL, "slow_at_two"),
                           (signal.SIGINT, "sleep")],
)  # fmt: skip
def test_no_child_outlives_its_parent(sent, function):
    program = _PARENT.format(function=function, given=2)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(sent)
    parent.communicate(timeout=60)
    child.wait(timeout=60)
