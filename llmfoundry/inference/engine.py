"""`SlotEngine`: the one batched generator. Requests come and go; each step is one forward pass.

`requests.Engine` is what callers see: `generate` and `chat`, samples while training, the gauntlet,
`serve`. A request has a slot while it runs. In each step every sequence that has read its prompt
gets a token, and of the others as many tokens are read as `chunk` allows, in the order of their
slots (iteration-level scheduling, Yu et al., 2022; chunked prefill, Agrawal et al., 2023). A slot
keeps what was in it, so that a prompt that begins like another sequence is read from where they
differ. What computes is behind `Rows`: `decoder_rows` for the project's decoder.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.inference.requests import (
    Alternatives,
    Emitted,
    Engine,
    Finish,
    Request,
    Sampler,
    TokenLogprob,
    common_prefix,
    token_logprobs,
)
from llmfoundry.models.kv_cache import TokenChunk

CHUNK = 512
"""Tokens of prompts in a step: those that run wait as long for their next one."""
SHARED = 16
"""First tokens that a sequence must share with another to copy them."""
BROKEN = -1  # in place of a token: the logits were no finite numbers

Agree = Callable[[list[int]], list[int]]


class Rows(Protocol):
    """A model and the keys and values of its sequences, each in a slot.

    Attributes:
        slots: how many sequences there may be.
        length: tokens of each.
        n_tokens: ids below it are drawn.
        keeps_ended: what was in a slot stays there until it is needed.
        in_one_piece: what a prompt's first tokens become depends on how long it is, so that it
            must be read at once, and none can be shared.
    """

    slots: int
    length: int
    n_tokens: int
    keeps_ended: bool
    in_one_piece: bool

    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """One forward pass; logits (W, n_tokens) in fp32 of each piece's last `wanted` tokens."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of one slot those of another."""

    def clear(self, slot: int) -> None:
        """Forget what may be no numbers."""


@dataclass
class _Sequence:
    """A request that has a slot.

    Attributes:
        tokens: prompt, and what was drawn.
        read: so many of them are in the slot; as those of `tokens` but the last, once it draws.
        judged: of the prompt, where it was asked for.
    """

    number: int
    request: Request
    sampler: Sampler
    tokens: list[int]
    read: int = 0
    judged: list[TokenLogprob] = field(default_factory=list)

    @property
    def unread(self) -> int:
        """Tokens that have not gone through the model."""
        return len(self.tokens) - self.read

    @property
    def drawn(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)


