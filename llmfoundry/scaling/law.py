"""The parametric law of the loss, L(N, D) = E + A / N^alpha + B / D^beta, fitted to runs.

Hoffmann et al., 2022 (arXiv 2203.15556), approach 3, with their objective: Huber's loss of the
residuals of log L, delta 1e-3. The one idea is variable projection (Golub and Pereyra, 1973): with
both exponents given the other three coefficients are a linear problem, so that a search over two
numbers finds where Hoffmann's search over five may stop early (Besiroglu et al., 2024, arXiv
2404.10102). `analysis.py` calls it; numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DELTA = 1e-3
"""Residual of log L from which on Huber's loss grows linearly (Hoffmann et al., 2022, D.2)."""
LEAST_EXPONENT, MOST_EXPONENT = 0.02, 2.0
# Cells of the first search; searches around its best; cells there.
_START, _ZOOMS, _REACH = 32, 6, 4
_STEPS = 200  # of the refinement at most
_NEGLIGIBLE = 1e-9  # share of the loss below which a term, in the middle of the runs, is rounding
_SUBSETS = [[0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]]  # of E, A, B: which are not zero
LEAST_POINTS = 5  # as many as there are constants
_USUAL = 0.34, 0.28  # exponents at which a grid is judged before there is a law (Hoffmann et al.)
_VISIBLE = 1e-4  # share of the loss below which runs do not tell two laws apart
_OTHERWISE = 1.5  # factor of an exponent that is tried beside the fitted one


@dataclass(frozen=True)
class Law:
    """Constants of a law; the loss is in nats a token, as what it was fitted to.

    Attributes:
        e: the loss of infinite size and data.
        a: of size.
        b: of data.
        alpha: exponent of size.
        beta: exponent of data.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, n: float | Array, d: float | Array) -> Array:
        """Of `n` parameters after `d` tokens."""
        size, data = np.asarray(n, dtype=float), np.asarray(d, dtype=float)
        return np.asarray(self.e + self.a * size**-self.alpha + self.b * data**-self.beta)

    def best_size(self, flops: float | Array, cost: TokenCost) -> Array:
        """Parameters with which `flops` give the least loss.

        With D = C / (k N^g) the derivative over N is zero at N^(alpha + g beta) = alpha A / (g
        beta B) (C / k)^beta (Hoffmann et al., 2022, equation 4, has k = 6 and g = 1).
        """
        power = self.alpha + cost.growth * self.beta
        ratio = self.alpha * self.a / (cost.growth * self.beta * self.b)
        spent = np.asarray(flops, dtype=float) / cost.factor
        return np.asarray((ratio * spent**self.beta) ** (1 / power))

    def flops_for(self, loss: float, cost: TokenCost) -> float:
        """Compute with which the best size reaches a loss; infinite where none does."""
        low, high = 0.0, 80.0  # of log10
        if loss <= self.e:
            return float("inf")
        for _ in range(100):
            middle = (low + high) / 2
            is_worse = self.best(10**middle, cost)[2] > loss
            low, high = (middle, high) if is_worse else (low, middle)
        return float(10**high)

    @property
    def has_optimum(self) -> bool:
        """Whether both size and data matter, so that one is traded for the other."""
        return self.a > 0 and self.b > 0

    def best(self, flops: float, cost: TokenCost) -> tuple[float, float, float]:
        """Size, tokens and loss of a budget; NaN where there is no optimum."""
        if not self.has_optimum:
            return math.nan, math.nan, math.nan
        n = float(self.best_size(flops, cost))
        d = float(cost.tokens(flops, n))
        return n, d, float(self.loss(n, d))

    def size_exponent(self, cost: TokenCost) -> float:
        """The power of compute with which the best size grows; NaN where there is none."""
        return self.beta / (self.alpha + cost.growth * self.beta) if self.has_optimum else math.nan

    def uncertain(self, n: Array, d: Array, loss: Array) -> dict[str, float]:
        """Exponents, each with another value with which the law fits the runs as well.

        Of each exponent 1.5 times and 1/1.5 of it are tried, with all other constants fitted to
        it. As well is within the runs' own scatter (an F ratio of 1), or 1e-4 of the loss.
        """
        x, y = (np.log(values) - np.mean(np.log(values)) for values in (n, d))
        free = np.log([LEAST_EXPONENT, MOST_EXPONENT])
        least = _squares(x, y, loss, [free, free])
        limit = least + max(len(n) * _VISIBLE**2, least / max(1, len(n) - LEAST_POINTS))
        found = dict[str, float]()
        for place, key in enumerate(("alpha", "beta")):
            for factor in (_OTHERWISE, 1 / _OTHERWISE):
                value = getattr(self, key) * factor
                ranges = [free, free]
                ranges[place] = np.log([value, value])
                if _squares(x, y, loss, ranges) <= limit:
                    found.setdefault(key, value)
        return found

    @property
    def at_edge(self) -> list[str]:
        """Exponents at an end of the search: the runs do not determine them."""
        low, high = 1.001 * LEAST_EXPONENT, MOST_EXPONENT / 1.001
        used = {"alpha": self.a, "beta": self.b}
        return [key for key, of in used.items() if of > 0 and not low < getattr(self, key) < high]


@dataclass(frozen=True)
class TokenCost:
    """FLOPs of a token as a function of size, factor N^growth: of large models 6 N.

    Small ones spend more on the head and on attention, which `counted` takes from the points.
    """

    factor: float = 6.0
    growth: float = 1.0

    def tokens(self, flops: float | Array, n: float | Array) -> Array:
        """Tokens that `flops` train a model of `n` parameters on."""
        return np.asarray(np.asarray(flops, float) / (self.factor * np.asarray(n) ** self.growth))

    @classmethod
    def counted(cls, n: Array, flops_per_token: Array) -> TokenCost:
        """The line through the logarithms of points; of one size alone proportional to it."""
        if np.ptp(np.log(n)) < 1e-9:
            return cls(float(np.mean(flops_per_token / n)))
        growth, factor = np.polyfit(np.log(n), np.log(flops_per_token), 1)
        return cls(float(np.exp(factor)), float(growth))


def fit_law(n: Array, d: Array, loss: Array) -> Law:
    """The law with the least of Huber's loss on log L, where `search` starts."""
    centers = float(np.mean(np.log(n))), float(np.mean(np.log(d)))
    x, y = np.log(n) - centers[0], np.log(d) - centers[1]
    coefficients, exponents = _search(x, y, loss)
    coefficients, exponents = _refine(x, y, loss, coefficients, exponents)
    coefficients[coefficients < _NEGLIGIBLE * loss.mean()] = 0.0
    e, a, b = (float(one) for one in coefficients)
    alpha, beta = (float(one) for one in exponents)
    return Law(e, a * np.exp(alpha * centers[0]), b * np.exp(beta * centers[1]), alpha, beta)


