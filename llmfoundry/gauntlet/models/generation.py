"""What follows many prompts, greedily: the gauntlet's tasks whose answers are written.

`OwnModel` and `HuggingFaceModel` call `generate_texts` with an engine of theirs. It turns prompts
into requests, and tokens into text, of which it sees where a stop ends; all else is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from llmfoundry.gauntlet.metrics import until_stop
from llmfoundry.gauntlet.questions import Prompt
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.requests import Request

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

MakeEngine = Callable[[int, int], SlotEngine]
"""From slots and their length."""


@dataclass(frozen=True)
class Ranks:
    """The processes that share the prompts among them.

    Attributes:
        rank: this one.
        size: their number.
        group: they; None: all processes.
        device: where what they exchange is; None: nothing is.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None

    def any(self, mine: bool) -> bool:
        """Whether it is so on any of them."""
        if self.size == 1:
            return mine
        shared = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return bool(shared)

    def all_of(self, mine: dict[int, Any]) -> dict[int, Any]:
        """What all of them have."""
        if self.size == 1:
            return mine
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, mine, group=self.group)
        return {number: value for part in parts for number, value in part.items()}


ALONE = Ranks()


class _Answer:
    """What is written after one prompt."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        assert all(prompt.stops), "an empty stop would end every text"
        self._stops, self._tokenizer = prompt.stops, tokenizer
        self._tokens: list[int] = []
        self._longest_stop = max((len(stop.encode()) for stop in prompt.stops), default=0)

    @property
    def text(self) -> str:
        return until_stop(self._tokenizer.decode(self._tokens), self._stops)

    def take(self, token: int) -> bool:
        """Add a token; whether a stop ends in it.

        Few tokens are decoded, as many as a stop can stretch over and one more, until they hold
        one; then all, for decoders spell the first token of a text in a way of its own.
        """
        self._tokens.append(token)
        parts = (self._tokens[-(self._longest_stop + 2) :], self._tokens)
        return bool(self._stops) and all(
            any(stop in text for stop in self._stops) for text in map(self._tokenizer.decode, parts)
        )


def generate_texts(
    prompts: Sequence[Prompt],
    make_engine: MakeEngine,
    *,
    tokenizer: Tokenizer,
    end_ids: Collection[int],
    batch_tokens: int,
    ranks: Ranks = ALONE,
    in_step: bool = True,
) -> list[str]:
    """The likeliest continuation of each prompt, token by token; the same list on every rank.

    It ends before the prompt's first stop or an end-of-text token, or after max_new_tokens.

    Args:
        prompts: of any length and order; those that write nothing have no text.
        make_engine: the model.
        tokenizer: the model's.
        end_ids: tokens that end a text.
        batch_tokens: slots of a rank times their length, at most; one slot there always is.
        ranks: this process among those that have different prompts; all must take part.
        in_step: the model is sharded over ranks: all of them must make the same forward passes.

    Raises:
        FloatingPointError: logits were not finite, so that nothing is the likeliest; on every rank.
    """
    found: dict[int, str | None] = {}
    for members, length in _classes(prompts):
        mine = members[ranks.rank :: ranks.size]
        slots = max(1, min(batch_tokens // length, -(-len(members) // ranks.size)))
        engine = make_engine(slots, length)
        answers = {i: _Answer(prompts[i], tokenizer) for i in mine}
        asked = {engine.add(_request(prompts[i], end_ids)): i for i in mine}
        broken = set()
        while ranks.any(engine.busy) if in_step else engine.busy:
            for one in engine.step():
                i = asked[one.request]
                if one.token is not None and answers[i].take(one.token):
                    engine.cancel(one.request)
                broken |= {i} if one.finish == "error" else set()
        found |= {i: None if i in broken else answer.text for i, answer in answers.items()}
        del engine  # before the next takes memory
    found = ranks.all_of(found)
    if count := sum(text is None for text in found.values()):
        raise FloatingPointError(
            f"the logits after {count} of {len(prompts)} prompts are not finite numbers"
        )
    return [found.get(i) or "" for i in range(len(prompts))]


def _request(prompt: Prompt, end_ids: Collection[int]) -> Request:
    return Request(prompt.tokens, prompt.max_new_tokens, stop_ids=frozenset(end_ids))


def _classes(prompts: Sequence[Prompt]) -> Iterator[tuple[list[int], int]]:
    """Prompts that share an engine, and the length that its slots need; the longest first.

    Slots are at most twice as long as what is in them. Those that begin alike are adjacent, so that
    most of a beginning is still there when the next comes.
    """
    ends = {
        i: len(prompt.tokens) + prompt.max_new_tokens
        for i, prompt in enumerate(prompts)
        if prompt.max_new_tokens > 0
    }
    while ends:
        longest = max(ends.values())
        members = [i for i, end in ends.items() if 2 * end > longest]
        yield sorted(members, key=lambda i: (prompts[i].tokens, i)), longest
        for i in members:
            del ends[i]
