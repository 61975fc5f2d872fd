"""Metrics on held-out data: loss, perplexity, bits per byte, and accuracy over preference pairs.

Entry points, called by `builders/evaluation.py`: `validate`, and `validate_answers` for preference
data. The idea: each rank sums over its sequences, and metrics are ratios of the sums over all
ranks. They therefore do not depend on the batch size or the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.train.distillation import Distillation
from llmfoundry.train.objective import Look
from llmfoundry.train.preference_loss import (
    KTO,
    AnswerMeasures,
    Preference,
    answer_log_probs,
    baseline_of,
    is_pair,
    pair_accuracy,
    with_reference,
)


@torch.no_grad()
def validate(
    root: Root,
    batches: Iterable[Batch],
    token_bytes: Tensor,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    data_group: dist.ProcessGroup | None = None,
    distillation: Distillation | None = None,
) -> dict[str, float]:
    """Return cross-entropy, perplexity and bits per byte over the batches of all ranks.

    Bits per byte is total nats / ln 2 / bytes of text. The end-of-text token has a loss and no
    bytes. Bits per byte is comparable between tokenizers, and with compressors such as gzip.

    Args:
        root: the model. Every rank must pass the same number of batches.
        batches: this rank's part of the held-out sequences.
        token_bytes: (V,) UTF-8 bytes of each token, on `device`.
        device: device of the computation.
        autocast: returns the context of the forward pass.
        data_group: ranks with the other parts; None: all ranks.
        distillation: the recipe's objective with a teacher, whose divergence is measured, too.
    """
    sums = torch.zeros(5, device=device, dtype=torch.float64)  # nats, tokens, bytes; of a teacher
    for batch in batches:
        batch = batch.to(device)
        labels = batch.labels
        taught = distillation is not None and batch.teacher is not None

        def loss(model: Decoder, hidden: Tensor, batch: Batch = batch) -> Tensor:
            if distillation is not None and batch.teacher is not None:
                return distillation.sums(model, hidden, replace(batch, weights=None))
            nats = model.loss(hidden, batch.labels)
            return torch.stack([nats, torch.zeros_like(nats)])

        with autocast():
            nats, divergence = root(batch.tokens, batch.layout, loss).double().unbind()
        keep = labels != IGNORE
        length, n_tokens = token_bytes[labels[keep]].sum(), keep.sum().double()
        sums += torch.stack([nats, n_tokens, length.double(), divergence, n_tokens * taught])
    if dist.is_initialized():
        dist.all_reduce(sums, group=data_group)
    *language, divergence, n_taught = sums.tolist()
    metrics = _language_metrics(*language)
    return metrics | ({"loss/eval/kl": divergence / n_taught} if n_taught else {})


def _language_metrics(nats: float, tokens: float, length: float) -> dict[str, float]:
    """Return the metrics from summed nats, tokens and UTF-8 bytes; empty without tokens."""
    if not tokens:
        return {}
    mean = nats / tokens
    return {
        "metrics/eval/LanguageCrossEntropy": mean,
        "metrics/eval/LanguagePerplexity": math.exp(min(mean, 700)),
        "metrics/eval/bits_per_byte": nats / math.log(2) / max(length, 1),
    }


Asked = Callable[[Batch], Callable[[Decoder, Tensor], Tensor]]


@torch.no_grad()
def validate_answers(
    root: Root,
    batches: Iterable[Batch],
    token_bytes: Tensor,
    objective: Preference,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    data_group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Return the objective's loss and metrics, accuracy over pairs, and loss of chosen answers.

    Accuracies count a tie as one half. If the objective needs a reference and there is none, as
    when a checkpoint is evaluated alone, there are no rewards.

    Args:
        root: the model, in evaluation mode. Every rank must pass the same number of batches.
        batches: this rank's part of the held-out sequences.
        token_bytes: (V,) UTF-8 bytes of each token, on `device`.
        objective: the recipe's objective.
        device: device of the computation.
        autocast: returns the context of a forward pass.
        data_group: ranks with the other parts; None: all ranks.
    """

    def look(batch: Batch, finish: Asked) -> Tensor:
        with autocast():
            return root(batch.tokens, batch.layout, finish(batch))

    measured = [_measure(batch.to(device), token_bytes, objective, look) for batch in batches]
    if not measured:
        return {}
    return _metrics(_gathered(measured, data_group), objective)


@dataclass(frozen=True)
class _Answers:
    """Measurements of the documents of B sequences with D documents each, (B, D) float64."""

    side: Tensor
    log_probs: Tensor
    tokens: Tensor
    length: Tensor
    """UTF-8 bytes."""
    reference: Tensor
    """Log-probabilities of the reference model; NaN: unknown."""
    moved: Tensor
    """Log-ratios of prompts with answers to other prompts."""
    others: Tensor
    """Whether `moved` is defined."""


