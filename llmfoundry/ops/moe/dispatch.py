"""Rows of tokens on their way to experts that other processes hold, and back; none is dropped.

`models/moe.py` makes a `TokenExchange` for each layer and forward pass, and calls its methods in
order. What is sent is waited for as late as can be: counts travel while rows are gathered, rows
while the shared expert computes, and the rows that come back while the router's statistics are
counted. The backward pass sends gradients along the same ways, and waits for them as late.

Every process of the group takes part in every message, also one that has no rows, or gets none.
The host waits for the device once a layer: for the counts, which say how long messages are.

A layer's messages, of N = tokens * top_k rows of width D that one process sends and as many that it
gets back (it receives those of the others, M rows; M = N in the mean):

    forward    E int64 counts; N D to the experts; N D back      2 N D values and 8 E bytes
    backward   N D of gradients to the experts; N D back         2 N D values

in the dtype of the tokens (autocast's where it is on): 4 N D * bytes a layer and microbatch, of
which (P - 1) / P leave the process where tokens go evenly to all P of the group. Recomputation of
whole blocks sends the forward pass's messages again; selective checkpointing keeps what came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.ops.devices import planned
from llmfoundry.ops.moe.experts import route
from llmfoundry.ops.moe.gpu import steps_of
from llmfoundry.ops.torch_private import start_all_to_all, wait


class TokenExchange:
    """One layer's rows: sent as it is made, then `arrived`, `send_back` and `combined`, in order.

    Args:
        x: (T, D), tokens to route: no padding; T may be 0.
        experts: (T, k), int64: k different experts of a token, each below `n_experts`.
        n_experts: E, of all processes together; each has E / P, expert after expert.
        group: the P processes.
    """

    def __init__(
        self, x: Tensor, experts: Tensor, *, n_experts: int, group: dist.ProcessGroup
    ) -> None:
        size = group.size()
        self._order, self._inverse, ends = route(experts, n_experts)
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
        """Wait for the rows (M, D), process after process, and the expert here of each: (M, 1)."""
        rows = _Finish.apply(self._rows, self._there)
        return rows, self._experts[:, None]

    def send_back(self, rows: Tensor) -> None:
        """Start what experts made of the rows (M, D) on their way home."""
        self._rows = _Start.apply(rows, self._back)

    def combined(self, weights: Tensor) -> Tensor:
        """Wait for them; the sum of each token's rows times the router's weights (T, k): (T, D)."""
        rows = _Finish.apply(self._rows, self._back)  # (N, D)
        return _Combined.apply(rows, weights, self._order, self._inverse)


def _lengths(mine: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Rows that go to each process and that come from it, of counts (P, E / P) each.

    The one wait for the device.
    """
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    return sent, received


@dataclass
class _Way:
    """One message of a layer: how many rows go to each process, and how many come.

    Attributes:
        received: rows from each process, in order.
        sent: rows to each.
        group: they.
        gradient: on its way back, which `_Finish` starts and `_Start` waits for. It has as many
            rows as were sent: as a gradient of what came it could not pass from one to the other.
    """

    received: list[int]
    sent: list[int]
    group: dist.ProcessGroup
    gradient: Tensor | None = None


class _Start(torch.autograd.Function):
    """Begin to send rows; nobody may read the result before `_Finish`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return start_all_to_all(rows.contiguous(), way.received, way.sent, way.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.way.gradient = ctx.way.gradient, None
        return wait(gradient), None


class _Finish(torch.autograd.Function):
    """Wait for what `_Start` sent; the gradient sets out here, and is waited for there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return wait(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        way.gradient = start_all_to_all(grads[0].contiguous(), way.sent, way.received, way.group)
        return grads[0], None  # `_Start` looks at way.gradient alone


class _Gathered(torch.autograd.Function):
    """Rows (N, D) of tokens (T, D), sorted by expert; backward a sum, in the same order each time.

    index_select's own backward pass adds up by atomics.
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
