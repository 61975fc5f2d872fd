"""Detect anomalies in a round of steps: `find_anomalies`, a pure function of all ranks' times.

`watch.py` calls it on every rank with the same table, so all ranks decide alike. A run is compared
with itself: a rank with the other ranks, and the run with its earlier rounds. To avoid false
positives on a busy machine, an anomaly must be an outlier (`check/outliers.py`), large enough to
matter, and occur several times in a row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmfoundry.recipe.resilience import WatchConfig
from llmfoundry.resilience.check.kernel_log import NVLINK_5, TAKE_OUT, WATCH, XIDS
from llmfoundry.resilience.check.nvml import SLOWED, WARM
from llmfoundry.resilience.check.outliers import too_small, usual_limit

KEPT = 20  # rounds in the history
LEAST = 5  # rounds before the run is compared with its history
STALL_STEPS = 10  # minimum length of a stall, in usual steps
RISE = 2.0  # minimum factor over the usual share of waiting


@dataclass(frozen=True)
class RankTimes:
    """Measurements of a rank in a round, in seconds; NaN: not known.

    Attributes:
        compute: forward passes of the blocks in a step without collectives; median of some steps.
        data_wait: wait for the batch of a step; mean.
        step: a step without data_wait, evaluation, saving and compilation; mean.
        stall: largest delay between two logs, compared with the usual time.
        stall_wait: wait for data during this delay.
        skipped: number of skipped updates so far; must be equal on all ranks.
        xid: error code of the GPU since the last round; 0: none.
        slowed: reasons for throttling of the GPU, as a bit mask of check/nvml.py.
        lost: 1 if the GPU has fallen off the bus since the last round.
        energy: joules of the GPU since the last round.
        cpu_energy: joules of the processors since the last round, of one rank of each machine.
    """

    compute: float = math.nan
    data_wait: float = 0.0
    step: float = math.nan
    stall: float = 0.0
    stall_wait: float = 0.0
    skipped: float = 0.0
    xid: float = 0.0
    slowed: float = 0.0
    lost: float = 0.0
    energy: float = 0.0
    cpu_energy: float = 0.0


@dataclass(frozen=True)
class Anomaly:
    """An anomaly, or its end.

    Attributes:
        kind: key of WatchConfig: slow_rank, mfu_drop, data_wait, stall or gpu.
        seen: description; `{host}` is a placeholder for the machine of `rank`.
        rank: affected rank; None: all ranks.
        has_ended: whether the anomaly has ended.
        is_bad: whether the machine should be taken out of service.
    """

    kind: str
    seen: str
    rank: int | None = None
    has_ended: bool = False
    is_bad: bool = False


@dataclass(frozen=True)
class History:
    """History of earlier rounds, saved in the checkpoint.

    Attributes:
        configuration: configuration of the run; times of another configuration are not comparable.
        steps: seconds of a step in earlier normal rounds, median over ranks.
        waits: largest share of a step spent waiting for data, in earlier normal rounds.
        unusual: number of consecutive anomalous rounds, by `kind` or `kind/rank`.
    """

    configuration: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()
    unusual: Mapping[str, int] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any], configuration: Mapping[str, Any]) -> History:
        """Restore from the result of `state`; empty if the configuration has changed."""
        if state.get("configuration") != configuration:
            return cls(configuration)
        steps, waits = (tuple(state[name]) for name in ("steps", "waits"))
        return cls(configuration, steps, waits, dict(state["unusual"]))


def find_anomalies(
    table: Sequence[RankTimes], history: History, config: WatchConfig
) -> tuple[list[Anomaly], History]:
    """Return the anomalies of a round, and the history including this round.

    Args:
        table: measurements by rank.
        history: measurements of earlier rounds.
        config: settings from the recipe.
    """
    # conditions that must hold for several rounds in a row, and their ends
    current = _slow_ranks(table, config) | _slow_steps(table, history, config)
    current |= _waits(table, history, config) | _slowed_gpus(table)
    unusual = {key: history.unusual.get(key, 0) + 1 for key in current}
    anomalies = [current[key] for key, rounds in unusual.items() if rounds == config.in_a_row]
    for key, rounds in history.unusual.items():
        if key not in current and rounds >= config.in_a_row:
            anomalies.append(_over(key))

    # single occurrences
    anomalies += [*_stalls(table, history, config), *_gpu_errors(table)]

    # normal rounds extend the history
    steps, waits = history.steps, history.waits
    step, share = _step(table), _share(table)
    if "mfu_drop" not in current and math.isfinite(step):
        steps = (*steps, step)[-KEPT:]
    if "data_wait" not in current and math.isfinite(share):
        waits = (*waits, share)[-KEPT:]
    enabled = [anomaly for anomaly in anomalies if getattr(config, anomaly.kind) != "off"]
    return enabled, replace(history, steps=steps, waits=waits, unusual=unusual)


def _slow_ranks(table: Sequence[RankTimes], config: WatchConfig) -> dict[str, Anomaly]:
    """Return ranks that compute, or wait for data, much longer than the other ranks."""
    anomalies = dict[str, Anomaly]()
    effect = 1 - 1 / config.slow_rank_above

    # computation
    rates = {rank: 1 / times.compute for rank, times in enumerate(table) if times.compute > 0}
    slow_ranks = too_small(rates, effect=effect, spread=0.02) if rates else []
    for slow in slow_ranks:
        anomalies[f"slow_rank/{slow.name}"] = Anomaly(
            "slow_rank",
            f"rank {slow.name} ({{host}}) computes {1 / slow.share:.2f} times as long as the median"
            f" of {len(rates)} ({1e3 / slow.value:.4g} ms of a step's forward pass)",
            slow.name,
        )

    # wait for data, added to the time of a step
    step = _step(table)
    if not math.isfinite(step):
        return anomalies
    rates = {rank: 1 / (step + times.data_wait) for rank, times in enumerate(table)}
    usual = statistics.median(times.data_wait for times in table)
    for slow in too_small(rates, effect=effect, spread=0.02):
        wait = table[slow.name].data_wait
        anomalies[f"slow_rank/{slow.name}"] = Anomaly(
            "slow_rank",
            f"rank {slow.name} ({{host}}) waits {1e3 * wait:.4g} ms a step for data, the median of"
            f" {len(table)} {1e3 * usual:.4g} ms",
            slow.name,
        )
    return anomalies


def _slow_steps(
    table: Sequence[RankTimes], history: History, config: WatchConfig
) -> dict[str, Anomaly]:
    """Return an anomaly if steps are slower than the run's earlier steps.

    Model FLOPs utilization is inversely proportional to the time of a step.
    """
    step = _step(table)
    if len(history.steps) < LEAST or not math.isfinite(step):
        return {}
    rates = [1 / seconds for seconds in history.steps]
    limit, usual = usual_limit(rates, effect=1 - config.mfu_drop_below, spread=0.02)
    if limit is None or usual is None or 1 / step >= limit:
        return {}
    seen = (
        f"the model FLOPs utilisation is {1 / step / usual:.0%} of the usual: a step takes"
        f" {step:.4g} s, and took {1 / usual:.4g} s"
    )
    return {"mfu_drop": Anomaly("mfu_drop", seen)}


def _waits(table: Sequence[RankTimes], history: History, config: WatchConfig) -> dict[str, Anomaly]:
    """Return an anomaly if steps wait longer for data than the run's earlier steps."""
    share = _share(table)
    if len(history.waits) < LEAST or not math.isfinite(share):
        return {}
    usual = statistics.median(history.waits)
    if share <= max(config.data_wait_above, RISE * usual):
        return {}
    rank = max(range(len(table)), key=lambda n: table[n].data_wait)
    seen = (
        f"steps wait for data {share:.0%} of their time, and waited {usual:.0%}; rank {rank}"
        " ({host}) waits longest"
    )
    return {"data_wait": Anomaly("data_wait", seen, rank)}


