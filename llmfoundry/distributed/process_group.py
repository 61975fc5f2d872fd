"""Startup of distributed runs: single process, relaunch under torchrun, torchrun, or Slurm.

Entry points: commands call `relaunch` before any heavy import and `join` afterwards. `join` yields
the `World`, which describes this process among all processes of the run. The environment variables
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are those of PyTorch. If the address is
wrong, each process reports the address and the reason in one line, after
`parallel.rendezvous_timeout`.
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
from llmfoundry.ops.devices import keep_memory, return_memory
from llmfoundry.ops.torch_private import default_store, set_timeouts
from llmfoundry.processes import keep_children
from llmfoundry.recipe.parallel import GLOO, NCCL, ParallelConfig
from llmfoundry.terminal import is_watched

SHARE = "parallel.dist_backend: gloo for processes that share a GPU"
FULL_MESH = 128
"""Largest number of ranks that connect to each other eagerly, at startup.

In larger runs, gloo connects two ranks when they first communicate. A full mesh of n ranks takes
n reads of n + 19 words from the store by each rank: at 3,072 ranks, 19 million requests and 233 GB.
"""
GLOO_SOCKETS, STORE_SOCKETS = 1, 3
"""Sockets per rank of the run, measured with gloo on 2, 4 and 8 ranks.

A group opens one socket to each other rank, and one that listens. The process of the store has one
socket per rank, and one or two more per rank for NCCL's watchdogs."""
MOST_FILES = 1 << 20
"""Limit that is set at most: some programs iterate over all file descriptors up to the limit."""
OTHER_FILES = 256
"""Other open files of a process: libraries, shards, logs, pipes of workers, NCCL's sockets."""
_PROBE = 5.0  # timeout in seconds of the connection test after a failed rendezvous


@dataclass(frozen=True)
class Machine:
    """The ranks that share a machine, its files and its page cache.

    Attributes:
        first: their smallest global rank.
        group: process group (gloo) of these ranks; None: all ranks are on this machine.
        sharing: number of ranks that share this rank's GPU; 1 on a CPU.
    """

    first: int
    group: dist.ProcessGroup | None = None
    sharing: int = 1


@dataclass(frozen=True)
class World:
    """This process among all ranks of the run."""

    rank: int
    """Global rank, for messages and for writing files; `data_rank` selects the data."""
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=10)
    """Timeout of collectives."""
    data_mesh: DeviceMesh | None = None
    """Ranks that read different sequences, set by `mesh.with_mesh`; None: all ranks."""
    token_mesh: DeviceMesh | None = None
    """Ranks that hold different tokens: `data_mesh` and context-parallel ranks; None: all ranks."""
    machine: Machine | None = None
    """Ranks on the same machine; None: this rank only."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes shared files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of every global batch."""
        return self.rank if self.data_mesh is None else self.data_mesh.get_local_rank()

    @property
    def data_size(self) -> int:
        """Number of parts of a global batch."""
        return self.size if self.data_mesh is None else self.data_mesh.size()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks with the other parts, for sums over sequences; None: all ranks."""
        return None if self.data_mesh is None else self.data_mesh.get_group()

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks with other tokens, for sums over a training batch; None: all ranks."""
        return None if self.token_mesh is None else self.token_mesh.get_group()

    def in_evaluation(self) -> World:
        """Return the world for evaluation, in which context-parallel ranks read other sequences."""
        return replace(self, data_mesh=self.token_mesh)


ALONE = World(0, 1, 0, torch.device("cpu"))
"""World of a single process, for work that needs no GPU."""


