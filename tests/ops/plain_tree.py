"""Random forests, and attention in them as its definition says: path by path, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.plain_attention import plain_slope


@dataclass(frozen=True)
class Forest:
    """Tokens of a row in preorder; of each its parent (-1: a root) and where its part ends."""

    parents: list[int]
    ends: list[int]


def random_forest(width: int, rng: random.Random, branchiness: float = 0.2) -> Forest:
    """Each token continues the last one, from one of its ancestors, or starts a tree."""
    parents = [-1]
    for i in range(1, width):
        path = visible(parents, i - 1)
        branches = rng.random() < branchiness
        parents.append(rng.choice([-1, *path]) if branches else i - 1)
    ends = []
    for j in range(width):
        below = [i for i in range(j, width) if j in visible(parents, i)]
        assert below == list(range(j, j + len(below))), "preorder"
        ends.append(below[-1] + 1)
    return Forest(parents, ends)


def visible(parents: list[int], token: int) -> list[int]:
    """The path from the root to a token, which it sees."""
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path[::-1]


def plain_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forests: list[Forest],
    *,
    scale: float,
    alibi: bool = False,
    window: int = -1,
    softcap: float | None = None,
) -> Tensor:
    """Of q (B, T, H, hd) over k, v (B, T, KV, hd), query by query along its path."""
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    out = torch.empty_like(q)
    for row, forest in enumerate(forests):
        for query in range(q.shape[1]):
            path = visible(forest.parents, query)
            if window >= 0:
                path = path[max(0, len(path) - 1 - window) :]
            back = torch.arange(1 - len(path), 1, dtype=q.dtype)
            for head in range(heads):
                logits = k[row, path, head // groups] @ q[row, query, head] * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if alibi:
                    logits = logits + plain_slope(head, heads) * back
                out[row, query, head] = logits.softmax(0) @ v[row, path, head // groups]
    return out
