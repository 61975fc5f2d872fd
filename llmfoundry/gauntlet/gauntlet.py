"""`Gauntlet`: a file of tasks, read and tokenized once, put to a model any number of times.

The trainer and `scripts/eval.py` make one before the first step, so that every mistake in the file
or its rows shows then, and call `run` whenever an evaluation is due. Of several processes one reads
and tokenizes, a task at a time, and hands on what came out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.aggregate import (
    combine_tasks,
    grade,
    members_of,
    missing_benchmarks,
    missing_rows,
    wrong_baselines,
)
from llmfoundry.gauntlet.answer_metrics import Interval, empty_aliases, wilson
from llmfoundry.gauntlet.gauntlet_file import EvalGauntlet, read_gauntlet
from llmfoundry.gauntlet.models.harness import PREFIX, HarnessResult, HarnessTasks
from llmfoundry.gauntlet.prompts.question_cache import (
    cached_questions,
    pack_questions,
    unpack_questions,
)
from llmfoundry.gauntlet.questions import (
    EvaluatedModel,
    Once,
    PromptSettings,
    Question,
    Refusal,
    Request,
    Score,
    TaskConfig,
    TaskRow,
    here,
)
from llmfoundry.gauntlet.results import Cost, GauntletResult, TaskResult, rows_lines
from llmfoundry.gauntlet.task_rows import (
    NoHeldOutText,
    RowsNotFound,
    chance,
    check_source,
    heldout_rows,
    load_rows,
    majority,
    part_of,
    row_order,
    rows_hash,
)
from llmfoundry.gauntlet.task_types import TASK_TYPES, type_of
from llmfoundry.redaction import public


@dataclass(frozen=True)
class _Ready:
    """A task with one number of worked examples, tokenized.

    Attributes:
        task: what the questions are of.
        blank: its result before a model is known; of all questions.
        questions: those that may be asked, the first of the order in front.
    """

    task: TaskConfig
    blank: TaskResult
    questions: list[Question]

    def part(self, share: float) -> _Ready:
        """The same with a share of the questions."""
        asked = self.questions[: part_of(len(self.questions), share)]
        return _Ready(self.task, _sized(self.blank, asked), asked)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [question.row for question in self.questions]
        return _unpacked, (self.task, self.blank, rows, pack_questions(self.questions))


def _unpacked(
    task: TaskConfig, blank: TaskResult, rows: Sequence[TaskRow], packed: bytes
) -> _Ready:
    return _Ready(task, blank, unpack_questions(packed, rows))


@dataclass(frozen=True)
class _Chosen:
    """A share of each task's questions, and all their requests."""

    share: float
    parts: list[_Ready]
    requests: list[Request]


@dataclass(frozen=True)
class Answered:
    """A task's questions and what a model said.

    Attributes:
        task: what the questions are of.
        num_fewshot: worked examples of each.
        questions: those asked.
        scores: for each question those of its requests; of no request where there are only texts.
        texts: what was written for each question; None: nothing was.

    A Refusal stands for what the model would not say.
    """

    task: TaskConfig
    num_fewshot: int
    questions: list[Question]
    scores: list[list[Score | Refusal]]
    texts: Sequence[str | Refusal] | None

    def lines(self) -> Iterator[str]:
        """Of rows.jsonl."""
        yield from rows_lines(self.task, self.num_fewshot, self.questions, self.scores, self.texts)


def check_sources(path: Path, *, allow_missing: bool) -> None:
    """Read a gauntlet's file and look for its rows on this machine, before anything is prepared.

    Raises:
        UserError: every mistake in the file, or every task whose rows are not here.
    """
    missing: list[str] = []
    for task in read_gauntlet(path).tasks:
        if not task.dataset_uri.startswith(PREFIX):
            try:
                check_source(task, gauntlet_path=path)
            except RowsNotFound as error:
                missing += error.problems
    if missing and not allow_missing:
        raise UserError(*missing)


