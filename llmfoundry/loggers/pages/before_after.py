"""What a run changed: the evaluation before its first step beside the last.

The report and the end of a run's console show it where a run has an evaluation of batch 0
(`eval_first`), as fine-tuning runs do: what was learned, and what was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry.loggers.metrics import BATCH
from llmfoundry.loggers.pages.page import table
from llmfoundry.loggers.pages.titles import title

_OF_ROWS = "metrics/eval/"
_NOT_SHOWN = ("metrics/eval/LanguagePerplexity",)


@dataclass(frozen=True)
class Change:
    """A number before the first step and after the last.

    Attributes:
        name: in words.
        before: None: not known.
        after: None: not known.
        kind: average, category, task or measure.
    """

    name: str
    before: float | None
    after: float | None
    kind: str

    def cells(self) -> tuple[str, str, str, str]:
        """Name, before, after and the difference, as they are read."""
        if self.before is None or self.after is None:
            return self.name, self._form(self.before), self._form(self.after), ""
        if self.kind == "task":
            return (*self._both(), f"{100 * (self.after - self.before):+.1f}")
        return (*self._both(), f"{self.after - self.before:+.4f}")

    def _both(self) -> tuple[str, str, str]:
        return self.name, self._form(self.before), self._form(self.after)

    def _form(self, value: float | None) -> str:
        if value is None:
            return "n/a"
        return f"{100 * value:.1f}%" if self.kind == "task" else f"{value:.4f}"


def changes(
    evaluations: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Every number that the evaluation of batch 0 and the last one have.

    Args:
        evaluations: the gauntlet's results, oldest first.
        rows: of metrics.jsonl, oldest first.

    Returns:
        Averages, categories, tasks, then measures of validation rows; empty without an evaluation
        of batch 0 and a later one.
    """
    found: list[Change] = []
    if len(evaluations) > 1 and evaluations[0][BATCH] == 0:
        first, last = evaluations[0], evaluations[-1]
        for kind in ("averages", "categories"):
            before, after = first.get(kind) or {}, last.get(kind) or {}
            name = {"averages": "average", "categories": "category"}[kind]
            found += [Change(key, before.get(key), after[key], name) for key in after]
        found += _tasks(first, last)
    return [*found, *_measures(rows)]


def before_and_after(found: Sequence[Change]) -> str:
    """The tables of the report; empty without a change."""
    heads = {"average": "average", "measure": "validation rows", "category": "category"}
    tables = [
        table(
            (heads.get(kind, kind), "before", "after", "change"),
            [change.cells() for change in found if change.kind == kind],
            right=(1, 2, 3),
        )
        for kind in (*heads, "task")
    ]
    drawn = "".join(tables)
    return f'<div class="tables">{drawn}</div>' if drawn else ""


def console_lines(found: Sequence[Change]) -> list[tuple[str, str]]:
    """Label and text of the lines at a run's end: averages and measures; tasks by their count."""
    lines = []
    for change in found:
        if change.kind in ("average", "measure"):
            name, before, after, step = change.cells()
            lines.append((name.replace("_", " "), f"{before} → {after} ({step})"))
    return lines


def _tasks(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[Change]:
    def accuracies(result: Mapping[str, Any]) -> dict[str, float | None]:
        return {f"{t['label']}, {t['num_fewshot']}-shot": t["accuracy"] for t in result["tasks"]}

    before = accuracies(first)
    for name, accuracy in accuracies(last).items():
        yield Change(name, before.get(name), accuracy, "task")


def _measures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    names = dict.fromkeys(n for row in rows for n in row if n.startswith(_OF_ROWS))
    for name in names:
        logged = [(row[BATCH], row[name]) for row in rows if name in row]
        (start, before), (end, after) = logged[0], logged[-1]
        if start == 0 < end and name not in _NOT_SHOWN:
            yield Change(title(name).text, before, after, "measure")
