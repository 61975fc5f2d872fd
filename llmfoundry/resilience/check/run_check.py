"""The order of a check: who is here, machines, burn, pairs, verdict. All call `run_check`.

`commands/check.py` calls it with the processes of a launcher, and `commands/train.py` before a run.
One process of each node reads the machine; all compute; rank 0 decides by the pure files of this
room and tells the others. The idea: whoever falls silent is named with the part that it was in.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llmfoundry.distributed.launch import World
from llmfoundry.exit_status import own_node
from llmfoundry.loggers.environment import processor
from llmfoundry.ops.torch_private import default_store
from llmfoundry.recipe.data import n_bytes
from llmfoundry.recipe.health_check import HealthCheckConfig
from llmfoundry.resilience.check import host, kernel_log, links, nvml
from llmfoundry.resilience.check.findings import BAD, UNCHECKED, Finding, Report
from llmfoundry.resilience.check.links import Pair, PairRates, disjoint, judge_pairs, tournament
from llmfoundry.resilience.check.process_board import Board
from llmfoundry.resilience.check.speeds import (
    Device,
    Multiply,
    Speed,
    burn,
    judge_speeds,
    slow_devices,
)
from llmfoundry.retry import Late, within

Made = TypeVar("Made")
_GPU_PAYLOADS, _CPU_PAYLOADS = ("64kb", "64mb", "1gb"), ("4kb", "256kb", "4mb")
_numbers = itertools.count()  # of the checks of this process, which do not hear each other
CONFIRMED = 2  # times that a slow pair is measured again
_CALLED = {"who": "the beginning", "machine": "the look at its machine", "burn": "products"}


@dataclass(frozen=True)
class Tools:
    """What touches hardware; tests put slower and wrong ones in their place."""

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
        publish: called with the report on rank 0, before the others learn the verdict and end.
        tools: in place of the real ones.

    Raises:
        RuntimeError: rank 0 has gone silent.
    """
    once = _Sweep(settings, paths, world, tools or Tools())
    report = once.run(is_full=is_full)
    if world.rank == 0:
        publish(report)
    return once.board.tell_last("level", report.level)


