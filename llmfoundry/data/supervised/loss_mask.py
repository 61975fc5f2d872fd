"""Loss mask of supervised examples: token ids, and the loss weight of each id as a label.

Entry points: `formats` calls `conversation_documents` to split a conversation into prompts and
answers, and `prepare_rows` calls an `Encoder` to tokenize the documents.

Only answers are in the loss, so the answers must be located in the rendered text. If the chat
template marks them with {% generation %}, the marks are used. Otherwise prefixes of the
conversation are rendered: the prompt of an answer is the text that ends where the template starts
the model's turn, and the answer is the text that the next message adds, end of turn included. Some
templates render an earlier answer differently from the last one (they remove its reasoning, or do
not end turns). Such a conversation is split into one document per answer, each rendered as the last
answer.

Prompts and answers are tokenized separately, as they are at inference time. A vocabulary that is
not byte-level writes a space before every text. With such a vocabulary a document is tokenized in
one piece, and its ids are split at the borders of prompts and answers. If a token straddles a
border, the parts are tokenized separately, without that space. A document with {% generation %}
marks is also tokenized in one piece, and a token that straddles a border belongs to the answer, as
in transformers.
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
    RenderedChat,
    own_sources,
)
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Segment:
    """A prompt or an answer: part of the text of a document.

    Attributes:
        text: the characters.
        answer: whether this is an answer, which the model writes; otherwise it is a prompt.
        weight: loss weight of its tokens, if they are in the loss.
    """

    text: str
    answer: bool
    weight: float = 1.0


@dataclass(frozen=True)
class SegmentedText:
    """Text of one document, split into prompts and answers.

    Attributes:
        pieces: alternating prompts and answers, in order.
        rendered: whether a chat template produced the text. Special tokens in it are then parsed,
            and no BOS token is prepended.
        side: 1 chosen or desirable, -1 rejected or undesirable, 0 neither.
        marked: whether {% generation %} marks located the answers. The document is then tokenized
            in one piece, as transformers does, and no EOS token is appended.
    """

    pieces: tuple[Segment, ...]
    rendered: bool
    side: int = 0
    marked: bool = False

    @property
    def prompt(self) -> tuple[Segment, ...]:
        """Pieces before the last answer."""
        last = max(n for n, piece in enumerate(self.pieces) if piece.answer)
        return self.pieces[:last]


@dataclass(frozen=True)
class ExampleOptions:
    """Settings of the recipe that apply to every example.

    Attributes:
        chat: chat template of the tokenizer; None: it has none.
        last_only: only the last answer of a conversation is in the loss.
        prompts: prompts may be in the loss.
        variant: template to recommend if the loss mask of this one cannot be determined.
        unusable: why the template cannot be used for training; "": it can.
    """

    chat: ChatTemplate | None
    last_only: bool = False
    prompts: bool = False
    variant: str = f"one of {', '.join(NAMED)}"
    unusable: str = ""

    @classmethod
    def of(cls, chat: ChatTemplate | None, *, last_only: bool, prompts: bool) -> ExampleOptions:
        """Return the options after a check of the template, which happens once for all rows."""
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
    """Inputs of the chat template other than the messages.

    Attributes:
        tools: JSON schemas of functions.
        variables: other variables of the template, such as enable_thinking.
    """

    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def conversation_documents(
    messages: Messages, inputs: TemplateInputs, options: ExampleOptions
) -> list[SegmentedText]:
    """Render a conversation to documents: one in all, or one per answer.

    Raises:
        ValueError: the loss mask cannot be determined; the message states why.
        UserError: the tokenizer has no chat template, or the template rejects the messages.
    """
    if options.chat is None:
        raise UserError(
            "tokenizer.chat_template: the tokenizer has none, and rows are conversations; write"
            " zephyr, which fits any tokenizer, chatml, llama3 or mpt, or a Jinja file"
        )
    if options.unusable:
        raise UserError(options.unusable)
    return _Conversation(options.chat, messages, inputs, options).documents()


class _Conversation:
    """Renders one conversation and locates its answers."""

    def __init__(
        self,
        chat: ChatTemplate,
        messages: Messages,
        inputs: TemplateInputs,
        options: ExampleOptions,
    ) -> None:
        self._chat, self._inputs, self._options = chat, inputs, options
        self._weights = [float(m.get("weight", 1.0)) for m in messages]
        self._messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
        self._answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        self._has_marks = chat.has_marks(tools=bool(inputs.tools))

    def documents(self) -> list[SegmentedText]:
        """Return one document with all answers, or one per answer if their rendering differs."""
        document = self._marked() if self._has_marks else self._by_prefixes(self._answers)
        if document is not None:
            return [document]
        if self._options.prompts:
            raise ValueError(
                "the chat template renders earlier answers otherwise than the last, so that the"
                " conversation is split into one row for each, which repeat its prompts; write"
                " data.supervised.target_prompts: none, or another tokenizer.chat_template"
            )
        in_loss = [n for n in self._answers if self._weights[n]] or self._answers[-1:]
        in_loss = in_loss[-1:] if self._options.last_only else in_loss
        return [self._up_to(n) for n in in_loss]

    def _render(self, n: int, *, prompt: bool = False) -> RenderedChat:
        """Render the first `n` messages; with `prompt`, also the start of the model's turn."""
        tools, variables = self._inputs.tools, self._inputs.variables
        return self._chat.rendered(
            self._messages[:n], add_generation_prompt=prompt, tools=tools, variables=variables
        )

    def _weight(self, n: int) -> float:
        """Return the loss weight of message `n`."""
        in_loss = not self._options.last_only or n == self._answers[-1]
        return self._weights[n] if in_loss else 0.0

    def _marked(self) -> SegmentedText | None:
        """Return one document with all marked answers.

        None: an earlier answer is rendered differently from the last one.
        """
        full = self._render(len(self._messages))
        spans = self._spans(full)
        if len(self._answers) == 1:
            return _split(full.text, spans, [self._weight(self._answers[0])] * len(spans))
        if len(spans) != len(self._answers):
            return None
        # compare each earlier answer with its rendering as the last message
        for n, (begin, end) in zip(self._answers[:-1], spans, strict=False):
            prefix = self._render(n + 1)
            last = slice(*self._spans(prefix)[-1])
            if not prefix.text[last].startswith(full.text[begin:end].rstrip()):
                return None
        return _split(full.text, spans, list(map(self._weight, self._answers)))

    def _spans(self, rendered: RenderedChat) -> Spans:
        """Return the marked spans, adjacent ones merged."""
        spans: Spans = []
        for begin, end in rendered.answers:
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]
            spans.append((begin, end))
        if not spans:
            raise ValueError(
                "the chat template marks no answer in it with {% generation %}; correct the"
                f" template, or write tokenizer.chat_template: {self._options.variant}"
            )
        return spans

    def _by_prefixes(self, answers: Sequence[int]) -> SegmentedText | None:
        """Return one document with the answers of these messages, located by rendering prefixes.

        None: the rendering of a prefix of the conversation is not a prefix of its rendering.
        """
        if len(answers) > 1 and not self._chat.ends_turns:
            return None
        pieces, done = [], ""
        for n in answers:
            text = self._render(n + 1).text
            prompt = self._prompt(n, text)
            if not (prompt.startswith(done) and text.startswith(prompt)):
                return None
            pieces.append(Segment(prompt[len(done) :], False))
            pieces.append(Segment(text[len(prompt) :], True, self._weight(n)))
            done = text
        return SegmentedText(tuple(pieces), rendered=True)

    def _prompt(self, n: int, text: str) -> str:
        """Return the prompt of message `n`. `text` is the rendering up to that message."""
        if any(message["role"] not in ("system", "developer") for message in self._messages[:n]):
            return self._render(n, prompt=True).text
        # No user message precedes the answer, and many templates require one, so they fail or
        # render another text.
        with suppress(UserError):
            prompt = self._render(n, prompt=True).text
            if text.startswith(prompt):
                return prompt
        # render a placeholder answer and take the text before it
        answer = {"role": "assistant", "content": ANSWER_MARK}
        tools, variables = self._inputs.tools, self._inputs.variables
        messages = [*self._messages[:n], answer]
        rendered = self._chat.render(messages, tools=tools, variables=variables)
        return rendered.partition(ANSWER_MARK)[0]

    def _up_to(self, n: int) -> SegmentedText:
        """Return the conversation up to answer `n`, which alone is in the loss."""
        if self._has_marks:
            rendered = self._render(n + 1)
            return _split(rendered.text, self._spans(rendered)[-1:], [self._weights[n]])
        document = self._by_prefixes([n])
        if document is None:
            raise ValueError(
                "the chat template does not begin an answer as it renders it, and marks none with"
                " {% generation %}, so what is learned cannot be determined; write"
                f" tokenizer.chat_template: {self._options.variant}"
            )
        return document


