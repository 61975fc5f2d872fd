"""A check's report: check.json for programs, a table for people, check.html with a map of pairs.

check.json has a version; other parts of `resilience` and schedulers' hooks read `level` and
`bad_nodes`, and need nothing else. On the map a slow pair is one cell, a slow node a cross, and a
slow switch a block, so that what is to blame is seen before it is read.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from llmfoundry.errors import RunFailure, one_line
from llmfoundry.files import write_json, write_whole
from llmfoundry.loggers.console import duration
from llmfoundry.loggers.pages.frame import WIDTH, figure, svg, text
from llmfoundry.loggers.pages.page import Tile, page, table
from llmfoundry.recipe.front.paths import show
from llmfoundry.resilience.check.findings import (
    BAD,
    LEVELS,
    NOTICE,
    SOUND,
    UNCHECKED,
    Finding,
    Report,
)
from llmfoundry.resilience.check.links import in_units
from llmfoundry.terminal import columns

FORMAT, VERSION = "llmfoundry-check", 1
JSON, PAGE = "check.json", "check.html"


def write_report(report: Report, folder: Path) -> Path:
    """Write check.json and check.html to a folder; the page's path.

    Raises:
        RunFailure: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON, as_json(report))
        write_whole(folder / PAGE, report_page(report))
    except OSError as error:
        raise RunFailure(f"{folder}: the report cannot be written: {one_line(error)}") from error
    return folder / PAGE


