"""In-context learning evaluation: tasks of a gauntlet file, tokenized once, run on a model often.

Entry point: `Gauntlet`. The trainer and `scripts/eval.py` construct it before the first step, so
that every mistake in the file or its rows is reported then. They call `Gauntlet.run` whenever an
evaluation is due. With several ranks, one rank reads and tokenizes each task and broadcasts the
result.
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
    Score,
    ScoreRequest,
    TaskConfig,
    TaskRow,
    here,
)
from llmfoundry.gauntlet.results import EvaluationCost, GauntletResult, TaskResult, rows_lines
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
class _TokenizedTask:
    """A task with one number of few-shot examples, tokenized.

    Attributes:
        task: the task's settings.
        blank: the result before a model is evaluated, with the counts of `questions`.
        questions: all questions of the task, in the order of `row_order`.
    """

    task: TaskConfig
    blank: TaskResult
    questions: list[Question]

    def subset(self, share: float) -> _TokenizedTask:
        """Return the same task with the first `share` of its questions."""
        questions = self.questions[: part_of(len(self.questions), share)]
        return _TokenizedTask(self.task, _with_counts(self.blank, questions), questions)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [question.row for question in self.questions]
        return _unpack_task, (self.task, self.blank, rows, pack_questions(self.questions))


def _unpack_task(
    task: TaskConfig, blank: TaskResult, rows: Sequence[TaskRow], packed: bytes
) -> _TokenizedTask:
    return _TokenizedTask(task, blank, unpack_questions(packed, rows))


@dataclass(frozen=True)
class _ReadTask:
    """A task that was read.

    Attributes:
        task: the task's settings.
        tokenized: the task with each of its numbers of few-shot examples; empty without rows.
        alias_notes: notes about aliases that can never match.
        missing: why there are no rows.
        without_text: why there is no held-out text to make rows of.
    """

    task: TaskConfig
    tokenized: Sequence[_TokenizedTask] = ()
    alias_notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    without_text: Sequence[str] = ()


@dataclass(frozen=True)
class _Selection:
    """The questions of one evaluation: a share of each task's questions, and their requests."""

    share: float
    subsets: list[_TokenizedTask]
    requests: list[ScoreRequest]


@dataclass(frozen=True)
class TaskAnswers:
    """A task's questions and the model's answers. A Refusal replaces a missing score or text.

    Attributes:
        task: the task's settings.
        num_fewshot: number of few-shot examples in each question.
        questions: the evaluated questions.
        scores: for each question, the scores of its requests; empty for a model that only
            generates.
        texts: the generated text of each question; None: nothing was generated.
    """

    task: TaskConfig
    num_fewshot: int
    questions: list[Question]
    scores: list[list[Score | Refusal]]
    texts: Sequence[str | Refusal] | None

    def lines(self) -> Iterator[str]:
        """Yield the task's lines of rows.jsonl."""
        yield from rows_lines(self.task, self.num_fewshot, self.questions, self.scores, self.texts)


