"""The page of a scaling experiment, of what `scaling/analysis.py` made of its runs (scaling.json).

The idea: loss against compute is seen on logarithmic axes alone, which the report's charts, over
tokens from zero, have not; so these are pictures without a script, with the runs as dots that have
their numbers under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import duration, number, percent, short_count
from llmfoundry.loggers.pages.page import Tile, page, part, table, together

Place = tuple[float, float]
_TICKS = 6  # labels of an axis at most


@dataclass(frozen=True)
class Series:
    """Dots and a line of one color; `dots` have the words that a pointer finds there."""

    label: str
    dots: Sequence[tuple[float, float, str]] = ()
    line: Sequence[Place] = ()
    color: int = 0
    dashed: bool = False


@dataclass
class Picture:
    """Series over a logarithmic x axis, y logarithmic too unless `is_linear`."""

    title: str
    hint: str
    series: Sequence[Series]
    is_linear: bool = False
    found: list[dict[str, Any]] = field(default_factory=list)

    def drawn(self) -> Markup:
        """The <figure>; empty without dots."""
        xs = [p[0] for one in self.series for p in [*((a, b) for a, b, _ in one.dots), *one.line]]
        ys = [p[1] for one in self.series for p in [*((a, b) for a, b, _ in one.dots), *one.line]]
        if not xs:
            return Markup()
        x, y = _Axis(xs), _Axis(ys, is_log=not self.is_linear)
        for one in self.series:
            dots = [(x.at(a), 100 - y.at(b), words) for a, b, words in one.dots]
            line = " ".join(f"{x.at(a):.2f},{100 - y.at(b):.2f}" for a, b in one.line)
            self.found.append({"label": one.label, "color": one.color, "dots": dots, "line": line,
                               "dashed": one.dashed})  # fmt: skip
        rows = [(100 - at, text) for at, text in y.ticks()]
        return part("scatter", self.title, self.hint, self.found, rows, x.ticks())


class _Axis:
    """Percent of the width or height of a value, with a margin, and labels at round ones."""

    def __init__(self, values: Iterable[float], *, is_log: bool = True) -> None:
        self.is_log = is_log
        shown = [self._scaled(value) for value in values]
        margin = 0.06 * (max(shown) - min(shown)) or 0.1 * abs(shown[0]) or 1.0
        self.low, self.high = min(shown) - margin, max(shown) + margin

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def at(self, value: float) -> float:
        """Percent from the axis's beginning."""
        return 100 * (self._scaled(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts."""
        if self.is_log and self.high - self.low > 1.2:
            step = max(1, math.ceil((self.high - self.low) / _TICKS))
            powers = range(math.ceil(self.low), math.floor(self.high) + 1, step)
            return [(self.at(10.0**n), f"1e{n}") for n in powers]
        ends = [10**v if self.is_log else v for v in (self.low, self.high)]
        step = 10 ** math.floor(math.log10(ends[1] - ends[0]))
        step *= next(m for m in (0.2, 0.5, 1, 2, 5) if (ends[1] - ends[0]) / (m * step) <= _TICKS)
        first = math.ceil(ends[0] / step)
        values = [n * step for n in range(first, math.floor(ends[1] / step) + 1)]
        return [(self.at(v), short_count(v) if v >= 1e4 else number(v)) for v in values]


def write_scaling_page(path: Path, found: Mapping[str, Any]) -> None:
    """Write the page of what scaling.json holds."""
    points, families = found["points"], found["families"]
    pictures = [
        Picture("Loss against compute", "FLOPs; line: the best sizes, dashed beyond the runs",
                list(_frontiers(points, families))),
        *(_sizes(family, points, fit) for family, fit in families.items()),
        Picture("Residuals", "measured over fitted loss, percent, against FLOPs",
                list(_residuals(points, families)), is_linear=True),
    ]  # fmt: skip
    sections = [
        ("Runs and law", together([picture.drawn() for picture in pictures], "charts")),
        ("Constants", constants(families)),
        ("Held out", held_out(families)),
        ("Prediction", prediction(families)),
        ("Gain at equal loss", gain_table(found["gains"])),
        ("Best learning rate and batch", trend_table(found["trends"])),
        ("Runs", run_table(points)),
    ]
    done = sum(point["loss"] is not None for point in points)
    html = page(
        title="Scaling experiment",
        status="finished",
        reached=f"{done} runs; N counts {found['parameters'].replace('_', ' ')} parameters;"
        f" intervals are of {percent(found['interval'])}",
        tiles=list(_tiles(families)),
        sections=sections,
    )
    atomic_write(path, html)


def _tiles(families: Mapping[str, Any]) -> Iterable[Tile]:
    for family, fit in families.items():
        for test in fit.get("held_out", ()):
            both = f"{test['predicted']:.4f} predicted, {test['measured']:.4f} measured"
            label = f"error of the prediction {family}".strip()
            yield Tile(label, f"{100 * test['error']:+.2f}%", both)
        told = fit.get("prediction") or {}
        if "loss" in told:
            far = ", EXTRAPOLATED" if told["is_far"] else ""
            yield Tile(f"best size {family}".strip(), short_count(told["parameters"]),
                       f"for {told['flops']:.3g} FLOPs{far}")  # fmt: skip


def _words(point: Mapping[str, Any]) -> str:
    return (
        f"{point['name']}\nN {short_count(point['parameters'])}, D {short_count(point['tokens'])},"
        f" {point['flops']:.3g} FLOPs\nloss {point['loss']:.4f}"
    )


def _measured(points: Iterable[Mapping[str, Any]], family: str) -> list[Mapping[str, Any]]:
    return [p for p in points if p["loss"] is not None and p["family"] == family]


def _frontiers(points: Sequence[Any], families: Mapping[str, Any]) -> Iterable[Series]:
    """Of each family its runs, what was held out, and its frontier."""
    for color, (family, fit) in enumerate(families.items()):
        runs = _measured(points, family)
        most = max(p["flops"] for p in runs if p["name"] in fit["residuals"])
        line = [(one["flops"], one["loss"]) for one in fit["frontier"]]
        near = [place for place in line if place[0] <= most * 1.01]
        dots = [(p["flops"], p["loss"], _words(p)) for p in runs if not p["held_out"]]
        held = [(p["flops"], p["loss"], _words(p)) for p in runs if p["held_out"]]
        yield Series(family or "runs", dots, near, 2 * color)
        if line:
            yield Series(f"{family} beyond".strip(), (), line[len(near) - 1 :], 2 * color, True)
        if held:
            yield Series(f"{family} held out".strip(), held, (), 2 * color + 1)


def _sizes(family: str, points: Sequence[Any], fit: Mapping[str, Any]) -> Picture:
    """Loss over size for each number of tokens or compute, with the law's curve through them."""
    groups: dict[float, list[Mapping[str, Any]]] = {}
    for point in _measured(points, family):
        if point["name"] in fit["residuals"]:
            groups.setdefault(point["target"] or point["tokens"], []).append(point)
    law, series = fit["law"], []
    shown = [group for group in sorted(groups.items()) if len(group[1]) > 1][:10]
    for color, (target, runs) in enumerate(shown):
        runs.sort(key=lambda p: p["parameters"])
        curve = [
            (p["parameters"], law["e"] + law["a"] * p["parameters"] ** -law["alpha"]
             + law["b"] * p["tokens"] ** -law["beta"]) for p in runs
        ]  # fmt: skip
        dots = [(p["parameters"], p["loss"], _words(p)) for p in runs]
        series.append(Series(short_count(target), dots, curve, color))
    title = f"Loss against size {family}".strip()
    return Picture(title, "parameters; a color for each number of tokens (or FLOPs)", series)


def _residuals(points: Sequence[Any], families: Mapping[str, Any]) -> Iterable[Series]:
    for color, (family, fit) in enumerate(families.items()):
        by_name = {p["name"]: p for p in _measured(points, family)}
        dots = [
            (by_name[name]["flops"], 100 * value, f"{_words(by_name[name])}\n{100 * value:+.2f}%")
            for name, value in fit["residuals"].items()
        ]
        ends = [min(d[0] for d in dots), max(d[0] for d in dots)]
        yield Series(family or "runs", dots, [(end, 0.0) for end in ends], 2 * color)


def _shown(value: float | None, ends: Sequence[float] | None) -> tuple[str, str]:
    """A number and its interval as cells."""
    if value is None:
        return "", ""

    def form(one: float) -> str:
        return short_count(one) if abs(one) >= 1e4 else number(one)

    return form(value), f"{form(ends[0])} to {form(ends[1])}" if ends else "not determined"


def constants(families: Mapping[str, Any]) -> Markup:
    """L = E + A / N^alpha + B / D^beta of each family."""
    rows = []
    for family, fit in families.items():
        named = {name.upper() if len(name) == 1 else name: name for name in fit["law"]}
        rows += [
            (family, label, *_shown(fit["law"][name], fit["intervals"][name]))
            for label, name in named.items()
        ]
        rows.append((family, "best size: exponent of compute",
                     *_shown(fit["size_exponent"], fit["size_exponent_interval"])))  # fmt: skip
        rows.append((family, "residuals, root mean square", percent(fit["rms_residual"]), ""))
    law = Markup('<p class="hint">L(N, D) = E + A / N^alpha + B / D^beta, nats a token</p>')
    return law + table(("family", "constant", "value", "interval"), rows, right=(2, 3))


def held_out(families: Mapping[str, Any]) -> Markup:
    """What was predicted, when, and what was measured."""
    rows = [
        (test["name"], *_shown(test["predicted"], test["interval"]), f"{test['measured']:.4f}",
         f"{100 * test['error']:+.2f}%", f"{test['times_largest']:.1f}",
         "before its run" if test["before"] else "after its run")
        for fit in families.values() for test in fit.get("held_out", ())
    ]  # fmt: skip
    head = ("run", "predicted", "interval", "measured", "error", "times the largest fitted", "made")
    return table(head, rows, right=range(1, 6))


def prediction(families: Mapping[str, Any]) -> Markup:
    """The best model for the budget."""
    rows = []
    for family, fit in families.items():
        told = fit.get("prediction") or {}
        if "loss" not in told:
            continue
        title = f"{family} {told['flops']:.3g} FLOPs".strip()
        title += " EXTRAPOLATED" if told["is_far"] else ""
        for name, ends in told["intervals"].items():
            rows.append((title, name.replace("_", " "), *_shown(told[name], ends)))
        rows.append(
            (title, "loss at half that size", *_shown(told["loss_at_half_size"], ())[:1], "")
        )
        if told.get("seconds"):
            rows.append((title, "time", duration(told["seconds"]), ""))
        rows += [(title, "cost", *_shown(told.get("money"), ())[:1], "")] * bool(told.get("money"))
    return table(("budget", "", "value", "interval"), rows, right=(2, 3))


def gain_table(gains: Sequence[Mapping[str, Any]]) -> Markup:
    """Compute that one family saves over another."""
    rows = [
        (g["family"], g["over"], f"{g['flops']:.3g}", f"{g['loss']:.4f}",
         *_shown(g["gain"], g["interval"])) for g in gains
    ]  # fmt: skip
    head = ("family", "over", "FLOPs", "loss", "times less compute", "interval")
    return table(head, rows, right=range(2, 6))


def trend_table(trends: Sequence[Mapping[str, Any]]) -> Markup:
    """The best value at each compute, and the power of compute through those inside the sweep."""
    rows = []
    for trend in trends:
        power = trend.get("exponent")
        for best in trend["best"]:
            where = "at the end of the sweep" if best["at_end"] else ""
            rows.append((trend["family"], trend["key"], f"{best['flops']:.3g}",
                         number(best["best"]), where,
                         "" if power is None else f"compute ** {power:.3f}"))  # fmt: skip
    return table(("family", "key", "FLOPs", "best", "", "trend"), rows, right=(2, 3))


def run_table(points: Sequence[Mapping[str, Any]]) -> Markup:
    """Every run."""
    rows = [
        (p["name"] + (" (held out)" if p["held_out"] else ""), short_count(p["parameters"]),
         short_count(p["tokens"]), f"{p['tokens'] / p['parameters']:.3g}", f"{p['flops']:.3g}",
         "" if p["lr"] is None or not p["width"] else f"{p['lr']:.3g}",
         "not finite" if p["loss"] is None else f"{p['loss']:.4f}",
         duration(p["seconds"]) if p["seconds"] else "")
        for p in points
    ]  # fmt: skip
    head = ("run", "N", "D", "D/N", "FLOPs", "lr", "loss", "time")
    return table(head, rows, right=range(1, 8), is_wide=True)
