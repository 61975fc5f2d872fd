"""Streaming detokenization with stop strings, and conversations.

Entry points: `stream_text` streams one answer (`generate`, `chat`, samples during training);
`TextStream` decodes one of many concurrent answers (`serve`). Text that a later token could still
change is withheld: incomplete characters, and a possible start of a stop string.

`Conversation` (`chat` and `generate message=…`) takes messages and streams the answer's text. The
chat template defines the start and the end of an answer. The end is searched for in the text,
because some templates end a turn with several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmfoundry.data.text.chat_template import ChatTemplate, Message
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

_CUT = "\ufffd"  # replacement character that decoders write for an incomplete character
_CONTEXT = 8  # preceding tokens that are decoded together with new tokens
_BROKEN = 64  # pending tokens after which an incomplete character is invalid (it has 4 bytes)
Decode = Callable[[Sequence[int]], str]


def stream_text(
    tokens: Iterable[int],
    decode: Decode,
    *,
    stops: Sequence[str] = (),
    prompt: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the text of `tokens` in pieces of complete characters, as early as possible.

    Args:
        tokens: token ids; not advanced further once a stop string is complete.
        decode: decode function of the tokenizer.
        stops: stop strings; the text ends before the first one.
        prompt: ids of the text that the tokens continue.
    """
    stream = TextStream(decode, stops=stops, prompt=prompt, is_text=True)
    for token in tokens:
        if piece := stream.push(token):
            yield piece
        if stream.stopped:
            return
    if rest := stream.close():
        yield rest


class TextStream:
    """Incremental detokenizer of one answer.

    Attributes:
        starts: character offset of each token in the answer's text; final once the token's text
            has been returned.
        stopped: whether a stop string ended the text; later tokens are not part of it.
        unfinished: number of incomplete characters at the prompt's end, which the answer's text
            repeats in complete form.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        is_text: bool = False,
    ) -> None:
        """Create a stream without text.

        Args:
            decode: decode function of the tokenizer.
            stops: stop strings.
            prompt: tokens before the answer. A space at the beginning of the answer, or a character
                that it completes, depends on them.
            is_text: whether the prompt was a text, so that its characters are complete.
        """
        self._decode, self._stops = decode, tuple(stops)
        self._context: list[int] = []  # decoded already, so that a token reads as in the text
        self._pending = list(prompt[-_CONTEXT:])
        self._text = decode(self._pending) if self._pending else ""  # of context and pending
        self._shown = len(self._text if is_text else self._text.rstrip(_CUT))
        self.unfinished = len(self._text) - self._shown
        self._held = ""
        self._length = 0  # characters that are certain, those in `_held` too
        self.starts: list[int] = []
        self.stopped = False
        if not self.unfinished:
            self._settle()

    def push(self, token: int) -> str:
        """Add a token and return the text that can no longer change."""
        before = self._text
        self._pending.append(token)
        self._text = self._decode(self._context + self._pending)
        self._note_start(before)
        is_whole = not self._text.endswith(_CUT) or len(self._pending) >= _BROKEN
        certain = self._text if is_whole else self._text.rstrip(_CUT)
        piece, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if is_whole:
            self._settle()
        return self._release(piece)

    def close(self) -> str:
        """Return the remaining text after the last token. An incomplete character is U+FFFD."""
        if self.stopped:
            return ""
        released = self._release(self._text[self._shown :])
        if self.stopped:
            return released
        released, self._held = released + self._held, ""
        return released

    def _note_start(self, before: str) -> None:
        """Record the offset of the newest token, from the text without the token.

        A U+FFFD that does not change is a character. A U+FFFD that the token changes belongs to
        the token.
        """
        pairs = enumerate(zip(before, self._text, strict=False))
        same = next((place for place, (old, new) in pairs if old != new), len(before))
        if before == self._text and before.endswith(_CUT):  # the token is inside the last character
            same -= 1
        start = self._length + max(0, same - self._shown)
        for place in reversed(range(len(self.starts))):
            if self.starts[place] <= start:
                break
            self.starts[place] = start
        self.starts.append(start)

    def _settle(self) -> None:
        """Make the pending tokens the new context, once no character is incomplete."""
        is_visible = self._decode(self._pending) != ""  # a space or a hidden token may not be
        context = self._pending if is_visible else (self._context + self._pending)[-_CONTEXT:]
        self._context, self._pending = context, []
        self._text = self._decode(context) if context else ""
        self._shown = len(self._text)

    def _release(self, piece: str) -> str:
        """Add a piece and return the text that cannot become part of a stop string."""
        self._length += len(piece)
        self._held += piece
        positions = [place for place in map(self._held.find, self._stops) if place >= 0]
        if positions:
            released = self._held[: min(positions)]
            self._length -= len(self._held) - len(released)
            self._held, self.stopped = "", True
            return released
        overlap = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        released = self._held[: len(self._held) - overlap]
        self._held = self._held[len(released) :]
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` at the end of a text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


Draw = Callable[[list[int], int], Iterable[int]]
"""Samples tokens: from a prompt's ids and a maximum number of new tokens to the new tokens."""


class Conversation:
    """A conversation with a model.

    Attributes:
        messages: all messages so far, including the system message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        draw: Draw,
        *,
        window: int,
        max_new_tokens: int,
        template: ChatTemplate | None = None,
        system: str | None = None,
    ) -> None:
        """Begin an empty conversation.

        Args:
            tokenizer: tokenizer of the model.
            draw: samples tokens from the model.
            window: context window of the model in tokens, including the answer.
            max_new_tokens: longest answer in tokens.
            template: chat template; unset: the template of the tokenizer.
            system: system message.

        Raises:
            UserError: there is no template, or it has no end of a turn.
        """
        self._tokenizer, self._draw = tokenizer, draw
        self._template = template or tokenizer.chat
        self._end = self._template.end_of_turn
        self._window, self._max_new = window, max_new_tokens
        self.messages: list[Message] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Delete all messages and set the system message of the next conversation."""
        self.messages = [{"role": "system", "content": system}] if system else []

    @property
    def system(self) -> str | None:
        """The system message; None: there is none."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def ask(self, text: str) -> Iterator[str]:
        """Stream the answer to a message. The message and the streamed answer become messages.

        Raises:
            UserError: the conversation leaves no space for an answer, or the template rejects it.
                The conversation does not change then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        if any("\ud800" <= c <= "\udfff" for message in messages for c in message["content"]):
            raise UserError("the message, or the system's, is not UTF-8 text; convert it")
        prompt = self._template.render(messages, add_generation_prompt=True)
        ids = self._tokenizer.encode_chat(prompt)
        room = min(self._max_new, self._window - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens with this message, and the model reads"
                f" {self._window} with its answer; write /reset, or a shorter message"
            )
        return self._answer(messages, self._draw(ids, room))

    def _answer(self, messages: list[Message], tokens: Iterable[int]) -> Iterator[str]:
        pieces: list[str] = []
        try:
            for piece in stream_text(tokens, self._tokenizer.decode, stops=[self._end]):
                pieces.append(piece)
                yield piece
        finally:  # an interrupted answer is recorded as far as it was streamed
            answer: dict[str, Any] = {"role": "assistant", "content": "".join(pieces)}
            self.messages = [*messages, answer]