def determines_law(n: Array, d: Array) -> bool:
    """Whether runs of these sizes and tokens, with exact losses, have one law alone.

    The derivatives of the loss by the five constants must be of full rank over the runs. Two sizes,
    or two numbers of tokens, never are, however many runs there are; nor are tokens in one
    proportion to the size.
    """
    x, y = np.log(n) - np.mean(np.log(n)), np.log(d) - np.mean(np.log(d))
    size, data = np.exp(-_USUAL[0] * x), np.exp(-_USUAL[1] * y)
    derivatives = np.stack([np.ones_like(x), size, data, x * size, y * data], axis=1)
    scaled = derivatives / np.maximum(np.linalg.norm(derivatives, axis=0), 1e-300)
    singular = np.linalg.svd(scaled, compute_uv=False)
    return len(singular) == LEAST_POINTS and bool(singular[-1] > _VISIBLE * singular[0])


def _squares(x: Array, y: Array, loss: Array, ranges: Sequence[Array]) -> float:
    """The least squared relative error with exponents within ranges of their logarithms."""
    coefficients, (alpha, beta) = _search(x, y, loss, ranges)
    terms = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
    return float(((terms @ coefficients / loss - 1) ** 2).sum())


def _search(
    x: Array, y: Array, loss: Array, ranges: Sequence[Array] | None = None
) -> tuple[Array, Array]:
    """The least squared relative error over both exponents, then closer and closer around it.

    Args:
        x: logarithms of the sizes.
        y: logarithms of the tokens.
        loss: of the runs.
        ranges: ends of the logarithm of each exponent; None: all that are searched.
    """
    ends = ranges or [np.log([LEAST_EXPONENT, MOST_EXPONENT])] * 2
    axes = [np.linspace(low, high, _START if high > low else 1) for low, high in ends]
    for _ in range(_ZOOMS + 1):
        pairs = np.exp(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2))
        found, errors = _project(x, y, loss, pairs)
        best = int(np.argmin(errors))
        for place, center in enumerate(np.log(pairs[best])):
            if len(axes[place]) > 1:
                step = axes[place][1] - axes[place][0]
                around = np.linspace(center - step, center + step, 2 * _REACH + 1)
                axes[place] = np.clip(around, *ends[place])
    return found[best], pairs[best]


