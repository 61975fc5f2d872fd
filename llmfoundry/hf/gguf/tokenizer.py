"""A tokenizer under llama.cpp's keys; what llama.cpp would split otherwise is refused by name.

`write.py` calls `add_tokenizer`. llama.cpp has no regular expressions in its files: a file names a
pre-tokenizer, and the program has the rest. So ours must be one of those programs, which is settled
by comparing what it splits by, not the tokens it gives of a sample, as llama.cpp's converter does:
a vocabulary of one's own has another sample.
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

# What splits a text, one regular expression after the other: llama.cpp's names for it, first where
# merges alone make tokens, then where a word that is a token is taken whole (`ignore_merges`).
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
_ENDS = 3  # of a text, of a turn, of a message
NO_MERGE = "\ufffe \ufffe"  # of characters that no byte is written with: llama.cpp needs one merge
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_TYPE = 1, 2, 3, 4, 5, 6  # gguf.TokenType


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms.

    Attributes:
        model: `gpt2`, byte-level BPE, or `llama`, SentencePiece's BPE.
        pre: the pre-tokenizer's name.
        tokens: (vocab_size,) texts.
        types: (vocab_size,) of the constants here.
        merges: of `gpt2`, most urgent first.
        scores: of `llama`, highest first; empty: it has merges.
        prefix: of `llama`: a space is put before a text.
        notes: a line for each way in which llama.cpp reads texts otherwise.
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
    """The tokenizer in llama.cpp's terms.

    Args:
        tokenizer: any.
        rows: of the model's embedding: unused tokens are added until there are as many.

    Raises:
        UserError: llama.cpp has nothing like it; names what.
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
    return UserError(f"tokenizer: llama.cpp does not know {what}{OTHERWISE}")


def _pairs(model: dict[str, Any]) -> Iterator[list[str]]:
    for merge in model.get("merges", ()):
        yield merge.split(" ", 1) if isinstance(merge, str) else merge


def _tokens(written: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids that no token has are unused."""
    model = written["model"]
    by_id = {place: (text, NORMAL) for text, place in model["vocab"].items()}
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
    texts = {text for text, _ in by_id.values()}
    for place in range(rows):
        if place not in by_id:
            text = f"[PAD{place}]"
            while text in texts:
                text = f"[{text}]"
            by_id[place] = (text, UNUSED)
    pairs = [by_id[place] for place in range(rows)]
    types = [UNKNOWN if text == unk and kind != USER_DEFINED else kind for text, kind in pairs]
    return [text for text, _ in pairs], types


def _byte_type(text: str, kind: int) -> int:
    return BYTE_TYPE if kind == NORMAL and BYTE.fullmatch(text) else kind


def _pre_tokenizer(written: dict[str, Any], notes: list[str]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits texts."""
    _check_normalizer(written.get("normalizer"), notes)
    steps = tuple(_spelled(step, notes) for step in _steps(written.get("pre_tokenizer")))
    if steps not in NAMES:
        raise _unknown(f"a pre-tokenizer that splits by {' and then '.join(steps) or 'nothing'}")
    merged, whole = NAMES[steps]
    takes_whole = bool(written["model"].get("ignore_merges"))
    if takes_whole and whole:
        return whole
    if takes_whole and (text := _unreached(written["model"])) is not None:
        raise _unknown(
            f"ignore_merges with {merged}'s words, without which the token {text!r} is never made"
        )
    return merged


def _check_normalizer(normalizer: dict[str, Any] | None, notes: list[str]) -> None:
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
    """The regular expressions of a pre-tokenizer that ends in bytes."""
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
    """The regular expression in the one spelling of several with the same matches."""
    for one, others in _SPELLINGS.items():
        for other in others:
            regex = regex.replace(other, one, 1)
    regex = re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", regex)  # none of which has to give back
    regex = regex.replace(r"|\s*[\r\n]|", r"|\s*[\r\n]+|")  # either ends at the last line end
    if regex.endswith(r"|\s"):
        regex += "+"
    if r"|\s+\z|" in regex:  # newer tiktoken's: all spaces that end a text are one word
        regex = regex.replace(r"|\s+\z|", "|")
        if r"[\r\n]+" in regex:
            notes.append(
                "tokenizer: llama.cpp splits spaces behind the last line end of a text from it; the"
                " tokenizer does not"
            )
    return regex


def _unreached(model: dict[str, Any]) -> str | None:
    """A token that no merges make."""
    pairs = [(left, right) for left, right in _pairs(model)]
    merged = models.BPE(vocab=model["vocab"], merges=pairs)
    made = (text for text in model["vocab"] if len(merged.tokenize(text)) != 1)
    return next(made, None)


def _space_prefix(written: dict[str, Any]) -> bool:
    """Whether a space is put before a text, of a tokenizer that writes spaces as SentencePiece."""
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
    """Of each token, higher where it is made earlier: minus the number of the first merge.

    Raises:
        UserError: tokens are not merged in one order, as SentencePiece's are.
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
        tokenizer: its source.
        vocabulary: of it.
        starts: each text begins with `document_start`.
        stops: what a generation stops at: the end of text, then that of a turn.
    """
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.prefix)
    else:
        writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(tokenizer.document_start[-1])
    writer.add_eos_token_id(stops[0])
    for add, stop in zip(
        (writer.add_eot_token_id, writer.add_eom_token_id), stops[1:], strict=False
    ):
        add(stop)
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
    left = [repr(tokenizer.decode([stop])) for stop in stops[_ENDS:]]
    return [f"tokenizer: a file names {_ENDS} ends of a text; left out: {', '.join(left)}"] * bool(
        left
    )


def _add_chat(writer: Any, written: Any) -> None:
    """The template, and a second one for conversations with tools."""
    default, tools = chosen_templates(written)
    named = {"default": default, "tool_use": tools}
    found = [{"name": name, "template": text} for name, text in named.items() if text]
    for text in filter(None, (default, tools)):
        if text.encode(errors="replace").decode() != text:
            raise UserError("tokenizer.chat_template: has characters that are no Unicode; mend it")
    writer.add_chat_template(found if tools else default)
