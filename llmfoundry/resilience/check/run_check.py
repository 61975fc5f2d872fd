"""The order of a check: who is here, machines, burn, pairs, verdict. All call `run_check`.

`cli/commands/check.py` calls it with the processes of a launcher, and `cli/commands/train.py`
before a run. One process of each node reads the machine; all compute; rank 0 judges by the pure
functions of this package and sends the verdict. The idea: whoever falls silent is named with the
part that it was in.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from llmfoundry.distributed.process_group import World
from llmfoundry.exit_status import own_node
from llmfoundry.loggers.environment import processor
from llmfoundry.ops.torch_private import default_store
from llmfoundry.recipe.data import n_bytes
from llmfoundry.recipe.resilience import HealthCheckConfig
from llmfoundry.resilience.check import host, kernel_log, links, nvml
from llmfoundry.resilience.check.findings import BAD, UNCHECKED, Finding, Report
from llmfoundry.resilience.check.links import PairRates, disjoint, judge_pairs, tournament
from llmfoundry.resilience.check.process_board import Board
from llmfoundry.resilience.check.speeds import (
    Device,
    Multiply,
    Speed,
    burn,
    judge_speeds,
    slow_devices,
)
from llmfoundry.retry import DeadlineExceeded, within

_PAYLOADS = {True: ("64kb", "64mb", "1gb"), False: ("4kb", "256kb", "4mb")}  # on a GPU, or not
_numbers = itertools.count()  # of the checks of this process, which share a store
CONFIRMED = 2  # times that a slow pair is measured again
_PARTS = {
    "who": "the beginning",
    "machine": "the look at its machine",
    "burn": "products",
    "pairs": "all-reduces",
}
"""Topics of the board, up to a slash, as findings call them."""


@dataclass(frozen=True)
class Tools:
    """What touches hardware; tests replace them by slower and wrong ones."""

    multiply: Multiply = torch.matmul
    all_reduce: links.AllReduce = links.all_reduce
    read_gpus: Callable[[], tuple[list[nvml.GpuReading], str]] = nvml.read_gpus
    now: Callable[[], float] = time.time


def run_check(
    settings: HealthCheckConfig,
    paths: Sequence[host.NamedPath],
    world: World,
    *,
    is_full: bool,
    publish: Callable[[Report], None],
    tools: Tools | None = None,
) -> str:
    """Check all machines of a world; the level of what was found, on every process.

    Args:
        settings: the recipe's.
        paths: what the recipe names.
        world: of processes that have joined.
        is_full: whether to compute and to pair, too.
        publish: called with the report on rank 0, before the others get the verdict and end.
        tools: instead of the real ones.

    Raises:
        RuntimeError: rank 0 has gone silent.
    """
    check = _Check(settings, paths, world, tools or Tools())
    report = check.run(is_full=is_full)
    if world.rank == 0:
        publish(report)
    return str(check.board.broadcast_last("level", report.level))


@dataclass(frozen=True)
class _Machine:
    """What the leader of a node has read; a reason is empty where there are readings."""

    gpus: list[nvml.GpuReading]
    no_gpus: str
    nvml_hangs: bool
    log: list[str]
    no_log: str
    paths: list[host.PathReading]
    facts: host.MachineFacts


class _Check:
    """One check, on one process."""

    def __init__(
        self,
        settings: HealthCheckConfig,
        paths: Sequence[host.NamedPath],
        world: World,
        tools: Tools,
    ) -> None:
        self.settings, self.paths, self.world, self.tools = settings, paths, world, tools
        store: dist.Store | None = None
        if world.size > 1:
            store = dist.PrefixStore(f"check/{next(_numbers)}", default_store())
        self.board = Board(store, rank=world.rank, size=world.size, patience=settings.timeout)
        # On rank 0 alone:
        self.findings: list[Finding] = []
        self.devices: dict[int, Device] = {}
        self.switches: dict[int, str] = {}
        self.failed: set[int] = set()  # ranks whose devices did not compute

    def run(self, *, is_full: bool) -> Report:
        """Every part in order; on other ranks than 0 the report is empty."""
        started = time.monotonic()
        self._meet()
        self._read_machines()
        speeds = self._burn() if is_full else {}
        pairs = self._pair() if is_full else None
        if self.world.rank:
            return Report([], [])
        every = [*self._silent(), *self.findings]
        report = Report(
            sorted(every, key=lambda finding: -finding.severity),
            list(dict.fromkeys(device.node for device in self.devices.values())),
            speeds=[
                {"where": at.where, "model": at.name, **asdict(speeds[rank])}
                for rank, at in self.devices.items()
                if rank in speeds
            ],
            seconds=time.monotonic() - started,
        )
        return report if pairs is None else replace(report, **pairs.as_rows())

    def _silent(self) -> Iterator[Finding]:
        """Processes that did not answer, each with the part that it was in."""
        action = "look at that process and its GPU: it hangs, was stopped or has ended"
        for rank, topic in self.board.lost.items():
            part = topic.partition("/")[0]
            node = self.devices[rank].node if rank in self.devices else ""
            where, nodes = f"{node}, rank {rank}".lstrip(", "), (node,) if node else ()
            why = f"no answer in {_PARTS.get(part, part)}"
            yield Finding("processes", BAD, where, why, action, nodes)

    def _unchecked(self, check: str, where: str, why: str) -> None:
        self.findings.append(Finding(check, UNCHECKED, where, why))

    def _meet(self) -> None:
        """Learn which node each process is on: two agents on one host are two nodes."""
        env = os.environ
        group = env.get("GROUP_RANK") or env.get("SLURM_NODEID") or "0"
        own = own_node(), group, env.get("SLURM_TOPOLOGY_ADDR", ""), self._device()
        came = self.board.gather("who", own, seconds=self.settings.timeout)
        agents = Counter(name for name, _ in {(name, group) for name, group, *_ in came.values()})
        for rank, (name, group, switch, device) in came.items():
            node = f"{name}#{group}" if agents[name] > 1 else name
            self.devices[rank] = replace(device, node=node)
            self.switches[rank] = switch
        leaders: dict[str, int] = {}
        for rank, device in self.devices.items():
            leaders.setdefault(device.node, rank)
        self.leaders: list[int] = self.board.broadcast("leaders", [*leaders.values()])

    def _device(self) -> Device:
        """What this process computes on; its node is not known yet."""
        rank, device = self.world.rank, self.world.device
        if device.type != "cuda":
            return Device(rank, "", f"rank {rank}", "cpu", processor())
        found, index = torch.cuda.get_device_properties(device), self.world.local_rank
        linked, numa = False, None
        for reading in self._gpus()[0]:
            if reading.uuid.removeprefix("GPU-") == str(found.uuid):
                index, linked = reading.index, bool(reading.links_up)
                node = host.read_sys(f"bus/pci/devices/{reading.pci}.0/numa_node")
                numa = int(node) if node else None
        return Device(rank, "", f"GPU {index}", "cuda", found.name, numa, linked)

    def _gpus(self) -> tuple[list[nvml.GpuReading], str, bool]:
        """Of this machine, else why there are none, and whether that is because NVML hangs."""
        try:
            return *within(self.settings.timeout, self.tools.read_gpus), False
        except DeadlineExceeded as error:
            return [], f"NVML hangs: {error}", True

    def _read_machines(self) -> None:
        """GPU counters, kernel log, paths, limits, versions, clocks: once a node."""
        own = self._read_machine() if self.world.rank in self.leaders else None
        limit = 2 * (self.settings.timeout + kernel_log.PATIENCE)  # GPUs, paths; log
        came = self.board.gather("machine", own, seconds=limit)
        skews = self.board.gather("clock", self._clock_skew())
        if self.world.rank == 0:
            leading = {rank: self.devices[rank].node for rank in self.leaders}
            machines = {node: came[rank] for rank, node in leading.items() if rank in came}
            clocks = {node: skews[rank] for rank, node in leading.items() if rank in skews}
            self._judge_machines(machines)
            self.findings += host.judge_clocks(clocks, most=self.settings.max_clock_skew)

    def _judge_machines(self, machines: dict[str, _Machine]) -> None:
        for node, machine in machines.items():
            if machine.nvml_hangs:
                action = kernel_log.REBOOT
                self.findings.append(Finding("gpus", BAD, node, machine.no_gpus, action, (node,)))
            elif machine.no_gpus:
                self._unchecked("gpus", node, machine.no_gpus)
            if machine.no_log:
                self._unchecked("kernel log", node, machine.no_log)
            self.findings += kernel_log.judge_log(machine.log, node)
            self.findings += nvml.judge_gpus(machine.gpus, node)
        counts = {node: len(m.gpus) for node, m in machines.items() if not m.nvml_hangs}
        self.findings += nvml.judge_gpu_counts(counts)
        paths = {node: machine.paths for node, machine in machines.items()}
        least = n_bytes(self.settings.min_free_disk)
        self.findings += host.judge_paths(paths, least_free=least)
        facts = {node: machine.facts for node, machine in machines.items()}
        self.findings += host.judge_machines(facts)

    def _read_machine(self) -> _Machine:
        """What this node's leader finds; of the log, lines with a meaning."""
        config = self.settings
        lines, no_log = kernel_log.read_log(config.kernel_log, hours=config.kernel_log_hours)
        patience = config.timeout / max(1, len(self.paths))
        return _Machine(
            *self._gpus(),
            log=[line for line in lines if any(kernel_log.log_events([line]))],
            no_log=no_log,
            paths=[host.try_path(path, patience=patience) for path in self.paths],
            facts=host.read_machine(),
        )

    def _clock_skew(self) -> float:
        """Seconds by which this machine's clock is ahead of rank 0's."""
        ahead = []
        for n in range(5):
            if self.world.rank == 0:
                time.sleep(0.01)
            theirs = self.board.broadcast(f"tick/{n}", self.tools.now())
            ahead.append(self.tools.now() - theirs)
        return min(ahead, key=abs)  # each is off by the time that the message took

    def _burn(self) -> dict[int, Speed]:
        """Products and copies on every device, of slow ones twice; on rank 0, by rank."""
        first = self._speeds("burn", range(self.world.size))
        again = self.board.broadcast("burn/again", sorted(slow_devices(self.devices, first)))
        if again:
            second = self._speeds("burn/2", again)
            first |= {rank: first[rank].better(speed) for rank, speed in second.items()}
        self.failed = {rank for rank, speed in first.items() if speed.error}
        self.findings += judge_speeds(self.devices, first)
        return first

    def _speeds(self, topic: str, ranks: Iterable[int]) -> dict[int, Speed]:
        """What some of the devices reach."""
        found, seconds = None, self.settings.burn_seconds
        limit = 2 * seconds + self.settings.timeout
        if self.world.rank in ranks:
            own = partial(burn, self.world.device, seconds, multiply=self.tools.multiply)
            try:
                found = within(limit, own)
            except RuntimeError as error:
                found = Speed(error=str(error).splitlines()[0][:200])
        came = self.board.gather(topic, found, seconds=limit)
        return {rank: speed for rank, speed in came.items() if speed is not None}

    def _pair(self) -> PairRates | None:
        """All-reduces between all pairs; those that are slow must be so in each measurement."""
        units: list[list[int]] = self.board.broadcast("units", self._units())
        is_main = self.world.rank == 0
        if len(units) < 2:
            what = "node" if self.settings.pairs_of == "nodes" else "process"
            self._unchecked("pairs", "the network", f"one {what} alone has no pair")
            return None
        test = self._pair_test(units)
        rounds = tournament(len(units), rounds=self.settings.pair_rounds)
        found = PairRates(
            [[self.devices[rank] for rank in unit] for unit in units] if is_main else [],
            test.measure(rounds, "pairs"),
            least=self.settings.min_bus_bandwidth,
            groups=self._switch_groups(units) if is_main else [],
        )
        slow = found.slow() if is_main else {}
        for attempt in range(CONFIRMED):
            again = self.board.broadcast(f"again/{attempt}", disjoint(slow))
            if not again:
                break
            found.keep_best(test.measure(again, f"pairs/again {attempt}"))
            still = found.slow() if is_main else {}
            slow = {pair: why for pair, why in still.items() if pair in slow}
        if is_main:
            lost = {n for n, unit in enumerate(units) if self.board.lost.keys() & {*unit}}
            found.leave_out(lost)  # not the fault of links
            slow = {pair: why for pair, why in slow.items() if not lost & {*pair}}
            self.findings += judge_pairs(found, slow)
        return found

    def _units(self) -> list[list[int]]:
        """Ranks of each unit that is paired."""
        alive = [rank for rank in self.devices if rank not in self.board.lost.keys() | self.failed]
        by_node: dict[str, list[int]] = {}
        for rank in alive:
            by_node.setdefault(self.devices[rank].node, []).append(rank)
        of = self.settings.pairs_of
        is_by_node = of == "nodes" or (of == "auto" and len(by_node) > 1)
        return list(by_node.values()) if is_by_node else [[rank] for rank in alive]

    def _switch_groups(self, units: Sequence[Sequence[int]]) -> list[list[int]]:
        """Units of one switch, by Slurm's `spine1.leaf3.node7`, at every height."""
        groups: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            parts = self.switches.get(unit[0], "").split(".")[:-1]
            for height in range(1, len(parts) + 1):
                groups.setdefault(".".join(parts[:height]), []).append(number)
        return [group for group in groups.values() if 1 < len(group) < len(units)]

    def _pair_test(self, units: Sequence[Sequence[int]]) -> links.PairTest:
        device = self.world.device
        sizes = self.settings.payloads or _PAYLOADS[device.type == "cuda"]
        payloads, limit = [n_bytes(size) for size in sizes], self.settings.timeout
        return links.PairTest(units, payloads, limit, self.board, device, self.tools.all_reduce)