def _split(text: str, spans: Spans, weights: list[float]) -> SegmentedText:
    """Split a text into the answers at `spans` and the prompts between them."""
    pieces, done = [], 0
    for (begin, end), weight in zip(spans, weights, strict=True):
        pieces.append(Segment(text[done:begin], False))
        pieces.append(Segment(text[begin:end], True, weight))
        done = end
    if text[done:]:
        pieces.append(Segment(text[done:], False))
    return SegmentedText(tuple(pieces), rendered=True, marked=True)


@dataclass(frozen=True)
class EncodedDocument:
    """Tokens of a document.

    Attributes:
        ids: (n,) uint32.
        weights: (n,) fp32, loss weight of each id as a label; 0: not in the loss.
        is_empty: whether the document has no answer, or its last answer has no tokens.
    """

    ids: np.ndarray
    weights: np.ndarray
    is_empty: bool


class Encoder:
    """Tokenizes documents and computes their loss masks."""

    def __init__(
        self, tokenizer: Tokenizer, shortest_prompt: float, *, always_eos: bool = False
    ) -> None:
        """Set the options of the loss mask.

        Args:
            tokenizer: tokenizer with its chat template.
            shortest_prompt: a prompt of at least this many tokens is also in the loss.
            always_eos: append the EOS token also to conversations that end with an end of turn.
        """
        self._tokenizer, self._shortest_prompt = tokenizer, shortest_prompt
        self._always_eos = always_eos
        self.special_tokens = tokenizer.special_tokens

    def __call__(self, documents: Sequence[SegmentedText]) -> list[EncodedDocument]:
        """Tokenize documents.

        An EOS token is appended to a document that nothing ends, except to a document with
        {% generation %} marks, which its template ends.
        """
        plain = [n for n, d in enumerate(documents) if not d.rendered]
        rendered = [n for n, d in enumerate(documents) if d.rendered]
        plain_ids = self._plain([documents[n] for n in plain])
        rendered_ids = self._rendered([documents[n] for n in rendered])
        # back to the order of the arguments
        ids: dict[int, list[list[int]]] = {}
        ids |= zip(plain, plain_ids, strict=True)
        ids |= zip(rendered, rendered_ids, strict=True)
        return [self._with_weights(document, ids[n]) for n, document in enumerate(documents)]

    def _plain(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        """Return the ids of each piece. The tokenizer's BOS ids precede only the first piece."""
        if not self._tokenizer.byte_level:
            split = map(self._split_at_borders, documents)
            return [[[*self._tokenizer.bos_ids, *first], *others] for first, *others in split]
        texts = [piece.text for document in documents for piece in document.pieces]
        ids = iter(self._tokenizer.encode_batch(texts))
        pieces = [[next(ids) for _ in document.pieces] for document in documents]
        return [[[*self._tokenizer.bos_ids, *first], *others] for first, *others in pieces]

    def _rendered(self, documents: Sequence[SegmentedText]) -> list[list[list[int]]]:
        """Return the ids of each piece. Pieces that are tokenized separately form one batch."""
        separate = [d for d in documents if self._tokenizer.byte_level and not d.marked]
        texts = [piece.text for document in separate for piece in document.pieces]
        ids = iter(self._tokenizer.encode_chat_batch(texts))
        document_ids = []
        for document in documents:
            if document.marked:
                document_ids.append(self._split_at_answers(document))
            elif self._tokenizer.byte_level:
                document_ids.append([next(ids) for _ in document.pieces])
            else:
                document_ids.append(self._split_at_borders(document))
        return document_ids

    def _split_at_answers(self, document: SegmentedText) -> list[list[int]]:
        """Tokenize a document in one piece and return the ids of each of its pieces.

        A token that straddles a border belongs to the answer.
        """
        texts = [piece.text for piece in document.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        ids, spans = self._tokenizer.encode_spans("".join(texts), chat=True)
        begins, stops = (np.array([span[n] for span in spans]) for n in (0, 1))
        cuts = [0]
        for n, piece in enumerate(document.pieces[1:]):
            border = ends[n + 1]
            if piece.answer:  # starts at the first token that ends after the border
                cut = int(np.searchsorted(stops, border, "right"))
            else:  # starts at the first token that begins at or after the border
                cut = int(np.searchsorted(begins, border))
            cuts.append(max(cuts[-1], cut))
        return [ids[begin:end] for begin, end in pairwise([*cuts, len(ids)])]

    def _split_at_borders(self, document: SegmentedText) -> list[list[int]]:
        """Tokenize a document in one piece and return the ids of each of its pieces.

        If a token straddles a border, the pieces are tokenized separately instead.
        """
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
        """Tokenize a text that follows another one, without the space that starts a text."""
        # tokenize it after a mark that merges with nothing, and remove the ids of the mark
        for mark in ("\n", "\x02"):  # \x02 is part of no word in a vocabulary
            mark_ids = self._tokenizer.encode_spans(mark, chat=chat)[0]
            ids = self._tokenizer.encode_spans(mark + text, chat=chat)[0]
            if ids[: len(mark_ids)] == mark_ids:
                return ids[len(mark_ids) :]
        return self._tokenizer.encode_spans(text, chat=chat)[0]

    def _with_weights(self, document: SegmentedText, pieces: list[list[int]]) -> EncodedDocument:
        """Append the EOS token if it is missing, and compute the loss weights."""
        answers = [ids for piece, ids in zip(document.pieces, pieces, strict=True) if piece.answer]
        is_empty = not answers or not answers[-1]
        if not is_empty and self._lacks_eos(document, pieces[-1]):
            pieces[-1] = [*pieces[-1], self._tokenizer.eos_id]
        weights = []
        for piece, ids in zip(document.pieces, pieces, strict=True):
            in_loss = piece.answer or (not document.side and len(ids) >= self._shortest_prompt)
            weights.append(np.full(len(ids), piece.weight * in_loss, np.float32))
        all_weights = np.concatenate(weights)
        all_weights[:1] = 0  # no token predicts the first id
        all_ids = np.concatenate([np.array(ids, np.uint32) for ids in pieces])
        return EncodedDocument(all_ids, all_weights, is_empty)

    def _lacks_eos(self, document: SegmentedText, last: list[int]) -> bool:
        """Return whether an EOS token must follow the ids `last` of the last piece."""
        if document.marked or last[-1] == self._tokenizer.eos_id:
            return False
        is_open = not document.pieces[-1].text.rstrip().endswith(self._turn_ends)
        return not document.rendered or self._always_eos or is_open

    @cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        """Texts that may end a turn: the template's end of turn and the special tokens."""
        try:
            end = self._tokenizer.chat.end_of_turn
        except UserError:  # there is no template, or it does not end turns
            return (self._tokenizer.eos,)
        return (self._tokenizer.eos, end, *filter(None, self.special_tokens))
