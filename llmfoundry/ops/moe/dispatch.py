"""Exchange of tokens with experts on other ranks (expert parallelism); no token is dropped.

Entry point: `TokenExchange`, one per layer and forward pass, whose methods `models/moe.py` calls in
order. Communication overlaps with compute: row counts are sent while rows are gathered, rows while
the shared expert computes, and rows that return while the router's statistics are computed. The
backward pass sends gradients along the same routes and overlaps in the same way.

Every rank of the group takes part in every collective, even without rows to send or receive. The
host waits for the device once per layer, for the row counts, which are the sizes of the
collectives.

Communication of a layer, for N = tokens * top_k rows of width D that a rank sends and gets back (it
receives M rows of other ranks; M = N on average):

    forward    E int64 counts; N D to the experts; N D back      2 N D values and 8 E bytes
    backward   N D of gradients to the experts; N D back         2 N D values

The dtype is that of the tokens (autocast's if it is enabled). This is 4 N D * bytes per layer and
microbatch, of which (P - 1) / P leave the rank if tokens are balanced over the P ranks of the
group. Full activation checkpointing repeats the forward pass's communication; selective
checkpointing saves the received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.ops.devices import planned
from llmfoundry.ops.moe.gpu import steps_of
from llmfoundry.ops.torch_private import start_all_to_all, wait


class TokenExchange:
    """Exchange of one layer: sends when created, then `arrived`, `send_back`, `combined`, in order.

    Args:
        x: (T, D), tokens to route, without padding; T may be 0.
        experts: (T, k), int64: k different experts per token, each below `n_experts`.
        n_experts: E, number of experts on all ranks; each rank has E / P consecutive ones.
        group: the P ranks.
    """

    def __init__(
        self, x: Tensor, experts: Tensor, *, n_experts: int, group: dist.ProcessGroup
    ) -> None:
        size = group.size()
        self._order, self._inverse, ends = steps_of(x.device).route(experts, n_experts)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()  # (E,)
        even = [n_experts // size] * size
        theirs = start_all_to_all(counts, even, even, group)
        rows = _Gathered.apply(x, self._order, self._inverse, experts.shape[1])  # (N, D)
        theirs = wait(theirs).view(size, -1)  # (P, E / P), of each process for each expert here
        mine = counts.view(size, -1)
        what = planned()
        sent, received = what.rows(len(rows), size) if what else _lengths(mine, theirs)
        here = torch.arange(theirs.shape[1], device=x.device).repeat(size)
        self._experts = here.repeat_interleave(theirs.flatten(), output_size=sum(received))
        self._there, self._back = _Way(received, sent, group), _Way(sent, received, group)
        self._rows = _Start.apply(rows, self._there)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Wait for the rows (M, D), ordered by source rank, and their local experts (M, 1)."""
        rows = _Finish.apply(self._rows, self._there)
        return rows, self._experts[:, None]

    def send_back(self, rows: Tensor) -> None:
        """Start to send the experts' outputs (M, D) back."""
        self._rows = _Start.apply(rows, self._back)

    def combined(self, weights: Tensor) -> Tensor:
        """Wait for the outputs; return (T, D), each token's rows summed with weights (T, k)."""
        rows = _Finish.apply(self._rows, self._back)  # (N, D)
        return _Combined.apply(rows, weights, self._order, self._inverse)


def _lengths(mine: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows sent to and received from each rank, for counts (P, E / P) each.

    This is the only wait for the device.
    """
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    return sent, received


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
    """Gather rows (N, D) of tokens (T, D), sorted by expert, with a deterministic backward pass.

    The backward pass of index_select uses atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return steps_of(x.device).gather(x.contiguous(), order, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), steps = ctx.saved_tensors, steps_of(grads[0].device)
        return steps.combine(grads[0].contiguous(), inverse, None, ctx.top_k), None, None, None


class _Combined(torch.autograd.Function):
    """Tokens (T, D): the sum of their rows (N, D) times the router's weights (T, k), in fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        steps = steps_of(rows.device)
        return steps.combine(rows.contiguous(), inverse, weights.contiguous(), weights.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order = ctx.saved_tensors
        grad = grads[0].contiguous()  # (T, D)
        backward = steps_of(rows.device).combine_backward
        return *backward(grad, rows.contiguous(), weights.contiguous(), order), None, None
