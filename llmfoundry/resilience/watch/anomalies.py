"""What is unusual in a round of steps: `find_anomalies`, a pure function of all processes' times.

`watch.py` calls it on every process with the same table, so that all decide alike. The idea: a run
is compared with itself. Other processes show what is usual of a process, earlier rounds what is
usual of the run. An anomaly must be an outlier (`check/outliers.py`), large enough to matter, and
come several times in a row, or a busy machine would be reported every hour.
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

KEPT = 20  # earlier rounds
LEAST = 5  # of them, until the run is compared with itself
STALL_STEPS = 10  # usual ones: a stall of slow steps is longer
RISE = 2.0  # times the usual share of waiting


@dataclass(frozen=True)
class RankTimes:
    """What a process measured in a round, in seconds; NaN: not known.

    Attributes:
        compute: of the blocks' forward passes in a step, without collectives: median of some.
        data_wait: for the batch of a step: mean.
        step: of one without data_wait, evaluation, saving or compilation: mean.
        stall: the most by which steps between two logs took longer than usual.
        stall_wait: of these steps, for data.
        skipped: updates so far; all processes must have the same number.
        xid: an error of its GPU since the last round; 0: none.
        slowed: why its GPU was slowed to protect it: a mask of check/nvml.py's.
        lost: 1 if its GPU has fallen off the bus since.
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


@dataclass(frozen=True)
class Anomaly:
    """Something unusual.

    Attributes:
        kind: key of WatchConfig: slow_rank, mfu_drop, data_wait, stall or gpu.
        seen: for people; `{host}` stands for the machine of `rank`.
        rank: the process that it is about; None: all.
        is_over: whether it is usual again.
        is_bad: whether it takes the machine out of service.
    """

    kind: str
    seen: str
    rank: int | None = None
    is_over: bool = False
    is_bad: bool = False


@dataclass(frozen=True)
class History:
    """Earlier rounds: what is usual, and what was unusual lately.

    Attributes:
        configuration: of the run; times of another one are not compared.
        steps: seconds of a step in earlier normal rounds, medians over processes.
        waits: share of a step that was waiting for data, the longest of all processes.
        unusual: rounds in a row, by `kind` or `kind/rank`.
    """

    configuration: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()
    unusual: Mapping[str, int] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any], configuration: Mapping[str, Any]) -> History:
        """From what `state` returned; empty where the configuration was another one."""
        if state.get("configuration") != configuration:
            return cls(configuration)
        steps, waits = (tuple(state[name]) for name in ("steps", "waits"))
        return cls(configuration, steps, waits, dict(state["unusual"]))


def find_anomalies(
    table: Sequence[RankTimes], history: History, config: WatchConfig
) -> tuple[list[Anomaly], History]:
    """Anomalies of a round, and the history with it; `table`: by rank."""
    now = _slow_ranks(table, config) | _slow_steps(table, history, config)
    now |= _waits(table, history, config) | _slowed_gpus(table)
    unusual = {key: history.unusual.get(key, 0) + 1 for key in now}
    found = [now[key] for key, rounds in unusual.items() if rounds == config.in_a_row]
    found += [
        _over(key)
        for key, rounds in history.unusual.items()
        if key not in now and rounds >= config.in_a_row
    ]
    found += [*_stalls(table, history, config), *_gpu_errors(table)]
    steps, waits = history.steps, history.waits
    step, share = _step(table), _share(table)
    if "mfu_drop" not in now and math.isfinite(step):
        steps = (*steps, step)[-KEPT:]
    if "data_wait" not in now and math.isfinite(share):
        waits = (*waits, share)[-KEPT:]
    wanted = [anomaly for anomaly in found if getattr(config, anomaly.kind) != "off"]
    return wanted, replace(history, steps=steps, waits=waits, unusual=unusual)


