"""A conversation to documents: its rendered text, and which of it the model wrote.

Called by `formats`. Where the template marks answers with {% generation %}, the marks say what is
learned. Elsewhere it is found by rendering beginnings: the text up to an answer ends where the
template would have the model begin, so answers are exact to the character, end of turn included.
Where a template renders an earlier answer otherwise than the last one (it drops its thoughts, or
ends no turn), the conversation is split: one document for each answer, rendered as the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.data.supervised.messages import Messages
from llmfoundry.data.text.chat_template import (
    ANSWER_MARK,
    NAMED,
    ChatTemplate,
    Rendered,
    own_sources,
)
from llmfoundry.errors import UserError

Spans = list[tuple[int, int]]


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
        marked: by the template: it is encoded as one text, as transformers does, and nothing is put
            behind it.
    """

    pieces: tuple[Segment, ...]
    rendered: bool
    side: int = 0
    marked: bool = False

    @property
    def prompt(self) -> tuple[Segment, ...]:
        """What stands before the last answer."""
        last = max(n for n, piece in enumerate(self.pieces) if piece.answer)
        return self.pieces[:last]


@dataclass(frozen=True)
class ExampleOptions:
    """What the recipe asks of every row.

    Attributes:
        chat: the tokenizer's template; None: it has none.
        last_only: of a conversation only the last answer is learned.
        prompts: prompts may be learned.
        variant: the template to choose where what is learned by this one cannot be determined.
        unusable: why no conversation can be learned by it; "": they can.
    """

    chat: ChatTemplate | None
    last_only: bool = False
    prompts: bool = False
    variant: str = f"one of {', '.join(NAMED)}"
    unusable: str = ""

    @classmethod
    def of(cls, chat: ChatTemplate | None, *, last_only: bool, prompts: bool) -> ExampleOptions:
        """Options with what is asked of a template before any row."""
        if chat is None:
            return cls(None, last_only, prompts)
        try:
            chat.check_marks()
        except UserError as error:
            return cls(chat, last_only, prompts, unusable=str(error))
        variant = cls.variant if chat.text in own_sources() else chat.training_variant()
        return cls(chat, last_only, prompts, variant)

    def names(self, word: str) -> bool:
        """Whether the template reads a key, or a role, of messages."""
        return self.chat is not None and self.chat.names(word)


@dataclass(frozen=True)
class TemplateInputs:
    """What a row gives the template beside its messages.

    Attributes:
        tools: JSON schemas of functions.
        variables: others that the template reads, such as enable_thinking.
    """

    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def conversation_documents(
    messages: Messages, asked: TemplateInputs, options: ExampleOptions
) -> list[SegmentedText]:
    """The documents of a conversation: one, or one for each answer.

    Args:
        messages: checked; the last is the assistant's.
        asked: see there.
        options: see there.

    Raises:
        ValueError: what is learned of it cannot be determined; says why.
        UserError: there is no template, or it refuses the messages.
    """
    if options.chat is None:
        raise UserError(
            "tokenizer.chat_template: the tokenizer has none, and rows are conversations; write"
            " zephyr, which fits any tokenizer, chatml, llama3 or mpt, or a Jinja file"
        )
    if options.unusable:
        raise UserError(options.unusable)
    return _Conversation(options.chat, messages, asked, options).documents()


