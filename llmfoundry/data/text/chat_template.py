"""`ChatTemplate`: messages to the text that a model reads, by a Jinja template.

`Tokenizer.chat` gives the one of a tokenizer; fine-tuning, generation and the gauntlet render with
it. Filters, functions and settings are those of transformers, so that the same template gives the
same text there. A template comes with an untrusted model: one that is not of this package runs in
Jinja's sandbox and in a child process with bounds (`bounded.py`), as the sandbox lets loops run for
ever and texts grow without end.
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
_BAR, _SPACE = "\uff5c", "\u2581"  # of DeepSeek's tokens
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
"""The named templates (chat_templates/*.jinja) and the special tokens that each needs. Zephyr's
marks are plain text, and a turn ends with the tokenizer's own end of text: it fits any
tokenizer. From qwen2.5 on they write a model's own text with {% generation %} marks."""

_FOLDER = Path(__file__).parent / "chat_templates"
_LONGEST = 1 << 22  # characters of a rendered conversation, or
_GROWTH = 10  # times those of its messages
_SANDBOX = "llmfoundry.data.text.chat_sandbox"  # whose jinja2 is slow to import
ANSWER_MARK = "\ue000answer\ue001"  # stands for an answer that no template has in it
_TURN: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ANSWER_MARK},
]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Rendered:
    """The text of some messages.

    Attributes:
        text: its characters.
        answers: of each {% generation %} block in order, its first character and the one behind it.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled template with the special tokens that it may name.

    Attributes:
        text: the Jinja source.
        special_tokens: by name.
        is_trusted: it runs in this process, without bounds.
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
        """Compile.

        Args:
            text: the Jinja source.
            special_tokens: bos_token, eos_token and others by name.
            tools: the source to use where tools are given; "": the same.
            file: where it is from, for messages.
            is_trusted: it runs in this process, without bounds; unset: whether it is of this
                package.
        """
        self.text, self.special_tokens = text, dict(special_tokens)
        self._tools_text, self._file = tools or text, file
        own = is_trusted is None and {text, self._tools_text} <= own_sources()
        self.is_trusted = bool(is_trusted or own)
        try:
            self.run(_compile, [self])
        except OutOfBounds:
            raise
        except UserError as error:
            said = str(error).removeprefix(f"{file}:").removeprefix("tokenizer.chat_template:")
            raise UserError(f"{file}:{said}") from error

    def render(self, messages: Sequence[Message], **asked: Any) -> str:
        """The text of some messages; see `rendered`."""
        return self.rendered(messages, **asked).text

    def rendered(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of some messages, and what the template marks in it.

        Args:
            messages: in order.
            add_generation_prompt: end with what an answer begins with.
            tools: JSON schemas of functions that the model may call.
            variables: others that the template reads, such as enable_thinking.
        """
        asked = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "variables": variables,
        }
        return self.run(partial(_render, self), [asked])[0]

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function`, which renders, of each item: in the child with bounds, or here if trusted.

        Raises:
            OutOfBounds: see `run_bounded`, which also says what the function may be and return.
        """
        if self.is_trusted:
            return [function(item) for item in items]
        return run_bounded(function, items, file=self._file, imports=_SANDBOX)

    def has_marks(self, *, tools: bool = False) -> bool:
        """Whether {% generation %} marks what is learned; `tools`: in the source used with them."""
        return _GENERATION.search(self._tools_text if tools else self.text) is not None

    def reads(self, variable: str) -> bool:
        """Whether the source reads a variable that it does not set itself, as enable_thinking."""
        return variable in self.run(_variables, [self])[0]

    def names(self, word: str) -> bool:
        """Whether the source names a key or a role of messages, as `.weight` or `developer`."""
        return _names(self.text, word) or _names(self._tools_text, word)

    @cached_property
    def end_of_turn(self) -> str:
        """What ends an answer: all that stands behind it in a conversation, white space left out.

        Where to stop a generation: <|im_end|>, <|eot_id|>, or the tokenizer's end of text; without
        what stands behind the last answer only, as Phi-3's end of text does.
        """
        _, found, behind = self.render(_TURN).partition(ANSWER_MARK)
        if not found or not behind.strip():
            raise UserError(
                "tokenizer.chat_template: nothing ends an answer in it, so that a model could not"
                " learn to stop; write one that ends turns, such as zephyr"
            )
        try:
            followed = self.render([*_TURN, _TURN[0]]).partition(ANSWER_MARK)[2]
        except OutOfBounds:
            raise
        except UserError:  # takes no message behind an answer
            followed = behind
        ends = [behind[: gap.start()] for gap in re.finditer(r"(?<=\S)(\s|$)", behind)]
        shared = [end for end in ends if followed.startswith(end)]
        return (shared or ends)[-1].strip()

    @cached_property
    def ends_turns(self) -> bool:
        """Whether something ends an answer in it; also where it takes no conversation to ask by."""
        try:
            return bool(self.end_of_turn)
        except OutOfBounds:
            raise
        except UserError as error:
            return "nothing ends an answer" not in str(error)

    def check_marks(self) -> None:
        """See that what {% generation %} marks has the end of each answer."""
        try:
            whole = self.rendered(_TURN * 2)
        except OutOfBounds:
            raise
        except UserError:  # takes no such conversation; each row is looked at by itself
            return
        for found in re.finditer(ANSWER_MARK, whole.text) if self.has_marks() else ():
            spans = [span for span in whole.answers if span[0] <= found.start() < span[1]]
            if not spans or not whole.text[found.end() : spans[0][1]].strip():
                raise UserError(
                    "tokenizer.chat_template: its {% generation %} marks leave out"
                    f" {'what ends an answer' if spans else 'answers'}, so that a model would not"
                    " learn to stop; put {% endgeneration %} behind the end of the turn, or write"
                    f" {self.training_variant()}"
                )

    def training_variant(self) -> str:
        """A named template that renders a plain conversation as this one does, or all names.

        Reads their files: never called in the bounded child.
        """
        named = {name: ChatTemplate(template_of(name), self.special_tokens) for name in NAMED}
        with suppress(UserError):  # of a template that rendered `_TURN * 2`
            own, asked = self.render(_TURN), self.render(_TURN[:1], add_generation_prompt=True)
            alike = [name for name, template in named.items() if template.render(_TURN) == own]
            alike.sort(
                key=lambda n: named[n].render(_TURN[:1], add_generation_prompt=True) != asked
            )
            if alike:
                return alike[0]
        return f"one of {', '.join(NAMED)}"

    def __reduce__(self) -> tuple[Any, ...]:
        # What Jinja compiles cannot be sent to another process.
        kept = (self.text, self.special_tokens, self._tools_text, self._file, self.is_trusted)
        return _again, kept

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the text of some messages."""
        facts = [self.text, self._tools_text, sorted(self.special_tokens.items())]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _again(
    text: str, special_tokens: Mapping[str, str], tools: str, file: str, is_trusted: bool
) -> ChatTemplate:
    return ChatTemplate(text, special_tokens, tools=tools, file=file, is_trusted=is_trusted)


@cache
def own_sources() -> frozenset[str]:
    """The sources of the named templates."""
    return frozenset(file.read_text(encoding="utf-8") for file in _FOLDER.glob("*.jinja"))


def _compile(template: ChatTemplate) -> None:
    for text in {template.text, template._tools_text}:
        _compiled(text)


def _variables(template: ChatTemplate) -> set[str]:
    texts = (template.text, template._tools_text)
    return set().union(*(_compiled(text).environment.variables_of(text) for text in texts))


def _render(template: ChatTemplate, asked: Mapping[str, Any]) -> Rendered:
    """What `rendered` is asked for; in the child with bounds, or here if trusted.

    The arguments of tool calls are objects, as transformers documents it, whichever form they came
    in. A template that fails on objects, or would write them as Python does, gets JSON texts, as
    OpenAI's API writes them.
    """
    messages = [_with_reasoning(message) for message in asked["messages"]]
    objects = [_with_arguments(message, _as_object) for message in messages]
    try:
        text = _text(template, asked, objects)
    except UserError:
        texts = [_with_arguments(message, _as_text) for message in messages]
        text = ""
        if texts != objects:  # there are calls
            with suppress(UserError):
                text = _text(template, asked, texts)
        if not text:
            raise
    return _unmarked(text)


def _text(
    template: ChatTemplate, asked: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    """The text of messages in the form that the template reads, with its marks."""
    from jinja2.exceptions import TemplateError

    tools = asked["tools"]
    source = _compiled(template._tools_text if tools else template.text)
    try:
        text = source.render(
            {
                **template.special_tokens,
                "tools": list(tools) if tools else None,
                "documents": None,
                **(asked["variables"] or {}),
                "messages": messages,
                "add_generation_prompt": asked["add_generation_prompt"],
            }
        )
    except TemplateError as error:
        raise UserError(f"the chat template refuses it: {_line(error)}") from error
    except MemoryError:  # the bound of the child
        raise
    except (RecursionError, OverflowError) as error:
        raise UserError(f"the chat template has no end: {type(error).__name__}") from error
    except Exception as error:  # a template may raise whatever its expressions do
        reason = f"{type(error).__name__}: {_line(error)}"
        raise UserError(f"the chat template fails: {reason}") from error
    if len(text) > _LONGEST and len(text) > _GROWTH * len(str([messages, tools])):
        raise UserError(f"the chat template makes more than {_LONGEST:,} characters")
    return text


def half_a_pair(text: str) -> str:
    """What to say of a text that no tokenizer can read, as JSON within JSON may spell it; or ""."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half a surrogate pair (U+{ord(text[error.start]):04X}), which is not text"
    return ""


def call_arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call, as an object where they are a JSON text, as OpenAI's API writes it.

    Raises:
        ValueError: the text spells no object.
    """
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return arguments
    what = "write an object, or a JSON text of one"
    try:
        found = json.loads(arguments) if arguments.strip() else {}  # of a call without arguments
    except (ValueError, RecursionError) as error:
        reason = _line(error).partition(";")[0]  # of a long integer: how a program could allow it
        raise ValueError(f"arguments are not JSON: {reason}; {what}") from error
    if not isinstance(found, dict):
        raise ValueError(f"arguments spell no JSON object; {what}")
    return found


def _with_arguments(message: Message, convert: Callable[[Message], Any]) -> dict[str, Any]:
    """A message with what `convert` makes of each called function as its arguments."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call_with(call, convert) for call in calls]}


def _call_with(call: Any, convert: Callable[[Message], Any]) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call  # left to the template
    function = {**function, "arguments": convert(function)}
    return {**call, "function": function} if "function" in call else function


class _Object(dict[str, Any]):
    """Arguments that a template may read, but not write as Python does."""

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
    """The Jinja source of a named template, or of a file."""
    file = _FOLDER / f"{choice}.jinja" if choice in NAMED else Path(choice).expanduser()
    try:
        text = read_guarded(file).decode()
    except (OSError, ValueError) as error:
        named = ", ".join(NAMED)
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = one_line(error) if is_text else "holds no UTF-8 text"
        raise UserError(
            f"{key}: cannot read {choice}: {reason}; write {named}, or a Jinja file"
        ) from error
    if not text.strip():
        raise UserError(f"{key}: {choice} is empty; write a Jinja template into it")
    return text


def chosen_templates(value: Any) -> tuple[str, str]:
    """The default template, and that for tools or "", of what a tokenizer's configuration holds.

    Args:
        value: a text, or named templates: a list of {name, template}, or a dict.
    """
    named = named_templates(value)
    default, tools = named.get("default"), named.get("tool_use", "")
    if isinstance(default, str) and isinstance(tools, str):
        return default, tools
    names = ", ".join(map(str, named)) or "none"
    raise UserError(
        f"tokenizer.chat_template: the tokenizer names several templates ({names}), and no default;"
        f" write {', '.join(NAMED)}, or a Jinja file"
    )


def named_templates(value: Any) -> dict[str, Any]:
    """The templates of a tokenizer's configuration by name; a single one is the default."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
    return dict(value) if isinstance(value, dict) else {}


def with_variables(text: str, variables: Mapping[str, Any]) -> str:
    """A Jinja source with values for variables that its caller does not set.

    Raises:
        ValueError: a value is none that JSON has.
    """
    lines = []
    for name, value in variables.items():
        given = name in ("tools", "documents")  # which every caller gives, none as null
        unset = f"not {name}" if given else f"{name} is not defined"
        lines.append(f"{{%- if {unset} %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n")
    return "".join(lines) + text


def _literal(value: Any) -> str:
    """A value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    if isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    raise ValueError(f"{value!r} is not a text, number, list or mapping")


def _unmarked(text: str) -> Rendered:
    """A text without the marks in it, and where they were; of nested ones the outer."""
    from llmfoundry.data.text.chat_sandbox import BEGIN, END

    if half := half_a_pair(text):
        raise UserError(half)

    if BEGIN not in text:
        return Rendered(text, ())
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    open_: list[int] = []
    length = 0
    for part in re.split(f"({BEGIN}|{END})", text):
        if part == BEGIN:
            open_.append(length)
        elif part == END and open_:
            begin = open_.pop()
            spans += [] if open_ else [(begin, length)]
        elif part != END:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), tuple(spans))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _with_reasoning(message: Message) -> dict[str, Any]:
    """A message with its reasoning under each name that templates know, as in transformers.

    Without keys that are null, as there too.
    """
    message = {name: value for name, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(4096)  # words may come from rows
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
