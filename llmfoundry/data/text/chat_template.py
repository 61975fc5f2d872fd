"""`ChatTemplate`: messages to the text that a model reads, by a Jinja template.

`Tokenizer.chat` gives the one of a tokenizer; fine-tuning, generation and the gauntlet render with
it. Filters, functions and settings are those of transformers, so that the same template gives the
same text there. A template comes with a stranger's model: it runs in Jinja's sandbox, and within
bounds of its own, as the sandbox lets loops run for ever and texts grow without end.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError

Message = Mapping[str, Any]
"""role (system, user, assistant, tool), content, and by template tool_calls and others."""

NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "zephyr": (),
    "mpt": ("<|im_start|>", "<|im_end|>"),
}
"""The named templates (chat_templates/*.jinja) and the special tokens that each needs. Zephyr's
marks are plain text, and a turn ends with the tokenizer's own end of text: it fits any
tokenizer."""

_FOLDER = Path(__file__).parent / "chat_templates"
_LONGEST = 1 << 26  # characters of a rendered conversation
_MARK = "\ue000answer\ue001"  # stands for an answer that no template has in it


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], *, tools: str = "") -> None:
        """Compile.

        Args:
            text: the Jinja source.
            special_tokens: bos_token, eos_token and others by name.
            tools: the source to use where tools are given; "": the same.

        Raises:
            UserError: it is not a template.
        """
        self.text, self.special_tokens = text, dict(special_tokens)
        self._tools_text = tools or text
        self._compiled = _compiled(text)
        self._compiled_tools = _compiled(self._tools_text)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of some messages.

        Args:
            messages: in order.
            add_generation_prompt: end with what an answer begins with.
            tools: JSON schemas of functions that the model may call.

        Raises:
            UserError: the template refuses the messages, or does what it may not.
        """
        from jinja2.exceptions import TemplateError

        template = self._compiled_tools if tools else self._compiled
        template.environment.begin()
        try:
            text = template.render(
                **self.special_tokens,
                messages=[_with_reasoning(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise UserError(f"the chat template refuses it: {_line(error)}") from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise UserError(f"the chat template has no end: {type(error).__name__}") from error
        except Exception as error:  # a template may raise whatever its expressions do
            reason = f"{type(error).__name__}: {_line(error)}"
            raise UserError(f"the chat template fails: {reason}") from error
        if len(text) > _LONGEST:
            raise UserError(f"the chat template makes more than {_LONGEST:,} characters")
        return text

    def names(self, word: str) -> bool:
        """Whether the source names a key or a role of messages, as `.weight` or `developer`."""
        return _names(self.text, word) or _names(self._tools_text, word)

    @cached_property
    def end_of_turn(self) -> str:
        """What ends an answer: all that stands behind it in a conversation, white space left out.

        Where to stop a generation: <|im_end|>, <|eot_id|>, or the tokenizer's end of text.

        Raises:
            UserError: the template shows no answer, or nothing behind it.
        """
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        _, found, behind = self.render(turn).partition(_MARK)
        if not found or not behind.strip():
            raise UserError(
                "tokenizer.chat_template: nothing ends an answer in it, so that a model could not"
                " learn to stop; write one that ends turns, such as zephyr"
            )
        return behind.strip()

    def __reduce__(self) -> tuple[Any, ...]:
        # What Jinja compiles cannot be sent to another process.
        return _again, (self.text, self.special_tokens, self._tools_text)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the text of some messages."""
        facts = [self.text, self._tools_text, sorted(self.special_tokens.items())]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _again(text: str, special_tokens: Mapping[str, str], tools: str) -> ChatTemplate:
    return ChatTemplate(text, special_tokens, tools=tools)


def template_of(choice: str, *, key: str = "tokenizer.chat_template") -> str:
    """The Jinja source of a named template, or of a file.

    Raises:
        UserError: there is no such file, or it holds no text; the line begins with `key`.
    """
    file = _FOLDER / f"{choice}.jinja" if choice in NAMED else Path(choice).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        named = ", ".join(NAMED)
        reason = getattr(error, "strerror", None) or "holds no UTF-8 text"
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

    Raises:
        UserError: several, of which none is the default.
    """
    if isinstance(value, str):
        return value, ""
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    named = value if isinstance(value, dict) else {}
    default, tools = named.get("default"), named.get("tool_use", "")
    if isinstance(default, str) and isinstance(tools, str):
        return default, tools
    names = ", ".join(map(str, named)) or "none"
    raise UserError(
        f"tokenizer.chat_template: the tokenizer names several templates ({names}), and no default;"
        f" write {', '.join(NAMED)}, or a Jinja file"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _with_reasoning(message: Message) -> dict[str, Any]:
    """A message with its reasoning under each name that templates know, as in transformers."""
    names = ("reasoning_content", "reasoning", "thinking")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
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
    except (RecursionError, MemoryError, OverflowError) as error:
        raise UserError(f"tokenizer.chat_template: {type(error).__name__}; shorten it") from error
