"""What a scaling experiment says (scaling.json): its lines for people, and the page with pictures.

`cli/commands/scaling.py` prints the lines and writes the page. The idea: loss against compute is
seen on logarithmic axes alone, which the report's charts, over tokens from zero, have not; so these
are pictures without a script, with the runs as dots that have their numbers under the pointer.
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

_TICKS = 6  # labels of an axis at most
_AXES = {"alpha": "sizes", "beta": "tokens"}  # what determines an exponent


def told(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A line, with its label, for everything that the runs say."""
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
    lost = [point["name"] for point in found["points"] if point["loss"] is None]
    if lost:
        yield (
            "left out",
            f"{', '.join(lost)}: no finite loss at the end; delete to run again",
        )
    for gain in found["gains"]:
        text = f"{gain['family']} needs {_with(gain['gain'], gain['interval'])} times less compute"
        yield "gain", f"{text} than {gain['over']} for loss {gain['loss']:.3f}"
    for trend in found["trends"]:
        ended = sum(best["at_end"] for best in trend["best"])
        power = "too few for a trend"
        if "exponent" in trend:
            power = f"it grows as compute ** {trend['exponent']:.3f}"
        ends_at = f", at {ended} of them outside what was swept"
        text = f"best {trend['key']} at {len(trend['best'])} points{ends_at * bool(ended)}: {power}"
        yield trend["family"] or "trend", text


