"""Tasks of lm-evaluation-harness in a gauntlet: `dataset_uri: lm_eval:arc_easy`.

Entry point: `HarnessTasks`, which `Gauntlet` creates. The harness reads the rows, builds the
prompts and scores the answers. `HarnessModel` passes its requests to an `EvaluatedModel`, so that
its tasks use the prefix trees of this project, too. The harness is an optional dependency and is
imported on first use.
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
    GenerationPrompt,
    Refusal,
    RefusedError,
    ScoreRequest,
    TaskRow,
)
from llmfoundry.inference.requests import common_prefix
from llmfoundry.recipe.checks import nearest

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

FEWSHOT_SEED = 1234  # default of the harness
_BOOTSTRAPS = 1000  # samples, for standard errors without a formula
_ACCURACIES = ("acc", "exact_match", "em", "pass@1", "f1")


@dataclass(frozen=True)
class HarnessResult:
    """Metrics of one task of the harness, or of a group of tasks.

    Attributes:
        label: name in the harness.
        shots: few-shot examples before a question.
        n: number of questions.
        metrics: value and standard error (None: unknown) by `metric`, or by `metric,filter` if a
            task filters answers in several ways.
        truncated: number of texts whose start was cut to fit into the model's window.
        failure: why there are no metrics; None: there are.
    """

    label: str
    shots: int
    n: int
    metrics: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    truncated: int = 0
    failure: str | None = None

    @property
    def accuracy(self) -> tuple[str, float, float | None] | None:
        """Return name, value and error of the first accuracy metric; None if there is none."""
        for accuracy in _ACCURACIES:
            for name, (value, error) in self.metrics.items():
                if name.split(",")[0] == accuracy:
                    return name, value, error
        return None


class HarnessTasks:
    """Loaded tasks of the harness. `run` may be called repeatedly, also for several models."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_fewshot: int | None = None,
        limit: int | None = None,
        include_path: Path | None = None,
    ) -> None:
        """Find the tasks and read their rows, so that errors are reported before a long run.

        Args:
            names: tasks, groups or tags of the harness, or paths of its YAML files, with or without
                the prefix `lm_eval:`. A tag, or a group without an aggregate metric, gives one
                result per task.
            num_fewshot: number of few-shot examples; None: that of each task's settings.
            limit: number of questions per task, from the first; None: all.
            include_path: folder with more task files.

        Raises:
            UserError: the harness is not installed, has no such task, or cannot read its rows.
        """
        self._evaluator, self._limit = import_harness("lm_eval.evaluator"), limit
        names = [name.removeprefix(PREFIX) for name in names]
        folder = None if include_path is None else str(include_path)
        with _fixed_seeds():
            # first without the built-in tasks, whose index takes seconds
            manager = _index(folder, with_built_in=False)
            if not all(name in manager.all_subtasks or _is_file(name) for name in names):
                manager = _index(folder, with_built_in=True)
            self._loaded = {name: _load(manager, name, num_fewshot) for name in names}

    def run(
        self,
        model: EvaluatedModel,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        chat: Chat | None = None,
    ) -> list[HarnessResult]:
        """Evaluate a model. Every rank calls this and gets all results.

        Args:
            model: the model.
            tokenizer: tokenizer of the model.
            seq_len: maximal input length in tokens; longer inputs lose their start, as in the
                harness.
            chat: chat template and settings; None: plain prompts.

        Raises:
            UserError: an answer does not fit into seq_len.
        """
        wrapped = HarnessModel(model, tokenizer, seq_len=seq_len, chat=chat)
        results: list[HarnessResult] = []
        with _fixed_seeds():
            for name, loaded in self._loaded.items():
                results += _evaluate(self._evaluator, wrapped, name, loaded, self._limit)
        return results


