"""Run a health check on all ranks: identify nodes, read machines, compute, test pairs, judge.

Entry point: `run_check`, called by every rank from `cli/commands/check.py` or, before training,
`cli/commands/train.py`. One rank of each node (its leader) reads the machine, and all ranks
compute. Rank 0 judges with the pure functions of this package and broadcasts the verdict. A rank
that does not answer is reported with the stage that it was in.
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

_PAYLOADS = {True: ("64kb", "64mb", "1gb"), False: ("4kb", "256kb", "4mb")}  # GPU, CPU
_numbers = itertools.count()  # numbers the checks of this process, which share a store
CONFIRMED = 2  # repeated measurements of a slow pair
_PARTS = {
    "who": "the beginning",
    "machine": "the look at its machine",
    "burn": "products",
    "pairs": "all-reduces",
}
"""Names of the stages in findings, by the board's topic up to its slash."""


@dataclass(frozen=True)
class Tools:
    """Functions that use hardware. Tests replace them with slow or faulty functions."""

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
    """Check all machines, and return the worst level of the findings on every rank.

    Args:
        settings: settings from the recipe.
        paths: that the recipe names.
        world: ranks, which have joined the process group.
        is_full: whether to test computation and pairs too.
        publish: called with the report on rank 0, before the verdict is broadcast.
        tools: replace the hardware functions; None: the real ones.

    Raises:
        RuntimeError: rank 0 does not answer.
    """
    check = _Check(settings, paths, world, tools or Tools())
    report = check.run(is_full=is_full)
    if world.rank == 0:
        publish(report)
    return str(check.board.broadcast_last("level", report.level))


@dataclass(frozen=True)
class _Machine:
    """Readings of a node by its leader. The reasons `no_…` are empty if there are readings."""

    gpus: list[nvml.GpuReading]
    no_gpus: str
    nvml_hangs: bool
    log: list[str]
    no_log: str
    paths: list[host.PathReading]
    facts: host.MachineFacts


