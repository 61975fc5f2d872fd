"""Start the heartbeats of all ranks, and one hang monitor per machine.

`cli/commands/train.py` calls `keep_recorder` before the ranks join the process group, and runs the
training loop in the context `monitored`.
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
    """Enable PyTorch's flight recorder: a record of the last 2,000 collectives of NCCL.

    It is dumped to a folder of this machine, at the monitor's request or when a collective times
    out. The monitor copies the dumps to the run's folder.

    Call this before NCCL starts. PyTorch's environment variables that the user has set are kept.
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
    """Send heartbeats, and run a monitor if it is configured. All ranks must enter this context.

    Args:
        config: resolved.
        world: the ranks.
        folder: folder of the run.
        is_compiled: whether steps may be recompiled.
    """
    # dumps after a timeout go to a folder with the same name on all ranks
    messages = on_rank0(world, lambda: time.strftime("messages-%Y%m%d-%H%M%S"))
    keep_messages_in(folder / FOLDER / messages if world.size > 1 else None)

    # auto: a monitor for several ranks, and for a supervisor, which restarts a hung run
    is_supervised = BEATS in os.environ
    is_useful = world.size > 1 or is_supervised
    is_on = config.monitor == "on" or (config.monitor == "auto" and is_useful)
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
    # not after an error: other ranks wait for a failed rank, whose last heartbeat shows where
    stop_heartbeat()


def _start(settings: MonitorSettings, world: World) -> None:
    """Start the monitors: the one with the hub on rank 0, then one on each other machine."""
    has_other_machines = world.size > 1 and (
        world.machine is None or world.machine.group is not None
    )
    hub_settings = replace(settings, listen=own_host() if has_other_machines else "")
    address = on_rank0(world, lambda: _launch(hub_settings))
    first = world.rank if world.machine is None else world.machine.first
    if world.rank == first != 0:
        _launch(replace(settings, hub=address))


def _record_ranks(world: World) -> None:
    """Record the ranks of this machine for the supervisor."""
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
    """Start a monitor in a new session, where signals to the run do not reach it.

    Returns:
        The address of its hub; empty: it has none.
    """
    process = start_module(
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
    """Create a folder in memory for the heartbeats of this machine."""
    if BEATS in os.environ:  # the supervisor's folder may not exist on other machines
        Path(os.environ[BEATS]).mkdir(parents=True, exist_ok=True)
    above = os.environ.get(BEATS) or memory_folder()
    return tempfile.mkdtemp(prefix="llmfoundry-beats-", dir=above)
