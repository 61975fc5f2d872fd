"""What all pages share: Jinja2's templates, and the tables and heat maps that stand in them.

The run's report, the gauntlet's page, the health check's and the GPU check's are made with it. The
idea: whatever comes from a run, names, prompts, samples, is text, which the templates escape; only
`Markup`, which other templates made, is HTML. A page is one file that loads nothing, so it works
from a mail or a USB stick; only a report has scripts, `templates/charts.js` and uPlot, which draw
its lines. `page.css` has a value of each color for light and one for dark.
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
    """A number to read first, what it is, and what belongs to it in small."""

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
    """The whole document.

    Args:
        title: of the window and of the page.
        status: in words; its first is a class of the style sheet.
        reached: how far it is.
        tiles: the numbers to read first.
        sections: (heading, HTML); those without HTML are left out.
        has_charts: whether there are line charts.
        written: of a run under way, milliseconds since 1970: an open page then reloads itself.
    """
    values: dict[str, Any] = {"title": title, "status": status, "reached": reached, "tiles": tiles}
    values |= {"sections": sections, "has_charts": has_charts, "written": written}
    document = _templates().get_template("page.html").render(values)
    return document.encode(errors="replace").decode()  # half a surrogate pair cannot be written


_MARK = '<meta name="generator" content="llmfoundry">'


def is_ours(path: Path) -> bool:
    """Whether a file is a page that `page` made, or part of one: it names us at its beginning.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _MARK.encode() in file.read(1000)


def part(name: str, *values: Any, **named: Any) -> Markup:
    """What a macro of parts.html makes."""
    return Markup(getattr(_templates().get_template("parts.html").module, name)(*values, **named))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    is_wide: bool = False,
) -> Markup:
    """A table, empty without rows; columns in `right` hold numbers.

    `is_wide`: it is likely to be scrolled, and the first column stays.
    """
    return part("table", head, rows, right, is_wide) if rows else Markup()


def breakable(text: str) -> Markup:
    """A text that may wrap after `,` and `=`, as the names of a sweep's runs have to on a phone."""
    parts = re.split(r"(?<=[,=])(?=\S)", str(text))
    return text if isinstance(text, Markup) else Markup("<wbr/>").join(parts)


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    """A list of label and value; empty without rows."""
    listed = list(rows)
    return part("pairs", listed) if listed else Markup()


def together(parts: Iterable[str], kind: str) -> Markup:
    """Parts in a <div> of a class of the style sheet; empty where all are."""
    shown = [part for part in parts if part]
    return part("together", shown, kind) if shown else Markup()


Cell = tuple[int, int]  # column, row, from the upper left


@dataclass(frozen=True)
class HeatMap:
    """Cells of one width and one height, in paths of one color each, so that a map stays small.

    `rows` and `columns` are labels: percent of the height or width, text. `titled`: column, row,
    width, height and the words that a pointer finds there.
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
        """The <figure>."""
        return part("heat_map", self)


def paths(cells: Mapping[tuple[str, float], Iterable[Cell]]) -> list[tuple[str, str, str]]:
    """For a `HeatMap`: the cells of each color of the page and opacity."""
    return [
        (color, f"{opacity:.2f}", "".join(f"M{x} {y}h1v1h-1z" for x, y in places))
        for (color, opacity), places in sorted(cells.items())
    ]


def fill(number: int) -> str:
    """The color of a model or a part, paler where colors begin again."""
    opacity = max(30, 100 - 35 * (number // COLORS))
    color = f"var(--s{number % COLORS})"
    return color if opacity == 100 else f"color-mix(in srgb,{color} {opacity}%,transparent)"


def _color(number: int) -> str:
    """Color and dashes of a line in a legend, as charts.js draws it."""
    dashes = _DASHES[number // COLORS % len(_DASHES)]
    return f"border-top:2px {dashes} var(--s{number % COLORS})"


def _file(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.globals |= {"file": _file, "fill": fill, "color": _color}
    made.filters["breakable"] = breakable
    return made