class _Check:
    """State of a check on one rank."""

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
        # only on rank 0; the dictionaries are by rank
        self.findings: list[Finding] = []
        self.devices: dict[int, Device] = {}
        self.switches: dict[int, str] = {}  # Slurm's topology address
        self.failed: set[int] = set()  # ranks whose devices did not compute

    def run(self, *, is_full: bool) -> Report:
        """Run all stages and return the report, which is empty on ranks other than 0."""
        started = time.monotonic()
        self._meet()
        self._read_machines()
        speeds = self._burn() if is_full else {}
        pairs = self._pair() if is_full else None
        if self.world.rank:
            return Report([], [])

        # build the report on rank 0
        findings = [*self._silent(), *self.findings]
        speed_rows = []
        for rank, device in self.devices.items():
            if rank in speeds:
                row = {"where": device.where, "model": device.name, **asdict(speeds[rank])}
                speed_rows.append(row)
        report = Report(
            sorted(findings, key=lambda finding: -finding.severity),
            list(dict.fromkeys(device.node for device in self.devices.values())),
            speeds=speed_rows,
            seconds=time.monotonic() - started,
        )
        return report if pairs is None else replace(report, **pairs.as_rows())

    def _silent(self) -> Iterator[Finding]:
        """Yield a finding for each rank that did not answer, with the stage that it was in."""
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
        """Find the node and device of each rank, and choose a leader for each node."""
        env = os.environ
        group = env.get("GROUP_RANK") or env.get("SLURM_NODEID") or "0"
        identity = own_node(), group, env.get("SLURM_TOPOLOGY_ADDR", ""), self._device()
        identities = self.board.gather("who", identity, seconds=self.settings.timeout)

        # two torchrun agents on one host count as two nodes
        agents = {(name, group) for name, group, *_ in identities.values()}
        agents_of_host = Counter(name for name, _ in agents)
        for rank, (name, group, switch, device) in identities.items():
            node = f"{name}#{group}" if agents_of_host[name] > 1 else name
            self.devices[rank] = replace(device, node=node)
            self.switches[rank] = switch

        # the leader is the first rank of its node
        leaders: dict[str, int] = {}
        for rank, device in self.devices.items():
            leaders.setdefault(device.node, rank)
        self.leaders: list[int] = self.board.broadcast("leaders", [*leaders.values()])

    def _device(self) -> Device:
        """Return the device of this rank; its node is not known yet."""
        rank, device = self.world.rank, self.world.device
        if device.type != "cuda":
            return Device(rank, "", f"rank {rank}", "cpu", processor())
        properties, index = torch.cuda.get_device_properties(device), self.world.local_rank
        has_nvlink, numa = False, None
        for reading in self._gpus()[0]:
            if reading.uuid.removeprefix("GPU-") == str(properties.uuid):
                index, has_nvlink = reading.index, bool(reading.links_up)
                node = host.read_sys(f"bus/pci/devices/{reading.pci}.0/numa_node")
                numa = int(node) if node else None
        return Device(rank, "", f"GPU {index}", "cuda", properties.name, numa, has_nvlink)

    def _gpus(self) -> tuple[list[nvml.GpuReading], str, bool]:
        """Return this machine's GPUs, or none with the reason and whether NVML hangs."""
        try:
            return *within(self.settings.timeout, self.tools.read_gpus), False
        except DeadlineExceeded as error:
            return [], f"NVML hangs: {error}", True

    def _read_machines(self) -> None:
        """Read and judge GPU counters, kernel log, paths, limits, versions and clocks per node."""
        reading = self._read_machine() if self.world.rank in self.leaders else None
        limit = 2 * (self.settings.timeout + kernel_log.PATIENCE)  # GPUs and paths; log
        readings = self.board.gather("machine", reading, seconds=limit)
        skews = self.board.gather("clock", self._clock_skew())
        if self.world.rank == 0:
            node_of = {rank: self.devices[rank].node for rank in self.leaders}
            machines = {node: readings[rank] for rank, node in node_of.items() if rank in readings}
            clocks = {node: skews[rank] for rank, node in node_of.items() if rank in skews}
            self._judge_machines(machines)
            self.findings += host.judge_clocks(clocks, most=self.settings.max_clock_skew)

    def _judge_machines(self, machines: dict[str, _Machine]) -> None:
        """Judge the readings of all nodes, on rank 0."""
        # each node by itself: GPUs and kernel log
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

        # nodes compared with each other: number of GPUs, paths, limits and versions
        counts = {node: len(m.gpus) for node, m in machines.items() if not m.nvml_hangs}
        self.findings += nvml.judge_gpu_counts(counts)
        paths = {node: machine.paths for node, machine in machines.items()}
        least = n_bytes(self.settings.min_free_disk)
        self.findings += host.judge_paths(paths, least_free=least)
        facts = {node: machine.facts for node, machine in machines.items()}
        self.findings += host.judge_machines(facts)

    def _read_machine(self) -> _Machine:
        """Read this node; lines of the kernel log without a known meaning are left out."""
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
        """Return the seconds by which this machine's clock is ahead of rank 0's clock."""
        differences = []
        for n in range(5):
            if self.world.rank == 0:
                time.sleep(0.01)
            rank0_time = self.board.broadcast(f"tick/{n}", self.tools.now())
            differences.append(self.tools.now() - rank0_time)
        return min(differences, key=abs)  # each difference includes the time of the message

    def _burn(self) -> dict[int, Speed]:
        """Measure matmuls and memory copies on every device; return the speeds by rank on rank 0.

        Slow devices are measured twice.
        """
        speeds = self._speeds("burn", range(self.world.size))
        slow_ranks = self.board.broadcast("burn/again", sorted(slow_devices(self.devices, speeds)))
        if slow_ranks:
            second = self._speeds("burn/2", slow_ranks)
            speeds |= {rank: speeds[rank].better(speed) for rank, speed in second.items()}
        self.failed = {rank for rank, speed in speeds.items() if speed.error}
        self.findings += judge_speeds(self.devices, speeds)
        return speeds

    def _speeds(self, topic: str, ranks: Iterable[int]) -> dict[int, Speed]:
        """Measure the devices of some ranks at the same time; return the speeds on rank 0."""
        local_speed, seconds = None, self.settings.burn_seconds
        limit = 2 * seconds + self.settings.timeout
        if self.world.rank in ranks:
            measure = partial(burn, self.world.device, seconds, multiply=self.tools.multiply)
            try:
                local_speed = within(limit, measure)
            except RuntimeError as error:
                local_speed = Speed(error=str(error).splitlines()[0][:200])
        speeds = self.board.gather(topic, local_speed, seconds=limit)
        return {rank: speed for rank, speed in speeds.items() if speed is not None}

    def _pair(self) -> PairRates | None:
        """Measure all-reduces between all pairs of units; slow pairs are measured repeatedly.

        Returns:
            The rates; None: there is only one unit.
        """
        units: list[list[int]] = self.board.broadcast("units", self._units())
        is_main = self.world.rank == 0
        if len(units) < 2:
            what = "node" if self.settings.pairs_of == "nodes" else "process"
            self._unchecked("pairs", "the network", f"one {what} alone has no pair")
            return None

        # measure all pairs
        test = self._pair_test(units)
        rounds = tournament(len(units), rounds=self.settings.pair_rounds)
        pair_rates = PairRates(
            [[self.devices[rank] for rank in unit] for unit in units] if is_main else [],
            test.measure(rounds, "pairs"),
            least=self.settings.min_bus_bandwidth,
            groups=self._switch_groups(units) if is_main else [],
        )

        # repeat slow pairs; a pair is only reported if it is slow in each measurement
        slow = pair_rates.slow() if is_main else {}
        for attempt in range(CONFIRMED):
            slow_rounds = self.board.broadcast(f"again/{attempt}", disjoint(slow))
            if not slow_rounds:
                break
            pair_rates.keep_best(test.measure(slow_rounds, f"pairs/again {attempt}"))
            still_slow = pair_rates.slow() if is_main else {}
            slow = {pair: why for pair, why in still_slow.items() if pair in slow}

        # judge, without the pairs of lost ranks, which are reported separately
        if is_main:
            lost = {n for n, unit in enumerate(units) if self.board.lost.keys() & {*unit}}
            pair_rates.leave_out(lost)
            slow = {pair: why for pair, why in slow.items() if not lost & {*pair}}
            self.findings += judge_pairs(pair_rates, slow)
        return pair_rates

    def _units(self) -> list[list[int]]:
        """Return the ranks of each unit of the pair test: single ranks, or all ranks of a node."""
        alive = [rank for rank in self.devices if rank not in self.board.lost.keys() | self.failed]
        by_node: dict[str, list[int]] = {}
        for rank in alive:
            by_node.setdefault(self.devices[rank].node, []).append(rank)
        of = self.settings.pairs_of
        is_by_node = of == "nodes" or (of == "auto" and len(by_node) > 1)
        return list(by_node.values()) if is_by_node else [[rank] for rank in alive]

    def _switch_groups(self, units: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return groups of units that share a switch, at every level of Slurm's topology.

        A topology address is, for example, `spine1.leaf3.node7`.
        """
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
