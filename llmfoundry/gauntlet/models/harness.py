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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmfoundry.data.text.tokenizer import special_tokens
from llmfoundry.errors import UserError, import_optional
from llmfoundry.gauntlet.prompts.chat import prompt_text
from llmfoundry.gauntlet.questions import (
    Chat,
    EvaluatedModel,
    Prompt,
    Refusal,
    RefusedError,
    Request,
    TaskRow,
)
from llmfoundry.inference.requests import common_prefix
from llmfoundry.recipe.checks import nearest

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


PREFIX = "lm_eval:"  # of a dataset_uri
Said = TypeVar("Said")
MAX_GEN_TOKS = 256  # where a task does not say; the harness's default
_NOTHING = TaskRow(("",), ("",), 0, "")  # a question without tools


class HarnessModel:
    """An evaluated model as the harness's evaluator calls models (`lm_eval.api.model.LM`).

    Texts become tokens exactly as in the harness's TemplateLM and HFLM: context and continuation
    are encoded as one text, spaces at the context's end belong to the continuation, special tokens
    that a text spells are read. But what a tokenizer puts behind a text is left out: in the harness
    it displaces the answer's first token.
    """

    rank, world_size = 0, 1  # to the evaluator: ranks share the work below, in the model
    truncated: Counter[str]
    """By task: texts whose start was cut off."""

    def __init__(
        self,
        model: EvaluatedModel,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        chat: Chat | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            seq_len: longest input in tokens.
            chat: the template that questions are put by, and how; None: by none.
        """
        self._chat = chat
        self._model, self._tokenizer, self._seq_len = model, tokenizer, seq_len
        special = special_tokens(tokenizer)
        self._before, self._prefix_id = special.before, special.prefix
        self._prefix = tokenizer.decode([self._prefix_id])
        self.truncated = Counter()

    def chat_arguments(self) -> dict[str, Any]:
        """Of the harness's evaluator: whether and how questions become conversations."""
        if self._chat is None:
            return {}
        return {
            "apply_chat_template": True,
            "fewshot_as_multiturn": self._chat.multiturn,
            "system_instruction": self._chat.system or None,
        }

    @property
    def tokenizer_name(self) -> str:
        """What the harness knows a template's prompts by."""
        return "" if self._chat is None else self._chat.template.fingerprint

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as a text; the last of them is gone on with where no answer is to begin."""
        assert self._chat is not None, "asked for without a template"
        messages, chat = list(chat_history), replace(self._chat, prefix="")
        if not add_generation_prompt:
            chat = replace(chat, prefix=messages.pop()["content"])
        return prompt_text(messages, _NOTHING, chat)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one.

        Raises:
            FloatingPointError: a log-probability is not finite; every choice would look alike.
            RefusedError: the model would not take a question, or reads less than an answer has.
        """
        encoded = [
            self._fit(request, context, continuation)
            for request, (context, continuation) in zip(
                requests, self._encode_requests(requests), strict=True
            )
        ]
        return self._scores(encoded, _places(requests))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each whole text, in windows of seq_len tokens.

        Raises:
            FloatingPointError, RefusedError: as `loglikelihood`.
        """
        windows = import_harness("lm_eval.utils").get_rolling_token_windows
        encoded, owners = [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            tokens = self._encode([text])[0]
            for read, predicted in windows(tokens, self._prefix_id, self._seq_len, 1):
                encoded.append(Request(tuple(read), tuple(predicted), text))
                owners.append(i)
        places = [f"{requests[i].task_name}, row {requests[i].doc_id}" for i in owners]
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self._scores(encoded, places), strict=True):
            totals[i] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy continuation of each context, up to its first stop.

        Raises:
            RefusedError: the model would not take a question, or a task leaves no room for one.
        """
        normalize = import_harness("lm_eval.models.utils").normalize_gen_kwargs
        texts = self._encode([request.args[0] for request in requests])
        prompts = []
        for request, tokens in zip(requests, texts, strict=True):
            settings = normalize(request.args[1], MAX_GEN_TOKS)
            until = settings["until"]
            stops = tuple(dict.fromkeys(s for s in [*until, self._eos_text()] if s))
            n_new = settings["max_gen_toks"]
            if n_new >= self._seq_len:
                raise RefusedError(
                    f"{PREFIX}{request.task_name}: writes up to {n_new} tokens, but the model reads"
                    f" {self._seq_len} with its prompt; remove the task"
                )
            room = self._seq_len - n_new
            self.truncated[request.task_name] += len(tokens) > room
            kept = tokens[-room:] or [self._prefix_id]
            prompts.append(Prompt(tuple(kept), request.args[0], stops, n_new))
        return _taken(self._model.generate(prompts), _places(requests))

    def _eos_text(self) -> str:
        return self._tokenizer.decode([self._tokenizer.eos_id])

    def _scores(
        self, encoded: Sequence[Request], places: Sequence[str]
    ) -> list[tuple[float, bool]]:
        scores = _taken(self._model.score(encoded), places)
        for score, place in zip(scores, places, strict=True):
            if not math.isfinite(score.logprob):
                raise FloatingPointError(f"a log-probability of {place} is not a finite number")
        return [(score.logprob, score.greedy) for score in scores]

    def _fit(self, request: Any, context: Sequence[int], continuation: Sequence[int]) -> Request:
        """The last tokens that fit, of which the last is predicted only."""
        text = request.args[1]
        if not 0 < len(continuation) <= self._seq_len:
            raise RefusedError(
                f"{PREFIX}{request.task_name}, row {request.doc_id}: the answer {text[:50]!r} has"
                f" {len(continuation)} tokens, but the model scores 1 to {self._seq_len}; remove"
                " the task"
            )
        whole = [*context, *continuation]
        self.truncated[request.task_name] += len(whole) > self._seq_len + 1
        return Request(tuple(whole[-(self._seq_len + 1) : -1]), tuple(continuation), text)

    def _encode_requests(self, requests: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Tokens of contexts and of continuations, by TemplateLM's rules.

        A continuation without a token of its own stops the harness. Here the document's
        continuations are then all scored from the first token that is not the context's.
        """
        pairs = [(str(request.args[0]), str(request.args[1])) for request in requests]
        documents = [(r.task_name, r.doc_id, r.args[0]) for r in requests]
        encoded = self._encode_pairs(pairs)
        borders: dict[Any, int] = {}
        for document, (head, whole) in zip(documents, encoded, strict=True):
            border = min(common_prefix(head, whole), borders.get(document, len(head)))
            borders[document] = border
        lost = {
            document
            for document, (head, whole) in zip(documents, encoded, strict=True)
            if len(whole) <= len(head)
        }
        result = []
        for document, (head, whole) in zip(documents, encoded, strict=True):
            context = whole[: borders[document]] if document in lost else head
            result.append((context or [self._prefix_id], whole[len(context) :]))
        return result

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Tokens of contexts, and of them with their continuations."""
        texts: list[str] = []
        for context, continuation in pairs:
            texts += [context.rstrip(), context + continuation] if context else []
        encoded = iter(self._encode(texts))
        alone = [after for before, after in pairs if not before]
        bare = iter(self._tokenizer.encode_chat_batch(alone))
        result = []
        for context, _ in pairs:
            head, whole = (next(encoded), next(encoded)) if context else ([], next(bare))
            if not head:  # the prefix token stands for the context
                head = [self._prefix_id]
                whole = whole if whole[:1] == head else [*head, *whole]
            result.append((head, whole))
        return result

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens after those of the tokenizer, unless a text spells its prefix token itself."""
        distinct = list(dict.fromkeys(texts))
        tokens = dict(zip(distinct, self._tokenizer.encode_chat_batch(distinct), strict=True))
        spelled = [bool(self._prefix) and text.startswith(self._prefix) for text in texts]
        return [
            [*(() if has else self._before), *tokens[text]]
            for text, has in zip(texts, spelled, strict=True)
        ]


def _places(requests: Sequence[Any]) -> list[str]:
    return [f"{request.task_name}, row {request.doc_id}" for request in requests]


def _taken(said: Sequence[Said | Refusal], places: Sequence[str]) -> list[Said]:
    """All that a model said.

    Raises:
        RefusedError: it would not take a question; the harness has no way to count that.
    """
    for part, place in zip(said, places, strict=True):
        if isinstance(part, Refusal):
            raise RefusedError(f"{place} was refused: {part.reason}")
    return [part for part in said if not isinstance(part, Refusal)]


def import_harness(module: str) -> Any:
    """A module of the harness.

    Raises:
        UserError: it is not installed, or something that it needs is not.
    """
    return import_optional(module, "lm_eval: a task of lm-evaluation-harness", extra="eval")