class _Sweep:
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
        patience = settings.timeout
        self.board = Board(store, rank=world.rank, size=world.size, patience=patience)
        self.findings: list[Finding] = []
        self.nodes: dict[int, str] = {}
        self.devices: dict[int, Device] = {}
        self.failed: set[int] = set()  # ranks whose devices did not compute

    def run(self, *, is_full: bool) -> Report:
        """Every part in order; on other ranks than 0 the report is empty."""
        started = time.monotonic()
        self._meet()
        self._look_at_machines()
        speeds: dict[int, Speed] = {}
        pairs: PairRates | None = None
        if is_full:
            speeds = self._burn()
            pairs = self._pair()
        if self.world.rank:
            return Report([], [])
        told = ((at, speeds[rank]) for rank, at in self.devices.items() if rank in speeds)
        report = Report(
            sorted(self.findings, key=lambda finding: -finding.severity),
            list(dict.fromkeys(self.nodes.values())),
            speeds=[{"where": at.where, "model": at.name, **asdict(own)} for at, own in told],
            seconds=time.monotonic() - started,
        )
        return report if pairs is None else replace(report, **pairs.as_rows())

    def _gather(self, topic: str, value: Any, *, seconds: float = 0.0) -> dict[int, Any]:
        """As the board's; who has gone silent becomes a finding."""
        before = {*self.board.lost}
        came = self.board.gather(topic, value, seconds=seconds)
        for rank in sorted(self.board.lost - before) if self.world.rank == 0 else ():
            self._lose(rank, _CALLED.get(topic.partition("/")[0], topic))
        return came

    def _lose(self, rank: int, part: str) -> None:
        node = self.nodes.get(rank, "")
        why = f"no answer in {part}"
        action = "look at that process and its GPU: it hangs, was stopped or has ended"
        where = f"{node}, rank {rank}".lstrip(", ")
        self.findings.append(Finding("processes", BAD, where, why, action, (node,) if node else ()))

    def _meet(self) -> None:
        """Learn which node each process is on: two agents on one host are two nodes."""
        env = os.environ
        group = env.get("GROUP_RANK") or env.get("SLURM_NODEID") or "0"
        who = {"host": own_node(), "group": group, "switch": env.get("SLURM_TOPOLOGY_ADDR", "")}
        came = self._gather("who", who | self._device(), seconds=self.settings.timeout)
        groups: dict[str, dict[str, None]] = {}
        for said in came.values():
            groups.setdefault(said["host"], {})[said["group"]] = None
        for rank, said in came.items():
            several = len(groups[said["host"]]) > 1
            self.nodes[rank] = f"{said['host']}#{said['group']}" if several else said["host"]
            label = f"rank {rank}" if said["kind"] == "cpu" else f"GPU {said['index']}"
            named = {key: said[key] for key in ("kind", "name", "numa", "has_nvlink")}
            self.devices[rank] = Device(rank, self.nodes[rank], label, **named)
        self.switches = {rank: said["switch"] for rank, said in came.items()}
        leaders: dict[str, int] = {}
        for rank, node in self.nodes.items():
            leaders.setdefault(node, rank)
        self.leaders = self.board.tell("leaders", sorted(leaders.values()))

    def _device(self) -> dict[str, Any]:
        """What this process computes on."""
        facts: dict[str, Any] = {"kind": "cpu", "name": processor(), "numa": None}
        facts |= {"index": self.world.local_rank, "has_nvlink": False}
        if self.world.device.type != "cuda":
            return facts
        found = torch.cuda.get_device_properties(self.world.device)
        facts |= {"kind": "cuda", "name": found.name}
        for reading in self._gpus()[0]:
            if reading.uuid.removeprefix("GPU-") == str(found.uuid):
                linked = bool(reading.links_up)
                facts |= {"index": reading.index, "has_nvlink": linked, "numa": _numa(reading.pci)}
        return facts

    def _gpus(self) -> tuple[list[nvml.GpuReading], str, bool]:
        """Of this machine, else why there are none, and whether that is because NVML hangs."""
        try:
            return *within(self.settings.timeout, self.tools.read_gpus), False
        except Late as error:
            return [], f"NVML hangs: {error}", True

    def _look_at_machines(self) -> None:
        """GPU counters, kernel log, paths, limits, versions, clocks: once a node."""
        is_leader = self.world.rank in self.leaders
        said = self._read_machine() if is_leader else None
        limit = 2 * (self.settings.timeout + kernel_log.PATIENCE)  # GPUs, paths; log
        came = self._gather("machine", said, seconds=limit)
        ahead = self._ticks()
        skews = self._gather("clock", ahead)
        if self.world.rank:
            return
        by_node = {self.nodes[rank]: value for rank, value in came.items() if value}
        for node, value in by_node.items():
            readings = [_reading(raw) for raw in value["gpus"]]
            if value["nvml_hangs"]:
                why = value["no_gpus"]
                self.findings.append(Finding("gpus", BAD, node, why, kernel_log.REBOOT, (node,)))
            elif value["no_gpus"]:
                self._unchecked("gpus", node, value["no_gpus"])
            if value["no_log"]:
                self._unchecked("kernel log", node, value["no_log"])
            else:
                self.findings += kernel_log.judge_log(value["log"], node)
            self.findings += nvml.judge_gpus(readings, node)
        counts = {n: len(v["gpus"]) for n, v in by_node.items() if not v["nvml_hangs"]}
        self.findings += nvml.judge_gpu_counts(counts)
        answers = {n: [host.PathReading(**p) for p in v["paths"]] for n, v in by_node.items()}
        least = n_bytes(self.settings.min_free_disk)
        self.findings += host.judge_paths(answers, least_free=least)
        machines = {n: host.MachineFacts(**v["machine"]) for n, v in by_node.items()}
        self.findings += host.judge_machines(machines)
        clocks = {self.nodes[r]: by for r, by in skews.items() if r in self.leaders}
        self.findings += host.judge_clocks(clocks, most=self.settings.max_clock_skew)

    def _read_machine(self) -> dict[str, Any]:
        """What this node's leader finds, as JSON knows it."""
        readings, no_gpus, nvml_hangs = self._gpus()
        lines, no_log = kernel_log.read_log(
            self.settings.kernel_log, hours=self.settings.kernel_log_hours
        )
        known = [line for line in lines if any(True for _ in kernel_log.log_events([line]))]
        patience = self.settings.timeout / max(1, len(self.paths))
        answers = [asdict(host.try_path(path, patience=patience)) for path in self.paths]
        return {
            "gpus": [asdict(reading) for reading in readings],
            "no_gpus": no_gpus,
            "nvml_hangs": nvml_hangs,
            "log": known,
            "no_log": no_log,
            "paths": answers,
            "machine": asdict(host.read_machine()),
        }

    def _ticks(self) -> float:
        """This machine's clock beside rank 0's."""
        ahead = []
        for n in range(5):
            if self.world.rank == 0:
                time.sleep(0.01)
            said = self.board.tell(f"tick/{n}", self.tools.now())
            ahead.append(self.tools.now() - said)
        return min(ahead, key=abs)  # each is off by the time that the message took

    def _unchecked(self, check: str, where: str, why: str) -> None:
        self.findings.append(Finding(check, UNCHECKED, where, why))

    def _burn(self) -> dict[int, Speed]:
        """Products and copies on every device, of slow ones twice."""
        seconds = self.settings.burn_seconds
        first = self._speeds("burn", seconds)
        again = self.board.tell("burn/again", sorted(slow_devices(self.devices, first)))
        if again:
            second = self._speeds("burn/2", seconds, only=again)
            first |= {rank: first[rank].better(speed) for rank, speed in second.items()}
        if self.world.rank == 0:
            self.failed = {rank for rank, speed in first.items() if speed.error}
            self.findings += judge_speeds(self.devices, first)
        return first

    def _speeds(
        self, topic: str, seconds: float, *, only: Iterable[int] | None = None
    ) -> dict[int, Speed]:
        said: dict[str, Any] = {}
        limit = 2 * seconds + self.settings.timeout
        if only is None or self.world.rank in only:
            own = partial(burn, self.world.device, seconds, multiply=self.tools.multiply)
            try:
                said = asdict(within(limit, own))
            except RuntimeError as error:
                said = {"error": str(error).splitlines()[0][:200]}
        came = self._gather(topic, said, seconds=limit)
        return {rank: Speed(**value) for rank, value in came.items() if value}

    def _pair(self) -> PairRates | None:
        """All-reduces between all pairs; slow ones must be slow each time that they are asked."""
        units: list[list[int]] = self.board.tell("units", self._units())
        if len(units) < 2:
            if self.world.rank == 0:
                what = "node" if self.settings.pairs_of == "nodes" else "process"
                self._unchecked("pairs", "the network", f"one {what} alone has no pair")
            return None
        first = self._rates(
            "pairs", units, tournament(len(units), rounds=self.settings.pair_rounds)
        )
        found = PairRates(
            [[self.devices[rank] for rank in unit] for unit in units]
            if not self.world.rank
            else [],
            first,
            least=self.settings.min_bus_bandwidth,
            groups=self._switch_groups(units),
        )
        slow = found.slow() if self.world.rank == 0 else {}
        for attempt in range(CONFIRMED):
            again = self.board.tell(f"pairs/{attempt}/again", disjoint(slow))
            if not again:
                break
            rounds = [[(a, b) for a, b in pairs] for pairs in again]
            for n, rates in self._rates(f"pairs{attempt}", units, rounds).items():
                for pair, rate in rates.items():
                    first[n][pair] = max(first[n].get(pair, 0.0), rate)
            if self.world.rank == 0:
                slow = {pair: why for pair, why in found.slow().items() if pair in slow}
        if self.world.rank == 0:
            self._leave_out_lost(units, first)
            slow = {pair: why for pair, why in slow.items() if pair in _pairs(first)}
            self.findings += judge_pairs(found, slow)
        return found

    def _leave_out_lost(
        self, units: Sequence[Sequence[int]], rates: dict[int, dict[Pair, float]]
    ) -> None:
        """Pairs of a process that has gone silent say nothing about links."""
        for own in rates.values():
            for pair in [*own]:
                if any(self.board.lost & {*units[unit]} for unit in pair):
                    del own[pair]

    def _units(self) -> list[list[int]]:
        """Ranks of each unit that is paired."""
        alive = [rank for rank in self.nodes if rank not in self.board.lost | self.failed]
        by_node: dict[str, list[int]] = {}
        for rank in alive:
            by_node.setdefault(self.nodes[rank], []).append(rank)
        of = self.settings.pairs_of
        is_by_node = of == "nodes" or (of == "auto" and len(by_node) > 1)
        return list(by_node.values()) if is_by_node else [[rank] for rank in alive]

    def _switch_groups(self, units: Sequence[Sequence[int]]) -> list[list[int]]:
        """Units of one switch, by Slurm's `spine1.leaf3.node7`, at every height."""
        if self.world.rank:
            return []
        groups: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            parts = self.switches.get(unit[0], "").split(".")[:-1]
            for height in range(1, len(parts) + 1):
                groups.setdefault(".".join(parts[:height]), []).append(number)
        return [group for group in groups.values() if 1 < len(group) < len(units)]

    def _rates(
        self, name: str, units: Sequence[Sequence[int]], rounds: Sequence[Sequence[Pair]]
    ) -> dict[int, dict[Pair, float]]:
        is_gpu = self.world.device.type == "cuda"
        sizes = self.settings.payloads or (_GPU_PAYLOADS if is_gpu else _CPU_PAYLOADS)
        payloads = [n_bytes(size) for size in sizes]
        asked = links.Links(units, payloads, self.settings.timeout, self.tools.all_reduce)
        before = {*self.board.lost}
        found = links.measure(asked, rounds, self.board, self.world.device, name=name)
        for rank in sorted(self.board.lost - before) if self.world.rank == 0 else ():
            self._lose(rank, "all-reduces")
        return found


def _pairs(rates: Mapping[int, Mapping[Pair, float]]) -> set[Pair]:
    return {pair for own in rates.values() for pair in own}


def _reading(raw: Mapping[str, Any]) -> nvml.GpuReading:
    """A reading that came as JSON."""
    found = dict(raw)
    if found["processes"] is not None:
        found["processes"] = tuple(nvml.GpuProcess(**process) for process in found["processes"])
    if found["links_down"] is not None:
        found["links_down"] = tuple(found["links_down"])
    return nvml.GpuReading(**found)


def _numa(pci: str) -> int | None:
    """The socket that a card is at, as Linux says."""
    try:
        text = Path(f"/sys/bus/pci/devices/{pci}.0/numa_node").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text)
