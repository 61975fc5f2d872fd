"""Exchange of tokens with experts on other ranks (expert parallelism); no token is dropped.

Entry point: `TokenExchange`, one per layer and forward pass, whose methods `models/moe.py` calls in
order. Communication overlaps with compute: row counts are sent while rows are gathered, rows while
the shared expert computes, and rows that return while the router's statistics are computed. The
backward pass sends gradients along the same routes and overlaps in the same way.

The router's weight travels with its row, and the rank of the expert applies it. Rows therefore
return weighted, a token's are only summed, and the backward pass needs none of them. In bf16 a
weighted row is rounded once more before the sum.

Every rank of the group takes part in every collective, even without rows to send or receive. There
are two ways to agree on the number of rows:

- Exact (no capacity): ranks exchange row counts, and the host waits for the device once per layer,
  because the counts are the sizes of the collectives.
- With a capacity C each rank sends C rows to each rank, of which the last may be unused. The host
  never waits. Rows for which there is no room are counted: `overflow`. Their tokens become NaN, and
  `train/step.py` repeats such a step with exact counts.

Communication of a layer, for N = tokens * top_k rows of width D that a rank sends and gets back (it
receives M rows of other ranks; M = N on average). With a capacity, N is P C:

    forward    E int64 counts (exact only); 2 N numbers; N D to the experts; N D back
    backward   N D of gradients to the experts; N D back; 2 N numbers

The dtype of rows is that of the tokens (autocast's if it is enabled). This is 4 N D * bytes per
layer and microbatch, of which (P - 1) / P leave the rank if tokens are balanced over the P ranks of
the group. Full activation checkpointing repeats the forward pass's communication; selective
checkpointing saves the received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.devices import planned
from llmfoundry.ops.moe.experts import SortedRows
from llmfoundry.ops.moe.gpu import steps_of
from llmfoundry.ops.torch_private import start_all_to_all, wait


class TokenExchange:
    """Exchange of one layer: sends when created, then `arrived`, `send_back`, `combined`, in order.

    Args:
        x: (T, D), tokens to route, without padding; T may be 0.
        weights: (T, k), the router's weights.
        experts: (T, k), int64: k different experts per token, each below `n_experts`.
        n_experts: E, number of experts on all ranks; each rank has E / P consecutive ones.
        group: the P ranks.
        capacity: C, the same on all ranks; None: exact counts.

    Attributes:
        overflow: (), number of rows without room on this rank; None: exact counts.
    """

    overflow: Tensor | None = None

    def __init__(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        *,
        n_experts: int,
        group: dist.ProcessGroup,
        capacity: int | None,
    ) -> None:
        size, top_k = group.size(), experts.shape[1]
        routing, local = steps_of(x.device).route(experts, n_experts), n_experts // size
        if capacity is None:
            counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1)).long()  # (E,)
            even = [local] * size
            theirs = start_all_to_all(counts, even, even, group)
            rows = _Gathered.apply(x, routing.order, routing.inverse, top_k)  # (N, D)
            theirs = wait(theirs)  # of each rank for each expert here
            what = planned()
            sent, received = (
                what.rows(len(rows), size)
                if what
                else _lengths(counts.view(size, -1), theirs.view(size, -1))
            )
            slots = _exact_slots(routing, experts, local)
        else:
            sent = received = [capacity] * size
            slots, self.overflow = _bounded_slots(routing, experts, local, size, capacity)
            rows = _Gathered.apply(x, slots.order, slots.inverse, top_k)  # (P C, D)
        self._slots, self._top_k = slots, top_k
        numbers = _Numbers.apply(weights, slots)  # (N, 2)
        self._numbers_way = _Way(received, sent, group)
        self._there, self._back = _Way(received, sent, group), _Way(sent, received, group)
        self._numbers = _Start.apply(numbers, self._numbers_way)
        self._rows = _Start.apply(rows, self._there)

    def started(self) -> tuple[Tensor, Tensor]:
        """Return the tensors to receive, rows and numbers, which must not be read yet."""
        return self._rows, self._numbers

    def replace_started(self, rows: Tensor, numbers: Tensor) -> None:
        """Set what `started` returns, as views of it through which gradients pass."""
        self._rows, self._numbers = rows, numbers

    def arrived(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the rows (M, D), ordered by source rank, their weights and experts (M, 1) here.

        An unused row has the number of experts of this rank in place of an expert.
        """
        numbers = _Finish.apply(self._numbers, self._numbers_way)
        rows = _Finish.apply(self._rows, self._there)
        weights, experts = numbers.split(1, dim=1)
        return rows, weights, experts.detach().long()

    def send_back(self, rows: Tensor) -> Tensor:
        """Start to send the experts' weighted outputs (M, D) back; return the tensor to receive."""
        returned: Tensor = _Start.apply(rows, self._back)
        return returned

    def combined(self, returned: Tensor) -> Tensor:
        """Wait for the outputs; return (T, D), the sum of each token's rows."""
        rows = _Finish.apply(returned, self._back)  # (N, D)
        return _Combined.apply(rows, self._slots, self._top_k)


