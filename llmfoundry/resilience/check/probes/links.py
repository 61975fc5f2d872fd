"""Bus bandwidth between pairs of processes or of nodes, by all-reduces of several sizes.

All processes call `measure`; each joins a group of its own in every round, over NCCL or gloo, made
for that round and left after it. The idea: rounds are kept in step through the board, so that all
pairs of a round load the network at one time and a pair that hangs costs one time limit, not the
check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.ops.torch_private import leave_group, small_group
from llmfoundry.resilience.check.link_findings import Pair, bus_bandwidth
from llmfoundry.resilience.check.probes.time_limit import within
from llmfoundry.resilience.check.process_board import Board

WARM_UPS, LEAST, MOST = 2, 5, 100  # repeats
SECONDS = 0.05  # of the repeats of a payload, within these bounds

AllReduce = Callable[[Any, Tensor, Pair], None]


def all_reduce(group: Any, tensor: Tensor, pair: Pair) -> None:
    """The sum over a group, waited for; tests put a slower one in its place."""
    group.allreduce([tensor]).wait()


@dataclass(frozen=True)
class Links:
    """Who is measured, with what.

    Attributes:
        members: the ranks of each unit: one process, or all of a node.
        payloads: bytes of the all-reduces.
        limit: seconds that a pair may take for a round.
        reduce: the all-reduce.
    """

    members: Sequence[Sequence[int]]
    payloads: Sequence[int]
    limit: float
    reduce: AllReduce = all_reduce


def measure(
    links: Links, rounds: Sequence[Sequence[Pair]], board: Board, device: torch.device, *,
    store: dist.Store, name: str,
) -> dict[int, dict[Pair, float]]:  # fmt: skip
    """GB/s by payload and pair, on rank 0; 0 where a pair gave no answer; {} on the others.

    Args:
        links: who and how.
        rounds: disjoint pairs of units, each round at one time.
        board: by which rounds are kept in step.
        device: of this process.
        store: at which groups meet.
        name: of this measurement: groups of another one meet elsewhere.
    """
    found: dict[int, dict[Pair, float]] = {n_bytes: {} for n_bytes in links.payloads}
    for number, pairs in enumerate(rounds):
        lost = {*board.lost}
        pairs = [pair for pair in pairs if not lost & {*_ranks(links, pair)}]
        own = next((pair for pair in pairs if board.rank in _ranks(links, pair)), None)
        said = None
        if own is not None:
            meeting = dist.PrefixStore(f"{name}/{number}/{own[0]}-{own[1]}", store)
            said = _one(links, own, board.rank, device, meeting)
        came = board.gather(f"{name}/{number}", said, seconds=2 * links.limit)
        for pair in pairs:
            answers = [came.get(rank) for rank in _ranks(links, pair)]
            for index, n_bytes in enumerate(links.payloads):
                found[n_bytes][pair] = min(a[index] if a else 0.0 for a in answers)
    return {} if board.rank else found


def _ranks(links: Links, pair: Pair) -> list[int]:
    return [rank for unit in pair for rank in links.members[unit]]


def _one(
    links: Links, pair: Pair, rank: int, device: torch.device, store: dist.Store
) -> list[float]:
    """GB/s of each payload for this pair, as this process sees it; 0 from where it failed on."""
    ranks, rates, groups = _ranks(links, pair), list[float](), list[Any]()

    def reduce() -> None:
        limit = timedelta(seconds=links.limit)
        groups.append(small_group(store, ranks.index(rank), len(ranks), device=device, limit=limit))
        for n_bytes in links.payloads:
            tensor = torch.zeros(max(1, n_bytes // 4), device=device)
            seconds = _fastest(
                partial(links.reduce, groups[0], tensor, pair),
                partial(_mean, groups[0], len(ranks), device),
                device,
            )
            rates.append(bus_bandwidth(n_bytes, seconds, len(ranks)))

    with suppress(RuntimeError):  # a time limit, a connection that was closed
        within(1.5 * links.limit, reduce)  # gloo ends after `limit`, NCCL waits until it is left
    reached = rates[:]  # what comes later, from a call that is late, is not an answer
    for group in groups:
        leave_group(group, failed=len(reached) < len(links.payloads))
    return reached + [0.0] * (len(links.payloads) - len(reached))


def _mean(group: Any, size: int, device: torch.device, value: float) -> float:
    """Of a group, the same on each of its processes."""
    shared = torch.tensor([value / size], device=device)
    group.allreduce([shared]).wait()
    return float(shared)


def _fastest(
    step: Callable[[], None], agree: Callable[[float], float], device: torch.device
) -> float:
    """Seconds of the fastest of some repeats: what else the machine does only makes it slower.

    Many where they are short, so that one busy moment is not all of them; `agree` makes one number
    of what the processes propose, as each must take part in each.
    """

    def timed() -> float:
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    warm = min(timed() for _ in range(WARM_UPS))
    times = round(agree(min(MOST, max(LEAST, SECONDS / max(warm, 1e-9)))))
    return max(min(timed() for _ in range(times)), 1e-9)
