"""Small real tokenizers for the tests of prompts, of the kinds that split text differently."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from llmfoundry.data.text.bpe import END_OF_TEXT, byte_alphabet, bytes_backend, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer

TEXT = [
    "Question: What is 12 + 34?\nAnswer: 46\nQuestion: Who wrote this book?\nAnswer: the author.",
    "The man turned on the faucet, because it was dirty. (He didn't know!)\n\nA: water / flowed",
    "The city councilmen refused the demonstrators a permit because they feared violence.\n",
    "x = [1, 22, 333, 4444]\nAnswer:\n the answer is 7\nWhy? The answer is 12.",
] * 3

# Of o200k (GPT-4o): a line end and a slash at the next line's start may be one word.
O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b; 256 ends a text."""
    return Tokenizer(bytes_backend(), END_OF_TEXT)


def merging_tokenizer(*texts: str, words: str = r"[\s\S]+") -> Tokenizer:
    """Bytes, but each of these texts, and its beginnings, is one token inside a word."""
    alphabet = byte_alphabet()
    vocabulary = {char: byte for byte, char in enumerate(alphabet)}
    merges = []
    for text in texts:
        first, *others = (alphabet[byte] for byte in text.encode())
        for char in others:
            merges.append((first, char))
            first += char
            vocabulary.setdefault(first, len(vocabulary))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = _byte_words(words)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, END_OF_TEXT)


@cache
def trained_tokenizer(kind: str) -> Tokenizer:
    """500 tokens learned from TEXT; kinds: ours, gpt2, o200k, metaspace (like Llama 2)."""
    if kind == "ours":
        return Tokenizer(train_backend(TEXT, 500, progress=False), END_OF_TEXT)
    backend = Backend(models.BPE(unk_token="<unk>" if kind == "metaspace" else None))
    if kind == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "o200k":
        backend.pre_tokenizer = _byte_words(O200K_WORDS)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.ByteLevel()
    special = [END_OF_TEXT, "<unk>"] if kind == "metaspace" else [END_OF_TEXT]
    alphabet = [] if kind == "metaspace" else byte_alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return Tokenizer(backend, END_OF_TEXT)


def marking_tokenizer(kind: str, before: str = "", after: str = "", eos: str = "</s>") -> Tokenizer:
    """One of the trained ones that puts <s>, </s> or <sep> around every text."""
    backend = Backend.from_str(trained_tokenizer(kind)._backend.to_str())
    backend.add_special_tokens(["<s>", "</s>", "<sep>"])
    ids = [(name, backend.token_to_id(name)) for name in {before, after} - {""}]
    parts = [part for part in (before, "$A", after) if part]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    return Tokenizer(backend, eos, {"bos_token": "<s>"} if before == "<s>" else None)


def _byte_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


KINDS = ("ours", "gpt2", "o200k", "metaspace")


class CountingTokenizer(Tokenizer):
    """Another tokenizer that adds up the characters it is given."""

    def __init__(self, other: Tokenizer) -> None:
        super().__init__(other._backend, other.eos)
        self.characters = 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return super().encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_batch(texts)
