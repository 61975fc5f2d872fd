"""Replies in the format of OpenAI's API, complete or streamed.

`app` creates a `ReplyWriter` for each request. An answer is a series of `AnswerDelta`s. A complete
answer is the sum of its deltas, so both kinds of reply use the same code.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmfoundry.inference.requests import Alternatives, TokenOutput
from llmfoundry.inference.serve.request_fields import (
    ChatFields,
    CompletionRequest,
    RequestError,
    ServedModel,
)
from llmfoundry.inference.text import TextStream

_LEAST = -9999.0  # replaces log-probabilities that JSON cannot represent, as in vLLM


@dataclass(frozen=True)
class ReportedToken:
    """A token with its log-probability and the offset of its text in the answer."""

    token: int
    logprob: float | None
    top: Alternatives
    offset: int


@dataclass
class AnswerDelta:
    """New part of an answer."""

    text: str = ""
    tokens: list[ReportedToken] = field(default_factory=list)
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


class AnswerChoice:
    """One answer in progress.

    Attributes:
        n_tokens: number of tokens sampled so far, including those of a stop string.
        is_done: whether the answer has a finish reason.
    """

    def __init__(self, served: ServedModel, asked: CompletionRequest, index: int) -> None:
        """Nothing is written yet; `index`: its place among the request's answers."""
        prompt, request = asked.prompt_of(index), asked.requests[index]
        self._stop_ids, self._starts = asked.stop_ids, prompt.starts
        decode = partial(served.tokenizer.decode, skip_special_tokens=asked.hides_special_tokens)
        self._stream = TextStream(
            decode,
            stops=asked.stops,
            prompt=prompt.ids,
            is_text=prompt.is_text,
        )
        self._echo = prompt.echo[: len(prompt.echo) - self._stream.unfinished]
        self._scores, self._keeps_end = request.logprobs is not None, request.prompt_logprobs
        self._waiting: list[TokenOutput] = []  # tokens whose text is not certain yet
        self._n_certain = 0  # tokens before them
        self._has_begun = not prompt.echo and not request.prompt_logprobs
        self._released = 0
        self.n_tokens, self.is_done = 0, False

    def take(self, news: TokenOutput) -> AnswerDelta:
        """Return the part of the answer that an output of the engine adds.

        Raises:
            RequestError: the logits are not finite.
        """
        # the first delta has the echo and the log-probabilities of the prompt
        part = AnswerDelta()
        if not self._has_begun:
            self._has_begun = True
            part.text = self._echo
            if news.prompt_logprobs is not None:
                pairs = zip(news.prompt_logprobs, self._starts, strict=True)
                part.tokens = [
                    ReportedToken(s.token, s.logprob, s.top, start) for s, start in pairs
                ]
        if news.finish == "error":
            raise RequestError(500, "the model's logits are not finite numbers")

        # text of the token; at the end, all remaining text
        text = ""
        finish: str | None = news.finish
        if news.token is not None:
            text, finish = self._push(news, news.token)
        if finish is not None and not self._stream.stopped:
            text += self._stream.close()
        if self._stream.stopped:
            finish = "stop"
        self._released += len(text)
        part.text, part.finish = part.text + text, finish
        self.is_done = finish is not None
        part.tokens += self._certain()
        return part

    def _push(self, news: TokenOutput, token: int) -> tuple[str, str | None]:
        """Add a token; return the text that is final now, and the finish reason."""
        if token in self._stop_ids:
            if self._keeps_end:
                self._waiting.append(news)
            return "", "stop"
        self.n_tokens += 1
        if self._scores:
            self._waiting.append(news)
        return self._stream.push(token), news.finish

    def _certain(self) -> list[ReportedToken]:
        """Return the tokens whose text was released at least in part; at the end, all with text."""
        if not self._waiting:
            return []
        starts = self._stream.starts[self._n_certain :]
        n = sum(start < self._released for start in starts)
        if self.is_done and not self._stream.stopped:
            n = len(self._waiting)
        starts.append(self._released)  # offset of the token that ended the answer
        reported = []
        for news, start in zip(self._waiting[:n], starts, strict=False):
            if news.token is not None:
                offset = len(self._echo) + start
                reported.append(ReportedToken(news.token, news.logprob, news.top, offset))
        self._waiting, self._n_certain = self._waiting[n:], self._n_certain + n
        return reported


