"""Validation of request fields, and conversion of a request to sequences for the engine.

`app` parses bodies with `read_fields`, and calls `make_completion_request` and `make_chat_request`.
`responses` formats the results. Every field is either supported, or rejected by name if it would
change the answer. Only fields without an effect (`HARMLESS`, and neutral values of unsupported
fields) are ignored. `ServedModel` has the properties of the model that requests depend on.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.inference.text import TextStream

MOST_STOPS = 64
_INT = 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=2**30)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RequestError(Exception):
    """Error reply to a request, in the form that OpenAI's clients expect."""

    def __init__(self, status: int, message: str, *, param: str = "", code: str = "") -> None:
        """Set the contents of the reply.

        Args:
            status: HTTP status.
            message: the fault, and what to write instead.
            param: name of the field.
            code: error code for programs.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the reply."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param or None}
        return {"error": error | {"code": self.code or None}}


_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed reply."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request; unset fields have OpenAI's defaults."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-_INT, le=_INT)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, seed: int) -> Sampling:
        """Return the sampling settings of an answer with this seed."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=self.top_p if self.top_p and self.top_p < 1 else None,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=seed,
        )

    def check(self) -> None:
        """Check that the fields fit each other.

        Raises:
            RequestError: they do not.
        """
        if "" in self.stops:
            raise RequestError(400, "stop: an empty text ends nothing; remove it", param="stop")
        if len(self.stops) > MOST_STOPS:
            say = f"stop: {len(self.stops)} texts; write {MOST_STOPS} at most"
            raise RequestError(400, say, param="stop")
        if self.stream_options is not None and not self.stream:
            say = "stream_options: has no effect without stream: true"
            raise RequestError(400, say, param="stream_options")


class CompletionFields(RequestFields, kw_only=True):
    """Fields of /v1/completions."""

    prompt: str | list[str | Id | list[Id]]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None

    def texts_or_ids(self) -> list[str | list[int]]:
        """Return the list of prompts.

        Raises:
            RequestError: texts and token ids are mixed, or there are no prompts.
        """
        items = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [part for part in items if isinstance(part, int)]
        prompts: list[str | list[int]] = [part for part in items if not isinstance(part, int)]
        if ids and not prompts:
            return [ids]
        if ids:
            say = "prompt: mixes tokens with texts or lists; write one text, its tokens, or a list"
            raise RequestError(400, f"{say} of either", param="prompt")
        if not prompts or [] in prompts:
            raise RequestError(400, "prompt: holds no tokens; write some", param="prompt")
        return prompts

    def check(self) -> None:
        """Check that the fields fit each other.

        Raises:
            RequestError: they do not.
        """
        super().check()
        if self.max_tokens == 0 and not self.echo:
            say = "max_tokens: 0 asks for nothing without echo: true; write 1 or more"
            raise RequestError(400, say, param="max_tokens")


class ChatFields(RequestFields, kw_only=True):
    """Fields of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None

    def check(self) -> None:
        """Check that the fields fit each other.

        Raises:
            RequestError: they do not.
        """
        super().check()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                say = "max_tokens: differs from max_completion_tokens, its newer name; write one"
                raise RequestError(400, say, param="max_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens == 0:
            raise RequestError(
                400, "max_tokens: 0 asks for nothing; write 1 or more", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            say = "top_logprobs: has no effect without logprobs: true"
            raise RequestError(400, say, param="top_logprobs")

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template, with plain text contents.

        Raises:
            RequestError: a message has no role, or contents other than text.
        """
        return [_plain(message, f"messages[{n}]") for n, message in enumerate(self.messages)]


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message with its content parts joined; `place` names it in errors."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            _part_text(part, f"{place}.content[{n}]") for n, part in enumerate(content)
        )
    if not isinstance(message.get("role"), str):
        raise RequestError(400, f"{place}.role: write system, user or assistant", param=place)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(400, f"{place}.content: is no text; write one", param=place)
    return {**message, "content": content}


def _part_text(part: Any, place: str) -> str:
    """Return the text of a content part."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(400, f"{place}: {kind!r:.40} is not read here; write text", param=place)


HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "priority", "request_id"}
)
"""Fields that change nothing in an answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Unsupported fields of other servers, and their values without an effect."""
AnyFields = TypeVar("AnyFields", bound=RequestFields)


def read_fields(body: bytes, kind: type[AnyFields]) -> AnyFields:
    """Parse and validate a request body.

    Raises:
        RequestError: the body is not JSON, lacks a field, or has an unsupported field.
    """
    try:
        values = msgspec.json.decode(body)
        if not isinstance(values, dict):
            raise RequestError(400, "the body is no JSON object; write one: {...}")
        _refuse_unknown(values, kind)
        fields = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _of_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    fields.check()
    return fields


def _refuse_unknown(given: Mapping[str, Any], kind: type[RequestFields]) -> None:
    """Raise a RequestError for an unsupported field with an effect."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name in known or name in HARMLESS or value is None or value in NEUTRAL.get(name, ()):
            continue
        say = f"{name[:80]}: is not supported, and would change the answer; remove it"
        raise RequestError(400, say, param=name[:80], code="unsupported_parameter")


