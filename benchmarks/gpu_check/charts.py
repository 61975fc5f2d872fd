"""Shares of one as inline SVG: a small bar of a table's cell, and the chart of all runs."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from benchmarks.gpu_check.results import Results
from benchmarks.gpu_check.verdict import TARGET
from llmfoundry.loggers.console import percent
from llmfoundry.loggers.pages.frame import WIDTH, Axis, Frame, figure, svg, text

BAR, NAME, GAP = 13, 17, 6  # heights: of a bar, of the name above it, of the room below
TOP, BOTTOM, LEFT, RIGHT = 6, 24, 20, 56
WIDEST = 680  # pixels of the chart: its words are as large as the page's


def share_bar(share: float, target: float | None) -> str:
    """A number with a bar below it, and a stroke at the target."""
    at = f"{120 * min(max(share, 0.0), 1.0):.1f}"
    shown = percent(share)
    stroke = ""
    if target is not None:
        x = f"{120 * target:.1f}"
        stroke = f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="12"/>'
    return (
        f'{shown}<svg class="bar" viewBox="0 0 120 12"><rect class="track" width="120" height="12"'
        f' rx="2"/><rect width="{at}" height="12" rx="2" style="fill:var(--s0)"/>{stroke}'
        f"<title>{shown}</title></svg>"
    )


def share_chart(results: Results) -> str:
    """A <figure> of every timed run's share of the measured products; empty without one."""
    runs = [(n, r["of products"]) for n, r in results.step("mfu").rows() if "of products" in r]
    if not runs:
        return ""
    row = NAME + BAR + GAP
    frame = Frame(Axis(0.0, 1.0), TOP + len(runs) * row, LEFT, RIGHT, TOP)
    parts = [*_grid(frame)]
    for number, (name, share) in enumerate(runs):
        parts += _bar(frame, TOP + number * row, name, share)
    drawn = svg("Training speed", parts, height=frame.base + BOTTOM)
    hint = f"stroke: the target, {percent(TARGET)}"
    chart = figure("Share of the measured rate of matrix products", drawn, hints=[("hint", hint)])
    return f'<div style="max-width:{WIDEST}px">{chart}</div><p></p>'


def _grid(frame: Frame) -> Iterator[str]:
    for value in frame.x_axis.ticks():
        yield frame.vertical("grid" if value else "base", value, frame.top, frame.base)
    yield frame.vertical("mark", TARGET, frame.top, frame.base, dashed=True)
    yield from frame.x_labels(percent)


def _bar(frame: Frame, top: float, name: str, share: float) -> Iterator[str]:
    width = max(1.0, min(share, 1.0) * frame.width)
    yield text(frame.left + 2, top + NAME - 5, escape(name), kind="axis name")
    yield (
        f'<rect x="{frame.left:.1f}" y="{top + NAME:.1f}" width="{width:.1f}" height="{BAR}" rx="2"'
        f' style="fill:var(--s0)"><title>{escape(name)}: {percent(share)}</title></rect>'
    )
    yield text(WIDTH - 4, top + NAME + BAR - 3, percent(share), anchor="end")
