"""How a run's processes meet: groups and their timeouts, open files, GPUs, the store's mailbox."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import llmfoundry
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed import mesh as mesh_module
from llmfoundry.distributed import process_group
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.mesh import REPLICATE, SHARD, build_mesh
from llmfoundry.distributed.process_group import (
    Machine,
    World,
    join,
    meet_at_store,
    needed_files,
    raise_open_file_limit,
)
from llmfoundry.errors import RunFailure, UserError
from llmfoundry.plan import microbatch_sizes
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.resilience.supervise.causes import Evidence, find_cause
from llmfoundry.train.signals import StopSignal
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
PACKAGE = Path(llmfoundry.__file__).parent
WAIT = 77  # seconds; neither PyTorch's 600 nor its 1,800


def results(work: Callable[[int, int], Any], size: int) -> list[Any]:
    """What `work(rank, size)` returns on each gloo rank."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="groups-") as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        on_ranks(_rank, (work.__name__, size, folder, port), size)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def _rank(rank: int, work: str, size: int, folder: str, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    (Path(folder) / str(rank)).write_text(json.dumps(globals()[work](rank, size)))


def groups_of_a_run(rank: int, size: int) -> dict[str, Any]:
    """What a run with shards makes: its limits, the files it opened, how long its groups wait."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = open_now()
    with join(ParallelConfig(data_parallel_shard_degree=size, dist_timeout=WAIT)) as world:
        build_mesh(ParallelConfig(data_parallel_shard_degree=size), world)
        stop = StopSignal(world)
        Checkpointer(
            Storage(Path()),
            world,
            Contents({}, {}),
            SavePolicy(keep=-1, background=True, max_failures=1),
            Reports(print),
        )
        stop.begin(None)
        stop.check()
        dist.all_reduce(torch.ones(1))
        opened = open_now() - before
        config = ParallelConfig(
            context_parallel_degree=2, tensor_parallel_degree=-1, expert_parallel_degree=2
        )
        config.data_parallel_replicate_degree = 1
        build_mesh(config, world)
        made = distributed_c10d._world.pg_map
        waits = {group.group_desc: waits_of(group) for group in made}
        dist.barrier()
    return {"limits": resource.getrlimit(resource.RLIMIT_NOFILE), "opened": opened, "waits": waits}


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


def waits_of(group: Any) -> float:
    return group._get_backend(CPU).options._timeout.total_seconds()


@cache
def a_run(size: int) -> list[dict[str, Any]]:
    return results(groups_of_a_run, size)


def test_a_run_opens_one_socket_for_each_other_process() -> None:
    few, many = a_run(2), a_run(6)
    for rank in range(6):
        more = many[rank]["opened"] - few[min(rank, 1)]["opened"]
        assert more == (8 if rank == 0 else 4)  # rank 0 has the store too, which no launcher has
        assert many[rank]["opened"] <= needed_files(6, holds_store=rank == 0)


def connected(size: int, full_mesh: int) -> list[float]:
    """Files that joining opened, and sums that took every process; of a run of gloo."""
    process_group.FULL_MESH = full_mesh
    before = open_now()
    with join(ParallelConfig()):
        opened, total = open_now() - before, torch.ones(1000)
        dist.all_reduce(total)
        found: list[Any] = [None] * size
        dist.all_gather_object(found, dist.get_rank())
        assert found == list(range(size))
        return [opened, float(total.sum())]


def connected_to_all(rank: int, size: int) -> list[float]:
    return connected(size, size)


def connected_to_few(rank: int, size: int) -> list[float]:
    return connected(size, size - 1)


def test_many_processes_connect_to_those_alone_that_they_have_something_for() -> None:
    to_all, to_few = results(connected_to_all, 8), results(connected_to_few, 8)
    for (n_all, sum_all), (n_few, sum_few) in zip(to_all, to_few, strict=True):
        assert sum_all == sum_few == 8 * 1000
        assert n_few <= n_all - 3


def test_every_group_waits_for_dist_timeout() -> None:
    for found in a_run(2):
        assert len(found["waits"]) >= 3  # the default group, and those of two meshes
        assert set(found["waits"].values()) == {WAIT}


def test_groups_are_made_where_their_waiting_is_bounded() -> None:
    """A group that is made elsewhere would wait for PyTorch's own time, and open more sockets."""
    makers = ("new_group(", "init_device_mesh(", "DeviceMesh(", "init_process_group(")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(maker in path.read_text() for maker in makers)
    }
    imagined = {"ops/torch_private.py"}  # meshes to count with, of groups that send nothing
    assert found - imagined == {"distributed/process_group.py", "distributed/mesh.py"}