@functools.lru_cache(maxsize=4)
def _index(include_path: str | None, *, with_built_in: bool) -> Any:
    """Return the harness's index of tasks: those of a folder, and its 14,000 built-in files."""
    paths = {} if include_path is None else {"include_path": include_path}
    return import_harness("lm_eval.tasks").TaskManager(include_defaults=with_built_in, **paths)


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def _load(manager: Any, name: str, num_fewshot: int | None) -> dict[str, Any]:
    """Load the tasks and groups of a name, check them and set their number of examples.

    Raises:
        UserError: there is no such task, its rows cannot be read, or it is not supported.
    """
    place = f"{PREFIX}{name}"
    if name not in manager.all_tasks and not _is_file(name):
        raise UserError(
            f"{place}: lm-evaluation-harness has no task of this name"
            f"{nearest(name, manager.all_tasks)}; list them: lm-eval ls tasks"
        )
    try:
        loaded = manager.load([name])
    except Exception as error:  # readers of datasets raise many unrelated types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{place}: cannot be read: {reason}; its rows come from the Hugging Face hub, unless"
            " its file names data_files: connect to the network, or fill the hub's cache"
        ) from error
    for task in loaded["tasks"].values():
        _check_task(f"{place}: {task.config.task}", task)
        default = task.get_config("num_fewshot")
        if num_fewshot is None:
            task.set_config(key="num_fewshot", value=default or 0)
        elif default == 0 and num_fewshot > 0:
            raise UserError(
                f"{place}: num_fewshot: {num_fewshot}, but the task's own file specifies 0, as"
                " those do whose prompts hold their examples; write num_fewshot: [0]"
            )
        else:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def _check_task(place: str, task: Any) -> None:
    """Reject tasks that run code, read images or sample answers.

    Raises:
        UserError: the task is one of these.
    """
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
    """Return whether generation settings sample tokens instead of choosing the likeliest one."""
    do_sample = settings.get("do_sample")
    if do_sample is False:
        return False
    return float(settings.get("temperature", 1.0 if do_sample else 0.0)) > 0


def _evaluate(
    evaluator: Any, model: HarnessModel, name: str, loaded: dict[str, Any], limit: int | None
) -> list[HarnessResult]:
    """Evaluate a model on the tasks of one name.

    Returns:
        One result for a group with an aggregate metric, else one per task.
    """
    tasks = loaded["tasks"]
    shots = {label: task.get_config("num_fewshot") for label, task in tasks.items()}
    model.truncated.clear()
    try:
        output = evaluator.evaluate(
            lm=model,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            **model.chat_arguments(),
        )
    except (FloatingPointError, RefusedError) as error:  # caused by the model: other tasks go on
        return [HarnessResult(name, max(shots.values()), 0, failure=str(error))]
    metrics = {label: _metrics(entry) for label, entry in output["results"].items()}
    counts = {label: entry["effective"] for label, entry in output["n-samples"].items()}
    truncated = {label: model.truncated[task.config.task] for label, task in tasks.items()}
    if name not in tasks and metrics.get(name):  # a group
        n, n_truncated = sum(counts.values()), sum(truncated.values())
        return [HarnessResult(name, max(shots.values()), n, metrics[name], n_truncated)]
    return [
        HarnessResult(label, shots[label], counts[label], metrics[label], truncated[label])
        for label in tasks
    ]


