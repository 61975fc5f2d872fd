"""A row of one of the four formats to documents: pieces of text, each prompt or answer.

Called by `prepare`, between `reader` and `encode`. The one idea: what is learned of a conversation
is found by rendering its beginnings. The text up to an answer ends where the template would have
the model begin, so answers are exact to the character, end of turn included, whatever the
template; where a beginning is not a prefix of the whole, the row is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry.data.supervised.bad_rows import NotOfFormat
from llmfoundry.data.supervised.messages import (
    Messages,
    check_answers,
    check_shown,
    conversation,
    for_template,
    is_messages,
    keys_not_read,
    kind,
    plain_messages,
    tools_of,
    unusual_order,
)
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.errors import UserError

_CONVERSATIONS = ("messages", "prompt", "response", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Segment:
    """A part of a document's text.

    Attributes:
        text: its characters.
        answer: whether the model wrote it; otherwise it is a prompt.
        weight: of its tokens where it is learned.
    """

    text: str
    answer: bool
    weight: float = 1.0


@dataclass(frozen=True)
class SegmentedText:
    """What becomes one sequence of tokens.

    Attributes:
        pieces: in order; prompts and answers take turns.
        rendered: by a chat template, so that special tokens are read, and none is put before it.
        side: 1 chosen or desirable, -1 rejected or undesirable, 0 neither.
    """

    pieces: tuple[Segment, ...]
    rendered: bool
    side: int = 0


@dataclass(frozen=True)
class Example:
    """A row.

    Attributes:
        documents: one; of a preference two, the chosen one first.
        key: what decides whether it is held out: its text, or, of answers that are compared, their
            prompt's.
        contents: what the row itself holds in a rendered text.
        unread: keys of its messages that nothing reads, as messages[].key.
    """

    documents: tuple[SegmentedText, ...]
    key: str
    contents: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExampleOptions:
    """What the recipe asks of every row.

    Attributes:
        chat: the tokenizer's template; None: it has none.
        last_only: of a conversation only the last answer is learned.
        prompts: prompts may be learned.
    """

    chat: ChatTemplate | None
    last_only: bool = False
    prompts: bool = False

    def names(self, word: str) -> bool:
        """Whether the template reads a key, or a role, of messages."""
        return self.chat is not None and self.chat.names(word)


def example_of(row: Mapping[str, Any], form: str, options: ExampleOptions) -> Example:
    """The documents of a row.

    Args:
        row: with the columns of its format.
        form: prompt_response, chat, preference or unpaired.
        options: see there.

    Raises:
        EmptyAnswerError: of a conversation an answer is empty.
        ValueError: the row is not of the format, or the template does not fit; says why.
    """
    example = _FORMATS[form](row, options)
    unread = {
        f"{column}[].{key}"
        for column in _CONVERSATIONS
        for key in keys_not_read(row.get(column), options.names)
    }
    return replace(example, unread=tuple(sorted(unread))) if unread else example


def _prompt_response(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    prompt = _column(row, "prompt")
    given = [name for name in ("response", "completion") if row.get(name) is not None]
    if len(given) != 1:
        reason = "has both response and completion" if given else "no column 'response'"
        raise ValueError(f"{reason}; a row has one of response and completion")
    answer = row[given[0]]
    document = _answered(prompt, answer, given[0], options, None)
    return Example((document,), _key([prompt, answer]), _contents(prompt, answer))


def _chat(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    messages, tools = conversation(_column(row, "messages")), tools_of(row.get("tools"))
    document = _rendered_document(messages, tools, options, "messages")
    return Example((document,), _key([messages, tools]), _contents(messages))


def _preference(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    tools = tools_of(row.get("tools"))
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    sides = [_compared(row, name, tools, options) for name in ("chosen", "rejected")]
    prompts = [[piece for piece in d.pieces[:-1]] for d in sides]
    if prompts[0] != prompts[1]:
        raise ValueError("chosen and rejected differ before their last answer; they share a prompt")
    if sides[0].pieces[-1].text == sides[1].pieces[-1].text:
        raise ValueError("chosen and rejected are the same answer; nothing can be preferred")
    pair = (SegmentedText(sides[0].pieces, sides[0].rendered, 1),
            SegmentedText(sides[1].pieces, sides[1].rendered, -1))  # fmt: skip
    key = "".join(piece.text for piece in prompts[0])
    return Example(pair, key, _contents(row.get("prompt"), chosen, rejected))


def _unpaired(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    label = _column(row, "label")
    if isinstance(label, str) and label.lower() in ("true", "false"):
        label = label.lower() == "true"
    if isinstance(label, str) and label in ("0", "1"):
        label = int(label)
    if label not in (True, False):  # 1 and 0 too
        raise NotOfFormat(f"label is {label!r}; write true or false", "label is no truth value")
    _column(row, "prompt")
    document = _compared(row, "completion", tools_of(row.get("tools")), options)
    key = "".join(piece.text for piece in document.pieces[:-1])
    side = SegmentedText(document.pieces, document.rendered, 1 if label else -1)
    return Example((side,), key, _contents(row.get("prompt"), row.get("completion")))


_FORMATS: dict[str, Callable[[Mapping[str, Any], ExampleOptions], Example]] = {
    "prompt_response": _prompt_response,
    "chat": _chat,
    "preference": _preference,
    "unpaired": _unpaired,
}


def _compared(
    row: Mapping[str, Any], name: str, tools: list[dict[str, Any]] | None, options: ExampleOptions
) -> SegmentedText:
    """A prompt with an answer of which the last turn alone is learned."""
    options = ExampleOptions(options.chat, last_only=True)
    return _answered(row.get("prompt"), _column(row, name), name, options, tools)


def _answered(
    prompt: Any, answer: Any, name: str, options: ExampleOptions, tools: list[dict[str, Any]] | None
) -> SegmentedText:
    """A prompt and its answer: both text, or both messages, or a whole conversation as answer."""
    if not is_messages(answer):
        if prompt is None:
            raise ValueError("no column 'prompt'")
        if is_messages(prompt):
            raise ValueError(f"prompt is messages, and {name} is {kind(answer)}; write both alike")
        for column, value in (("prompt", prompt), (name, answer)):
            if not isinstance(value, str):
                raise ValueError(f"{column} holds {kind(value)}, not text")
        return SegmentedText((Segment(prompt, False), Segment(answer, True)), rendered=False)
    messages = plain_messages(answer, name=name)
    if messages and messages[0]["role"] in ("assistant", "tool"):
        if prompt is None:
            raise ValueError(f"{name} begins with the assistant, and there is no column 'prompt'")
        before = prompt if is_messages(prompt) else [{"role": "user", "content": prompt}]
        messages = [*plain_messages(before, name="prompt"), *messages]
    elif is_messages(prompt) and not _begins(messages, plain_messages(prompt, name="prompt")):
        raise ValueError(f"{name} is a whole conversation that does not begin with prompt")
    return _rendered_document(conversation(messages, name=name), tools, options, name)


def _rendered_document(
    messages: Messages, tools: list[dict[str, Any]] | None, options: ExampleOptions, name: str
) -> SegmentedText:
    """A conversation by the template, which takes its order and leaves none of it out."""
    check_answers(messages, last_only=options.last_only)
    shown = for_template(messages, options.names)
    try:
        document = SegmentedText(_turns(shown, tools, options), rendered=True)
    except UserError as error:
        unusual = unusual_order(messages, name)
        if options.chat is None or unusual is None:
            raise
        raise ValueError(f"{unusual}; {error}") from error
    check_shown(shown, "".join(piece.text for piece in document.pieces), name)
    return document


def _begins(messages: Messages, beginning: Messages) -> bool:
    return messages[: len(beginning)] == beginning


def _turns(
    messages: Messages, tools: list[dict[str, Any]] | None, options: ExampleOptions
) -> tuple[Segment, ...]:
    """Prompts and answers by turns, together the rendered conversation."""
    if options.chat is None:
        raise UserError(
            "tokenizer.chat_template: the tokenizer has none, and rows are conversations; write"
            " zephyr, which fits any tokenizer, chatml, llama3 or mpt, or a Jinja file"
        )
    weights = [float(m.get("weight", 1.0)) for m in messages]
    shown = [{name: v for name, v in m.items() if name != "weight"} for m in messages]
    places = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    try:
        return _rendered(shown, weights, places, tools, options)
    except _NotPrefix as error:
        if not options.last_only or options.prompts or len(places) == 1:
            raise ValueError(
                f"the chat template renders the conversation to messages[{error.place}] otherwise"
                " when more follows, so what is learned of it cannot be determined; write"
                " data.supervised.target_responses: last, or another tokenizer.chat_template"
            ) from None
        try:
            return _rendered(shown, weights, places[-1:], tools, options)
        except _NotPrefix:
            raise ValueError(
                "the chat template does not begin the last answer as it renders it, so what is"
                " learned cannot be determined; write another tokenizer.chat_template"
            ) from None


class _NotPrefix(ValueError):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place


def _rendered(
    messages: Messages,
    weights: Sequence[float],
    places: Sequence[int],
    tools: list[dict[str, Any]] | None,
    options: ExampleOptions,
) -> tuple[Segment, ...]:
    """The pieces around the answers at `places`."""
    assert options.chat is not None
    pieces, done = [], ""
    for n in places:
        prompt = options.chat.render(messages[:n], add_generation_prompt=True, tools=tools)
        whole = options.chat.render(messages[: n + 1], tools=tools)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise _NotPrefix(n)
        is_learned = not options.last_only or n == places[-1]
        pieces.append(Segment(prompt[len(done) :], False))
        pieces.append(Segment(whole[len(prompt) :], True, weights[n] if is_learned else 0.0))
        done = whole
    return tuple(pieces)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        has, no = ", ".join(row) or "none", f"no column {name!r}"
        raise NotOfFormat(f"{no}; it has {has}", no)
    return row[name]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _contents(*values: Any) -> tuple[str, ...]:
    """The texts of messages."""
    found: list[str] = []
    for value in values:
        if is_messages(value):
            found += [m["content"] for m in plain_messages(value, name="") if "content" in m]
    return tuple(found)
