"""Text of an answer as its tokens come, up to the first stop string; and conversations.

`stream_text` is for whoever draws one answer (`generate`, `chat`, samples while training),
`TextStream` for who is handed many answers' tokens (`serve`). The one idea: nothing is handed on
that a later token could still change, neither half a character nor what may be the beginning of a
stop string.

`Conversation`, of `chat` and of `generate message=…`: messages in, the answer's text out. The chat
template says where an answer begins and what ends it; the end is looked for in the text, as not
every template ends a turn with one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmfoundry.data.text.chat_template import ChatTemplate, Message
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

_CUT = "\ufffd"  # what decoders write for an incomplete character
_CONTEXT = 8  # tokens of the prompt that are decoded with the answer's first
_BROKEN = 64  # tokens that no later one makes characters of: a character has 4 bytes
Decode = Callable[[Sequence[int]], str]


def stream_text(
    tokens: Iterable[int],
    decode: Decode,
    *,
    stops: Sequence[str] = (),
    prompt: Sequence[int] = (),
) -> Iterator[str]:
    """Text of `tokens` in pieces of whole characters, as soon as each is certain.

    Args:
        tokens: one at a time; none is asked for once a stop string is complete.
        decode: the tokenizer's.
        stops: texts before which it ends.
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
    """Tokens in, text out.

    Attributes:
        starts: of each token, how many characters of the answer's text come before its own; final
            once its own are certain.
        stopped: whether a stop string ended the text; later tokens are no part of it.
        unfinished: characters at the prompt's end that the answer's text has again, completed.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        is_text: bool = False,
    ) -> None:
        """Begin with no text.

        Args:
            decode: the tokenizer's.
            stops: texts before which the answer ends.
            prompt: tokens before the answer: a space at its beginning, or a character that it
                completes, depends on them.
            is_text: the prompt was a text, whose characters are all complete.
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
        """The text that one more token makes certain."""
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
        """The rest, once there are no more tokens: half a character is U+FFFD."""
        if self.stopped:
            return ""
        released = self._release(self._text[self._shown :])
        if self.stopped:
            return released
        released, self._held = released + self._held, ""
        return released

    def _note_start(self, before: str) -> None:
        """Add the newest token's start, from the text without it.

        A U+FFFD that stays is a character; one that the token changes was the token's beginning.
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
        """Forget what was decoded long ago, as no character is incomplete."""
        is_visible = self._decode(self._pending) != ""  # a space or a hidden token may not be
        context = self._pending if is_visible else (self._context + self._pending)[-_CONTEXT:]
        self._context, self._pending = context, []
        self._text = self._decode(context) if context else ""
        self._shown = len(self._text)

    def _release(self, piece: str) -> str:
        """What can no longer become a stop string, of what was held back and a new piece."""
        self._length += len(piece)
        self._held += piece
        found = [place for place in map(self._held.find, self._stops) if place >= 0]
        if found:
            released = self._held[: min(found)]
            self._length -= len(self._held) - len(released)
            self._held, self.stopped = "", True
            return released
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        released = self._held[: len(self._held) - kept]
        self._held = self._held[len(released) :]
        return released


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of a text that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


Draw = Callable[[list[int], int], Iterable[int]]
"""From a prompt's ids and a number of new tokens at most to the tokens drawn."""


class Conversation:
    """Turns so far, and how to get the next.

    Attributes:
        messages: all of them, the system's first if there is one.
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
        """Begin with nothing said.

        Args:
            tokenizer: the model's.
            draw: the model.
            window: tokens that it reads at most, its answer with them.
            max_new_tokens: of an answer.
            template: how messages become a text; unset: the tokenizer's own.
            system: the system's message.

        Raises:
            UserError: there is no template, or none that ends an answer.
        """
        self._tokenizer, self._draw = tokenizer, draw
        self._template = template or tokenizer.chat
        self._end = self._template.end_of_turn
        self._window, self._max_new = window, max_new_tokens
        self.messages: list[Message] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget every turn; `system` begins the next conversation."""
        self.messages = [{"role": "system", "content": system}] if system else []

    @property
    def system(self) -> str | None:
        """The system's message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def ask(self, text: str) -> Iterator[str]:
        """The answer to a message, in pieces; both are kept, as far as it was written.

        Raises:
            UserError: the conversation leaves no room for an answer, or the template refuses it;
                nothing is kept then.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        if any("\ud800" <= c <= "\udfff" for message in asked for c in message["content"]):
            raise UserError("the message, or the system's, is not UTF-8 text; convert it")
        ids = self._tokenizer.encode_chat(self._template.render(asked, add_generation_prompt=True))
        room = min(self._max_new, self._window - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens with this message, and the model reads"
                f" {self._window} with its answer; write /reset, or a shorter message"
            )
        return self._answer(asked, self._draw(ids, room))

    def _answer(self, asked: list[Message], tokens: Iterable[int]) -> Iterator[str]:
        said: list[str] = []
        try:
            for piece in stream_text(tokens, self._tokenizer.decode, stops=[self._end]):
                said.append(piece)
                yield piece
        finally:  # an answer that was broken off was said as far as it was
            answer: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
            self.messages = [*asked, answer]