def relaunch(config: ParallelConfig, *, again: Sequence[str] | None = None) -> None:
    """Relaunch the command under torchrun if the run has more than one local process.

    Does nothing under torchrun or Slurm. If it relaunches, it does not return: torchrun replaces
    this process.

    Args:
        config: determines the number of processes.
        again: arguments that are appended to the command when processes request a restart
            (`errors.RestartNeeded`); None: no restarts. Under a supervisor, the supervisor
            restarts.
    """
    if "RANK" in os.environ or slurm_environment():
        return
    wanted = wanted_processes(config)
    if wanted == 1:
        return
    config.degrees(wanted)  # reports a wrong layout once, instead of once per process
    if is_watched():
        print(f"starting {wanted} processes ...", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // wanted)))
    keep_children()
    starts_again = again is not None and ENDS_FOLDER not in os.environ
    module = "llmfoundry.distributed.relaunch" if starts_again else "torch.distributed.run"
    arguments = ["--standalone", f"--nproc-per-node={wanted}", *sys.argv]
    arguments += [AGAIN, *again] if starts_again and again else []
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def wanted_processes(config: ParallelConfig) -> int:
    """Return the number of local processes of a run that was started without a launcher.

    Raises:
        UserError: there are more processes than the machine supports, or nccl without a GPU.
    """
    _check_backend(config.dist_backend)
    wanted = config.nproc_per_node or max(1, torch.cuda.device_count())
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    exclusive_gpus = gpus if config.dist_backend != GLOO else 0
    most = exclusive_gpus or max(16, 4 * cores)
    if wanted > most and wanted > 1:
        hardware = f"{gpus} GPU{'s' * (gpus > 1)}" if exclusive_gpus else f"{cores} cores"
        share = f", or {SHARE}" if exclusive_gpus else ""
        raise UserError(
            f"parallel.nproc_per_node: {wanted} processes, but this machine has {hardware};"
            f" write at most {most}{share}"
        )
    return wanted


def slurm_environment() -> dict[str, str]:
    """Return PyTorch's variables for an `srun` task; empty outside a step of several tasks."""
    env = os.environ
    # SLURM_STEP_* are set by srun only; SLURM_NTASKS is also set in a batch script outside srun
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
    """Return the number of tasks of the step on this node; None: Slurm does not set it.

    In SLURM_STEP_TASKS_PER_NODE, `8(x2),4` describes three nodes.
    """
    tasks_per_node = list[int]()
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, nodes = part.partition("(x")
        tasks_per_node += [int(tasks)] * int(nodes.rstrip(")") or 1) if tasks else []
    node = int(env.get("SLURM_NODEID", 0))
    return tasks_per_node[node] if node < len(tasks_per_node) else None


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `rack[1-2]n[03-05,9],x` gives `rack1n03`."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)  # to the first comma outside brackets
    assert entry, nodelist
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry[0])


@contextmanager
def join(config: ParallelConfig, *, keeps_memory: bool = True) -> Iterator[World]:
    """Initialize the process group of the run, if it has several ranks; destroy it at the end.

    Args:
        config: the `parallel` section.
        keeps_memory: on a CPU, keep freed memory in this process, which is faster; false: return
            it to the system, which takes less memory.
    """
    # this process, from the launcher's environment
    os.environ.update(slurm_environment())
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(local_rank, config.dist_backend)
    if device.type == "cpu":
        # on a GPU, PyTorch's caching allocator keeps freed memory
        keep_memory() if keeps_memory else return_memory()
    world = World(rank, size, local_rank, device, timedelta(seconds=config.dist_timeout))
    if size == 1:
        yield world
        return

    # several ranks: the default group, and the ranks of this machine
    limit = timedelta(seconds=config.rendezvous_timeout)
    _init_process_group(world, default_backend(device, config.dist_backend), limit)
    try:
        yield replace(world, machine=find_machine(world))
    except Exception as error:
        # do not destroy the groups here: that waits for the other ranks
        lost = explain_failure(error, default_store(), rank=rank, size=size, timeout=world.timeout)
        if lost is None:
            raise
        raise lost from error
    _leave(world)


