"""Output head and log-probability of each label, without the whole logits in memory.

Preference tuning calls `linear_log_probs`: its losses are functions of sums of them, so that what a
token's log-probability counts is known only in the backward pass. The idea: the logits of a chunk
are made, used and forgotten, and made again in the backward pass, which costs a fourth product over
the head and no memory. The twin of `cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmfoundry.ops.batch import IGNORE
from llmfoundry.ops.logits import HeadPass, VocabularyShard, cap, labelled_places, product_dtype


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """(...): log softmax(cap(hidden @ weight.T))[label] of each token, fp32, 0 without a label.

    Matrix products run in autocast's dtype where it is on; softmax and sums in fp32.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; IGNORE: none is asked.
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale; None: no cap.
        chunk: tokens whose logits are held at a time; None: as many as suit the device.
        shard: which rows of the head `weight` is; every process has the same tokens, gets the same
            result, and a summand of the gradient of hidden states. None: all.
    """
    shape, dtype = labels.shape, product_dtype(hidden)
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    kept = labelled_places(labels)
    with torch.autocast(hidden.device.type, enabled=False):
        how = (dtype, scale, softcap, chunk, shard)
        if kept is None:
            return _LinearLogProbs.apply(hidden, weight, labels, *how).view(shape)
        found = _LinearLogProbs.apply(hidden[kept], weight, labels[kept], *how)
        return found.new_zeros(labels.shape).index_put((kept,), found).view(shape)


def reference_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The same with all logits at once, in the inputs' dtype: what tests compare with."""
    log_shares = torch.log_softmax(cap(hidden @ weight.T, scale, softcap), -1)
    keep = labels != IGNORE
    return log_shares.gather(-1, torch.where(keep, labels, 0)[..., None])[..., 0] * keep


class _LinearLogProbs(torch.autograd.Function):
    """Chunked in both passes; nothing but the inputs waits between them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float | None,
        chunk: int | None,
        shard: VocabularyShard | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = {"dtype": dtype, "scale": scale, "softcap": softcap, "chunk": chunk}
        ctx.settings["shard"] = shard
        run = HeadPass(hidden, weight, labels, wants=(False, False), **ctx.settings)
        found = hidden.new_empty(len(hidden), dtype=run.wide)
        for part in run.parts():
            found[part] = -run.nats(part)[:, 0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        run = HeadPass(hidden, weight, labels, wants=ctx.needs_input_grad[:2], **ctx.settings)
        factor = -ctx.settings["scale"] * grad[:, None]
        for part in run.parts():
            run.nats(part)
            run.add_gradients(part, factor[part])
        grad_weight = None if run.grad_weight is None else run.grad_weight.to(weight.dtype)
        return run.grad_hidden, grad_weight, None, None, None, None, None, None