def _slow_ranks(table: Sequence[RankTimes], config: WatchConfig) -> dict[str, Anomaly]:
    """Processes that compute, or wait for data, much longer than the others."""
    effect = 1 - 1 / config.slow_rank_above
    rates = {n: 1 / t.compute for n, t in enumerate(table) if t.compute > 0}
    found = {
        f"slow_rank/{slow.name}": Anomaly(
            "slow_rank",
            f"rank {slow.name} ({{host}}) computes {1 / slow.share:.2f} times as long as the median"
            f" of {len(rates)} ({1e3 / slow.value:.4g} ms of a step's forward pass)",
            slow.name,
        )
        for slow in (too_small(rates, effect=effect, spread=0.02) if rates else [])
    }
    step = _step(table)
    if not math.isfinite(step):
        return found
    rates = {n: 1 / (step + t.data_wait) for n, t in enumerate(table)}
    for slow in too_small(rates, effect=effect, spread=0.02):
        wait, usual = table[slow.name].data_wait, statistics.median(t.data_wait for t in table)
        found[f"slow_rank/{slow.name}"] = Anomaly(
            "slow_rank",
            f"rank {slow.name} ({{host}}) waits {1e3 * wait:.4g} ms a step for data, the median of"
            f" {len(table)} {1e3 * usual:.4g} ms",
            slow.name,
        )
    return found


def _slow_steps(
    table: Sequence[RankTimes], history: History, config: WatchConfig
) -> dict[str, Anomaly]:
    """Steps that take longer than the run's own; MFU is one over their time, up to a factor."""
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
    """Steps that wait longer for data than the run's own did."""
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
    """Single steps that took much longer; of each round the longest."""
    stall, step = max(t.stall for t in table), _step(table)
    usual = statistics.median(history.steps) if history.steps else step
    least = max(config.stall_above, STALL_STEPS * (usual if math.isfinite(usual) else 0.0))
    if stall <= least:
        return
    rank = max(range(len(table)), key=lambda n: table[n].stall_wait)
    seen = f"a stretch between two logs took {stall:.3g} s longer than usual"
    if (waited := table[rank].stall_wait) > stall / 2:
        why = f"rank {rank} ({{host}}) waited {waited:.3g} s for data"
        yield Anomaly("stall", f"{seen}; {why}", rank)
    else:
        yield Anomaly("stall", f"{seen}; no process waited for data")


def _slowed_gpus(table: Sequence[RankTimes]) -> dict[str, Anomaly]:
    """GPUs throttled by heat, power or an external brake."""
    found = {}
    for rank, times in enumerate(table):
        mask = int(times.slowed)
        if names := [name for bit, name in (SLOWED | WARM).items() if mask & bit]:
            seen = f"the GPU of rank {rank} ({{host}}) is slowed: {', '.join(names)}"
            found[f"gpu/{rank}"] = Anomaly("gpu", seen, rank)
    return found


def _gpu_errors(table: Sequence[RankTimes]) -> Iterator[Anomaly]:
    """What the driver reported since the last round, with what to do."""
    for rank, times in enumerate(table):
        if times.lost:
            action, why = XIDS[79]
            seen = f"the GPU of rank {rank} ({{host}}) is lost: {why}; {action}"
            yield Anomaly("gpu", seen, rank, is_bad=True)
        if times.xid:
            code = int(times.xid)
            action, why = XIDS.get(code, (WATCH, "not in the table"))
            seen = f"the GPU of rank {rank} ({{host}}): XID {code}, {why}; {action}"
            is_bad = action in TAKE_OUT and code not in NVLINK_5  # NVML does not say if fatal
            yield Anomaly("gpu", seen, rank, is_bad=is_bad)


def _over(key: str) -> Anomaly:
    kind, _, rank = key.partition("/")
    if kind == "gpu":
        seen = f"the GPU of rank {rank} ({{host}}) is no longer slowed"
        return Anomaly(kind, seen, int(rank), is_over=True)
    if rank:
        seen = f"rank {rank} ({{host}}) is as fast as the others again"
        return Anomaly(kind, seen, int(rank), is_over=True)
    what = {"mfu_drop": "the model FLOPs utilisation", "data_wait": "waiting for data"}[kind]
    return Anomaly(kind, f"{what} is as usual again", is_over=True)


def _step(table: Sequence[RankTimes]) -> float:
    """Seconds of a step: the median over processes, which wait for each other; NaN: not known."""
    known = [t.step for t in table if t.step > 0]
    return statistics.median(known) if known else math.nan


def _share(table: Sequence[RankTimes]) -> float:
    step, wait = _step(table), max(t.data_wait for t in table)
    return wait / (step + wait)
