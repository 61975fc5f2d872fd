"""Tokenizers of others that take too long, too much, or are none."""

from __future__ import annotations

import copy
import json
from typing import Any

from llmfoundry.data.text.bpe import bytes_backend

_PLAIN = json.loads(bytes_backend().to_str())


def plain() -> dict[str, Any]:
    """A tokenizer of bytes, to be changed."""
    return copy.deepcopy(_PLAIN)


def _with(**parts: Any) -> dict[str, Any]:
    return plain() | parts


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def _around(count: int) -> dict[str, Any]:
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = [*[token] * count, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
    return {"type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": special}  # fmt: skip


def _with_id(number: int) -> dict[str, Any]:
    definition = plain()
    definition["model"]["vocab"]["far"] = number
    return definition


_DOUBLES = [_replace({"String": "a"}, "aa")] * 40
_GROWS = [_replace({"Regex": "."}, "aaaaaaaaaa")] * 12

HOSTILE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "nested quantifiers": _with(pre_tokenizer=_split("(a+)+$")),
    "nested stars": _with(pre_tokenizer=_split(r"(\w*)*[^\w\s]{9}")),
    "alternatives": _with(pre_tokenizer=_split("(x|xx|xxx)+y")),
    "backreference": _with(pre_tokenizer=_split(r"(.*)(.*)(.*)(.*)\1\2\3\4[^!]$")),
    "doubling": _with(normalizer=_sequence("normalizers", _DOUBLES)),
    "growing": _with(normalizer=_sequence("normalizers", _GROWS)),
    "bytes of bytes": _with(
        normalizer=_sequence("normalizers", [{"type": "ByteLevel"}] * 40)
    ),
    "hostile normalizer": _with(normalizer=_replace({"Regex": "(a|aa)+$!"}, "b")),
    "hostile decoder": _with(
        decoder=_sequence("decoders", [_PLAIN["decoder"], *_DOUBLES])
    ),
    "many tokens around": _with(post_processor=_around(100_000)),
    "far id": _with_id(4_000_000_000),
    "huge repetition": _with(pre_tokenizer=_split("((((a{1,9999}){1,9999}){1,9999}){1,9999})b")),
    "nested deep": _with(pre_tokenizer=_split("(" * 20000 + "a" + ")" * 20000)),
    "no model": _with(model=None),
}  # fmt: skip
"""By what is wrong with them."""
