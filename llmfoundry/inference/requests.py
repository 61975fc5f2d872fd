"""Token-level interface of the generation engine: its requests, outputs and samplers.

`engine` has the implementation. Its callers (`generate`, `chat`, samples during training, the
gauntlet and `serve`) convert between text and tokens. A request is one sequence: n answers to a
prompt are n requests. Each request has its own random generator, so that its answer does not depend
on the other requests of the batch.

`Sampler` samples a request's next token from logits with penalties, temperature, top_k and top_p.
It runs on the CPU in fp32, so that a seed gives the same tokens on every device.
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
"""Why a request ended: a stop id was sampled; max_new_tokens is reached; logits are not finite."""
Alternatives = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request.

    Penalties are defined as in OpenAI's API and applied before temperature, top_k and top_p. Tokens
    of the prompt do not count.

    Attributes:
        temperature: 0: greedy decoding.
        top_k: sample from the k most probable tokens; None: from all.
        top_p: sample from the smallest set of tokens whose probability reaches top_p; None: from
            all.
        frequency_penalty: subtracted from a token's logit for each time that it was sampled.
        presence_penalty: subtracted from a token's logit once it was sampled.
        seed: seed of the request's random generator.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to continue.

    Attributes:
        prompt: token ids; at least one.
        max_new_tokens: maximum number of tokens to sample; 0: only read the prompt.
        sampling: sampling settings.
        stop_ids: tokens that end the answer; they are not part of it.
        logprobs: report the log-probability of each sampled token and of this many most probable
            tokens; None: none. Log-probabilities are taken before penalties and temperature.
        prompt_logprobs: report log-probabilities of the prompt's tokens too; needs `logprobs`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token of a prompt.

    Attributes:
        token: token id.
        logprob: log-probability after the preceding tokens; None for the first token.
        top: the most probable tokens at this position; empty for the first token.
    """

    token: int
    logprob: float | None
    top: Alternatives = ()


@dataclass(frozen=True)
class TokenOutput:
    """Output of one request in one step. An output with a `finish` is the last one.

    Attributes:
        request: id of the request.
        token: the sampled token; None if the request ended without a token: at a stop id, with
            max_new_tokens 0, or by an error.
        finish: why the request ended; None: it continues.
        logprob: log-probability of the token, if requested.
        top: the most probable tokens at this position, if requested.
        prompt_logprobs: log-probabilities of the prompt, if requested; in the first output only.
    """

    request: int
    token: int | None
    finish: Finish | None = None
    logprob: float | None = None
    top: Alternatives = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Engine(Protocol):
    """Batched generation on one model. Any thread may call it, but only one thread at a time."""

    @property
    def slots(self) -> int:
        """Maximum number of concurrent requests."""

    @property
    def length(self) -> int:
        """Capacity of a slot: maximum length of a prompt and its answer together, in tokens."""

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""

    @property
    def running(self) -> int:
        """Number of requests with a slot."""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""

    def add(self, request: SequenceRequest) -> int:
        """Queue a request and return its id. Requests get slots in the order of arrival.

        Raises:
            UserError: the request is too long or has invalid settings.
        """

    def cancel(self, number: int) -> None:
        """Remove a request and free its slot. Ids of finished requests are ignored."""

    def step(self) -> list[TokenOutput]:
        """Admit waiting requests to free slots and run one forward pass."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix, by binary search: prefixes are often long."""
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
    """Sample a token from logits (V,); the argmax at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = draw_probabilities(logits, temperature, top_k, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def draw_probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return the distribution that `sample_token` samples from, (V,) float64.

    Temperature is applied first, then top_k, then top_p. top_p keeps the smallest set of most
    probable tokens whose probability reaches it (Holtzman et al., 2019).
    """
    logits = (logits.double() - logits.max()) / temperature  # the maximum is 0: no overflow
    if top_k is not None and top_k < len(logits):
        top = logits.topk(top_k).indices
        logits = torch.full_like(logits, float("-inf")).scatter(0, top, logits[top])
    probabilities = logits.softmax(0)
    if top_p is not None and top_p < 1:
        ordered, index = probabilities.sort(descending=True, stable=True)
        preceding = ordered.cumsum(0) - ordered
        ordered[preceding >= top_p] = 0
        probabilities = torch.zeros_like(ordered).scatter(0, index, ordered)
        probabilities /= probabilities.sum()
    return probabilities


class Sampler:
    """Sampler of one request: its random generator and the counts of its tokens."""

    def __init__(self, sampling: Sampling) -> None:
        """Seed the generator.

        Raises:
            UserError: a setting is out of range.
        """
        check_sampling(sampling)
        self._how = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._drawn: Counter[int] = Counter()

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether sampling is the argmax of the logits."""
        how = self._how
        return how.temperature == how.frequency_penalty == how.presence_penalty == 0

    def draw(self, logits: Tensor) -> int:
        """Sample a token from logits (V,) in fp32 on the CPU."""
        how = self._how
        if self._drawn and (how.frequency_penalty or how.presence_penalty):
            tokens = torch.tensor(list(self._drawn))
            counts = torch.tensor(list(self._drawn.values()), dtype=logits.dtype)
            logits = logits.clone()
            logits[tokens] -= counts * how.frequency_penalty + how.presence_penalty
        return sample_token(logits, how.temperature, how.top_k, how.top_p, self._generator)

    def count(self, token: int) -> None:
        """Count a token of the answer, for the penalties."""
        self._drawn[token] += 1


def check_sampling(sampling: Sampling) -> None:
    """Check the range of each setting.

    Raises:
        UserError: with each wrong value and its range.
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
    """Return the log-probabilities of tokens and of the most probable tokens.

    Args:
        logits: (n, V).
        tokens: (n,), one token for each row of the logits.
        counts: (n,), number of most probable tokens to return for each row.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    tops: list[Alternatives] = []
    for row_ids, row_values, n in zip(ids.tolist(), values.tolist(), counts, strict=True):
        tops.append(tuple(zip(row_ids[:n], row_values[:n], strict=True)))
    return chosen.tolist(), tops
