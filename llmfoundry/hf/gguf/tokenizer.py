"""Tokenizer settings in GGUF; a tokenizer that llama.cpp would compute differently is an error.

`write.py` calls `read_vocabulary` and `add_tokenizer`. A GGUF file contains no regular expressions:
it names a pre-tokenizer, whose code is in llama.cpp. The regular expressions of a tokenizer must
therefore equal those of one of llama.cpp's pre-tokenizers. llama.cpp's converter compares the
tokens of a sample text instead, which does not work for a newly trained vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from llmfoundry.data.text.chat_template import chosen_templates
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLINGS = {
    SUFFIXES: (
        r"(?i:'(?:s|t|re|ve|m|ll|d))",
        r"'(?i:[sdmt]|ll|ve|re)",
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    ),
    r"'s|'t|'re|'ve|'m|'ll|'d": (r"'(?:[sdmt]|ll|ve|re)",),
}
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2 = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
DIGIT = r"\p{N}"

# llama.cpp's pre-tokenizers by the regular expressions that split a text, one after the other: the
# name without `ignore_merges`, and the name with it (a word that is a token is never split)
NAMES: dict[tuple[str, ...], tuple[str, str]] = {
    (GPT2,): ("gpt-2", ""),
    (DIGIT, GPT2): ("starcoder", ""),
    (LLAMA3,): ("dbrx", "llama-bpe"),
    (QWEN2,): ("qwen2", ""),
}
KNOWN = (
    "gpt-2 (ByteLevel), starcoder (Digits, ByteLevel), llama-bpe and dbrx (Split by GPT-4's words,"
    " which tokenizer.name: train and bytes have), qwen2, and SentencePiece's BPE"
)
OTHERWISE = "; write to=hf, or train with a tokenizer that llama.cpp knows: " + KNOWN
SPACE, BYTE = "\u2581", re.compile(r"<0x[0-9A-F]{2}>")
_ENDS = 3  # keys for the end of a text, of a turn, of a message
NO_MERGE = "\ufffe \ufffe"  # a merge that never applies: llama.cpp needs at least one merge
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_TYPE = 1, 2, 3, 4, 5, 6  # gguf.TokenType


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms.

    Attributes:
        model: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
        pre: name of the pre-tokenizer.
        tokens: (vocab_size,) texts.
        types: (vocab_size,) token types, see the constants above.
        merges: merges of `gpt2` in order of priority.
        scores: scores of `llama`, the highest first; empty for `gpt2`.
        prefix: for `llama`: a space is inserted before a text.
        notes: a line for each difference in llama.cpp's tokenization.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    prefix: bool
    notes: list[str]


def read_vocabulary(tokenizer: Tokenizer, rows: int) -> Vocabulary:
    """Convert a tokenizer to llama.cpp's terms.

    Args:
        tokenizer: the tokenizer.
        rows: rows of the embedding; unused tokens fill the vocabulary up to this number.

    Raises:
        UserError: llama.cpp does not support a part of the tokenizer; the error names it.
    """
    written = json.loads(tokenizer.files()["tokenizer.json"])
    model = written["model"]
    if model["type"] != "BPE":
        raise _unknown(f"a {model['type']} model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _unknown(f"a BPE model with {key}")
    notes: list[str] = []
    tokens, types = _tokens(written, rows)
    if model.get("byte_fallback"):
        prefix = _space_prefix(written)
        types = [_byte_type(text, kind) for text, kind in zip(tokens, types, strict=True)]
        scores = _scores(model, len(tokens))
        return Vocabulary("llama", "default", tokens, types, [], scores, prefix, notes)
    pre = _pre_tokenizer(written, notes)
    merges = [" ".join(pair) for pair in _pairs(model)] or [NO_MERGE]
    return Vocabulary("gpt2", pre, tokens, types, merges, [], False, notes)


def _unknown(what: str) -> UserError:
    """Return the error for an unsupported part of a tokenizer."""
    return UserError(f"tokenizer: llama.cpp does not know {what}{OTHERWISE}")


def _pairs(model: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the two tokens of each merge, in order of priority."""
    for merge in model.get("merges", ()):
        yield merge.split(" ", 1) if isinstance(merge, str) else merge