def check_sources(path: Path, *, allow_missing: bool) -> None:
    """Read a gauntlet file and check that its local row files exist, before other preparation.

    Raises:
        UserError: every mistake in the file, or every task whose rows are missing.
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
    """Tokenized tasks of a gauntlet file, to be run on models.

    Attributes:
        problems: warnings known before any run: tasks without rows and benchmarks without a task
            (their categories will be n/a), baselines that the rows contradict, and keys that have
            no effect.
    """

    def __init__(
        self,
        path: Path,
        settings: PromptSettings,
        *,
        validation_texts: Callable[[], list[str]] | None,
        cache_folder: Path | None,
        say: Callable[[str], None],
        fetching: FetchOptions | None = None,
        once: Once = here,
        waits: Callable[[TaskConfig], bool] = lambda task: False,
    ) -> None:
        """Read, check and tokenize all tasks, except those that wait.

        Args:
            path: the gauntlet file.
            settings: how tasks become prompts.
            validation_texts: returns the run's held-out documents; called only if a task needs
                them. None: the model has no run.
            cache_folder: folder of the prompt cache; None: nothing is written.
            say: logs a line; called when a cached file is damaged.
            fetching: credentials and retries for remote rows; unset: those of the environment.
            once: runs a function on one rank and returns its result on all ranks.
            waits: whether a task is left for `add_held_out`.

        Raises:
            UserError: every mistake in the file, or the mistakes in the first task with bad rows.
        """
        self._file = once(lambda: read_gauntlet(path))
        self._settings, self._fetching, self._once = settings, fetching, once
        self._texts, self._cache, self._say = validation_texts, cache_folder, say
        self._read: dict[int, _ReadTask] = {}
        self._harness: list[tuple[TaskConfig, int, HarnessTasks]] = []

        # read and tokenize each task that need not wait
        for number, task in enumerate(self._file.tasks):
            if task.dataset_uri.startswith(PREFIX):
                self._harness += _harness_tasks(task, settings.rows)
            elif not waits(task):
                self._read[number] = self._read_task(task)
        missing = [line for read in self._read.values() for line in read.missing]
        if missing and not settings.allow_missing:
            raise UserError(*missing)
        self._settle()

    def add_held_out(self, validation_texts: Callable[[], list[str]] | None) -> list[str]:
        """Read and tokenize the tasks that wait for the run's held-out text.

        All ranks must call it.

        Args:
            validation_texts: as in the constructor.

        Returns:
            Problems that were not known before.

        Raises:
            UserError: a task cannot be made of the text.
        """
        self._texts = validation_texts
        known = set(self.problems)
        for number, task in enumerate(self._file.tasks):
            if number not in self._read and not task.dataset_uri.startswith(PREFIX):
                self._read[number] = self._read_task(task)
        self._settle()
        return [problem for problem in self.problems if problem not in known]

    @property
    def waiting(self) -> list[TaskConfig]:
        """Tasks that are not read yet."""
        return [
            task
            for number, task in enumerate(self._file.tasks)
            if number not in self._read and not task.dataset_uri.startswith(PREFIX)
        ]

    def _read_task(self, task: TaskConfig) -> _ReadTask:
        """Read and tokenize a task on one rank; a task without rows is a line."""
        try:
            tokenized, alias_notes = self._once(partial(self._prepare, task))
        except NoHeldOutText as error:
            return _ReadTask(task, without_text=error.problems)
        except RowsNotFound as error:
            return _ReadTask(task, missing=error.problems)
        return _ReadTask(task, tokenized, alias_notes)

    def _settle(self) -> None:
        """Compare the categories' benchmarks with the tasks, and collect all warnings."""
        gauntlet = self._file.gauntlet
        reads = [read for _, read in sorted(self._read.items())]
        self._tokenized = [tokenized for read in reads for tokenized in read.tokenized]
        missing = [line for read in reads for line in read.missing]
        without_text = [line for read in reads for line in read.without_text]
        without_rows = [read.task for read in reads if not read.tokenized]
        without_rows += self.waiting

        blanks = [tokenized.blank for tokenized in self._tokenized]
        self._baselines = list(wrong_baselines(gauntlet, blanks))
        all_tasks = [*blanks, *(_empty_result(task, shots) for task, shots, _ in self._harness)]
        all_tasks += [
            _empty_result(task, shots) for task in without_rows for shots in task.num_fewshot
        ]
        self._skipped = [*missing, *without_text]
        absent = [*self._skipped, *missing_benchmarks(gauntlet, all_tasks)]
        absent += _unknown_chance(gauntlet, {task.label for task, *_ in self._harness})
        row_notes = missing_rows(blanks, members_of(gauntlet))
        alias_notes = [note for read in reads for note in read.alias_notes]
        self.problems = [
            *self._file.notes,
            *absent,
            *row_notes,
            *alias_notes,
            *self._baselines,
        ]
        self._selection: _Selection | None = None

    def tokens(self, share: float = 1.0) -> int:
        """Return the number of tokens of all inputs, without prefix sharing."""
        return sum(subset.blank.tokens for subset in self._select(share).subsets)

    def run(
        self, model: EvaluatedModel, *, share: float = 1.0
    ) -> tuple[GauntletResult, list[TaskAnswers]]:
        """Evaluate a model on all tasks. All ranks must call it and get the same result.

        Args:
            model: the model to evaluate.
            share: fraction of each task's questions to evaluate: the first ones of a fixed order.
        """
        started, tokens_before = time.perf_counter(), model.tokens_computed
        selection = self._select(share)
        results, answered = [], []
        for tokenized, scores in zip(selection.subsets, _scores(model, selection), strict=True):
            result, answers = self._answer(model, tokenized, scores)
            results.append(result)
            answered.append(answers)
        for task, shots, harness in self._harness:
            results += self._run_harness(model, task, shots, harness)
        cost = EvaluationCost(
            model.tokens_computed - tokens_before,
            self.tokens(share),
            time.perf_counter() - started,
            self._settings.unit,
        )
        notes = [*self._skipped, *self._baselines]
        combined = combine_tasks(results, self._file.gauntlet, notes, cost=cost)
        return dataclasses.replace(combined, asked=self._settings.describe()), answered

    def _select(self, share: float) -> _Selection:
        """Return the selection for a share; the last one is kept, so that its list is reused."""
        if self._selection is None or self._selection.share != share:
            subsets = [tokenized.subset(share) for tokenized in self._tokenized]
            requests = [r for subset in subsets for q in subset.questions for r in q.requests]
            self._selection = _Selection(share, subsets, requests)
        return self._selection

    def _answer(
        self, model: EvaluatedModel, tokenized: _TokenizedTask, scores: list[list[Score | Refusal]]
    ) -> tuple[TaskResult, TaskAnswers]:
        """Generate the texts of a task if it has prompts, and grade the answers."""
        task, blank, questions = tokenized.task, tokenized.blank, tokenized.questions
        prompts = [question.prompt for question in questions if question.prompt is not None]
        texts: list[str | Refusal] | None = None
        failure = None
        if prompts:
            try:
                generated = iter(model.generate(prompts))
                texts = ["" if q.prompt is None else next(generated) for q in questions]
            except FloatingPointError as error:
                failure = str(error)
        answers = TaskAnswers(task, blank.num_fewshot, questions, scores, texts)
        if failure is not None:
            return dataclasses.replace(blank, failure=failure), answers
        return grade(blank, task, questions, scores, texts), answers

    def _run_harness(
        self, model: EvaluatedModel, task: TaskConfig, shots: int, harness: HarnessTasks
    ) -> list[TaskResult]:
        """Run a task of lm-evaluation-harness. A single result gets the label of the file."""
        settings = self._settings
        chat = settings.chat if settings.chat is not None and settings.chat.every_task else None
        results = harness.run(model, settings.tokenizer, seq_len=settings.seq_len, chat=chat)
        if len(results) == 1:
            return [_from_harness(results[0], task.label, shots)]
        return [_from_harness(result, result.label, shots) for result in results]

    def _prepare(self, task: TaskConfig) -> tuple[list[_TokenizedTask], list[str]]:
        """Tokenize a task for each of its numbers of few-shot examples.

        Returns:
            The tokenized tasks, and notes about aliases that can never match.
        """
        settings, rows, tokenized = self._settings, self._rows(task), list[_TokenizedTask]()
        alias_notes = list(empty_aliases(rows, task)) if type_of(task).generates else []
        order = row_order(rows)[: settings.rows]
        # the cache holds questions in file order: map row indices to positions in it
        positions = {index: position for position, index in enumerate(sorted(order))}
        for shots in task.num_fewshot:
            in_file_order = cached_questions(
                rows,
                task,
                shots,
                settings,
                folder=self._cache,
                say=self._say,
                keep=sorted(order),
            )
            questions = [in_file_order[positions[index]] for index in order]
            blank = _with_counts(self._blank(task, shots, rows), questions)
            tokenized.append(_TokenizedTask(task, blank, questions))
        return tokenized, alias_notes

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
        """Return the fields of a result that depend only on the rows and the gauntlet file."""
        names = [
            category.name
            for category in self._file.gauntlet.categories
            if any((b.name, b.num_fewshot) == (task.label, shots) for b in category.benchmarks)
        ]
        return dataclasses.replace(
            _empty_result(task, shots),
            chance=chance(rows, type_of(task)),
            majority=majority(rows, type_of(task)),
            category=", ".join(names) or None,
            mode=self._settings.prompts,
            rows_hash=rows_hash(rows),
            rows_total=len(rows),
        )