class SlotEngine:
    """An Engine.

    Attributes:
        chunk: tokens of prompts in a step at most; one always goes.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        chunk: int = CHUNK,
        agree: Agree | None = None,
        in_step: bool = False,
    ) -> None:
        """Nothing runs.

        Args:
            rows: the model.
            chunk: see above.
            agree: of several processes with the same requests: what process 0 has drawn; their
                logits may differ in the last bit, and all must stop together.
            in_step: of several processes with requests of their own: a step without any makes a
                forward pass all the same, as sharded weights need.
        """
        self._rows, self.chunk, self._agree, self._in_step = rows, chunk, agree, in_step
        self._numbers = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by slot: those that draw before those that read
        self._held: list[list[int]] = [[] for _ in range(rows.slots)]  # tokens by slot

    @property
    def slots(self) -> int:
        """See Engine."""
        return self._rows.slots

    @property
    def length(self) -> int:
        """See Engine."""
        return self._rows.length

    @property
    def waiting(self) -> int:
        """See Engine."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """See Engine."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """See Engine."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> int:
        """See Engine."""
        self._check(request)
        self._numbers += 1
        sampler = Sampler(request.sampling)
        self._waiting.append(_Sequence(self._numbers, request, sampler, list(request.prompt)))
        return self._numbers

    def cancel(self, number: int) -> None:
        """See Engine."""
        for sequence in self._waiting:
            if sequence.number == number:
                self._waiting.remove(sequence)
                return
        for slot, sequence in enumerate(self._running):
            if sequence.number == number:
                self._release(slot)
                return

    def step(self) -> list[Emitted]:
        """See Engine."""
        self._admit()
        pieces = self._pieces()
        if not pieces and self._in_step:
            self._held[0] = []
            self._rows.read([TokenChunk(0, 0, (0,), 0)])
        if not pieces:
            return []
        logits = self._rows.read(pieces)
        for piece in pieces:
            self._running[piece.slot].read += len(piece.tokens)
            self._held[piece.slot][piece.past :] = piece.tokens
        return self._finish(pieces, logits)

    def _check(self, request: Request) -> None:
        n, new, problems = len(request.prompt), request.max_new_tokens, []
        known = range(self._rows.n_tokens)
        if not n:
            problems.append("prompt: is empty; begin it with the end-of-text token")
        if new < 0:
            problems.append(f"max_new_tokens: {new}; write 0 or more")
        if request.prompt_logprobs and request.logprobs is None:
            problems.append("logprobs: is not set; prompt_logprobs needs it, 0 or more")
        if request.logprobs is not None and request.logprobs < 0:
            problems.append(f"logprobs: {request.logprobs}; write 0 or more")
        if wrong := [i for i in request.prompt if i not in known]:
            problems.append(f"prompt: has token {wrong[0]}; ids go from 0 to {known[-1]}")
        if n > self.length:
            problems.append(f"prompt: has {n} tokens; write at most {self.length}")
        elif n + new - 1 > self.length:
            problems.append(
                f"max_new_tokens: {new} after a prompt of {n} tokens, but {self.length} fit;"
                f" write at most {self.length - n + 1}, or a shorter prompt"
            )
        if problems:
            raise UserError(*problems)

    def _admit(self) -> None:
        """Give free slots to those that wait."""
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.popleft())

    def _pieces(self) -> list[TokenChunk]:
        """What the model reads in this step."""
        pieces, left = [], self.chunk
        for slot, sequence in enumerate(self._running):
            if sequence.drawn:
                pieces.append(TokenChunk(slot, sequence.read, (sequence.tokens[-1],), 1))
                continue
            if sequence.read == 0 and self._shares(slot):
                break  # with one that is being read
            whole = self._rows.in_one_piece
            count = sequence.unread if whole else min(sequence.unread, left)
            if count == 0 or (whole and left < self.chunk and count > left):
                break
            left = max(0, left - count)
            tokens = tuple(sequence.tokens[sequence.read : sequence.read + count])
            wanted = count if sequence.request.prompt_logprobs else int(count == sequence.unread)
            pieces.append(TokenChunk(slot, sequence.read, tokens, wanted))
        return pieces

    def _shares(self, slot: int) -> bool:
        """Copy what is there of a prompt's beginning; whether more of it is about to be read.

        The last token of a prompt is always read, for its logits.
        """
        sequence = self._running[slot]
        if self._rows.in_one_piece or sequence.request.prompt_logprobs:
            self._held[slot] = []
            return False
        known = sequence.tokens[:-1]
        common = [common_prefix(held, known) for held in self._held]
        best = max(range(self.slots), key=lambda i: (common[i], i == slot))
        coming = [common_prefix(s.tokens, known) for s in self._running[:slot] if s.unread > 1]
        if coming and max(coming) >= common[best] + SHARED:
            return True
        if common[best] < SHARED:
            self._held[slot] = []
            return False
        if best != slot:
            self._rows.copy(best, slot, common[best])
        self._held[slot] = known[: common[best]]
        sequence.read = common[best]
        return False

    def _finish(self, pieces: Sequence[TokenChunk], logits: Tensor) -> list[Emitted]:
        """News of all whose prompts are read, from the logits (W, V) of all pieces."""
        parts = logits.split([piece.wanted for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            self._judge_prompt(piece, part)
        ready = [
            (self._running[piece.slot], part[-1:])
            for piece, part in zip(pieces, parts, strict=True)
            if not self._running[piece.slot].unread
        ]
        if not ready:
            return []
        last = torch.cat([part for _, part in ready])
        sequences = [sequence for sequence, _ in ready]
        tokens = self._draw(sequences, last)
        news = self._report(sequences, tokens, last)
        ended = {one.request for one in news if one.finish is not None}
        broken = {one.request for one in news if one.finish == "error"}
        for slot in reversed(range(len(self._running))):
            number = self._running[slot].number
            if number in broken:
                self._rows.clear(slot)
                self._held[slot] = []
            if number in ended:
                self._release(slot)
        return news

    def _judge_prompt(self, piece: TokenChunk, logits: Tensor) -> None:
        """Note what the model says of a prompt's tokens, from the logits of those before them."""
        sequence = self._running[piece.slot]
        if not sequence.request.prompt_logprobs or sequence.drawn:
            return
        judged, prompt = sequence.judged, sequence.request.prompt
        if not judged:
            judged.append(TokenLogprob(prompt[0], None))
        following = prompt[piece.past + 1 : piece.past + len(piece.tokens) + 1]
        if not following:
            return
        most = sequence.request.logprobs or 0
        found = token_logprobs(logits[: len(following)], following, [most] * len(following))
        judged += [TokenLogprob(*each) for each in zip(following, *found, strict=True)]

    def _draw(self, sequences: Sequence[_Sequence], logits: Tensor) -> list[int]:
        """The next token of each from logits (n, V), BROKEN where they are not finite."""
        finite = logits.amax(-1).isfinite()  # minus infinity: never to be drawn
        tokens = torch.where(finite, logits.argmax(-1), BROKEN).tolist()
        for i, sequence in enumerate(sequences):
            if tokens[i] != BROKEN and not sequence.sampler.takes_the_likeliest:
                tokens[i] = sequence.sampler.draw(logits[i].cpu())
        return tokens if self._agree is None else self._agree(tokens)

    def _report(
        self, sequences: Sequence[_Sequence], tokens: Sequence[int], logits: Tensor
    ) -> list[Emitted]:
        """Add the tokens to their sequences, and say so."""
        asked = [
            i
            for i, sequence in enumerate(sequences)
            if sequence.request.logprobs is not None and tokens[i] != BROKEN
        ]
        told: dict[int, tuple[float, Alternatives]] = {}
        if asked:
            counts = [sequences[i].request.logprobs or 0 for i in asked]
            found = token_logprobs(logits[asked], [tokens[i] for i in asked], counts)
            told = dict(zip(asked, zip(*found, strict=True), strict=True))
        return [
            self._emitted(sequence, token, told.get(i))
            for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
        ]

    def _emitted(
        self, sequence: _Sequence, token: int, told: tuple[float, Alternatives] | None
    ) -> Emitted:
        request, first = sequence.request, sequence.drawn == 0
        judged = tuple(sequence.judged) if first and request.prompt_logprobs else None
        finish: Finish | None = None
        if token == BROKEN:
            finish = "error"
        elif request.max_new_tokens == 0:
            finish = "length"
        elif token in request.stop_ids:
            finish = "stop"
        if finish is not None:
            return Emitted(sequence.number, None, finish, prompt_logprobs=judged)
        sequence.tokens.append(token)
        sequence.sampler.count(token)
        finish = "length" if sequence.drawn == request.max_new_tokens else None
        logprob, top = told or (None, ())
        return Emitted(sequence.number, token, finish, logprob, top, judged)

    def _release(self, slot: int) -> None:
        """Free a slot: the last that draws takes it, and those that read move up, in order."""
        draws = sum(bool(sequence.drawn) for sequence in self._running)
        places = [*range(max(slot, draws - 1), len(self._running))]
        places = places if slot >= draws else [slot, *places]
        if not self._rows.keeps_ended:
            self._held[slot] = []
        self._leave(slot, self._running[slot])
        for hole, source in itertools.pairwise(dict.fromkeys(places)):
            moved = self._running[hole] = self._running[source]
            if moved.read:
                self._rows.copy(source, hole, moved.read)
                self._held[hole] = moved.tokens[: moved.read]
                self._leave(source, moved)
        self._running.pop()

    def _leave(self, slot: int, sequence: _Sequence) -> None:
        """Forget what is left of a prompt that was read in part: no step saw whether it is numbers.

        A longer neighbor's mask hides it, but times 0 what is no number is none.
        """
        if sequence.read and sequence.unread and not sequence.drawn:
            self._rows.clear(slot)
            self._held[slot] = []


def stream(engine: Engine, request: Request) -> Iterator[int]:
    """The tokens of a request as an engine draws them, which nobody else asks meanwhile.

    Raises:
        UserError: it can never run, or logits were not finite, so that nothing can be drawn.
    """
    number = engine.add(request)
    try:
        while engine.busy:
            for one in engine.step():
                if one.finish == "error":
                    raise UserError(
                        "checkpoint: its model's logits are not finite numbers; write another"
                    )
                if one.token is not None:
                    yield one.token
    finally:
        engine.cancel(number)


def draw_all(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of many requests, in their order; none come after logits that are not finite."""
    drawn: dict[int, list[int]] = {engine.add(request): [] for request in requests}
    while engine.busy:
        for one in engine.step():
            if one.token is not None:
                drawn[one.request].append(one.token)
    return list(drawn.values())


def check_length(longest: int | None, prompt: int, max_new_tokens: int) -> None:
    """ALiBi and rotary positions continue beyond max_seq_len, others end at `longest`.

    Raises:
        UserError: naming the key and the longest that is possible.
    """
    if prompt == 0:
        raise UserError("prompt: is empty; begin it with the end-of-text token")
    if longest is None or prompt + max_new_tokens - 1 <= longest:
        return
    learned = f"the model's positions end at {longest} tokens (its max_seq_len)"
    if prompt > longest:
        raise UserError(f"prompt: has {prompt} tokens, but {learned}; write at most {longest}")
    raise UserError(
        f"max_new_tokens: {max_new_tokens} after a prompt of {prompt} tokens, but {learned};"
        f" write at most {longest - prompt + 1}"
    )
