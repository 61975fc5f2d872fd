"""Cross-entropy and divergence from a teacher, without materializing all logits of the student.

Entry point: `linear_distillation`, used by the model's `distillation`. The teacher is known by its
k most probable next tokens, the set S, at each token (`TeacherTokens`). With the temperature t, the
teacher's distribution is q = softmax(log p / t) over S: other tokens are left out, and q is
renormalized, as in torchtune and axolotl. The student's logits are y. The divergences of a labeled
token are multiplied by t^2 (Hinton et al., 2015, arXiv 1503.02531, section 2), which keeps their
gradients on the scale of the cross-entropy's at any temperature:

- forward: KL(q || s) with s = softmax(y / t) over the full vocabulary. Its gradient also takes
  probability from tokens outside S.
- reverse: KL(s || q) with s = softmax(y / t) over S. Outside S, q is unknown, and a student that
  is not renormalized would be drawn to a probability of 1 / e for S.

With k = V both are exact. A `HeadPass` computes the logits of one chunk of tokens at a time, and
adds the chunk's part to the gradients. PyTorch operations compute everything between its matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmfoundry.ops.devices import kind_of
from llmfoundry.ops.loss import (
    HeadOptions,
    HeadPass,
    VocabularyShard,
    cap,
    cap_in_place,
    labelled_places,
    product_dtype,
    save_gradients,
    saved_gradients,
)
from llmfoundry.ops.packed_layout import IGNORE, TeacherTokens


@dataclass(frozen=True)
class DistillationWeights:
    """Weights of the summands of the loss.

    Attributes:
        cross_entropy: factor on the cross-entropy.
        forward: factor on the forward divergence.
        reverse: factor on the reverse divergence.
        temperature: t, divides the teacher's and the student's logits.
    """

    cross_entropy: float
    forward: float
    reverse: float
    temperature: float = 1.0


class DistillationLosses(NamedTuple):
    """Sums over all labeled tokens, each () in fp32 or float64. Only `total` has a gradient.

    Attributes:
        total: weighted sum of the losses, with the z-loss.
        cross_entropy: cross-entropy in nats, without its factor.
        divergence: forward and reverse divergence, each with its share of both factors.
        z_loss: z-loss, as in `linear_losses`.
    """

    total: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    z_loss: Tensor


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherTokens,
    by: DistillationWeights,
    *,
    weights: Tensor | None = None,
    z_loss_weight: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> DistillationLosses:
    """Return the losses of a student's hidden states.

    Args:
        hidden: (..., D).
        weight: (V, D), the output head.
        labels: (...), int64; tokens with IGNORE are not in the loss.
        teacher: the teacher's tokens, (..., k).
        by: weights of the summands.
        weights: (...), loss weight of each token; None: 1.
        z_loss_weight: as in `linear_losses`, as are the settings below.
        scale: factor on the logits.
        softcap: cap of the logits.
        chunk: tokens whose logits are in memory at a time.
        shard: this rank's rows of the head.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    teacher = teacher.map(lambda x: x.flatten(0, -2))
    weights = None if weights is None else weights.flatten()
    labeled = labelled_places(labels)
    if labeled is not None:
        hidden, labels = hidden[labeled], labels[labeled]
        teacher = teacher.map(lambda x: x[labeled])
        weights = None if weights is None else weights[labeled]
    options = HeadOptions(product_dtype(hidden), scale, softcap, chunk, shard, z_loss_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _LinearDistillation.apply(
            hidden, weight, labels, teacher.ids, teacher.log_probs, weights, by, options
        )
    return DistillationLosses(*losses)


class _LinearDistillation(torch.autograd.Function):
    """Losses whose forward pass also computes the gradients of their sum, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_ids: Tensor,
        teacher_log_probs: Tensor,
        weights: Tensor | None,
        by: DistillationWeights,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = HeadPass(hidden, weight, labels, options, wants=ctx.needs_input_grad[:2])
        sums = hidden.new_zeros(3, dtype=run.wide)
        for part in run.parts():
            keep = (labels[part] != IGNORE)[:, None]
            factor = keep.to(run.wide) if weights is None else keep * weights[part, None]
            chunk = _Chunk(labels[part], teacher_ids[part].long(), keep, factor)
            log_probs = teacher_log_probs[part].to(run.wide)
            losses, grad = _chunk_losses(run.logits(part), chunk, log_probs, by, options, run.wants)
            sums += (losses * factor).sum(0)
            if grad is not None:
                run.add_gradients(part, grad)
        cross_entropy, divergence, z_loss = sums.unbind()
        save_gradients(ctx, run, weight.dtype, options.scale)
        ctx.mark_non_differentiable(cross_entropy, divergence, z_loss)
        ctx.set_materialize_grads(False)
        total = by.cross_entropy * cross_entropy + divergence + z_loss
        return total, cross_entropy, divergence, z_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *saved_gradients(ctx, grads[0]), *[None] * 6


class _Chunk(NamedTuple):
    """Targets of n tokens.

    Attributes:
        labels: (n,).
        ids: (n, k), the teacher's tokens S.
        keep: (n, 1) bool, whether a token has a label.
        factor: (n, 1), loss weight of each token; 0 without a label.
    """

    labels: Tensor
    ids: Tensor
    keep: Tensor
    factor: Tensor


def _chunk_losses(
    logits: Tensor,
    chunk: _Chunk,
    teacher_log_probs: Tensor,
    by: DistillationWeights,
    options: HeadOptions,
    wants: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return cross-entropy, divergence and z-loss (n, 3), and the gradient of the logits (n, V).

    `logits` (n, V) are uncapped and overwritten. The gradient includes the loss weights.
    """
    slope = cap_in_place(logits, options.scale, options.softcap)
    temperature = by.temperature

    # logits of the label (column 0) and of the teacher's tokens, if this rank has them
    columns = torch.cat([chunk.labels[:, None], chunk.ids], 1)  # (n, 1 + k)
    if options.shard is not None:
        columns = columns - options.shard.first
    mine = chunk.keep & (columns >= 0) & (columns < logits.shape[1])
    columns = torch.where(mine, columns, 0)
    at_columns = torch.where(mine, logits.gather(1, columns), 0)

    # softmax at both temperatures, and the log-sum-exps of the full vocabulary
    tempered = None if temperature == 1 or not by.forward else logits / temperature
    shares, log_sum = _softmax(logits)
    log_sums = log_sum
    if tempered is not None:
        tempered, tempered_log_sum = _softmax(tempered)
        log_sums = torch.cat([log_sum, tempered_log_sum], 1)
    if options.shard is not None:
        local_log_sums = log_sums
        log_sums, at_columns = options.shard.meet(log_sums, at_columns)
        to_full = (local_log_sums - log_sums).exp()
        shares.mul_(to_full[:, :1])
        if tempered is not None:
            tempered.mul_(to_full[:, 1:])
    log_sum, tempered_log_sum = log_sums[:, :1], log_sums[:, -1:]

    # losses
    student = at_columns[:, 1:] / temperature
    log_q = torch.log_softmax(teacher_log_probs / temperature, -1)  # (n, k)
    divergence, grad_at_ids = _divergence(student, tempered_log_sum, log_q, by)
    losses = [log_sum - at_columns[:, :1], divergence, options.z_weight * log_sum.square()]
    kept = torch.where(chunk.keep, torch.cat(losses, 1), 0)
    if not wants:
        return kept, None

    # gradient: summands at all tokens, then those at the label and at the teacher's tokens
    of_shares = by.cross_entropy + 2 * options.z_weight * log_sum
    if by.forward and tempered is None:
        of_shares = of_shares + by.forward
    grad = shares.mul_(of_shares)
    if tempered is not None:
        grad.add_(tempered, alpha=by.forward * temperature)
    at_label = torch.full_like(grad_at_ids[:, :1], -by.cross_entropy)
    at = torch.where(mine, torch.cat([at_label, grad_at_ids], 1), 0)
    grad.scatter_add_(1, columns, at)
    if slope is not None:
        grad.mul_(slope)
    return kept, grad.mul_(chunk.factor)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax (n, V), in place of the logits on a CPU, and log-sum-exp (n, 1)."""
    peak = logits.amax(-1, keepdim=True)
    on_cpu = kind_of(logits.device) == "cpu"
    shares = torch.softmax(logits, -1, out=logits if on_cpu else None)
    return shares, peak - shares.amax(-1, keepdim=True).log()


def _divergence(
    student: Tensor, log_sum: Tensor, log_q: Tensor, by: DistillationWeights
) -> tuple[Tensor, Tensor]:
    """Return the weighted divergence (n, 1), and its gradient at the teacher's tokens (n, k).

    The gradient is that of the logits before division by the temperature. The part of the forward
    divergence that is proportional to the student's probabilities is left to the caller.

    Args:
        student: (n, k), logits of the teacher's tokens divided by the temperature.
        log_sum: (n, 1), log-sum-exp over the vocabulary of the logits divided by the temperature.
        log_q: (n, k), the teacher's log-probabilities, renormalized.
        by: weights and temperature.
    """
    t, q = by.temperature, log_q.exp()
    divergence, grad = torch.zeros_like(log_sum), torch.zeros_like(student)
    if by.forward:
        forward = (q * (log_q - student + log_sum)).sum(-1, keepdim=True)
        divergence = divergence + by.forward * t**2 * forward
        grad = grad - by.forward * t * q
    if by.reverse:
        log_s = torch.log_softmax(student, -1)
        ratio, s = log_s - log_q, log_s.exp()
        reverse = (s * ratio).sum(-1, keepdim=True)
        divergence = divergence + by.reverse * t**2 * reverse
        grad = grad + by.reverse * t * s * (ratio - reverse)
    return divergence, grad


def logit_distillation(
    logits: Tensor,
    labels: Tensor,
    teacher: TeacherTokens,
    by: DistillationWeights,
    *,
    weights: Tensor | None = None,
    z_loss_weight: float = 0.0,
) -> DistillationLosses:
    """Return the losses of a student's logits (..., V), by autograd; for heads of other classes."""
    t, keep, ids = by.temperature, labels != IGNORE, teacher.ids.long()
    factor = keep.to(logits.dtype) if weights is None else keep * weights
    log_q = torch.log_softmax(teacher.log_probs.to(logits.dtype) / t, -1)
    log_s = torch.log_softmax(logits / t, -1).gather(-1, ids)
    log_r = torch.log_softmax(logits.gather(-1, ids) / t, -1)
    forward = (log_q.exp() * (log_q - log_s)).sum(-1)
    reverse = (log_r.exp() * (log_r - log_q)).sum(-1)
    divergence = (factor * t**2 * (by.forward * forward + by.reverse * reverse)).sum()
    log_sum = logits.logsumexp(-1)
    at_label = logits.gather(-1, torch.where(keep, labels, 0)[..., None])[..., 0]
    cross_entropy = (factor * (log_sum - at_label)).sum()
    z_loss = z_loss_weight * (factor * log_sum.square()).sum()
    total = by.cross_entropy * cross_entropy + divergence + z_loss
    parts = (value.detach() for value in (cross_entropy, divergence, z_loss))
    return DistillationLosses(total, *parts)


def reference_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherTokens,
    by: DistillationWeights,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    **settings: Any,
) -> DistillationLosses:
    """Return `linear_distillation` computed with all logits at once, as a reference for tests."""
    logits = cap(hidden @ weight.T, scale, softcap)
    return logit_distillation(logits, labels, teacher, by, **settings)