def _scores(model: EvaluatedModel, selection: _Selection) -> list[list[list[Score | Refusal]]]:
    """Score all requests in one call; return the scores by task, question and request."""
    subsets = selection.subsets
    if not model.can_score and all(type_of(t.task).generates for t in subsets):
        return [[[] for _ in subset.questions] for subset in subsets]
    scores = iter(model.score(selection.requests))
    by_task: list[list[list[Score | Refusal]]] = []
    for subset in subsets:
        by_question = [[next(scores) for _ in q.requests] for q in subset.questions]
        by_task.append(by_question)
    return by_task


def _harness_tasks(
    task: TaskConfig, limit: int | None
) -> Iterator[tuple[TaskConfig, int, HarnessTasks]]:
    """Yield a task of lm-evaluation-harness for each of its numbers of few-shot examples."""
    for shots in task.num_fewshot:
        yield task, shots, HarnessTasks([task.dataset_uri], num_fewshot=shots, limit=limit)


def _unknown_chance(gauntlet: EvalGauntlet, labels: set[str]) -> Iterator[str]:
    """Yield a line for each harness benchmark whose random_baseline is not in the file.

    Args:
        gauntlet: the categories and their benchmarks.
        labels: labels of the tasks that lm-evaluation-harness runs.
    """
    for category in gauntlet.categories:
        for benchmark in category.benchmarks:
            if benchmark.name in labels and benchmark.random_baseline is None:
                yield (
                    f"{category.name}: {benchmark.name}: guessing counts as 0 right: the harness"
                    " does not say what it scores; write its random_baseline"
                )


