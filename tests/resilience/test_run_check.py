"""Whole checks by gloo processes, with faults put in where hardware would have them.

Eight processes on four made-up nodes run all their checks one after another; what is slow or wrong
comes in through `Tools`. A process that stops is stopped by a real signal (slow).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.distributed.process_group import World
from llmfoundry.recipe.resilience import HealthCheckConfig
from llmfoundry.resilience.check import links
from llmfoundry.resilience.check.findings import BAD, Finding, Report
from llmfoundry.resilience.check.host import NamedPath
from llmfoundry.resilience.check.links import Pair
from llmfoundry.resilience.check.run_check import Tools, run_check
from llmfoundry.resilience.check.speeds import LIMITS
from llmfoundry.retry import DeadlineExceeded
from tests.tiny import ENV, command
from tests.warm_scripts import on_ranks

SIZE, DELAY = 8, 0.06
CPU = torch.device("cpu")


def delayed(is_slow: Callable[[Pair], bool]) -> Tools:
    """All-reduces that take longer between some units."""

    def reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
        if is_slow(pair):
            time.sleep(DELAY)
        links.all_reduce(group, tensor, pair)

    return Tools(all_reduce=reduce)


def wrong_once() -> Tools:
    """Products of which one has a flipped bit, in its second repeat."""
    calls = iter(range(10**9))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        if next(calls) == 2:
            product[3, 5] += 0.25
        return product

    return Tools(multiply=multiply)


def failing() -> Tools:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    return Tools(multiply=multiply)


def several(rank: int) -> Tools | None:
    """A flipped bit, a device that fails and a node whose clock is ahead, in one check."""
    if rank in (2, 3):
        return Tools(now=lambda: time.time() + 30)
    return {6: wrong_once, 1: failing}[rank]() if rank in (6, 1) else None


def slow_products() -> Tools:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        time.sleep(0.5)
        return a @ b

    return Tools(multiply=multiply)


def ends_in(part: str) -> Tools:
    """A process that is gone in its products, or in its all-reduces."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        if part == "products":
            os._exit(0)
        return a @ b

    def reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
        if part == "all-reduces":
            os._exit(0)
        links.all_reduce(group, tensor, pair)

    return Tools(multiply=multiply, all_reduce=reduce)


def hangs_in(part: str) -> Tools:
    """A device, a driver or a link that does not answer in time, as `within` says of it."""

    def hang(*_: Any) -> Any:
        raise DeadlineExceeded("no answer within 60 s")

    if part == "NVML":
        return Tools(read_gpus=hang)
    return Tools(multiply=hang) if part == "a device" else Tools(all_reduce=hang)


CASES: dict[str, Callable[[int], Tools | None]] = {  # what each rank has in its hands
    "quiet": lambda rank: None,
    "one pair": lambda rank: delayed(lambda pair: pair == (2, 5)),
    "one rank": lambda rank: delayed(lambda pair: 3 in pair),
    "halves": lambda rank: delayed(lambda pair: (pair[0] < 4) != (pair[1] < 4)),
    "several": lambda rank: several(rank),
    "slow": lambda rank: slow_products() if rank == 4 else None,
}
LONGER = ["one pair", "halves", "slow", "nodes"]
GONE = {"products": 5, "all-reduces": 3}  # each the last of its processes
HANGING = {"a device": 0, "NVML": 2, "a link": 1}  # rank 0 is the one that judges


