r"""Safe loading of an untrusted tokenizer.json as a `tokenizers` backend.

Entry points: `read_backend` and `with_bounds`, which `Tokenizer` and `build_tokenizer` call.

- A tokenizer that is known to be linear in its text is loaded directly. Published tokenizers of
  causal language models consist of a few components. These are listed here, with the limits within
  which they are linear, and with the allowed regular expressions: some, such as `(a+)+$`, have
  exponential run time.
- Any other tokenizer is first tried in the bounded child, on texts that are slow for regular
  expressions. It is then loaded here for its vocabulary, but every text is encoded and decoded in
  the child.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from llmfoundry.bounded import OutOfBounds, run_bounded
from llmfoundry.data.text.bpe import WORDS
from llmfoundry.errors import UserError
from llmfoundry.files import parse_json, read_text

SECONDS = 5.0
"""CPU time to load a definition and to try it."""
MOST_AROUND = 64
"""Maximal number of special tokens that a tokenizer adds around a text."""
MOST_TOKENS = 1 << 24
"""Bound of ids: ten times the largest published vocabulary."""

_CLASSES = "aA1 \n\t.é中_-'/<\u0301"  # characters of different classes
_RUN = 2000
_RARE = "a \u2603 \U0002a6a5"  # characters that are in few vocabularies
_LARGEST = 1 << 26  # bytes of a definition; that of Gemma has 33 million
_LONGEST_PIECE = 256  # characters; every piece is searched at every character
_MOST_GROWTH = 64.0  # factor by which normalizers may lengthen a text
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s|"
PATTERNS = {
    "llmfoundry": WORDS,
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt2 of tiktoken": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]++|\s++\z"
    r"|\s+(?!\S)|\s",
    "cl100k of tiktoken": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}",
    "qwen2": rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{_OTHERS}",
    "qwen3.5": rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
    "o200k": _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")
    + rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    "tekken": _CASED % ("", "") + rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    "deepseek-v3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"
    rf"[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}".replace(r"\"", '"'),
    "deepseek's Chinese": "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "digits": r"\p{N}{1,3}",
    "digit": r"\p{N}",
    "three digits": "[0-9][0-9][0-9]",
    "line ends": r"[\r\n]",
    "spaces": " {2,}",
}
"""Regular expressions that look at each character a bounded number of times."""
_KNOWN = frozenset(PATTERNS.values())
_NORMALIZERS = {"NFC": 1.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Lowercase": 3.0, "Strip": 1.0,
                "StripAccents": 1.0, "Nmt": 1.0, "BertNormalizer": 3.0, "ByteLevel": 4.0,
                "Prepend": 2.0}  # fmt: skip
"""The most times that each makes a text longer."""
_SPLITTERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits",
              "CharDelimiterSplit", "UnicodeScripts", "Split"}  # fmt: skip
_REWRITERS = {"ByteLevel", "Metaspace"}
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder", "Strip",
             "Replace"}  # fmt: skip


def read_backend(file: Path) -> AnyBackend:
    """The backend of a tokenizer.json (`open_backend`)."""
    return open_backend(read_text(file, is_json=True, most=_LARGEST), str(file))


def open_backend(definition: str, file: str) -> AnyBackend:
    """A `tokenizers.Tokenizer`, or a `BoundedBackend`, which is used as one; it pads nothing."""
    definition, parts = _without_padding(definition, file)
    if is_linear(parts):
        return _checked(_load(definition, file), file)
    run_bounded(partial(_try, definition, file), [0], file=file, seconds=SECONDS)
    return BoundedBackend(_checked(_load(definition, file), file), file)


def _without_padding(definition: str, file: str) -> tuple[str, dict[str, Any]]:
    """A definition that neither pads nor truncates, and what it says.

    Both are settings of a call that was made before it was saved. They go before the library sees
    them: a length of 1e10 would end the process, not raise an error.
    """
    try:
        parts = parse_json(definition)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}; copy or download it again") from error
    if not isinstance(parts, dict):
        raise UserError(f"{file}: is not a tokenizer; copy or download it again")
    settings = {name for name in ("padding", "truncation") if parts.get(name) is not None}
    if not settings:
        return definition, parts  # as it is written, also its numbers
    parts |= dict.fromkeys(settings)
    return json.dumps(parts), parts


def with_bounds(backend: tokenizers.Tokenizer, file: str) -> AnyBackend:
    """Return a bounded copy of a backend that another library has loaded."""
    return open_backend(backend.to_str(), file)


@dataclass(frozen=True)
class BoundedEncoding:
    """The attributes of `tokenizers.Encoding` that this project uses."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