class ReplyWriter:
    """Formatter of the reply to one request."""

    def __init__(self, served: ServedModel, asked: CompletionRequest) -> None:
        """Nothing is written yet."""
        self._asked, self._bytes = asked, served.spelled
        self._is_chat = isinstance(asked.fields, ChatFields)
        self._scores = asked.requests[0].logprobs is not None
        self.choices = [AnswerChoice(served, asked, n) for n in range(len(asked.requests))]
        prefix, kind = (
            ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        )
        if self._is_chat and asked.fields.stream:
            kind += ".chunk"
        identity = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind}
        self._head = {**identity, "created": int(time.time()), "model": served.name}

    def usage(self) -> dict[str, int]:
        """Return the number of tokens read and written so far."""
        read, written = self._asked.prompt_tokens, sum(c.n_tokens for c in self.choices)
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return counts | {"total_tokens": read + written}

    def whole(self, parts: Mapping[int, AnswerDelta]) -> dict[str, Any]:
        """Return the complete reply, from the joined deltas of each answer."""
        choices = [self._choice(index, part) for index, part in sorted(parts.items())]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of an answer in a stream; None for completions."""
        if not self._is_chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        )

    def part(self, index: int, part: AnswerDelta) -> dict[str, Any]:
        """Return the chunk of a delta in a stream."""
        return self._chunk([self._choice(index, part)])

    def last(self) -> dict[str, Any] | None:
        """Return the last chunk of a stream, with the usage; None if it was not requested."""
        options = self._asked.fields.stream_options
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return None
        return {**self._head, "choices": [], "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        options = self._asked.fields.stream_options
        chunk = {**self._head, "choices": choices}
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            chunk["usage"] = self.usage() if options.continuous_usage_stats else None
        return chunk

    def _choice(self, index: int, part: AnswerDelta) -> dict[str, Any]:
        scores = None
        if self._scores:
            scores = self._chat_scores(part) if self._is_chat else self._completion_scores(part)
        end = {"logprobs": scores, "finish_reason": part.finish}
        if not self._is_chat:
            return {"index": index, "text": part.text, **end}
        if self._asked.fields.stream:
            delta = {"content": part.text} if part.text else {}
            return {"index": index, "delta": delta, **end}
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, **end}

    def _completion_scores(self, part: AnswerDelta) -> dict[str, Any]:
        """Return the `logprobs` object of a completion."""
        texts: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for reported in part.tokens:
            texts.append(self._spelling(reported.token))
            offsets.append(reported.offset)
            if reported.logprob is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(_number(reported.logprob))
            pairs = _with_own(reported)
            tops.append({self._spelling(token): _number(value) for token, value in pairs})
        scores: dict[str, Any] = {"tokens": texts, "token_logprobs": logprobs}
        return scores | {"top_logprobs": tops, "text_offset": offsets}

    def _spelling(self, token: int) -> str:
        """Return the text of a token; for incomplete characters its bytes, in OpenAI's notation."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _chat_scores(self, part: AnswerDelta) -> dict[str, Any]:
        """Return the `logprobs` object of a chat answer."""

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            raw = self._bytes(token)
            number = _number(_LEAST if logprob is None else logprob)
            text = raw.decode("utf-8", errors="replace")
            return {"token": text, "logprob": number, "bytes": list(raw)}

        content = []
        for reported in part.tokens:
            top = [entry(token, value) for token, value in reported.top]
            content.append(entry(reported.token, reported.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def added(parts: Iterable[AnswerDelta]) -> AnswerDelta:
    """Join several deltas of an answer."""
    answer = AnswerDelta()
    for part in parts:
        answer.text += part.text
        answer.tokens += part.tokens
        answer.finish = part.finish or answer.finish
    return answer


def _with_own(shown: ReportedToken) -> Alternatives:
    """Return the most probable tokens and the sampled token."""
    if shown.logprob is None or any(token == shown.token for token, _ in shown.top):
        return shown.top
    return (*shown.top, (shown.token, shown.logprob))


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