class Gauntlet:
    """Tasks ready to be asked.

    Attributes:
        problems: what a reader must know before any run: tasks without rows and benchmarks without
            a task (their categories will be n/a), baselines that the rows contradict, keys that
            have no effect.
    """

    def __init__(
        self,
        path: Path,
        settings: PromptSettings,
        *,
        validation_texts: Callable[[], list[str]] | None,
        cache_folder: Path,
        say: Callable[[str], None],
        fetching: FetchOptions | None = None,
        once: Once = here,
    ) -> None:
        """Read, check and tokenize everything.

        Args:
            path: the gauntlet file.
            settings: how tasks become prompts.
            validation_texts: the run's held-out documents, called if a task is made from them;
                None: the model has no run.
            cache_folder: where prompts are kept for the next time.
            say: called when a cached file is damaged.
            fetching: how rows at an address are asked for; unset: with the environment's rights.
            once: of several processes: what calls the readers on one of them.

        Raises:
            UserError: every mistake in the file, or the first kind of mistake in a task's rows.
        """
        self._file = once(lambda: read_gauntlet(path))
        self._settings, self._fetching = settings, fetching
        self._texts, self._cache, self._say = validation_texts, cache_folder, say
        self._ready: list[_Ready] = []
        self._harness: list[tuple[TaskConfig, int, HarnessTasks]] = []
        self._hollow: list[str] = []  # notes about aliases that nothing can match
        missing, unfed, left_out = list[str](), list[str](), list[TaskConfig]()
        for task in self._file.tasks:
            if task.dataset_uri.startswith(PREFIX):
                self._harness += _harness_tasks(task, settings.rows)
                continue
            try:
                ready, hollow = once(partial(self._prepare, task))
            except RowsNotFound as error:
                problems = unfed if isinstance(error, NoHeldOutText) else missing
                problems += error.problems
                left_out.append(task)
                continue
            self._ready += ready
            self._hollow += hollow
        if missing and not settings.allow_missing:
            raise UserError(*missing)
        blanks = [ready.blank for ready in self._ready]
        self._baselines = list(wrong_baselines(self._file.gauntlet, blanks))
        planned = [*blanks, *(_planned(task, shots) for task, shots, _ in self._harness)]
        planned += [_planned(task, shots) for task in left_out for shots in task.num_fewshot]
        self._left_out = [*missing, *unfed]
        lost = [*self._left_out, *missing_benchmarks(self._file.gauntlet, planned)]
        lost += _unknown_chance(self._file.gauntlet, {task.label for task, *_ in self._harness})
        gone = missing_rows(blanks, members_of(self._file.gauntlet))
        self.problems = [*self._file.notes, *lost, *gone, *self._hollow, *self._baselines]
        self._chosen: _Chosen | None = None

    def tokens(self, share: float = 1.0) -> int:
        """Tokens of all inputs, as many as without shared beginnings."""
        return sum(part.blank.tokens for part in self._choose(share).parts)

    def run(
        self, model: EvaluatedModel, *, share: float = 1.0
    ) -> tuple[GauntletResult, list[Answered]]:
        """Ask everything; the same result on every process, all of which must call it.

        Args:
            model: the one that is evaluated.
            share: of each task's questions, the first of a fixed order.
        """
        started, before = time.perf_counter(), model.tokens_computed
        chosen = self._choose(share)
        results, answered = [], []
        for part, scores in zip(chosen.parts, _scores(model, chosen), strict=True):
            result, answers = self._answer(model, part, scores)
            results.append(result)
            answered.append(answers)
        for task, shots, harness in self._harness:
            results += self._examine(model, task, shots, harness)
        cost = Cost(
            model.tokens_computed - before,
            self.tokens(share),
            time.perf_counter() - started,
            self._settings.unit,
        )
        notes = [*self._left_out, *self._baselines]
        found = combine_tasks(results, self._file.gauntlet, notes, cost=cost)
        return dataclasses.replace(found, asked=self._settings.describe()), answered

    def _choose(self, share: float) -> _Chosen:
        """Kept, so that a model meets the same list of requests every time."""
        if self._chosen is None or self._chosen.share != share:
            parts = [ready.part(share) for ready in self._ready]
            requests = [r for part in parts for q in part.questions for r in q.requests]
            self._chosen = _Chosen(share, parts, requests)
        return self._chosen

    def _answer(
        self, model: EvaluatedModel, part: _Ready, scores: list[list[Score | Refusal]]
    ) -> tuple[TaskResult, Answered]:
        """A task's result; texts are written here where they are wanted."""
        prompts = [question.prompt for question in part.questions if question.prompt is not None]
        texts: list[str | Refusal] | None = None
        failure = None
        if prompts:
            try:
                written = iter(model.generate(prompts))
                texts = ["" if q.prompt is None else next(written) for q in part.questions]
            except FloatingPointError as error:
                failure = str(error)
        answers = Answered(part.task, part.blank.num_fewshot, part.questions, scores, texts)
        if failure is not None:
            return dataclasses.replace(part.blank, failure=failure), answers
        return grade(part.blank, part.task, part.questions, scores, texts), answers

    def _examine(
        self, model: EvaluatedModel, task: TaskConfig, shots: int, harness: HarnessTasks
    ) -> list[TaskResult]:
        """Results of a task of lm-evaluation-harness, under the name that the file gives it."""
        settings = self._settings
        chat = settings.chat if settings.chat is not None and settings.chat.every_task else None
        found = harness.run(model, settings.tokenizer, seq_len=settings.seq_len, chat=chat)
        alone = len(found) == 1
        return [_from_harness(part, task.label if alone else part.label, shots) for part in found]

    def _prepare(self, task: TaskConfig) -> tuple[list[_Ready], list[str]]:
        """The task with each of its numbers of worked examples, and notes about its rows."""
        settings, rows, ready = self._settings, self._rows(task), list[_Ready]()
        hollow = list(empty_aliases(rows, task)) if type_of(task).generates else []
        order = row_order(rows)[: settings.rows]
        places = {index: place for place, index in enumerate(sorted(order))}
        for shots in task.num_fewshot:
            asked = cached_questions(
                rows,
                task,
                shots,
                settings,
                folder=self._cache,
                say=self._say,
                keep=sorted(order),
            )
            asked = [asked[places[index]] for index in order]
            ready.append(_Ready(task, _sized(self._blank(task, shots, rows), asked), asked))
        return ready, hollow

    def _rows(self, task: TaskConfig) -> list[TaskRow]:
        if not task.dataset_uri.startswith("heldout://"):
            return load_rows(task, gauntlet_path=self._file.path, fetching=self._fetching)
        if self._texts is None:
            raise NoHeldOutText(
                f"icl_tasks: {task.label}: left out: its questions are cut from a run's held-out"
                " text, and this model has no run; name one beside it: models=[MODEL,runs/NAME]"
            )
        return heldout_rows(task, self._texts())

    def _blank(self, task: TaskConfig, shots: int, rows: list[TaskRow]) -> TaskResult:
        """What is known of a result before its questions are."""
        names = [
            category.name
            for category in self._file.gauntlet.categories
            if any((b.name, b.num_fewshot) == (task.label, shots) for b in category.benchmarks)
        ]
        return dataclasses.replace(
            _planned(task, shots),
            chance=chance(rows, type_of(task)),
            majority=majority(rows, type_of(task)),
            category=", ".join(names) or None,
            mode=self._settings.prompts,
            rows_hash=rows_hash(rows),
            rows_total=len(rows),
        )


