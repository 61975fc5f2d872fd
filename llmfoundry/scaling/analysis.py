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
        # the frontier: best size, tokens and loss for 41 budgets, if there is an optimum
        law, least = self.law, min(point.flops for point in self.points)
        n_budgets = 41 if law.has_optimum else 0
        frontier = []
        for flops in map(float, np.geomspace(least, 10 * self.most_flops, n_budgets)):
            parameters, tokens, loss = law.best(flops, self.cost)
            frontier.append(
                {"flops": flops, "parameters": parameters, "tokens": tokens, "loss": loss}
            )

        # relative errors of the fit
        residuals = {
            point.name: point.loss / float(law.loss(point.parameters, point.tokens)) - 1
            for point in self.points
        }
        squares = [residual**2 for residual in residuals.values()]
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
            "rms_residual": math.sqrt(sum(squares) / len(squares)),
            "residuals": residuals,
            "frontier": frontier,
        }


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
        subject = f"{key}: the runs of {family}" if family else f"{key}: the runs"
        refuse_few([*zip(n, d, strict=True)], f"{subject} with a finite loss")
        laws = bootstrap(n, d, loss, rounds=rounds)
        cost = TokenCost.counted(n, flops / d)
        fits.append(FamilyFit(family, runs, fit_law(n, d, loss), laws, cost))
    return fits


def refuse_few(sizes_tokens: Sequence[tuple[float, float]], what: str) -> None:
    """Reject runs that do not determine all constants of the law.

    Args:
        sizes_tokens: (size, tokens) of each run.
        what: beginning of the error message.

    Raises:
        UserError: other constants would give the same losses.
    """
    n, d = np.array([*sizes_tokens], dtype=float).reshape(-1, 2).T
    if len(sizes_tokens) and determines_law(n, d):
        return
    counts = f"{_counted({*n}, 'size')}, {_counted({*d}, 'number')} of tokens"
    raise UserError(
        f"{what} have {counts} and {_counted({*sizes_tokens}, 'pair')} of these, which do not"
        f" determine the law's {LEAST_POINTS} constants; write three sizes and three numbers of"
        " tokens or more, each clearly apart from the next, with every size at more than one"
        " number of tokens"
    )


def _counted(values: Collection[Any], noun: str) -> str:
    """Return the number of values with a noun, such as `1 size` or `3 sizes`."""
    return f"1 {noun}" if len(values) == 1 else f"{len(values)} {noun}s"


def _columns(points: Sequence[Point], *names: str) -> list[Array]:
    """Return an array of each attribute of the points."""
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
            """Return the ratio of compute for the same loss; NaN if it is not determined."""
            _, _, loss = first_law.best(flops, first.cost)
            if not math.isfinite(loss) or not other_law.has_optimum:
                return math.nan
            return flops / other_law.flops_for(loss, other.cost)

        # the gain of the best fits, and its interval over the bootstrapped laws
        best_gain = gain(first.law, other.law)
        pairs = zip(first.laws, other.laws, strict=True)
        bootstrapped_gains = [gain(first_law, other_law) for first_law, other_law in pairs]
        ends = interval(bootstrapped_gains, best_gain)
        if math.isfinite(best_gain):
            _, _, loss = first.law.best(flops, first.cost)
            results.append(
                {
                    "family": other.family,
                    "over": first.family,
                    "flops": flops,
                    "loss": loss,
                    "gain": best_gain,
                    "interval": ends,
                }
            )
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
                best_run = min(cell, key=lambda run: run.loss)
                same_other = [r for r in cell if getattr(r, other) == getattr(best_run, other)]
                if len({getattr(run, key) for run in same_other}) >= 3:
                    best.append(_lowest(same_other, key))
            if not best:
                continue

            # power law of the best value over compute, if there are two different budgets
            inside = [value for value in best if not value["at_end"]]
            trend: dict[str, Any] = {"key": key, "family": family, "best": best}
            if len({round(math.log(value["flops"]), 2) for value in inside}) >= 2:
                log_flops = np.log([value["flops"] for value in inside])
                log_best = np.log([value["best"] for value in inside])
                slope, _ = np.polyfit(log_flops, log_best, 1)
                trend["exponent"] = float(slope)
            results.append(trend)
    return results


def _lowest(cell: Sequence[Point], key: str) -> dict[str, Any]:
    """Return the best value of a setting by a parabola of the loss over its logarithm."""
    values, loss, flops = _columns(cell, key, "loss", "flops")
    x = np.log(values)
    curvature, slope, _ = np.polyfit(x - x.mean(), loss, 2)

    # the vertex; or the best run, if the parabola has no minimum within the range
    at_end = curvature <= 0 or not x.min() < x.mean() - slope / (2 * curvature) < x.max()
    minimum = x[np.argmin(loss)] if at_end else x.mean() - slope / (2 * curvature)
    return {
        "flops": float(flops.mean()),
        "best": float(np.exp(minimum)),
        "at_end": bool(at_end),
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