def _project(x: Array, y: Array, loss: Array, pairs: Array) -> tuple[Array, Array]:
    """For each pair of exponents E, A and B >= 0 with the least squares, and these.

    Three coefficients have seven sets of which the others are zero; the best solution among those
    without a negative one is the non-negative least squares' (Lawson and Hanson, 1974).
    """
    terms = [np.ones((len(pairs), len(x))), np.exp(-pairs[:, :1] * x), np.exp(-pairs[:, 1:] * y)]
    columns = np.stack(terms, axis=-1)
    columns /= loss[:, None]  # the error is relative: nearly that of log L
    best = np.zeros((len(pairs), 3))
    least = np.full(len(pairs), float(len(x)))  # of nothing: each point is wrong by all of it
    for subset in _SUBSETS:
        part = columns[..., subset]
        q, r = np.linalg.qr(part)
        r = r + 1e-13 * np.eye(len(subset))  # columns may be the same: all of one size
        solved = np.linalg.solve(r, q.sum(axis=1)[..., None])[..., 0]
        errors = ((np.einsum("pij,pj->pi", part, solved) - 1) ** 2).sum(axis=1)
        better = (solved >= 0).all(axis=1) & (errors < least)
        least[better] = errors[better]
        best[better] = 0.0
        best[np.ix_(better, subset)] = solved[better]
    return best, least


def _refine(
    x: Array, y: Array, loss: Array, coefficients: Array, exponents: Array
) -> tuple[Array, Array]:
    """Levenberg and Marquardt's steps on the logarithms of all that is not zero.

    Huber's loss is least squares with weights min(1, delta / |r|), renewed at each step (Holland
    and Welsch, 1977).
    """
    used = np.flatnonzero(coefficients)
    theta = np.log(np.concatenate([np.maximum(coefficients[used], 1e-300), exponents]))

    def evaluate(theta: Array) -> tuple[Array, Array]:
        full = np.zeros(3)
        full[used] = np.exp(theta[:-2])
        alpha, beta = np.exp(theta[-2:])
        terms = full * np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1)
        total = terms.sum(axis=1)
        slopes = np.stack([-alpha * x * terms[:, 1], -beta * y * terms[:, 2]], axis=1)
        jacobian = np.concatenate([terms[:, used], slopes], axis=1) / total[:, None]
        return np.log(total) - np.log(loss), jacobian

    damping, (residuals, jacobian) = 1e-3, evaluate(theta)
    for _ in range(_STEPS):
        weights = np.minimum(1.0, DELTA / np.maximum(np.abs(residuals), 1e-300))
        gradient = jacobian.T @ (weights * residuals)
        curvature = jacobian.T @ (weights[:, None] * jacobian)
        scale = np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.linalg.solve(curvature + damping * scale, gradient)
        tried = theta - np.clip(step, -1, 1)
        tried[-2:] = np.clip(tried[-2:], np.log(LEAST_EXPONENT), np.log(MOST_EXPONENT))
        after = evaluate(tried)
        gain = huber(residuals) - huber(after[0])
        if gain >= 0:
            theta, (residuals, jacobian), damping = tried, after, max(damping / 3, 1e-12)
        else:
            damping *= 4
        if damping > 1e12 or (0 <= gain <= 1e-13 * huber(residuals)):
            break
    full = np.zeros(3)
    full[used] = np.exp(theta[:-2])
    return full, np.exp(theta[-2:])


def huber(residuals: Array) -> float:
    """Huber's loss of residuals of log L, summed."""
    size = np.abs(residuals)
    return float(np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum())


def bootstrap(n: Array, d: Array, loss: Array, *, rounds: int, seed: int = 17) -> list[Law]:
    """Laws of as many runs drawn with replacement, whose spread is that of the fit.

    Of 3 x 3 to 6 x 5 made-up runs with noise of 0.3 % its 80 % interval of the loss at twice the
    largest size and tokens held the true loss in 82 to 87 % of trials; flipping the residuals'
    signs did in 63 to 70 %.
    """
    random = np.random.default_rng(seed)
    laws: list[Law] = []
    while len(laws) < rounds:
        drawn = random.integers(0, len(n), len(n))
        if len({*n[drawn]}) > 1 and len({*d[drawn]}) > 1:
            laws.append(fit_law(n[drawn], d[drawn], loss[drawn]))
    return laws