def _metrics(entry: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Parse values and errors of the harness: `acc,none: …, acc_stderr,none: …`."""
    metrics = {}
    for key, value in entry.items():
        name, _, filter_name = key.partition(",")
        if not filter_name or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = entry.get(f"{name}_stderr,{filter_name}")
        if not isinstance(error, int | float) or not math.isfinite(error):
            error = None  # "N/A", or NaN for a single question
        metrics[name if filter_name == "none" else key] = float(value), error
    return metrics


@contextlib.contextmanager
def _fixed_seeds() -> Iterator[None]:
    """Seed the random generators that the harness uses, and restore their states afterwards.

    A training run may continue after the evaluation. Multiprocessing of the harness is disabled,
    because it would fork a process that uses a GPU.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    multiproc = os.environ.get("DISABLE_MULTIPROC")
    random.seed(0)
    np.random.seed(1234)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if multiproc is None:
            del os.environ["DISABLE_MULTIPROC"]


PREFIX = "lm_eval:"  # of a dataset_uri
Output = TypeVar("Output")
MAX_GEN_TOKS = 256  # default of the harness for tasks that set none
_NO_TOOLS = TaskRow(("",), ("",), 0, "")  # a row without tools


class HarnessModel:
    """Adapter of an EvaluatedModel to the harness's interface of models (`lm_eval.api.model.LM`).

    Texts are tokenized exactly as in the harness's TemplateLM and HFLM: context and continuation
    are encoded as one text, spaces at the end of the context belong to the continuation, and
    special tokens in a text are parsed. There is one difference. Special tokens that the tokenizer
    appends to a text are left out, because in the harness they displace the first token of the
    answer.
    """

    rank, world_size = 0, 1  # for the evaluator; the model itself distributes work over ranks
    truncated: Counter[str]
    """Number of texts whose start was cut, by task."""

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
            tokenizer: tokenizer of the model.
            seq_len: maximal input length in tokens.
            chat: chat template and settings; None: plain prompts.
        """
        self._chat = chat
        self._model, self._tokenizer, self._seq_len = model, tokenizer, seq_len
        special = special_tokens(tokenizer)
        self._before, self._prefix_id = special.before, special.prefix
        self._prefix = tokenizer.decode([self._prefix_id])
        self.truncated = Counter()

    def chat_arguments(self) -> dict[str, Any]:
        """Return the chat arguments of the harness's evaluator."""
        if self._chat is None:
            return {}
        return {
            "apply_chat_template": True,
            "fewshot_as_multiturn": self._chat.multiturn,
            "system_instruction": self._chat.system or None,
        }

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which the harness caches prompts of the chat template."""
        return "" if self._chat is None else self._chat.template.fingerprint

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages; without a generation prompt, the last message is left open."""
        assert self._chat is not None, "called without a template"
        messages, chat = list(chat_history), replace(self._chat, prefix="")
        if not add_generation_prompt:
            chat = replace(chat, prefix=messages.pop()["content"])
        return prompt_text(messages, _NO_TOOLS, chat)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation and whether it is the greedy one.

        Raises:
            FloatingPointError: a log-probability is not finite, so that choices cannot be compared.
            RefusedError: the model refuses a question, or an answer is longer than its window.
        """
        encoded = [
            self._fit(request, context, continuation)
            for request, (context, continuation) in zip(
                requests, self._encode_requests(requests), strict=True
            )
        ]
        return self._scores(encoded, _places(requests))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each complete text, scored in windows of seq_len tokens.

        Raises:
            FloatingPointError, RefusedError: as `loglikelihood`.
        """
        # split every text into windows
        windows = import_harness("lm_eval.utils").get_rolling_token_windows
        encoded, request_indices = [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            tokens = self._encode([text])[0]
            for read, predicted in windows(tokens, self._prefix_id, self._seq_len, 1):
                encoded.append(ScoreRequest(tuple(read), tuple(predicted), text))
                request_indices.append(i)

        # score all windows, and add up those of each text
        places = [f"{requests[i].task_name}, row {requests[i].doc_id}" for i in request_indices]
        totals = [0.0] * len(requests)
        scores = self._scores(encoded, places)
        for i, (logprob, _) in zip(request_indices, scores, strict=True):
            totals[i] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the greedy continuation of each context, up to its first stop text.

        Raises:
            RefusedError: the model refuses a question, or a task leaves no room for a prompt.
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
            # an overlong prompt loses its start
            self.truncated[request.task_name] += len(tokens) > room
            last_tokens = tokens[-room:] or [self._prefix_id]
            prompts.append(GenerationPrompt(tuple(last_tokens), request.args[0], stops, n_new))
        return _without_refusals(self._model.generate(prompts), _places(requests))

    def _eos_text(self) -> str:
        return self._tokenizer.decode([self._tokenizer.eos_id])

    def _scores(
        self, encoded: Sequence[ScoreRequest], places: Sequence[str]
    ) -> list[tuple[float, bool]]:
        """Score requests; `places` name their rows in errors."""
        scores = _without_refusals(self._model.score(encoded), places)
        for score, place in zip(scores, places, strict=True):
            if not math.isfinite(score.logprob):
                raise FloatingPointError(f"a log-probability of {place} is not a finite number")
        return [(score.logprob, score.greedy) for score in scores]

    def _fit(
        self, request: Any, context: Sequence[int], continuation: Sequence[int]
    ) -> ScoreRequest:
        """Return a request with the last tokens that fit.

        seq_len + 1 tokens fit, because the last one is predicted but not read.
        """
        text = request.args[1]
        if not 0 < len(continuation) <= self._seq_len:
            raise RefusedError(
                f"{PREFIX}{request.task_name}, row {request.doc_id}: the answer {text[:50]!r} has"
                f" {len(continuation)} tokens, but the model scores 1 to {self._seq_len}; remove"
                " the task"
            )
        tokens = [*context, *continuation]
        self.truncated[request.task_name] += len(tokens) > self._seq_len + 1
        return ScoreRequest(tuple(tokens[-(self._seq_len + 1) : -1]), tuple(continuation), text)

    def _encode_requests(self, requests: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of contexts and continuations by the rules of TemplateLM.

        The harness fails if a continuation adds no token to its context. Here all continuations of
        that document are then scored from the first token that differs from the context's.
        """
        pairs = [(str(request.args[0]), str(request.args[1])) for request in requests]
        documents = [(r.task_name, r.doc_id, r.args[0]) for r in requests]
        encoded = self._encode_pairs(pairs)

        # for each document: the shortest common prefix, and whether a continuation adds no token
        borders: dict[Any, int] = {}
        without_tokens = set()
        for document, (head, tokens) in zip(documents, encoded, strict=True):
            border = min(common_prefix(head, tokens), borders.get(document, len(head)))
            borders[document] = border
            if len(tokens) <= len(head):
                without_tokens.add(document)

        # split the tokens
        result = []
        for document, (head, tokens) in zip(documents, encoded, strict=True):
            context = tokens[: borders[document]] if document in without_tokens else head
            result.append((context or [self._prefix_id], tokens[len(context) :]))
        return result

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each context alone and of context + continuation.

        The prefix token replaces an empty context.
        """
        texts: list[str] = []
        for context, continuation in pairs:
            if context:
                texts += [context.rstrip(), context + continuation]
        encoded = iter(self._encode(texts))
        without_context = [continuation for context, continuation in pairs if not context]
        continuations = iter(self._tokenizer.encode_chat_batch(without_context))
        result = []
        for context, _ in pairs:
            if context:
                head, tokens = next(encoded), next(encoded)
            else:
                head, tokens = [], next(continuations)
            if not head:
                head = [self._prefix_id]
                tokens = tokens if tokens[:1] == head else [*head, *tokens]
            result.append((head, tokens))
        return result

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, with the tokens that the tokenizer itself prepends.

        These are left out if a text begins with the prefix token.
        """
        distinct = list(dict.fromkeys(texts))
        tokens = dict(zip(distinct, self._tokenizer.encode_chat_batch(distinct), strict=True))
        result = []
        for text in texts:
            has_prefix = bool(self._prefix) and text.startswith(self._prefix)
            before = () if has_prefix else self._before
            result.append([*before, *tokens[text]])
        return result


def _places(requests: Sequence[Any]) -> list[str]:
    return [f"{request.task_name}, row {request.doc_id}" for request in requests]


def _without_refusals(outputs: Sequence[Output | Refusal], places: Sequence[str]) -> list[Output]:
    """Check that a model refused no question, which the harness cannot count; return its outputs.

    Raises:
        RefusedError: the model refused a question.
    """
    accepted = []
    for output, place in zip(outputs, places, strict=True):
        if isinstance(output, Refusal):
            raise RefusedError(f"{place} was refused: {output.reason}")
        accepted.append(output)
    return accepted


def import_harness(module: str) -> Any:
    """Import a module of the harness.

    Raises:
        UserError: the harness or one of its dependencies is not installed.
    """
    return import_optional(module, "lm_eval: a task of lm-evaluation-harness", extra="eval")
