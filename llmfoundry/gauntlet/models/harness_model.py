"""`HarnessModel`: an evaluated model as lm-evaluation-harness calls its models.

`harness` gives it to the harness's evaluator. Texts become tokens exactly as in the harness, so
that a model gets the numbers that the harness's own classes give it; only computing them is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from llmfoundry.data.text.tokenizer import special_tokens
from llmfoundry.errors import UserError, import_optional
from llmfoundry.gauntlet.prompts.chat import prompt_text
from llmfoundry.gauntlet.prompts.settings import Chat
from llmfoundry.gauntlet.questions import (
    EvaluatedModel,
    Prompt,
    Refusal,
    RefusedError,
    Request,
    TaskRow,
)

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

PREFIX = "lm_eval:"  # of a dataset_uri
Said = TypeVar("Said")
MAX_GEN_TOKS = 256  # where a task does not say; the harness's default
_NOTHING = TaskRow(("",), ("",), 0, "")  # a question without tools


class HarnessModel:
    """An evaluated model as the harness's evaluator calls models (`lm_eval.api.model.LM`).

    Texts become tokens exactly as in the harness's TemplateLM and HFLM: context and continuation
    are encoded as one text, spaces at the context's end belong to the continuation. But what a
    tokenizer puts behind a text is left out: in the harness it displaces the answer's first token.
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
            RefusedError: the model would not take a question.
        """
        pairs = [(str(request.args[0]), str(request.args[1])) for request in requests]
        encoded = [
            self._fit(request, context, continuation)
            for request, (context, continuation) in zip(
                requests, self._encode_pairs(pairs), strict=True
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
            UserError: a task leaves no room for a prompt.
            RefusedError: the model would not take a question.
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
                raise UserError(
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
            raise UserError(
                f"{PREFIX}{request.task_name}, row {request.doc_id}: the answer {text[:50]!r} has"
                f" {len(continuation)} tokens, but the model scores 1 to {self._seq_len}; remove"
                " the task"
            )
        whole = [*context, *continuation]
        self.truncated[request.task_name] += len(whole) > self._seq_len + 1
        return Request(tuple(whole[-(self._seq_len + 1) : -1]), tuple(continuation), text)

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Tokens of contexts and of continuations, by TemplateLM's rules."""
        texts: list[str] = []
        for context, continuation in pairs:
            texts += [context.rstrip(), context + continuation] if context else []
        encoded = iter(self._encode(texts))
        bare = iter(self._tokenizer.encode_batch([after for before, after in pairs if not before]))
        result = []
        for context, _ in pairs:
            head, whole = (next(encoded), next(encoded)) if context else ([], next(bare))
            if not head:  # the prefix token stands for the context
                head, whole = [self._prefix_id], [self._prefix_id, *whole]
            result.append((head, whole[len(head) :]))
        return result

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens after those of the tokenizer; a text that spells its prefix token has it once."""
        spelled = [bool(self._prefix) and text.startswith(self._prefix) for text in texts]
        plain = [
            text.removeprefix(self._prefix) if has else text
            for text, has in zip(texts, spelled, strict=True)
        ]
        distinct = list(dict.fromkeys(plain))
        encode = self._tokenizer.encode_batch
        if self._chat is not None:  # a template spells special tokens
            encode = self._tokenizer.encode_chat_batch
        tokens = dict(zip(distinct, encode(distinct), strict=True))
        return [
            [*([self._prefix_id] if has else self._before), *tokens[text]]
            for text, has in zip(plain, spelled, strict=True)
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
