"""Byte-level BPE backends for the `tokenizers` library: trained, plain bytes, or from tiktoken.

`build_tokenizer.py` calls them. The one idea: a byte-level vocabulary represents each byte by a
printable character (GPT-2's alphabet), so that any text is encoded and decoded without loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmfoundry.terminal import is_watched

END_OF_TEXT = "<|endoftext|>"

# The words of GPT-4: digits in groups of at most three, letters with one leading character, line
# ends with the punctuation before them. Part of the cache key: a change retrains tokenizers.
WORDS = (
    r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The time of the trainer is quadratic in the length of a word; DNA on one line is one word.
_LONGEST_WORD = 256  # characters
_LONG_WORD = re.compile(
    r"(?:[^\W\d_]{N}|\s{N}|(?:[^\w\s]|_){N})".replace("N", f"{_LONGEST_WORD + 1},")
)


def byte_alphabet() -> list[str]:
    """Return the character for each byte, 0 to 255 (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    code = {byte: byte for byte in printable}
    code.update({byte: 256 + n for n, byte in enumerate(others)})
    return [chr(code[byte]) for byte in range(256)]


def bytes_backend(end_of_text: str = END_OF_TEXT) -> Tokenizer:
    """Return a backend with 256 byte tokens (id = byte) and the end of text."""
    vocabulary = {char: byte for byte, char in enumerate(byte_alphabet())}
    backend = _backend(models.BPE(vocab=vocabulary, merges=[]), WORDS)
    backend.add_special_tokens([_special(end_of_text)])
    return backend


def train_backend(texts: list[str], vocab_size: int, *, progress: bool) -> Tokenizer:
    """Train merges up to `vocab_size` tokens, including the end of text.

    Texts with too few repeated pairs give fewer tokens. Words that are too long are split.
    """
    texts = list(_with_short_words(texts))
    backend = _backend(models.BPE(), WORDS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[_special(END_OF_TEXT)],
        initial_alphabet=byte_alphabet(),
        show_progress=progress and is_watched(),  # its bars would fill a log file
    )
    backend.train_from_iterator(texts, trainer, length=len(texts))
    return backend


def _with_short_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, split within long words."""
    for text in texts:
        start = 0
        for word in _LONG_WORD.finditer(text):
            for end in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
                yield text[start:end]
                start = end
        yield text[start:]


def tiktoken_backend(encoding: Any) -> Tokenizer:
    """The same ids as a `tiktoken.Encoding`.

    tiktoken keeps tokens with their ranks and no merges: the merge that makes a token is found by
    encoding it with the ranks below its own. Ids that it leaves free become unused special tokens.
    """
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _parts(ranks, token, rank)
        if len(parts) == 2:
            merges.append((spelled[parts[0]], spelled[parts[1]]))
    specials = {place: name for name, place in encoding._special_tokens.items()}
    taken = set(ranks.values())
    for place in range(encoding.n_vocab):
        if place not in taken:
            vocabulary[specials.setdefault(place, f"<|unused_{place}|>")] = place
    # A token is taken whole where it is a word, merges or not, as tiktoken does.
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    backend = _backend(model, _for_oniguruma(encoding._pat_str))
    backend.add_special_tokens([_special(specials[place]) for place in sorted(specials)])
    return backend


def _parts(ranks: dict[bytes, int], token: bytes, below: int) -> list[bytes]:
    """`token` after all merges of a rank below `below`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        pairs = [(ranks.get(a + b, below), n) for n, (a, b) in enumerate(pairwise(parts))]
        rank, n = min(pairs)
        if rank >= below:
            break
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return parts


def _for_oniguruma(pattern: str) -> str:
    """The regular expression of tiktoken in the dialect of `tokenizers`.

    There `{1,3}+` repeats again instead of being possessive, and `$` also matches at line ends.
    """
    return pattern.replace("}+", "}").replace("$", r"\z")


def _backend(model: models.Model, words: str) -> Tokenizer:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)
