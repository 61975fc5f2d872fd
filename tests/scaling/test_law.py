"""The law of the loss: exact points give its constants back, published ones those of others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmfoundry.scaling.law import (
    Law,
    TokenCost,
    _project,
    bootstrap,
    determines_law,
    fit_law,
    huber,
)

CHINCHILLA = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # as published, Hoffmann et al., 2022
COST = TokenCost()


def isoflop(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Five sizes around the best one at each of six budgets."""
    pairs = itertools.product(np.geomspace(1e18, 1e22, 6), np.geomspace(0.25, 4, 5))
    budgets, ratios = np.array([*pairs]).T
    n = CHINCHILLA.best_size(budgets, COST) * ratios
    d = COST.tokens(budgets, n)
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return n, d, CHINCHILLA.loss(n, d) * factor


def test_exact_points_give_the_constants_back() -> None:
    found = fit_law(*isoflop(0.0))
    for name in ("e", "a", "b", "alpha", "beta"):
        assert getattr(found, name) == pytest.approx(getattr(CHINCHILLA, name), rel=1e-6), name


def test_noisy_points_give_intervals_that_hold_the_constants() -> None:
    laws = bootstrap(*isoflop(0.003), rounds=60)
    for name in ("e", "alpha", "beta"):
        low, high = np.quantile([getattr(law, name) for law in laws], [0.1, 0.9])
        assert low < getattr(CHINCHILLA, name) < high
        assert high - low < 0.2 * getattr(CHINCHILLA, name)


def pairs(sizes: list[float], tokens: list[float]) -> list[tuple[float, float]]:
    return [*itertools.product(sizes, tokens)]


SIZES, TOKENS = [1e8, 2e8, 4e8], [1e9, 2e9, 4e9]


@pytest.mark.parametrize(
    ("runs", "is_enough"),
    [
        (pairs(SIZES, TOKENS), True),
        ([(n, 1e9) for n in SIZES] + [(1e8, d) for d in TOKENS[1:]], True),  # both axes alone
        ([(n, c / n) for n in SIZES for c in (4e17, 8e17)], True),  # isoFLOP
        (pairs(SIZES[:2], [1e9, 2e9, 4e9, 8e9]), False),
        (pairs([1e8, 2e8, 4e8, 8e8], TOKENS[:2]), False),
        ([(n, 20 * n) for n in np.geomspace(1e8, 1e10, 9)], False),  # one proportion
        ([*pairs(SIZES[:2], TOKENS[:2]), (4e8, 4e9)], False),  # each third value only there
        (pairs([1e8, 1.0001e8, 4e8], TOKENS), False),  # a size twice, but for rounding
        ([(n, d) for n, d in zip(SIZES, TOKENS, strict=True)], False),
    ],
)
def test_runs_determine_a_law_by_rank_and_not_by_count(
    runs: list[tuple[float, float]], is_enough: bool
) -> None:
    """Beside scipy: with another exponent held, the others give refused runs the same losses."""
    n, d = np.array(runs).T
    assert determines_law(n, d) is is_enough
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is no dependency")
    loss = np.log(CHINCHILLA.loss(n, d))
    errors = []
    for held, value in ((3, 0.26), (4, 0.21)):

        def residuals(theta: np.ndarray, held: int = held, value: float = value) -> np.ndarray:
            e, a, b, alpha, beta = np.insert(theta, held, value)
            return np.log(np.abs(e + a * (n / 1e8) ** -alpha + b * (d / 1e9) ** -beta)) - loss

        start = np.delete([1.69, 0.78, 1.25, 0.34, 0.28], held)
        found = optimize.least_squares(residuals, start, xtol=1e-15, ftol=1e-15, gtol=1e-15)
        errors.append(np.abs(found.fun).max())
    assert bool(min(errors) > 3e-5) is is_enough


def test_one_wrong_run_hardly_moves_the_law() -> None:
    n, d, loss = isoflop(0.0)
    loss[7] *= 1.5  # Huber's loss sees it linearly; least squares would follow it
    found = fit_law(n, d, loss)
    assert found.alpha == pytest.approx(0.34, rel=0.01)
    assert huber(np.log(found.loss(n, d)) - np.log(loss)) < 1e-3 * np.log(1.5) * 1.05


def test_projection_is_the_non_negative_least_squares_of_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is no dependency")
    random = np.random.default_rng(1)
    x, y, loss = random.normal(size=12), random.normal(size=12), random.uniform(1, 3, 12)
    pairs = np.array([*itertools.product([0.1, 0.5, 1.5], [0.2, 0.9])])
    found, errors = _project(x, y, loss, pairs)
    for pair, mine, error in zip(pairs, found, errors, strict=True):
        columns = np.stack([np.ones(12), np.exp(-pair[0] * x), np.exp(-pair[1] * y)], axis=1)
        theirs, norm = optimize.nnls(columns / loss[:, None], np.ones(12))
        assert mine == pytest.approx(theirs, abs=1e-9)
        assert error == pytest.approx(norm**2, rel=1e-9)


def test_best_size_is_the_lowest_place_of_the_isoflop_curve() -> None:
    for cost in (COST, TokenCost(30.0, 0.9)):
        sizes = np.geomspace(1e7, 1e12, 200_001)
        lowest = sizes[np.argmin(CHINCHILLA.loss(sizes, cost.tokens(1e21, sizes)))]
        assert float(CHINCHILLA.best_size(1e21, cost)) == pytest.approx(lowest, rel=1e-4)


def test_compute_for_a_loss_is_the_inverse_of_the_frontier() -> None:
    n = CHINCHILLA.best_size(3e20, COST)
    loss = float(CHINCHILLA.loss(n, COST.tokens(3e20, n)))
    assert CHINCHILLA.flops_for(loss, COST) == pytest.approx(3e20, rel=1e-6)
    assert CHINCHILLA.flops_for(1.69, COST) == float("inf")


def test_counted_cost_is_the_power_through_the_points() -> None:
    n = np.array([1e6, 4e6, 9e6])
    found = TokenCost.counted(n, 9.0 * n**0.95)
    assert (found.factor, found.growth) == pytest.approx((9.0, 0.95))
    assert TokenCost.counted(np.full(3, 1e6), np.full(3, 7e6)) == TokenCost(7.0)
