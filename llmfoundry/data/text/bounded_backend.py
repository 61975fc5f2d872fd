"""`open_backend`: a tokenizer.json of others as a backend of the `tokenizers` library, with bounds.

`Tokenizer` calls it. One that is known to be linear is loaded as it is. Any other is first tried in
the bounded child, on texts that regular expressions take long for; then it is loaded here too, for
its vocabulary, while every text is encoded and decoded there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import tokenizers

from llmfoundry.bounded import OutOfBounds, run_bounded
from llmfoundry.data.text.linear import is_linear, patterns
from llmfoundry.errors import UserError

SECONDS = 5.0
"""CPU time to load a definition and to try it."""
MOST_AROUND = 64
"""Special tokens that a tokenizer puts around a text, at most."""
MOST_TOKENS = 1 << 24
"""Ids are below it: ten times the largest vocabulary that was published."""

_CLASSES = "aA1 \n\t.é中_-'/<\u0301"  # characters of different kinds
_RUN = 2000


def open_backend(definition: str, file: str) -> AnyBackend:
    """A `tokenizers.Tokenizer`, or a `BoundedBackend`, which is used as one.

    Args:
        definition: the content of a tokenizer.json.
        file: its name, for messages.

    Raises:
        UserError: it is no tokenizer, or takes more than a tokenizer may.
    """
    if is_linear(definition):
        return _checked(_load(definition, file), file)
    run_bounded(partial(_try, definition, file), [0], file=file, seconds=SECONDS)
    return BoundedBackend(_checked(_load(definition, file), file), file)


def with_bounds(backend: tokenizers.Tokenizer, file: str) -> AnyBackend:
    """The same of a backend that another library has loaded."""
    return open_backend(backend.to_str(), file)


@dataclass(frozen=True)
class BoundedEncoding:
    """What `tokenizers.Encoding` has of a text, as far as it is used."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


class BoundedBackend:
    """A backend whose encoding and decoding happen in the bounded child."""

    def __init__(self, backend: tokenizers.Tokenizer, file: str) -> None:
        self._backend, self._file = backend, file
        self._read_settings()

    def __getattr__(self, name: str) -> Any:
        """All but encoding and decoding is the backend's own."""
        return getattr(self.__dict__["_backend"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._definition, self._file, self.encode_special_tokens)

    def copy(self) -> BoundedBackend:
        """Another, whose settings can be changed."""
        return _again(self._definition, self._file, self.encode_special_tokens)

    @property
    def encode_special_tokens(self) -> bool:
        """Whether special tokens in a text are the characters they hold."""
        return self._backend.encode_special_tokens

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._backend.encode_special_tokens = value

    def add_special_tokens(self, tokens: list[Any]) -> int:
        """As the backend does."""
        added = self._backend.add_special_tokens(tokens)
        self._read_settings()
        return added

    def encode(self, text: str, add_special_tokens: bool = True) -> BoundedEncoding:
        """The encoding of a text."""
        given = (self.encode_special_tokens, add_special_tokens)
        return BoundedEncoding(*self._run(partial(_encode, self._name, *given), [text])[0])

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[BoundedEncoding]:
        """Encodings of texts; ids alone."""
        given = (self.encode_special_tokens, add_special_tokens)
        found = self._run(partial(_encode_fast, self._name, *given), texts)
        return [BoundedEncoding(ids, [], []) for ids in found]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self._run(partial(_decode, self._name, skip_special_tokens), [ids])[0]

    def _run(self, function: Any, items: Sequence[Any]) -> list[Any]:
        try:
            found = run_bounded(function, items, file=self._file)
            if None in found:  # another child than before, which has not loaded it
                keep = partial(_keep, self._name, self._definition)
                run_bounded(keep, [0], file=self._file, seconds=SECONDS)
                found = run_bounded(function, items, file=self._file)
        except OutOfBounds as error:
            raise UserError(f"{error} (with a text that begins {_start(items, error)})") from error
        return found

    def _read_settings(self) -> None:
        self._definition: str = self._backend.to_str()
        self._name = hashlib.blake2b(self._definition.encode(), digest_size=16).hexdigest()


AnyBackend = tokenizers.Tokenizer | BoundedBackend


def _start(items: Sequence[Any], error: OutOfBounds) -> str:
    return repr(items[error.index][:40])


def _load(definition: str, file: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file}: is not a tokenizer: {error}") from error


def _checked(backend: tokenizers.Tokenizer, file: str) -> tokenizers.Tokenizer:
    """Raises a UserError where ids, or the tokens around a text, are out of all proportion."""
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_TOKENS:
        raise UserError(
            f"{file}: has the id {largest:,}; ids are below {MOST_TOKENS:,}; correct it"
        )
    around = sum(backend.encode("a").special_tokens_mask)
    if around > MOST_AROUND:
        raise UserError(
            f"{file}: its post_processor puts {around:,} special tokens around a text; write at"
            f" most {MOST_AROUND}"
        )
    return backend


def _again(definition: str, file: str, split: bool) -> BoundedBackend:
    backend = BoundedBackend(tokenizers.Tokenizer.from_str(definition), file)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split
    return backend


def _try(definition: str, file: str, _: int) -> None:
    """In the child: load it, encode texts that take long where any does, and decode some."""
    backend = _checked(_load(definition, file), file)
    backend.no_truncation()
    backend.no_padding()
    characters = dict.fromkeys(_CLASSES + "".join(patterns(json.loads(definition)))[:200])
    runs = [character * _RUN for character in characters]
    for text in ("Hello, world", *runs, *(f"{run}!" for run in runs), "ab" * _RUN):
        ids = backend.encode(text, add_special_tokens=False).ids
        backend.decode(ids[:100])


# In the child: backends by a hash of their definition.
@lru_cache(4)
def _kept(name: str) -> list[tokenizers.Tokenizer]:
    return []


def _keep(name: str, definition: str, _: int) -> None:
    backend = tokenizers.Tokenizer.from_str(definition)
    backend.no_truncation()
    backend.no_padding()
    _kept(name).append(backend)


def _encode(name: str, split: bool, add_special_tokens: bool, text: str) -> tuple[Any, ...] | None:
    if not _kept(name):
        return None
    backend = _kept(name)[0]
    backend.encode_special_tokens = split
    found = backend.encode(text, add_special_tokens=add_special_tokens)
    return found.ids, found.offsets, found.special_tokens_mask


def _encode_fast(name: str, split: bool, add_special_tokens: bool, text: str) -> list[int] | None:
    if not _kept(name):
        return None
    backend = _kept(name)[0]
    backend.encode_special_tokens = split
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def _decode(name: str, skip_special_tokens: bool, ids: list[int]) -> str | None:
    if not _kept(name):
        return None
    return _kept(name)[0].decode(ids, skip_special_tokens=skip_special_tokens)