def _of_field(problem: str) -> RequestError:
    """Convert an error of msgspec, "Expected `int`, got `str` - at `$.n`", to our form."""
    message, _, location = problem.partition(" - at ")
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return RequestError(400, f"{missing[1]}: is required", param=missing[1])
    param = location.strip("`").removeprefix("$").lstrip(".")
    return RequestError(400, f"{param}: {message}" if param else message, param=param)


MOST_LOGPROBS = 20  # maximal number of alternatives of a token
_COMPLETION = 16  # default max_tokens of a completion, as in OpenAI's API
_SEEDS = 2**63


@dataclass(frozen=True)
class ServedModel:
    """The served model, and limits on a request.

    Attributes:
        name: name of the model for clients.
        tokenizer: tokenizer of the model.
        template: chat template; None: there is none, for the reason `no_template`.
        prompt_ids: encodes a prompt; see `OpenedModel.prompt_ids`.
        n_tokens: number of token ids of the model.
        length: maximal number of tokens of a prompt and its answer together.
        most_tokens: maximal number of tokens of an answer; None: as many as fit.
        most_sequences: maximal number of answers to all prompts of a request.
        end_ids: tokens that end an answer, apart from those that end a turn.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    prompt_ids: Callable[..., list[int]]
    n_tokens: int
    length: int
    most_tokens: int | None
    most_sequences: int
    end_ids: frozenset[int]
    no_template: str = ""

    @cached_property
    def spelled(self) -> Callable[[int], bytes]:
        """Return a cached function from a token to its bytes; see `Tokenizer.spelled`."""
        return lru_cache(1 << 16)(self.tokenizer.spelled)


@dataclass(frozen=True)
class RequestPrompt:
    """A prompt.

    Attributes:
        ids: token ids.
        is_text: whether the client sent a text, not token ids.
        echo: text that the answer begins with.
        starts: offset of each token's text in `echo`; only if log-probabilities of the prompt are
            reported.
    """

    ids: tuple[int, ...]
    is_text: bool = True
    echo: str = ""
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class CompletionRequest:
    """A validated HTTP request.

    Attributes:
        fields: fields from the client.
        prompts: prompts, with n answers each.
        requests: sequences for the engine: those of the first prompt first.
        stops: stop strings.
        stop_ids: tokens that end an answer, even if the engine does not stop at them.
        hides_special_tokens: whether special tokens are omitted from answers.
    """

    fields: RequestFields
    prompts: tuple[RequestPrompt, ...]
    requests: tuple[SequenceRequest, ...]
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    hides_special_tokens: bool

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens; each prompt counts once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> RequestPrompt:
        """Return the prompt of an answer."""
        return self.prompts[index * len(self.prompts) // len(self.requests)]


def make_completion_request(served: ServedModel, fields: CompletionFields) -> CompletionRequest:
    """Convert a request to /v1/completions.

    Raises:
        RequestError: the model does not support the request.
    """
    prompt_inputs = fields.texts_or_ids()
    _check_count(served, fields, len(prompt_inputs))  # before any is encoded
    prompts = tuple(_prompt(served, fields, prompt) for prompt in prompt_inputs)
    most = [_COMPLETION if fields.max_tokens is None else fields.max_tokens] * len(prompts)
    if fields.max_tokens is None:
        room = min(_COMPLETION, served.most_tokens or _COMPLETION)
        most = [max(1, min(room, served.length - len(prompt.ids))) for prompt in prompts]
    return _asked(served, fields, prompts, most, logprobs=fields.logprobs)


def make_chat_request(served: ServedModel, fields: ChatFields) -> CompletionRequest:
    """Convert a request to /v1/chat/completions.

    Raises:
        RequestError: the model does not support the request.
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
    ids = tuple(served.prompt_ids(text, add_special_tokens=bool(fields.add_special_tokens)))
    room = min(max(1, served.length - len(ids)), served.most_tokens or served.length)
    most = room if fields.max_tokens is None else fields.max_tokens
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _asked(served, fields, (RequestPrompt(ids),), [most], logprobs=logprobs, end_of_turn=end)


