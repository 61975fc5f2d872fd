"""Batched text generator with continuous batching, chunked prefill and prefix reuse.

Entry point: `SlotEngine`. Its callers (`generate`, `chat`, samples during training, the gauntlet
and `serve`) use it through the interface `requests.Engine`. A request occupies a slot of the KV
cache while it runs. Each step is one forward pass. Every sequence in the decode phase gets one
token. The remaining budget of `chunk` tokens goes to sequences in the prefill phase, in slot order
(iteration-level scheduling, Yu et al., 2022; chunked prefill, Agrawal et al., 2023). A slot keeps
its content after a request ends, so that a prompt with the same prefix is prefilled only from the
first different token. The model is behind the interface `SlotModel`: see `decoder_slots` for the
project's decoder.
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
    Engine,
    Finish,
    Sampler,
    SequenceRequest,
    TokenLogprob,
    TokenOutput,
    common_prefix,
    token_logprobs,
)
from llmfoundry.models.kv_cache import TokenChunk

CHUNK = 512
"""Prefill tokens per step. More prefill tokens delay the next token of decoding sequences."""
SHARED = 16
"""Shortest common prefix, in tokens, that is copied from another slot."""
BROKEN = -1  # in place of a token: the logits were not finite

Agree = Callable[[list[int]], list[int]]


class SlotModel(Protocol):
    """A model with a KV cache that has one slot for each sequence.

    Attributes:
        slots: number of slots.
        length: capacity of a slot in tokens.
        n_tokens: token ids below it can be sampled.
        keeps_ended: whether a slot keeps its content after its sequence ends.
        in_one_piece: whether the keys and values of a prompt depend on its length. If so, prompts
            are prefilled in one step, and prefixes are not reused.
    """

    slots: int
    length: int
    n_tokens: int
    keeps_ended: bool
    in_one_piece: bool

    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """Run one forward pass over chunks of several sequences.

        Returns:
            Logits (W, n_tokens) in fp32 of the last `wanted` tokens of each chunk, concatenated.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""

    def clear(self, slot: int) -> None:
        """Zero a slot whose content may not be finite."""


@dataclass
class _Sequence:
    """A request in the engine, waiting or running.

    Attributes:
        number: id of the request.
        request: the request.
        sampler: sampler with the request's random generator.
        tokens: the prompt and the sampled tokens.
        read: number of `tokens` in the slot: all except the last one in the decode phase.
        judged: log-probabilities of the prompt's tokens, if requested.
    """

    number: int
    request: SequenceRequest
    sampler: Sampler
    tokens: list[int]
    read: int = 0
    judged: list[TokenLogprob] = field(default_factory=list)

    @property
    def unread(self) -> int:
        """Number of tokens that the model has not read yet."""
        return len(self.tokens) - self.read

    @property
    def drawn(self) -> int:
        """Number of sampled tokens; above 0 in the decode phase."""
        return len(self.tokens) - len(self.request.prompt)