def _init_process_group(world: World, backend: str, limit: timedelta) -> None:
    """Initialize the default group, which has the only gloo group over all ranks.

    `collectives.py` uses it, and gradient reduction on CPUs does. Every rank must therefore call
    its collectives in the same order. Other threads use a `Mailbox` instead.

    Args:
        world: this process.
        backend: backend string of PyTorch.
        limit: timeout of the rendezvous.
    """
    raise_open_file_limit(world.size, holds_store=world.is_main)
    if world.size > FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # since PyTorch 2.8
    store = meet_at_store(world.rank, world.size, limit=limit, timeout=world.timeout)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout
    )
    assert dist.group.WORLD is not None
    set_group_timeouts(dist.group.WORLD, world)


def raise_open_file_limit(n_processes: int, *, holds_store: bool) -> None:
    """Raise this process's soft limit of open files and sockets to the hard limit.

    Many systems have a soft limit of 1,024 and a far higher hard limit.

    Args:
        n_processes: number of ranks of the run.
        holds_store: whether this process hosts the store that all ranks connect to.

    Raises:
        UserError: the hard limit is too low for the run.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finite_hard = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    target = min(finite_hard, MOST_FILES)
    soft = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    if soft < target:
        with suppress(OSError, ValueError):  # macOS rejects values below its reported hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    needed = needed_files(n_processes, holds_store=holds_store)
    if soft < needed:
        raise UserError(
            f"ulimit -n: a process may open {soft:,} files and sockets here, and one of"
            f" {n_processes:,} needs {needed:,}; raise the hard limit (limits.conf, LimitNOFILE of"
            f" slurmd, docker run --ulimit nofile={needed}), or start fewer processes"
        )


def needed_files(n_processes: int, *, holds_store: bool) -> int:
    """Return the number of files and sockets that each rank needs; 0 for a single process."""
    if n_processes == 1:
        return 0
    return n_processes * (GLOO_SOCKETS + STORE_SOCKETS * holds_store) + OTHER_FILES


def meet_at_store(rank: int, size: int, *, limit: timedelta, timeout: timedelta) -> dist.Store:
    """Return the key-value store through which the ranks find each other.

    Args:
        rank: this process.
        size: number of ranks.
        limit: timeout of the rendezvous.
        timeout: timeout of later requests to the store.

    Raises:
        RunFailure: not all ranks connected in time.
    """
    try:
        store = _store(rank, size, limit)
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        raise RunFailure(_no_rendezvous(error, limit)) from error
    store.set_timeout(timeout)
    return store


_joined: list[dist.Store] = []
"""The store of this process, once for each time that it has joined; always the same object. Rank 0
may host it, and stale addresses of an earlier group are in it."""


def _store(rank: int, size: int, limit: timedelta) -> dist.Store:
    """Return the store of all ranks, below a prefix that no earlier group of this process had."""
    before = len(_joined)
    store = _joined[0] if before else _shared_store(rank, size, limit)
    _joined.append(store)
    return dist.PrefixStore(f"again{before}", store) if before else store


def _shared_store(rank: int, size: int, limit: timedelta) -> dist.Store:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart in (None, "0"):
        store: dist.Store = next(dist.rendezvous("env://", timeout=limit))[0]
        return dist.PrefixStore("default_pg", store)  # the prefix of init_process_group
    # after an in-place restart, the agent's store still holds addresses of the failed attempt
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
    """Return why the address cannot be reached; empty: it can, or this process hosts the store."""
    try:
        socket.getaddrinfo(address, port)
        if os.environ.get("RANK") != "0":
            socket.create_connection((address, int(port)), _PROBE).close()
    except (OSError, ValueError, OverflowError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def default_backend(device: torch.device, backend: str | None) -> str:
    """Return the backend of the default group, as a backend string of `init_process_group`.

    gloo also works on GPU tensors, through pinned host memory, for broadcast, all_reduce, reduce,
    all_gather, reduce_scatter, all_to_all_single, gather and scatter. It supports send and recv,
    coalesced collectives, and all_to_all and reduce_scatter of lists on CPUs only. No layout calls
    these, which `tests/distributed/test_matrix.py` checks.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != GLOO else GLOO


