"""One page with the gauntlet's results of one model, or of several side by side.

`scripts/eval.py` writes it from what GauntletResult.to_json gives, so that results.json of old runs
can be put beside a new one's. The page needs nothing but itself. Its one rule: numbers of different
questions are never shown as if they compared; where the rows, their count or the way of asking
differ between models, the page says so once, and marks the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import duration, number, short_count
from llmfoundry.loggers.pages.page import Tile, breakable, page, part, table, together
from llmfoundry.loggers.pages.score_tables import (
    ShownScore,
    TaskDots,
    accuracy_bar,
    bars,
    dots,
    in_parts,
    percents,
    whiskers_of,
    written,
)

Result = Mapping[str, Any]  # GauntletResult.to_json()
Results = Sequence[tuple[str, Result]]  # the model's name, its result

Links = Mapping[str, Path]  # what a page is, where it is

_APART = "≠"
_COMPARED = {
    "rows_hash": "rows",
    "n": "numbers of questions",
    "mode": "prompts",
    "metric": "ways of judging",
}
_SAME: dict[Any, str] = {"harness": "native"}  # the same texts
_COUNTED = {
    "ties": "tie",
    "dropped": "dropped example",
    "truncated": "truncated question",
    "refused": "refused question",
    "missing": "missing row",
}


def write_eval_page(
    path: Path, results: Results, *, title: str = "Evaluation", links: Sequence[Links] = ()
) -> None:
    """Write the page, all at once: a reader never sees half of one.

    Args:
        path: where to.
        results: see `eval_page`.
        title: the page's.
        links: of every model its pages, in words; unset: none.
    """
    relative = [
        {words: quote(os.path.relpath(to, path.parent)) for words, to in of_model.items()}
        for of_model in links
    ]
    atomic_write(path, eval_page(results, title=title, links=relative))


def eval_page(
    results: Results, *, title: str = "Evaluation", links: Sequence[Mapping[str, str]] = ()
) -> str:
    """The page as HTML: models, averages, categories, tasks, problems, cost, and every metric.

    Args:
        results: at least one model; names may repeat.
        title: the page's.
        links: of every model addresses, by what they lead to; unset: none.
    """
    assert results
    whole = all(value is not None for _, result in results for value in _all_scores(result))
    whole = whole and all(t["accuracy"] is not None for _, r in results for t in r["tasks"])
    names = [name for name, _ in results]
    n, n_tasks = len(names), len(_tasks(results))
    sections = [
        ("Models" if n > 1 else "Run", models_table(results, links)),
        ("Not comparable", not_comparable(results)),
        (_scores_title(results), score_charts(results) + score_table(results)),
        ("Tasks", task_table(results)),
        ("Problems", problem_list(results)),
        ("Prompt format", ways(results)),
        ("Cost", cost_table(results)),
        ("Every metric", metric_tables(results)),
    ]
    return page(
        title=f"{title}: {names[0]}" if n == 1 else title,
        status="finished" if whole else "not complete",
        reached=f"{_count(n, 'model')}, {_count(n_tasks, 'task')}",
        tiles=average_tiles(results) if n == 1 else [],
        sections=sections,
    )


def _scores_title(results: Results) -> str:
    """The heading of what there is."""
    words = [kind for kind in ("averages", "categories") if _names(results, kind)]
    return " and ".join(words).capitalize() or "Accuracy"


def average_tiles(results: Results) -> list[Tile]:
    """The averages of one model."""
    found = []
    for _, result in results:
        for average, value in (result.get("averages") or {}).items():
            found.append(Tile(average, *in_parts(written(_estimate(result, average, value)))))
    return found


def models_table(results: Results, links: Sequence[Mapping[str, str]]) -> Markup:
    """A row for each model: its number and color in the pictures, averages, and its pages."""
    averages = _names(results, "averages")
    columns = _scores(results, "averages", averages)
    rows = []
    for i, (name, _) in enumerate(results):
        to = links[i].items() if links else ()
        anchor = Markup('<a href="{}">{}</a>')
        pages = Markup(" · ").join(anchor.format(at, words) for words, at in to)
        label = Markup('{}<b>{}</b> {} <span class="hint">{}</span>')
        first = label.format(part("swatch", i), i + 1, breakable(name), pages)
        rows.append((first if len(results) > 1 else pages, *map(written, columns[i])))
    if len(results) == 1:
        return Markup("<p>{}</p>").format(rows[0][0]) if rows[0][0] else Markup()
    head = ("model", *averages)
    return table(head, rows, right=range(1, len(head)))


def not_comparable(results: Results) -> Markup:
    """Said once for each reason, with the tasks that it concerns."""
    reasons: dict[str, list[str]] = {}
    asked = _tasks(results)
    for (label, shots), entries in asked.items():
        if differing := " and ".join(_differing(entries)):
            reasons.setdefault(differing, []).append(f"{label}/{shots}-shot")
    lines = []
    for words, tasks in reasons.items():
        which = "all tasks" if len(tasks) == len(asked) else _count(len(tasks), "task")
        lines.append(f"{words} differ between the models in {which}: {', '.join(tasks)}")
    if not lines:
        return Markup()
    words = "Neither these tasks nor what is made of them compares"
    return Markup(f"<p>{words}; {_APART} marks them below.</p>") + part("listed", lines)


def score_charts(results: Results) -> Markup:
    """Averages and categories as bars, tasks as dots beside chance."""
    models = [name for name, _ in results]
    averages, categories = _names(results, "averages"), _names(results, "categories")
    of_categories = _scores(results, "categories", categories)
    of_averages = _scores(results, "averages", averages)
    both = [[*a, *c] for a, c in zip(of_averages, of_categories, strict=True)]
    tasks = []
    for (label, shots), entries in _tasks(results).items():
        first = next(entry for entry in entries if entry is not None)
        accuracies = [_accuracy_of(e) if e else ShownScore(None) for e in entries]
        name = f"{label}, {shots}-shot"
        tasks.append(TaskDots(name, first["chance"], first["majority"], accuracies))
    drawn = [
        bars("Averages and categories", [*averages, *categories], models, both),
        dots("Accuracy in each task", tasks, models),
    ]
    return together(drawn, "charts apart")


def score_table(results: Results) -> Markup:
    """Averages, then categories: a row each, a column for each model."""
    rows = []
    asked = _tasks(results).items()
    apart = {f"{task}/{shots}-shot" for (task, shots), e in asked if any(_differing(e))}
    for key in ("averages", "categories"):
        names = _names(results, key)
        columns = _scores(results, key, names)
        for i, name in enumerate(names):
            members = {task for _, result in results for task in _members(result, name)}
            marked = _marked(name, apart=bool(members & apart))
            rows.append((marked, *(written(column[i]) for column in columns)))
    head = ("", *_heads(results))
    listed = table(head, rows, right=range(1, len(head)), is_wide=True)
    return Markup("<p></p>") + listed if rows else Markup()


def task_table(results: Results) -> Markup:
    """A row for each task with its shots, a column for each model: first, as phones show few."""
    head = ("task", "shots", *_heads(results), "n", "chance", "majority")
    rows = []
    for (label, shots), entries in _tasks(results).items():
        first = next(entry for entry in entries if entry is not None)
        cells = [_accuracy(entry, model) for model, entry in enumerate(entries)]
        baselines = (f"{100 * first['chance']:.1f}%", f"{100 * first['majority']:.1f}%")
        marked = _marked(label, apart=any(_differing(entries)))
        rows.append((marked, str(shots), *cells, _asked(first), *baselines))
    estimates = [_accuracy_of(e) for found in _tasks(results).values() for e in found if e]
    hint = f"Lines: chance (solid), majority class (dashed); whiskers: {whiskers_of(estimates)}."
    listed = table(head, rows, right=(1, *range(len(head) - 3, len(head))), is_wide=True)
    return listed + Markup(f'<p class="hint">{hint}</p>') if rows else Markup()


def problem_list(results: Results) -> Markup:
    """What a reader must know, model by model."""
    parts = []
    for name, result in results:
        if problems := result.get("problems"):
            parts += [Markup("<p>{}</p>").format(name)] if len(results) > 1 else []
            parts.append(part("listed", problems))
    return Markup().join(parts)


def ways(results: Results) -> Markup:
    """A row for each model that says how questions became its tokens."""
    rows = [(name, result["asked"]) for name, result in results if result.get("asked")]
    if len(results) == 1:  # which the title names
        return Markup("<p>{}</p>").format(rows[0][1]) if rows else Markup()
    return table(("", "prompts and special tokens"), rows)


def cost_table(results: Results) -> Markup:
    """Tokens and time of each model, where they were measured."""
    rows = []
    for name, result in results:
        cost = result.get("cost")
        if cost:
            computed, unshared = cost["tokens_computed"], cost["tokens_unshared"]
            unit = cost.get("unit", "tokens")
            ratio = f"{unshared / computed:.2f}" if computed and unit == "tokens" else "n/a"
            seconds = duration(cost["seconds"])
            known = short_count(computed) if computed else "not reported"
            shown = short_count(unshared) + f" {unit}" * (unit != "tokens")
            rows.append((name, known, shown, ratio, seconds))
    head = ("model", "tokens computed", "tokens unshared", "unshared over computed", "time")
    if len(results) == 1:  # which the title names
        return table(head[1:], [row[1:] for row in rows], right=range(4))
    return table(head, rows, right=range(1, 5))


def metric_tables(results: Results) -> Markup:
    """Every metric of every task, and of the categories of its rows, folded."""
    parts = []
    head = ("", "metric", *(name for name, _ in results))
    for (label, shots), entries in _tasks(results).items():
        groups = {"": [entry or {} for entry in entries]}
        for kind in dict.fromkeys(p for e in groups[""] for p in e.get("by_category", {})):
            groups[kind] = [(e or {}).get("by_category", {}).get(kind, {}) for e in entries]
        rows = []
        for kind, owners in groups.items():
            for metric in dict.fromkeys(m for owner in owners for m in owner.get("metrics", {})):
                rows.append((kind, metric, *(_metric(owner, metric) for owner in owners)))
        if rows:
            body = table(head, rows, right=range(2, len(head)))
            parts.append(part("folded", f"{label}/{shots}-shot", body))
    return Markup().join(parts)


def _tasks(results: Results) -> dict[tuple[str, int], list[Result | None]]:
    """For each task with its shots the entry of every model; None where it has none."""
    found: dict[tuple[str, int], list[Result | None]] = {}
    for model, (_, result) in enumerate(results):
        for task in result["tasks"]:
            entries = found.setdefault((task["label"], task["num_fewshot"]), [None] * len(results))
            entries[model] = task
    return found


def _names(results: Results, key: str) -> list[str]:
    return list(dict.fromkeys(name for _, result in results for name in result.get(key) or {}))


def _scores(results: Results, key: str, names: Sequence[str]) -> list[list[ShownScore]]:
    """Of every model the score of every name; (None, None) where it has none."""
    return [
        [_estimate(result, name, (result.get(key) or {}).get(name)) for name in names]
        for _, result in results
    ]


def _members(result: Result, name: str) -> list[str]:
    """Names of the tasks behind a category or an average; none in results of older versions."""
    return (result.get("members") or {}).get(name, [])


def _estimate(result: Result, name: str, value: float | None) -> ShownScore:
    """A category's or an average's; results of older versions have no intervals."""
    known = [(result.get(key) or {}).get(name) for key in ("stderrs", "intervals")]
    return ShownScore(value, *known)


def _accuracy_of(entry: Result) -> ShownScore:
    """A task's."""
    return ShownScore(entry["accuracy"], entry["stderr"], entry.get("interval"))


