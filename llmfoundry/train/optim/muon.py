"""Muon for the matrices of the blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix, so that a step changes all of
its directions equally. This needs full matrices. If FSDP has sharded them by rows, an all-to-all
gathers as many matrices as there are ranks, each on a different rank. Each rank orthogonalizes its
matrix and sends the rows back, so no matrix is computed twice. With tensor parallelism, the tensor
ranks then exchange their parts in the same way.

Communication and iteration are in the dtype of the recipe's matmuls. The iteration amplifies
rounding errors: gradients that differ in the last fp32 bit, as with another layout, give updates
that differ by 1e-2 in bf16 and by 2e-6 in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.ops.shard_layout import ShardAxis, ShardLayout, local_shard

# Jordan's quintic polynomial. Its slope at 0 is as steep as convergence allows: 5 rounds suffice.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
RMS = 0.2  # RMS of an AdamW update (Liu et al., 2025), so that both use the same learning rate


class Muon(torch.optim.Optimizer):
    """Muon for groups with `orthogonal`, fused AdamW for other groups.

    m <- lerp(m, g, 1 - momentum); u = orthogonal(lerp(g, m, momentum));
    p <- p (1 - weight_decay lr) - lr 0.2 sqrt(max(rows, columns)) u, as torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". If `found_inf` is 1, a step changes nothing, without a
    synchronization with the host.

    The key `rows` of a group contains the heights of the matrices that each parameter stacks;
    empty: one matrix. Each matrix is orthogonalized separately: fused queries, keys and values are
    three matrices, as in Jordan's and Moonlight's runs.

    Args:
        parameters: or parameter groups.
        dtype: dtype of the iteration, the same on all ranks; torch.optim.Muon uses bf16.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas}
        super().__init__(parameters, defaults | {"eps": eps, "orthogonal": False, "rows": ()})
        self._dtype = dtype
        others = [group for group in self.param_groups if not group["orthogonal"]]
        # adds AdamW's keys to these groups, which both optimizers share
        self._adamw = torch.optim.AdamW(others or [{"params": []}], fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        groups = self.param_groups  # loading a state replaces groups and state
        self._adamw.param_groups = [group for group in groups if not group["orthogonal"]]
        self._adamw.state = self.state
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        for group in groups:
            if group["orthogonal"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group; `skip` is true on the device if the step is cancelled."""
        skip = None if self.found_inf is None else self.found_inf.bool()
        matrices = list[MatrixShard]()
        for parameter in group["params"]:
            if parameter.grad is not None:
                matrices += _matrices(parameter, self._momentum(parameter), group["rows"])
        decay = _unless(skip, 1 - group["lr"] * group["weight_decay"], 1.0)
        for turn in _turns(matrices):
            momenta = [matrix.advance(group["momentum"], skip) for matrix in turn]
            updates = _orthogonal([momentum.to(self._dtype) for momentum in momenta], turn)
            for matrix, update in zip(turn, updates, strict=True):
                lr = group["lr"] * RMS * math.sqrt(max(matrix.shape))
                matrix.weight.mul_(decay)
                matrix.weight.sub_(update.to(matrix.weight.dtype) * _unless(skip, lr, 0.0))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


@dataclass(frozen=True)
class MatrixShard:
    """This rank's shard of one matrix.

    Attributes:
        weight: local rows (r, columns), a view of the parameter. With tensor parallelism, of this
            tensor rank's rows or columns.
        grad: gradient of the rows.
        mean: momentum of the rows.
        heights: number of rows of each FSDP shard.
        layout: layout of the parameter.
    """

    weight: Tensor
    grad: Tensor
    mean: Tensor
    heights: list[int]
    layout: ShardLayout

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the full matrix."""
        shape, across = [sum(self.heights), self.weight.shape[1]], self.layout.tensor
        if across is not None:
            shape[across.dim] *= across.n
        return shape[0], shape[1]

    def advance(self, momentum: float, skip: Tensor | None) -> Tensor:
        """Update the momentum, unless `skip`; return the Nesterov momentum to orthogonalize."""
        grad = self.grad if skip is None else self.grad.masked_fill(skip, 0.0)
        mean = torch.lerp(self.mean, grad, 1 - momentum)
        self.mean.copy_(mean if skip is None else torch.where(skip, self.mean, mean))
        return torch.lerp(grad, self.mean, momentum)


def _matrices(parameter: Tensor, mean: Tensor, rows: Iterable[int]) -> Iterator[MatrixShard]:
    """Yield this rank's shards of the matrices that a parameter stacks.

    Args:
        parameter: with a gradient. With expert parallelism it contains only this rank's experts.
        mean: momentum of the parameter.
        rows: heights of the stacked matrices; empty: one matrix.
    """
    assert parameter.grad is not None
    layout = ShardLayout.of(parameter)
    fsdp, experts, across = layout.fsdp, layout.experts, layout.tensor
    n_parts, part_rank = (1, 0) if experts is None else (experts.n, experts.rank)
    ranks = across.n if across is not None and across.dim == 0 else 1
    height = parameter.shape[0] // (n_parts * ranks)
    parts = [local_shard(tensor) for tensor in (parameter, parameter.grad, mean)]
    start = -part_rank * height  # of each matrix, from where the part begins
    for rows_of_all in tuple(rows) or (parameter.shape[0],):
        n = rows_of_all // ranks
        if start + n <= 0 or start >= height:
            start += n
            continue
        assert start >= 0 and start + n <= height, "no matrix lies in two parts"
        bounds = []  # (first, last) row of the matrix in each FSDP shard
        for rank in range(1 if fsdp is None else fsdp.n):
            low, high = (0, height) if fsdp is None else fsdp.bounds(height, rank)
            first, last = (min(max(row, low), high) - low for row in (start, start + n))
            bounds.append((first, last))
        local_rows = slice(*bounds[0 if fsdp is None else fsdp.rank])
        weight, grad, momentum = (part[local_rows] for part in parts)
        heights = [last - first for first, last in bounds]
        yield MatrixShard(weight, grad, momentum, heights, layout)
        start += n


def _turns(matrices: list[MatrixShard]) -> Iterator[list[MatrixShard]]:
    """Yield groups of matrices of similar size, one per rank, so that ranks do not wait long.

    Matrices with different layouts, such as those of experts, are in separate groups.
    """
    kinds: dict[ShardLayout, list[MatrixShard]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.layout, []).append(matrix)
    for layout, alike in kinds.items():
        alike.sort(key=lambda matrix: -math.prod(matrix.shape))
        n = (1 if layout.fsdp is None else layout.fsdp.n) * _at_a_shard(layout)
        for first in range(0, len(alike), n):
            yield alike[first : first + n]


def _at_a_shard(layout: ShardLayout) -> int:
    """Return the number of matrices of a turn per FSDP shard: one for each tensor rank."""
    return 1 if layout.tensor is None else layout.tensor.n


def _orthogonal(updates: list[Tensor], turn: list[MatrixShard]) -> list[Tensor]:
    """Orthogonalize updates; for sharded matrices, `updates` and the result are local shards."""
    fsdp, each = turn[0].layout.fsdp, _at_a_shard(turn[0].layout)
    if fsdp is None:
        return [orthogonal(update) for update in updates]

    # each rank gets the full matrices turn[assigned[rank]]
    assigned = [slice(rank * each, (rank + 1) * each) for rank in range(fsdp.n)]
    sent = [sum(update.numel() for update in updates[part]) for part in assigned]
    local = turn[assigned[fsdp.rank]]
    sizes = [[m.heights[rank] * m.weight.shape[1] for m in local] for rank in range(fsdp.n)]
    received = [sum(part) for part in sizes]

    # send the shards of all matrices, and put the full local matrices together
    flat = torch.cat([update.flatten() for update in updates])
    shards_by_rank = _all_to_all(flat, sent, received, fsdp.group).split(received)
    pieces = list[Tensor]()
    for shards, size in zip(shards_by_rank, sizes, strict=True):
        pieces += shards.split(size)
    full = [
        torch.cat(pieces[k :: len(local)]).view(-1, matrix.weight.shape[1])
        for k, matrix in enumerate(local)
    ]
    done = _over_tensor_ranks(full, turn[0].layout.tensor)

    # send the rows back to their ranks
    rows = [update.split(m.heights) for update, m in zip(done, local, strict=True)]
    returned = [part[rank].flatten() for rank in range(fsdp.n) for part in rows]
    parts = _all_to_all(torch.cat([flat[:0], *returned]), received, sent, fsdp.group)
    split = parts.split([update.numel() for update in updates])
    return [part.view_as(update) for part, update in zip(split, updates, strict=True)]


def _over_tensor_ranks(parts: list[Tensor], across: ShardAxis | None) -> list[Tensor]:
    """Orthogonalize matrices of which each tensor rank has a part; each rank computes one.

    Args:
        parts: this rank's parts, all of one size; at most one matrix per tensor rank.
        across: the tensor ranks; None: the matrices are full.
    """
    if across is None:
        return [orthogonal(part) for part in parts]
    if not parts:
        return []
    idle = [0] * (across.n - len(parts))  # ranks without a matrix
    sent = [part.numel() for part in parts] + idle
    local_part = parts[across.rank] if across.rank < len(parts) else parts[0][:0]
    received = [local_part.numel()] * across.n
    flat = torch.cat([part.flatten() for part in parts])
    exchanged = _all_to_all(flat, sent, received, across.group)
    if local_part.numel():
        pieces = [piece.view_as(local_part) for piece in exchanged.split(received)]
        chunks = orthogonal(torch.cat(pieces, across.dim)).chunk(across.n, across.dim)
        exchanged = torch.cat([chunk.flatten() for chunk in chunks])
    split = _all_to_all(exchanged, received, sent, across.group).split(sent)
    return [result.view_as(part) for result, part in zip(split, parts, strict=False)]


def _all_to_all(
    flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=group)
    return result


def orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix U S V^T to approximately U V^T; singular values are about 0.7 to 1.2.

    Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon) in the matrix's dtype. In
    bf16 the operations are those of torch.optim.Muon, which supports no other dtype, no shards and
    no `found_inf`.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # the spectral norm is at most the Frobenius norm
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _unless(skip: Tensor | None, value: float, skipped: float) -> float | Tensor:
    """Return `value`, or `skipped` on the device if the step is cancelled."""
    return value if skip is None else torch.where(skip, skipped, value)
