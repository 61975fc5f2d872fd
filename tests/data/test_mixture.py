"""Mixtures: every batch and the whole run in proportion; nothing repeated or lost by a change."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest

from llmfoundry.data.order import Mixture, Phase, stream_weights
from llmfoundry.errors import UserError
from llmfoundry.recipe.source import StreamConfig

MPT_30B = (33.5, 29.9, 8.5, 10.0, 4.0, 4.5, 3.3, 3.0, 1.9, 1.4)
CASES: list[tuple[tuple[float, ...], int]] = [
    (MPT_30B, 1760),
    (MPT_30B, 8),  # six sources have less than a row a batch
    ((0.75, 0.25), 16),
    ((0.1, 0.2, 0.7), 10),  # in floats not quite one
    ((1.0, 2**0.5, 0.0, 3**0.5), 7),
    ((1e-6, 1.0), 64),
    ((5.0,), 3),
]
NAMES = [f"source-{n}" for n in range(10)]


def mixture(weights: Sequence[float], batch_size: int, per_stream: bool = False) -> Mixture:
    names = NAMES[: len(weights)]
    return Mixture(names, [Phase(0, tuple(weights))], batch_size=batch_size, per_stream=per_stream)


def counts(of: Mixture, n_steps: int) -> np.ndarray:
    """(steps, sources): rows of each batch, by counting its slots."""
    batches = [np.bincount(of.plan(n)[0], minlength=len(of.names)) for n in range(n_steps)]
    return np.stack(batches)


@pytest.mark.parametrize(("weights", "batch_size"), CASES)
def test_every_batch_has_each_part_rounded_down_or_up(
    weights: tuple[float, ...], batch_size: int
) -> None:
    exact = np.array(weights) / sum(weights) * batch_size
    batches = counts(mixture(weights, batch_size), 400)
    assert (batches.sum(1) == batch_size).all()
    assert (batches >= np.floor(exact + 1e-9)).all() and (batches <= np.ceil(exact - 1e-9)).all()


@pytest.mark.parametrize("per_stream", [False, True])
@pytest.mark.parametrize(("weights", "batch_size"), CASES)
def test_consumed_is_the_sum_of_the_batches(
    weights: tuple[float, ...], batch_size: int, per_stream: bool
) -> None:
    made = mixture(weights, batch_size, per_stream)
    total = np.zeros(len(weights), np.int64)
    for step, batch in enumerate(counts(made, 200)):
        assert made.consumed(step) == tuple(total.tolist())
        total += batch


@pytest.mark.parametrize(("weights", "batch_size"), CASES)
def test_what_a_source_has_given_stays_within_rows_of_its_part(
    weights: tuple[float, ...], batch_size: int
) -> None:
    """By brute force over a stretch, by the closed form wherever a run may get to.

    Measured over 300 random mixtures: at most 5.6 rows in any of the first 1e5 steps' stretches.
    """
    made = mixture(weights, batch_size)
    exact = np.array(weights) / sum(weights) * batch_size
    steps = [*range(3000), *(10**n + m for n in range(4, 8) for m in range(30))]
    for step in steps:
        assert np.abs(np.array(made.consumed(step)) - step * exact).max() < 6


def test_a_batch_of_one_stream_goes_to_each_in_proportion() -> None:
    batches = counts(mixture((0.5, 0.3, 0.0, 0.2), 12, per_stream=True), 1000)
    assert ((batches > 0).sum(1) == 1).all() and (batches.sum(1) == 12).all()
    drift = np.cumsum(batches / 12, 0) - np.arange(1, 1001)[:, None] * (0.5, 0.3, 0.0, 0.2)
    assert np.abs(drift).max() < 3


@pytest.mark.parametrize(("weights", "batch_size"), CASES)
def test_any_stretch_of_slots_is_in_proportion(weights: tuple[float, ...], batch_size: int) -> None:
    source, _ = mixture(weights, batch_size).plan(5)
    of_each = np.eye(len(weights), dtype=np.int64)[source]
    sums = np.concatenate([np.zeros((1, len(weights)), np.int64), of_each.cumsum(0)])
    for length in {1, 2, batch_size // 4, batch_size // 2, batch_size}:
        windows = sums[length:] - sums[: batch_size + 1 - length]
        assert np.abs(windows - length / batch_size * sums[-1]).max() <= 3


def test_small_sources_do_not_meet_in_one_part_of_the_batch() -> None:
    source, _ = mixture((1000, 1, 1, 1, 1, 1, 1, 1, 1, 1), 1009).plan(0)
    places = np.flatnonzero(source)
    assert len(places) == 9
    assert np.diff(places).min() > 30  # of 112 on average


@pytest.mark.parametrize("share", [1, 4, 5, 20])
def test_shares_of_a_batch_make_up_the_batch(share: int) -> None:
    made = mixture(MPT_30B, 20)
    for step in (0, 1, 10**9):
        parts = [made.plan(step, first, share) for first in range(0, 20, share)]
        whole = made.plan(step)
        for column in (0, 1):
            assert np.array_equal(np.concatenate([p[column] for p in parts]), whole[column])


class Given:
    """Every sample that a run has been given; a repeat fails at once."""

    def __init__(self) -> None:
        self.samples: dict[str, list[int]] = {}

    def take(self, of: Mixture, steps: range) -> None:
        for step in steps:
            source, k = of.plan(step)
            for n, name in enumerate(of.names):
                expected = len(self.samples.setdefault(name, []))
                new = k[source == n].tolist()
                assert new == list(range(expected, expected + len(new))), (step, name)
                self.samples[name] += new


def through_json(of: Mixture, step: int) -> dict[str, object]:
    state: dict[str, object] = json.loads(json.dumps(of.state(step)))
    return state


PHASES = [Phase(0, (0.7, 0.3, 0.0)), Phase(30, (0.1, 0.2, 0.7)), Phase(30, (0.2, 0.2, 0.6))]


def test_phases_begin_where_they_say_and_continue_counting() -> None:
    made = Mixture("abc", [*PHASES, Phase(50, (0.0, 1.0, 0.0))], batch_size=10)
    Given().take(made, range(80))
    batches = counts(made, 80)
    assert (batches[:30] == (7, 3, 0)).all()
    assert (batches[30:50] == (2, 2, 6)).all()  # the later of two phases at one step
    assert (batches[50:] == (0, 10, 0)).all()


@pytest.mark.parametrize("per_stream", [False, True])
@pytest.mark.parametrize("step", [0, 1, 17, 29, 30, 31, 55])
def test_a_resumed_run_is_the_uninterrupted_one(step: int, per_stream: bool) -> None:
    phases = [*PHASES, Phase(50, (0.31, 0.37, 0.32))]
    whole = Mixture("abc", phases, batch_size=7, per_stream=per_stream)
    first = Mixture("abc", phases, batch_size=7, per_stream=per_stream)
    again = Mixture("abc", phases, batch_size=7, per_stream=per_stream)
    again.resume(through_json(first, step), step)
    third = Mixture("abc", phases, batch_size=7, per_stream=per_stream)
    third.resume(through_json(again, step + 5), step + 5)
    for later in range(step + 5, 80):
        for resumed in (again, third):
            assert resumed.state(later) == whole.state(later)
            for one, other in zip(resumed.plan(later), whole.plan(later), strict=True):
                assert np.array_equal(one, other)


@pytest.mark.parametrize("step", [11, 30, 44])
def test_changed_proportions_repeat_and_lose_nothing(step: int) -> None:
    given = Given()
    before = Mixture("abc", PHASES, batch_size=16)
    given.take(before, range(step))
    after = Mixture("abc", [Phase(0, (0.25, 0.5, 0.25))], batch_size=16)
    after.resume(through_json(before, step), step)
    given.take(after, range(step, step + 40))
    assert (counts_from(after, step, 40) == (4, 8, 4)).all()
    larger = Mixture("abc", [Phase(0, (0.25, 0.5, 0.25))], batch_size=32)
    larger.resume(through_json(after, step + 40), step + 40)
    given.take(larger, range(step + 40, step + 60))
    assert sum(map(len, given.samples.values())) == 16 * (step + 40) + 32 * 20


def counts_from(of: Mixture, first: int, n_steps: int) -> np.ndarray:
    return np.stack([np.bincount(of.plan(first + n)[0], minlength=3) for n in range(n_steps)])


def test_later_phases_follow_as_the_recipe_says_now() -> None:
    before = Mixture("abc", PHASES, batch_size=10)
    moved = [PHASES[0], Phase(40, (0.0, 0.5, 0.5))]
    after = Mixture("abc", moved, batch_size=10)
    after.resume(through_json(before, 35), 35)  # within a phase that begins later now
    given = Given()
    given.take(before, range(35))
    given.take(after, range(35, 60))
    batches = counts_from(after, 35, 25)
    assert (batches[:5] == (7, 3, 0)).all() and (batches[5:] == (0, 5, 5)).all()


def test_sources_are_known_by_name() -> None:
    weights = {"web": 0.47, "code": 0.31, "books": 0.22}
    one, other = (
        Mixture(names, [Phase(0, tuple(weights[name] for name in names))], batch_size=9)
        for names in (["web", "code", "books"], ["books", "web", "code"])
    )
    resumed = Mixture(other.names, [Phase(0, (0.22, 0.47, 0.31))], batch_size=9)
    resumed.resume(through_json(one, 25), 25)
    for step in range(25, 60):
        expected = [(one.names[s], k) for s, k in zip(*one.plan(step), strict=True)]
        for made in (other, resumed):
            assert [(made.names[s], k) for s, k in zip(*made.plan(step), strict=True)] == expected


def test_removed_sources_come_back_where_they_stopped() -> None:
    given = Given()
    first = Mixture(["web", "code"], [Phase(0, (0.6, 0.4))], batch_size=10)
    given.take(first, range(13))
    second = Mixture(["books", "web"], [Phase(0, (0.5, 0.5))], batch_size=10)
    second.resume(through_json(first, 13), 13)
    assert second.consumed(13) == (0, first.consumed(13)[0])
    given.take(second, range(13, 20))
    third = Mixture(["code", "books"], [Phase(0, (0.5, 0.5))], batch_size=10)
    third.resume(through_json(second, 20), 20)
    given.take(third, range(20, 30))
    assert {name: len(samples) for name, samples in given.samples.items()} == {
        "web": 13 * 6 + 7 * 5,
        "code": 13 * 4 + 10 * 5,
        "books": 17 * 5,
    }
    assert third.state(30)["consumed"] == {name: len(s) for name, s in given.samples.items()}


def test_the_state_is_small_and_of_constant_time() -> None:
    names = [f"the-stack-{n:02}-markdown" for n in range(10)]
    made = Mixture(names, [Phase(0, tuple(w / 7 for w in MPT_30B))], batch_size=12_288)
    start = time.process_time()
    state = json.dumps(made.state(10**12))
    made.plan(10**12)
    assert time.process_time() - start < 1
    assert len(state) < 1024


def test_the_mixture_is_a_contract() -> None:
    """Stored numbers: another result here breaks the resume of every earlier run."""
    made = Mixture(["web", "code", "books"], [Phase(0, (0.47, 0.31, 0.22))], batch_size=9)
    assert made.consumed(10**9) == (4_229_999_998, 2_790_000_000, 1_980_000_002)
    source, k = made.plan(1234)
    assert source.tolist() == GOLDEN_SOURCE
    assert k.tolist() == GOLDEN_K


GOLDEN_SOURCE = [1, 0, 2, 0, 0, 1, 0, 2, 0]
GOLDEN_K = [3444, 5219, 2443, 5220, 5221, 3445, 5222, 2444, 5223]


def test_a_newer_state_is_refused() -> None:
    made = mixture((1, 1), 4)
    with pytest.raises(UserError, match="newer than this code's"):
        made.resume({**made.state(3), "version": 99}, 3)


def test_weights_from_the_recipe() -> None:
    def streams(**keys: list[float | None]) -> dict[str, StreamConfig]:
        (key, values), *_ = keys.items()
        return {str(n): StreamConfig(**{key: value}) for n, value in enumerate(values)}  # type: ignore[arg-type]

    rows = [100, 50, 30]
    assert stream_weights(streams(proportion=[3, 1, 0]), rows, (1, 1, 1)) == ((3, 1, 0), 150)
    assert stream_weights(streams(choose=[7, None, 0]), rows, (1, 1, 1)) == ((7, 50, 0), 57)
    assert stream_weights(streams(repeat=[0.5, None, 2.0]), rows, (1, 1, 1)) == ((50, 50, 60), 160)
    halves = streams(proportion=[1, 1, 0])  # of tokens, of which the sequences have 400 and 100
    assert stream_weights(halves, rows, (400, 100, 1)) == ((1 / 400, 1 / 100, 0), 150)
    with pytest.raises(UserError, match="no stream has a part"):
        stream_weights(streams(repeat=[0, 0, 0]), rows, (1, 1, 1))