class BoundedBackend:
    """A backend whose encoding and decoding happen in the bounded child."""

    def __init__(self, backend: tokenizers.Tokenizer, file: str) -> None:
        self._backend, self._file = backend, file
        self._read_settings()

    def __getattr__(self, name: str) -> Any:
        """Return other attributes from the wrapped backend."""
        return getattr(self.__dict__["_backend"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._definition, self._file, self.encode_special_tokens)

    def copy(self) -> BoundedBackend:
        """Return a copy whose settings can be changed independently."""
        return _again(self._definition, self._file, self.encode_special_tokens)

    @property
    def encode_special_tokens(self) -> bool:
        """Return whether the name of a special token in a text is encoded as ordinary text."""
        return self._backend.encode_special_tokens

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._backend.encode_special_tokens = value

    def add_special_tokens(self, tokens: list[Any]) -> int:
        """Add special tokens to the backend and return the number of new ones."""
        added = self._backend.add_special_tokens(tokens)
        self._read_settings()
        return added

    def encode(self, text: str, add_special_tokens: bool = True) -> BoundedEncoding:
        """Return the encoding of a text."""
        encode = partial(_encode, self._name, self.encode_special_tokens, add_special_tokens)
        ids, offsets, special_tokens_mask = self._run(encode, [text])[0]
        return BoundedEncoding(ids, offsets, special_tokens_mask)

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[BoundedEncoding]:
        """Return the encodings of texts with their ids only; offsets and masks are empty."""
        encode = partial(_encode_fast, self._name, self.encode_special_tokens, add_special_tokens)
        return [BoundedEncoding(ids, [], []) for ids in self._run(encode, texts)]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._run(partial(_decode, self._name, skip_special_tokens), [ids])[0]

    def _run(self, function: Any, items: Sequence[Any]) -> list[Any]:
        """Run a function on items in the bounded child; first load the backend there if needed."""
        try:
            results = run_bounded(function, items, file=self._file)
            if None in results:  # the child is new and has not loaded the backend
                keep = partial(_keep, self._name, self._definition)
                run_bounded(keep, [0], file=self._file, seconds=SECONDS)
                results = run_bounded(function, items, file=self._file)
        except OutOfBounds as error:
            raise UserError(f"{error} (with a text that begins {_start(items, error)})") from error
        return results

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
    """Return the backend after checking it.

    Raises:
        UserError: an id or the number of special tokens around a text is too large, or an unknown
            character cannot be encoded.
    """
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_TOKENS:
        raise UserError(
            f"{file}: has the id {largest:,}; ids are below {MOST_TOKENS:,}; correct it"
        )
    around = backend.num_special_tokens_to_add(is_pair=False)
    if around > MOST_AROUND:
        raise UserError(
            f"{file}: its post_processor puts {around:,} special tokens around a text; write at"
            f" most {MOST_AROUND}"
        )
    try:
        backend.encode(_RARE)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{file}: cannot encode a text that its vocabulary does not cover: {error}; add its"
            " unk_token to the vocabulary"
        ) from error
    return backend


def _again(definition: str, file: str, split: bool) -> BoundedBackend:
    backend = BoundedBackend(tokenizers.Tokenizer.from_str(definition), file)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split
    return backend


