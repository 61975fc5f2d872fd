"""How a process joins a run: alone, started again under torchrun, under torchrun, or by Slurm.

`commands` call `relaunch` before anything heavy and `join` afterwards; what a process then knows of
the run is its `World`. The environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT are PyTorch's. A wrong address is the one mistake that no process sees by itself: each
reports after `parallel.rendezvous_timeout` where it looked and why nobody was there, in one line.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llmfoundry.distributed.failures import explain_failure
from llmfoundry.distributed.relaunch import AGAIN
from llmfoundry.errors import RunFailure, UserError
from llmfoundry.exit_status import ENDS_FOLDER, own_node
from llmfoundry.ops.devices import keep_memory
from llmfoundry.ops.torch_private import default_store, set_timeouts
from llmfoundry.processes import keep_children
from llmfoundry.recipe.parallel import GLOO, NCCL, ParallelConfig
from llmfoundry.terminal import is_watched

SHARE = "parallel.dist_backend: gloo for processes that share a GPU"
FULL_MESH = 128
"""Processes up to which each connects to every other as it joins; of more only to those that it has
something for. To connect all takes n gets of n + 19 words each from the one store by each of n
processes: counted, and at 3,072 19 million requests and 233 GB."""
GLOO_SOCKETS, STORE_SOCKETS = 1, 3
"""Sockets for each process of the run. Measured with gloo on 2, 4 and 8 processes: a group opens
one to each other process, and one that listens. The store's process has one of each process, and
one or two more of NCCL's watchers."""
MOST_FILES = 1 << 20
"""Some hard limits are a thousand times higher, and some programs walk through all numbers."""
OTHER_FILES = 256
"""What else a process opens: libraries, shards, logs, pipes of workers, NCCL's own sockets."""
_PROBE = 5.0  # seconds to connect, when nobody was met


@dataclass(frozen=True)
class Machine:
    """The processes of the run that share a machine, its files and its page cache.

    Attributes:
        first: the least of their ranks among all.
        group: of the host; None: they are all processes.
        sharing: how many of them compute on this one's GPU; 1 on a CPU.
    """

    first: int
    group: dist.ProcessGroup | None = None
    sharing: int = 1


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    """Among all: for what is printed, and for which process writes; never for a share of rows."""
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=10)
    """How long a collective waits for the others."""
    data_mesh: DeviceMesh | None = None
    """The processes that read other rows than this one, set by `mesh.with_mesh`; None: all."""
    token_mesh: DeviceMesh | None = None
    """Those that hold other tokens: other rows, or another part of the same rows; None: all."""
    machine: Machine | None = None
    """Those on the same machine; None: this one alone."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes shared files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of every batch of rows is this process's own."""
        return self.rank if self.data_mesh is None else self.data_mesh.get_local_rank()

    @property
    def data_size(self) -> int:
        """How many shares a batch of rows has."""
        return self.size if self.data_mesh is None else self.data_mesh.size()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The processes with the other shares, for sums over rows; None: all processes."""
        return None if self.data_mesh is None else self.data_mesh.get_group()

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """The processes with other tokens, for sums over a batch of training; None: all."""
        return None if self.token_mesh is None else self.token_mesh.get_group()

    def in_evaluation(self) -> World:
        """The world of evaluation: what shares a row's tokens in training has rows of its own."""
        return replace(self, data_mesh=self.token_mesh)


ALONE = World(0, 1, 0, torch.device("cpu"))
"""A process that is all of its run, for work that needs no GPU."""


def relaunch(config: ParallelConfig, *, again: Sequence[str] | None = None) -> None:
    """Start the same command under torchrun where more than one local process is wanted.

    Does nothing under torchrun or Slurm. Never returns where it does start one.

    Args:
        config: how many processes.
        again: start it once more where processes ask for that (`errors.StartAgain`), with these
            words behind the command's; None: it is not, nor where a supervisor decides.
    """
    if "RANK" in os.environ or slurm_environment():
        return
    wanted = wanted_processes(config)
    if wanted == 1:
        return
    config.degrees(wanted)  # one line here, before each process reports it
    if is_watched():
        print(f"starting {wanted} processes ...", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // wanted)))
    keep_children()
    starts_again = again is not None and ENDS_FOLDER not in os.environ
    module = "llmfoundry.distributed.relaunch" if starts_again else "torch.distributed.run"
    words = ["--standalone", f"--nproc-per-node={wanted}", *sys.argv]
    words += [AGAIN, *again] if starts_again and again else []
    os.execv(sys.executable, [sys.executable, "-m", module, *words])


def wanted_processes(config: ParallelConfig) -> int:
    """How many processes of this machine a run has that no launcher has started.

    Raises:
        UserError: more than the machine can have, or nccl without a GPU.
    """
    _check_backend(config.dist_backend)
    wanted = config.nproc_per_node or max(1, torch.cuda.device_count())
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    own_gpus = gpus if config.dist_backend != GLOO else 0
    most = own_gpus or max(16, 4 * cores)
    if wanted > most and wanted > 1:
        there = f"{gpus} GPU{'s' * (gpus > 1)}" if own_gpus else f"{cores} cores"
        share = f", or {SHARE}" if own_gpus else ""
        raise UserError(
            f"parallel.nproc_per_node: {wanted} processes, but this machine has {there};"
            f" write at most {most}{share}"
        )
    return wanted


def slurm_environment() -> dict[str, str]:
    """PyTorch's variables as `srun` implies them; empty outside a Slurm step of several tasks."""
    env = os.environ
    # srun's own variables: in a batch script outside srun, SLURM_NTASKS counts tasks not started
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    tasks = _tasks_of_node(env)
    return ({} if tasks is None else {"LOCAL_WORLD_SIZE": str(tasks)}) | {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": env.get("MASTER_PORT") or str(20000 + int(env["SLURM_JOB_ID"]) % 20000),
    }


def _tasks_of_node(env: Mapping[str, str]) -> int | None:
    """The step's tasks on this node; `8(x2),4` is of three nodes. None: Slurm does not set it."""
    each = list[int]()
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, nodes = part.partition("(x")
        each += [int(tasks)] * int(nodes.rstrip(")") or 1) if tasks else []
    node = int(env.get("SLURM_NODEID", 0))
    return each[node] if node < len(each) else None


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `rack[1-2]n[03-05,9],x` gives `rack1n03`."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)  # to the first comma outside brackets
    assert entry, nodelist
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry[0])


