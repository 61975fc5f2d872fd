"""Muon for the blocks' matrices and AdamW for all else, as one optimizer.

Muon (Jordan et al., 2024) makes the running gradient of a matrix orthogonal, so that a step moves
all of its directions alike. That needs full matrices: where FSDP has sharded them by rows, as many
as there are processes are brought together at a time, each on another process, which computes it
and sends the rows back (all-to-all; no matrix is computed twice among the shards). Tensor ranks,
which have a part of each of these, then exchange theirs in the same way.

What is sent and iterated is in the dtype of the recipe's matrix products. The iteration amplifies
rounding: gradients whose sums differ in their last fp32 bit, as on another layout, give updates
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

# Jordan's quintic: its slope at 0 is as steep as convergence allows, so 5 rounds are enough.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
RMS = 0.2  # of an AdamW update, by Liu et al. (2025): one lr serves both


class Muon(torch.optim.Optimizer):
    """Muon for groups with `orthogonal`, fused AdamW for the others.

    m <- lerp(m, g, 1 - momentum); u = orthogonal(lerp(g, m, momentum));
    p <- p (1 - weight_decay lr) - lr 0.2 sqrt(max(rows, columns)) u, which is torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". While `found_inf` is 1 a step changes nothing, and the host is
    not asked.

    A group's `rows` are the heights of the matrices that each of its parameters stacks; empty: one.
    Each is made orthogonal by itself: fused queries, keys and values are three matrices, as they
    are in Jordan's and Moonlight's runs.

    Args:
        parameters: or groups of them.
        dtype: of the iteration, the same on every process; bf16 is torch.optim.Muon's.
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
        # adds AdamW's own keys to these groups, which both optimizers then hold
        self._adamw = torch.optim.AdamW(others or [{"params": []}], fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        groups = self.param_groups  # loading a state replaces them, and the state
        self._adamw.param_groups = [group for group in groups if not group["orthogonal"]]
        self._adamw.state = self.state
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        for group in groups:
            if group["orthogonal"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        found = None if self.found_inf is None else self.found_inf.bool()
        matrices = [
            matrix
            for parameter in group["params"]
            if parameter.grad is not None
            for matrix in _matrices(parameter, self._momentum(parameter), group["rows"])
        ]
        shrink = _unless(found, 1 - group["lr"] * group["weight_decay"], 1.0)
        for turn in _turns(matrices):
            running = [matrix.advance(group["momentum"], found) for matrix in turn]
            updates = _orthogonal([update.to(self._dtype) for update in running], turn)
            for matrix, update in zip(turn, updates, strict=True):
                lr = group["lr"] * RMS * math.sqrt(max(matrix.shape))
                matrix.weight.mul_(shrink)
                matrix.weight.sub_(update.to(matrix.weight.dtype) * _unless(found, lr, 0.0))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


@dataclass(frozen=True)
class MatrixShard:
    """What this process holds of one matrix.

    Attributes:
        weight: its rows, (r, columns), a view of the parameter; under tensor parallelism of this
            rank's rows or columns.
        grad: their gradient.
        mean: their running gradient.
        heights: how many of its rows each shard has.
        layout: of the parameter.
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

    def advance(self, momentum: float, found: Tensor | None) -> Tensor:
        """Take the gradient into the running one; what is to be made orthogonal (Nesterov's)."""
        grad = self.grad if found is None else self.grad.masked_fill(found, 0.0)
        mean = torch.lerp(self.mean, grad, 1 - momentum)
        self.mean.copy_(mean if found is None else torch.where(found, self.mean, mean))
        return torch.lerp(grad, self.mean, momentum)


def _matrices(parameter: Tensor, mean: Tensor, rows: Iterable[int]) -> Iterator[MatrixShard]:
    """The matrices of `rows` rows that a parameter stacks; of experts those of its part alone."""
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
        held = []  # rows, from and to, of each shard
        for rank in range(1 if fsdp is None else fsdp.n):
            low, high = (0, height) if fsdp is None else fsdp.bounds(height, rank)
            first, last = (min(max(row, low), high) - low for row in (start, start + n))
            held.append((first, last))
        mine = slice(*held[0 if fsdp is None else fsdp.rank])
        weight, grad, running = (part[mine] for part in parts)
        yield MatrixShard(weight, grad, running, [last - first for first, last in held], layout)
        start += n


def _turns(matrices: list[MatrixShard]) -> Iterator[list[MatrixShard]]:
    """As many at a time as there are shards, of like size, so that no process waits for long.

    Those that lie on other processes, as experts may, have turns of their own.
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
    """Matrices of a turn that one shard brings together: one for each of its tensor ranks."""
    return 1 if layout.tensor is None else layout.tensor.n


def _orthogonal(updates: list[Tensor], turn: list[MatrixShard]) -> list[Tensor]:
    """Each update made orthogonal, in its dtype; of a sharded one this process's shard."""
    fsdp, each = turn[0].layout.fsdp, _at_a_shard(turn[0].layout)
    if fsdp is None:
        return [orthogonal(update) for update in updates]
    taken = [slice(rank * each, (rank + 1) * each) for rank in range(fsdp.n)]
    sent = [sum(update.numel() for update in updates[part]) for part in taken]
    mine = turn[taken[fsdp.rank]]
    sizes = [[m.heights[rank] * m.weight.shape[1] for m in mine] for rank in range(fsdp.n)]
    received = [sum(part) for part in sizes]
    flat = torch.cat([update.flatten() for update in updates])
    got = _all_to_all(flat, sent, received, fsdp.group).split(received)
    pieces = [p for part, size in zip(got, sizes, strict=True) for p in part.split(size)]
    whole = [
        torch.cat(pieces[k :: len(mine)]).view(-1, matrix.weight.shape[1])
        for k, matrix in enumerate(mine)
    ]
    done = _over_tensor_ranks(whole, turn[0].layout.tensor)
    rows = [update.split(m.heights) for update, m in zip(done, mine, strict=True)]
    back = [part[rank].flatten() for rank in range(fsdp.n) for part in rows]
    parts = _all_to_all(torch.cat([flat[:0], *back]), received, sent, fsdp.group)
    split = parts.split([update.numel() for update in updates])
    return [part.view_as(update) for part, update in zip(split, updates, strict=True)]


def _over_tensor_ranks(parts: list[Tensor], across: ShardAxis | None) -> list[Tensor]:
    """Matrices made orthogonal of which tensor ranks have parts of one size: each computes one."""
    if across is None:
        return [orthogonal(part) for part in parts]
    if not parts:
        return []
    idle = [0] * (across.n - len(parts))
    sent = [part.numel() for part in parts] + idle
    mine = parts[across.rank] if across.rank < len(parts) else parts[0][:0]
    received = [mine.numel()] * across.n
    flat = torch.cat([part.flatten() for part in parts])
    back = _all_to_all(flat, sent, received, across.group)
    if mine.numel():
        whole = torch.cat([part.view_as(mine) for part in back.split(received)], across.dim)
        back = torch.cat([p.flatten() for p in orthogonal(whole).chunk(across.n, across.dim)])
    split = _all_to_all(back, received, sent, across.group).split(sent)
    return [part.view_as(own) for part, own in zip(split, parts, strict=False)]


def _all_to_all(
    flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=group)
    return result


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T, nearly, of a matrix U S V^T: singular values end between about 0.7 and 1.2.

    Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon) in the matrix's dtype, in
    bf16 operation by operation as in torch.optim.Muon, which cannot be used itself: it has no other
    dtype, and knows neither shards nor `found_inf`.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # the spectral norm is at most the Frobenius norm
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _unless(found: Tensor | None, value: float, otherwise: float) -> float | Tensor:
    """`value`, on the device `otherwise` where a step was found not to be finite."""
    return value if found is None else torch.where(found, otherwise, value)