def _try(definition: str, file: str, _: int) -> None:
    """Load a tokenizer in the child, and encode and decode texts that are likely to be slow."""
    backend = _checked(_load(definition, file), file)
    backend.no_truncation()
    backend.no_padding()

    # long runs of one character make backtracking expressions slow; the characters are those of
    # the common classes and of the tokenizer's own expressions
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


def is_linear(parts: dict[str, Any]) -> bool:
    """Return whether all parts of a tokenizer.json are known to take linear time.

    False only means that a part is not known.
    """
    try:
        return (
            _normalizes(parts.get("normalizer"))
            and _splits(parts.get("pre_tokenizer"))
            and _models(parts["model"])
            and all(map(_is_plain, parts.get("added_tokens") or []))
            and len(json.dumps(parts.get("post_processor"))) < 1 << 14
            and _decodes(parts.get("decoder"))
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return False


def patterns(part: Any) -> Iterator[str]:
    """Yield the regular expressions in a definition or a part of it."""
    if isinstance(part, dict):
        if isinstance(part.get("Regex"), str):
            yield part["Regex"]
        for name, value in part.items():
            if name not in ("vocab", "merges", "added_tokens"):
                yield from patterns(value)
    elif isinstance(part, list):
        for value in part:
            yield from patterns(value)


def _flat(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the components of a part; nested sequences are flattened.

    Args:
        part: a part of tokenizer.json; None: the tokenizer does not have it.
        inner: key of a sequence's components.
    """
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    components = []
    for component in part[inner]:
        components.extend(_flat(component, inner))
    return components


def _growth(replace: dict[str, Any]) -> float:
    """Return the largest factor by which a replacement lengthens a text; 1e9 if not known."""
    pattern, content = replace["pattern"], replace["content"]
    if "String" in pattern:
        n_replaced = len(pattern["String"])
    elif pattern["Regex"] in _KNOWN:
        n_replaced = 1  # a match has at least one character
    else:
        return 1e9
    return max(1.0, len(content) / n_replaced) if n_replaced else 1e9


def _normalizes(part: Any) -> bool:
    growth = 1.0
    for one in _flat(part, "normalizers"):
        if one["type"] == "Replace":
            growth *= _growth(one)
        elif one["type"] == "Prepend":
            growth *= 1.0 + len(one["prepend"]) / 8
        else:
            growth *= _NORMALIZERS.get(one["type"], 1e9)
    return growth <= _MOST_GROWTH


def _splits(part: Any) -> bool:
    parts = _flat(part, "pretokenizers")
    kinds = [one["type"] for one in parts]
    regexes = [one["pattern"] for one in parts if one["type"] == "Split"]
    return (
        len(parts) <= 8
        and {*kinds} <= _SPLITTERS | _REWRITERS
        and sum(kind in _REWRITERS for kind in kinds) <= 2
        and all(p.get("String") or p.get("Regex") in _KNOWN for p in regexes)
    )


def _models(model: dict[str, Any]) -> bool:
    kind = model["type"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if any(len(model.get(name) or "") > 16 for name in affixes) or model.get("dropout"):
        return False
    if kind == "Unigram":
        return max(len(piece) for piece, _ in model["vocab"]) <= _LONGEST_PIECE
    if kind == "WordPiece":
        return model["max_input_chars_per_word"] <= 200
    return kind in ("BPE", "WordLevel")


def _is_plain(token: dict[str, Any]) -> bool:
    """Return whether an added token can be matched without looking at the text before it."""
    return bool(token["content"]) and not token["lstrip"] and not token["single_word"]


def _decodes(part: Any) -> bool:
    growth = 1.0
    for one in _flat(part, "decoders"):
        if one["type"] not in _DECODERS or max(one.get("start", 0), one.get("stop", 0)) > 1:
            return False
        growth *= _growth(one) if one["type"] == "Replace" else 1.0
    return growth <= _MOST_GROWTH
