"""What every picture of a page shares: its axes, their lines and labels, the figure around it.

`chart` draws lines in a `Frame`, `heat_map` cells, `score_charts` bars and dots. The idea: pictures
are inline SVG without a library, and their colors CSS variables of the page, so that one picture
serves light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape

from llmfoundry.loggers.console import short_count

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 10, 38  # of a picture's edges to its drawing
COLORS = 10  # --s0 … --s9 of the page


@dataclass(frozen=True)
class Axis:
    """Linear or logarithmic; maps a value to a position in [0, 1]."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(value)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values inside the axis, about five."""
        if not self.log:
            return linear_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for marks in ((1,), (1, 3), (1, 2, 5)):
            ticks = [m * 10.0**d for d in decades for m in marks]
            ticks = [t for t in ticks if self.low <= t <= self.high]
            if len(ticks) >= 3:
                return ticks[:: math.ceil(len(ticks) / 6)]
        return linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `wanted` of them."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """A picture's x axis, and where its drawing lies: `top` to `base`, `left` to WIDTH - `right`.

    The classes that its lines get, `base`, `grid` and `mark`, are those of page.css.
    """

    x_axis: Axis
    base: float = HEIGHT - BOTTOM
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP

    @property
    def width(self) -> float:
        """Of the drawing."""
        return WIDTH - self.left - self.right

    @property
    def height(self) -> float:
        """Of the drawing."""
        return self.base - self.top

    def x(self, value: float) -> float:
        """Where a value of the x axis is."""
        return self.left + self.x_axis.place(value) * self.width

    def y(self, share: float) -> float:
        """Where a share of the height is, 0 at the base."""
        return self.base - share * self.height

    def horizontal(self, kind: str, y: float) -> str:
        """A line from edge to edge."""
        return _line(kind, self.left, WIDTH - self.right, y, y)

    def vertical(
        self, kind: str, value: float, top: float, bottom: float, *, dashed: bool = False
    ) -> str:
        """A line at a value of the x axis."""
        return _line(kind, self.x(value), self.x(value), top, bottom, dashed=dashed)

    def x_labels(self, form: Callable[[float], str]) -> Iterator[str]:
        """Values below the base, as `form` writes them."""
        for value in self.x_axis.ticks():
            yield text(self.x(value), self.base + 16, escape(form(value)), anchor="middle")

    def token_axis(self) -> Iterator[str]:
        """The base of a picture over tokens, with marks and their values."""
        yield self.horizontal("base", self.base)
        for value in self.x_axis.ticks():
            yield self.vertical("base", value, self.base, self.base + 4)
        yield from self.x_labels(lambda n: short(short_count(n)))
        yield text(WIDTH - self.right, HEIGHT - 4, "tokens", anchor="end")

    def y_label(self, y: float, words: str) -> str:
        """A text to the left of the drawing."""
        return text(self.left - 7, y + 3.5, escape(words), anchor="end")


def text(x: float, y: float, html: str, *, kind: str = "axis", anchor: str = "") -> str:
    """A text that begins, or is anchored, at a place."""
    at = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{at}>{html}</text>'


def svg(title: str, parts: Iterable[str], *, height: float = HEIGHT) -> str:
    """The picture."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def figure(
    title: str,
    drawn: str,
    *,
    hints: Iterable[tuple[str, str]] = (),
    legend: Iterable[str] = (),
    tooltip: str = "",
) -> str:
    """A <figure> with its caption and legend.

    Args:
        title: the caption.
        drawn: the picture, and what belongs to it.
        hints: class and text of what is to be known beside the caption; empty texts are left out.
        legend: the HTML of its entries.
        tooltip: of the caption.
    """
    beside = [f'<span class="{kind}">{escape(words)}</span>' for kind, words in hints if words]
    name = f'<b title="{escape(tooltip)}">' if tooltip else "<b>"
    caption = f"{name}{escape(title)}</b>{''.join(beside)}"
    entries = "".join(legend)
    entries = f'<div class="legend">{entries}</div>' if entries else ""
    return f"<figure><figcaption>{caption}</figcaption>{entries}{drawn}</figure>"


def short(number: str) -> str:
    """50M for 50.0M."""
    match = re.fullmatch(r"(-?\d+)\.(\d*?)0*(\D*)", number)
    if match is None:
        return number
    whole, decimals, unit = match.groups()
    return f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"


def _line(kind: str, x1: float, x2: float, y1: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="2 2"' if dashed else ""
    places = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {places}{dash}/>'