def _asked(
    served: ServedModel,
    fields: RequestFields,
    prompts: tuple[RequestPrompt, ...],
    most: Sequence[int],
    *,
    logprobs: int | None,
    end_of_turn: str = "",
) -> CompletionRequest:
    """Return the request for prompts whose answers have at most `most` tokens."""
    # limits
    n = fields.n or 1
    _check_size(served, fields, prompts, most)
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        name = "top_logprobs" if isinstance(fields, ChatFields) else "logprobs"
        raise RequestError(400, f"{name}: {logprobs}; write {MOST_LOGPROBS} at most", param=name)

    # stop strings and stop tokens
    stops, stop_ids = fields.stops, served.end_ids
    if end_of_turn:
        stops, stop_ids = (*stops, end_of_turn), stop_ids | _as_one(served.tokenizer, end_of_turn)
    if fields.ignore_eos:
        stops, stop_ids = fields.stops, frozenset()
    # a stop string that is a special token is found by its id; one that contains a special token
    # is found only in a text with special tokens
    special = served.tokenizer.special_tokens
    stop_ids |= {i for stop in stops if stop in special for i in served.tokenizer.encode_chat(stop)}
    others = [stop for stop in stops if stop not in special]
    hides = not any(token in stop for stop in others for token in special)

    # a sequence for each answer
    is_echoed = isinstance(fields, CompletionFields) and bool(fields.echo) and logprobs is not None
    answers = [(prompt, room) for prompt, room in zip(prompts, most, strict=True) for _ in range(n)]
    seeds = _seeds(fields.seed, [prompt.ids for prompt, _ in answers])
    requests = tuple(
        SequenceRequest(
            prompt.ids,
            room,
            fields.sampling(seed),
            # scoring clients expect one token after the echoed text, even if it ends the answer
            stop_ids=frozenset() if is_echoed else stop_ids,
            logprobs=logprobs,
            prompt_logprobs=is_echoed,
        )
        for (prompt, room), seed in zip(answers, seeds, strict=True)
    )
    hides = hides and fields.skip_special_tokens is not False
    return CompletionRequest(fields, prompts, requests, stops, stop_ids, hides)


def _seeds(seed: int | None, prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return a seed for each answer, given its prompt.

    With a seed in the request, the k-th answer to a prompt does not depend on other prompts.
    """
    if seed is None:
        return [secrets.randbelow(_SEEDS) for _ in prompts]
    counts, seeds = Counter[tuple[int, ...]](), []
    for prompt in prompts:
        seeds.append((seed + counts[prompt]) % _SEEDS)
        counts[prompt] += 1
    return seeds


def _prompt(
    served: ServedModel, fields: CompletionFields, prompt: str | list[int]
) -> RequestPrompt:
    """Return the token ids of a prompt and its echo.

    Raises:
        RequestError: a token id is invalid, or there are no tokens.
    """
    if isinstance(prompt, str):
        ids = served.prompt_ids(prompt, add_special_tokens=fields.add_special_tokens is not False)
    else:
        ids, largest = prompt, served.n_tokens - 1
        if max(ids) > largest:
            say = f"prompt: {max(ids)} is no token of this model; its last is {largest}"
            raise RequestError(400, say, param="prompt")
    if not ids:
        raise RequestError(400, "prompt: holds no tokens; write some", param="prompt")
    is_text = isinstance(prompt, str)
    if not fields.echo:
        return RequestPrompt(tuple(ids), is_text)
    starts = [] if fields.logprobs is None else _starts(served.tokenizer, prompt, len(ids))
    echo = prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
    return RequestPrompt(tuple(ids), is_text, echo, tuple(starts))


def _starts(tokenizer: Tokenizer, prompt: str | list[int], n_tokens: int) -> list[int]:
    """Return the offset of each prompt token's text.

    Characters that the tokenizer omits, such as spaces, belong to the following token.
    """
    if not isinstance(prompt, str):
        stream = TextStream(tokenizer.decode)
        for token in prompt:
            stream.push(token)
        return stream.starts
    _, spans = tokenizer.encode_spans(prompt, chat=True)
    starts, place = [0] * (n_tokens - len(spans)), 0  # of tokens before the text
    for begin, end in spans:
        starts.append(min(begin, place))
        place = max(place, end)
    return starts


def _check_count(served: ServedModel, fields: RequestFields, prompts: int) -> None:
    """Raise a RequestError for too many answers."""
    sequences = prompts * (fields.n or 1)
    if sequences > served.most_sequences:
        say = f"n: {sequences} answers in one request; write {served.most_sequences} at most"
        raise RequestError(400, say, param="n")


def _check_size(
    served: ServedModel,
    fields: RequestFields,
    prompts: Sequence[RequestPrompt],
    most: Sequence[int],
) -> None:
    """Raise a RequestError for answers or prompts that are too long."""
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
    """Return the token that is the complete end of a turn, if there is one."""
    ids = tokenizer.encode_chat(end)
    return frozenset(ids) if len(ids) == 1 else frozenset()
