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

CHUNK_LOGITS = 1 << 22  # logits held at a time: 16 MiB in fp32, which a CPU's cache half holds
MIN_CHUNK = 256  # tokens; below it a matrix product no longer fills the machine


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log softmax(hidden @ weight.T)[label] over labelled tokens, an fp32 scalar.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE counts nothing.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    chunk = max(MIN_CHUNK, CHUNK_LOGITS // weight.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, dtype, chunk)


def reference_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same sum with all logits at once, in the inputs' dtype: what tests compare with."""
    logits = hidden.flatten(0, -2) @ weight.T
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked forward that leaves gradients of the sum behind for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, chunk: int
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = hidden.new_zeros((), dtype=wide)
        low_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            low_hidden, target = hidden[part].to(dtype), labels[part]
            logits = (low_hidden @ low_weight.T).to(wide)
            keep = target != IGNORE
            index = torch.where(keep, target, 0)[:, None]
            log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            losses = (log_norm - logits.gather(1, index)).squeeze(1)
            total += torch.where(keep, losses, 0.0).sum()
            if not (wants_hidden or wants_weight):
                continue
            grad = logits.sub_(log_norm).exp_()  # softmax, in the logits' memory
            grad.scatter_(1, index, grad.gather(1, index) - 1)  # one place a row: deterministic
            low_grad = grad.mul_(keep[:, None]).to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = low_grad @ low_weight
            if grad_weight is not None:
                if dtype == wide:
                    grad_weight.addmm_(low_grad.T, low_hidden)
                else:
                    grad_weight += low_grad.T @ low_hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None
