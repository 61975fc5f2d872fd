"""Context parallelism: processes share the tokens of each row, and attend to all of it.

`apply.py` calls `apply_context_parallel`; from then on `Decoder.exchange` is one of the two classes
below. The training step asks it for this process's tokens of each microbatch (`shard`), attention
for what it needs of the others'. Everything else looks at single tokens. In evaluation nothing is
exchanged: these processes then have full rows, each its own.

What a layer sends, in elements, of B rows of T tokens, C processes, H query heads, KV key-value
heads and heads of width d. Each process, forward pass:

- ulysses (Jacobs et al., 2023): (C - 1) / C * B * T / C * d * (2 H + 2 L), where L is the least
  common multiple of KV and C: heads of keys and values that fewer processes than C would share are
  repeated. A layer with another's keys and values sends (C - 1) / C * B * T / C * d * 2 H.
- all_gather: (C - 1) / C * B * T * d * 2 KV, none where it has another's keys and values.

The backward pass sends as much again, and checkpointing of whole blocks repeats the forward pass
(selective checkpointing repeats all_gather's alone). Ulysses sends less by C, all_gather suits few
key-value heads and any number of processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmfoundry.distributed.mesh import Meshes
from llmfoundry.models.attention import KeysValues
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.attention.base import AttentionSpec, working_dtype
from llmfoundry.ops.packed_layout import Batch, Ranges
from llmfoundry.ops.torch_private import all_gather, all_to_all, reduce_scatter
from llmfoundry.recipe.parallel import ParallelConfig, context_method


def apply_context_parallel(root: Root, meshes: Meshes | None, config: ParallelConfig) -> None:
    """Let the processes of the context dimension share each row while training."""
    if meshes is None or meshes.context is None:
        return
    assert isinstance(root.model, Decoder), "checked before"
    method = context_method(root.model.config, config, meshes.degrees)
    group, index = meshes.context.get_group().group_name, meshes.context.get_local_rank()
    root.model.exchange = EXCHANGES[method](group, index, meshes.degrees.context)


def token_sharding(root: Root) -> Callable[[Batch], Batch] | None:
    """Gives this process's tokens of a microbatch; None: it has all of its rows."""
    exchange = getattr(root.model, "exchange", None)  # other classes have none
    return exchange.shard if isinstance(exchange, ContextRank) else None


@dataclass(frozen=True)
class ContextRank(ABC):
    """One of `degree` processes that share rows.

    Attributes:
        group: name of their group.
        index: of this process among them.
        degree: their number, C.
    """

    group: str
    index: int
    degree: int

    def shard(self, batch: Batch) -> Batch:
        """This process's tokens of full rows, which are first padded where they do not divide."""
        missing = -batch.tokens.shape[1] % self.pieces
        batch = batch.padded(missing) if missing else batch
        return batch.part(self.ranges(batch.tokens.shape[1]))

    @property
    @abstractmethod
    def pieces(self) -> int:
        """Into how many contiguous parts of one length a row is divided."""

    @abstractmethod
    def ranges(self, width: int) -> Ranges:
        """Places of this process's tokens in rows of so many, which `pieces` divides."""