class SlotEngine:
    """Engine over the slots of a model.

    Attributes:
        chunk: maximum number of prefill tokens per step.
    """

    def __init__(
        self,
        rows: SlotModel,
        *,
        chunk: int = CHUNK,
        agree: Agree | None = None,
        in_step: bool = False,
    ) -> None:
        """Create an idle engine.

        Args:
            rows: the model and its KV cache.
            chunk: maximum number of prefill tokens per step.
            agree: for ranks with the same requests: returns the tokens sampled on rank 0. Logits
                may differ between ranks in the last bit, and all ranks must stop together.
            in_step: for ranks with different requests: run a forward pass even in a step without
                requests, because sharded weights need the collectives of all ranks.
        """
        self._rows, self.chunk, self._agree, self._in_step = rows, chunk, agree, in_step
        self._numbers = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by slot; decoding sequences before prefilling ones
        self._held: list[list[int]] = [[] for _ in range(rows.slots)]  # cached tokens by slot

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

    def add(self, request: SequenceRequest) -> int:
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

    def step(self) -> list[TokenOutput]:
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

    def _check(self, request: SequenceRequest) -> None:
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
        """Move waiting requests to free slots."""
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.popleft())

    def _pieces(self) -> list[TokenChunk]:
        """Plan the step: the chunk of tokens that the model reads for each running sequence."""
        pieces, budget = [], self.chunk
        for slot, sequence in enumerate(self._running):
            # decode: one token
            if sequence.drawn:
                pieces.append(TokenChunk(slot, sequence.read, (sequence.tokens[-1],), 1))
                continue
            # wait for a prefix that an earlier slot is still prefilling
            if sequence.read == 0 and self._reuse_prefix(slot):
                break
            # prefill: as many tokens as the budget allows
            in_one_piece = self._rows.in_one_piece
            count = sequence.unread if in_one_piece else min(sequence.unread, budget)
            if count == 0 or (in_one_piece and budget < self.chunk and count > budget):
                break
            budget = max(0, budget - count)
            tokens = tuple(sequence.tokens[sequence.read : sequence.read + count])
            wanted = count if sequence.request.prompt_logprobs else int(count == sequence.unread)
            pieces.append(TokenChunk(slot, sequence.read, tokens, wanted))
        return pieces

    def _reuse_prefix(self, slot: int) -> bool:
        """Copy the longest cached prefix of a prompt to its slot.

        The last token of a prompt is never reused, because its logits are needed.

        Returns:
            True if an earlier slot is prefilling a longer common prefix, so that the prompt should
            wait. Nothing is copied then.
        """
        sequence = self._running[slot]
        if self._rows.in_one_piece or sequence.request.prompt_logprobs:
            self._held[slot] = []
            return False
        prompt = sequence.tokens[:-1]
        common = [common_prefix(cached, prompt) for cached in self._held]
        best = max(range(self.slots), key=lambda i: (common[i], i == slot))
        prefilling = [s for s in self._running[:slot] if s.unread > 1]
        upcoming = [common_prefix(other.tokens, prompt) for other in prefilling]
        if upcoming and max(upcoming) >= common[best] + SHARED:
            return True
        if common[best] < SHARED:
            self._held[slot] = []
            return False
        if best != slot:
            self._rows.copy(best, slot, common[best])
        self._held[slot] = prompt[: common[best]]
        sequence.read = common[best]
        return False

    def _finish(self, pieces: Sequence[TokenChunk], logits: Tensor) -> list[TokenOutput]:
        """Sample tokens and release the slots of finished requests.

        Args:
            pieces: the chunks of the step.
            logits: (W, V), the requested logits of all chunks.

        Returns:
            One entry for each sequence whose prompt has been read.
        """
        # logits by chunk; log-probabilities of prompts
        chunk_logits = logits.split([piece.wanted for piece in pieces])
        for piece, piece_logits in zip(pieces, chunk_logits, strict=True):
            self._score_prompt(piece, piece_logits)
        # sample a token for each sequence without unread tokens
        sequences, last_rows = [], []
        for piece, piece_logits in zip(pieces, chunk_logits, strict=True):
            sequence = self._running[piece.slot]
            if not sequence.unread:
                sequences.append(sequence)
                last_rows.append(piece_logits[-1:])
        if not sequences:
            return []
        last_logits = torch.cat(last_rows)
        tokens = self._draw(sequences, last_logits)
        emitted = self._report(sequences, tokens, last_logits)
        # release slots, from the last one, because a release moves later sequences
        finished = {one.request for one in emitted if one.finish is not None}
        broken = {one.request for one in emitted if one.finish == "error"}
        for slot in reversed(range(len(self._running))):
            number = self._running[slot].number
            if number in broken:
                self._rows.clear(slot)
                self._held[slot] = []
            if number in finished:
                self._release(slot)
        return emitted

    def _score_prompt(self, piece: TokenChunk, logits: Tensor) -> None:
        """Record the log-probabilities of a prompt's tokens, if the request asks for them."""
        sequence = self._running[piece.slot]
        if not sequence.request.prompt_logprobs or sequence.drawn:
            return
        judged, prompt = sequence.judged, sequence.request.prompt
        if not judged:
            judged.append(TokenLogprob(prompt[0], None))
        targets = prompt[piece.past + 1 : piece.past + len(piece.tokens) + 1]
        if not targets:
            return
        n_top = sequence.request.logprobs or 0
        logprobs, tops = token_logprobs(logits[: len(targets)], targets, [n_top] * len(targets))
        for token, logprob, top in zip(targets, logprobs, tops, strict=True):
            judged.append(TokenLogprob(token, logprob, top))

    def _draw(self, sequences: Sequence[_Sequence], logits: Tensor) -> list[int]:
        """Sample the next token of each sequence from logits (n, V); BROKEN if not finite."""
        finite = logits.amax(-1).isfinite()  # single logits of -inf are allowed: never sampled
        tokens = torch.where(finite, logits.argmax(-1), BROKEN).tolist()
        for i, sequence in enumerate(sequences):
            if tokens[i] != BROKEN and not sequence.sampler.takes_the_likeliest:
                tokens[i] = sequence.sampler.draw(logits[i].cpu())
        return tokens if self._agree is None else self._agree(tokens)

    def _report(
        self, sequences: Sequence[_Sequence], tokens: Sequence[int], logits: Tensor
    ) -> list[TokenOutput]:
        """Append the tokens to their sequences and return what the step emits."""
        with_logprobs = [
            i
            for i, sequence in enumerate(sequences)
            if sequence.request.logprobs is not None and tokens[i] != BROKEN
        ]
        scores: dict[int, tuple[float, Alternatives]] = {}
        if with_logprobs:
            counts = [sequences[i].request.logprobs or 0 for i in with_logprobs]
            chosen = [tokens[i] for i in with_logprobs]
            logprobs, tops = token_logprobs(logits[with_logprobs], chosen, counts)
            scores = dict(zip(with_logprobs, zip(logprobs, tops, strict=True), strict=True))
        return [
            self._append(sequence, token, scores.get(i))
            for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
        ]

    def _append(
        self, sequence: _Sequence, token: int, scores: tuple[float, Alternatives] | None
    ) -> TokenOutput:
        """Append a token to its sequence, unless the sequence ends without it."""
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
            return TokenOutput(sequence.number, None, finish, prompt_logprobs=judged)
        sequence.tokens.append(token)
        sequence.sampler.count(token)
        finish = "length" if sequence.drawn == request.max_new_tokens else None
        logprob, top = scores or (None, ())
        return TokenOutput(sequence.number, token, finish, logprob, top, judged)

    def _release(self, slot: int) -> None:
        """Free a slot and close the gap.

        Decoding sequences occupy the first slots. The last decoding sequence moves to the free
        slot, and the prefilling sequences each move up by one slot, in order.
        """
        n_decoding = sum(bool(sequence.drawn) for sequence in self._running)
        moving = [*range(max(slot, n_decoding - 1), len(self._running))]
        moving = moving if slot >= n_decoding else [slot, *moving]
        if not self._rows.keeps_ended:
            self._held[slot] = []
        self._clear_partial(slot, self._running[slot])
        for target, source in itertools.pairwise(dict.fromkeys(moving)):
            moved = self._running[target] = self._running[source]
            if moved.read:
                self._rows.copy(source, target, moved.read)
                self._held[target] = moved.tokens[: moved.read]
                self._clear_partial(source, moved)
        self._running.pop()

    def _clear_partial(self, slot: int, sequence: _Sequence) -> None:
        """Clear a slot that a sequence leaves in the middle of its prefill.

        No step has checked that its keys and values are finite. The mask of a longer sequence hides
        them, but 0 times NaN is NaN.
        """
        if sequence.read and sequence.unread and not sequence.drawn:
            self._rows.clear(slot)
            self._held[slot] = []


def stream(engine: Engine, request: SequenceRequest) -> Iterator[int]:
    """Yield the tokens of one request as they are sampled. The engine must have no other callers.

    Raises:
        UserError: the request is invalid, or the logits are not finite.
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


def draw_all(engine: Engine, requests: Sequence[SequenceRequest]) -> list[list[int]]:
    """Run all requests and return their tokens, in order of the requests.

    A request ends without an error when its logits are not finite.
    """
    tokens: dict[int, list[int]] = {engine.add(request): [] for request in requests}
    while engine.busy:
        for one in engine.step():
            if one.token is not None:
                tokens[one.request].append(one.token)
    return list(tokens.values())


def check_length(longest: int | None, prompt: int, max_new_tokens: int) -> None:
    """Check that a prompt and its continuation fit into the model's positions.

    Args:
        longest: number of learned positions; None: unlimited (ALiBi and rotary positions).
        prompt: length of the prompt in tokens.
        max_new_tokens: longest continuation in tokens.

    Raises:
        UserError: with the key to change and the largest possible value.
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