def _all_scores(result: Result) -> list[float | None]:
    return [*(result.get("categories") or {}).values(), *(result.get("averages") or {}).values()]


def _accuracy(entry: Result | None, model: int) -> str:
    """A model's cell, perhaps HTML."""
    if entry is None:
        return "not asked"
    notes = ", ".join(_notes(entry))
    hint = Markup('<span class="hint">{}</span>').format(notes) if notes else Markup()
    accuracy = _accuracy_of(entry)
    if accuracy.value is None:
        return Markup("n/a ") + hint
    drawn = accuracy_bar(accuracy, chance=entry["chance"], majority=entry["majority"], model=model)
    return percents(accuracy) + drawn + hint


def _asked(entry: Result) -> str:
    total = entry.get("rows_total") or entry["n"]
    return str(entry["n"]) if entry["n"] == total else f"{entry['n']} of {total}"


def _differing(entries: Sequence[Result | None]) -> Iterator[str]:
    """Why models' accuracies on a task do not compare."""
    present = [entry for entry in entries if entry is not None]
    for key, words in _COMPARED.items():
        found = {entry.get(key) for entry in present} - {None, ""}
        if len({_SAME.get(value, value) for value in found}) > 1:
            yield words


def _notes(entry: Result) -> Iterator[str]:
    """What to know of one model's accuracy on a task."""
    for key, words in _COUNTED.items():
        if n := entry.get(key):
            yield f"{n} {_plural(words, n)}"
    if entry["metric"].startswith("TeacherForced"):
        yield "not generated"
    if entry.get("failure"):
        yield f"failed: {entry['failure']}"


def _metric(owner: Result, name: str) -> str:
    value = owner.get("metrics", {}).get(name)
    error, interval = (owner.get(key, {}).get(name) for key in ("stderrs", "intervals"))
    if value is None:
        return ""
    if interval is not None:
        return f"{number(value)} [{number(interval[0])}, {number(interval[1])}]"
    return number(value) + (f" ± {number(error, digits=2)}" if error is not None else "")


def _heads(results: Results) -> list[str]:
    """Columns' names, with the models' numbers in the pictures."""
    names = [name for name, _ in results]
    return names if len(names) == 1 else [f"{i + 1} {name}" for i, name in enumerate(names)]


def _marked(name: str, *, apart: bool) -> str:
    """A name, with the mark of what does not compare."""
    mark = Markup(f' <span title="not comparable between the models">{_APART}</span>')
    return name + mark if apart else name


def _count(n: int, word: str) -> str:
    return f"{n} {_plural(word, n)}"


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
