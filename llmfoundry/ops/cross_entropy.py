"""Output head and cross-entropy in one step, without the whole logits in memory.

The training loss and the validation loss call `linear_cross_entropy`. The idea: a chunk of tokens
at a time, and where gradients are wanted they are computed in the forward pass, while the chunk's
logits exist; the backward pass only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.batch import IGNORE
from llmfoundry.ops.matmul import is_compiled, mm

CHUNK_LOGITS = 1 << 22  # logits held at a time: 16 MiB in fp32, which a CPU's cache half holds
PART = 1 << 18  # values added at a time on a CPU
MIN_CHUNK = 256  # tokens; below it a matrix product no longer fills the machine


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits times scale and then, with a cap c, c * tanh(logits / c); in fp32 or wider within."""
    if scale == 1 and softcap is None:
        return logits
    wide = scale * (logits if logits.dtype == torch.float64 else logits.float())
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    return wide.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Sum of -log softmax(cap(hidden @ weight.T))[label] over labelled tokens, an fp32 scalar.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE counts nothing.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    chunk = max(MIN_CHUNK, CHUNK_LOGITS // weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, dtype, chunk, scale, softcap)


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The same sum with all logits at once, in the inputs' dtype: what tests compare with."""
    logits = cap(hidden.flatten(0, -2) @ weight.T, scale, softcap)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked forward that leaves gradients of the sum behind for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        chunk: int,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = hidden.new_zeros((), dtype=wide)
        low_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        scratch = _Scratch(min(chunk, len(hidden)), weight, dtype, wide)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            low_hidden, target = hidden[part].to(dtype), labels[part]
            logits = scratch.logits(low_hidden, low_weight)
            slope = _cap_in_place(logits, scale, softcap)
            keep = (target != IGNORE)[:, None]
            index = torch.where(keep, target[:, None], 0)
            at_target, peak = logits.gather(1, index), logits.amax(-1, keepdim=True)
            # in the logits' memory; no other device promises that
            shares = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
            # log of the sum of exp(logits), by the largest share: that one is never zero
            log_sum = peak - shares.amax(-1, keepdim=True).log()
            total += torch.where(keep, log_sum - at_target, 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            # softmax - 1 at the target; one place a row: deterministic
            shares.scatter_(1, index, shares.gather(1, index) - 1)
            if slope is not None:
                shares.mul_(slope)
            low_grad = scratch.narrow(shares)
            # what has no label is left out where rows are D wide, not V
            if grad_hidden is not None:
                grad_hidden[part] = mm(low_grad, low_weight) * keep
            if grad_weight is not None:
                scratch.add_product(grad_weight, low_grad, low_hidden * keep)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype, ctx.scale = weight.dtype, scale
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0] * ctx.scale  # the logits' own factor, at no cost for each of them
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:  # in bf16 the scale itself would be off by up to 0.4 %
            grad_hidden = (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


class _Scratch:
    """Memory that all chunks use: fresh memory costs a CPU more than what is written there.

    Attributes:
        wide: (chunk, V), logits, in fp32 or wider.
        low: the same in the dtype of the matrix products; `wide` itself where they are one.
    """

    def __init__(self, chunk: int, weight: Tensor, dtype: torch.dtype, wide: torch.dtype) -> None:
        self.wide = weight.new_empty(chunk, weight.shape[0], dtype=wide)
        self.low = self.wide if dtype == wide else torch.empty_like(self.wide, dtype=dtype)
        self._product: Tensor | None = None

    def logits(self, low_hidden: Tensor, low_weight: Tensor) -> Tensor:
        """(n, V) of n tokens."""
        n = len(low_hidden)
        mm(low_hidden, low_weight.T, out=self.low[:n])
        return self.wide[:n] if self.low is self.wide else self.wide[:n].copy_(self.low[:n])

    def narrow(self, logits: Tensor) -> Tensor:
        """What `logits` gave back, (n, V), now in the dtype of the products."""
        return logits if self.low is self.wide else self.low[: len(logits)].copy_(logits)

    def add_product(self, total: Tensor, low_grad: Tensor, low_hidden: Tensor) -> None:
        """Add low_grad.T @ low_hidden to total (V, D), which is wide."""
        if self.low is self.wide and (total.is_cuda or not is_compiled(total.dtype)):
            total.addmm_(low_grad.T, low_hidden)
            return
        if self._product is None:
            self._product = torch.empty_like(total, dtype=low_grad.dtype)
        mm(low_grad.T, low_hidden, out=self._product)
        # a CPU casts what it adds into fresh memory: by parts, small enough to be used again
        rows = len(total) if total.is_cuda else max(1, PART // total.shape[1])
        for mine, part in zip(total.split(rows), self._product.split(rows), strict=True):
            mine += part


def _cap_in_place(logits: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """Scale and cap logits in their memory; the cap's slope, 1 - tanh^2, None without one."""
    if softcap is None:
        if scale != 1:
            logits.mul_(scale)
        return None
    logits.mul_(scale / softcap).tanh_()
    slope = 1 - logits * logits
    logits.mul_(softcap)
    return slope
