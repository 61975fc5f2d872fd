"""Page with the gauntlet results of one model, or a comparison of several models.

`scripts/eval.py` calls `write_eval_page` with outputs of GauntletResult.to_json, so that it can
compare the results.json of an old run with a new one. The page is a single file.

Accuracies on different questions are never presented as comparable. If the examples, their number
or the prompts of a task differ between models, the page lists the reasons once and marks the task.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from llmfoundry.files import atomic_write
from llmfoundry.gauntlet.paired import PairedComparison
from llmfoundry.loggers.console import duration, number, short_count
from llmfoundry.loggers.pages.page import Tile, breakable, page, part, table, together
from llmfoundry.loggers.pages.paired_tables import paired_tables
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
Results = Sequence[tuple[str, Result]]  # name and result of each model

Links = Mapping[str, Path]  # paths of a model's pages by link text

_APART = "≠"
_COMPARED = {
    "rows_hash": "rows",
    "n": "numbers of questions",
    "mode": "prompts",
    "metric": "ways of judging",
}
_SAME: dict[Any, str] = {"harness": "native"}  # modes with the same prompts
_COUNTED = {
    "ties": "tie",
    "dropped": "dropped example",
    "truncated": "truncated question",
    "refused": "refused question",
    "missing": "missing row",
}


def write_eval_page(
    path: Path,
    results: Results,
    *,
    title: str = "Evaluation",
    links: Sequence[Links] = (),
    comparisons: Sequence[PairedComparison] = (),
) -> None:
    """Write the page atomically.

    Args:
        path: path of the HTML file.
        results: see `eval_page`.
        title: title of the page.
        links: pages of each model, by link text; empty: no links.
        comparisons: paired differences between the models.
    """
    relative_links = []
    for pages in links:
        addresses = {}
        for words, page_path in pages.items():
            addresses[words] = quote(os.path.relpath(page_path, path.parent))
        relative_links.append(addresses)
    html = eval_page(results, title=title, links=relative_links, comparisons=comparisons)
    atomic_write(path, html)


def eval_page(
    results: Results,
    *,
    title: str = "Evaluation",
    links: Sequence[Mapping[str, str]] = (),
    comparisons: Sequence[PairedComparison] = (),
) -> str:
    """Return the page as HTML: models, averages, categories, tasks, problems, cost, all metrics.

    Args:
        results: at least one model; names may repeat.
        title: title of the page.
        links: URLs of each model's pages, by link text; empty: no links.
        comparisons: paired differences between the models.
    """
    assert results
    is_complete = True
    for _, result in results:
        accuracies = [task["accuracy"] for task in result["tasks"]]
        if None in [*_all_scores(result), *accuracies]:
            is_complete = False
    names = [name for name, _ in results]
    n, n_tasks = len(names), len(_tasks(results))
    sections = [
        ("Models" if n > 1 else "Run", models_table(results, links)),
        ("Not comparable", not_comparable(results)),
        ("Paired differences", paired_tables(comparisons)),
        (_scores_title(results), score_charts(results) + score_table(results)),
        ("Tasks", task_table(results)),
        ("Problems", problem_list(results)),
        ("Prompt format", ways(results)),
        ("Cost", cost_table(results)),
        ("Every metric", metric_tables(results)),
    ]
    return page(
        title=f"{title}: {names[0]}" if n == 1 else title,
        status="finished" if is_complete else "not complete",
        reached=f"{_count(n, 'model')}, {_count(n_tasks, 'task')}",
        tiles=average_tiles(results) if n == 1 else [],
        sections=sections,
    )


def _scores_title(results: Results) -> str:
    """Return the heading of the scores, depending on which scores exist."""
    words = [kind for kind in ("averages", "categories") if _names(results, kind)]
    return " and ".join(words).capitalize() or "Accuracy"


def average_tiles(results: Results) -> list[Tile]:
    """Return the averages as headline numbers, for a page of one model."""
    tiles = []
    for _, result in results:
        for average, value in (result.get("averages") or {}).items():
            score, interval = in_parts(written(_estimate(result, average, value)))
            tiles.append(Tile(average, score, interval))
    return tiles


def models_table(results: Results, links: Sequence[Mapping[str, str]]) -> Markup:
    """Return a row for each model: number and color in the charts, averages, links to its pages.

    For a single model, return only the links.
    """
    averages = _names(results, "averages")
    scores = _scores(results, "averages", averages)
    rows = []
    for i, (name, _) in enumerate(results):
        anchors = []
        for words, url in links[i].items() if links else ():
            anchors.append(Markup('<a href="{}">{}</a>').format(url, words))
        pages = Markup(" · ").join(anchors)
        label = Markup('{}<b>{}</b> {} <span class="hint">{}</span>')
        first = label.format(part("swatch", i), i + 1, breakable(name), pages)
        rows.append((first if len(results) > 1 else pages, *map(written, scores[i])))
    if len(results) == 1:
        return Markup("<p>{}</p>").format(rows[0][0]) if rows[0][0] else Markup()
    head = ("model", *averages)
    return table(head, rows, right=range(1, len(head)))


def not_comparable(results: Results) -> Markup:
    """Return the list of tasks that are not comparable between models, by reason."""
    # tasks by reason
    reasons: dict[str, list[str]] = {}
    all_tasks = _tasks(results)
    for (label, shots), entries in all_tasks.items():
        differing = " and ".join(_differing(entries))
        if differing:
            reasons.setdefault(differing, []).append(f"{label}/{shots}-shot")

    # a line for each reason
    lines = []
    for words, tasks in reasons.items():
        which = "all tasks" if len(tasks) == len(all_tasks) else _count(len(tasks), "task")
        lines.append(f"{words} differ between the models in {which}: {', '.join(tasks)}")
    if not lines:
        return Markup()
    words = "Neither these tasks nor what is made of them compares"
    return Markup(f"<p>{words}; {_APART} marks them below.</p>") + part("listed", lines)


def score_charts(results: Results) -> Markup:
    """Return the charts: averages and categories as bars, tasks as dots next to chance."""
    # bars
    models = [name for name, _ in results]
    averages, categories = _names(results, "averages"), _names(results, "categories")
    average_scores = _scores(results, "averages", averages)
    category_scores = _scores(results, "categories", categories)
    both = [[*a, *c] for a, c in zip(average_scores, category_scores, strict=True)]

    # dots
    tasks = []
    for (label, shots), entries in _tasks(results).items():
        first = next(entry for entry in entries if entry is not None)
        accuracies = [_accuracy_of(entry) if entry else ShownScore(None) for entry in entries]
        name = f"{label}, {shots}-shot"
        tasks.append(TaskDots(name, first["chance"], first["majority"], accuracies))
    figures = [
        bars("Averages and categories", [*averages, *categories], models, both),
        dots("Accuracy in each task", tasks, models),
    ]
    return together(figures, "charts apart")


def score_table(results: Results) -> Markup:
    """Return the table of averages and categories, with a column for each model."""
    # names of tasks that are not comparable
    differing = set()
    for (task, shots), entries in _tasks(results).items():
        if any(_differing(entries)):
            differing.add(f"{task}/{shots}-shot")

    # a row for each score; a score with such a task is marked
    rows = []
    for key in ("averages", "categories"):
        names = _names(results, key)
        scores = _scores(results, key, names)
        for i, name in enumerate(names):
            members = {task for _, result in results for task in _members(result, name)}
            label = _marked(name, apart=bool(members & differing))
            cells = [written(model_scores[i]) for model_scores in scores]
            rows.append((label, *cells))
    head = ("", *_heads(results))
    html = table(head, rows, right=range(1, len(head)), is_wide=True)
    return Markup("<p></p>") + html if rows else Markup()


def task_table(results: Results) -> Markup:
    """Return the table of tasks, with a column for each model.

    The models come before the other columns, because phones show few columns.
    """
    head = ("task", "shots", *_heads(results), "n", "chance", "majority")
    rows, accuracies = [], []
    for (label, shots), entries in _tasks(results).items():
        first = next(entry for entry in entries if entry is not None)
        cells = [_accuracy(entry, model) for model, entry in enumerate(entries)]
        baselines = (f"{100 * first['chance']:.1f}%", f"{100 * first['majority']:.1f}%")
        marked_label = _marked(label, apart=any(_differing(entries)))
        rows.append((marked_label, str(shots), *cells, _question_count(first), *baselines))
        accuracies += [_accuracy_of(entry) for entry in entries if entry]
    hint = f"Lines: chance (solid), majority class (dashed); whiskers: {whiskers_of(accuracies)}."
    html = table(head, rows, right=(1, *range(len(head) - 3, len(head))), is_wide=True)
    return html + Markup(f'<p class="hint">{hint}</p>') if rows else Markup()


def problem_list(results: Results) -> Markup:
    """Return the problems of the evaluation, model by model."""
    parts = []
    for name, result in results:
        problems = result.get("problems")
        if problems:
            if len(results) > 1:
                parts.append(Markup("<p>{}</p>").format(name))
            parts.append(part("listed", problems))
    return Markup().join(parts)


def ways(results: Results) -> Markup:
    """Return a table with the prompt format and special tokens of each model."""
    rows = [(name, result["asked"]) for name, result in results if result.get("asked")]
    if len(results) == 1:  # the title has the name of the model
        return Markup("<p>{}</p>").format(rows[0][1]) if rows else Markup()
    return table(("", "prompts and special tokens"), rows)


def cost_table(results: Results) -> Markup:
    """Return a table with the tokens and the time of each model, where they were measured."""
    rows = []
    for name, result in results:
        cost = result.get("cost")
        if cost:
            computed, unshared = cost["tokens_computed"], cost["tokens_unshared"]
            unit = cost.get("unit", "tokens")
            ratio = f"{unshared / computed:.2f}" if computed and unit == "tokens" else "n/a"
            computed_text = short_count(computed) if computed else "not reported"
            unshared_text = short_count(unshared)
            if unit != "tokens":
                unshared_text += f" {unit}"
            rows.append((name, computed_text, unshared_text, ratio, duration(cost["seconds"])))
    head = ("model", "tokens computed", "tokens unshared", "unshared over computed", "time")
    if len(results) == 1:  # the title has the name of the model
        return table(head[1:], [row[1:] for row in rows], right=range(4))
    return table(head, rows, right=range(1, 5))


def metric_tables(results: Results) -> Markup:
    """Return folded tables with every metric of every task and of its categories of examples."""
    parts = []
    head = ("", "metric", *[name for name, _ in results])
    for (label, shots), entries in _tasks(results).items():
        # results of each model for all examples (""), then for each category
        groups: dict[str, list[Result]] = {"": [entry or {} for entry in entries]}
        categories = dict.fromkeys(
            category for entry in groups[""] for category in entry.get("by_category", {})
        )
        for category in categories:
            groups[category] = [
                entry.get("by_category", {}).get(category, {}) for entry in groups[""]
            ]

        # a row for each metric of a group
        rows = []
        for category, owners in groups.items():
            metrics = dict.fromkeys(name for owner in owners for name in owner.get("metrics", {}))
            for metric in metrics:
                rows.append((category, metric, *[_metric(owner, metric) for owner in owners]))
        if rows:
            body = table(head, rows, right=range(2, len(head)))
            parts.append(part("folded", f"{label}/{shots}-shot", body))
    return Markup().join(parts)


def _tasks(results: Results) -> dict[tuple[str, int], list[Result | None]]:
    """Return the entry of every model, or None, for each task label and number of shots."""
    tasks: dict[tuple[str, int], list[Result | None]] = {}
    for model, (_, result) in enumerate(results):
        for task in result["tasks"]:
            key = (task["label"], task["num_fewshot"])
            entries = tasks.setdefault(key, [None] * len(results))
            entries[model] = task
    return tasks


def _names(results: Results, key: str) -> list[str]:
    """Return the names of all averages or categories (`key`), in order of appearance."""
    return list(dict.fromkeys(name for _, result in results for name in result.get(key) or {}))


def _scores(results: Results, key: str, names: Sequence[str]) -> list[list[ShownScore]]:
    """Return the scores of each model with these names; their values are None where missing."""
    scores = []
    for _, result in results:
        values = result.get(key) or {}
        scores.append([_estimate(result, name, values.get(name)) for name in names])
    return scores


def _members(result: Result, name: str) -> list[str]:
    """Return the tasks of a category or an average; empty for results of older versions."""
    return (result.get("members") or {}).get(name, [])


def _estimate(result: Result, name: str, value: float | None) -> ShownScore:
    """Return the score of a category or an average; older results have no intervals."""
    stderr = (result.get("stderrs") or {}).get(name)
    interval = (result.get("intervals") or {}).get(name)
    return ShownScore(value, stderr, interval)


def _accuracy_of(entry: Result) -> ShownScore:
    """Return the accuracy of a task as a score."""
    return ShownScore(entry["accuracy"], entry["stderr"], entry.get("interval"))


def _all_scores(result: Result) -> list[float | None]:
    return [*(result.get("categories") or {}).values(), *(result.get("averages") or {}).values()]


def _accuracy(entry: Result | None, model: int) -> str:
    """Return the cell of a model in the task table: accuracy, bar and notes."""
    if entry is None:
        return "not asked"
    notes = ", ".join(_notes(entry))
    hint = Markup('<span class="hint">{}</span>').format(notes) if notes else Markup()
    accuracy = _accuracy_of(entry)
    if accuracy.value is None:
        return Markup("n/a ") + hint
    bar = accuracy_bar(accuracy, chance=entry["chance"], majority=entry["majority"], model=model)
    return percents(accuracy) + bar + hint


def _question_count(entry: Result) -> str:
    total = entry.get("rows_total") or entry["n"]
    return str(entry["n"]) if entry["n"] == total else f"{entry['n']} of {total}"


def _differing(entries: Sequence[Result | None]) -> Iterator[str]:
    """Yield the reasons why the accuracies of models on a task are not comparable."""
    present = [entry for entry in entries if entry is not None]
    for key, words in _COMPARED.items():
        values = {entry.get(key) for entry in present} - {None, ""}
        if len({_SAME.get(value, value) for value in values}) > 1:
            yield words


def _notes(entry: Result) -> Iterator[str]:
    """Yield notes about the accuracy of one model on a task."""
    for key, words in _COUNTED.items():
        n = entry.get(key)
        if n:
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
    """Return the column names of the models, with their numbers in the charts."""
    names = [name for name, _ in results]
    return names if len(names) == 1 else [f"{i + 1} {name}" for i, name in enumerate(names)]


def _marked(name: str, *, apart: bool) -> str:
    """Return a name; `apart` adds the mark of scores that are not comparable."""
    mark = Markup(f' <span title="not comparable between the models">{_APART}</span>')
    return name + mark if apart else name


def _count(n: int, word: str) -> str:
    return f"{n} {_plural(word, n)}"


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
