"""From a request's fields to sequences for the engine.

`app` calls `ask_completion` and `ask_chat`; `answers` writes what was asked for. What both need to
know of the model is `Served`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.inference.requests import Request
from llmfoundry.inference.serve.fields import ChatFields, CompletionFields, Fields, RequestError

MOST_LOGPROBS = 20  # alternatives of a token
_COMPLETION = 16  # tokens of a completion where the request does not say; OpenAI's number
_SEEDS = 2**63


@dataclass(frozen=True)
class Served:
    """The model that is served, and what one request may ask of it.

    Attributes:
        name: what clients call it.
        tokenizer: its tokenizer.
        template: how messages become a text; None: there is none, for the reason `no_template`.
        prompt_ids: the ids of a text to be continued.
        n_tokens: ids below it are tokens of the model.
        length: tokens of a prompt and its answer together at most.
        most_tokens: tokens of an answer at most; None: as many as there is room for.
        most_sequences: answers to one request at most, over all its prompts.
        end_ids: tokens that end an answer, beside those that end a turn.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    prompt_ids: Callable[[str], list[int]]
    n_tokens: int
    length: int
    most_tokens: int | None
    most_sequences: int
    end_ids: frozenset[int]
    no_template: str = ""

    @cached_property
    def spelled(self) -> Callable[[int], bytes]:
        """The bytes of a token; see `Tokenizer.spelled`."""
        return lru_cache(1 << 16)(self.tokenizer.spelled)


@dataclass(frozen=True)
class Prompt:
    """A text to be continued; `shown` is what of it the answer begins with."""

    ids: tuple[int, ...]
    shown: str = ""


@dataclass(frozen=True)
class Asked:
    """What one HTTP request asks for.

    Attributes:
        fields: as the client wrote them.
        prompts: to each, n answers.
        requests: those to the first prompt, then to the second, and so on.
        stops: texts before which an answer ends.
        stop_ids: tokens before which it ends, whether or not the engine looks for them.
    """

    fields: Fields
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    stop_ids: frozenset[int]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of an answer."""
        return self.prompts[index * len(self.prompts) // len(self.requests)]


def ask_completion(served: Served, fields: CompletionFields) -> Asked:
    """What a body of /v1/completions asks for.

    Raises:
        RequestError: this model cannot do it.
    """
    given, decode = fields.texts_or_ids(), served.tokenizer.decode
    _check_count(served, fields, len(given))  # before any is encoded
    ids = [_encode(served, prompt) for prompt in given]
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in given]
    shown = texts if fields.echo else [""] * len(texts)
    prompts = tuple(Prompt(tuple(i), text) for i, text in zip(ids, shown, strict=True))
    most = [_COMPLETION if fields.max_tokens is None else fields.max_tokens] * len(prompts)
    if fields.max_tokens is None:
        room = min(_COMPLETION, served.most_tokens or _COMPLETION)
        most = [max(1, min(room, served.length - len(i))) for i in ids]
    return _asked(served, fields, prompts, most, logprobs=fields.logprobs)


def ask_chat(served: Served, fields: ChatFields) -> Asked:
    """What a body of /v1/chat/completions asks for.

    Raises:
        RequestError: this model cannot do it.
    """
    _check_count(served, fields, 1)
    template = served.template
    if template is None:
        say = f"model: {served.no_template}; ask /v1/completions, or serve with chat_template=..."
        raise RequestError(400, say, param="model")
    try:
        text = template.render(fields.plain_messages(), add_generation_prompt=True)
        end = template.end_of_turn
    except UserError as error:
        raise RequestError(422, f"messages: {error}", param="messages") from error
    ids = tuple(served.tokenizer.encode_chat(text))
    room = min(max(1, served.length - len(ids)), served.most_tokens or served.length)
    most = room if fields.max_tokens is None else fields.max_tokens
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _asked(served, fields, (Prompt(ids),), [most], logprobs=logprobs, end_of_turn=end)


def _asked(
    served: Served,
    fields: Fields,
    prompts: tuple[Prompt, ...],
    most: Sequence[int],
    *,
    logprobs: int | None,
    end_of_turn: str = "",
) -> Asked:
    """Sequences for prompts whose answers have `most` tokens at most."""
    n = fields.n or 1
    _check_size(served, fields, prompts, most)
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        name = "top_logprobs" if isinstance(fields, ChatFields) else "logprobs"
        raise RequestError(400, f"{name}: {logprobs}; write {MOST_LOGPROBS} at most", param=name)
    stops, stop_ids = fields.stops, served.end_ids
    if end_of_turn:
        stops, stop_ids = (*stops, end_of_turn), stop_ids | _as_one(served.tokenizer, end_of_turn)
    if fields.ignore_eos:
        stops, stop_ids = fields.stops, frozenset()
    is_echoed = isinstance(fields, CompletionFields) and bool(fields.echo) and logprobs is not None
    seed = secrets.randbelow(_SEEDS) if fields.seed is None else fields.seed
    requests = tuple(
        Request(
            prompt.ids,
            room,
            fields.sampling((seed + answer) % _SEEDS),
            # Who scores a text takes the last token of the answer for one more than the text's.
            stop_ids=frozenset() if is_echoed else stop_ids,
            logprobs=logprobs,
            prompt_logprobs=is_echoed,
        )
        for prompt, room in zip(prompts, most, strict=True)
        for answer in range(n)
    )
    return Asked(fields, prompts, requests, stops, stop_ids)


def _encode(served: Served, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return served.prompt_ids(prompt)
    largest = served.n_tokens - 1
    if max(prompt) > largest:
        say = f"prompt: {max(prompt)} is no token of this model; its last is {largest}"
        raise RequestError(400, say, param="prompt")
    return prompt


def _check_count(served: Served, fields: Fields, prompts: int) -> None:
    sequences = prompts * (fields.n or 1)
    if sequences > served.most_sequences:
        say = f"n: {sequences} answers in one request; write {served.most_sequences} at most"
        raise RequestError(400, say, param="n")


def _check_size(
    served: Served, fields: Fields, prompts: Sequence[Prompt], most: Sequence[int]
) -> None:
    for prompt, room in zip(prompts, most, strict=True):
        if served.most_tokens is not None and room > served.most_tokens:
            say = f"max_tokens: {room}; this server writes {served.most_tokens} at most"
            raise RequestError(400, say, param="max_tokens")
        if len(prompt.ids) + max(room, 1) - 1 > served.length:  # the last is never read
            raise RequestError(
                400,
                f"the prompt has {len(prompt.ids)} tokens and max_tokens is {room}, but this model"
                f" reads {served.length} tokens with its answer; shorten the prompt, or write a"
                " smaller max_tokens",
                param="max_tokens" if len(prompt.ids) < served.length else "prompt",
                code="context_length_exceeded",
            )


def _as_one(tokenizer: Tokenizer, end: str) -> frozenset[int]:
    """The token that is all of what ends a turn, if there is one."""
    ids = tokenizer.encode_chat(end)
    return frozenset(ids) if len(ids) == 1 else frozenset()