class Ulysses(ContextRank):
    """Attention over full rows, each process with a part of the heads (Jacobs et al., 2023).

    A process has contiguous tokens. One all-to-all brings it those of the others, of its heads
    alone; another takes what it made of them back.
    """

    splits_queries = False

    @property
    def pieces(self) -> int:
        """One a process."""
        return self.degree

    def ranges(self, width: int) -> Ranges:
        """Part number `index`."""
        size = width // self.degree
        return ((self.index * size, (self.index + 1) * size),)

    def own(self, spec: AttentionSpec) -> AttentionSpec:
        """With the slopes of this process's heads."""
        if spec.slopes is None:
            return spec
        return replace(spec, slopes=spec.slopes.chunk(self.degree)[self.index])

    def inward(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Of q (B, t, H, hd), k and v (B, t, KV, hd): all tokens, (B, T, ...), of some heads.

        These are H / C query heads and L / C key-value heads, L as in this module's docstring.
        """
        k, v = kv
        dtype, heads = working_dtype(v), math.lcm(k.shape[2], self.degree)
        times = heads // k.shape[2]
        if times > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        q, k, v = (x.to(dtype).unflatten(2, (self.degree, -1)) for x in (q, k, v))
        sizes = [q.shape[3], k.shape[3], v.shape[3]]
        q, k, v = self._all_tokens(torch.cat([q, k, v], dim=3)).split(sizes, dim=2)
        return q, (k, v)

    def queries(self, q: Tensor, kv: KeysValues) -> Tensor:
        """As `inward`, beside keys and values that are here already."""
        q = q.to(working_dtype(kv[1]))
        return self._all_tokens(q.unflatten(2, (self.degree, -1)))

    def outward(self, mixed: Tensor) -> Tensor:
        """(B, t, H, hd), all heads of this process's tokens, of (B, T, H / C, hd)."""
        parts = mixed.unflatten(1, (self.degree, -1)).movedim(1, 0)  # (C, B, t, H / C, hd)
        parts = AllToAll.apply(parts, self.group)
        return parts.movedim(0, 2).flatten(2, 3)

    def _all_tokens(self, x: Tensor) -> Tensor:
        """(B, T, n, hd) of x (B, t, C, n, hd): the n heads that are this process's."""
        parts = AllToAll.apply(x.movedim(2, 0), self.group)  # (C, B, t, n, hd), by where from
        return parts.movedim(0, 1).flatten(1, 2)


class AllGatherKV(ContextRank):
    """Each process's queries over the keys and values of full rows, which are gathered.

    As Llama 3 was trained (Grattafiori et al., 2024, section 3.3.2): a row is divided into 2 C
    parts, and process i has parts i and 2 C - 1 - i, so that all see as many keys.
    """

    splits_queries = True

    @property
    def pieces(self) -> int:
        """Two a process."""
        return 2 * self.degree

    def ranges(self, width: int) -> Ranges:
        """Parts number `index` from both ends."""
        size = width // self.pieces
        parts = (self.index, self.pieces - 1 - self.index)
        return tuple((part * size, (part + 1) * size) for part in parts)

    def own(self, spec: AttentionSpec) -> AttentionSpec:
        """As it is: every process has all heads."""
        return spec

    def inward(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Q as it is; k and v (B, T, KV, hd), gathered, of (B, t, KV, hd)."""
        dtype = working_dtype(kv[1])
        pair = torch.stack([x.to(dtype) for x in kv])  # (2, B, t, KV, hd)
        parts = AllGather.apply(pair, self.group, self.degree)  # (C, 2, B, t, KV, hd)
        near, far = parts.chunk(2, dim=3)
        rows = torch.cat([near, far.flip(0)])  # (2 C, 2, B, t / 2, KV, hd), in the row's order
        k, v = rows.movedim(0, 2).flatten(2, 3)
        return q, (k, v)

    def queries(self, q: Tensor, kv: KeysValues) -> Tensor:
        """As it is."""
        return q

    def outward(self, mixed: Tensor) -> Tensor:
        """As it is."""
        return mixed


EXCHANGES: dict[str, type[Ulysses] | type[AllGatherKV]] = {
    "ulysses": Ulysses,
    "all_gather": AllGatherKV,
}


class AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to process i of a group; so does its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """What the processes sent here, in their order, in the shape of x."""
        ctx.group = group
        return all_to_all(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradients of what was sent."""
        return all_to_all(grads[0].contiguous(), ctx.group), None


class AllGather(torch.autograd.Function):
    """The tensors of all processes of a group; gradients are added up where they belong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, degree: int) -> Tensor:
        """(C, ...) of x (...)."""
        ctx.group, ctx.degree = group, degree
        return all_gather(x.contiguous()[None], group, degree)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The sum over processes of the gradients of this one's part."""
        return reduce_scatter(grads[0].contiguous(), ctx.group, ctx.degree)[0], None, None