class _Conversation:
    """A conversation that is rendered."""

    def __init__(
        self, chat: ChatTemplate, messages: Messages, asked: TemplateInputs, options: ExampleOptions
    ) -> None:
        self._chat, self._asked, self._options = chat, asked, options
        self._weights = [float(m.get("weight", 1.0)) for m in messages]
        self._shown = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
        self._places = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        self._has_marks = chat.has_marks(tools=bool(asked.tools))

    def documents(self) -> list[SegmentedText]:
        """The whole conversation where its answers are rendered as the last, else split."""
        whole = self._marked() if self._has_marks else self._by_prefixes(self._places)
        if whole is not None:
            return [whole]
        if self._options.prompts:
            raise ValueError(
                "the chat template renders earlier answers otherwise than the last, so that the"
                " conversation is split into one row for each, which repeat its prompts; write"
                " data.supervised.target_prompts: none, or another tokenizer.chat_template"
            )
        learned = [n for n in self._places if self._weights[n]] or self._places[-1:]
        learned = learned[-1:] if self._options.last_only else learned
        return [self._last(n) for n in learned]

    def _render(self, n: int, *, prompt: bool = False) -> Rendered:
        """The first `n` messages."""
        tools, variables = self._asked.tools, self._asked.variables
        return self._chat.rendered(
            self._shown[:n], add_generation_prompt=prompt, tools=tools, variables=variables
        )

    def _weight(self, place: int) -> float:
        is_learned = not self._options.last_only or place == self._places[-1]
        return self._weights[place] if is_learned else 0.0

    def _marked(self) -> SegmentedText | None:
        """All answers as the template marks them; None: one is marked otherwise as the last."""
        whole = self._render(len(self._shown))
        spans = self._spans(whole)
        if len(self._places) == 1:
            return _pieces(whole.text, spans, [self._weight(self._places[0])] * len(spans))
        if len(spans) != len(self._places):
            return None
        for place, (begin, end) in zip(self._places[:-1], spans, strict=False):
            alone = self._render(place + 1)
            last = slice(*self._spans(alone)[-1])
            if not alone.text[last].startswith(whole.text[begin:end].rstrip()):
                return None
        return _pieces(whole.text, spans, list(map(self._weight, self._places)))

    def _spans(self, rendered: Rendered) -> Spans:
        """What is marked; marks that touch are one."""
        found: Spans = []
        for begin, end in rendered.answers:
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
        if not found:
            raise ValueError(
                "the chat template marks no answer in it with {% generation %}; correct the"
                f" template, or write tokenizer.chat_template: {self._options.variant}"
            )
        return found

    def _by_prefixes(self, places: Sequence[int]) -> SegmentedText | None:
        """The pieces around the answers at `places`; None: a beginning is not a prefix."""
        if len(places) > 1 and not self._chat.ends_turns:
            return None
        pieces, done = [], ""
        for n in places:
            whole = self._render(n + 1).text
            prompt = self._prompt(n, whole)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                return None
            pieces.append(Segment(prompt[len(done) :], False))
            pieces.append(Segment(whole[len(prompt) :], True, self._weight(n)))
            done = whole
        return SegmentedText(tuple(pieces), rendered=True)

    def _prompt(self, n: int, whole: str) -> str:
        """What the model reads before message `n`, which `whole` ends with."""
        if any(message["role"] not in ("system", "developer") for message in self._shown[:n]):
            return self._render(n, prompt=True).text
        # Nobody asked: many templates look at the first message, or for one of the user.
        with suppress(UserError):
            prompt = self._render(n, prompt=True).text
            if whole.startswith(prompt):
                return prompt
        answer = {"role": "assistant", "content": ANSWER_MARK}
        tools, variables = self._asked.tools, self._asked.variables
        said = [*self._shown[:n], answer]
        text = self._chat.render(said, tools=tools, variables=variables)
        return text.partition(ANSWER_MARK)[0]

    def _last(self, place: int) -> SegmentedText:
        """The conversation up to one answer, which alone is learned."""
        if self._has_marks:
            whole = self._render(place + 1)
            return _pieces(whole.text, self._spans(whole)[-1:], [self._weights[place]])
        found = self._by_prefixes([place])
        if found is None:
            raise ValueError(
                "the chat template does not begin an answer as it renders it, and marks none with"
                " {% generation %}, so what is learned cannot be determined; write"
                f" tokenizer.chat_template: {self._options.variant}"
            )
        return found


def _pieces(text: str, spans: Spans, weights: list[float]) -> SegmentedText:
    pieces, done = [], 0
    for (begin, end), weight in zip(spans, weights, strict=True):
        pieces.append(Segment(text[done:begin], False))
        pieces.append(Segment(text[begin:end], True, weight))
        done = end
    if text[done:]:
        pieces.append(Segment(text[done:], False))
    return SegmentedText(tuple(pieces), rendered=True, marked=True)
