"""Rendering of messages to text with a Jinja chat template.

Entry point: `ChatTemplate`, which `Tokenizer.chat` creates and fine-tuning, generation and the
gauntlet use. Filters, functions and settings are those of transformers, so that a template renders
the same text as there. Templates of untrusted models run in Jinja's sandbox and in a child process
with limits of time and memory (`bounded.py`), because the sandbox allows endless loops and texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from llmfoundry.bounded import OutOfBounds, run_bounded
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import read_guarded

Message = Mapping[str, Any]
"""role (system, user, assistant, tool), content, and by template tool_calls and others."""

_CHATML = ("<|im_start|>", "<|im_end|>")
_BAR, _SPACE = "\uff5c", "\u2581"  # characters in DeepSeek's tokens
_DEEPSEEK = (f"<{_BAR}User{_BAR}>", f"<{_BAR}Assistant{_BAR}>",
             f"<{_BAR}end{_SPACE}of{_SPACE}sentence{_BAR}>")  # fmt: skip
NAMED: dict[str, tuple[str, ...]] = {
    "chatml": _CHATML,
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "zephyr": (),
    "mpt": _CHATML,
    "qwen2.5": _CHATML,
    "qwen3": _CHATML,
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi3.5": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "glm4": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "gpt-oss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
}
"""The built-in templates (chat_templates/*.jinja) and the special tokens that each needs. Zephyr
works with every tokenizer: its marks are plain text, and a turn ends with the end-of-text token.
The templates from qwen2.5 on have {% generation %} marks around the model's turns."""

_FOLDER = Path(__file__).parent / "chat_templates"
_LONGEST = 1 << 22  # characters of a rendered conversation; more are allowed up to
_GROWTH = 10  # times the characters of its messages
_SANDBOX = "llmfoundry.data.text.chat_sandbox"  # imports jinja2, which is slow
ANSWER_MARK = "\ue000answer\ue001"  # placeholder of an answer; no template contains it
_TURN: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ANSWER_MARK},
]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class RenderedChat:
    """Rendered messages.

    Attributes:
        text: the text.
        answers: start and end (exclusive) of each {% generation %} block in `text`.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Compiled chat template with its special tokens.

    Attributes:
        text: the Jinja source.
        special_tokens: special tokens by variable name, such as bos_token.
        is_trusted: the template runs in this process, without limits.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        *,
        tools: str = "",
        file: str = "tokenizer.chat_template",
        is_trusted: bool | None = None,
    ) -> None:
        """Compile a template.

        Args:
            text: the Jinja source.
            special_tokens: bos_token, eos_token and others by name.
            tools: the source for conversations with tools; "": the same source.
            file: file of the source, for errors.
            is_trusted: run it in this process, without limits; None: trust only the built-in
                templates.

        Raises:
            UserError: the source is not valid.
        """
        self.text, self.special_tokens = text, dict(special_tokens)
        self._tools_text, self._file = tools or text, file
        is_built_in = is_trusted is None and {text, self._tools_text} <= own_sources()
        self.is_trusted = bool(is_trusted or is_built_in)
        try:
            self.run(_compile, [self])
        except OutOfBounds:
            raise
        except UserError as error:
            reason = str(error).removeprefix(f"{file}:").removeprefix("tokenizer.chat_template:")
            raise UserError(f"{file}:{reason}") from error

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of messages; `options` are those of `rendered`."""
        return self.rendered(messages, **options).text

    def rendered(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return the text of messages and the {% generation %} blocks in it.

        Args:
            messages: messages of a conversation, in order.
            add_generation_prompt: end with the start of the model's turn.
            tools: JSON schemas of functions that the model may call.
            variables: other variables of the template, such as enable_thinking.

        Raises:
            UserError: the template rejects the messages or fails.
        """
        inputs = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "variables": variables,
        }
        return self.run(partial(_render, self), [inputs])[0]

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call a function that renders on each item: in the bounded child, or here if trusted.

        Args:
            function: picklable, as `run_bounded` requires.
            items: arguments of the calls.

        Raises:
            OutOfBounds: the child exceeded a limit.
        """
        if self.is_trusted:
            return [function(item) for item in items]
        return run_bounded(function, items, file=self._file, imports=_SANDBOX)

    def has_marks(self, *, tools: bool = False) -> bool:
        """Return whether the source (with `tools`, that for tools) has {% generation %} marks."""
        return _GENERATION.search(self._tools_text if tools else self.text) is not None

    def reads(self, variable: str) -> bool:
        """Return whether the source reads a variable that it does not set (enable_thinking …)."""
        return variable in self.run(_variables, [self])[0]

    def names(self, word: str) -> bool:
        """Return whether the source mentions a key or role, such as `.weight` or `developer`."""
        return _names(self.text, word) or _names(self._tools_text, word)

    @cached_property
    def end_of_turn(self) -> str:
        """Return the text after an answer, without white space, at which generation stops.

        Examples: <|im_end|>, <|eot_id|>, the end of text. Text that follows only the last answer of
        a conversation is left out, such as Phi-3's end of text.

        Raises:
            UserError: no text follows an answer.
        """
        _, mark, suffix = self.render(_TURN).partition(ANSWER_MARK)
        if not mark or not suffix.strip():
            raise UserError(
                "tokenizer.chat_template: nothing ends an answer in it, so that a model could not"
                " learn to stop; write one that ends turns, such as zephyr"
            )
        # the same answer, followed by another message
        try:
            continued = self.render([*_TURN, _TURN[0]]).partition(ANSWER_MARK)[2]
        except OutOfBounds:
            raise
        except UserError:  # the template accepts no message after an answer
            continued = suffix
        # the longest sequence of words that both texts begin with
        ends = [suffix[: gap.start()] for gap in re.finditer(r"(?<=\S)(\s|$)", suffix)]
        shared = [end for end in ends if continued.startswith(end)]
        return (shared or ends)[-1].strip()

    @cached_property
    def ends_turns(self) -> bool:
        """Return whether text follows an answer; True if the template rejects the test messages."""
        try:
            return bool(self.end_of_turn)
        except OutOfBounds:
            raise
        except UserError as error:
            return "nothing ends an answer" not in str(error)

    def check_marks(self) -> None:
        """Check that the {% generation %} blocks contain each answer and its end.

        Raises:
            UserError: they do not, so that a model would not learn to stop.
        """
        try:
            rendered = self.rendered(_TURN * 2)
        except OutOfBounds:
            raise
        except UserError:  # the template rejects this conversation; rows are checked one by one
            return
        for answer in re.finditer(ANSWER_MARK, rendered.text) if self.has_marks() else ():
            spans = [span for span in rendered.answers if span[0] <= answer.start() < span[1]]
            if not spans or not rendered.text[answer.end() : spans[0][1]].strip():
                raise UserError(
                    "tokenizer.chat_template: its {% generation %} marks leave out"
                    f" {'what ends an answer' if spans else 'answers'}, so that a model would not"
                    " learn to stop; put {% endgeneration %} behind the end of the turn, or write"
                    f" {self.training_variant()}"
                )

    def training_variant(self) -> str:
        """Return a built-in template that renders a plain conversation alike, or all their names.

        It reads files, so it is never called in the bounded child.
        """
        templates = {name: ChatTemplate(template_of(name), self.special_tokens) for name in NAMED}
        with suppress(UserError):  # a template may reject these messages
            text = self.render(_TURN)
            prompt = self.render(_TURN[:1], add_generation_prompt=True)
            alike = [name for name in NAMED if templates[name].render(_TURN) == text]
            # first those whose generation prompt is the same, too
            alike.sort(
                key=lambda name: (
                    templates[name].render(_TURN[:1], add_generation_prompt=True) != prompt
                )
            )
            if alike:
                return alike[0]
        return f"one of {', '.join(NAMED)}"

    def __reduce__(self) -> tuple[Any, ...]:
        # a template compiled by Jinja cannot be pickled
        state = (self.text, self.special_tokens, self._tools_text, self._file, self.is_trusted)
        return _unpickled, state

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that the rendered text depends on."""
        facts = [self.text, self._tools_text, sorted(self.special_tokens.items())]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _unpickled(
    text: str, special_tokens: Mapping[str, str], tools: str, file: str, is_trusted: bool
) -> ChatTemplate:
    return ChatTemplate(text, special_tokens, tools=tools, file=file, is_trusted=is_trusted)


@cache
def own_sources() -> frozenset[str]:
    """Return the sources of the built-in templates."""
    return frozenset(file.read_text(encoding="utf-8") for file in _FOLDER.glob("*.jinja"))


def _compile(template: ChatTemplate) -> None:
    for text in {template.text, template._tools_text}:
        _compiled(text)


def _variables(template: ChatTemplate) -> set[str]:
    texts = (template.text, template._tools_text)
    return set().union(*(_compiled(text).environment.variables_of(text) for text in texts))


def _render(template: ChatTemplate, inputs: Mapping[str, Any]) -> RenderedChat:
    """Render the arguments of `ChatTemplate.rendered`; in the bounded child, or here if trusted.

    Arguments of tool calls are passed as objects, as transformers documents it, in whichever form
    they are. If a template fails on objects, or would write their Python repr, they are passed as
    JSON text, as in OpenAI's API.
    """
    messages = [_with_reasoning(message) for message in inputs["messages"]]
    with_objects = [_with_arguments(message, _as_object) for message in messages]
    try:
        text = _text(template, inputs, with_objects)
    except UserError:
        with_texts = [_with_arguments(message, _as_text) for message in messages]
        text = ""
        if with_texts != with_objects:  # there are tool calls
            with suppress(UserError):
                text = _text(template, inputs, with_texts)
        if not text:
            raise
    return _unmarked(text)


def _text(
    template: ChatTemplate, inputs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of converted messages, including the marks of {% generation %} blocks.

    Raises:
        UserError: the template rejects the messages, fails, or renders too long a text.
    """
    from jinja2.exceptions import TemplateError

    tools = inputs["tools"]
    source = _compiled(template._tools_text if tools else template.text)
    try:
        text = source.render(
            {
                **template.special_tokens,
                "tools": list(tools) if tools else None,
                "documents": None,
                **(inputs["variables"] or {}),
                "messages": messages,
                "add_generation_prompt": inputs["add_generation_prompt"],
            }
        )
    except TemplateError as error:
        raise UserError(f"the chat template refuses it: {_line(error)}") from error
    except MemoryError:  # memory limit of the child
        raise
    except (RecursionError, OverflowError) as error:
        raise UserError(f"the chat template has no end: {type(error).__name__}") from error
    except Exception as error:  # expressions of a template may raise anything
        reason = f"{type(error).__name__}: {_line(error)}"
        raise UserError(f"the chat template fails: {reason}") from error
    if len(text) > _LONGEST and len(text) > _GROWTH * len(str([messages, tools])):
        raise UserError(f"the chat template makes more than {_LONGEST:,} characters")
    return text


def half_a_pair(text: str) -> str:
    """Describe a lone surrogate in a text, which no tokenizer can encode; "" if there is none.

    JSON within JSON may contain one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half a surrogate pair (U+{ord(text[error.start]):04X}), which is not text"
    return ""


def call_arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call, parsed if they are JSON text, as in OpenAI's API.

    Raises:
        ValueError: the text is not a JSON object.
    """
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return arguments
    advice = "write an object, or a JSON text of one"
    try:
        # "" means no arguments
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        # after ";", the error about a long integer explains how a program can raise the limit
        reason = _line(error).partition(";")[0]
        raise ValueError(f"arguments are not JSON: {reason}; {advice}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"arguments spell no JSON object; {advice}")
    return parsed


def _with_arguments(message: Message, convert: Callable[[Message], Any]) -> dict[str, Any]:
    """Return a message with the arguments of each tool call replaced by `convert(function)`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call_with(call, convert) for call in calls]}


def _call_with(call: Any, convert: Callable[[Message], Any]) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call  # the template decides what to do with it
    function = {**function, "arguments": convert(function)}
    return {**call, "function": function} if "function" in call else function


class _Object(dict[str, Any]):
    """Arguments of a tool call whose str() fails, so that no template writes a Python repr."""

    def __str__(self) -> str:
        raise TypeError("the arguments of a call are no text; write them with tojson")


def _as_object(function: Message) -> Any:
    try:
        arguments = call_arguments(function)
    except ValueError as error:
        raise UserError(f"a call of {function.get('name')!r:.80}: its {error}") from error
    return _Object(arguments) if isinstance(arguments, dict) else arguments


def _as_text(function: Message) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def template_of(choice: str, *, key: str = "tokenizer.chat_template") -> str:
    """Return the Jinja source of a built-in template or of a file.

    Args:
        choice: name of a built-in template, or path.
        key: recipe key, for errors.

    Raises:
        UserError: the file cannot be read or is empty.
    """
    file = _FOLDER / f"{choice}.jinja" if choice in NAMED else Path(choice).expanduser()
    try:
        text = read_guarded(file).decode()
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = one_line(error) if is_text else "holds no UTF-8 text"
        raise UserError(
            f"{key}: cannot read {choice}: {reason}; write {', '.join(NAMED)}, or a Jinja file"
        ) from error
    if not text.strip():
        raise UserError(f"{key}: {choice} is empty; write a Jinja template into it")
    return text


def chosen_templates(value: Any) -> tuple[str, str]:
    """Return the default template of a tokenizer's configuration, and the one for tools or "".

    Args:
        value: a text, or several templates: a list of {name, template}, or a dict.

    Raises:
        UserError: there is no default template.
    """
    templates = named_templates(value)
    default, tools = templates.get("default"), templates.get("tool_use", "")
    if isinstance(default, str) and isinstance(tools, str):
        return default, tools
    names = ", ".join(map(str, templates)) or "none"
    raise UserError(
        f"tokenizer.chat_template: the tokenizer names several templates ({names}), and no default;"
        f" write {', '.join(NAMED)}, or a Jinja file"
    )


def named_templates(value: Any) -> dict[str, Any]:
    """Return the templates of a tokenizer's configuration by name; a single one is "default"."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
    return dict(value) if isinstance(value, dict) else {}


def with_variables(text: str, variables: Mapping[str, Any]) -> str:
    """Return a Jinja source with defaults for variables that its caller does not set.

    Raises:
        ValueError: a value has no JSON type.
    """
    lines = []
    for name, value in variables.items():
        is_always_set = name in ("tools", "documents")  # None if there are none
        unset = f"not {name}" if is_always_set else f"{name} is not defined"
        lines.append(f"{{%- if {unset} %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n")
    return "".join(lines) + text


def _literal(value: Any) -> str:
    """Return a value as a Jinja literal."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    if isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    raise ValueError(f"{value!r} is not a text, number, list or mapping")


def _unmarked(text: str) -> RenderedChat:
    """Remove the marks of {% generation %} blocks from a text; return it and the outermost blocks.

    Raises:
        UserError: the text has a lone surrogate.
    """
    from llmfoundry.data.text.chat_sandbox import BEGIN, END

    if half := half_a_pair(text):
        raise UserError(half)

    if BEGIN not in text:
        return RenderedChat(text, ())
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    open_blocks: list[int] = []  # starts of nested blocks
    length = 0  # of the text without marks
    for part in re.split(f"({BEGIN}|{END})", text):
        if part == BEGIN:
            open_blocks.append(length)
        elif part == END and open_blocks:
            begin = open_blocks.pop()
            if not open_blocks:
                spans.append((begin, length))
        elif part != END:
            parts.append(part)
            length += len(part)
    return RenderedChat("".join(parts), tuple(spans))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a message with its reasoning under every key that templates read, without nulls.

    Both as in transformers.
    """
    message = {name: value for name, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(4096)  # bounded, since words may come from rows of data
def _names(text: str, word: str) -> bool:
    return re.search(rf"[.'\"]{re.escape(word)}\b", text) is not None


@cache
def _compiled(text: str) -> Any:
    from jinja2.exceptions import TemplateError

    from llmfoundry.data.text.chat_sandbox import ChatSandbox  # jinja2 is slow to import

    try:
        return ChatSandbox().from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" line {line}" if line else ""
        raise UserError(
            f"tokenizer.chat_template:{where}: {_line(error)}; correct the template"
        ) from error
    except (RecursionError, OverflowError) as error:
        raise UserError(f"tokenizer.chat_template: {type(error).__name__}; shorten it") from error
