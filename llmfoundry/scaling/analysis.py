"""What the runs of a scaling experiment say: laws, frontier, trends, gains, predictions, as JSON.

`commands/scaling.py` writes it as scaling.json, `loggers/pages/scaling.py` draws it. Every number
that the law gives has an interval, 80 % of the bootstrapped laws, and every prediction says how far
from the fitted runs it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmfoundry.errors import UserError
from llmfoundry.scaling.law import LEAST_POINTS, Array, Cost, Law, bootstrap, fit_law
from llmfoundry.scaling.points import Point, by_family, fitted, swept

INTERVAL = 0.8
FAR = 100.0
"""Times the largest fitted compute beyond which nothing is predicted unasked."""


@dataclass(frozen=True)
class FamilyFit:
    """The law of a kind of model.

    Attributes:
        family: its name.
        points: that were fitted.
        law: the best one.
        laws: of the bootstrap.
        cost: FLOPs of a token by size.
    """

    family: str
    points: list[Point]
    law: Law
    laws: list[Law]
    cost: Cost

    @cached_property
    def most_flops(self) -> float:
        """Of the largest run."""
        return max(point.flops for point in self.points)

    def interval(self, number: Callable[[Law], float]) -> list[float] | None:
        """Both ends for a number of the law; None where fewer than half of the laws have one."""
        values = np.array([number(law) for law in self.laws])
        values = values[np.isfinite(values)]
        if 2 * len(values) < len(self.laws):
            return None
        return [float(end) for end in np.quantile(values, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])]

    def residuals(self) -> list[float]:
        """Of each point, measured over fitted loss, minus 1."""
        return [point.loss / float(self.law.loss(point.parameters, point.tokens)) - 1
                for point in self.points]  # fmt: skip

    def predict(self, flops: float) -> dict[str, Any]:
        """The best size and tokens for a budget, and the loss; of half that size too."""
        if not self.law.has_optimum:
            return {"flops": flops, "undetermined": "the loss depends on size or tokens alone"}
        numbers: dict[str, Callable[[Law], float]] = {
            "parameters": lambda law: _size(law, flops, self.cost),
            "tokens": lambda law: float(self.cost.tokens(flops, _size(law, flops, self.cost))),
            "tokens_per_parameter": lambda law: (
                float(self.cost.tokens(flops, n := _size(law, flops, self.cost))) / n
            ),
            "loss": lambda law: _least(law, flops, self.cost),
        }
        found: dict[str, Any] = {"flops": flops, "times_largest": flops / self.most_flops}
        found |= {name: number(self.law) for name, number in numbers.items()}
        half = found["parameters"] / 2
        found["loss_at_half_size"] = float(self.law.loss(half, self.cost.tokens(flops, half)))
        found["intervals"] = {name: self.interval(number) for name, number in numbers.items()}
        return found

    def held_out(self, point: Point) -> dict[str, Any]:
        """What the law says of a point's loss, without looking at it."""
        predicted = float(self.law.loss(point.parameters, point.tokens))
        ends = self.interval(lambda law: float(law.loss(point.parameters, point.tokens)))
        return {
            "name": point.name,
            "predicted": predicted,
            "interval": ends,
            "times_largest": point.flops / self.most_flops,
            "fitted": sorted(one.name for one in self.points),
        }

    def as_json(self) -> dict[str, Any]:
        """Constants, and the frontier over the fitted compute and ten times more."""
        law, cost = self.law, self.cost
        least = min(point.flops for point in self.points)
        grid = np.geomspace(least, 10 * self.most_flops, 41) if law.has_optimum else np.array([])
        sizes = law.best_size(grid, cost) if law.has_optimum else grid
        power: Callable[[Law], float] = lambda one: (  # noqa: E731
            one.beta / (one.alpha + cost.growth * one.beta) if one.has_optimum else math.nan
        )
        return {
            "law": asdict(law),
            "intervals": {
                name: self.interval(lambda one, name=name: float(getattr(one, name)))  # type: ignore[misc]
                for name in asdict(law)
            },
            "flops_per_token": asdict(cost),
            "size_exponent": power(law),
            "size_exponent_interval": self.interval(power),
            "rms_residual": float(np.sqrt(np.mean(np.square(self.residuals())))),
            "residuals": dict(zip([p.name for p in self.points], self.residuals(), strict=True)),
            "frontier": [
                {"flops": c, "parameters": n, "tokens": d, "loss": float(law.loss(n, d))}
                for c, n, d in zip(
                    grid.tolist(), sizes.tolist(), cost.tokens(grid, sizes).tolist(), strict=True
                )
            ],
        }


def _size(law: Law, flops: float, cost: Cost) -> float:
    return float(law.best_size(flops, cost)) if law.has_optimum else math.nan


def _least(law: Law, flops: float, cost: Cost) -> float:
    n = _size(law, flops, cost)
    return float(law.loss(n, cost.tokens(flops, n)))


