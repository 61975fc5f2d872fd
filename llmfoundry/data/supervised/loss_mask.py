"""A conversation to ids and what each of them counts as a label: which of it the model wrote.

`formats` asks for documents, `prepare_rows` for their ids. Where the template marks answers with
{% generation %}, the marks say what is learned. Elsewhere it is found by rendering beginnings: the
text up to an answer ends where the template would have the model begin, so answers are exact to the
character, end of turn included. Where a template renders an earlier answer otherwise than the last
one (it drops its thoughts, or ends no turn), the conversation is split: one document for each
answer, rendered as the last.

Prompts and answers are encoded apart, because that is what the model meets when it answers: a
prompt's ids are there before its own first one. Vocabularies that are not of bytes write a space
before each text; there, a whole document is encoded, and cut where its pieces end. If a token lies
across such an end, they are encoded apart, without that space. Where a template marks answers, the
whole is encoded too, and a token across an end is the answer's, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from llmfoundry.data.text.chat_template import (
    ANSWER_MARK,
    NAMED,
    ChatTemplate,
    Rendered,
    own_sources,
)
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

Messages = list[dict[str, Any]]
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


@dataclass(frozen=True)
class Encoded:
    """A document's tokens.

    Attributes:
        ids: (n,) uint32.
        weights: (n,) fp32, what each counts as a label; 0: it is not learned.
        is_empty: it has no answer, or one without a token.
    """

    ids: np.ndarray
    weights: np.ndarray
    is_empty: bool


class Encoder:
    """Encodes with a tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, shortest_prompt: float, *, always_eos: bool = False
    ) -> None:
        """Encode with `tokenizer`.

        Args:
            tokenizer: with its chat template.
            shortest_prompt: a prompt of so many tokens is learned too.
            always_eos: the end of text is put behind conversations that end with a turn, too.
        """
        self._tokenizer, self._shortest_prompt = tokenizer, shortest_prompt
        self._always_eos = always_eos
        self.special_tokens = tokenizer.special_tokens

    def __call__(self, documents: Sequence[SegmentedText]) -> list[Encoded]:
        """Each document; the end of text is put behind it where nothing ends it.

        What a template marks itself, it ends itself.
        """
        plain = [n for n, d in enumerate(documents) if not d.rendered]
        rendered = [n for n, d in enumerate(documents) if d.rendered]
        found: dict[int, list[list[int]]] = {}
        found |= zip(plain, self._plain([documents[n] for n in plain]), strict=True)
        found |= zip(rendered, self._rendered([documents[n] for n in rendered]), strict=True)
        return [self._weighed(document, found[n]) for n, document in enumerate(documents)]

    def _plain(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        """Ids of each piece; what the tokenizer puts before a text is before the first alone."""
        if not self._tokenizer.byte_level:
            cut = map(self._cut, documents)
            return [[[*self._tokenizer.bos_ids, *first], *others] for first, *others in cut]
        texts = [piece.text for document in documents for piece in document.pieces]
        ids = iter(self._tokenizer.encode_batch(texts))
        pieces = [[next(ids) for _ in document.pieces] for document in documents]
        return [[[*self._tokenizer.bos_ids, *first], *others] for first, *others in pieces]

    def _rendered(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        apart = [d for d in documents if self._tokenizer.byte_level and not d.marked]
        ids = iter(self._tokenizer.encode_chat_batch([p.text for d in apart for p in d.pieces]))
        found = []
        for document in documents:
            if document.marked:
                found.append(self._cut_at_answers(document))
            elif self._tokenizer.byte_level:
                found.append([next(ids) for _ in document.pieces])
            else:
                found.append(self._cut(document))
        return found

    def _cut_at_answers(self, document: SegmentedText) -> list[list[int]]:
        """The ids of each piece of a text that is encoded as one; answers have what they touch."""
        texts = [piece.text for piece in document.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        ids, spans = self._tokenizer.encode_spans("".join(texts), chat=True)
        begins, stops = (np.array([span[n] for span in spans]) for n in (0, 1))
        cuts = [0]
        for n, piece in enumerate(document.pieces[1:]):
            edge = ends[n + 1]
            found = np.searchsorted(*((stops, edge, "right") if piece.answer else (begins, edge)))
            cuts.append(max(cuts[-1], int(found)))
        return [ids[begin:end] for begin, end in pairwise([*cuts, len(ids)])]

    def _cut(self, document: SegmentedText) -> list[list[int]]:
        """The ids of each piece of a text that is encoded as one, unless a token lies across."""
        texts = [piece.text for piece in document.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        chat = document.rendered
        ids, spans = self._tokenizer.encode_spans("".join(texts), chat=chat)
        inner = ends[1:-1]
        if any(begin < end < stop for begin, stop in spans for end in inner):
            continued = [self._continued(text, chat=chat) for text in texts[1:]]
            return [self._tokenizer.encode_spans(texts[0], chat=chat)[0], *continued]
        stops = np.array([stop for _, stop in spans])
        places = [0, *np.searchsorted(stops, inner, side="right").tolist(), len(ids)]
        return [ids[begin:end] for begin, end in pairwise(places)]

    def _continued(self, text: str, *, chat: bool) -> list[int]:
        """The ids of a text that stands behind another: no space is written before it."""
        for mark in ("\n", "\x02"):  # the latter is in no vocabulary's words
            before = self._tokenizer.encode_spans(mark, chat=chat)[0]
            ids = self._tokenizer.encode_spans(mark + text, chat=chat)[0]
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._tokenizer.encode_spans(text, chat=chat)[0]

    def _weighed(self, document: SegmentedText, pieces: list[list[int]]) -> Encoded:
        answers = [ids for piece, ids in zip(document.pieces, pieces, strict=True) if piece.answer]
        is_empty = not answers or not answers[-1]
        if not is_empty and self._lacks_eos(document, pieces[-1]):
            pieces[-1] = [*pieces[-1], self._tokenizer.eos_id]
        weights = []
        for piece, ids in zip(document.pieces, pieces, strict=True):
            is_learned = piece.answer or (not document.side and len(ids) >= self._shortest_prompt)
            weights.append(np.full(len(ids), piece.weight * is_learned, np.float32))
        joined = np.concatenate(weights)
        joined[:1] = 0  # nothing is before it
        return Encoded(
            np.concatenate([np.array(ids, np.uint32) for ids in pieces]), joined, is_empty
        )

    def _lacks_eos(self, document: SegmentedText, last: list[int]) -> bool:
        if document.marked or last[-1] == self._tokenizer.eos_id:
            return False
        is_open = not document.pieces[-1].text.rstrip().endswith(self._turn_ends)
        return not document.rendered or self._always_eos or is_open

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """What a turn may end with: what is behind the template's answers, or a special token."""
        try:
            end = self._tokenizer.chat.end_of_turn
        except UserError:  # there is no template, or nothing ends a turn in it
            return (self._tokenizer.eos,)
        return (self._tokenizer.eos, end, *filter(None, self.special_tokens))
