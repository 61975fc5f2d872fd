"""Tasks of lm-evaluation-harness as members of a gauntlet: `dataset_uri: lm_eval:arc_easy`.

`Gauntlet` makes `HarnessTasks`, which reads them and examines models with them. The harness reads
its rows, makes its prompts and judges the answers; any `EvaluatedModel` gives them through
`HarnessModel`, so that our prefix trees serve its tasks too. Nothing of it is imported before it is
asked for: it is an extra.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.harness_model import PREFIX, HarnessModel, import_harness
from llmfoundry.gauntlet.prompts.settings import Chat
from llmfoundry.gauntlet.questions import EvaluatedModel, RefusedError
from llmfoundry.recipe.values.checks import nearest

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

FEWSHOT_SEED = 1234  # the harness's own default
_BOOTSTRAPS = 1000  # for standard errors without a formula
_ACCURACIES = ("acc", "exact_match", "em", "pass@1", "f1")


@dataclass(frozen=True)
class HarnessResult:
    """What the harness says about one of its tasks, or a group of them.

    Attributes:
        label: its name there.
        shots: worked examples before a question.
        n: questions asked.
        metrics: value and standard error (None: unknown) by name; where a task filters answers in
            several ways, `metric,filter`.
        truncated: texts whose start was cut off to fit into the model's window.
        failure: why there are no metrics.
    """

    label: str
    shots: int
    n: int
    metrics: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    truncated: int = 0
    failure: str | None = None

    @property
    def accuracy(self) -> tuple[str, float, float | None] | None:
        """Name, value and error of the metric that is a share of right answers; None: none is."""
        for wanted in _ACCURACIES:
            for name, (value, error) in self.metrics.items():
                if name.split(",")[0] == wanted:
                    return name, value, error
        return None


class HarnessTasks:
    """Tasks of the harness, read; `run` may be called for several models, or at several times."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_fewshot: int | None = None,
        limit: int | None = None,
        include_path: Path | None = None,
    ) -> None:
        """Find the tasks and read their rows, so that mistakes show before a long run.

        Args:
            names: tasks, groups or tags of the harness, or paths of its YAML files; with or without
                `lm_eval:` before them. A tag, and a group without a score of its own, gives a
                result for each of its tasks.
            num_fewshot: worked examples; unset: as many as the task's own settings say.
            limit: questions of each task, from the first; unset: all.
            include_path: a folder with more task files.

        Raises:
            UserError: the harness is not installed, has no such task, or cannot read its rows.
        """
        self._evaluator, self._limit = import_harness("lm_eval.evaluator"), limit
        names = [name.removeprefix(PREFIX) for name in names]
        folder = None if include_path is None else str(include_path)
        with _own_seeds():
            manager = _index(folder, with_own=False)
            if not all(name in manager.all_subtasks or _is_file(name) for name in names):
                manager = _index(folder, with_own=True)
            self._loaded = {name: _load(manager, name, num_fewshot) for name in names}

    def run(
        self,
        model: EvaluatedModel,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        chat: Chat | None = None,
    ) -> list[HarnessResult]:
        """Examine a model; all processes call it, and all get all results.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            seq_len: longest input in tokens; longer ones lose their start, as in the harness.
            chat: the template that questions are put by, and how; None: by none.

        Raises:
            UserError: an answer cannot fit into seq_len.
        """
        wrapped = HarnessModel(model, tokenizer, seq_len=seq_len, chat=chat)
        results: list[HarnessResult] = []
        with _own_seeds():
            for name, loaded in self._loaded.items():
                results += _evaluate(self._evaluator, wrapped, name, loaded, self._limit)
        return results


