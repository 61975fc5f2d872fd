r"""Score of an answer, read from the reply of a server that echoes the prompt.

Entry point: `read_score`, which `Endpoint` calls. The reply has text and log-probability of every
token of the prompt, followed by one generated token, which some servers require. The tokenizer of
the server is unknown here, so the tokens of the answer must be located by their text. A token that
is a part of a character has no text: servers write it as `bytes:\xe2\x80` (OpenAI, this project),
U+FFFD (vLLM) or "" (llama-cpp-python). A token may therefore end at several positions. Two facts
select the right one: the tokens cover every byte of the prompt, and the reply may have
`text_offset`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.gauntlet.questions import Refusal, Score

ALTERNATIVES = 2  # log-probabilities per position: the two likeliest tokens, which shows a tie
ECHO: Mapping[str, Any] = {"echo": True, "logprobs": ALTERNATIVES, "max_tokens": 1}
"""Fields of a scoring request, in addition to text and model."""
_TIE = 1e-6  # nats
_REPLACED = "\ufffd"
_BYTES = "bytes:"
_LONGEST = 4  # bytes of a character


def read_score(reply: Mapping[str, Any], context: str, target: str) -> Score | Refusal:
    """Return the score of `target` after `context`, from the reply to both as one text.

    A token that begins in the context and ends in the target belongs to the target, because there
    is no probability of a part of a token.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the reply has no valid log-probabilities.
    """
    # the lists of the reply
    echoed = reply["choices"][0]["logprobs"]
    tokens, logprobs = echoed["tokens"], echoed["token_logprobs"]
    best = echoed["top_logprobs"]
    if not len(tokens) == len(logprobs) == len(best):
        raise ValueError("lists of different lengths")

    # locate the tokens in the text, with text_offset if that is consistent
    text, border = (context + target).encode(), len(context.encode())
    begins = _begins(echoed, text)
    moves = _moves(tokens, text, begins) if begins is not None else None
    moves = moves or _moves(tokens, text)
    if moves is None:
        return _unknown("the server's tokens do not spell the text that it was sent")

    # add up the tokens that end after the border
    sides = _sides(tokens, moves, border)
    if any(len(side) > 1 for side in sides):
        return _unknown("the server's tokens do not show where the answer begins")
    answer = [i for i, side in enumerate(sides) if True in side]
    if not answer:
        return _unknown("the server's tokens do not spell the answer")
    if any(logprobs[i] is None for i in answer):
        return _unknown("the server gives no probability of a text's first token")
    return _summed([float(logprobs[i]) for i in answer], [dict(best[i]) for i in answer])


def _unknown(reason: str) -> Refusal:
    """Return the refusal for a score that the reply does not contain."""
    return Refusal(reason, left_out=True)


Moves = set[tuple[int, int]]
"""Possible (start, end) of a token in the bytes of the text; equal: it has no bytes there."""
Begins = Callable[[int, int], bool]
"""Tells whether a token, given by its number, may begin at a position."""


def _moves(tokens: Sequence[str], text: bytes, begins: Begins | None = None) -> list[Moves] | None:
    """Return the possible positions of the tokens in a text; None if they do not cover it.

    Args:
        tokens: texts of the tokens from the server; generated tokens follow those of the text.
        text: the text of the request.
        begins: tells whether a token may begin at a position; None: unknown.
    """
    # Forward: positions that can be reached from the start of the text.
    steps: list[Moves] = []
    reached = [{0}]
    for i, token in enumerate(tokens):
        starts = [place for place in reached[-1] if begins is None or begins(i, place)]
        steps.append({(start, end) for start in starts for end in _ends(token, text, start)})
        reached.append({end for _, end in steps[-1]})
    # All tokens but the generated one cover the text; all tokens if the server generates none.
    usual = [len(tokens) - 1, len(tokens)]
    n = next((i for i in (*usual, *range(len(tokens))) if len(text) in reached[i]), None)
    if n is None:
        return None
    # Backward: only positions from which the end of the text can be reached.
    goals, valid = {len(text)}, list[Moves]()
    for step in reversed(steps[:n]):
        valid.append({(start, end) for start, end in step if end in goals})
        goals = {start for start, _ in valid[-1]}
    return valid[::-1]


def _ends(token: str, text: bytes, start: int) -> Iterator[int]:
    """Yield the possible ends of a token that begins at `start`; `start` if it has no bytes."""
    if _REPLACED in token:
        ends = range(start + 1, min(start + _LONGEST * len(token), len(text)) + 1)
        yield from (end for end in ends if text[start:end].decode(errors="replace") == token)
        return
    spelled = _spelled(token)
    if text.startswith(spelled, start):
        yield start + len(spelled)
    elif text.startswith(b" " + spelled, start):
        yield start + 1 + len(spelled)  # some decoders drop the space before a word
    else:
        yield start
    if not token:  # no bytes, or a part of a character
        for end in range(start + 1, len(text) + 1):
            if text[start:end].decode(errors="ignore"):
                break
            yield end
            if end == len(text) or not _continues(text[end]):
                break


def _spelled(token: str) -> bytes:
    r"""Return the bytes of a token's text; `bytes:\xe2\x80` lists them with Python's escapes."""
    if token.startswith(_BYTES) and "\\x" in token:
        try:
            listed = token.removeprefix(_BYTES).encode("latin-1")
            return listed.decode("unicode_escape").encode("latin-1")
        except UnicodeError:
            pass
    return token.encode(errors="surrogatepass")


def _begins(echoed: Mapping[str, Any], text: bytes) -> Begins | None:
    """Return where `text_offset` of the reply allows tokens to begin; None if it is missing.

    Offsets count characters; a token within a character has the offset of the character. Offsets
    of vLLM are wrong after <s> or U+FFFD, and those of SGLang are -1. Some token then has no
    position, and `read_score` ignores the offsets.
    """
    offsets = echoed.get("text_offset")
    if not isinstance(offsets, list) or len(offsets) != len(echoed["tokens"]):
        return None
    begun = itertools.accumulate(not _continues(byte) for byte in text)
    characters = [*(n - 1 for n in begun), len(text.decode())]
    return lambda token, place: characters[place] == offsets[token]


def _continues(byte: int) -> bool:
    """Return whether a byte is not the first one of a character in UTF-8."""
    return byte & 0xC0 == 0x80


def _sides(tokens: Sequence[str], moves: Sequence[Moves], border: int) -> list[set[bool]]:
    """Return whether each token ends after the border; both values if that is ambiguous.

    A token with the text "" and no bytes is the first part of the next character. Another token
    without bytes is special, such as <s>, and belongs to the context.
    """
    sides: list[set[bool]] = []
    following = {False}
    for token, step in zip(tokens[: len(moves)][::-1], reversed(moves), strict=True):
        side = {end > border for start, end in step if end > start}
        if any(start == end for start, end in step):
            side |= {False} if token else following
        sides.append(side)
        following = side
    return sides[::-1]


def _summed(logprobs: Sequence[float], alternatives: Sequence[Mapping[str, float]]) -> Score:
    """Add up the scores of tokens.

    Args:
        logprobs: log-probability of each token.
        alternatives: log-probabilities of the likeliest tokens at each position.
    """
    bests, is_best, is_unique = [], True, True
    for logprob, likeliest in zip(logprobs, alternatives, strict=True):
        values = [float(value) for value in likeliest.values()]
        best = max(logprob, *values)
        bests.append(best)
        is_best = is_best and logprob >= best - _TIE
        is_unique = is_unique and sum(value >= best - _TIE for value in values) < 2
    return Score(
        math.fsum(logprobs),
        greedy=is_best and is_unique,
        tied=is_best and not is_unique,
        best_logprob=math.fsum(bests),
        mean_probability=math.fsum(map(math.exp, logprobs)) / len(logprobs),
        least_best=math.exp(min(bests)),
        n_tokens=len(logprobs),
    )