def _measure(batch: Batch, token_bytes: Tensor, objective: Preference, look: Look) -> Tensor:
    """Return (B, D, 7) float64, the fields of `_Answers` for a batch."""
    # policy and reference
    batch = with_reference(batch, look, objective.switched_off)
    answers, layout = batch.answers, batch.layout
    assert answers is not None and layout is not None, "the recipe asks for preference rows"
    log_probs = look(batch, answer_log_probs)

    # labeled tokens and their bytes, summed by document
    is_labeled = batch.labels != IGNORE
    lengths = torch.where(is_labeled, token_bytes[batch.labels.clamp(min=0)], 0)
    empty = log_probs.new_zeros(answers.side.shape, dtype=torch.float64)
    documents = layout.documents.long()
    tokens = empty.scatter_add(1, documents, is_labeled.double())
    length = empty.scatter_add(1, documents, lengths.double())

    # reference, and mismatched answers for KTO
    unknown = torch.full_like(empty, math.nan)
    reference = unknown if answers.reference is None else answers.reference
    moved, others = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    if isinstance(objective, KTO) and objective.knows_reference(batch):
        moved, others = objective.moved(batch, look)
    values = (answers.side, log_probs, tokens, length, reference, moved, others)
    return torch.stack([value.double() for value in values], -1)


def _gathered(measured: list[Tensor], group: dist.ProcessGroup | None) -> _Answers:
    """Concatenate the sequences of all ranks of a group."""
    # pad to the largest number of documents per sequence on any rank
    width = torch.tensor(max(values.shape[1] for values in measured), device=measured[0].device)
    if dist.is_initialized():
        dist.all_reduce(width, dist.ReduceOp.MAX, group=group)
    paddings = [int(width) - values.shape[1] for values in measured]
    padded = [
        torch.nn.functional.pad(values, (0, 0, 0, padding))
        for values, padding in zip(measured, paddings, strict=True)
    ]
    local = torch.cat(padded)
    if not dist.is_initialized():
        return _Answers(*local.unbind(-1))
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local.contiguous(), group=group)
    return _Answers(*torch.cat(gathered).unbind(-1))


def _metrics(found: _Answers, objective: Preference) -> dict[str, float]:
    """Return the metrics of all held-out answers; empty without answers."""
    better = found.side > 0
    nats, tokens, length = (
        sums[better].sum().item() for sums in (-found.log_probs, found.tokens, found.length)
    )
    return _language_metrics(nats, tokens, length) | _told_apart(found) | _rewards(found, objective)


def _told_apart(found: _Answers) -> dict[str, float]:
    """Return the accuracies over pairs, by total log-probability and by its mean over tokens."""
    pair = is_pair(found.side)
    if not pair.any():
        return {}
    means = found.log_probs / found.tokens.clamp(min=1)
    margins = {
        "metrics/eval/PairAccuracy": found.log_probs[:, :-1] - found.log_probs[:, 1:],
        "metrics/eval/PairAccuracyPerToken": means[:, :-1] - means[:, 1:],
    }
    return {name: pair_accuracy(m[pair]).mean().item() for name, m in margins.items()}


def _rewards(found: _Answers, objective: Preference) -> dict[str, float]:
    """Return the objective's loss and metrics; empty without a reference that it needs."""
    if objective.has_reference and found.reference[found.side != 0].isnan().any():
        return {}
    baseline = baseline_of(found.moved.sum(), found.others.sum())
    compared = AnswerMeasures(
        found.side.long(),
        found.log_probs,
        found.tokens,
        found.reference.nan_to_num(),
        baseline.expand(len(found.side)),
    )
    total, reported = objective.sums(compared)
    sums = {name: value.item() for name, value in reported.items()}
    metrics = objective.metrics(sums, "eval")
    count = sums.get("pairs", sums.get("answers", 0))
    if count:
        metrics["loss/eval/total"] = total.item() / count
    if isinstance(objective, KTO):
        ratio = compared.ratio
        share = _share_above(ratio[compared.side > 0], ratio[compared.side < 0])
        metrics |= {} if share is None else {"rewards/eval/accuracies": share}
    return metrics


def _share_above(better: Tensor, worse: Tensor) -> float | None:
    """Return the area under the ROC curve; None if one side is empty.

    This is the fraction of all pairs of a better (n,) and a worse (m,) value in which the better
    value is larger. A tie counts as one half.
    """
    if not len(better) or not len(worse):
        return None
    worse = worse.sort().values
    below = torch.searchsorted(worse, better) + torch.searchsorted(worse, better, right=True)
    return below.double().mean().item() / 2 / len(worse)