@contextmanager
def join(config: ParallelConfig) -> Iterator[World]:
    """Join the run's process group, if it has one, and leave it at the end."""
    os.environ.update(slurm_environment())
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(local_rank, config.dist_backend)
    if device.type == "cpu":
        keep_memory()  # a GPU's PyTorch keeps itself
    world = World(rank, size, local_rank, device, timedelta(seconds=config.dist_timeout))
    if size == 1:
        yield world
        return
    limit = timedelta(seconds=config.rendezvous_timeout)
    _init_process_group(world, default_backend(device, config.dist_backend), limit)
    try:
        yield replace(world, machine=find_machine(world))
    except Exception as error:
        # The groups stay as they are: to leave them is to wait for the others.
        lost = explain_failure(error, default_store(), rank=rank, size=size, timeout=world.timeout)
        if lost is None:
            raise
        raise lost from error
    _leave(world)


def _init_process_group(world: World, backend: str, limit: timedelta) -> None:
    """Make the default group, within a limit: the only one of gloo among all processes.

    `collectives.py` goes through it, and so do, on a CPU, sums over gradients: every process calls
    them in the same order. Another thread has a `Mailbox`.
    """
    raise_open_file_limit(world.size, holds_store=world.is_main)
    if world.size > FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # of PyTorch 2.8
    store = meet_at_store(world.rank, world.size, limit=limit, timeout=world.timeout)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout
    )
    assert dist.group.WORLD is not None
    set_group_timeouts(dist.group.WORLD, world)


