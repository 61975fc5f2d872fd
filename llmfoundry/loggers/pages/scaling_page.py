"""Results of a scaling experiment (scaling.json): lines for the console, and a page with charts.

`cli/commands/scaling.py` prints the lines of `told` and calls `write_scaling_page`. Loss against
compute needs logarithmic axes, which the report's charts over tokens do not have. These charts are
therefore separate: SVG without a script, with a dot and a tooltip for each run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import duration, number, percent, short_count
from llmfoundry.loggers.pages.page import page, pairs, part, table, together

_TICKS = 6  # maximal number of labels of an axis
_AXES = {"alpha": "sizes", "beta": "tokens"}  # the quantity that determines an exponent


def told(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield label and text of each result in scaling.json (`found`)."""
    # laws, frontiers and predictions
    for family, fit in found["families"].items():
        law, ends = fit["law"], fit["intervals"]
        constants = ", ".join(f"{name} {_with(law[name], ends[name])}" for name in law)
        yield family or "law", f"{constants}; residuals {percent(fit['rms_residual'])}"
        for name in fit["at_edge"]:
            why = f"{name} is at an end of what is searched: the runs do not determine it"
            yield "unsure", f"{why}; write {_AXES[name]} further apart"
        for name, other in fit["uncertain"].items():
            if name not in fit["at_edge"]:
                why = f"with {name} {number(other)} and other constants the law fits as well"
                yield "unsure", f"{why}; write more {_AXES[name]}, further apart"
        power = _with(fit["size_exponent"], ends["size_exponent"])
        yield "frontier", f"the best size grows as compute ** {power}"
        for test in fit.get("held_out", ()):
            text = f"{_with(test['predicted'], test['interval'])} predicted"
            text += f" {'before' if test['before'] else 'after'} its run,"
            yield (
                "held out",
                f"{text} {test['measured']:.4f} measured: {100 * test['error']:+.2f} %",
            )
        yield from _prediction(fit.get("prediction", {}))

    # diverged runs
    lost = [point["name"] for point in found["points"] if point["loss"] is None]
    if lost:
        yield (
            "left out",
            f"{', '.join(lost)}: no finite loss at the end; delete to run again",
        )

    # comparison of families
    for gain in found["gains"]:
        text = f"{gain['family']} needs {_with(gain['gain'], gain['interval'])} times less compute"
        yield "gain", f"{text} than {gain['over']} for loss {gain['loss']:.3f}"

    # trends of hyperparameters
    for trend in found["trends"]:
        n_at_end = sum(best["at_end"] for best in trend["best"])
        power = "too few for a trend"
        if "exponent" in trend:
            power = f"it grows as compute ** {trend['exponent']:.3f}"
        text = f"best {trend['key']} at {len(trend['best'])} points"
        if n_at_end:
            text += f", at {n_at_end} of them outside what was swept"
        yield trend["family"] or "trend", f"{text}: {power}"


def _prediction(best: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the predicted best model for a compute budget."""
    if "undetermined" in best:
        yield "budget", f"nothing to predict: {best['undetermined']}"
    elif best:
        values = {name: _with(best[name], ends) for name, ends in best["intervals"].items()}
        text = (
            f"{best['flops']:.3g} FLOPs: {values['parameters']} parameters, {values['tokens']}"
            f" tokens, loss {values['loss']}"
        )
        far = f"EXTRAPOLATED {best['times_largest']:,.0f} times beyond what was run. "
        yield "budget", far * best["is_far"] + text
        if best.get("cost"):
            yield "takes", best["cost"]


def _with(value: float | None, ends: Sequence[float] | None) -> str:
    """Return a number and its interval as text."""
    if value is None or not math.isfinite(value):
        return "undetermined"

    def form(one: float) -> str:
        return short_count(one) if abs(one) >= 1e4 else number(one)

    return form(value) + (f" ({form(ends[0])} to {form(ends[1])})" if ends else "")


@dataclass(frozen=True)
class Series:
    """Dots and a line of one color. A dot is (x, y, tooltip)."""

    label: str
    dots: Sequence[tuple[float, float, str]] = ()
    line: Sequence[tuple[float, float]] = ()
    color: int = 0
    dashed: bool = False


def picture(title: str, hint: str, series: Sequence[Series]) -> Markup:
    """Return a <figure> of series over logarithmic axes; empty without points."""
    # axes
    points = []
    for one in series:
        points += [(a, b) for a, b, _ in one.dots]
        points += one.line
    if not points:
        return Markup()
    x, y = _Axis([a for a, _ in points]), _Axis([b for _, b in points])

    # positions in percent, from the upper left corner
    drawn_series = []
    for one in series:
        dots = [(x.at(a), 100 - y.at(b), words) for a, b, words in one.dots]
        corners = [f"{x.at(a):.2f},{100 - y.at(b):.2f}" for a, b in one.line]
        attributes = {"label": one.label, "color": one.color, "dashed": one.dashed}
        drawn_series.append({**attributes, "dots": dots, "line": " ".join(corners)})
    y_ticks = [(100 - at, text) for at, text in y.ticks()]
    return part("scatter", title, hint, drawn_series, y_ticks, x.ticks())


class _Axis:
    """A logarithmic axis with a margin. Positions are in percent of its length."""

    def __init__(self, values: Iterable[float]) -> None:
        logarithms = [math.log10(value) for value in values]
        margin = 0.06 * (max(logarithms) - min(logarithms)) or 0.1
        self.low, self.high = min(logarithms) - margin, max(logarithms) + margin

    def at(self, value: float) -> float:
        """Return the position of a value, in percent from the start of the axis."""
        return 100 * (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and texts of labels at round values."""
        # more than a factor of 16: powers of ten
        if self.high - self.low > 1.2:
            step = max(1, math.ceil((self.high - self.low) / _TICKS))
            powers = range(math.floor(self.low), math.floor(self.high) + 1, step)
            digits = (1, 3) if self.high - self.low < 3 else (1,)
            ticks = [(self.at(d * 10.0**n), f"{d}e{n}") for n in powers for d in digits]
            return [(at, text) for at, text in ticks if 0 <= at <= 100]

        # less: multiples of a round number, at most _TICKS of them
        low, high = 10**self.low, 10**self.high
        power = 10 ** math.floor(math.log10(high - low))
        step = next(m * power for m in (0.2, 0.5, 1, 2, 5) if (high - low) / (m * power) <= _TICKS)
        values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(self.at(v), short_count(v) if v >= 1e4 else number(v)) for v in values if v > 0]