@functools.lru_cache(maxsize=4)
def _index(include_path: str | None, *, with_own: bool) -> Any:
    """Where tasks are found: a folder's, and the harness's own 14,000 files, which take seconds."""
    paths = {} if include_path is None else {"include_path": include_path}
    return import_harness("lm_eval.tasks").TaskManager(include_defaults=with_own, **paths)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def _load(manager: Any, name: str, num_fewshot: int | None) -> dict[str, Any]:
    """The harness's tasks and groups by a name, with their shots set."""
    place = f"{PREFIX}{name}"
    if name not in manager.all_tasks and not _is_file(name):
        raise UserError(
            f"{place}: lm-evaluation-harness has no task of this name"
            f"{nearest(name, manager.all_tasks)}; list them: lm-eval ls tasks"
        )
    try:
        loaded = manager.load([name])
    except Exception as error:  # readers of data sets raise many unrelated types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{place}: cannot be read: {reason}; its rows come from the Hugging Face hub, unless"
            " its file names data_files: connect to the network, or fill the hub's cache"
        ) from error
    for task in loaded["tasks"].values():
        _check_task(f"{place}: {task.config.task}", task)
        own = task.get_config("num_fewshot")
        if num_fewshot is None:
            task.set_config(key="num_fewshot", value=own or 0)
        elif own == 0 and num_fewshot > 0:
            raise UserError(
                f"{place}: num_fewshot: {num_fewshot}, but the task's own file specifies 0, as"
                " those do whose prompts hold their examples; write num_fewshot: [0]"
            )
        else:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def _check_task(place: str, task: Any) -> None:
    """Refuse what the gauntlet does not do."""
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"{place}: runs programs that the model writes, which the gauntlet does not"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{place}: asks about images; the gauntlet's models read text only")
    settings = task.get_config("generation_kwargs") or {}
    if task.OUTPUT_TYPE == "generate_until" and _samples(settings):
        raise UserError(f"{place}: draws its answers at random; the gauntlet generates greedily")


def _samples(settings: Mapping[str, Any]) -> bool:
    """Whether settings of `generate` ask for more than the likeliest token."""
    asked = settings.get("do_sample")
    return asked is not False and float(settings.get("temperature", 1.0 if asked else 0.0)) > 0


def _evaluate(
    evaluator: Any, model: HarnessModel, name: str, loaded: dict[str, Any], limit: int | None
) -> list[HarnessResult]:
    """The results of one name."""
    tasks = loaded["tasks"]
    shots = {label: task.get_config("num_fewshot") for label, task in tasks.items()}
    model.truncated.clear()
    try:
        found = evaluator.evaluate(
            lm=model,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            **model.chat_arguments(),
        )
    except (FloatingPointError, RefusedError) as error:  # the model's fault: the others continue
        return [HarnessResult(name, max(shots.values()), 0, failure=str(error))]
    metrics = {label: _metrics(entry) for label, entry in found["results"].items()}
    counts = {label: entry["effective"] for label, entry in found["n-samples"].items()}
    cut = {label: model.truncated[task.config.task] for label, task in tasks.items()}
    if name not in tasks and metrics.get(name):
        total, most = sum(counts.values()), max(shots.values())
        return [HarnessResult(name, most, total, metrics[name], sum(cut.values()))]
    return [
        HarnessResult(label, shots[label], counts[label], metrics[label], cut[label])
        for label in tasks
    ]


def _metrics(entry: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Values and errors from the harness's `acc,none: …, acc_stderr,none: …`."""
    metrics = {}
    for key, value in entry.items():
        name, _, filter_name = key.partition(",")
        if not filter_name or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = entry.get(f"{name}_stderr,{filter_name}")
        if not isinstance(error, int | float) or not math.isfinite(error):
            error = None  # "N/A", or of a single question
        metrics[name if filter_name == "none" else key] = float(value), error
    return metrics


@contextlib.contextmanager
def _own_seeds() -> Iterator[None]:
    """Seed what the harness's tasks draw from, and put it back: a training run continues after.

    Its standard errors are computed in this process: it would fork one that holds a GPU.
    """
    states = random.getstate(), np.random.get_state()
    was_set = os.environ.get("DISABLE_MULTIPROC")
    random.seed(0)
    np.random.seed(1234)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if was_set is None:
            del os.environ["DISABLE_MULTIPROC"]