def fit_families(points: Sequence[Point], rounds: int) -> list[FamilyFit]:
    """A law for each family.

    Raises:
        UserError: a family has too few runs, or all of one size or number of tokens.
    """
    fits = []
    used = by_family(fitted(points))
    for family in by_family(points):
        runs = used.get(family, [])
        n, d, loss = _columns(runs, "parameters", "tokens", "loss")
        of = f" of {family}" if family else ""
        if len(runs) < LEAST_POINTS or len({*n}) < 2 or len({*d}) < 2:
            raise UserError(
                f"sizes: the law has {LEAST_POINTS} constants, and {len(runs)} runs{of} with a"
                f" finite loss have {len({*n})} sizes and {len({*d})} numbers of tokens; write"
                f" {LEAST_POINTS} runs or more, of two sizes and two numbers of tokens at least"
            )
        (flops,) = _columns(runs, "flops")
        laws = bootstrap(n, d, loss, rounds=rounds)
        fits.append(FamilyFit(family, runs, fit_law(n, d, loss), laws, Cost.counted(n, flops / d)))
    return fits


def _columns(points: Sequence[Point], *names: str) -> list[Array]:
    return [np.array([getattr(point, name) for point in points], dtype=float) for name in names]


def gains(fits: Sequence[FamilyFit]) -> list[dict[str, Any]]:
    """How much less compute than the first family each other needs for the same loss.

    At the largest compute that both were fitted to, on their frontiers: 2 is half of it. The
    interval is over pairs of bootstrapped laws.
    """
    found = []
    for other in fits[1:]:
        first = fits[0]
        flops = min(first.most_flops, other.most_flops)
        if not (first.law.has_optimum and other.law.has_optimum):
            continue
        pairs = [
            flops / b.flops_for(_least(a, flops, first.cost), other.cost)
            for a, b in zip(first.laws, other.laws, strict=True)
            if a.has_optimum and b.has_optimum
        ]
        loss = _least(first.law, flops, first.cost)
        low, high = (1 - INTERVAL) / 2, (1 + INTERVAL) / 2
        found.append(
            {
                "family": other.family,
                "over": first.family,
                "flops": flops,
                "loss": loss,
                "gain": flops / other.law.flops_for(loss, other.cost),
                "interval": [float(end) for end in np.quantile(pairs, [low, high])]
                if pairs
                else None,
            }
        )
    return found


def trends(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The best learning rate and batch at each compute that they were swept at, and their power.

    Each is the lowest place of a parabola through the loss over the logarithm, inside what was
    swept; where the least loss is at an end of it the best may lie outside, which `at_end` marks.
    """
    found = []
    for key in ("lr", "batch_tokens"):
        for family, runs in by_family(points).items():
            best = [_lowest(cell, key) for cell in swept(runs, key)]
            inside = [one for one in best if not one["at_end"]]
            power: dict[str, Any] = {}
            if len({round(math.log(one["flops"]), 2) for one in inside}) >= 2:
                c, v = (np.log([one[name] for one in inside]) for name in ("flops", "best"))
                exponent, factor = np.polyfit(c, v, 1)
                power = {"exponent": float(exponent), "factor": float(np.exp(factor))}
            if best:
                found.append({"key": key, "family": family, "best": best, **power})
    return found


def _lowest(cell: Sequence[Point], key: str) -> dict[str, Any]:
    x, loss, flops = _columns(cell, key, "loss", "flops")
    x = np.log(x)
    curve, slope, _ = np.polyfit(x - x.mean(), loss, 2)
    at_end = curve <= 0 or not x.min() < x.mean() - slope / (2 * curve) < x.max()
    place = x[np.argmin(loss)] if at_end else x.mean() - slope / (2 * curve)
    return {
        "flops": float(flops.mean()),
        "width": cell[0].width,
        "best": float(np.exp(place)),
        "at_end": bool(at_end),
        "losses": {f"{math.exp(a):.4g}": float(b) for a, b in zip(x, loss, strict=True)},
    }


def refuse_far(fits: Sequence[FamilyFit], flops: float, *, allowed: bool) -> None:
    """Refuse a budget that small runs say little of.

    Raises:
        UserError: it is FAR times the largest of a family's runs, and `allowed` is false.
    """
    far = max(flops / fit.most_flops for fit in fits)
    if far > FAR and not allowed:
        raise UserError(
            f"budget: {flops:.3g} FLOPs are {far:,.0f} times the largest run that was fitted; add"
            f" larger runs, write {FAR:.0f} times or less, or extrapolate=true for a guess"
        )


def summary(
    points: Sequence[Point], fits: Sequence[FamilyFit], tests: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """All of it; `tests` are what was predicted of each family's held-out point, beforehand."""
    families: dict[str, Any] = {}
    for fit in fits:
        families[fit.family] = fit.as_json()
        for point in points:
            if point.held_out and point.family == fit.family and math.isfinite(point.loss):
                told = dict(tests.get(fit.family) or {**fit.held_out(point), "before": False})
                error = told["predicted"] / point.loss - 1
                families[fit.family].setdefault("held_out", []).append(
                    {**told, "measured": point.loss, "error": error}
                )
    return {
        "interval": INTERVAL,
        "points": [asdict(point) for point in points],
        "families": families,
        "gains": gains(fits),
        "trends": trends(points),
    }