def work(rank: int, folder: Path, size: int, cases: list[str]) -> None:
    os.environ["GROUP_RANK"] = str(rank // 2)  # two processes a node
    os.environ["NODE_NAME"] = f"n{rank // 2}"
    os.environ.pop("SLURMD_NODENAME", None)
    torch.set_num_threads(1)
    # eight processes share the cores of a busy machine; a device that is put in is 500 times slower
    LIMITS["cpu"] = replace(LIMITS["cpu"], products=0.98, copies=0.98)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=2),
    )
    world = World(rank, size, rank % 2, CPU)
    paths = [NamedPath("save_folder", str(folder), is_written=True)]
    if rank in (2, 3):
        paths = [NamedPath("save_folder", "/proc/1/x", is_written=True)]
    for case in cases:
        settings = HealthCheckConfig(
            burn_seconds=0.1, payloads=["4kb"], pairs_of="processes", timeout=30
        )
        if case == "quiet":
            settings.payloads.append("16kb")
        if case in ("several", "slow", "a link"):
            settings.pair_rounds = 1
        tools = CASES[case](rank) if case in CASES else None
        if case in GONE:
            settings.timeout = 8
            tools = ends_in(case) if rank == GONE[case] else None
        if case in HANGING:
            tools = hangs_in(case) if rank == HANGING[case] else None
        if case == "nodes":
            settings.pairs_of = "auto"
            tools = delayed(lambda pair: 1 in pair)

        def publish(report: Report, case: str = case) -> None:
            found = {
                "findings": [asdict(finding) for finding in report.findings],
                "nodes": report.nodes,
                "units": report.units,
                "pairs": report.pairs,
            }
            (folder / f"{case}.json").write_text(json.dumps(found))

        level = run_check(settings, paths, world, is_full=True, publish=publish, tools=tools)
        (folder / f"{case}.{rank}").write_text(level)
    os._exit(0)  # gloo waits for those that are gone


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of eight processes."""
    folder = tmp_path_factory.mktemp("checks")
    on_ranks(work, (folder, SIZE, [case for case in CASES if case not in LONGER]), SIZE)
    return folder


@pytest.fixture(scope="module")
def found_later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of those that take longer."""
    folder = tmp_path_factory.mktemp("checks")
    on_ranks(work, (folder, SIZE, LONGER), SIZE)
    return folder


def bad(folder: Path, case: str) -> list[Finding]:
    """What is bad, but for the path that is so in every case."""
    raw = json.loads((folder / f"{case}.json").read_text())["findings"]
    findings = [Finding(**{**one, "nodes": tuple(one["nodes"])}) for one in raw]
    return [one for one in findings if one.level == BAD and one.check != "paths"]


def test_a_quiet_check_finds_nothing_but_the_path_of_one_node(found: Path) -> None:
    report = json.loads((found / "quiet.json").read_text())
    assert bad(found, "quiet") == []
    assert report["nodes"] == ["n0", "n1", "n2", "n3"]
    assert len(report["pairs"]["4000"]) == len(report["pairs"]["16000"]) == 28
    paths = [one for one in report["findings"] if one["check"] == "paths"]
    assert {one["where"]: one["level"] for one in paths} == {
        "n0": "sound", "n1": "bad", "n2": "sound", "n3": "sound"}  # fmt: skip
    checks = {one["check"] for one in report["findings"]}
    assert {"gpus", "paths", "host", "compute", "memory", "pairs"} <= checks
    levels = {(found / f"quiet.{rank}").read_text() for rank in range(SIZE)}
    assert levels == {BAD}, "every process ends alike"


@pytest.mark.slow
def test_a_delay_in_one_pair_names_the_pair(found_later: Path) -> None:
    (one,) = bad(found_later, "one pair")
    assert one.where == "n1, rank 2 - n2, rank 5" and one.nodes == () and one.check == "pairs"


def test_a_delay_in_one_rank_names_its_device_and_node(found: Path) -> None:
    (one,) = bad(found, "one rank")
    assert one.where == "n1, rank 3" and one.nodes == ("n1",) and "all 6 pairs" in one.why


@pytest.mark.slow  # tests/resilience/test_links.py has it of tables of times
def test_a_delay_between_halves_names_the_switch_and_no_node(found_later: Path) -> None:
    (one,) = bad(found_later, "halves")
    assert one.where == "n0, rank 0, n0, rank 1, n1, rank 2, n1, rank 3" and one.nodes == ()
    assert "slow to n2, rank 4" in one.why and "switch" in one.action


