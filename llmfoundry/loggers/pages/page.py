"""Building blocks of all pages: Jinja2 templates, tables and heat maps.

The report of a run, the gauntlet page, the health check and the GPU check use it. Every text of a
run (names, prompts, samples) is a str, which the templates escape; only `Markup`, the output of
templates, is HTML. A page is a single file that loads nothing, so that it works offline and as a
mail attachment. Only pages with line charts have scripts: `templates/charts.js` and uPlot.
`page.css` defines each color twice, for the light and the dark theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent
COLORS = 10  # --s0 … --s9 of the page
_DASHES = ("solid", "dashed", "dotted")


@dataclass(frozen=True)
class Tile:
    """A headline number at the top of a page: label, value, and a detail in small print."""

    label: str
    value: str
    detail: str = ""


def page(
    *,
    title: str,
    status: str,
    reached: str,
    tiles: Sequence[Tile],
    sections: Sequence[tuple[str, str]],
    has_charts: bool = False,
    written: int = 0,
) -> str:
    """Return the HTML document.

    Args:
        title: title of the window and of the page.
        status: status in words; the first word is a class of the style sheet.
        reached: progress in words.
        tiles: headline numbers.
        sections: (heading, HTML) each; sections without HTML are omitted.
        has_charts: whether the page has line charts, which need scripts.
        written: time in milliseconds since 1970 if the page will be rewritten, so that an open page
            reloads itself; else 0.
    """
    values: dict[str, Any] = {"title": title, "status": status, "reached": reached, "tiles": tiles}
    values |= {"sections": sections, "has_charts": has_charts, "written": written}
    document = _templates().get_template("page.html").render(values)
    return document.encode(errors="replace").decode()  # UTF-8 cannot encode a lone surrogate


_MARK = '<meta name="generator" content="llmfoundry">'


def is_ours(path: Path) -> bool:
    """Return whether `page` made a file, or the file is the beginning of such a page.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _MARK.encode() in file.read(1000)


def part(name: str, *values: Any, **named: Any) -> Markup:
    """Return the HTML of a macro in parts.html."""
    return Markup(getattr(_templates().get_template("parts.html").module, name)(*values, **named))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    is_wide: bool = False,
) -> Markup:
    """Return a table; empty without rows.

    Args:
        head: names of the columns.
        rows: cells, text or Markup.
        right: indices of right-aligned columns, for numbers.
        is_wide: whether the table scrolls horizontally with a fixed first column.
    """
    return part("table", head, rows, right, is_wide) if rows else Markup()


def breakable(text: str) -> Markup:
    """Return a text that may wrap after `,` and `=`, for long run names of a sweep on a phone."""
    if isinstance(text, Markup):
        return text
    return Markup("<wbr/>").join(re.split(r"(?<=[,=])(?=\S)", str(text)))


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    """Return a list of labels and values; empty without rows."""
    label_values = list(rows)
    return part("pairs", label_values) if label_values else Markup()


def together(parts: Iterable[str], kind: str) -> Markup:
    """Return parts in a <div> with a class of the style sheet; empty if all parts are empty."""
    non_empty = [part for part in parts if part]
    return part("together", non_empty, kind) if non_empty else Markup()


Cell = tuple[int, int]  # column, row, from the upper left


@dataclass(frozen=True)
class HeatMap:
    """A heat map of equally sized cells. All cells of a color are one SVG path, to save space.

    Attributes:
        title: caption.
        hint: explanation in the caption.
        width: number of columns.
        height: number of rows.
        paths: color, opacity and SVG path of the cells of each color, from `paths`.
        rows: labels of the y axis: position in percent of the height, text.
        columns: labels of the x axis: position in percent of the width, text.
        titled: areas with a tooltip: column, row, width, height, text.
        is_square: whether cells are square.
    """

    title: str
    hint: str
    width: int
    height: int
    paths: Sequence[tuple[str, str, str]]
    rows: Sequence[tuple[float, str]]
    columns: Sequence[tuple[float, str]]
    titled: Sequence[tuple[int, int, int, int, str]]
    is_square: bool = False

    def drawn(self) -> Markup:
        """Return the <figure>."""
        return part("heat_map", self)


def paths(cells: Mapping[tuple[str, float], Iterable[Cell]]) -> list[tuple[str, str, str]]:
    """Return `HeatMap.paths` for the cells of each color and opacity."""
    drawn = []
    for (color, opacity), positions in sorted(cells.items()):
        squares = [f"M{x} {y}h1v1h-1z" for x, y in positions]
        drawn.append((color, f"{opacity:.2f}", "".join(squares)))
    return drawn


def fill(number: int) -> str:
    """Return the CSS color with this number; after COLORS numbers, paler colors follow."""
    opacity = max(30, 100 - 35 * (number // COLORS))
    color = f"var(--s{number % COLORS})"
    return color if opacity == 100 else f"color-mix(in srgb,{color} {opacity}%,transparent)"


def _color(number: int) -> str:
    """Return the CSS style of a line in a legend: its color and dashes in charts.js."""
    dashes = _DASHES[number // COLORS % len(_DASHES)]
    return f"border-top:2px {dashes} var(--s{number % COLORS})"


def _file(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    templates.globals |= {"file": _file, "fill": fill, "color": _color}
    templates.filters["breakable"] = breakable
    return templates
