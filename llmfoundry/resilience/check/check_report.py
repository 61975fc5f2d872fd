"""Report of a check: check.json for programs, a table for the terminal, check.html with a heat map.

`cli/commands/check.py` calls `write_check` and `check_lines`. check.json has a version number. The
supervisor and hooks of schedulers only read `level` and `bad_nodes`. On the heat map a slow pair is
one cell, a slow node is a cross, and a slow switch is a block.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry.errors import RunFailure, one_line
from llmfoundry.files import atomic_write, write_json
from llmfoundry.loggers.console import duration
from llmfoundry.loggers.pages.page import HeatMap, Tile, page, paths, table, together
from llmfoundry.recipe.paths import show
from llmfoundry.resilience.check.findings import (
    BAD,
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
SHOWN = {BAD: "bad", NOTICE: "warning", UNCHECKED: "not checked", SOUND: "passed"}
"""Names of the levels in the table and on the page, in their order."""
MOST = 3  # passed or unchecked findings of one kind that the table lists individually
MOST_ROWS = 100  # of a table on the page
MOST_LABELS = 16  # of the map
MOST_TITLED = 64  # units of the largest map whose cells have titles
SHADES = 6  # number of colors for slow pairs


def write_check(report: Report, folder: Path) -> Path:
    """Write check.json and check.html to a folder, and return the path of the page.

    Raises:
        RunFailure: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON, as_json(report))
        atomic_write(folder / PAGE, check_page(report))
    except OSError as error:
        raise RunFailure(f"{folder}: the report cannot be written: {one_line(error)}") from error
    return folder / PAGE


