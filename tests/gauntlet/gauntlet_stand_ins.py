"""A tokenizer of bytes and a model that is a table, for the gauntlet's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from llmfoundry.ops.layout import Layout

POSITIONS = 512


class ByteTokenizer:
    """Token 0 ends a text; token b + 1 is byte b."""

    vocab_size = 257
    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


class MergingTokenizer(ByteTokenizer):
    """Bytes, but some texts are one token: the longest match wins, from left to right."""

    def __init__(self, *merges: str) -> None:
        self.merges = sorted(merges, key=len, reverse=True)
        self.vocab_size = 257 + len(merges)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            merge = next((m for m in self.merges if text.startswith(m)), None)
            if merge is not None:
                ids.append(257 + self.merges.index(merge))
                text = text[len(merge) :]
            else:
                ids.extend(super().encode(text[0]))
                text = text[1:]
        return ids


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
        self, tokens: Tensor, layout: Layout, finish: Callable[[TableModel, Tensor], Any]
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


def write_gauntlet(
    folder: Path,
    rows: dict[str, list[dict[str, Any]]],
    *,
    shots: int = 0,
    categories: list[dict[str, Any]] | None = None,
    task_keys: dict[str, Any] | None = None,
) -> Path:
    """A gauntlet file with a task for each list of rows; its path."""
    tasks = []
    for label, entries in rows.items():
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in entries))
        kind = "multiple_choice" if "choices" in entries[0] else "language_modeling"
        task = {"label": label, "dataset_uri": f"{label}.jsonl", "icl_task_type": kind}
        tasks.append({**task, "num_fewshot": [shots], **(task_keys or {})})
    content: dict[str, Any] = {"icl_tasks": tasks}
    if categories is not None:
        content["eval_gauntlet"] = {"categories": categories}
    path = folder / "gauntlet.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
