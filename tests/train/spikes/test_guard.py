"""What the guard sees on the device, beside a plain loop over the same numbers."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmfoundry.recipe.resilience import WatchConfig
from llmfoundry.train.spikes import (
    Guard,
    SpikeRecord,
    StepVerdict,
    decide_spike,
    read_verdicts,
)

CPU = torch.device("cpu")


def step(loss: float, norm: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(loss), torch.tensor(norm)


def watched(guard: Guard, series: list[tuple[float, float]], first: int = 0) -> list[StepVerdict]:
    for number, values in enumerate(series, first):
        guard.observe(number, *step(*values))
    return read_verdicts(*guard.unread())


def quiet(n: int, seed: int = 0) -> list[tuple[float, float]]:
    """A falling loss with noise, and norms that differ by factors, as those of real runs do."""
    draw = random.Random(seed)
    falling = [8 * (i + 4) ** -0.25 for i in range(n)]
    return [(loss + draw.gauss(0, 0.05), math.exp(draw.gauss(0.0, 0.25))) for loss in falling]


def plain(series: list[tuple[float, float]], config: WatchConfig) -> list[tuple[bool, bool]]:
    """The same rule by the standard library, one number at a time."""
    size, kept, found = config.spike_window, ([], []), []
    for loss, norm in series:
        flags = []
        for past, value, is_loss in ((kept[0], loss, True), (kept[1], math.log(norm), False)):
            recent = past[-size:]
            flag = False
            if len(recent) >= size // 2:
                mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
                least = 0.05 * abs(mean) if is_loss else math.log(5)
                flag = value > mean + max(config.spike_deviations * deviation, least)
            past.append(statistics.fmean(recent) if flag else value)
            flags.append(flag)
        found.append((flags[0], flags[1]))
    return found


def test_spikes_are_those_of_the_plain_rule_also_after_a_resume() -> None:
    series = quiet(400)
    for at, loss, norm in ((90, 9.0, 1.0), (91, 9.0, 30.0), (200, 3.0, 50.0), (333, 6.0, 1.0)):
        series[at] = (loss, norm)
    series = [(float(torch.tensor(a)), float(torch.tensor(b))) for a, b in series]
    config = WatchConfig(spike_window=64, loss_spike="skip", gradient_spike="skip")
    guard = Guard(CPU, config)
    found = watched(guard, series[:201])
    resumed = Guard(CPU, config)
    resumed.restore(guard.state())
    found += watched(resumed, series[201:], 201)
    flags = [verdict.flags[1:] for verdict in found]
    assert flags == plain(series, config)
    assert [n for n, flag in enumerate(flags) if any(flag)] == [90, 91, 200, 333]


def test_a_spike_is_no_update_under_skip_and_one_under_log() -> None:
    for action, expected in (("skip", 1.0), ("log", 0.0), ("off", 0.0)):
        guard = Guard(CPU, WatchConfig(spike_window=16, loss_spike=action))
        watched(guard, quiet(100))
        guard.observe(100, *step(50.0, 1.0))
        assert guard.found_inf.item() == expected
        guard.observe(101, *step(2.5, 1.0))
        assert guard.found_inf.item() == 0.0


@pytest.mark.parametrize("action", ["roll_back", "stop"])
def test_after_a_spike_nothing_is_an_update_until_the_host_has_decided(action: str) -> None:
    guard = Guard(CPU, WatchConfig(spike_window=16, gradient_spike=action))
    watched(guard, quiet(100))
    for number, norm in ((100, 1000.0), (101, 1.0), (102, 1000.0)):
        guard.observe(number, *step(2.5, norm))
        assert guard.found_inf.item() == 1.0
    assert guard.first_bad() == 100
    guard.release()
    guard.observe(100, *step(2.5, 1.0))
    assert guard.found_inf.item() == 0.0 and guard.first_bad() is None


def test_a_step_that_is_not_finite_leaves_no_trace_in_the_window() -> None:
    guard, other = (Guard(CPU, WatchConfig(spike_window=16, not_finite="skip")) for _ in range(2))
    series = quiet(60)
    watched(other, series)
    watched(guard, series[:3])
    guard.observe(3, *step(math.nan, 1.0))
    assert guard.found_inf.item() == 1.0
    watched(guard, series[3:])
    limits = [watched(g, [(2.5, 1.0)])[0].limits for g in (guard, other)]
    assert limits[0] == pytest.approx(limits[1])  # both know the last sixteen alone


def test_a_new_level_becomes_the_usual_one_under_log_alone() -> None:
    series = [(2.0 + 0.01 * (n % 3), 1.0) for n in range(100)]
    series += [(4.0 + 0.01 * (n % 3), 1.0) for n in range(100)]
    config = WatchConfig(spike_window=16, spikes_in_a_row=5)
    found = [v.batch for v in watched(Guard(CPU, config), series) if any(v.flags)]
    assert found == [100, 101, 102, 103, 104]
    config = WatchConfig(spike_window=16, spikes_in_a_row=5, loss_spike="skip")
    found = [v.batch for v in watched(Guard(CPU, config), series) if any(v.flags)]
    assert found == [*range(100, 200)]


@pytest.mark.parametrize("seed", range(5))
def test_two_thousand_quiet_steps_have_no_spike(seed: int) -> None:
    found = watched(Guard(CPU, WatchConfig()), quiet(2000, seed))
    assert [v for v in found if any(v.flags)] == []


def verdict(batch: int, *flags: bool) -> StepVerdict:
    return StepVerdict(batch, (9.0, 0.0), (2.0, 0.0), (3.0, 1.0), (flags[0], flags[1], flags[2]))


def test_of_several_flags_the_one_about_which_most_is_done_decides() -> None:
    config = WatchConfig(loss_spike="log", gradient_spike="skip")
    found, record = decide_spike(verdict(6, False, True, True), config, SpikeRecord())
    assert found is not None and (found.kind, found.action) == ("gradient_spike", "skip")
    assert record == SpikeRecord(in_a_row=1, skipped=1)
    assert "step 7" in found.seen and "callbacks.watch.gradient_spike: skip" in found.done
    assert decide_spike(verdict(7, False, False, False), config, record) == (
        None,
        SpikeRecord(0, 1),
    )


def test_skipping_for_ever_ends_the_run() -> None:
    config, record, actions = WatchConfig(loss_spike="skip", spikes_in_a_row=3), SpikeRecord(), []
    for batch in range(4):
        found, record = decide_spike(verdict(batch, False, True, False), config, record)
        assert found is not None
        actions.append(found.action)
    assert actions == ["skip", "skip", "skip", "stop"]


def test_going_back_without_passing_the_spike_ends_the_run() -> None:
    config = WatchConfig(loss_spike="roll_back", roll_back_most=2)
    record, actions = SpikeRecord(), []
    for batch in (50, 40, 60, 55, 60):
        found, record = decide_spike(verdict(batch, False, True, False), config, record)
        assert found is not None
        record = SpikeRecord(**json.loads(json.dumps(asdict(record))))
        actions.append(found.action)
    assert actions == ["roll_back", "roll_back", "roll_back", "roll_back", "stop"]


def real() -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a run of yamls/quickstart.yaml on a CPU."""
    found = json.loads((Path(__file__).parent / "quickstart_steps.json").read_text())
    return list(zip(found["loss"], found["norm"], strict=True))


