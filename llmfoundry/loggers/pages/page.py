"""The pages' frame: style sheet, tiles and tables as HTML text.

`report` and `eval_page` fill it. Everything is inline and nothing is loaded, so the page works from
a mail or a USB stick. `page.css` has a value of each color for light and one for dark. `charts.js`
is our own and only adds to what is there: without it the page has the same pictures and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path


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
    is_live: bool = False,
) -> str:
    """The whole document.

    Args:
        title: of the window and of the page.
        status: in words; its first is a class of the style sheet.
        reached: how far it is.
        tiles: the numbers to read first.
        sections: (heading, HTML).
        is_live: whether there are charts that the reader may zoom.
    """
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections)
    kind = status.split()[0]
    so_far = f" · {escape(reached)}" if reached else ""
    script = f"<script>{_read('charts.js')}</script>" if is_live else ""
    document = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_read('page.css')}</style></head>\n<body><main><header>"
        f'<h1>{escape(title)}</h1><p><span class="status {kind}">{escape(status)}</span>{so_far}'
        f"</p></header>{_tiles(tiles)}{body}</main>{script}</body></html>\n"
    )
    return document.encode(errors="replace").decode()  # half a surrogate pair cannot be written


def _tiles(tiles: Sequence[Tile]) -> str:
    cards = (
        f"<div><b>{escape(tile.value)}</b><span>{escape(tile.label)}</span>"
        + (f"<i>{escape(tile.detail)}</i></div>" if tile.detail else "</div>")
        for tile in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>' if tiles else ""


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    raw: Sequence[int] = (),
    is_wide: bool = False,
) -> str:
    """A table of texts, empty without rows.

    Args:
        head: names of the columns.
        rows: their texts.
        right: columns that hold numbers.
        raw: columns that hold HTML.
        is_wide: it is likely to be scrolled: the first column stays.
    """
    if not rows:
        return ""
    kinds = [' class="n"' if i in right else "" for i in range(len(head))]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    lines = []
    for row in rows:
        cells = [text if i in raw else escape(text) for i, text in enumerate(row)]
        lines.append("".join(f"<td{k}>{c}</td>" for k, c in zip(kinds, cells, strict=True)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    kind = ' class="wide"' if is_wide else ""
    return f'<div class="scroll"><table{kind}><tr>{top}</tr>{body}</table></div>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A list of label and value; empty without rows."""
    body = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in rows)
    return f'<div class="scroll"><table class="pairs">{body}</table></div>' if body else ""
