"""The `tokenizer` section: which text pieces the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmfoundry.recipe.values.bounds import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    PATH,
    Range,
    choice,
    out_of_bounds,
)
from llmfoundry.recipe.values.checks import inert, inert_change, set_defaults

TOKENIZERS = ("train", "bytes", "huggingface", "tiktoken")
PRETRAINED = "pretrained"


@dataclass
class TokenizerConfig:
    """One of a few kinds; every kind is saved in Hugging Face's format inside the run."""

    name: Annotated[str, choice((*TOKENIZERS, PRETRAINED))] = "train"
    """train (byte-level BPE on the recipe's own corpus), bytes, huggingface, tiktoken; in
    fine-tuning also pretrained: that of model.pretrained."""
    vocab_size: Annotated[int | None, Range(257, 2**22, "as many merges are learned and kept")] = (
        None
    )
    """Only for train: size to reach, with the end-of-text token; default 8192."""
    train_bytes: Annotated[int | None, Range(1)] = None
    """Only for train: text to learn merges from, at most; default 20 MB (more changes little)."""
    path: Annotated[str | None, PATH] = None
    """Only for huggingface: a folder with tokenizer.json, or a hub id."""
    encoding: str | None = None
    """Only for tiktoken: an encoding (cl100k_base) or a model's name (gpt-4); default gpt-4."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """How messages become a text: zephyr, which fits any tokenizer; chatml, llama3, mpt; a model's
    own text with marks around what is learned, qwen2.5, qwen3, phi3, phi3.5, gemma, gemma3,
    mistral, deepseek-v3, deepseek-r1, glm4, gpt-oss; or a Jinja file. Unset: the tokenizer's."""
    trust_chat_template: bool = False
    """Only with chat_template: a file: run it without bounds on time and memory, in the training
    processes themselves. For your own templates; those of others run in a child process with
    bounds."""
    split_special_tokens: bool = True
    """Read a special token in a text, such as <|endoftext|>, as its plain characters. Off: as that
    token, as transformers and LLM Foundry do; any text can then contain one."""

    _USED: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": ("vocab_size", "train_bytes"),
        "bytes": (),
        "huggingface": ("path",),
        "tiktoken": ("encoding",),
        PRETRAINED: (),
    }

    def check(self, key: str = "tokenizer.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.name not in self._USED:
            return
        fields = ("vocab_size", "train_bytes", "path", "encoding")
        unused = [f for f in fields if f not in self._USED[self.name]]
        yield from inert(key, self, unused, f"with name: {self.name}")
        if self.chat_template in (None, *CHAT_TEMPLATES):
            yield from inert_change(
                key, self, ["trust_chat_template"], "without a file as chat_template"
            )
        if self.name == "huggingface" and self.path is None:
            yield f"{key}path: huggingface needs it; write a folder with tokenizer.json or a hub id"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "train":
            set_defaults(self, vocab_size=8192, train_bytes=20_000_000)
        if self.name == "tiktoken":
            set_defaults(self, encoding="gpt-4")