def _scores(model: EvaluatedModel, chosen: _Chosen) -> list[list[list[Score | Refusal]]]:
    """For each task and question the scores of its requests; all in one go."""
    parts = chosen.parts
    if not model.can_score and all(type_of(t.task).generates for t in parts):
        return [[[] for _ in part.questions] for part in parts]
    scores = iter(model.score(chosen.requests))
    return [[[next(scores) for _ in q.requests] for q in part.questions] for part in parts]


def _harness_tasks(
    task: TaskConfig, limit: int | None
) -> Iterator[tuple[TaskConfig, int, HarnessTasks]]:
    """A task of lm-evaluation-harness with each of its numbers of worked examples."""
    for shots in task.num_fewshot:
        yield task, shots, HarnessTasks([task.dataset_uri], num_fewshot=shots, limit=limit)


def _unknown_chance(gauntlet: EvalGauntlet, labels: set[str]) -> Iterator[str]:
    """A line for each benchmark of the harness (its tasks' labels) whose baseline nobody knows."""
    for category in gauntlet.categories:
        for benchmark in category.benchmarks:
            if benchmark.name in labels and benchmark.random_baseline is None:
                yield (
                    f"{category.name}: {benchmark.name}: guessing counts as 0 right: the harness"
                    " does not say what it scores; write its random_baseline"
                )


def _planned(task: TaskConfig, shots: int) -> TaskResult:
    """A result that nothing is known of."""
    kind = TASK_TYPES.get(task.icl_task_type)  # None: a task of lm-evaluation-harness
    return TaskResult(
        label=task.label,
        num_fewshot=shots,
        metric=kind.metric if kind is not None else "",
        n=0,
        accuracy=None,
        stderr=None,
        chance=0.0,
        majority=0.0,
    )


def _sized(blank: TaskResult, asked: Sequence[Question]) -> TaskResult:
    """`blank` for these questions."""
    missing = [q for q in asked if q.problem]
    first = f"{missing[0].problem} ({public(missing[0].row.place)})" if missing else None
    return dataclasses.replace(
        blank,
        n=len(asked) - len(missing),
        missing=len(missing),
        missing_reason=first,
        truncated=sum(question.truncated for question in asked),
        dropped=sum(question.dropped for question in asked),
        tokens=sum(len(request.tokens) for q in asked for request in q.requests),
    )


def _from_harness(found: HarnessResult, label: str, shots: int) -> TaskResult:
    """A harness task as a member of the gauntlet; guessing's accuracy is the file's to say."""
    best = found.accuracy
    name, value, error = best if best is not None else ("", None, None)
    values = {key: value for key, (value, _) in found.metrics.items()}
    errors = {key: error for key, (_, error) in found.metrics.items() if error is not None}
    failure = found.failure
    if best is None and failure is None:
        failure = "lm-evaluation-harness gives no accuracy for it"
    return TaskResult(
        label=label,
        num_fewshot=shots,
        metric=name,
        n=found.n,
        accuracy=value,
        stderr=error,
        chance=0.0,
        majority=0.0,
        truncated=found.truncated,
        failure=failure,
        metrics=values,
        stderrs=errors,
        mode="lm_eval",
        interval=None if value is None else _of_rows(value, found.n),
    )


def _of_rows(value: float, n: int) -> Interval | None:
    """The 95 % interval of an accuracy that is a share of `n` rows; None: it is none."""
    rights = value * n
    is_share = 0 <= value <= 1 and n > 0 and abs(rights - round(rights)) < 1e-6
    return wilson(round(rights), n) if is_share else None