def write_scaling_page(path: Path, found: Mapping[str, Any]) -> None:
    """Write the page for the contents of scaling.json (`found`)."""
    # charts
    points, families = found["points"], found["families"]
    hint = "FLOPs; line: the best sizes, dashed beyond the runs"
    pictures = [picture("Loss against compute", hint, [*_frontiers(points, families)])]
    hint = "parameters; a color for each number of tokens (or FLOPs); line: the law"
    for family, fit in families.items():
        title = f"Loss against size {family}".strip()
        pictures.append(picture(title, hint, [*_sizes(points, family, fit)]))

    # page
    law = Markup('<p class="hint">L(N, D) = E + A / N^alpha + B / D^beta, nats a token</p>')
    n_done = sum(point["loss"] is not None for point in points)
    html = page(
        title="Scaling experiment",
        status="finished",
        reached=f"{n_done} runs; N counts {found['parameters'].replace('_', ' ')} parameters;"
        f" intervals are of {percent(found['interval'])}",
        tiles=[],
        sections=[
            ("What the runs say", law + pairs(told(found))),
            ("Runs and law", together(pictures, "charts")),
            ("Runs", run_table(points, families)),
        ],
    )
    atomic_write(path, html)


def _dot(point: Mapping[str, Any], x: str) -> tuple[float, float, str]:
    """Return the dot of a run, with its value of key `x` on the x axis."""
    words = (
        f"{point['name']}\nN {short_count(point['parameters'])}, D {short_count(point['tokens'])},"
        f" {point['flops']:.3g} FLOPs\nloss {point['loss']:.4f}"
    )
    return point[x], point["loss"], words


def _frontiers(points: Sequence[Any], families: Mapping[str, Any]) -> Iterator[Series]:
    """Yield the runs of each family with its frontier, the extrapolation, and held-out runs."""
    for color, (family, fit) in enumerate(families.items()):
        # runs and frontier; the frontier is solid up to the largest fitted run
        runs = [p for p in points if p["loss"] is not None and p["family"] == family]
        max_flops = max(p["flops"] for p in runs if p["name"] in fit["residuals"])
        line = [(one["flops"], one["loss"]) for one in fit["frontier"]]
        fitted = [(flops, loss) for flops, loss in line if flops <= max_flops * 1.01]
        dots = [_dot(p, "flops") for p in runs if not p["held_out"]]
        yield Series(family or "runs", dots, fitted, 2 * color)

        # extrapolation, dashed, and held-out runs
        if line:
            beyond = line[len(fitted) - 1 :]
            yield Series(f"{family} beyond".strip(), (), beyond, 2 * color, True)
        held_out = [_dot(p, "flops") for p in runs if p["held_out"]]
        if held_out:
            yield Series(f"{family} held out".strip(), held_out, (), 2 * color + 1)


def _sizes(points: Sequence[Any], family: str, fit: Mapping[str, Any]) -> Iterator[Series]:
    """Yield the runs for each number of tokens (or compute), with the losses of the fitted law."""
    groups: dict[float, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: point["parameters"]):
        if point["family"] == family and point["name"] in fit["residuals"]:
            groups.setdefault(point["target"] or point["tokens"], []).append(point)
    several = [group for group in sorted(groups.items()) if len(group[1]) > 1][:10]
    for color, (target, runs) in enumerate(several):
        curve = []
        for p in runs:
            law_loss = p["loss"] / (1 + fit["residuals"][p["name"]])
            curve.append((p["parameters"], law_loss))
        yield Series(short_count(target), [_dot(p, "parameters") for p in runs], curve, color)


def run_table(points: Sequence[Mapping[str, Any]], families: Mapping[str, Any]) -> Markup:
    """Return a table of all runs."""
    rows = []
    for p in points:
        residual = families[p["family"]]["residuals"].get(p["name"])
        rows.append(
            (
                p["name"] + (" (held out)" if p["held_out"] else ""),
                short_count(p["parameters"]),
                short_count(p["tokens"]),
                f"{p['tokens'] / p['parameters']:.3g}",
                f"{p['flops']:.3g}",
                "" if p["lr"] is None or not p["width"] else f"{p['lr']:.3g}",
                "not finite" if p["loss"] is None else f"{p['loss']:.4f}",
                "" if residual is None else f"{100 * residual:+.2f}%",
                duration(p["seconds"]) if p["seconds"] else "",
            )
        )
    head = ("run", "N", "D", "D/N", "FLOPs", "lr", "loss", "over the law's", "time")
    return table(head, rows, right=range(1, 9), is_wide=True)
