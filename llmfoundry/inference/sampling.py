"""The next token from logits: penalties, temperature, top_k, top_p, and what is reported of it.

`engine` calls it for all sequences of a step. Draws are made on the CPU from fp32 logits, each
request's with a generator of its own, so that a seed means the same on every device and in every
batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.inference.requests import Alternatives, Sampling


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