@pytest.mark.slow
def test_nodes_are_paired_with_all_their_processes(found_later: Path) -> None:
    report = json.loads((found_later / "nodes.json").read_text())
    assert report["units"] == ["n0", "n1", "n2", "n3"] and len(report["pairs"]["4000"]) == 6
    (one,) = bad(found_later, "nodes")
    assert one.where == "n1" and one.nodes == ("n1",)


def test_a_flipped_bit_a_failure_and_a_clock_that_is_ahead_are_named(found: Path) -> None:
    named = {one.where: one for one in bad(found, "several")}
    assert named.keys() == {"n3, rank 6", "n0, rank 1", "n1"}
    assert "1 repeats of one product differ" in named["n3, rank 6"].why
    assert "30.0 s ahead" in named["n1"].why and named["n1"].nodes == ("n1",)
    failed = named["n0, rank 1"]
    assert failed.why == "failed: CUDA error: an illegal memory access was encountered"


@pytest.mark.slow
def test_a_slow_device_is_named(found_later: Path) -> None:
    (slow,) = bad(found_later, "slow")
    assert slow.where == "n2, rank 4" and slow.check == "compute" and slow.nodes == ("n2",)


@pytest.mark.parametrize("case", ["products", pytest.param("all-reduces", marks=pytest.mark.slow)])
def test_a_process_that_is_gone_is_named_with_its_part(case: str, tmp_path: Path) -> None:
    rank = GONE[case]
    on_ranks(work, (tmp_path, rank + 1, [case]), rank + 1)
    (one,) = bad(tmp_path, case)
    assert one.where == f"n{rank // 2}, rank {rank}" and one.nodes == (f"n{rank // 2}",)
    assert one.why == f"no answer in {case}" and one.check == "processes"


def test_what_hangs_below_a_process_is_named_by_that_process(tmp_path: Path) -> None:
    """Rank 0 too, which is the one that judges; it takes no part in pairs then."""
    on_ranks(work, (tmp_path, 4, [*HANGING]), 4)
    (device,) = bad(tmp_path, "a device")
    assert (device.where, device.nodes) == ("n0, rank 0", ("n0",))
    assert device.why == "failed: no answer within 60 s"
    assert len(json.loads((tmp_path / "a device.json").read_text())["units"]) == 3
    (driver,) = bad(tmp_path, "NVML")
    assert (driver.where, driver.nodes) == ("n1", ("n1",)) and "NVML hangs" in driver.why
    (link,) = bad(tmp_path, "a link")
    assert link.where == "n0, rank 1 - n1, rank 2" and "no answer" in link.why
    for case in HANGING:
        assert {(tmp_path / f"{case}.{rank}").read_text() for rank in range(4)} == {BAD}


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_and_does_not_outlive_the_check(tmp_path: Path) -> None:
    words = ["parallel.nproc_per_node=4", "health_check.burn_seconds=8", "health_check.timeout=8"]
    env = ENV | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    running = subprocess.Popen(
        command("check.py", *words), cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    stopped = _worker(running.pid, 2)
    time.sleep(4)
    os.kill(stopped.pid, signal.SIGSTOP)
    out, _ = running.communicate(timeout=240)
    assert running.returncode == 3, out
    assert "rank 2" in out and "no answer in products" in out
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


def _worker(pid: int, rank: int) -> psutil.Process:
    """A rank of torchrun's below a process, once it has begun to compute."""
    for _ in range(1200):
        for process in psutil.Process(pid).children(recursive=True):
            try:
                environment, used = process.environ(), process.cpu_times().user
            except psutil.Error:
                continue
            if environment.get("LOCAL_RANK") == str(rank) and used > 3:
                return process
        time.sleep(0.1)
    sys.exit("no such worker")