def _empty_result(task: TaskConfig, shots: int) -> TaskResult:
    """Return a result without rows or numbers."""
    task_type = TASK_TYPES.get(task.icl_task_type)  # None: a task of lm-evaluation-harness
    return TaskResult(
        label=task.label,
        num_fewshot=shots,
        metric=task_type.metric if task_type is not None else "",
        n=0,
        accuracy=None,
        stderr=None,
        chance=0.0,
        majority=0.0,
    )


def _with_counts(blank: TaskResult, questions: Sequence[Question]) -> TaskResult:
    """Return `blank` with the counts of these questions."""
    missing = [question for question in questions if question.problem]
    first = f"{missing[0].problem} ({public(missing[0].row.place)})" if missing else None
    return dataclasses.replace(
        blank,
        n=len(questions) - len(missing),
        missing=len(missing),
        missing_reason=first,
        truncated=sum(question.truncated for question in questions),
        dropped=sum(question.dropped for question in questions),
        tokens=sum(len(request.tokens) for q in questions for request in q.requests),
    )


def _from_harness(result: HarnessResult, label: str, shots: int) -> TaskResult:
    """Convert a harness result. `chance` stays 0: only the gauntlet file has the baseline."""
    best = result.accuracy
    name, value, error = best if best is not None else ("", None, None)
    values = {key: value for key, (value, _) in result.metrics.items()}
    errors = {key: error for key, (_, error) in result.metrics.items() if error is not None}
    failure = result.failure
    if best is None and failure is None:
        failure = "lm-evaluation-harness gives no accuracy for it"
    return TaskResult(
        label=label,
        num_fewshot=shots,
        metric=name,
        n=result.n,
        accuracy=value,
        stderr=error,
        chance=0.0,
        majority=0.0,
        truncated=result.truncated,
        failure=failure,
        metrics=values,
        stderrs=errors,
        mode="lm_eval",
        interval=None if value is None else _share_interval(value, result.n),
    )


def _share_interval(accuracy: float, n: int) -> Interval | None:
    """Return the 95 % interval of an accuracy; None if it is not a share of `n` rows."""
    n_right = accuracy * n
    is_share = 0 <= accuracy <= 1 and n > 0 and abs(n_right - round(n_right)) < 1e-6
    return wilson(round(n_right), n) if is_share else None