def test_no_step_of_a_real_run_is_a_spike_and_one_that_is_raised_is() -> None:
    series = real()
    assert len(series) > 1000
    found = watched(Guard(CPU, WatchConfig()), series)
    assert [v.batch for v in found if any(v.flags)] == []
    loss, norm = series[1000]
    for raised in ((loss + 6, norm), (loss, norm * 20)):
        spoilt = [*series[:1000], raised, *series[1001:]]
        found = watched(Guard(CPU, WatchConfig()), spoilt)
        assert [v.batch for v in found if any(v.flags)] == [1000]


@pytest.mark.parametrize("seed", range(3))
def test_no_step_of_longer_runs_like_the_real_one_is_a_spike(seed: int) -> None:
    """Its second half's noise around a line that keeps falling, drawn anew for 2,000 steps."""
    half = real()[-800:]
    draw = random.Random(seed)
    deviations = [[a - statistics.fmean(x) for a in x] for x in zip(*half, strict=True)]
    mean = statistics.fmean(loss for loss, _ in half)
    norms = [norm for _, norm in half]
    series = [
        (mean * (1 - n / 20_000) + draw.choice(deviations[0]), draw.choice(norms))
        for n in range(2000)
    ]
    found = watched(Guard(CPU, WatchConfig()), series)
    assert [v.batch for v in found if any(v.flags)] == []