def _tokens(written: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return texts and types by id; ids without a token are unused."""
    model = written["model"]
    # tokens of the vocabulary, then added tokens
    by_id = {token_id: (text, NORMAL) for text, token_id in model["vocab"].items()}
    unk = model.get("unk_token") if model.get("byte_fallback") else None
    for added in written.get("added_tokens", ()):
        kind = CONTROL if added["special"] else USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise _unknown(f"an added token that strips spaces or is a word ({added['content']})")
    if by_id and max(by_id) >= rows:
        raise UserError(
            f"tokenizer: has ids up to {max(by_id):,}, but the embedding has {rows:,} rows"
        )

    # unused ids, with texts that no token has
    texts = {text for text, _ in by_id.values()}
    for token_id in range(rows):
        if token_id not in by_id:
            text = f"[PAD{token_id}]"
            while text in texts:
                text = f"[{text}]"
            by_id[token_id] = (text, UNUSED)
    pairs = [by_id[token_id] for token_id in range(rows)]
    types = [UNKNOWN if text == unk and kind != USER_DEFINED else kind for text, kind in pairs]
    return [text for text, _ in pairs], types


def _byte_type(text: str, kind: int) -> int:
    return BYTE_TYPE if kind == NORMAL and BYTE.fullmatch(text) else kind


def _pre_tokenizer(written: dict[str, Any], notes: list[str]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level tokenizer."""
    _check_normalizer(written.get("normalizer"), notes)
    steps = tuple(_spelled(step, notes) for step in _steps(written.get("pre_tokenizer")))
    if steps not in NAMES:
        raise _unknown(f"a pre-tokenizer that splits by {' and then '.join(steps) or 'nothing'}")
    name, name_ignoring_merges = NAMES[steps]
    if not written["model"].get("ignore_merges"):
        return name
    if name_ignoring_merges:
        return name_ignoring_merges
    # `ignore_merges` has no effect if merges produce every token
    text = _unreached(written["model"])
    if text is not None:
        raise _unknown(
            f"ignore_merges with {name}'s words, without which the token {text!r} is never made"
        )
    return name


def _check_normalizer(normalizer: dict[str, Any] | None, notes: list[str]) -> None:
    """Raise a UserError for a normalizer other than NFC, which only causes a note."""
    if normalizer is None:
        return
    parts = normalizer.get("normalizers", [normalizer])
    for part in parts:
        if part["type"] != "NFC":
            raise _unknown(f"the normalizer {part['type']}")
        notes.append(
            "tokenizer: llama.cpp does not normalize texts (NFC); letters with separate accents"
            " become other tokens there"
        )


def _steps(pre: dict[str, Any] | None) -> Iterator[str]:
    """Yield the regular expressions of a pre-tokenizer that ends with ByteLevel."""
    parts = [] if pre is None else pre.get("pretokenizers", [pre])
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise _unknown("a BPE model without ByteLevel as its last pre-tokenizer")
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            if part["add_prefix_space"]:
                raise _unknown("ByteLevel with add_prefix_space")
            if part.get("use_regex", True):
                yield GPT2
        elif kind == "Digits" and part["individual_digits"]:
            yield DIGIT
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            pattern = part["pattern"]
            yield pattern.get("Regex") or re.escape(pattern["String"])
        else:
            raise _unknown(f"the pre-tokenizer {json.dumps(part)}")


def _spelled(regex: str, notes: list[str]) -> str:
    """Return a regular expression in the canonical spelling, with the same matches."""
    for canonical, others in _SPELLINGS.items():
        for other in others:
            regex = regex.replace(other, canonical, 1)
    # possessive quantifiers: none of these expressions backtracks
    regex = re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", regex)
    # both end at the last line feed, because \s* is greedy
    regex = regex.replace(r"|\s*[\r\n]|", r"|\s*[\r\n]+|")
    if regex.endswith(r"|\s"):
        regex += "+"
    # newer versions of tiktoken: all spaces at the end of a text are one word
    if r"|\s+\z|" in regex:
        regex = regex.replace(r"|\s+\z|", "|")
        if r"[\r\n]+" in regex:
            notes.append(
                "tokenizer: llama.cpp splits spaces behind the last line end of a text from it; the"
                " tokenizer does not"
            )
    return regex


def _unreached(model: dict[str, Any]) -> str | None:
    """Return a token that merges never produce; None if there is none."""
    pairs = [(left, right) for left, right in _pairs(model)]
    merged = models.BPE(vocab=model["vocab"], merges=pairs)
    for text in model["vocab"]:
        if len(merged.tokenize(text)) != 1:
            return str(text)
    return None


def _space_prefix(written: dict[str, Any]) -> bool:
    """Return whether a SentencePiece-like tokenizer inserts a space before a text."""
    normalizer, pre = written.get("normalizer"), written.get("pre_tokenizer")
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if pre is not None and not parts:
        if pre["type"] != "Metaspace" or pre["replacement"] != SPACE or pre.get("split", True):
            raise _unknown(f"the pre-tokenizer {json.dumps(pre)} of a SentencePiece model")
        return pre.get("prepend_scheme", "always") != "never"
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = {"type": "Prepend", "prepend": SPACE}
    if pre is None and parts in ([spaces], [before, spaces]):
        return before in parts
    raise _unknown(f"the normalizer {json.dumps(normalizer)} of a SentencePiece model")


def _scores(model: dict[str, Any], rows: int) -> list[float]:
    """Return the score of each token: minus the rank of its first merge.

    Raises:
        UserError: merges of a token are not consecutive, as SentencePiece's are.
    """
    vocabulary, scores = model["vocab"], [0.0] * rows
    ranks: dict[int, int] = {}
    last = -1
    for left, right in _pairs(model):
        token = vocabulary.get(left + right)
        if token is None:
            raise _unknown(f"a merge of {left!r} and {right!r} that gives no token")
        if token not in ranks:
            ranks[token] = len(ranks)
        elif ranks[token] != last:
            raise _unknown(
                f"a SentencePiece model whose merges of {left + right!r} are not one after another"
            )
        last = ranks[token]
    for token, rank in ranks.items():
        scores[token] = -float(rank)
    return scores


def add_tokenizer(
    writer: Any, tokenizer: Tokenizer, vocabulary: Vocabulary, *, starts: bool, stops: Sequence[int]
) -> None:
    """Write the tokenizer and its chat template under llama.cpp's keys.

    Args:
        writer: a `gguf.GGUFWriter`.
        tokenizer: the tokenizer.
        vocabulary: the tokenizer in llama.cpp's terms.
        starts: each text begins with `document_start`.
        stops: ids that end a generation: end of text, then end of turn.
    """
    # vocabulary
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.prefix)
    else:
        writer.add_token_merges(vocabulary.merges)

    # special tokens
    writer.add_bos_token_id(tokenizer.document_start[-1])
    writer.add_eos_token_id(stops[0])
    if len(stops) > 1:
        writer.add_eot_token_id(stops[1])
    if len(stops) > 2:
        writer.add_eom_token_id(stops[2])
    if tokenizer.pad_id is not None:
        writer.add_pad_token_id(tokenizer.pad_id)
    if UNKNOWN in vocabulary.types:
        writer.add_unk_token_id(vocabulary.types.index(UNKNOWN))
    writer.add_add_bos_token(starts)
    writer.add_add_eos_token(False)
    if tokenizer.has_chat:
        _add_chat(writer, json.loads(tokenizer.files()["tokenizer_config.json"])["chat_template"])


def unnamed_ends(tokenizer: Tokenizer, stops: Sequence[int]) -> list[str]:
    """Return a line for the ends of a text beyond the three that a file has keys for."""
    omitted = [repr(tokenizer.decode([stop])) for stop in stops[_ENDS:]]
    if not omitted:
        return []
    return [f"tokenizer: a file names {_ENDS} ends of a text; left out: {', '.join(omitted)}"]


def _add_chat(writer: Any, written: Any) -> None:
    """Write the chat template, and a second one for conversations with tools."""
    default, tools = chosen_templates(written)
    by_name = {"default": default, "tool_use": tools}
    templates = [{"name": name, "template": text} for name, text in by_name.items() if text]
    for text in filter(None, (default, tools)):
        if text.encode(errors="replace").decode() != text:
            raise UserError("tokenizer.chat_template: has characters that are no Unicode; mend it")
    writer.add_chat_template(templates if tools else default)
