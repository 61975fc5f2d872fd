"""Text of an answer as its tokens come, up to the first stop string.

`stream_text` is for whoever draws one answer (`generate`, `chat`, samples while training),
`TextStream` for who is handed many answers' tokens (`serve`).

The one idea: nothing is handed on that a later token could still change, neither half a character
nor what may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

_CUT = "\ufffd"  # what decoders write for an incomplete character
_CONTEXT = 8  # tokens of the prompt that are decoded with the answer's first


def stream_text(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str], *, stops: Sequence[str] = ()
) -> Iterator[str]:
    """Text of `tokens` in pieces of whole characters, as soon as each is certain.

    Args:
        tokens: one at a time; none is asked for once a stop string is complete.
        decode: the tokenizer's.
        stops: texts before which it ends.
    """
    stream = TextStream(decode, stops=stops)
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
        starts: of each token, how many characters of the answer's text come before its own.
        stopped: whether a stop string ended the text; later tokens are no part of it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Begin with no text.

        Args:
            decode: the tokenizer's.
            stops: texts before which the answer ends.
            prompt: tokens before the answer: a space at its beginning, or a character that it
                completes, depends on them.
        """
        self._decode, self._stops = decode, tuple(stops)
        self._context: list[int] = []  # decoded already, so that a token reads as in the text
        self._pending = list(prompt[-_CONTEXT:])
        self._shown = len(decode(self._pending).rstrip(_CUT)) if self._pending else 0
        self._held = ""
        self._length = 0  # characters that are certain, those in `_held` too
        self.starts: list[int] = []
        self.stopped = False
        if self._pending:
            self._settle(decode(self._pending))

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        self.starts.append(self._length)
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        certain = text.rstrip(_CUT)
        piece, self._shown = certain[self._shown :], max(self._shown, len(certain))
        self._settle(text)
        return self._release(piece)

    def close(self) -> str:
        """The rest, once there are no more tokens: half a character is U+FFFD."""
        if self.stopped:
            return ""
        rest = self._decode(self._context + self._pending)[self._shown :] if self._pending else ""
        released = self._release(rest)
        if self.stopped:
            return released
        released, self._held = released + self._held, ""
        return released

    def _settle(self, text: str) -> None:
        """Forget what was decoded long ago, once no character is incomplete."""
        if not text.endswith(_CUT):
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))

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
