"""What the runs of a scaling experiment say: laws, frontier, trends, gains, predictions, as JSON.

`cli/commands/scaling.py` writes it as scaling.json, `loggers/pages/scaling_page.py` draws it. Every
number that the law gives has an interval, 80 % of the bootstrapped laws, and every prediction says
how far from the fitted runs it is.
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
"""Times the largest fitted compute beyond which nothing is predicted unasked."""


@dataclass(frozen=True)
class FamilyFit:
    """The law of a kind of model.

    An interval holds its estimate, which may lie beyond the bootstrapped laws.

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
    cost: TokenCost

    @cached_property
    def most_flops(self) -> float:
        """Of the largest run."""
        return max(point.flops for point in self.points)

    def interval(self, number: Callable[[Law], float]) -> list[float] | None:
        """Both ends for a number of the law; None where fewer than half of the laws have one."""
        return interval([number(law) for law in self.laws], number(self.law))

    def predict(self, flops: float) -> dict[str, Any]:
        """The best size and tokens for a budget, and the loss."""
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
        """What the law says of a point's loss, without looking at it."""
        loss: Callable[[Law], float] = lambda law: float(law.loss(point.parameters, point.tokens))  # noqa: E731
        return {
            "name": point.name,
            "predicted": loss(self.law),
            "interval": self.interval(loss),
            "times_largest": point.flops / self.most_flops,
            "fitted": sorted(one.name for one in self.points),
        }

    def as_json(self) -> dict[str, Any]:
        """Constants, residuals, and the frontier over the fitted compute and ten times more."""
        law, least = self.law, min(point.flops for point in self.points)
        budgets = np.geomspace(least, 10 * self.most_flops, 41 * law.has_optimum)
        fit = {p.name: p.loss / float(law.loss(p.parameters, p.tokens)) - 1 for p in self.points}
        measured = _columns(self.points, "parameters", "tokens", "loss")
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
            "rms_residual": math.sqrt(sum(value**2 for value in fit.values()) / len(fit)),
            "residuals": fit,
            "frontier": [
                dict(zip(("flops", "parameters", "tokens", "loss"), (c, *law.best(c, self.cost)),
                         strict=True)) for c in map(float, budgets)
            ],
        }  # fmt: skip


def interval(values: Sequence[float], estimate: float) -> list[float] | None:
    """Both ends of what INTERVAL of the values lie in, and the estimate too.

    None where fewer than half of the values, or the estimate, are finite.
    """
    kept = np.array([value for value in values if math.isfinite(value)])
    if 2 * len(kept) < len(values) or not len(kept) or not math.isfinite(estimate):
        return None
    low, high = np.quantile(kept, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return [min(float(low), estimate), max(float(high), estimate)]


def fit_families(points: Sequence[Point], rounds: int, *, key: str = "sizes") -> list[FamilyFit]:
    """A law for each family; `key` of the recipe has the runs.

    Raises:
        UserError: a family's runs do not determine a law.
    """
    fits, used = [], by_family(fitted(points))
    for family in by_family(points):
        runs = used.get(family, [])
        n, d, loss, flops = _columns(runs, "parameters", "tokens", "loss", "flops")
        of = f" of {family}" if family else ""
        refuse_few([*zip(n, d, strict=True)], f"{key}: the runs{of} with a finite loss")
        laws = bootstrap(n, d, loss, rounds=rounds)
        fits.append(
            FamilyFit(family, runs, fit_law(n, d, loss), laws, TokenCost.counted(n, flops / d))
        )
    return fits


def refuse_few(places: Sequence[tuple[float, float]], what: str) -> None:
    """Refuse runs, by size and tokens, that leave constants of the law open.

    Raises:
        UserError: other constants would give them the same losses.
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
    """How much less compute than the first family each other needs for the same loss.

    At the largest compute that both were fitted to, on their frontiers: 2 is half of it. The
    interval is over pairs of bootstrapped laws.
    """
    found, first = [], fits[0]
    for other in fits[1:]:
        flops = min(first.most_flops, other.most_flops)

        def gain(mine: Law, theirs: Law, other: FamilyFit = other, flops: float = flops) -> float:
            loss = mine.best(flops, first.cost)[2]
            is_known = math.isfinite(loss) and theirs.has_optimum
            return flops / theirs.flops_for(loss, other.cost) if is_known else math.nan

        pairs = zip(first.laws, other.laws, strict=True)
        values = {"flops": flops, "loss": first.law.best(flops, first.cost)[2]}
        values |= {"gain": gain(first.law, other.law)}
        ends = interval([gain(mine, theirs) for mine, theirs in pairs], values["gain"])
        if math.isfinite(values["gain"]):
            names = {"family": other.family, "over": first.family}
            found.append({**names, **values, "interval": ends})
    return found


def trends(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The best learning rate and batch at each size and tokens, and their power of compute.

    Each is the lowest place of a parabola through the loss over the logarithm of three values or
    more, at the best value of the other; where the least loss is at an end of them the best may lie
    outside, which `at_end` marks, and the power goes without.
    """
    found = []
    for key, other in (("lr", "batch_tokens"), ("batch_tokens", "lr")):
        for family, runs in by_family(points).items():
            best = []
            for cell in cells(run for run in runs if math.isfinite(run.loss)).values():
                first = min(cell, key=lambda run: run.loss)
                alike = [run for run in cell if getattr(run, other) == getattr(first, other)]
                if len({getattr(run, key) for run in alike}) >= 3:
                    best.append(_lowest(alike, key))
            inside = [one for one in best if not one["at_end"]]
            trend: dict[str, Any] = {"key": key, "family": family, "best": best}
            if len({round(math.log(one["flops"]), 2) for one in inside}) >= 2:
                c, v = (np.log([one[name] for one in inside]) for name in ("flops", "best"))
                trend["exponent"] = float(np.polyfit(c, v, 1)[0])
            found += [trend] * bool(best)
    return found


def _lowest(cell: Sequence[Point], key: str) -> dict[str, Any]:
    x, loss, flops = _columns(cell, key, "loss", "flops")
    x = np.log(x)
    curve, slope, _ = np.polyfit(x - x.mean(), loss, 2)
    at_end = curve <= 0 or not x.min() < x.mean() - slope / (2 * curve) < x.max()
    place = x[np.argmin(loss)] if at_end else x.mean() - slope / (2 * curve)
    best = {"flops": float(flops.mean()), "best": float(np.exp(place)), "at_end": bool(at_end)}
    return {
        **best,
        "losses": {f"{math.exp(a):.4g}": float(b) for a, b in zip(x, loss, strict=True)},
    }


def refuse_far(fit: FamilyFit, flops: float, *, allowed: bool) -> None:
    """Refuse a budget that small runs say little of.

    Raises:
        UserError: it is FAR times the largest of the runs, and `allowed` is false.
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
    """All of it; `tests` are what was predicted of each family's held-out point, beforehand."""
    families = {fit.family: fit.as_json() for fit in fits}
    for fit in fits:
        for point in points:
            if point.held_out and point.family == fit.family and math.isfinite(point.loss):
                told = dict(tests.get(fit.family) or {**fit.held_out(point), "before": False})
                told |= {"measured": point.loss, "error": told["predicted"] / point.loss - 1}
                families[fit.family].setdefault("held_out", []).append(told)
    return {
        "interval": INTERVAL,
        "points": [asdict(point) for point in points],
        "families": families,
        "gains": gains(fits),
        "trends": trends(points),
    }
