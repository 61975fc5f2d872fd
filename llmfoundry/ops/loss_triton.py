"""The softmax, loss and gradient of a chunk of logits as one Triton kernel, in place, for CUDA.

`loss.py` calls it and has the same computation in PyTorch operations. A program processes one token
and reads its logits twice: for the log-sum-exp, then for the gradient, which it writes over them.
All arithmetic is in fp32, and no sum needs atomics, so that every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmfoundry.ops.packed_layout import IGNORE

WIDTH = 4096  # logits of a token that a program loads at a time
WARPS = 16  # 8 logits per thread: two loads and one store of 16 bytes each


@triton.jit
def _capped(
    logits: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return scaled and capped fp32 logits, and the cap's derivative 1 - tanh^2."""
    logits = scale * logits
    if CAPPED:  # tanh u is 2 sigmoid(2 u) - 1
        share = tl.sigmoid(2.0 * logits / softcap)
        return softcap * (2.0 * share - 1.0), 4.0 * share * (1.0 - share)
    return logits, logits


@triton.jit
def _exponentials(
    logits: tl.tensor,
    V: tl.tensor,
    keep: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CAPPED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the maximum m of a row of logits, and the sum of exp(x - m), in one pass."""
    # maximum and sum in each lane, with one exponential per logit
    peak = tl.full([WIDTH], -3.4028234663852886e38, dtype=tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, V, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = (column < V) & keep
        x = tl.load(logits + column, mask=mask, other=0.0).to(tl.float32)
        x, _ = _capped(x, scale, softcap, CAPPED)
        x = tl.where(mask, x, -float("inf"))  # masked columns; the cap would make them finite
        gap = x - peak
        smaller = tl.exp(-tl.abs(gap))
        total = tl.where(gap > 0.0, total * smaller + 1.0, total + smaller)
        peak = tl.where(gap > 0.0, x, peak)
    top = tl.max(peak, axis=0)
    return top, tl.sum(total * tl.exp(peak - top), axis=0)


@triton.jit
def logit_kernel(
    logits: tl.tensor,
    grads: tl.tensor,
    labels: tl.tensor,
    factors: tl.tensor,
    log_sums: tl.tensor,
    targets: tl.tensor,
    V: tl.tensor,
    first: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    z_weight: tl.tensor,
    IGNORED: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARDED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Process row i of logits (n, V), which `grads` (n, V or 2 V) is another view of.

    STATISTICS: write the log-sum-exp and the label's logit to `log_sums` and `targets`.
    GRADIENT: write the gradient to the first V columns of `grads`; without STATISTICS, `log_sums`
    has the log-sum-exp over the vocabulary of all ranks.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    keep = label != IGNORED
    target = (label - first).to(tl.int32)

    if STATISTICS:
        top, rest = _exponentials(logits, V, keep, scale, softcap, CAPPED, WIDTH)
        log_sum = top + tl.log(rest)

        # the label's logit: 0 if another rank has it, NaN for a label outside the vocabulary
        mine = keep & (target >= 0) & (target < V)
        missing = 0.0 if SHARDED else float("nan")
        at_target = tl.load(logits + target, mask=mine, other=0.0).to(tl.float32)
        at_target, _ = _capped(at_target, scale, softcap, CAPPED)
        at_target = tl.where(mine, at_target, missing)
        tl.store(log_sums + row, tl.where(keep, log_sum, 0.0))
        tl.store(targets + row, tl.where(keep, at_target, 0.0))
    else:
        log_sum = tl.load(log_sums + row)
        top, rest = log_sum, 1.0

    if GRADIENT:
        # 16-bit gradients fill the first half of the row: every store overwrites logits of this
        # tile or of earlier tiles, so that all threads must have loaded the tile
        wide: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth
        narrow: tl.constexpr = grads.dtype.element_ty.primitive_bitwidth
        grads += row * V * (wide // narrow)
        factor = 1.0
        if WEIGHTED:
            factor = tl.load(factors + row).to(tl.float32)
        of_share = factor * (1.0 + 2.0 * z_weight * log_sum) / rest  # the derivative of log_sum^2
        for start in range(0, V, WIDTH):
            column = start + tl.arange(0, WIDTH)
            mask = column < V
            x = tl.load(logits + column, mask=mask & keep, other=0.0).to(tl.float32)
            tl.debug_barrier()
            x, slope = _capped(x, scale, softcap, CAPPED)
            grad = tl.exp(x - top) * of_share
            grad = tl.where(column == target, grad - factor, grad)
            if CAPPED:
                grad *= slope
            tl.store(grads + column, tl.where(keep, grad, 0.0), mask=mask)


def logit_pass(
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    log_sum: Tensor | None,
    first: int | None,
    scale: float,
    softcap: float | None,
    z_weight: float,
    grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """`loss.logit_pass` on CUDA."""
    n, vocabulary = logits.shape
    log_sums, targets = logits.new_empty(n, 1), logits.new_empty(n, 1)
    if n == 0:
        return log_sums, targets
    arguments = (
        logits,
        logits if grad_dtype is None else logits.view(grad_dtype),
        labels.contiguous(),  # expanded values have a stride of 0
        logits if factor is None else factor.contiguous(),
        log_sums if log_sum is None else log_sum.contiguous(),
        targets,
        vocabulary,
        first or 0,
        scale,
        softcap or 1.0,
        z_weight,
    )
    flags = {
        "IGNORED": IGNORE,
        "STATISTICS": log_sum is None,
        "GRADIENT": grad_dtype is not None,
        "WEIGHTED": factor is not None,
        "CAPPED": softcap is not None,
        "SHARDED": first is not None,
        "WIDTH": WIDTH,
    }
    with torch.cuda.device_of(logits):
        logit_kernel[(n,)](*arguments, **flags, num_warps=WARPS)
    return log_sums, targets
