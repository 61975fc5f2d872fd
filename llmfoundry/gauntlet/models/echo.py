"""A text's log-probability from what a server says of it, token by token.

`Endpoint.score` sends a text with `echo` and `logprobs`, and the reply (OpenAI's completions
protocol; vLLM's and others' servers) has every token's text and log-probability, first the text's,
then one that was written because some servers must. Their tokenizer is not known here, so tokens
are found in the text by what they spell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.gauntlet.questions import Refusal, Score

ALTERNATIVES = 2  # of each token: the likeliest and the next, which shows a tie
ECHO: Mapping[str, Any] = {"echo": True, "logprobs": ALTERNATIVES, "max_tokens": 1}
"""What a request says beside the text and the model."""
_TIE = 1e-6  # nats


def read_score(reply: Mapping[str, Any], context: str, target: str) -> Score | Refusal:
    """The score of `target` after `context`, from the reply to both as one text.

    A token that begins in the context and ends in the target counts as the target's: the model
    gives no probability of a part of it.

    Raises:
        KeyError: the reply has no log-probabilities. Likewise IndexError, TypeError, ValueError.
    """
    said = reply["choices"][0]["logprobs"]
    tokens, logprobs = said["tokens"], said["token_logprobs"]
    best = said["top_logprobs"]
    if not len(tokens) == len(logprobs) == len(best):
        raise ValueError("lists of different lengths")
    spans = list(_spans(tokens, context + target))
    mine = [i for i, (_, end) in enumerate(spans) if end > len(context)]
    mine = [i for i in mine if spans[i][0] < len(context) + len(target)]
    if not mine or spans[mine[-1]][1] < len(context) + len(target):
        return Refusal("the server's tokens do not spell the text that it was sent")
    if any(logprobs[i] is None for i in mine):
        return Refusal("the server gives no probability of a text's first token")
    return _summed([float(logprobs[i]) for i in mine], [best[i] for i in mine])


def _spans(tokens: Sequence[str], text: str) -> Iterator[tuple[int, int]]:
    """Where each token begins and ends in `text`; (0, 0) of one before it, such as <s>.

    What spells a part of a character only (shown as U+FFFD, or as bytes) ends where the next token
    that can be found begins.
    """
    place = 0
    for i, token in enumerate(tokens):
        if text.startswith(token, place):
            start, place = place, place + len(token)
        elif "\ufffd" in token or token.startswith("bytes:"):
            start, place = place, _next_found(tokens[i + 1 :], text, place)
        else:
            start = place
        yield start, place


def _next_found(following: Sequence[str], text: str, place: int) -> int:
    """Where the next token that spells whole characters begins."""
    for token in following:
        if "\ufffd" not in token and not token.startswith("bytes:"):
            found = text.find(token, place)
            return found if found >= 0 else len(text)
    return len(text)


def _summed(logprobs: Sequence[float], alternatives: Sequence[Mapping[str, float]]) -> Score:
    """The score of tokens, each with the likeliest at its place and their log-probabilities."""
    bests, first, alone = [], True, True
    for logprob, likeliest in zip(logprobs, alternatives, strict=True):
        values = [float(value) for value in likeliest.values()]
        best = max(logprob, *values)
        bests.append(best)
        first = first and logprob >= best - _TIE
        alone = alone and sum(value >= best - _TIE for value in values) < 2
    return Score(
        math.fsum(logprobs),
        greedy=first and alone,
        tied=first and not alone,
        best_logprob=math.fsum(bests),
        mean_probability=math.fsum(map(math.exp, logprobs)) / len(logprobs),
        least_best=math.exp(min(bests)),
        n_tokens=len(logprobs),
    )