def as_json(report: Report) -> dict[str, Any]:
    """Return the content of check.json."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(report.seconds, 1),
        "level": report.level,
        "bad_nodes": report.bad_nodes,
        "nodes": report.nodes,
        "findings": [asdict(finding) for finding in report.findings],
        "speeds": report.speeds,
        "units": report.units,
        "pairs": [
            {"bytes": n_bytes, "pair": [a, b], "gb_s": rate}
            for n_bytes, rows in report.pairs.items()
            for a, b, rate in rows
        ],
    }


def check_lines(report: Report, page: Path | None) -> Iterator[str]:
    """Yield the table (worst first), the actions, the verdict, and the paths of the files."""
    rows = [[SHOWN[f.level], f.check, f.where, f.why] for f in collected(report.findings)]
    yield from columns(["", "check", "where", "what"], rows, left=range(4))
    to_do = [f for f in report.findings if f.level == BAD and f.action]
    if to_do:
        yield ""
        yield from dict.fromkeys(f"{finding.where}: {finding.action}" for finding in to_do)
    yield ""
    yield summary(report)
    if page is not None:
        yield f"{show(page)} has all of it, {show(page.with_name(JSON))} for programs"


def summary(report: Report) -> str:
    """Return the verdict and the bad machines in one line."""
    count = Counter(finding.level for finding in report.findings)
    if report.level == BAD:
        nodes = ", ".join(report.bad_nodes) or "none, as no node alone is to blame"
        return f"bad: {count[BAD]} of what was checked on {report.size}; to take out: {nodes}"
    words = {NOTICE: "with a warning", UNCHECKED: "not checked"}
    rest = [f"{count[level]} {shown}" for level, shown in words.items() if count[level]]
    return f"nothing is bad on {report.size}" + (f" ({', '.join(rest)})" if rest else "")


def collected(findings: Sequence[Finding]) -> list[Finding]:
    """Merge many equal findings into one, so that a table does not list 3,072 passed GPUs."""
    shown, counts = list[Finding](), Counter[tuple[str, str, str]]()
    for finding in findings:
        key = finding.why.split(":")[0] if finding.check == "paths" else ""
        kind = (finding.level, finding.check, key)
        counts[kind] += 1
        if finding.level in (BAD, NOTICE) or counts[kind] <= MOST:
            shown.append(finding)
    for (level, check, key), times in counts.items():
        if level in (SOUND, UNCHECKED) and times > MOST:
            shown.append(Finding(check, level, f"{times - MOST} more", key))
    return sorted(shown, key=lambda finding: -finding.severity)


def check_page(report: Report) -> str:
    """Return check.html, a self-contained page."""
    # findings by level, worst first
    sections = list[tuple[str, str]]()
    for level, label in SHOWN.items():
        findings = [finding for finding in report.findings if finding.level == level]
        if findings:
            title = "Warnings" if level == NOTICE else label.capitalize()
            sections.append((title, findings_table(findings)))

    # heat maps after the bad findings, devices at the end
    maps = (pair_map(report.units, size, rows) for size, rows in sorted(report.pairs.items()))
    charts = together(maps, "charts")
    if charts:
        sections.insert(1 if report.level == BAD else 0, ("Pairs", charts))
    if report.speeds:
        sections.append(("Devices", speeds_table(report.speeds)))
    return page(
        title="Health check",
        status="failed: bad" if report.level == BAD else "finished: nothing is bad",
        reached=f"{report.size}, {duration(report.seconds)}",
        tiles=list(_tiles(report)),
        sections=sections,
    )


def _tiles(report: Report) -> Iterator[Tile]:
    count = Counter(finding.level for finding in report.findings)
    yield Tile("bad", str(count[BAD]), ", ".join(report.bad_nodes[:4]))
    for level, label in ((NOTICE, "warnings"), (UNCHECKED, "not checked"), (SOUND, "passed")):
        yield Tile(label, str(count[level]))
    reached = [row["tflops"] for row in report.speeds if not row["error"]]
    if reached:
        extremes = f"{min(reached):.4g} to {max(reached):.4g}"
        yield Tile("TFLOP/s, median", f"{statistics.median(reached):.4g}", extremes)
    n_bytes, rows = max(report.pairs.items(), default=(0, []))
    if rows:
        median = statistics.median(rate for *_, rate in rows)
        yield Tile(f"GB/s of pairs, {in_units(n_bytes)}", f"{median:.3g}", "median")


def findings_table(findings: Sequence[Finding]) -> str:
    """Return the first hundred findings as a table."""
    rows = [[f.check, f.where, f.why, f.action] for f in findings[:MOST_ROWS]]
    if len(findings) > MOST_ROWS:
        rows.append(["", f"{len(findings) - MOST_ROWS} more", "see check.json", ""])
    return table(("check", "where", "what was found", "what to do"), rows)


def speeds_table(speeds: Sequence[Mapping[str, Any]]) -> str:
    """Return the speeds of devices as a table, slowest first."""
    head = ("device", "model", "TFLOP/s", "GB/s copied", "wrong repeats")
    rows = [
        [
            row["where"],
            row["model"],
            row["error"] or f"{row['tflops']:.4g}",
            "" if row["error"] else f"{row['copy_gb_s']:.4g}",
            str(row["mismatches"]),
        ]
        for row in sorted(speeds, key=lambda row: row["tflops"])[:MOST_ROWS]
    ]
    return table(head, rows, right=(2, 3, 4), is_wide=True)


def pair_map(units: Sequence[str], n_bytes: int, rows: Sequence[tuple[int, int, float]]) -> str:
    """Return a <figure> of all pairs at one payload: blank is normal, orange slow, red silent.

    Colors compare a rate with the upper quartile, because behind a bad switch the median itself is
    slow. The color is full at a quarter of this reference.
    """
    # symmetric rates, and the reference
    rates = {(a, b): rate for a, b, rate in rows} | {(b, a): rate for a, b, rate in rows}
    known = sorted(rate for *_, rate in rows if rate > 0)
    reference = known[3 * len(known) // 4] if known else 0.0

    # cells by color; the diagonal is a line
    n = len(units)
    cells = {("line", 1.0): [(unit, unit) for unit in range(n)]}
    for (a, b), rate in rates.items():
        level = shade(rate, reference)
        if rate <= 0 or level:
            color = ("bad", 1.0) if rate <= 0 else ("s1", level / SHADES)
            cells.setdefault(color, []).append((b, a))

    # titles of cells, and labels of the axes at regular distances
    titles = [(b, a, 1, 1, _words(units, a, b, rate, reference)) for (a, b), rate in rates.items()]
    labels = [(100 * (i + 0.5) / n, i) for i in range(0, n, -(-n // MOST_LABELS))]
    return HeatMap(
        f"Pairs at {in_units(n_bytes)}",
        f"orange: slower than the faster quarter ({reference:.3g} GB/s); red: no answer",
        n,
        n,
        paths(cells),
        [(at, _short(units[i])) for at, i in labels],
        [(at, str(i)) for at, i in labels],
        titles if n <= MOST_TITLED else (),
        is_square=True,
    ).drawn()


def shade(rate: float, reference: float) -> int:
    """Return the color of a rate: 0 at the reference, up to SHADES at a quarter of it or less."""
    if rate >= reference or reference <= 0:
        return 0
    return min(SHADES, round((1 - rate / reference) / 0.75 * SHADES))


def _words(units: Sequence[str], a: int, b: int, rate: float, reference: float) -> str:
    share = f" ({rate / reference:.0%})" if reference else ""
    return f"{units[a]} and {units[b]}: {rate:.3g} GB/s{share}"


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"…{name[-13:]}"
