"""What is measured on held-out rows: loss, perplexity, bits per byte, accuracy over pairs.

`builders/evaluation.py` calls `validate`, or `validate_answers` for preference rows. The idea: each
process sums over its rows, and ratios are taken of the sums over all of them, so that they are
exact whatever the rows of a batch and the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.train.objective import Look
from llmfoundry.train.preference_loss import (
    KTO,
    Compared,
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
) -> dict[str, float]:
    """Sums over the batches of all that read other rows, then their ratios.

    Bits per byte is total nats / ln 2 / bytes of text; the end-of-text symbol costs nats and has
    no bytes. It compares models of different tokenizers, and with compressors such as gzip.

    Args:
        root: the model; every process must bring the same number of batches.
        batches: this process's share of the held-out rows.
        token_bytes: (V,) UTF-8 bytes of each token, on `device`.
        device: where to compute.
        autocast: gives the context of the forward pass.
        data_group: the processes that have the other shares; None: all processes.
    """
    sums = torch.zeros(3, device=device, dtype=torch.float64)  # nats, tokens, bytes
    for batch in batches:
        batch = batch.to(device)
        labels = batch.labels

        def loss(model: Decoder, hidden: Tensor, labels: Tensor = labels) -> Tensor:
            return model.loss(hidden, labels)

        with autocast():
            nats = root(batch.tokens, batch.layout, loss)
        keep = labels != IGNORE
        length = token_bytes[labels[keep]].sum()
        sums += torch.stack([nats.double(), keep.sum().double(), length.double()])
    if dist.is_initialized():
        dist.all_reduce(sums, group=data_group)
    return _language_metrics(*sums.tolist())


def _language_metrics(nats: float, tokens: float, length: float) -> dict[str, float]:
    """Of all tokens' cross-entropy, their number and their UTF-8 bytes; of no token none."""
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
    """The objective's loss and metrics, accuracy over pairs, the better answers' loss.

    Shares count a tie as a half. Without a reference that the objective needs, such as when a
    checkpoint is measured by itself, there are no rewards.

    Args:
        root: the model, in evaluation mode; every process must bring the same number of batches.
        batches: this process's share of the held-out rows.
        token_bytes: (V,) UTF-8 bytes of each token, on `device`.
        objective: of the recipe.
        device: where to compute.
        autocast: gives the context of a forward pass.
        data_group: the processes that have the other shares; None: all processes.
    """

    def look(batch: Batch, finish: Asked) -> Tensor:
        with autocast():
            return root(batch.tokens, batch.layout, finish(batch))

    found = [_measure(batch.to(device), token_bytes, objective, look) for batch in batches]
    if not found:
        return {}
    return _metrics(_gathered(found, data_group), objective)


@dataclass(frozen=True)
class _Answers:
    """What is known of the documents of some rows, (B, D) each."""

    side: Tensor
    log_probs: Tensor
    tokens: Tensor
    length: Tensor
    """UTF-8 bytes."""
    reference: Tensor
    """NaN where there is none."""
    moved: Tensor
    """Log-ratios of prompts with others' answers."""
    others: Tensor
    """Whether there is one."""


def _measure(batch: Batch, token_bytes: Tensor, objective: Preference, look: Look) -> Tensor:
    """(B, D, 7) float64: `_Answers` of a batch."""
    batch = with_reference(batch, look, objective.switched_off)
    answers, layout = batch.answers, batch.layout
    assert answers is not None and layout is not None, "the recipe asks for preference rows"
    log_probs = look(batch, answer_log_probs)
    learned = batch.labels != IGNORE
    lengths = torch.where(learned, token_bytes[batch.labels.clamp(min=0)], 0)
    empty = log_probs.new_zeros(answers.side.shape, dtype=torch.float64)
    documents = layout.documents.long()
    tokens, length = (empty.scatter_add(1, documents, x.double()) for x in (learned, lengths))
    unknown = torch.full_like(empty, math.nan)
    reference = unknown if answers.reference is None else answers.reference
    moved, others = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    if isinstance(objective, KTO) and objective.knows_reference(batch):
        moved, others = objective.moved(batch, look)
    values = (answers.side, log_probs, tokens, length, reference, moved, others)
    return torch.stack([value.double() for value in values], -1)


def _gathered(found: list[Tensor], group: dist.ProcessGroup | None) -> _Answers:
    """All rows of all processes of a group."""
    width = torch.tensor(max(values.shape[1] for values in found), device=found[0].device)
    if dist.is_initialized():
        dist.all_reduce(width, dist.ReduceOp.MAX, group=group)
    padded = [
        torch.nn.functional.pad(values, (0, 0, 0, int(width) - values.shape[1])) for values in found
    ]
    own = torch.cat(padded)
    if not dist.is_initialized():
        return _Answers(*own.unbind(-1))
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own.contiguous(), group=group)
    return _Answers(*torch.cat(every).unbind(-1))


def _metrics(found: _Answers, objective: Preference) -> dict[str, float]:
    """Of all held-out answers; none where there is no answer."""
    better = found.side > 0
    nats, tokens, length = (
        sums[better].sum().item() for sums in (-found.log_probs, found.tokens, found.length)
    )
    return _language_metrics(nats, tokens, length) | _told_apart(found) | _rewards(found, objective)


def _told_apart(found: _Answers) -> dict[str, float]:
    """Shares of pairs whose chosen answer is likelier, as it is and by its mean over tokens."""
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
    """The objective's own loss and metrics; none without the reference that it needs."""
    if objective.has_reference and found.reference[found.side != 0].isnan().any():
        return {}
    baseline = baseline_of(found.moved.sum(), found.others.sum())
    compared = Compared(
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
    """The share of all couples of a better (n,) and a worse (m,) value that are in this order.

    The area under the ROC curve; a tie counts a half. None where one of them is empty.
    """
    if not len(better) or not len(worse):
        return None
    worse = worse.sort().values
    below = torch.searchsorted(worse, better) + torch.searchsorted(worse, better, right=True)
    return below.double().mean().item() / 2 / len(worse)
