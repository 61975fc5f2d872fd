"""Muon for the matrices of the blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix, so that a step changes all of
its directions equally. This needs full matrices. If FSDP has sharded them by rows, an all-to-all
gathers them, equally many on each rank. Each rank orthogonalizes its matrices and sends the rows
back, so no matrix is computed twice. With tensor parallelism, the tensor ranks then exchange their
parts in the same way.

A step is a sequence of turns of at most `TURN_VALUES` values per rank, which bounds its memory. In
a turn, matrices of the same shape are orthogonalized together by batched matmuls, and elementwise
operations cover all matrices: the number of kernel launches depends on the number of turns and
shapes, not on the number of matrices. A batched matmul may round differently from a single one.

Communication and iteration are in the dtype of the recipe's matmuls. The iteration amplifies
rounding errors: gradients that differ in the last fp32 bit, as with another layout, give updates
that differ by 1e-2 in bf16 and by 2e-6 in fp32.
"""

from __future__ import annotations

import itertools
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
TURN_VALUES = 1 << 25  # fp32 momentum, its copy in bf16 and the iteration: about 0.5 GiB
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
        for turn in _turns(matrices):
            momenta = _advance([*itertools.chain(*turn)], group["momentum"], skip)
            updates = _orthogonal(momenta.to(self._dtype), turn)
            _apply([*itertools.chain(*turn)], updates, group, skip)

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


def _matrices(parameter: Tensor, mean: Tensor, rows: Iterable[int]) -> Iterator[MatrixShard]:
    """Yield this rank's shards of the matrices that a parameter stacks.

    Args:
        parameter: with a gradient. With expert parallelism it contains only this rank's experts.
        mean: momentum of the parameter.
        rows: heights of the stacked matrices; empty: one matrix.
    """
    grad = parameter.grad
    assert grad is not None
    layout = ShardLayout.of(parameter)
    fsdp, experts, across = layout.fsdp, layout.experts, layout.tensor
    n_parts, part_rank = (1, 0) if experts is None else (experts.n, experts.rank)
    ranks = across.n if across is not None and across.dim == 0 else 1
    height = parameter.shape[0] // (n_parts * ranks)

    # rows of each matrix in each FSDP shard
    heights_by_matrix = list[list[int]]()
    start = -part_rank * height  # of a matrix, from where the part begins
    for rows_of_all in tuple(rows) or (parameter.shape[0],):
        end = start + rows_of_all // ranks
        if start < height and end > 0:
            assert start >= 0 and end <= height, "no matrix lies in two parts"
            heights = []
            for rank in range(1 if fsdp is None else fsdp.n):
                low, high = (0, height) if fsdp is None else fsdp.bounds(height, rank)
                heights.append(max(min(end, high) - max(start, low), 0))
            heights_by_matrix.append(heights)
        start = end

    # views of the local rows
    rank = 0 if fsdp is None else fsdp.rank
    local_heights = [heights[rank] for heights in heights_by_matrix]
    shards = [local_shard(tensor).split(local_heights) for tensor in (parameter, grad, mean)]
    for weight, gradient, momentum, heights in zip(*shards, heights_by_matrix, strict=True):
        yield MatrixShard(weight, gradient, momentum, heights, layout)


