"""Prints the table of the faults that were injected, after the tests: `make bench-faults`."""

from __future__ import annotations

import pytest

from benchmarks.harness import write
from tests.faults import test_faults as module
from tests.faults.runs import LENGTH, RANKS, SAVE, as_row, as_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table; where no fault was deselected, the result is written too."""
    rows = module.ROWS
    if not rows:
        return
    terminalreporter.write_line(as_table(rows))
    if not terminalreporter.config.option.keyword and "::" not in " ".join(
        terminalreporter.config.args
    ):
        settings = {"ranks": RANKS, "steps": LENGTH, "save_interval": SAVE}
        found = [as_row(name, expected, seen) for name, (expected, seen) in rows.items()]
        terminalreporter.write_line(f"\nwritten to {write('faults', found, settings)}")