@pytest.mark.parametrize(
    ("degrees", "backends"),
    [((2, 4), {REPLICATE: "nccl", SHARD: "nccl"}), ((1, 8), None), ((8, 1), None)],
)
def test_hsdps_groups_are_between_gpus_alone(
    degrees: tuple[int, int], backends: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of all processes are the default group, by PyTorch's own rule; so is its gloo."""
    asked: dict[str, Any] = {}

    def make(kind: str, shape: tuple[int, ...], **named: Any) -> Any:
        asked.update(named, shape=shape, kind=kind)
        return MagicMock()

    monkeypatch.setattr(mesh_module, "init_device_mesh", make)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    replicas, shards = degrees
    config = ParallelConfig(
        data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards
    )
    build_mesh(config, World(0, 8, 0, torch.device("cuda", 0)))
    assert (asked["kind"], asked["shape"]) == ("cuda", degrees)
    assert asked["backend_override"] == backends


def test_the_soft_limit_of_open_files_is_raised() -> None:
    for found in a_run(2):
        soft, hard = found["limits"]
        assert soft == min(hard, 1 << 20) > 64


@pytest.mark.parametrize(("holds_store", "needed"), [(False, 768), (True, 2304)])
def test_a_limit_that_is_too_low_is_one_line(
    holds_store: bool, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"set": (1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits["set"])
    monkeypatch.setattr(resource, "setrlimit", lambda what, new: limits.update(set=new))
    raise_open_file_limit(512 if not holds_store else 128, holds_store=holds_store)
    if holds_store:
        with pytest.raises(UserError, match=f"^ulimit -n: .* 1,024 .* 512 needs {needed:,}; raise"):
            raise_open_file_limit(512, holds_store=True)
    limits["set"] = (1024, 4096)
    raise_open_file_limit(512, holds_store=holds_store)
    assert limits["set"] == (4096, 4096)
    assert needed_files(512, holds_store=holds_store) == needed
    assert process_group.needed_files(1, holds_store=True) == 0


def messages(rank: int, size: int) -> dict[str, Any]:
    """A thread's exchanges mailbox the main thread's collectives; then one rank stays away."""
    with join(ParallelConfig(dist_timeout=300)) as world:
        mailbox = Mailbox(world)
        wrong: list[Any] = []
        thread = threading.Thread(target=exchange, args=(mailbox, rank, size, wrong))
        thread.start()
        for step in range(100):
            flags = torch.tensor([float(step * (rank + 1))])
            pending = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)
            gradients = torch.arange(500.0) + rank
            dist.all_reduce(gradients)
            pending.wait()
            total = torch.arange(500.0) * size + sum(range(size))
            if flags.item() != step * size or not gradients.equal(total):
                wrong.append(("step", step))
        thread.join()
        return {"wrong": wrong, "away": stay_away(world)}


def exchange(mailbox: Mailbox, rank: int, size: int, wrong: list[Any]) -> None:
    delays = random.Random(rank)
    for number in range(15):
        time.sleep(delays.random() * 0.02)
        mine = {"rank": rank, "bytes": b"x" * (number * 1000)}
        everyone = [{"rank": other, "bytes": b"x" * (number * 1000)} for other in range(size)]
        if mailbox.gather(mine) != (everyone if rank == 0 else []):
            wrong.append(("gather", number))
        if mailbox.scatter([[number, other] for other in range(size)]) != [number, rank]:
            wrong.append(("scatter", number))
        if mailbox.all_gather(mine) != everyone:
            wrong.append(("all_gather", number))


def stay_away(world: World) -> list[str]:
    """What is said where the last rank does not come; and after it, that all still works."""
    world = World(world.rank, world.size, 0, CPU, timedelta(seconds=5))
    mailbox, said = Mailbox(world), []
    mailbox.begin()
    if world.rank < world.size - 1:
        try:
            mailbox.all_gather("here")
        except dist.DistStoreError as error:
            said.append(str(error))
    dist.barrier()
    mailbox.begin()
    said.append(" ".join(mailbox.all_gather("well")))
    said.append(" ".join(Mailbox(world).all_gather("again")))
    return said


def late_reader(rank: int, size: int) -> list[int]:
    """The last exchange of a run, of which one process hears late."""
    with join(ParallelConfig()) as world:
        last = Mailbox(world)
        if rank == 1:
            last.gather(rank)
            time.sleep(1)
            return [last.scatter([])]
        last.gather(rank)
        return [last.scatter([7, 8, 9])]


def test_rank_0_which_may_hold_the_store_leaves_last() -> None:
    assert results(late_reader, 3) == [[7], [8], [9]]


def test_messages_by_the_store_and_the_steps_do_not_mix() -> None:
    found = results(messages, 3)
    for rank, one in enumerate(found):
        assert one["wrong"] == []
        late = "rank 2" if rank == 0 else "rank 0"
        line = [f"timed out: {late} did not come within 5 s"] if rank < 2 else []
        assert one["away"] == [*line, "well well well", "again again again"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine with a number of visible GPUs, as far as `launch` asks."""
    machine = {"visible": 1}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine["visible"])
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: machine.update(current=torch.device(device).index)
    )
    return machine


@pytest.mark.parametrize(("visible", "local_rank", "device"), [(1, 3, 0), (4, 3, 3), (1, 0, 0)])
def test_one_visible_gpu_is_device_0_of_every_task(
    visible: int,
    local_rank: int,
    device: int,
    gpus: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus["visible"] = visible
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with join(ParallelConfig()) as world:
        assert (world.device, gpus["current"]) == (torch.device("cuda", device), device)
        assert world.local_rank == local_rank


def test_a_process_beyond_the_visible_gpus_is_refused(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus["visible"] = 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    with (
        pytest.raises(UserError, match=r"^parallel.nproc_per_node: local rank 2 has no GPU; thi"),
        join(ParallelConfig()),
    ):
        pass


@pytest.mark.parametrize("gpus", ["aba", "abc"])
def test_two_processes_with_one_gpu_are_named(gpus: str) -> None:
    found = [("node7 a4c3", gpu) for gpu in gpus] + [("node8 b1d2", gpu) for gpu in gpus[:2]]
    if gpus == "abc":
        return process_group.check_devices(found)
    with pytest.raises(
        UserError, match=r"ranks 0 and 2 have the same GPU of node7; start"
    ) as reported:
        process_group.check_devices(found)
    assert str(reported.value).startswith("parallel.nproc_per_node: ")


def gpus_here(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("set_device", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.mark.parametrize(
    ("backend", "gpus", "wanted", "refusal"),
    [
        (None, 1, 2, "2 processes, but this machine has 1 GPU; write at most 1, or parallel.dist"),
        ("nccl", 2, 3, "3 processes, but this machine has 2 GPUs; write at most 2, or parallel.d"),
        ("gloo", 1, 2, None),
        ("gloo", 2, 8, None),
        ("gloo", 0, 2, None),
        ("nccl", 0, 2, "parallel.dist_backend: nccl is for GPUs, and this process has none"),
    ],
)
def test_processes_share_a_gpu_where_gloo_is_written(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpus: int, wanted: int, refusal: str | None
) -> None:
    gpus_here(monkeypatch, gpus)
    config = ParallelConfig(nproc_per_node=wanted, dist_backend=backend)
    if refusal is not None:
        with pytest.raises(UserError, match=refusal) as reported:
            process_group.wanted_processes(config)
        assert len(reported.value.problems) == 1
        return
    assert process_group.wanted_processes(config) == wanted
    places = [process_group.choose_device(rank, backend) for rank in range(wanted)]
    if gpus:
        assert [place.index for place in places] == [rank % gpus for rank in range(wanted)]
    assert process_group.default_backend(places[0], backend) == "gloo"


def test_a_rank_without_a_gpu_of_its_own_is_refused_under_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus_here(monkeypatch, 2)
    with pytest.raises(UserError, match=r"local rank 2 has no GPU; .*dist_backend: gloo for"):
        process_group.choose_device(2, None)
    device = process_group.choose_device(1, None)
    assert device == torch.device("cuda", 1)
    assert process_group.default_backend(device, None) == "cpu:gloo,cuda:nccl"


def test_processes_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_sizes, "available_memory", lambda device: 12 << 30)
    world = World(1, 4, 1, torch.device("cuda", 0))
    assert microbatch_sizes.memory_of_process(world) == 12 << 30
    assert (
        microbatch_sizes.memory_of_process(replace(world, machine=Machine(0, sharing=3))) == 4 << 30
    )
    assert microbatch_sizes.memory_of_process(replace(world, device=CPU)) == 3 << 30


def sharing(rank: int, size: int) -> Any:
    """What each of three processes finds, of which the first two are said to have one GPU."""
    with join(ParallelConfig()) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_gpu_name", lambda device: "GPU-a" if rank < 2 else "GPU-b")
        found = process_group.find_machine(replace(world, device=torch.device("cuda", 0)))
        assert found is not None
        return found.sharing


def test_processes_on_one_gpu_under_gloo_count_each_other() -> None:
    assert results(sharing, 3) == [2, 2, 1]


def test_processors_have_no_name_that_could_be_the_same() -> None:
    process_group.check_devices([("node7", ""), ("node7", "")])


LIMIT = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("rank", "address", "why"),
    [
        (0, "no.such.host.invalid", "Name or service not known|name resolution|No address"),
        (1, "no.such.host.invalid", "Name or service not known|name resolution|No address"),
        (1, "127.0.0.1", "Connection refused"),
        (0, "127.0.0.1", r"1/2 clients joined"),
        (0, "192.0.2.1", "192.0.2.1"),  # another machine's address on rank 0
    ],
)
def test_a_wrong_address_is_one_line(
    rank: int, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    facts = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in facts.items():
        monkeypatch.setenv(name, str(value))
    line = rf"^MASTER_ADDR: .* did not meet at {address}:{port} within 1 s: .*({why})"
    with pytest.raises(RunFailure, match=line) as failed:
        meet_at_store(rank, 2, limit=LIMIT, timeout=LIMIT)
    said = str(failed.value)
    assert "\n" not in said
    end = {"rank": rank, "status": 1, "kind": "lost", "node": "n1", "lines": [said]}
    assert find_cause(Evidence(1, ends=[end])).kind == "network"