def set_group_timeouts(group: dist.ProcessGroup, world: World) -> None:
    """Set the timeout of all collectives of a group to `parallel.dist_timeout`.

    Every new group must be passed to this function. On GPUs, NCCL gets 30 s more: its watchdog
    kills the process without a useful message, so collectives on the host must time out first.
    """
    device = world.timeout + timedelta(seconds=30 if world.device.type == "cuda" else 0)
    set_timeouts(group, host=world.timeout, device=device)


def _leave(world: World) -> None:
    """Destroy the process groups; rank 0 last, as it may host the store that other ranks read."""
    store, deadline = default_store(), time.monotonic() + world.timeout.total_seconds()
    left = store.add("llmfoundry/left", 0 if world.is_main else 1)
    while world.is_main and left < world.size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
        left = store.add("llmfoundry/left", 0)
    dist.destroy_process_group()


def choose_device(local_rank: int, backend: str | None) -> torch.device:
    """Choose this process's GPU and make it current; without GPUs, return the CPU.

    A launcher may restrict each process to one visible GPU, as Slurm does with --gpus-per-task=1.
    That GPU is device 0 in every process. `check_devices` detects ranks that share a GPU by
    mistake. Under gloo, ranks may share a GPU, and are assigned round-robin.

    Args:
        local_rank: rank among the processes of this machine.
        backend: `parallel.dist_backend`.

    Raises:
        UserError: there are more local processes than GPUs, or the recipe sets nccl without a GPU.
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
    torch.cuda.init()  # else a device mesh would set the device again, to LOCAL_RANK
    return device


def _check_backend(backend: str | None) -> None:
    if backend == NCCL and not torch.cuda.is_available():
        raise UserError(
            "parallel.dist_backend: nccl is for GPUs, and this process has none; remove it"
        )


def unbounded_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks that waits without a practical limit; every rank calls it.

    A server waits for its next request for days. The group still fails at once if a rank is killed.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=365))


def find_machine(world: World) -> Machine | None:
    """Find the ranks that share this rank's machine. Every rank calls it.

    Raises:
        UserError: two ranks of a machine have the same GPU under NCCL; raised on every rank.
    """
    # machine and GPU of every rank
    locations: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(locations, (_machine_name(), _gpu_name(world.device)))
    if NCCL in dist.get_backend_config():
        check_devices(locations)

    # the ranks of this machine, and a group of them
    machine, _ = locations[world.rank]
    local_ranks = [rank for rank, (name, _) in enumerate(locations) if name == machine]
    sharing = locations.count(locations[world.rank]) if world.device.type == "cuda" else 1
    if len(local_ranks) == 1:
        return None
    if len(local_ranks) == world.size:
        return Machine(0, sharing=sharing)
    group = dist.new_group(
        local_ranks, timeout=world.timeout, backend="gloo", use_local_synchronization=True
    )
    set_group_timeouts(group, world)
    return Machine(local_ranks[0], group, sharing)


def check_devices(found: Sequence[tuple[str, str]]) -> None:
    """Check that no two ranks share a GPU; NCCL's error does not name the ranks.

    Args:
        found: machine and GPU of each rank, by rank; the name of a CPU is empty.

    Raises:
        UserError: two ranks share a GPU.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, location in enumerate(found):
        machine, gpu = location
        if gpu and first.setdefault(location, rank) != rank:
            raise UserError(
                f"parallel.nproc_per_node: ranks {first[location]} and {rank} have the same GPU of"
                f" {machine.split()[0]}; start at most as many processes as GPUs, show each"
                f" process another (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or write {SHARE}"
            )


def _machine_name() -> str:
    """Return a name of this machine that is unique in the run.

    The boot id distinguishes machines with equal host names, but not containers on one host. Two
    nodes of a scheduler on one host count as two machines: each can fail or be drained separately.
    """
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {own_node()}"


def _gpu_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def own_host() -> str:
    """Return this machine's address on the network through which it reaches MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family = socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ.get("MASTER_PORT", 1)) or 1))  # UDP: sends nothing
        address: str = probe.getsockname()[0]
        return address
    return socket.gethostbyname(socket.gethostname())