def _turns(matrices: list[MatrixShard]) -> Iterator[list[list[MatrixShard]]]:
    """Yield the matrices of each turn, by the FSDP shard that orthogonalizes them.

    Matrices with different layouts, such as those of experts, are in separate turns. The matrices
    of a turn are of similar size and dealt to the ranks one by one, so that ranks do not wait long.
    """
    kinds: dict[tuple[ShardLayout, torch.dtype], list[MatrixShard]] = {}
    for matrix in matrices:
        kinds.setdefault((matrix.layout, matrix.weight.dtype), []).append(matrix)
    for (layout, _), alike in kinds.items():
        alike.sort(key=lambda matrix: (-math.prod(matrix.shape), matrix.shape))
        n_shards = 1 if layout.fsdp is None else layout.fsdp.n
        n_tensor = 1 if layout.tensor is None else layout.tensor.n
        n_ranks = n_shards * n_tensor
        while alike:
            fitting = max(TURN_VALUES // math.prod(alike[0].shape), 1)
            each = min(fitting, math.ceil(len(alike) / n_ranks))
            turn, alike = alike[: each * n_ranks], alike[each * n_ranks :]
            yield [
                [m for i, m in enumerate(turn) if i % n_ranks // n_tensor == shard]
                for shard in range(n_shards)
            ]


def _advance(matrices: list[MatrixShard], momentum: float, skip: Tensor | None) -> Tensor:
    """Update the momenta, unless `skip`; return the flat Nesterov momenta to orthogonalize."""
    flat = torch.cat([matrix.grad.flatten() for matrix in matrices])
    if skip is not None:
        # with the momentum as gradient, which may not be finite, the momentum does not change
        flat = torch.where(skip, torch.cat([matrix.mean.flatten() for matrix in matrices]), flat)
    shards = [matrix for matrix in matrices if matrix.mean.numel()]
    means = [matrix.mean for matrix in shards]
    grads = _split_like(flat, means)
    torch._foreach_lerp_(means, grads, 1 - momentum)
    torch._foreach_lerp_(grads, means, momentum)
    return flat


def _apply(
    matrices: list[MatrixShard], updates: list[Tensor], group: dict[str, Any], skip: Tensor | None
) -> None:
    """Decay the weights and subtract the scaled updates, unless `skip`; changes `updates`."""
    pairs = [(m, u) for m, u in zip(matrices, updates, strict=True) if u.numel()]
    if not pairs:
        return
    weights, deltas = [matrix.weight for matrix, _ in pairs], [update for _, update in pairs]
    dtype = weights[0].dtype
    if deltas[0].dtype != dtype:
        narrow, flat = deltas, weights[0].new_empty(sum(weight.numel() for weight in weights))
        deltas = _split_like(flat, weights)
        torch._foreach_copy_(deltas, narrow)

    # the learning rate of a matrix depends on its shape
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for (matrix, _), delta in zip(pairs, deltas, strict=True):
        by_shape.setdefault(matrix.shape, []).append(delta)
    for shape, alike in by_shape.items():
        lr = group["lr"] * RMS * math.sqrt(max(shape))
        torch._foreach_mul_(alike, _unless(skip, lr, 0.0, dtype))
    decay = 1 - group["lr"] * group["weight_decay"]
    torch._foreach_mul_(weights, _unless(skip, decay, 1.0, dtype))
    torch._foreach_sub_(weights, deltas)


def _orthogonal(flat: Tensor, turn: list[list[MatrixShard]]) -> list[Tensor]:
    """Orthogonalize the matrices of a turn; `flat` and the results are this rank's shards."""
    shards = [matrix.weight for matrix in itertools.chain(*turn)]
    layout = next(itertools.chain(*turn)).layout
    fsdp = layout.fsdp
    if fsdp is None:
        return _over_tensor_ranks(_split_like(flat, shards), layout.tensor)

    # send the shards of all matrices, and put the full local matrices together
    local = turn[fsdp.rank]
    sent = [sum(matrix.weight.numel() for matrix in part) for part in turn]
    sizes = [[m.heights[rank] * m.weight.shape[1] for m in local] for rank in range(fsdp.n)]
    received = [sum(part) for part in sizes]
    shards_by_rank = _all_to_all(flat, sent, received, fsdp.group).split(received)
    pieces = list[Tensor]()
    for rank_shards, size in zip(shards_by_rank, sizes, strict=True):
        pieces += rank_shards.split(size)
    full = [
        torch.cat(pieces[k :: len(local)]).view(-1, matrix.weight.shape[1])
        for k, matrix in enumerate(local)
    ]
    done = _over_tensor_ranks(full, layout.tensor)

    # send the rows back to their ranks
    rows = [update.split(m.heights) for update, m in zip(done, local, strict=True)]
    returned = [part[rank].flatten() for rank in range(fsdp.n) for part in rows]
    parts = _all_to_all(torch.cat([flat[:0], *returned]), received, sent, fsdp.group)
    return _split_like(parts, shards)


def _over_tensor_ranks(parts: list[Tensor], across: ShardAxis | None) -> list[Tensor]:
    """Orthogonalize matrices of which each tensor rank has a part; each rank computes some.

    Args:
        parts: this rank's parts. Those of one matrix have the same size on all tensor ranks.
        across: the tensor ranks; None: the matrices are full.
    """
    if across is None:
        return _orthogonal_by_shape(parts)
    if not parts:
        return []

    # send each tensor rank the parts of its matrices, and put these matrices together
    order = [k for rank in range(across.n) for k in range(rank, len(parts), across.n)]
    sent = [sum(part.numel() for part in parts[rank :: across.n]) for rank in range(across.n)]
    local = parts[across.rank :: across.n]
    received = [sent[across.rank]] * across.n
    flat = torch.cat([parts[k].flatten() for k in order])
    by_rank = _all_to_all(flat, sent, received, across.group).split(received)
    pieces = [_split_like(rank_parts, local) for rank_parts in by_rank]
    full = [torch.cat(matrix, across.dim) for matrix in zip(*pieces, strict=True)]

    # send the parts back
    done = [update.chunk(across.n, across.dim) for update in _orthogonal_by_shape(full)]
    returned = [chunks[rank].flatten() for rank in range(across.n) for chunks in done]
    exchanged = _all_to_all(torch.cat([flat[:0], *returned]), received, sent, across.group)
    updates = dict(zip(order, _split_like(exchanged, [parts[k] for k in order]), strict=True))
    return [updates[k] for k in range(len(parts))]


def _all_to_all(
    flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=group)
    return result


def _split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Split a flat tensor into views with the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _orthogonal_by_shape(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalize full matrices, successive ones of the same shape at once."""
    updates = list[Tensor]()
    for _, alike in itertools.groupby(matrices, key=lambda matrix: matrix.shape):
        updates += orthogonal(torch.stack([*alike])).unbind()
    return updates


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices U S V^T to approximately U V^T; singular values are about 0.7 to 1.2.

    Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon) in the matrices' dtype. In
    bf16 the operations are those of torch.optim.Muon, which supports no other dtype, no shards and
    no `found_inf`, and has no batched matmuls.

    Args:
        matrices: (n, rows, columns).
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    # the spectral norm is at most the Frobenius norm
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x


def _unless(
    skip: Tensor | None, value: float, skipped: float, dtype: torch.dtype
) -> float | Tensor:
    """Return `value`, or `skipped` on the device if the step is cancelled."""
    return value if skip is None else torch.where(skip, skipped, value).to(dtype)