def as_json(report: Report) -> dict[str, Any]:
    """What check.json holds."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(report.seconds, 1),
        "level": report.level,
        "bad_nodes": report.bad_nodes,
        "nodes": report.nodes,
        "findings": [finding.as_json() for finding in report.findings],
        "speeds": report.speeds,
        "units": report.units,
        "pairs": [
            {"bytes": n_bytes, "pair": [a, b], "gb_s": rate}
            for n_bytes, rows in report.pairs.items()
            for a, b, rate in rows
        ],
    }


def report_lines(report: Report, page: Path | None) -> Iterator[str]:
    """The table: what is bad, then what is to be noticed, then what is sound or unchecked."""
    rows = [[f.level, f.check, f.where, f.why] for f in collected(report.findings)]
    yield from columns(["", "check", "where", "what"], rows, left=range(4))
    todo = [f for f in report.findings if f.level == BAD and f.action]
    if todo:
        yield ""
        yield from dict.fromkeys(f"{finding.where}: {finding.action}" for finding in todo)
    yield ""
    yield summary(report)
    if page is not None:
        yield f"{show(page)} has all of it, {show(page.with_name(JSON))} for programs"


def summary(report: Report) -> str:
    """One line: the verdict, and which machines it names."""
    count = Counter(finding.level for finding in report.findings)
    nodes = report.size
    if report.level == BAD:
        named = ", ".join(report.bad_nodes) or "none, as no node alone is to blame"
        return f"bad: {count[BAD]} of what was looked at on {nodes}; to take out: {named}"
    rest = [f"{count[level]} {word}" for level, word in _WORDS.items() if count[level]]
    return f"nothing is bad on {nodes}" + (f" ({', '.join(rest)})" if rest else "")


_WORDS = {NOTICE: "to notice", UNCHECKED: "not checked"}
MOST = 3  # sound or unchecked findings of one check that are shown one by one


def collected(findings: list[Finding]) -> list[Finding]:
    """Many like findings as one: nobody reads 3,072 lines of sound GPUs."""
    kept, seen = list[Finding](), Counter[tuple[str, str, str]]()
    for finding in findings:
        key = (finding.level, finding.check, _kind(finding))
        seen[key] += 1
        if finding.level in (BAD, NOTICE) or seen[key] <= MOST:
            kept.append(finding)
    for (level, check, kind), times in seen.items():
        if level in (SOUND, UNCHECKED) and times > MOST:
            kept.append(Finding(check, level, f"{times - MOST} more", kind))
    return sorted(kept, key=lambda finding: -LEVELS.index(finding.level))


def _kind(finding: Finding) -> str:
    """What like findings share: of paths the key, of the rest the words before the first number."""
    return finding.why.split(":")[0] if finding.check == "paths" else ""


SHADES = 6  # shades of slow
LEFT, TOP, RIGHT = 96.0, 8.0, 8.0  # of the picture's edges to its cells
MOST_LABELS = 16
_HEAD = ("", "check", "where", "what was found", "what to do")
_STATUS = {BAD: "failed", NOTICE: "finished", UNCHECKED: "finished", SOUND: "finished"}


def report_page(report: Report) -> str:
    """The document."""
    parts = {level: [f for f in report.findings if f.level == level] for level in _TITLES}
    sections = [(_TITLES[level], findings_table(found)) for level, found in parts.items() if found]
    maps = "".join(
        pair_map(report.units, n_bytes, rows) for n_bytes, rows in sorted(report.pairs.items())
    )
    places = 1 if parts[BAD] else 0
    if maps:
        sections.insert(places, ("Pairs", f'<div class="charts">{maps}</div>'))
    if report.speeds:
        sections.append(("Devices", speeds_table(report)))
    words = "bad" if report.level == BAD else "nothing is bad"
    return page(
        title="Health check",
        status=f"{_STATUS[report.level]}: {words}",
        reached=f"{report.size}, {duration(report.seconds)}",
        tiles=list(_tiles(report)),
        sections=sections,
    )


_TITLES = {
    BAD: "Bad",
    NOTICE: "To be noticed",
    UNCHECKED: "Not checked",
    SOUND: "Sound",
}


def _tiles(report: Report) -> Iterator[Tile]:
    count = {level: sum(f.level == level for f in report.findings) for level in _TITLES}
    yield Tile("bad", str(count[BAD]), ", ".join(report.bad_nodes[:4]))
    yield Tile("to be noticed", str(count[NOTICE]))
    yield Tile("not checked", str(count[UNCHECKED]))
    yield Tile("sound", str(count[SOUND]))
    reached = [row["tflops"] for row in report.speeds if not row["error"]]
    if reached:
        low, high = min(reached), max(reached)
        yield Tile(
            "TFLOP/s, median", f"{statistics.median(reached):.4g}", f"{low:.4g} to {high:.4g}"
        )
    for n_bytes, rows in sorted(report.pairs.items(), reverse=True)[:1]:
        rates = [rate for _, _, rate in rows]
        if rates:
            yield Tile(
                f"GB/s of pairs, {in_units(n_bytes)}", f"{statistics.median(rates):.3g}", "median"
            )


def findings_table(findings: Sequence[Finding]) -> str:
    """Findings as a table; of many sound ones the first hundred."""
    rows = [[f.level, f.check, f.where, f.why, f.action] for f in findings[:MOST_ROWS]]
    left = len(findings) - len(rows)
    rows += [["", "", f"{left} more", "see check.json", ""]] if left else []
    return table(_HEAD[1:], [row[1:] for row in rows])


MOST_ROWS = 100


def speeds_table(report: Report) -> str:
    """What each device reached, the slowest first."""
    rows = sorted(report.speeds, key=lambda row: row["tflops"])
    shown = [
        [
            row["where"],
            row["model"],
            row["error"] or f"{row['tflops']:.4g}",
            "" if row["error"] else f"{row['copy_gb_s']:.4g}",
            str(row["mismatches"]),
        ]
        for row in rows[:MOST_ROWS]
    ]
    head = ("device", "model", "TFLOP/s", "GB/s copied", "wrong repeats")
    return table(head, shown, right=(2, 3, 4), is_wide=True)


def pair_map(units: Sequence[str], n_bytes: int, rows: Sequence[tuple[int, int, float]]) -> str:
    """A <figure> of all pairs at one payload; blank is as fast as most, orange slower, red silent.

    Shades are of the rate beside the fastest quarter's: full colour at a quarter of that.
    """
    rates = {(a, b): rate for a, b, rate in rows}
    rates |= {(b, a): rate for a, b, rate in rows}
    reference = _reference([rate for _, _, rate in rows])
    n = len(units)
    side = (WIDTH - LEFT - RIGHT) / n
    parts = [*_cells(rates, reference, n, side), *_labels(units, side)]
    parts += _titles(units, rates, reference, side) if n <= 64 else []
    height = TOP + side * n + 24
    drawn = svg("bus bandwidth of pairs", parts, height=height)
    hint = f"orange: slower than the faster quarter ({reference:.3g} GB/s); red: no answer"
    return figure(f"Pairs at {in_units(n_bytes)}", drawn, hints=[("hint", hint)])


def _reference(rates: Sequence[float]) -> float:
    """What the faster quarter reaches: the median of all is slow where a switch is."""
    known = sorted(rate for rate in rates if rate > 0)
    return known[3 * len(known) // 4] if known else 0.0


def shade(rate: float, reference: float) -> int:
    """0 as fast as most, up to LEVELS at a quarter of that or less."""
    if rate >= reference or reference <= 0:
        return 0
    return min(SHADES, round((1 - rate / reference) / 0.75 * SHADES))


def _cells(
    rates: Mapping[tuple[int, int], float], reference: float, n: int, side: float
) -> Iterator[str]:
    """One path for each shade, so that a map of many cells stays small."""
    shapes: dict[int, list[str]] = {}
    for (a, b), rate in rates.items():
        x, y = LEFT + b * side, TOP + a * side
        level = -1 if rate <= 0 else shade(rate, reference)
        shapes.setdefault(level, []).append(f"M{x:.1f} {y:.1f}h{side:.1f}v{side:.1f}h{-side:.1f}z")
    own = "".join(
        f"M{LEFT + u * side:.1f} {TOP + u * side:.1f}h{side:.1f}v{side:.1f}h{-side:.1f}z"
        for u in range(n)
    )
    yield f'<path fill="var(--line)" d="{own}"/>'
    for level, found in sorted(shapes.items()):
        colour = "var(--bad)" if level < 0 else "var(--s1)"
        opacity = 1.0 if level < 0 else level / SHADES
        if level:
            yield f'<path fill="{colour}" fill-opacity="{opacity:.2f}" d="{"".join(found)}"/>'
    edge = side * n
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{edge:.1f}" height="{edge:.1f}" fill="none"'
        ' class="base"/>'
    )


def _labels(units: Sequence[str], side: float) -> Iterator[str]:
    every = -(-len(units) // MOST_LABELS)
    for number in range(0, len(units), every):
        middle = (number + 0.5) * side
        name = units[number]
        short = name if len(name) <= 14 else f"…{name[-13:]}"
        yield text(LEFT - 6, TOP + middle + 3.5, escape(short), anchor="end")
        below = TOP + side * len(units) + 16
        yield text(LEFT + middle, below, str(number), anchor="middle")


def _titles(
    units: Sequence[str], rates: Mapping[tuple[int, int], float], reference: float, side: float
) -> Iterator[str]:
    """Invisible cells that say who they are."""
    for (a, b), rate in rates.items():
        share = f" ({rate / reference:.0%})" if reference else ""
        words = f"{units[a]} and {units[b]}: {rate:.3g} GB/s{share}"
        yield (
            f'<rect class="hit" x="{LEFT + b * side:.1f}" y="{TOP + a * side:.1f}"'
            f' width="{side:.1f}" height="{side:.1f}"><title>{escape(words)}</title></rect>'
        )