def _lengths(mine: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows sent to and received from each rank, for counts (P, E / P) each.

    This is the only wait for the device.
    """
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    return sent, received


class _Slots(NamedTuple):
    """Rows in the order in which they are sent. N is the number of pairs of token and choice.

    Attributes:
        order: (S,), int32, the pair in each slot; any pair in an unused slot.
        inverse: (N,), int32, the slot of each pair.
        experts: (S,), the expert in each slot as its rank numbers it, from 0 to E / P - 1; E / P in
            an unused slot.
        factors: (S,), factors of the router's weights, 1 or NaN; None: 1.
    """

    order: Tensor
    inverse: Tensor
    experts: Tensor
    factors: Tensor | None = None


def _exact_slots(routing: SortedRows, experts: Tensor, local: int) -> _Slots:
    """Return slots for all pairs, sorted by expert; `local` experts are on each rank."""
    order, inverse, _ = routing
    return _Slots(order, inverse, experts.flatten().index_select(0, order) % local)


def _bounded_slots(
    routing: SortedRows, experts: Tensor, local: int, size: int, capacity: int
) -> tuple[_Slots, Tensor]:
    """Return `capacity` slots for each of `size` ranks, and the number of pairs without a slot.

    Pairs without a slot share the first one of their rank, whose weight becomes NaN.
    """
    order, inverse, ends = routing
    last = ends.view(size, local)[:, -1]  # (P,), end of the sorted rows of each rank
    starts = F.pad(last[:-1], (1, 0))
    counts = last - starts
    column = torch.arange(capacity, dtype=torch.int32, device=order.device)
    is_used = column < counts[:, None]  # (P, C)
    overflow = (counts - capacity).clamp(min=0)

    # the pair of each slot; without tokens all slots are unused
    flat = experts.flatten()
    sorted_rows = torch.where(is_used, starts[:, None] + column, 0).flatten()
    if len(order) == 0:
        pairs, chosen = sorted_rows, torch.full_like(sorted_rows, local)
    else:
        pairs = order.index_select(0, sorted_rows)
        chosen = flat.index_select(0, pairs) % local
        chosen = chosen.masked_fill(~is_used.flatten(), local)

    # the slot of each pair
    rank = flat // local
    place = inverse - starts.index_select(0, rank)
    slot = rank * capacity + torch.where(place < capacity, place, 0)
    poison = torch.where((overflow > 0)[:, None] & (column == 0), torch.nan, 1.0)
    return _Slots(pairs, slot.to(torch.int32), chosen, poison.flatten()), overflow.sum()


@dataclass
class _Way:
    """One exchange of rows.

    Attributes:
        received: rows from each rank, in order.
        sent: rows to each rank.
        group: the ranks.
        gradient: the gradient that `_Finish` starts to send and `_Start` waits for. It has as many
            rows as were sent, so autograd could not pass it as the gradient of the received rows.
    """

    received: list[int]
    sent: list[int]
    group: dist.ProcessGroup
    gradient: Tensor | None = None


class _Start(torch.autograd.Function):
    """Start to send rows. The result must not be read before `_Finish`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return start_all_to_all(rows.contiguous(), way.received, way.sent, way.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.way.gradient = ctx.way.gradient, None
        return wait(gradient), None


class _Finish(torch.autograd.Function):
    """Wait for the rows of `_Start`. In the backward pass start to send the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return wait(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        way.gradient = start_all_to_all(grads[0].contiguous(), way.sent, way.received, way.group)
        return grads[0], None  # `_Start` uses only way.gradient


class _Gathered(torch.autograd.Function):
    """Gather rows (S, D) of tokens (T, D), in the order of slots, with a deterministic backward.

    The backward pass of index_select uses atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return _gather(x.contiguous(), order, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), steps = ctx.saved_tensors, steps_of(grads[0].device)
        return steps.combine(grads[0].contiguous(), inverse, None, ctx.top_k), None, None, None


class _Numbers(torch.autograd.Function):
    """Weight and expert of each slot (S, 2), in the dtype of the router's weights (T, k)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, slots: _Slots) -> Tensor:
        ctx.save_for_backward(slots.inverse)
        ctx.shape = weights.shape
        numbers = weights.new_zeros(len(slots.order), 2)
        if weights.numel():
            numbers[:, 0] = weights.flatten().index_select(0, slots.order)
        if slots.factors is not None:
            numbers[:, 0] *= slots.factors
        numbers[:, 1] = slots.experts
        return numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][:, 0].index_select(0, inverse).view(ctx.shape), None


class _Combined(torch.autograd.Function):
    """Tokens (T, D): the sum of their rows (S, D) in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: _Slots, top_k: int) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.top_k = top_k
        return steps_of(rows.device).combine(rows.contiguous(), slots.inverse, None, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _gather(grads[0].contiguous(), order, ctx.top_k), None, None


def _gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return the rows (S, D) of slots; without tokens, zeros in unused slots."""
    if len(x) == 0:
        return x.new_zeros(len(order), x.shape[1])
    return steps_of(x.device).gather(x, order, top_k)
