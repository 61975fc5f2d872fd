"""Context parallelism: ranks share the tokens of each sequence, and attention sees all of them.

Entry point: `apply_context_parallel`, called by `apply.py`. It sets `Decoder.exchange` to one of
the two classes below. The training step calls `shard` for this rank's tokens of each microbatch;
attention calls the `exchange_*` methods. All other operations are per token and need no
communication. In evaluation the ranks process different full sequences, without communication.

Elements that each rank communicates in the forward pass of one layer, for B sequences of T tokens,
C ranks, H query heads, KV key-value heads and head dimension d:

- ulysses (Jacobs et al., 2023): (C - 1) / C * B * T / C * d * (2 H + 2 L), where L is the least
  common multiple of KV and C (key-value heads are repeated to L). A layer that reuses the keys and
  values of another communicates (C - 1) / C * B * T / C * d * 2 H.
- all_gather: (C - 1) / C * B * T * d * 2 KV, or 0 in a layer that reuses keys and values.

The backward pass communicates the same amount. Full activation checkpointing repeats the
communication of the forward pass; selective checkpointing repeats that of all_gather only. Ulysses
communicates C times less. all_gather suits few key-value heads and any number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfoundry.distributed.mesh import Meshes
from llmfoundry.models.attention import KeysValues
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.attention.base import working_dtype
from llmfoundry.ops.packed_layout import Batch, Ranges
from llmfoundry.ops.torch_private import all_gather, all_to_all, reduce_scatter
from llmfoundry.recipe.parallel import ParallelConfig, context_method


def apply_context_parallel(root: Root, meshes: Meshes | None, config: ParallelConfig) -> None:
    """Set the model's exchange, so that the ranks of the context axis share each sequence."""
    if meshes is None or meshes.context is None:
        return
    assert isinstance(root.model, Decoder), "checked before"
    method = context_method(root.model.config, config, meshes.degrees)
    group, index = meshes.context.get_group().group_name, meshes.context.get_local_rank()
    root.model.exchange = EXCHANGES[method](group, index, meshes.degrees.context)


def token_sharding(root: Root) -> Callable[[Batch], Batch] | None:
    """Return the function that selects this rank's tokens of a microbatch.

    None without context parallelism.
    """
    exchange = getattr(root.model, "exchange", None)  # transformers' classes have none
    return exchange.shard if isinstance(exchange, ContextRank) else None


@dataclass(frozen=True)
class ContextRank(ABC):
    """One of the C ranks that share sequences. Each has t = T / C tokens of a sequence.

    Attributes:
        group: name of the process group.
        index: index of this rank in the group.
        degree: number of ranks, C.
    """

    group: str
    index: int
    degree: int

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's tokens of full sequences, padded to a multiple of `chunks`."""
        missing = -batch.tokens.shape[1] % self.chunks
        batch = batch.padded(missing) if missing else batch
        return batch.part(self.ranges(batch.tokens.shape[1]))

    @property
    @abstractmethod
    def chunks(self) -> int:
        """Number of contiguous chunks of equal length that a sequence is divided into."""

    @abstractmethod
    def ranges(self, width: int) -> Ranges:
        """Return the token ranges of this rank in a sequence of `width` tokens.

        `width` is a multiple of `chunks`.
        """


