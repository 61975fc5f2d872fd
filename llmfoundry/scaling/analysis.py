"""Analysis of a scaling experiment: laws, frontier, trends, gains and predictions, as JSON.

`cli/commands/scaling.py` writes the result as scaling.json, and `loggers/pages/scaling_page.py`
plots it. Every number derived from a law has an interval that contains 80 % of the bootstrapped
laws, and every prediction reports its distance from the fitted runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llmfoundry.errors import UserError
from llmfoundry.scaling.law import (
    LEAST_POINTS,
    Array,
    Law,
    TokenCost,
    bootstrap,
    determines_law,
    fit_law,
)
from llmfoundry.scaling.points import Point, by_family, cells, fitted

INTERVAL = 0.8
FAR = 100.0
"""Maximum budget of a prediction without `extrapolate`, in units of the largest fitted compute."""


@dataclass(frozen=True)
class FamilyFit:
    """Fitted law of one family of models.

    Attributes:
        family: name of the family.
        points: fitted runs.
        law: best fit.
        laws: fits of the bootstrap.
        cost: FLOPs per token as a function of the size.
    """

    family: str
    points: list[Point]
    law: Law
    laws: list[Law]
    cost: TokenCost

    @cached_property
    def most_flops(self) -> float:
        """FLOPs of the largest fitted run."""
        return max(point.flops for point in self.points)

    def interval(self, number: Callable[[Law], float]) -> list[float] | None:
        """Return the interval of a number derived from the law; None: not determined."""
        return interval([number(law) for law in self.laws], number(self.law))

    def predict(self, flops: float) -> dict[str, Any]:
        """Return the best size and tokens for a budget, their loss, and intervals."""
        if not self.law.has_optimum:
            return {"flops": flops, "undetermined": "the loss depends on size or tokens alone"}
        numbers: dict[str, Callable[[Law], float]] = {
            "parameters": lambda law: law.best(flops, self.cost)[0],
            "tokens": lambda law: law.best(flops, self.cost)[1],
            "loss": lambda law: law.best(flops, self.cost)[2],
        }
        return {
            "flops": flops,
            "times_largest": flops / self.most_flops,
            **{name: number(self.law) for name, number in numbers.items()},
            "intervals": {name: self.interval(number) for name, number in numbers.items()},
        }

    def held_out(self, point: Point) -> dict[str, Any]:
        """Return the predicted loss of a held-out run."""
        loss: Callable[[Law], float] = lambda law: float(law.loss(point.parameters, point.tokens))  # noqa: E731
        return {
            "name": point.name,
            "predicted": loss(self.law),
            "interval": self.interval(loss),
            "times_largest": point.flops / self.most_flops,
            "fitted": sorted(one.name for one in self.points),
        }

    def as_json(self) -> dict[str, Any]:
        """Return constants, residuals, and the frontier up to ten times the fitted compute."""
        law, least = self.law, min(point.flops for point in self.points)
        budgets = np.geomspace(least, 10 * self.most_flops, 41 * law.has_optimum)
        residuals = {
            point.name: point.loss / float(law.loss(point.parameters, point.tokens)) - 1
            for point in self.points
        }
        measured = _columns(self.points, "parameters", "tokens", "loss")

        # numbers with intervals: the constants of the law, and the exponent of the best size
        names: dict[str, Callable[[Law], float]] = {
            name: lambda law, name=name: float(getattr(law, name))  # type: ignore[misc]
            for name in asdict(law)
        }
        names["size_exponent"] = lambda law: law.size_exponent(self.cost)
        return {
            "law": asdict(law),
            "size_exponent": law.size_exponent(self.cost),
            "intervals": {name: self.interval(number) for name, number in names.items()},
            "at_edge": law.at_edge,
            "uncertain": law.uncertain(*measured),
            "flops_per_token": asdict(self.cost),
            "rms_residual": math.sqrt(
                sum(value**2 for value in residuals.values()) / len(residuals)),
            "residuals": residuals,
            "frontier": [
                dict(zip(("flops", "parameters", "tokens", "loss"), (c, *law.best(c, self.cost)),
                         strict=True)) for c in map(float, budgets)
            ],
        }  # fmt: skip


def interval(values: Sequence[float], estimate: float) -> list[float] | None:
    """Return the central interval that contains INTERVAL of the values, extended to the estimate.

    Returns:
        Both ends; None: the estimate, or more than half of the values, are not finite.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    if 2 * len(finite) < len(values) or not len(finite) or not math.isfinite(estimate):
        return None
    low, high = np.quantile(finite, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return [min(float(low), estimate), max(float(high), estimate)]


def fit_families(points: Sequence[Point], rounds: int, *, key: str = "sizes") -> list[FamilyFit]:
    """Fit a law to each family.

    Args:
        points: all runs.
        rounds: number of bootstrap samples.
        key: the recipe's key of the runs, for error messages.

    Raises:
        UserError: the runs of a family do not determine a law.
    """
    fits, fitted_runs = [], by_family(fitted(points))
    for family in by_family(points):
        runs = fitted_runs.get(family, [])
        n, d, loss, flops = _columns(runs, "parameters", "tokens", "loss", "flops")
        of = f" of {family}" if family else ""
        refuse_few([*zip(n, d, strict=True)], f"{key}: the runs{of} with a finite loss")
        laws = bootstrap(n, d, loss, rounds=rounds)
        fits.append(
            FamilyFit(family, runs, fit_law(n, d, loss), laws, TokenCost.counted(n, flops / d))
        )
    return fits


def refuse_few(places: Sequence[tuple[float, float]], what: str) -> None:
    """Reject runs that do not determine all constants of the law.

    Args:
        places: (size, tokens) of each run.
        what: beginning of the error message.

    Raises:
        UserError: other constants would give the same losses.
    """
    n, d = np.array([*places], dtype=float).reshape(-1, 2).T
    if len(places) and determines_law(n, d):
        return
    counts = f"{_counted({*n}, 'size')}, {_counted({*d}, 'number')} of tokens"
    raise UserError(
        f"{what} have {counts} and {_counted({*places}, 'pair')} of these, which do not"
        f" determine the law's {LEAST_POINTS} constants; write three sizes and three numbers of"
        " tokens or more, each clearly apart from the next, with every size at more than one"
        " number of tokens"
    )


def _counted(values: Collection[Any], name: str) -> str:
    return f"{len(values)} {name}{'s' * (len(values) != 1)}"


def _columns(points: Sequence[Point], *names: str) -> list[Array]:
    return [np.array([getattr(point, name) for point in points], dtype=float) for name in names]


def gains(fits: Sequence[FamilyFit]) -> list[dict[str, Any]]:
    """Return how much less compute other families need than the first family for the same loss.

    The families are compared on their frontiers at the largest compute of both fits. A gain of 2
    means half of the compute. Intervals are over pairs of bootstrapped laws.
    """
    results, first = [], fits[0]
    for other in fits[1:]:
        flops = min(first.most_flops, other.most_flops)

        def gain(
            first_law: Law, other_law: Law, other: FamilyFit = other, flops: float = flops
        ) -> float:
            loss = first_law.best(flops, first.cost)[2]
            is_known = math.isfinite(loss) and other_law.has_optimum
            return flops / other_law.flops_for(loss, other.cost) if is_known else math.nan

        values = {"flops": flops, "loss": first.law.best(flops, first.cost)[2]}
        values |= {"gain": gain(first.law, other.law)}
        pairs = zip(first.laws, other.laws, strict=True)
        ends = interval(
            [gain(first_law, other_law) for first_law, other_law in pairs], values["gain"]
        )
        if math.isfinite(values["gain"]):
            names = {"family": other.family, "over": first.family}
            results.append({**names, **values, "interval": ends})
    return results


def trends(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the best learning rate and batch size by size and tokens, and their exponents.

    The best value is the minimum of a parabola of the loss over the logarithm of at least three
    values, at the best value of the other setting. If the smallest loss is at an end of the range,
    the best value may be outside. `at_end` marks this, and the exponent ignores the value.
    """
    results = []
    for key, other in (("lr", "batch_tokens"), ("batch_tokens", "lr")):
        for family, runs in by_family(points).items():
            # best value of the setting for each size and number of tokens
            best = []
            for cell in cells(run for run in runs if math.isfinite(run.loss)).values():
                lowest = min(cell, key=lambda run: run.loss)
                alike = [run for run in cell if getattr(run, other) == getattr(lowest, other)]
                if len({getattr(run, key) for run in alike}) >= 3:
                    best.append(_lowest(alike, key))

            # power law of the best value over compute
            inside = [one for one in best if not one["at_end"]]
            trend: dict[str, Any] = {"key": key, "family": family, "best": best}
            if len({round(math.log(one["flops"]), 2) for one in inside}) >= 2:
                c, v = (np.log([one[name] for one in inside]) for name in ("flops", "best"))
                trend["exponent"] = float(np.polyfit(c, v, 1)[0])
            results += [trend] * bool(best)
    return results


def _lowest(cell: Sequence[Point], key: str) -> dict[str, Any]:
    """Return the best value of a setting by a parabola of the loss over its logarithm."""
    x, loss, flops = _columns(cell, key, "loss", "flops")
    x = np.log(x)
    curve, slope, _ = np.polyfit(x - x.mean(), loss, 2)
    at_end = curve <= 0 or not x.min() < x.mean() - slope / (2 * curve) < x.max()
    minimum = x[np.argmin(loss)] if at_end else x.mean() - slope / (2 * curve)
    best = {"flops": float(flops.mean()), "best": float(np.exp(minimum)), "at_end": bool(at_end)}
    return {
        **best,
        "losses": {f"{math.exp(a):.4g}": float(b) for a, b in zip(x, loss, strict=True)},
    }


def refuse_far(fit: FamilyFit, flops: float, *, allowed: bool) -> None:
    """Reject a budget that is too far from the fitted runs.

    Raises:
        UserError: the budget is more than FAR times the largest run, and `allowed` is false.
    """
    far = flops / fit.most_flops
    if far > FAR and not allowed:
        raise UserError(
            f"budget: {flops:.3g} FLOPs are {far:,.0f} times the largest run that was fitted; add"
            f" larger runs, write {FAR:.0f} times or less, or extrapolate=true for a guess"
        )


def summary(
    points: Sequence[Point], fits: Sequence[FamilyFit], tests: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the complete analysis.

    Args:
        points: all runs.
        fits: law of each family.
        tests: predictions of held-out runs by family, made before these runs.
    """
    families = {fit.family: fit.as_json() for fit in fits}
    for fit in fits:
        for point in points:
            if point.held_out and point.family == fit.family and math.isfinite(point.loss):
                test = dict(tests.get(fit.family) or {**fit.held_out(point), "before": False})
                test |= {"measured": point.loss, "error": test["predicted"] / point.loss - 1}
                families[fit.family].setdefault("held_out", []).append(test)
    return {
        "interval": INTERVAL,
        "points": [asdict(point) for point in points],
        "families": families,
        "gains": gains(fits),
        "trends": trends(points),
    }
