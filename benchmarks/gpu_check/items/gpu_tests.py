"""One file of the tests, those that are marked `gpu`: counts and reasons, a row a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu_check.items.measure import Here, Row
from llmfoundry.recipe.front.paths import ROOT

LONGEST = 400  # characters of a reason


class Listener:
    """A plugin of pytest that hands on what it reports, test by test."""

    def __init__(self, keep: Callable[[Row], None]) -> None:
        self._keep_row, self.kept = keep, 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's phase: what it came to, at its call, or where it was skipped or broke before."""
        if report.when == "call" or report.outcome != "passed":
            found = dict(report.user_properties)  # what a test records
            self._keep(report.nodeid, report.outcome, report.longrepr, report.duration, found)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected."""
        if report.failed:
            self._keep(report.nodeid, "failed", report.longrepr, 0.0, {})

    def _keep(self, name: str, outcome: str, reason: Any, seconds: float, found: Row) -> None:
        row: Row = {"test": name.rpartition("::")[2] or name, "outcome": outcome, "s": seconds}
        row |= found
        if outcome == "skipped" and isinstance(reason, tuple):
            row["reason"] = str(reason[-1])[:LONGEST]
        elif outcome == "failed":
            row["wrong"] = str(reason)[-LONGEST:].strip()
        self._keep_row(row)
        self.kept += 1


def tests(here: Here, *, file: str, keyword: str = "") -> Iterator[Row]:
    """Run them, of which a name has the keyword."""
    import pytest

    listener = Listener(here.keep)
    os.chdir(ROOT)
    status = pytest.main(
        ["-m", "gpu", "-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-k", keyword, file],
        plugins=[listener],
    )
    if status not in (0, 1) and not listener.kept:
        yield {"test": file, "outcome": "failed", "wrong": f"pytest ended with {status!r}"}