class Ulysses(ContextRank):
    """Attention over full sequences, for a part of the heads per rank (Jacobs et al., 2023).

    Each rank has one contiguous chunk of tokens. An all-to-all before attention exchanges tokens
    for heads, and an all-to-all after attention exchanges heads for tokens.
    """

    splits_queries = False

    @property
    def chunks(self) -> int:
        """Return one chunk per rank."""
        return self.degree

    def ranges(self, width: int) -> Ranges:
        """Return chunk number `index`."""
        size = width // self.degree
        return ((self.index * size, (self.index + 1) * size),)

    def local_heads(self, values: Tensor) -> Tensor:
        """Return the values of this rank's heads, of values (H,)."""
        return values.chunk(self.degree)[self.index]

    def exchange_qkv(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Exchange tokens for heads.

        Args:
            q: (B, t, H, hd).
            kv: (B, t, KV, hd) each.

        Returns:
            q (B, T, H / C, hd), k and v (B, T, L / C, hd), with L as in the module's docstring.
        """
        k, v = kv
        # repeat key-value heads until the ranks divide them
        repeats = math.lcm(k.shape[2], self.degree) // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        # one all-to-all for all three, whose heads may have different widths
        dtype, widths = working_dtype(v), [x.shape[3] for x in (q, k, v)]
        parts = [x.to(dtype).unflatten(2, (self.degree, -1)).flatten(3) for x in (q, k, v)]
        sizes = [part.shape[3] for part in parts]  # values of a rank's heads
        exchanged = self._tokens_for_heads(torch.cat(parts, dim=3)).split(sizes, dim=2)
        pairs = zip(exchanged, widths, strict=True)
        q, k, v = (x.unflatten(2, (-1, width)) for x, width in pairs)
        return q, (k, v)

    def exchange_q(self, q: Tensor, kv: KeysValues) -> Tensor:
        """Exchange tokens (B, t, H, hd) for heads (B, T, H / C, hd), of the queries only."""
        width = q.shape[3]
        q = q.to(working_dtype(kv[1])).unflatten(2, (self.degree, -1)).flatten(3)
        return self._tokens_for_heads(q).unflatten(2, (-1, width))

    def exchange_output(self, attended: Tensor) -> Tensor:
        """Exchange heads (B, T, H / C, hd) for tokens (B, t, H, hd)."""
        parts = attended.unflatten(1, (self.degree, -1)).movedim(1, 0)  # (C, B, t, H / C, hd)
        parts = AllToAll.apply(parts, self.group)
        return parts.movedim(0, 2).flatten(2, 3)

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        """Return all tokens (B, T, w) of this rank's heads, from x (B, t, C, w)."""
        parts = AllToAll.apply(x.movedim(2, 0), self.group)  # (C, B, t, w), by source rank
        return parts.movedim(0, 1).flatten(1, 2)


class AllGatherKV(ContextRank):
    """Attention of each rank's queries over the all-gathered keys and values.

    The method of Llama 3 (Grattafiori et al., 2024, section 3.3.2): a sequence is divided into 2 C
    chunks and rank i has chunks i and 2 C - 1 - i, which balances the keys that ranks attend to.
    """

    splits_queries = True

    @property
    def chunks(self) -> int:
        """Return two chunks per rank."""
        return 2 * self.degree

    def ranges(self, width: int) -> Ranges:
        """Return chunk number `index`, counted from either end."""
        size = width // self.chunks
        indices = (self.index, self.chunks - 1 - self.index)
        return tuple((i * size, (i + 1) * size) for i in indices)

    def local_heads(self, values: Tensor) -> Tensor:
        """Return the values unchanged: every rank computes all heads."""
        return values

    def exchange_qkv(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Return q, and keys and values gathered from (B, t, KV, hd) to (B, T, KV, hd)."""
        dtype, widths = working_dtype(kv[1]), [x.shape[3] for x in kv]
        row = torch.cat([x.to(dtype) for x in kv], dim=3)  # (B, t, KV, w), w: of key and value
        gathered = AllGather.apply(row, self.group, self.degree)  # (C, B, t, KV, w)
        # the second chunks of the ranks follow the first ones in reverse order
        first, second = gathered.chunk(2, dim=2)
        chunks = torch.cat([first, second.flip(0)])  # (2 C, B, t / 2, KV, w)
        k, v = chunks.movedim(0, 1).flatten(1, 2).split(widths, dim=3)
        return q, (k, v)

    def exchange_q(self, q: Tensor, kv: KeysValues) -> Tensor:
        """Return q unchanged."""
        return q

    def exchange_output(self, attended: Tensor) -> Tensor:
        """Return the output unchanged."""
        return attended


EXCHANGES: dict[str, type[Ulysses] | type[AllGatherKV]] = {
    "ulysses": Ulysses,
    "all_gather": AllGatherKV,
}


class AllToAll(torch.autograd.Function):
    """Differentiable all-to-all: part i of the first dimension is sent to rank i of the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """Return the received parts in rank order, in the shape of x."""
        ctx.group = group
        return all_to_all(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of x: the all-to-all of the output's gradients."""
        return all_to_all(grads[0].contiguous(), ctx.group), None


class AllGather(torch.autograd.Function):
    """Differentiable all-gather: the backward pass sums gradients with a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, degree: int) -> Tensor:
        """Return the tensors of all C ranks, (C, ...), of x (...)."""
        ctx.group, ctx.degree = group, degree
        return all_gather(x.contiguous()[None], group, degree)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the sum over ranks of the gradients of this rank's x."""
        return reduce_scatter(grads[0].contiguous(), ctx.group, ctx.degree)[0], None, None
