"""`Gauntlet`: a file of tasks, read and tokenised once, run on a model any number of times.

The trainer and `scripts/eval.py` make one before the first step, so that every mistake in the file
or its rows shows then, and call `run` whenever an evaluation is due.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.categories import (
    GauntletResult,
    TaskResult,
    combine,
    grade,
    missing_benchmarks,
    wrong_baselines,
)
from llmfoundry.gauntlet.continuations import heldout_rows
from llmfoundry.gauntlet.prompts import Question, questions
from llmfoundry.gauntlet.rows import Row, chance, majority, read_rows
from llmfoundry.gauntlet.score import Autocast, score_requests
from llmfoundry.gauntlet.tasks import METRICS, TaskConfig, find, read_gauntlet

if TYPE_CHECKING:
    from llmfoundry.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Ready:
    """A task with one number of worked examples, tokenised."""

    blank: TaskResult
    questions: list[Question]


class Gauntlet:
    """Tasks ready to be asked.

    Attributes:
        problems: what a reader must know before any run: benchmarks without a task (their category
            will be n/a) and baselines that the rows contradict.
        n_tokens: tokens of all inputs, equal ones counted once, padding not counted.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        validation_texts: Callable[[], list[str]],
        max_rows: int | None = None,
    ) -> None:
        """Read, check and tokenise everything.

        Args:
            path: the gauntlet file.
            tokenizer: the model's.
            seq_len: longest input in tokens, and the length of packed rows.
            validation_texts: the run's held-out documents; called if a task is made from them.
            max_rows: rows of each task, from the first; unset: all of them.

        Raises:
            UserError: every mistake in the file, or the first kind of mistake in a task's rows.
        """
        self._file = read_gauntlet(path)
        self._seq_len, self._eos_id = seq_len, tokenizer.eos_id
        self._ready: list[_Ready] = []
        for task in self._file.tasks:
            rows = self._rows(task, validation_texts)
            for shots in task.num_fewshot:
                asked = questions(rows, task, shots, tokenizer, seq_len=seq_len, max_rows=max_rows)
                blank = self._blank(task, shots, rows[:max_rows], asked)
                self._ready.append(_Ready(blank, asked))
        blanks = [ready.blank for ready in self._ready]
        self._wrong_baselines = list(wrong_baselines(self._file.gauntlet, blanks))
        self.problems = [*missing_benchmarks(self._file.gauntlet, blanks), *self._wrong_baselines]
        self._requests = [r for t in self._ready for q in t.questions for r in q.requests]
        self.n_tokens = sum(map(len, {request.tokens for request in self._requests}))

    def run(
        self,
        root: nn.Module,
        *,
        device: torch.device,
        batch_rows: int,
        autocast: Autocast = nullcontext,
        rank: int = 0,
        world_size: int = 1,
    ) -> GauntletResult:
        """Ask everything; the same result on every rank, all of which must call it.

        Args:
            root: `Root`, as it is or wrapped by DDP or FSDP.
            device: where it is.
            batch_rows: rows of seq_len tokens in a forward pass at most.
            autocast: makes the context of the forward pass; unset: none.
            rank: this process.
            world_size: number of processes.
        """
        scores = iter(
            score_requests(
                root,
                self._requests,
                seq_len=self._seq_len,
                eos_id=self._eos_id,
                device=device,
                batch_rows=batch_rows,
                autocast=autocast,
                rank=rank,
                world_size=world_size,
            )
        )
        results = []
        for ready in self._ready:
            answers = [[next(scores) for _ in q.requests] for q in ready.questions]
            results.append(grade(ready.blank, ready.questions, answers))
        return combine(results, self._file.gauntlet, self._wrong_baselines)

    def _rows(self, task: TaskConfig, validation_texts: Callable[[], list[str]]) -> list[Row]:
        if task.dataset_uri.startswith("heldout://"):
            return heldout_rows(task, validation_texts())
        place = f"{self._file.path}: icl_tasks: {task.label}: dataset_uri"
        if "://" in task.dataset_uri:
            raise UserError(
                f"{place}: {task.dataset_uri}: only files on this machine and"
                " heldout://continuations can be read; download it and write its path"
            )
        return read_rows(find(task.dataset_uri, beside=self._file.path, key=place), task)

    def _blank(
        self, task: TaskConfig, shots: int, rows: list[Row], asked: list[Question]
    ) -> TaskResult:
        """What is known of a result before a model is."""
        names = [
            category.name
            for category in self._file.gauntlet.categories
            if any((b.name, b.num_fewshot) == (task.label, shots) for b in category.benchmarks)
        ]
        return TaskResult(
            label=task.label,
            num_fewshot=shots,
            metric=METRICS[task.icl_task_type],
            n=len(asked),
            accuracy=None,
            stderr=None,
            chance=chance(rows),
            majority=majority(rows),
            truncated=sum(question.truncated for question in asked),
            category=", ".join(names) or None,
        )
