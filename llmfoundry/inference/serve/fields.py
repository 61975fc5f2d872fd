"""What a client may write into a request, and the error for anything else.

`app` reads bodies with `read_fields`. The one idea: a field is either obeyed, or refused by name
where it would change the answer; only what changes nothing (`HARMLESS`, and others' neutral values)
is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from llmfoundry.inference.requests import Sampling

MOST_STOPS = 64
_INT = 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=2**30)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RequestError(Exception):
    """Why a request is not served, as OpenAI's clients expect it."""

    def __init__(self, status: int, message: str, *, param: str = "", code: str = "") -> None:
        """Say why.

        Args:
            status: of HTTP.
            message: what is wrong, and what to write.
            param: the field that it is about.
            code: a word for programs.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error object."""
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
    """How an answer streams."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Fields(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request; unset ones have OpenAI's defaults."""

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

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, seed: int) -> Sampling:
        """How tokens are drawn, with the seed of one answer."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=self.top_p if self.top_p and self.top_p < 1 else None,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=seed,
        )

    def check(self) -> None:
        """See that the fields fit each other.

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


class CompletionFields(Fields, kw_only=True):
    """A body of /v1/completions."""

    prompt: str | list[str | Id | list[Id]]
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None

    def texts_or_ids(self) -> list[str | list[int]]:
        """The prompts, one or several.

        Raises:
            RequestError: texts and tokens are mixed, or there are none.
        """
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [part for part in given if isinstance(part, int)]
        prompts: list[str | list[int]] = [part for part in given if not isinstance(part, int)]
        if ids and not prompts:
            return [ids]
        if ids:
            say = "prompt: mixes tokens with texts or lists; write one text, its tokens, or a list"
            raise RequestError(400, f"{say} of either", param="prompt")
        if not prompts or [] in prompts:
            raise RequestError(400, "prompt: holds no tokens; write some", param="prompt")
        return prompts

    def check(self) -> None:
        """See that the fields fit each other.

        Raises:
            RequestError: they do not.
        """
        super().check()
        if self.max_tokens == 0 and not self.echo:
            say = "max_tokens: 0 asks for nothing without echo: true; write 1 or more"
            raise RequestError(400, say, param="max_tokens")


class ChatFields(Fields, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None

    def check(self) -> None:
        """See that the fields fit each other.

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
        """The messages as chat templates take them: contents are texts.

        Raises:
            RequestError: a message has no role, or holds something other than text.
        """
        return [_plain(message, f"messages[{n}]") for n, message in enumerate(self.messages)]


def _plain(message: Mapping[str, Any], place: str) -> dict[str, Any]:
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
    "skip_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields of others that are not obeyed here, and the values that ask for nothing."""

AnyFields = TypeVar("AnyFields", bound=Fields)


def read_fields(body: bytes, kind: type[AnyFields]) -> AnyFields:
    """A body's fields, checked.

    Raises:
        RequestError: it is not JSON, lacks a field, or has one that cannot be obeyed.
    """
    try:
        given = msgspec.json.decode(body)
        if not isinstance(given, dict):
            raise RequestError(400, "the body is no JSON object; write one: {...}")
        _refuse_unknown(given, kind)
        fields = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _of_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    fields.check()
    return fields


def _refuse_unknown(given: Mapping[str, Any], kind: type[Fields]) -> None:
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name in known or name in HARMLESS or value is None or value in NEUTRAL.get(name, ()):
            continue
        say = f"{name[:80]}: is not supported, and would change the answer; remove it"
        raise RequestError(400, say, param=name[:80], code="unsupported_parameter")


def _of_field(problem: str) -> RequestError:
    """The words of msgspec, "Expected `int`, got `str` - at `$.n`", as ours."""
    said, _, place = problem.partition(" - at ")
    if missing := re.search(r"missing required field `(\w+)`", said):
        return RequestError(400, f"{missing[1]}: is required", param=missing[1])
    param = place.strip("`").removeprefix("$").lstrip(".")
    return RequestError(400, f"{param}: {said}" if param else said, param=param)
