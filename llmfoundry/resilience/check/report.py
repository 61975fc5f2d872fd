"""A check's report: check.json for programs, a table for people; `page` has it as check.html.

check.json has a version; `operate`'s other parts and schedulers' hooks read `level` and
`bad_nodes`, and need nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry.errors import RunFailure, one_line
from llmfoundry.files import write_json, write_whole
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
from llmfoundry.resilience.check.page import page_of
from llmfoundry.terminal import columns

FORMAT, VERSION = "llmfoundry-check", 1
JSON, PAGE = "check.json", "check.html"


def write(report: Report, folder: Path) -> Path:
    """Write check.json and check.html to a folder; the page's path.

    Raises:
        RunFailure: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON, as_json(report))
        write_whole(folder / PAGE, page_of(report))
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


def lines(report: Report, page: Path | None) -> Iterator[str]:
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
