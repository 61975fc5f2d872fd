"""Tables of paired differences: two models on the rows that both answered.

The page of an evaluation and the comparison of runs show them. `gauntlet/paired.py` computes the
differences.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from llmfoundry.gauntlet.paired import PairedComparison
from llmfoundry.loggers.pages.page import breakable, part, table


def paired_tables(comparisons: Sequence[PairedComparison]) -> Markup:
    """Return a table for each comparison, with its notes; empty without comparisons."""
    head = ("", "difference", "baseline", "model", "rows", "gained", "lost")
    parts: list[Markup] = []
    for comparison in comparisons:
        title = Markup("<p><b>{}</b> minus {}</p>")
        parts.append(title.format(breakable(comparison.model), breakable(comparison.baseline)))
        rows = [difference.cells() for difference in comparison.scores()]
        parts.append(table(head, rows, right=range(1, len(head)), is_wide=True))
        if comparison.advice:
            parts.append(Markup('<p class="hint">{}.</p>').format(comparison.advice))
        if comparison.notes:
            parts.append(part("listed", comparison.notes))
    if any(comparison.tasks for comparison in comparisons):
        parts.append(Markup('<p class="hint">{}</p>').format(_MEANING))
    return Markup().join(parts)


_MEANING = (
    "Difference: with its 95 % interval by bootstrap over the rows that both models answered."
    " Gained: rows that only the model answered right; lost: rows that only the baseline did."
)