def _prediction(best: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
    """A number with its interval."""
    if value is None or not math.isfinite(value):
        return "undetermined"

    def form(one: float) -> str:
        return short_count(one) if abs(one) >= 1e4 else number(one)

    return form(value) + (f" ({form(ends[0])} to {form(ends[1])})" if ends else "")


@dataclass(frozen=True)
class Series:
    """Dots and a line of one color; `dots` have the words that a pointer finds there."""

    label: str
    dots: Sequence[tuple[float, float, str]] = ()
    line: Sequence[tuple[float, float]] = ()
    color: int = 0
    dashed: bool = False


def picture(title: str, hint: str, series: Sequence[Series]) -> Markup:
    """A <figure> of series over logarithmic axes; empty without any."""
    places = [place for one in series for place in [*((a, b) for a, b, _ in one.dots), *one.line]]
    if not places:
        return Markup()
    x, y = (_Axis([place[i] for place in places]) for i in (0, 1))
    drawn = [
        {"label": one.label, "color": one.color, "dashed": one.dashed,
         "dots": [(x.at(a), 100 - y.at(b), words) for a, b, words in one.dots],
         "line": " ".join(f"{x.at(a):.2f},{100 - y.at(b):.2f}" for a, b in one.line)}
        for one in series
    ]  # fmt: skip
    return part("scatter", title, hint, drawn, [(100 - at, t) for at, t in y.ticks()], x.ticks())


class _Axis:
    """Percent of the width or height of a value, with a margin, and labels at round ones."""

    def __init__(self, values: Iterable[float]) -> None:
        shown = [math.log10(value) for value in values]
        margin = 0.06 * (max(shown) - min(shown)) or 0.1
        self.low, self.high = min(shown) - margin, max(shown) + margin

    def at(self, value: float) -> float:
        """Percent from the axis's beginning."""
        return 100 * (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts."""
        if self.high - self.low > 1.2:
            step = max(1, math.ceil((self.high - self.low) / _TICKS))
            powers = range(math.floor(self.low), math.floor(self.high) + 1, step)
            digits = (1, 3) if self.high - self.low < 3 else (1,)
            ticks = [(self.at(d * 10.0**n), f"{d}e{n}") for n in powers for d in digits]
            return [(at, text) for at, text in ticks if 0 <= at <= 100]
        low, high = 10**self.low, 10**self.high
        step = 10 ** math.floor(math.log10(high - low))
        step *= next(m for m in (0.2, 0.5, 1, 2, 5) if (high - low) / (m * step) <= _TICKS)
        values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(self.at(v), short_count(v) if v >= 1e4 else number(v)) for v in values if v > 0]


def write_scaling_page(path: Path, found: Mapping[str, Any]) -> None:
    """Write the page of what scaling.json holds."""
    points, families = found["points"], found["families"]
    hint = "FLOPs; line: the best sizes, dashed beyond the runs"
    pictures = [picture("Loss against compute", hint, [*_frontiers(points, families)])]
    hint = "parameters; a color for each number of tokens (or FLOPs); line: the law"
    for family, fit in families.items():
        title = f"Loss against size {family}".strip()
        pictures.append(picture(title, hint, [*_sizes(points, family, fit)]))
    law = Markup('<p class="hint">L(N, D) = E + A / N^alpha + B / D^beta, nats a token</p>')
    done = sum(point["loss"] is not None for point in points)
    html = page(
        title="Scaling experiment",
        status="finished",
        reached=f"{done} runs; N counts {found['parameters'].replace('_', ' ')} parameters;"
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
    words = (
        f"{point['name']}\nN {short_count(point['parameters'])}, D {short_count(point['tokens'])},"
        f" {point['flops']:.3g} FLOPs\nloss {point['loss']:.4f}"
    )
    return point[x], point["loss"], words


def _frontiers(points: Sequence[Any], families: Mapping[str, Any]) -> Iterator[Series]:
    """Of each family its runs, what was held out, and its frontier."""
    for color, (family, fit) in enumerate(families.items()):
        runs = [p for p in points if p["loss"] is not None and p["family"] == family]
        most = max(p["flops"] for p in runs if p["name"] in fit["residuals"])
        line = [(one["flops"], one["loss"]) for one in fit["frontier"]]
        near = [place for place in line if place[0] <= most * 1.01]
        dots = [_dot(p, "flops") for p in runs if not p["held_out"]]
        held = [_dot(p, "flops") for p in runs if p["held_out"]]
        yield Series(family or "runs", dots, near, 2 * color)
        if line:
            yield Series(f"{family} beyond".strip(), (), line[len(near) - 1 :], 2 * color, True)
        if held:
            yield Series(f"{family} held out".strip(), held, (), 2 * color + 1)


def _sizes(points: Sequence[Any], family: str, fit: Mapping[str, Any]) -> Iterator[Series]:
    """Loss over size for each number of tokens or compute, with the law's curve through them."""
    groups: dict[float, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: point["parameters"]):
        if point["family"] == family and point["name"] in fit["residuals"]:
            groups.setdefault(point["target"] or point["tokens"], []).append(point)
    shown = [group for group in sorted(groups.items()) if len(group[1]) > 1][:10]
    for color, (target, runs) in enumerate(shown):
        curve = [
            (p["parameters"], p["loss"] / (1 + fit["residuals"][p["name"]])) for p in runs
        ]  # what the law says
        yield Series(short_count(target), [_dot(p, "parameters") for p in runs], curve, color)


def run_table(points: Sequence[Mapping[str, Any]], families: Mapping[str, Any]) -> Markup:
    """Every run."""
    rows = []
    for p in points:
        off = families[p["family"]]["residuals"].get(p["name"])
        rows.append(
            (p["name"] + (" (held out)" if p["held_out"] else ""), short_count(p["parameters"]),
             short_count(p["tokens"]), f"{p['tokens'] / p['parameters']:.3g}", f"{p['flops']:.3g}",
             "" if p["lr"] is None or not p["width"] else f"{p['lr']:.3g}",
             "not finite" if p["loss"] is None else f"{p['loss']:.4f}",
             "" if off is None else f"{100 * off:+.2f}%",
             duration(p["seconds"]) if p["seconds"] else "")
        )  # fmt: skip
    head = ("run", "N", "D", "D/N", "FLOPs", "lr", "loss", "over the law's", "time")
    return table(head, rows, right=range(1, 9), is_wide=True)
