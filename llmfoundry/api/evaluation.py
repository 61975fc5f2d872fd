"""`evaluate` and `Scores` of `import llmfoundry`; `scripts/eval.py` calls `examine`, too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch.distributed as dist

from llmfoundry.api.examine import Examined, check_models, examine
from llmfoundry.api.model import Model, in_eval_mode
from llmfoundry.api.progress import QuietConsole
from llmfoundry.api.recipes import checked_texts
from llmfoundry.api.run import Rows, Run
from llmfoundry.builders.model_layout import join_layout
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.paired import PairedComparison, compare_rows
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.terminal import columns

if TYPE_CHECKING:
    import pandas

Evaluated: TypeAlias = "Model | Run | str | os.PathLike[str]"
"""What is evaluated: a model, a run, or a name that `lf.load` takes."""


@dataclass(frozen=True)
class Score:
    """Score of one task, category or average.

    Attributes:
        task: label of the task, or name of the category or average.
        shots: examples before each question; None: of a category or average.
        metric: what `value` is, such as InContextLearningMultipleChoiceAccuracy.
        value: the score, from 0 to 1; None: it cannot be computed.
        interval: its 95 % interval; None: unknown.
        n: rows that were scored.
        chance: score of guessing.
    """

    task: str
    shots: int | None
    metric: str
    value: float | None
    interval: tuple[float, float] | None
    n: int
    chance: float


class Scores(Sequence[Score]):
    """Scores of a model, one for each task.

    >>> scores = lf.evaluate("runs/quickstart", "generated_easy", rows=5)
    >>> score = scores[0]
    >>> score.n, score.interval[0] <= score.value <= score.interval[1]
    (5, True)
    >>> scores[score.task] is score
    True

    Attributes:
        model: name of the model.
        results: all results, as in results.json.
    """

    def __init__(self, found: Examined) -> None:
        """Wrap the results of one model."""
        self.model, self.results = found.name, dict(found.results)
        self._lines = [line for part in found.answers for line in part.lines()]
        self._judged = found.judged()
        gauntlet = self.results.get("gauntlet") or {}
        self._scores = [*map(_of_task, gauntlet.get("tasks", ()))]
        self.problems: list[str] = list(gauntlet.get("problems", ()))

    @property
    def metrics(self) -> dict[str, float]:
        """All numbers by Composer's names, such as metrics/eval/LanguageCrossEntropy."""
        return dict(self.results["metrics"])

    @property
    def averages(self) -> list[Score]:
        """Scores of averages and categories, in which guessing counts as 0."""
        found, scores = self.results.get("gauntlet") or {}, list[Score]()
        intervals = found.get("intervals") or {}
        for kind in ("averages", "categories"):
            for name, value in (found.get(kind) or {}).items():
                interval = _interval(intervals.get(name))
                scores.append(Score(name, None, kind, value, interval, 0, 0.0))
        return scores

    @cached_property
    def rows(self) -> Rows:
        """The answers, as in rows.jsonl: a mapping for each row and choice."""
        return Rows(map(json.loads, self._lines))

    def compare(self, baseline: Scores) -> PairedComparison:
        """Return the differences from another model, on the rows that both answered.

        >>> scores = lf.evaluate("runs/quickstart", "generated_easy", rows=5)
        >>> scores.compare(scores).tasks[0].value
        0.0
        """
        return compare_rows(self._judged, baseline._judged)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each task."""
        rows = []
        for score in self:
            low, high = score.interval or (None, None)
            values = {name: value for name, value in asdict(score).items() if name != "interval"}
            rows.append(values | {"low": low, "high": high})
        return Rows(rows).to_pandas()

    def __len__(self) -> int:
        return len(self._scores)

    @overload
    def __getitem__(self, key: int | str) -> Score: ...

    @overload
    def __getitem__(self, key: slice) -> list[Score]: ...

    def __getitem__(self, key: int | str | slice) -> Score | list[Score]:
        """Return a score by its index, or by the label of its task."""
        if not isinstance(key, str):
            return self._scores[key]
        matches = [score for score in self._scores if key in (score.task, _label(score))]
        if len(matches) != 1:
            labels = ", ".join(map(_label, self._scores))
            raise KeyError(f"{key!r} is {'several' if matches else 'none'} of {labels}")
        return matches[0]

    def __iter__(self) -> Iterator[Score]:
        return iter(self._scores)

    def __repr__(self) -> str:
        lines = columns(("task", "n", "value", "interval", "chance"), [*map(_cells, self)])
        text = {k: v for k, v in self.metrics.items() if k.startswith("metrics/eval/")}
        lines += [f"{name}: {value:.4f}" for name, value in text.items()]
        return "\n".join([f"scores of {self.model}", *lines, *(f"! {p}" for p in self.problems)])


def _of_task(task: Mapping[str, Any]) -> Score:
    return Score(
        task["label"],
        task["num_fewshot"],
        task["metric"],
        task["accuracy"],
        _interval(task.get("interval")),
        task["n"],
        task["chance"],
    )


def _interval(ends: Sequence[float] | None) -> tuple[float, float] | None:
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _label(score: Score) -> str:
    return score.task if score.shots is None else f"{score.task}/{score.shots}-shot"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _cells(score: Score) -> tuple[str, ...]:
    value, chance = _number(score.value), _number(score.chance)
    return _label(score), str(score.n), value, _range(score), chance


def _range(score: Score) -> str:
    return "" if score.interval is None else "[{:.3f}, {:.3f}]".format(*score.interval)


@overload
def evaluate(
    models: Evaluated,
    tasks: str | os.PathLike[str] | None = None,
    *,
    rows: int | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Scores: ...


@overload
def evaluate(
    models: Sequence[Evaluated],
    tasks: str | os.PathLike[str] | None = None,
    *,
    rows: int | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> list[Scores]: ...


def evaluate(
    models: Evaluated | Sequence[Evaluated],
    tasks: str | os.PathLike[str] | None = None,
    *,
    rows: int | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Scores | list[Scores]:
    """Evaluate models, as `scripts/eval.py` does. Under torchrun every process calls it.

    >>> model = lf.load("runs/quickstart")
    >>> scores = lf.evaluate(model, "generated_easy", rows=5)
    >>> [score.n for score in scores] == [5] * len(scores)
    True

    Args:
        models: one, or several, for which a list is returned. A `Model` is evaluated with the
            weights that it has now; a run, and a name, with those of the newest checkpoint.
        tasks: a choice of yamls/eval, such as v0.3; or a gauntlet file, my_tasks.yaml; None: what
            the run of the model evaluated.
        rows: rows of each task; None: all.
        output: folder of results.json, rows.jsonl and the page, a folder below for each of several
            models; None: nothing is written.
        settings: further keys of the section `eval`, such as `icl_prompts="foundry"`.

    Raises:
        UserError: a model or task cannot be used; found before the first question.
    """
    is_one = isinstance(models, Model | Run | str | os.PathLike)
    given: list[Any] = [models] if is_one else [*models]  # type: ignore[misc]
    names = _names(given)
    held = {n: model for n, model in zip(names, given, strict=True) if isinstance(model, Model)}
    live = {name: model.opened for name, model in held.items()}
    recipe = _recipe(names, tasks, rows, output, settings)
    check_models(recipe, live)
    if dist.is_initialized():
        raise UserError(
            "evaluate: torch.distributed is initialized already; leave that to evaluate, or call"
            " torch.distributed.destroy_process_group() before"
        )
    with join_layout(recipe.parallel) as (world, layout):
        devices = {model.device for model in held.values()}
        if len(devices) > 1:
            raise UserError("evaluate: the models are on several devices; write one at a time")
        world = replace(world, device=devices.pop()) if devices else world
        console, results = QuietConsole(is_main=world.is_main), list[Scores]()
        with in_eval_mode(*held.values()):
            for found in examine(recipe, world, layout, console, live):
                if output is not None and world.is_main:
                    found.write()
                results.append(Scores(found))
    return results[0] if is_one else results


def _names(models: Sequence[Evaluated]) -> list[str]:
    """Return the models' names; that of a model in memory differs from all others."""
    taken = {os.fspath(model) for model in models if not isinstance(model, Model)}
    names = list[str]()
    for model in models:
        if not isinstance(model, Model):
            names.append(os.fspath(model))
            continue
        name, n = model.name, 1
        while name in taken:
            n += 1
            name = f"{model.name} #{n}"
        taken.add(name)
        names.append(name)
    return names


def _recipe(
    names: Sequence[str],
    tasks: str | os.PathLike[str] | None,
    rows: int | None,
    output: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
) -> EvalRecipe:
    texts: dict[str, str | list[str]] = {"models": [*names]}
    if len(names) == 1:
        texts = {"checkpoint": names[0]}
    if output is not None:
        texts["output"] = os.fspath(output)
    values: dict[str, Any] = {}
    if tasks is not None:
        is_file = os.fspath(tasks).endswith((".yaml", ".yml"))
        values["eval.gauntlet" if is_file else "eval"] = tasks
    if rows is not None:
        values["eval.icl_rows"] = rows
    values |= {f"eval.{name}": value for name, value in settings.items()}
    return checked_texts(EvalRecipe, texts, values)