def raise_open_file_limit(n_processes: int, *, holds_store: bool) -> None:
    """Let this process open as many files and sockets as the system allows.

    Many systems set 1,024 as a default that programs raise: the hard limit is far higher.

    Args:
        n_processes: of the run.
        holds_store: whether all connect to this one first.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (MOST_FILES if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    if soft < min(most, MOST_FILES):
        with suppress(OSError, ValueError):  # macOS promises more than it gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MOST_FILES), hard))
            soft = min(most, MOST_FILES)
    needed = needed_files(n_processes, holds_store=holds_store)
    if soft < needed:
        raise UserError(
            f"ulimit -n: a process may open {soft:,} files and sockets here, and one of"
            f" {n_processes:,} needs {needed:,}; raise the hard limit (limits.conf, LimitNOFILE of"
            f" slurmd, docker run --ulimit nofile={needed}), or start fewer processes"
        )


def needed_files(n_processes: int, *, holds_store: bool) -> int:
    """How many files and sockets one of so many processes opens; 0 for one alone."""
    if n_processes == 1:
        return 0
    return n_processes * (GLOO_SOCKETS + STORE_SOCKETS * holds_store) + OTHER_FILES


def meet_at_store(rank: int, size: int, *, limit: timedelta, timeout: timedelta) -> dist.Store:
    """The store by which all processes of the run find each other.

    Args:
        rank: this process.
        size: number of processes.
        limit: until all are there.
        timeout: of requests to the store from then on.

    Raises:
        RunFailure: not all have come.
    """
    try:
        store = _store(rank, size, limit)
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        raise RunFailure(_no_rendezvous(error, limit)) from error
    store.set_timeout(timeout)
    return store


def _store(rank: int, size: int, limit: timedelta) -> dist.Store:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart in (None, "0"):
        found: dist.Store = next(dist.rendezvous("env://", timeout=limit))[0]
        return dist.PrefixStore("default_pg", found)  # as init_process_group has it
    # After an in-place restart the agent's store still holds the dead attempt's addresses.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = dist.TCPStore(address, port, size, is_master=rank == 0 and not agent, timeout=limit)
    return dist.PrefixStore(f"attempt{restart}", shared)


def _no_rendezvous(error: RuntimeError, limit: timedelta) -> str:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"MASTER_ADDR: the processes did not meet at {address}:{port} within"
        f" {limit.total_seconds():.0f} s: {_unreachable(address, port) or reason}; give every"
        " process the name of rank 0's machine by which it reaches it, and a free port there; where"
        " processes start minutes apart, write a larger parallel.rendezvous_timeout"
    )


def _unreachable(address: str, port: str) -> str:
    """Why nothing can be sent there; empty: it can, or that is this process's own store."""
    try:
        socket.getaddrinfo(address, port)
        if os.environ.get("RANK") != "0":
            socket.create_connection((address, int(port)), _PROBE).close()
    except (OSError, ValueError, OverflowError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def default_backend(device: torch.device, backend: str | None) -> str:
    """Of the default group, as `init_process_group` takes it.

    gloo alone serves GPUs too: it copies to pinned memory of the host and back for broadcast,
    all_reduce, reduce, all_gather, reduce_scatter, all_to_all_single, gather and scatter. What it
    has for CPUs alone (send and recv, coalesced collectives, lists of all_to_all and
    reduce_scatter) no layout calls: `tests/distributed/test_matrix.py` watches.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != GLOO else GLOO


def set_group_timeouts(group: dist.ProcessGroup, world: World) -> None:
    """Let every collective of a group wait for `parallel.dist_timeout`; each group is given here.

    NCCL ends a process without a word that helps; the host's messages are to notice before it.
    """
    device = world.timeout + timedelta(seconds=30 if world.device.type == "cuda" else 0)
    set_timeouts(group, host=world.timeout, device=device)


def _leave(world: World) -> None:
    """Leave the group; rank 0 last, as the store may be its own, and others still read there."""
    store, deadline = default_store(), time.monotonic() + world.timeout.total_seconds()
    left = store.add("llmfoundry/left", 0 if world.is_main else 1)
    while world.is_main and left < world.size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
        left = store.add("llmfoundry/left", 0)
    dist.destroy_process_group()


def choose_device(local_rank: int, backend: str | None) -> torch.device:
    """The GPU of a process, made current; a CPU where there is none.

    A launcher may show each process its own GPU alone, as Slurm does with --gpus-per-task=1: that
    is device 0 of every one of them. `check_devices` finds those that share one by mistake. Under
    gloo, which processes on one GPU may have, they take turns.

    Args:
        local_rank: among the processes of this machine.
        backend: `parallel.dist_backend`.

    Raises:
        UserError: the process has no GPU, though the machine has some, or nccl was written.
    """
    if not torch.cuda.is_available():
        _check_backend(backend)
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible > 1 and backend != GLOO:
        raise UserError(
            f"parallel.nproc_per_node: local rank {local_rank} has no GPU; this machine has"
            f" {visible}; start at most as many processes, or write {SHARE}"
        )
    device = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(device)
    torch.cuda.init()  # or a device mesh would set the device once more, to LOCAL_RANK
    return device


def _check_backend(backend: str | None) -> None:
    if backend == NCCL and not torch.cuda.is_available():
        raise UserError(
            "parallel.dist_backend: nccl is for GPUs, and this process has none; remove it"
        )


def find_machine(world: World) -> Machine | None:
    """The processes that share this one's machine; every process calls it.

    Raises:
        UserError: two of a machine have the same GPU under NCCL; on every process.
    """
    found: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(found, (_machine_name(), _gpu_name(world.device)))
    if NCCL in dist.get_backend_config():
        check_devices(found)
    own = [rank for rank, (name, _) in enumerate(found) if name == found[world.rank][0]]
    sharing = found.count(found[world.rank]) if world.device.type == "cuda" else 1
    if len(own) == 1:
        return None
    if len(own) == world.size:
        return Machine(0, sharing=sharing)
    group = dist.new_group(
        own, timeout=world.timeout, backend="gloo", use_local_synchronization=True
    )
    set_group_timeouts(group, world)
    return Machine(own[0], group, sharing)


def check_devices(found: Sequence[tuple[str, str]]) -> None:
    """Every process must have a GPU of its own; NCCL reports only that one is a duplicate.

    Args:
        found: the machine and the GPU of each process, by rank; a CPU has no name.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(found):
        if own[1] and first.setdefault(own, rank) != rank:
            raise UserError(
                f"parallel.nproc_per_node: ranks {first[own]} and {rank} have the same GPU of"
                f" {own[0].split()[0]}; start at most as many processes as GPUs, show each"
                f" process another (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or write {SHARE}"
            )


def _machine_name() -> str:
    """The host's name, and what distinguishes two that have the same; not so two of a container.

    Two of a scheduler's machines on one host are two: each is started, lost and drained alone.
    """
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {own_node()}"


def _gpu_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def own_host() -> str:
    """This machine's address on the network by which it reaches the one where all meet."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family = socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ.get("MASTER_PORT", 1)) or 1))  # nothing is sent
        found: str = probe.getsockname()[0]
        return found
    return socket.gethostbyname(socket.gethostname())
