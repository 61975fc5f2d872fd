"""A conversation with a model: messages in, the answer's text out as it is drawn.

`scripts/chat.py` and `scripts/generate.py message=…` call `Conversation`. The chat template says
where an answer begins and what ends it; the end is looked for in the text, as not every template
ends a turn with one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llmfoundry.data.text.chat_template import ChatTemplate, Message
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.inference.text import stream_text

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
