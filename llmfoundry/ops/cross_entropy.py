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
from llmfoundry.ops.logits import HeadPass, VocabularyShard, cap, labelled_places, product_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Sum of -log softmax(cap(hidden @ weight.T))[label] over labelled tokens, an fp32 scalar.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE counts nothing.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        weights: (...), what each token's summand is multiplied by; None: 1.
        chunk: tokens whose logits are held at a time; None: as many as suit the device.
        shard: which rows of the head `weight` is; every process has the same tokens, gets the same
            result, and a summand of the gradient of hidden states. None: all.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    weights = None if weights is None else weights.flatten()
    kept = labelled_places(labels)
    if kept is not None:
        hidden, labels = hidden[kept], labels[kept]
        weights = None if weights is None else weights[kept]
    dtype = product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(
            hidden, weight, labels, dtype, scale, softcap, weights, chunk, shard
        )


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The same sum with all logits at once, in the inputs' dtype: what tests compare with."""
    logits = cap(hidden.flatten(0, -2) @ weight.T, scale, softcap)
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
    return (nats if weights is None else nats * weights.flatten()).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked forward that leaves gradients of the sum behind for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
        chunk: int | None,
        shard: VocabularyShard | None,
    ) -> Tensor:
        wants = ctx.needs_input_grad[:2]
        run = HeadPass(
            hidden,
            weight,
            labels,
            dtype=dtype,
            scale=scale,
            softcap=softcap,
            wants=wants,
            chunk=chunk,
            shard=shard,
        )
        total = hidden.new_zeros((), dtype=run.wide)
        for part in run.parts():
            nats = run.nats(part)
            factor = None if weights is None else weights[part, None]
            total += (nats if factor is None else nats * factor).sum()
            if any(wants):
                run.add_gradients(part, factor)
        ctx.save_for_backward(run.grad_hidden, run.grad_weight)
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
        return grad_hidden, grad_weight, None, None, None, None, None, None, None
