"""A tokenizer of bytes, a model that is a table, and prompts of plain arguments, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.gauntlet.prompts import native
from llmfoundry.gauntlet.questions import PromptSettings, Question, TaskConfig, TaskRow
from llmfoundry.ops.packed_layout import PackedLayout

POSITIONS = 512


class ByteTokenizer:
    """Token 0 ends a text; token b + 1 is byte b."""

    vocab_size = 257
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


class TableModel:
    """Logits after token v at position p of its document: table[:, v] + table[:, vocab + p]."""

    def __init__(self, table: Tensor) -> None:
        self.head_weight = table

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)


class TableRoot(nn.Module):
    """What `Root` is to a decoder; records the shape of every call."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.model = TableModel(table)
        self.shapes: list[tuple[int, ...]] = []

    def forward(
        self, tokens: Tensor, layout: PackedLayout, finish: Callable[[TableModel, Tensor], Any]
    ) -> Any:
        self.shapes.append(tuple(tokens.shape))
        vocab = self.model.head_weight.shape[0]
        hidden = torch.cat(
            [F.one_hot(tokens, vocab), F.one_hot(layout.positions, POSITIONS)], dim=-1
        )
        return finish(self.model, hidden.float())

    def logprobs(self, tokens: Iterable[int]) -> Tensor:
        """(T, V) float64, of one document on its own: the slow reference."""
        table = self.model.head_weight.double()
        vocab = table.shape[0]
        logits = [table[:, v] + table[:, vocab + p] for p, v in enumerate(tokens)]
        return torch.stack(logits).log_softmax(-1)


def random_root(vocab: int = 257, seed: int = 0) -> TableRoot:
    generator = torch.Generator().manual_seed(seed)
    return TableRoot(torch.randn(vocab, vocab + POSITIONS, generator=generator))


def constant_root(vocab: int = 257) -> TableRoot:
    """Every token is equally likely."""
    return TableRoot(torch.zeros(vocab, vocab + POSITIONS))


def questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    tokenizer: Any,
    *,
    mode: str,
    seq_len: int,
    keep: Sequence[int] | None = None,
    **settings: Any,
) -> list[Question]:
    """`prompts.native.questions` with these settings."""
    chosen = PromptSettings(tokenizer, seq_len, mode, **settings)
    return native.questions(rows, task, shots, chosen, keep=keep)
