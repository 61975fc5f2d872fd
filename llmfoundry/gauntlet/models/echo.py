r"""The score of an answer, read from the reply of a server that echoes the text it was sent.

`Endpoint` calls `read_score`. The reply has every token's text and log-probability, first those of
the text that was sent, then of one that was written because some servers must. Which tokens are the
answer's? The server's tokenizer is not known here, and a token that is only part of a character has
no text of its own: servers spell it `bytes:\xe2\x80` (OpenAI, ours), U+FFFD (vLLM) or as nothing
(llama-cpp-python). So each token has several places where it may end, and the text, of which every
byte belongs to a token, and the reply's `text_offset` decide between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.gauntlet.questions import Refusal, Score

ALTERNATIVES = 2  # of each token: the likeliest and the next, which shows a tie
ECHO: Mapping[str, Any] = {"echo": True, "logprobs": ALTERNATIVES, "max_tokens": 1}
"""What a request says beside the text and the model."""
_TIE = 1e-6  # nats
_REPLACED = "\ufffd"
_BYTES = "bytes:"
_LONGEST = 4  # bytes of a character


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
    text, border = (context + target).encode(), len(context.encode())
    begins = _begins(said, text)
    moves = _moves(tokens, text, begins) if begins is not None else None
    moves = moves or _moves(tokens, text)
    if moves is None:
        return _unknown("the server's tokens do not spell the text that it was sent")
    sides = _sides(tokens, moves, border)
    if any(len(side) > 1 for side in sides):
        return _unknown("the server's tokens do not show where the answer begins")
    mine = [i for i, side in enumerate(sides) if True in side]
    if not mine:
        return _unknown("the server's tokens do not spell the answer")
    if any(logprobs[i] is None for i in mine):
        return _unknown("the server gives no probability of a text's first token")
    return _summed([float(logprobs[i]) for i in mine], [dict(best[i]) for i in mine])


def _unknown(reason: str) -> Refusal:
    """Said of a score that the reply does not hold."""
    return Refusal(reason, left_out=True)


Moves = set[tuple[int, int]]
"""Where a token may begin and end in the bytes of the text; equal: it is no part of it."""
Begins = Callable[[int, int], bool]
"""Whether a token, by its number, may begin at a place."""


def _moves(tokens: Sequence[str], text: bytes, begins: Begins | None = None) -> list[Moves] | None:
    """The places of the text's tokens; None: they do not spell it.

    Args:
        tokens: as the server spells them, written ones behind the text's.
        text: what was sent.
        begins: whether a token may begin at a place; None: not known.
    """
    # Forward: all that can be reached from the text's start.
    steps: list[Moves] = []
    reached = [{0}]
    for i, token in enumerate(tokens):
        starts = [place for place in reached[-1] if begins is None or begins(i, place)]
        steps.append({(start, end) for start in starts for end in _ends(token, text, start)})
        reached.append({end for _, end in steps[-1]})
    # All tokens but the one that was written spell the text; of servers that write none, all do.
    usual = [len(tokens) - 1, len(tokens)]
    n = next((i for i in (*usual, *range(len(tokens))) if len(text) in reached[i]), None)
    if n is None:
        return None
    # Backward: only what leads to the text's end.
    goals, kept = {len(text)}, list[Moves]()
    for step in reversed(steps[:n]):
        kept.append({(start, end) for start, end in step if end in goals})
        goals = {start for start, _ in kept[-1]}
    return kept[::-1]


def _ends(token: str, text: bytes, start: int) -> Iterator[int]:
    """Where a token that begins at a place of the text may end; there, if it is no part of it."""
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
    if not token:  # nothing, or a part of a character
        for end in range(start + 1, len(text) + 1):
            if text[start:end].decode(errors="ignore"):
                break
            yield end
            if end == len(text) or not _continues(text[end]):
                break


def _spelled(token: str) -> bytes:
    r"""A token's bytes; of `bytes:\xe2\x80` those that it lists, with Python's escapes."""
    if token.startswith(_BYTES) and "\\x" in token:
        try:
            listed = token.removeprefix(_BYTES).encode("latin-1")
            return listed.decode("unicode_escape").encode("latin-1")
        except UnicodeError:
            pass
    return token.encode(errors="surrogatepass")


def _begins(said: Mapping[str, Any], text: bytes) -> Begins | None:
    """Where the reply's `text_offset` lets tokens begin; None: it is not given.

    It counts characters; a token within a character begins where that does. vLLM's counts what it
    spells, so that after <s> or U+FFFD it points elsewhere, and SGLang's is -1: then some token is
    nowhere, and `read_score` does without.
    """
    offsets = said.get("text_offset")
    if not isinstance(offsets, list) or len(offsets) != len(said["tokens"]):
        return None
    begun = itertools.accumulate(not _continues(byte) for byte in text)
    characters = [*(n - 1 for n in begun), len(text.decode())]
    return lambda token, place: characters[place] == offsets[token]


def _continues(byte: int) -> bool:
    """Whether it is not the first of a character's, in UTF-8."""
    return byte & 0xC0 == 0x80


def _sides(tokens: Sequence[str], moves: Sequence[Moves], border: int) -> list[set[bool]]:
    """For each token whether it ends behind the border; both: its places do not tell.

    A token spelled as nothing is the first part of the character that follows; another one that is
    no part of the text is special, such as <s>, and the context's.
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