def _stalls(table: Sequence[RankTimes], history: History, config: WatchConfig) -> Iterator[Anomaly]:
    """Yield the longest stall of a round, if it is long enough."""
    stall, step = max(t.stall for t in table), _step(table)
    usual = statistics.median(history.steps) if history.steps else step
    least = max(config.stall_above, STALL_STEPS * (usual if math.isfinite(usual) else 0.0))
    if stall <= least:
        return
    rank = max(range(len(table)), key=lambda n: table[n].stall_wait)
    seen = f"a stretch between two logs took {stall:.3g} s longer than usual"
    waited = table[rank].stall_wait
    if waited > stall / 2:
        why = f"rank {rank} ({{host}}) waited {waited:.3g} s for data"
        yield Anomaly("stall", f"{seen}; {why}", rank)
    else:
        yield Anomaly("stall", f"{seen}; no process waited for data")


def _slowed_gpus(table: Sequence[RankTimes]) -> dict[str, Anomaly]:
    """Return GPUs that are throttled by heat, power or an external brake."""
    anomalies = {}
    for rank, times in enumerate(table):
        mask = int(times.slowed)
        reasons = [name for bit, name in (SLOWED | WARM).items() if mask & bit]
        if reasons:
            seen = f"the GPU of rank {rank} ({{host}}) is slowed: {', '.join(reasons)}"
            anomalies[f"gpu/{rank}"] = Anomaly("gpu", seen, rank)
    return anomalies


def _gpu_errors(table: Sequence[RankTimes]) -> Iterator[Anomaly]:
    """Yield the errors that the driver reported since the last round, with the action."""
    for rank, times in enumerate(table):
        if times.lost:
            action, why = XIDS[79]
            seen = f"the GPU of rank {rank} ({{host}}) is lost: {why}; {action}"
            yield Anomaly("gpu", seen, rank, is_bad=True)
        if times.xid:
            code = int(times.xid)
            action, why = XIDS.get(code, (WATCH, "not in the table"))
            seen = f"the GPU of rank {rank} ({{host}}): XID {code}, {why}; {action}"
            # NVML does not report whether an NVLink 5 error is fatal
            is_bad = action in TAKE_OUT and code not in NVLINK_5
            yield Anomaly("gpu", seen, rank, is_bad=is_bad)


def _over(key: str) -> Anomaly:
    """Return the end of an anomaly with the key `kind` or `kind/rank`."""
    kind, _, rank = key.partition("/")
    if kind == "gpu":
        seen = f"the GPU of rank {rank} ({{host}}) is no longer slowed"
        return Anomaly(kind, seen, int(rank), has_ended=True)
    if rank:
        seen = f"rank {rank} ({{host}}) is as fast as the others again"
        return Anomaly(kind, seen, int(rank), has_ended=True)
    what = {"mfu_drop": "the model FLOPs utilisation", "data_wait": "waiting for data"}[kind]
    return Anomaly(kind, f"{what} is as usual again", has_ended=True)


def _step(table: Sequence[RankTimes]) -> float:
    """Return the median seconds of a step over ranks, which wait for each other; NaN: unknown."""
    known = [t.step for t in table if t.step > 0]
    return statistics.median(known) if known else math.nan


def _share(table: Sequence[RankTimes]) -> float:
    """Return the largest share of a step that a rank spends waiting for data."""
    step, wait = _step(table), max(t.data_wait for t in table)
    return wait / (step + wait)
