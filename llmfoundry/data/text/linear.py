r"""`is_linear`: whether a tokenizer.json is known to encode and decode in time linear in its text.

`open_backend` asks; what is not known runs in a child process. The one idea: every published
tokenizer of causal language models is built of a few parts, which are listed here with the bounds
within which they are linear. A regular expression is one of a list, as `(a+)+$` never ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llmfoundry.data.text.bpe import WORDS

_LARGEST = 1 << 26  # characters of a definition that is looked at here; Gemma's has 33 million
_LONGEST_PIECE = 256  # characters; each is looked for at each character
_MOST_GROWTH = 64.0  # of a text by its normalizers

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


def is_linear(definition: str) -> bool:
    """Whether all parts of a tokenizer.json are known to be; False is no blame."""
    if len(definition) > _LARGEST:
        return False
    try:
        parts = json.loads(definition)
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
    """The regular expressions in a part of a definition, or in all of it."""
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
    """A part without the sequences around it."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [one for other in part[inner] for one in _flat(other, inner)]
    return [part]


def _growth(replace: dict[str, Any]) -> float:
    """Of a text by a replacement; infinite if it is not known."""
    pattern, content = replace["pattern"], replace["content"]
    if "String" in pattern:
        return max(1.0, len(content) / len(pattern["String"])) if pattern["String"] else 1e9
    return max(1.0, len(content)) if pattern["Regex"] in _KNOWN else 1e9


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
    """Whether a token is found without looking back over the text before it."""
    return bool(token["content"]) and not token["lstrip"] and not token["single_word"]


def _decodes(part: Any) -> bool:
    growth = 1.0
    for one in _flat(part, "decoders"):
        if one["type"] not in _DECODERS or max(one.get("start", 0), one.get("stop", 0)) > 1:
            return False
        growth *= _growth(one) if one["type"] == "Replace" else 1.0
    return growth <= _MOST_GROWTH
