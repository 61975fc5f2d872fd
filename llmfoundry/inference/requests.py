"""What a batched generator is asked, and what it answers: tokens in, tokens out, text nowhere.

`engine` has the one implementation; what asks it (`generate`, `chat`, samples while training, the
gauntlet, `serve`) turns text into a `Request` and tokens into text. A request is one sequence: n
answers to a prompt are n requests. All random numbers of a request come from its own generator, so
that its answer does not depend on who shares the batch.

A `Sampler` draws a request's next token from logits: penalties, temperature, top_k, top_p; on the
CPU in fp32, so that a seed means the same on every device and in every batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from llmfoundry.errors import UserError

Finish = Literal["stop", "length", "error"]
"""A stop id was drawn; max_new_tokens are; the logits were not finite numbers."""
Alternatives = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Penalties are OpenAI's: of each token's logit frequency_penalty times the number of times that
    it was drawn, and presence_penalty if it was drawn at all, are subtracted, before temperature,
    top_k and top_p. The prompt's tokens do not count.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: draw from the k likeliest only; None: from all.
        top_p: draw from the likeliest that together reach this probability; None: from all.
        frequency_penalty: see above.
        presence_penalty: see above.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Attributes:
        prompt: at least one token.
        max_new_tokens: tokens to draw at most; 0 reads the prompt alone.
        sampling: how they are chosen.
        stop_ids: tokens that end the answer, of which they are no part.
        logprobs: report the log-probability of each token drawn, and those of so many of the
            likeliest; None: none. They are the model's: before penalties and temperature.
        prompt_logprobs: report the same of the prompt's tokens; `logprobs` is then set.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """One token of a prompt, as the model judges it.

    Attributes:
        token: its id.
        logprob: of it after those before it; None: of the first, before which is nothing.
        top: the likeliest in its place; empty for the first.
    """

    token: int
    logprob: float | None
    top: Alternatives = ()


@dataclass(frozen=True)
class Emitted:
    """News of one request; after one with a `finish` there are no more.

    Attributes:
        request: its number.
        token: the one drawn; None where the answer ended without one: at a stop id, at a
            max_new_tokens of 0, or by an error.
        finish: why it ended; None: it goes on.
        logprob: of the token, where it was asked for.
        top: the likeliest in its place, where they were asked for.
        prompt_logprobs: of the whole prompt, with the first news of a request that asked for them.
    """

    request: int
    token: int | None
    finish: Finish | None = None
    logprob: float | None = None
    top: Alternatives = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Engine(Protocol):
    """Many requests at once on one model. It is no thread's in particular, but one at a time's."""

    @property
    def slots(self) -> int:
        """Requests that run at the same time at most."""

    @property
    def length(self) -> int:
        """Tokens of a slot: of a prompt and its answer together at most."""

    @property
    def waiting(self) -> int:
        """Requests that were added and have no slot yet."""

    @property
    def running(self) -> int:
        """Requests that have a slot."""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""

    def add(self, request: Request) -> int:
        """Queue a request; its number. It gets a slot in the order of adding.

        Raises:
            UserError: it can never run: too long, or with values that mean nothing.
        """

    def cancel(self, number: int) -> None:
        """Forget a request, running or waiting: its slot is free at once. Ended ones: nothing."""

    def step(self) -> list[Emitted]:
        """One forward pass: a token of all that run; those that have a free slot begin."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two texts share, by halving: often hundreds, or all."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> int:
    """A token from logits (V,); the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = draw_probabilities(logits, temperature, top_k, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def draw_probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """What `sample_token` draws from, (V,) float64: temperature, then top_k, then top_p.

    top_p keeps the fewest likeliest tokens whose probabilities reach it (Holtzman et al., 2019).
    """
    logits = (logits.double() - logits.max()) / temperature  # of any size: never inf / inf
    if top_k is not None and top_k < len(logits):
        kept = logits.topk(top_k).indices
        logits = torch.full_like(logits, float("-inf")).scatter(0, kept, logits[kept])
    probabilities = logits.softmax(0)
    if top_p is not None and top_p < 1:
        ordered, index = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        ordered[before >= top_p] = 0
        probabilities = torch.zeros_like(ordered).scatter(0, index, ordered)
        probabilities /= probabilities.sum()
    return probabilities


class Sampler:
    """The draws of one request."""

    def __init__(self, sampling: Sampling) -> None:
        """Nothing is drawn yet.

        Raises:
            UserError: a value means nothing.
        """
        check_sampling(sampling)
        self._how = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._drawn: Counter[int] = Counter()

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether it is the plain argmax of the logits."""
        how = self._how
        return how.temperature == how.frequency_penalty == how.presence_penalty == 0

    def draw(self, logits: Tensor) -> int:
        """A token from logits (V,) in fp32 on the CPU."""
        how = self._how
        if self._drawn and (how.frequency_penalty or how.presence_penalty):
            tokens = torch.tensor(list(self._drawn))
            counts = torch.tensor(list(self._drawn.values()), dtype=logits.dtype)
            logits = logits.clone()
            logits[tokens] -= counts * how.frequency_penalty + how.presence_penalty
        return sample_token(logits, how.temperature, how.top_k, how.top_p, self._generator)

    def count(self, token: int) -> None:
        """A token is part of the answer now."""
        self._drawn[token] += 1


def check_sampling(sampling: Sampling) -> None:
    """Refuse values that mean nothing.

    Raises:
        UserError: naming the value and what it may be.
    """
    how, problems = sampling, []
    if not (math.isfinite(how.temperature) and how.temperature >= 0):
        problems.append(f"temperature: {how.temperature}; write 0 or more")
    if how.top_k is not None and how.top_k < 1:
        problems.append(f"top_k: {how.top_k}; write 1 or more")
    if how.top_p is not None and not 0 < how.top_p <= 1:
        problems.append(f"top_p: {how.top_p}; write more than 0, and 1 at most")
    for name in ("frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(how, name)):
            problems.append(f"{name}: {getattr(how, name)}; write a number, from -2 to 2")
    if not -(2**63) <= how.seed < 2**64:
        problems.append(f"seed: {how.seed}; write one of at most 64 bits")
    if problems:
        raise UserError(*problems)


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> tuple[list[float], list[Alternatives]]:
    """Of tokens (n,) after logits (n, V): their log-probabilities, and so many of the likeliest."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    best = zip(ids.tolist(), values.tolist(), counts, strict=True)
    tops = [tuple(zip(i[:n], v[:n], strict=True)) for i, v, n in best]
    return chosen.tolist(), tops
