"""Heartbeats of a run's processes, and the hang monitor that the first of each machine starts.

`cli/commands/train.py` calls `keep_recorder` before its processes join and `monitored` around the
run.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from llmfoundry.distributed.collectives import on_each_machine, on_rank0
from llmfoundry.distributed.failures import keep_messages_in
from llmfoundry.distributed.process_group import World, own_host
from llmfoundry.exit_status import ENDS_FOLDER as ENDS
from llmfoundry.exit_status import own_node, record_ranks
from llmfoundry.processes import start_module
from llmfoundry.recipe.resilience import ResolvedHangConfig
from llmfoundry.resilience.hang.collect import PIPE, RECORDERS
from llmfoundry.resilience.hang.monitor import FOLDER, MonitorSettings
from llmfoundry.telemetry import (
    BEATS,
    FLIGHT,
    RECORDER,
    memory_folder,
    start_heartbeat,
    stop_heartbeat,
)


def keep_recorder(config: ResolvedHangConfig) -> None:
    """Have NCCL record its last 2,000 messages (PyTorch's flight recorder) for the monitor.

    NCCL writes them when the monitor asks, and by itself when a collective times out, in a folder
    of this machine; the monitor copies them to the run's.

    Called before NCCL starts. Variables of PyTorch that the user has set stay.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    if config.monitor == "off" or is_alone or not torch.cuda.is_available():
        return
    folder = tempfile.mkdtemp(prefix=RECORDERS)
    os.environ[RECORDER] = folder
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, f"{folder}/{FLIGHT}")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{folder}/{PIPE}")


@contextmanager
def monitored(
    config: ResolvedHangConfig, world: World, folder: Path, *, is_compiled: bool
) -> Iterator[None]:
    """Send heartbeats, and have a monitor; every process calls it.

    `config`: filled; `is_compiled`: whether steps may compile once more.
    """
    messages = on_rank0(world, lambda: time.strftime("messages-%Y%m%d-%H%M%S"))
    keep_messages_in(folder / FOLDER / messages if world.size > 1 else None)
    is_supervised = BEATS in os.environ
    several = world.size > 1 or is_supervised  # a supervisor needs to know of a hang
    is_on = config.monitor == "on" or (config.monitor == "auto" and several)
    if not (is_on or is_supervised):
        yield
        return
    heartbeats = Path(on_each_machine(world, _make_folder))
    start_heartbeat(heartbeats, world.rank)
    _record_ranks(world)
    if is_on:
        settings = MonitorSettings(
            heartbeats=str(heartbeats),
            run_folder=str(folder.absolute()),
            node=own_node(),
            ranks=world.size,
            config=asdict(config),
            is_compiled=is_compiled,
            messages=messages,
        )
        _start(settings, world)
    yield
    stop_heartbeat()  # not after an error: others wait for a process that fails alone


def _start(settings: MonitorSettings, world: World) -> None:
    others = world.size > 1 and (world.machine is None or world.machine.group is not None)
    here = replace(settings, listen=own_host() if others else "")
    address = on_rank0(world, lambda: _launch(here))
    first = world.rank if world.machine is None else world.machine.first
    if world.rank == first != 0:
        _launch(replace(settings, hub=address))


def _record_ranks(world: World) -> None:
    """Record for a supervisor which ranks are on this machine."""
    if ENDS not in os.environ:
        return
    machine, ranks = world.machine, [world.rank]
    if machine is not None:
        ranks = [*range(world.size)]
        if machine.group is not None:
            ranks = dist.get_process_group_ranks(machine.group)
    if world.rank == ranks[0]:
        record_ranks(Path(os.environ[ENDS]), ranks)


def _launch(settings: MonitorSettings) -> str:
    """Start a monitor that outlives this process; the address at which it listens."""
    process = start_module(  # in a session of its own: no signal to the run's group ends it
        "llmfoundry.resilience.hang.monitor",
        json.dumps(asdict(settings)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        return str(output.readline()).strip()


def _make_folder() -> str:
    """A folder in memory for the heartbeats of this machine."""
    if BEATS in os.environ:  # of a machine on which the supervisor is not, perhaps
        Path(os.environ[BEATS]).mkdir(parents=True, exist_ok=True)
    above = os.environ.get(BEATS) or memory_folder()
    return tempfile.mkdtemp(prefix="llmfoundry-beats-", dir=above)
