"""Objectives of preference tuning: dpo (sigmoid, ipo, hinge), kto, orpo and simpo.

Entry point: `build_preference`, used by `builders/preference.py`. `train_step` minimizes the
objective, and the evaluation measures it. Every method is a sum over pairs, or over single answers,
of a function of log-probabilities (`AnswerMeasures`), divided by their number in the global batch.
The loss therefore does not depend on microbatches, accumulation or the number of ranks.

"tokens" of an answer are its tokens in the loss; the prompt is not included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.packed_layout import IGNORE, AnswerDocuments, Batch, PackedLayout
from llmfoundry.recipe.preference import ResolvedPreferenceConfig
from llmfoundry.train.objective import Finish, Look, sum_over_processes

Context = Callable[[], AbstractContextManager[None]]
ALMOST_CERTAIN = -1e-6  # upper limit of mean log-probabilities, because their odds would overflow


@dataclass(frozen=True)
class AnswerMeasures:
    """Measures of the answers in packed sequences, (B, D) with one column per document.

    Attributes:
        side: 1 chosen or desirable, -1 rejected or undesirable, 0 no answer.
        log_probs: sum of the log-probabilities of an answer's tokens, fp32.
        tokens: number of an answer's tokens, fp32.
        reference: `log_probs` of the reference model, fp32; None: no reference.
        baseline: (B,) fp32, as in `AnswerDocuments`.
    """

    side: Tensor
    log_probs: Tensor
    tokens: Tensor
    reference: Tensor | None = None
    baseline: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """Log-ratio of policy and reference."""
        assert self.reference is not None, "the method needs a reference"
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability of a token."""
        return self.log_probs / self.tokens.clamp(min=1)


def compare(model: Decoder, hidden: Tensor, batch: Batch) -> AnswerMeasures:
    """Return the measures of a batch's answers from its hidden states (B, T, hidden size)."""
    answers, layout = batch.answers, batch.layout
    token_log_probs = model.log_probs(hidden, batch.labels)  # (B, T)
    if answers is None or layout is None:  # the empty batch of a rank that could not read its own
        zeros = token_log_probs.sum(1, keepdim=True)
        return AnswerMeasures(torch.zeros_like(zeros).long(), zeros, zeros, zeros, zeros[:, 0])

    # sum over the tokens of each document
    documents = layout.documents.long()
    empty = token_log_probs.new_zeros(answers.side.shape)
    is_label = (batch.labels != IGNORE).to(empty.dtype)
    return AnswerMeasures(
        answers.side,
        empty.scatter_add(1, documents, token_log_probs),
        empty.scatter_add(1, documents, is_label),
        answers.reference,
        answers.baseline,
    )


def answer_log_probs(batch: Batch) -> Callable[[Decoder, Tensor], Tensor]:
    """Return a function of model and hidden states that returns the log-probabilities (B, D)."""
    return lambda model, hidden: compare(model, hidden, batch).log_probs


PairLoss = Callable[[AnswerMeasures, AnswerMeasures], Tensor]
"""Function of chosen and rejected answers (B, D - 1) that returns the loss of each pair."""


def dpo_loss(config: ResolvedPreferenceConfig) -> PairLoss:
    """Return the loss of DPO or a variant, a function of the margin h of log-ratios.

    sigmoid: -log sigmoid(beta h) (Rafailov et al., 2023, arXiv 2305.18290, eq. 7), with label
    smoothing e: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (Mitchell, 2023, "A note on
    DPO with noisy preferences", eq. 3). hinge: max(0, 1 - beta h) (SLiC-HF, Zhao et al., 2023,
    arXiv 2305.10425, by RSO's normalized form, Liu et al., 2023, arXiv 2309.06657). ipo: (h' - 1 /
    2 beta)^2 (Azar et al., 2023, arXiv 2310.12036, eq. 17) with h' the margin of log-ratios' means
    over tokens, as its authors confirmed to TRL.
    """
    beta, smoothing = config.beta, config.label_smoothing

    def sigmoid(chosen: AnswerMeasures, rejected: AnswerMeasures) -> Tensor:
        h = beta * (chosen.ratio - rejected.ratio)
        return -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)

    def hinge(chosen: AnswerMeasures, rejected: AnswerMeasures) -> Tensor:
        return torch.relu(1 - beta * (chosen.ratio - rejected.ratio))

    def ipo(chosen: AnswerMeasures, rejected: AnswerMeasures) -> Tensor:
        chosen_mean, rejected_mean = (s.ratio / s.tokens.clamp(min=1) for s in (chosen, rejected))
        return (chosen_mean - rejected_mean - 1 / (2 * beta)).square()

    return {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo}[config.loss]


def orpo_loss(config: ResolvedPreferenceConfig) -> PairLoss:
    """Return ORPO's loss, beta times -log sigmoid(log odds(chosen) / odds(rejected)).

    odds = P / (1 - P), with log P the mean over tokens (Hong et al., 2024, arXiv 2403.07691, eqs.
    1, 3, 4 and 7, with beta for its lambda). The cross-entropy of eq. 6 is `Pairs.sft_weight`. log
    P is limited to -1e-6 for answers that are almost certain.
    """
    beta = config.beta

    def log_odds(side: AnswerMeasures) -> Tensor:
        mean = torch.where(side.tokens > 0, side.mean, -1.0).clamp(max=ALMOST_CERTAIN)
        return mean - torch.log(-torch.expm1(mean))

    return lambda chosen, rejected: -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo_loss(config: ResolvedPreferenceConfig) -> PairLoss:
    """Return SimPO's loss, -log sigmoid(beta (mean of chosen - mean of rejected) - gamma).

    Means are of log-probabilities over tokens (Meng et al., 2024, arXiv 2405.14734, eq. 6).
    """
    beta, gamma = config.beta, config.gamma
    return lambda chosen, rejected: -F.logsigmoid(beta * (chosen.mean - rejected.mean) - gamma)


PAIR_LOSSES: dict[str, Callable[[ResolvedPreferenceConfig], PairLoss]] = {
    "dpo": dpo_loss,
    "orpo": orpo_loss,
    "simpo": simpo_loss,
}


class Pairs:
    """Objective of methods with pairs: a chosen and a rejected answer to one prompt.

    The loss of a pair is the method's loss plus `sft_weight` times the cross-entropy of the chosen
    answer, averaged over its tokens as in ORPO (eqs. 2 and 6) and RPO (Pang et al., 2024, arXiv
    2404.19733, eq. 1). It is thus a sum over pairs too. (TRL averages over the tokens of a
    microbatch.)
    """

    is_cross_entropy = False

    def __init__(
        self, config: ResolvedPreferenceConfig, switched_off: Context | None = None
    ) -> None:
        """By the filled recipe; `switched_off`: makes the model its own reference."""
        self.beta = config.beta
        self.sft_weight = 1.0 if config.name == "orpo" else config.sft_weight or 0.0
        self.by_sum = self.has_reference = config.name == "dpo"
        self._loss, self.switched_off = PAIR_LOSSES[config.name](config), switched_off

    def prepare(self, batch: Batch, look: Look, data_group: ProcessGroup | None) -> Batch:
        """Return the batch with the reference's log-probabilities."""
        return with_reference(batch, look, self.switched_off)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs, ()."""
        if batch.answers is None:
            return batch.labels.new_zeros(())
        return is_pair(batch.answers.side).sum()

    def of(self, batch: Batch) -> Finish:
        """The sums of a microbatch."""
        return lambda model, hidden: self.sums(compare(model, hidden, batch))

    def sums(self, compared: AnswerMeasures) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, summed over all pairs, and the sums of the reported values."""
        # a chosen document is followed by the rejected one of its pair
        pair = is_pair(compared.side)
        chosen = _part(compared, slice(None, -1), pair)
        rejected = _part(compared, slice(1, None), pair)
        losses = self._loss(chosen, rejected)
        reported = {
            "pairs": pair,
            "chosen": self.reward(chosen),
            "rejected": self.reward(rejected),
            "right": pair_accuracy(self.reward(chosen) - self.reward(rejected)),
            "log_probs_chosen": chosen.log_probs if self.by_sum else chosen.mean,
            "log_probs_rejected": rejected.log_probs if self.by_sum else rejected.mean,
        }
        if self.sft_weight:
            losses = losses - self.sft_weight * chosen.mean
            reported["sft"] = -chosen.mean
        sums = {name: (value.detach() * pair).float().sum() for name, value in reported.items()}
        return torch.where(pair, losses, 0).sum(), sums

    def reward(self, side: AnswerMeasures) -> Tensor:
        """Return beta times the log-ratio, or times the mean log-probability without reference."""
        return self.beta * (side.ratio if self.by_sum else side.mean)

    def metrics(self, sums: dict[str, float], split: str = "train") -> dict[str, float]:
        """Return means over pairs: rewards, and log-probabilities (per token without reference)."""
        if not sums or not sums["pairs"]:
            return {}
        mean = {name: value / sums["pairs"] for name, value in sums.items()}
        metrics = {
            f"rewards/{split}/chosen": mean["chosen"],
            f"rewards/{split}/rejected": mean["rejected"],
            f"rewards/{split}/margins": mean["chosen"] - mean["rejected"],
            f"rewards/{split}/accuracies": mean["right"],
            f"logps/{split}/chosen": mean["log_probs_chosen"],
            f"logps/{split}/rejected": mean["log_probs_rejected"],
        }
        if "sft" in mean:
            metrics[f"loss/{split}/sft"] = mean["sft"]
        return metrics


class KTO:
    """Objective of KTO for single answers (Ethayarajh et al., 2024, arXiv 2402.01306).

    The loss of an answer is w (1 - sigmoid(s beta (r - z))), eq. 7, with its log-ratio r, its side
    s and the weight w of the side. The baseline is z = max(0, m), without gradient, where m is the
    mean log-ratio of prompts with mismatched answers over the global batch. A forward pass before
    the first microbatch computes it (`mismatched`). (TRL uses the microbatch of each rank.)
    """

    is_cross_entropy, has_reference = False, True

    def __init__(
        self, config: ResolvedPreferenceConfig, switched_off: Context | None = None
    ) -> None:
        """By the filled recipe; `switched_off`: makes the model its own reference."""
        self.beta = config.beta
        self.weights = config.desirable_weight, config.undesirable_weight
        self.switched_off = switched_off

    def prepare(self, batch: Batch, look: Look, data_group: ProcessGroup | None) -> Batch:
        """Return the batch with the reference's log-probabilities and the baseline."""
        batch = with_reference(batch, look, self.switched_off)
        if batch.answers is None:  # the empty batch of a rank that could not read its own
            sum_over_processes(torch.zeros(2, device=batch.tokens.device), data_group)
            return batch
        ratios, others = self.moved(batch, look)
        sums = torch.stack([ratios.sum(), others.sum().to(ratios)])
        sums = sum_over_processes(sums, data_group)
        baseline = baseline_of(*sums.unbind()).expand(len(batch.tokens))
        return replace(batch, answers=replace(batch.answers, baseline=baseline))

    def knows_reference(self, batch: Batch) -> bool:
        """Return whether reference log-probabilities are in the batch or can be computed."""
        assert batch.answers is not None
        return batch.answers.mismatched is not None or self.switched_off is not None

    def moved(self, batch: Batch, look: Look) -> tuple[Tensor, Tensor]:
        """Return the log-ratios of mismatched answers (B, D) fp32, and where they are (B, D) bool.

        Log-ratios are 0 for documents without a mismatched answer.
        """
        assert batch.answers is not None
        changed, is_mismatched = mismatched(batch)
        log_probs, reference = look(changed, answer_log_probs), batch.answers.mismatched
        if reference is None:
            assert self.switched_off is not None, "the method needs a reference"
            with self.switched_off():
                reference = look(changed, answer_log_probs)
        return torch.where(is_mismatched, log_probs - reference, 0), is_mismatched

    def count(self, batch: Batch) -> Tensor:
        """Return the number of answers, ()."""
        if batch.answers is None:
            return batch.labels.new_zeros(())
        return batch.answers.side.ne(0).sum()

    def of(self, batch: Batch) -> Finish:
        """The sums of a microbatch."""
        return lambda model, hidden: self.sums(compare(model, hidden, batch))

    def sums(self, compared: AnswerMeasures) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, summed over all answers, and the sums of the reported values."""
        side, ratio, baseline = compared.side, compared.ratio, compared.baseline
        assert baseline is not None, "`prepare` computes it"
        desirable, undesirable = self.weights
        weight = torch.where(side > 0, desirable, undesirable)
        losses = weight * torch.sigmoid(-side * self.beta * (ratio - baseline[:, None]))
        total = torch.where(side == 0, 0, losses).sum()
        reported = {"answers": (side != 0).sum(), "kl": (baseline[:, None] * (side != 0)).sum()}
        for name, sign in (("chosen", 1), ("rejected", -1)):
            reported[f"n_{name}"] = (side == sign).sum()
            reported[name] = torch.where(side == sign, self.beta * ratio, 0).sum()
            reported[f"log_probs_{name}"] = torch.where(side == sign, compared.log_probs, 0).sum()
        return total, {name: value.detach().float() for name, value in reported.items()}

    def metrics(self, sums: dict[str, float], split: str = "train") -> dict[str, float]:
        """Return means over the answers of each side, and the estimated KL divergence."""
        metrics = {}
        for side in ("chosen", "rejected"):
            if sums.get(f"n_{side}"):
                metrics[f"rewards/{split}/{side}"] = sums[side] / sums[f"n_{side}"]
                metrics[f"logps/{split}/{side}"] = sums[f"log_probs_{side}"] / sums[f"n_{side}"]
        if sums.get("n_chosen") and sums.get("n_rejected"):
            margin = metrics[f"rewards/{split}/chosen"] - metrics[f"rewards/{split}/rejected"]
            metrics[f"rewards/{split}/margins"] = margin
        if sums.get("answers"):
            metrics[f"rewards/{split}/kl"] = sums["kl"] / sums["answers"]
        return metrics


Preference = Pairs | KTO


def build_preference(
    config: ResolvedPreferenceConfig, switched_off: Context | None = None
) -> Preference | None:
    """Return the objective of a recipe; None: no preference tuning.

    Args:
        config: resolved section of the recipe.
        switched_off: context in which the model is its own reference, because its adapter is
            disabled; None: the examples contain the reference's log-probabilities.
    """
    if config.name == "none":
        return None
    return KTO(config, switched_off) if config.name == "kto" else Pairs(config, switched_off)


def is_pair(side: Tensor) -> Tensor:
    """Return (B, D - 1) bool: whether a document is chosen and followed by the rejected one."""
    return (side[:, :-1] == 1) & (side[:, 1:] == -1)


def pair_accuracy(margin: Tensor) -> Tensor:
    """Return 1 for a positive margin, 0 for a negative one, 0.5 for 0 (before the first step)."""
    return (margin.sign() + 1) / 2


def baseline_of(ratios: Tensor, number: Tensor) -> Tensor:
    """Return KTO's baseline, (), from sum and number of the log-ratios of mismatched answers."""
    return (ratios / number.clamp(min=1)).clamp(min=0)


def with_reference(batch: Batch, look: Look, switched_off: Context | None) -> Batch:
    """Return the batch with log-probabilities of the model without its adapter, if it has one."""
    if switched_off is None or batch.answers is None:
        return batch
    with switched_off():
        reference = look(batch, answer_log_probs)
    return replace(batch, answers=replace(batch.answers, reference=reference))


def _part(compared: AnswerMeasures, part: slice, pair: Tensor) -> AnswerMeasures:
    """Return one side of the pairs, (B, D - 1), with harmless values where there is no pair."""
    reference = compared.reference
    return AnswerMeasures(
        compared.side[:, part],
        torch.where(pair, compared.log_probs[:, part], -1.0),
        torch.where(pair, compared.tokens[:, part], 1.0),
        None if reference is None else torch.where(pair, reference[:, part], -1.0),
    )


def mismatched(batch: Batch) -> tuple[Batch, Tensor]:
    """Return the batch with answers rotated within each sequence, and where they are mismatched.

    The result (B, D) bool is false in a sequence with a single answer, and for documents that are
    on neither side.
    """
    # source position of each token, and the new lengths and beginnings, by sequence
    layout, answers = batch.layout, batch.answers
    assert layout is not None and answers is not None
    places, lengths, begins = zip(
        *(_change_row(*row) for row in zip(layout.lengths, answers.begins, strict=True)),
        strict=True,
    )
    changed = torch.zeros(answers.side.shape, dtype=torch.bool)
    for row, (of_row, begin) in enumerate(zip(layout.lengths, answers.begins, strict=True)):
        answered = _answered(of_row, begin)
        if len(answered) > 1:
            changed[row, answered] = True

    # move tokens and labels; labels are shifted to the token itself and back
    device = batch.tokens.device
    order = torch.tensor(places).to(device, non_blocking=True)
    unshifted = torch.full_like(batch.labels, IGNORE)
    unshifted[:, 1:] = batch.labels[:, :-1]
    labels = torch.full_like(unshifted, IGNORE)
    labels[:, :-1] = unshifted.gather(1, order)[:, 1:]
    moved = PackedLayout.from_lengths(lengths, layout.padding).to(device, non_blocking=True)
    sides = AnswerDocuments(answers.side, begins)
    tokens = batch.tokens.gather(1, order)
    is_compared = changed.to(device, non_blocking=True) & (answers.side != 0)
    return Batch(tokens, labels, moved, answers=sides), is_compared


def _answered(lengths: tuple[int, ...], begins: tuple[int, ...]) -> list[int]:
    """Return the indices of documents that have an answer."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [n for n, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end]


def _change_row(
    lengths: tuple[int, ...], begins: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Rotate the answers of a sequence.

    Returns:
        The source position of each token, and the lengths and answer beginnings of the documents.
    """
    answered = _answered(lengths, begins)
    giver = dict(zip(answered, [*answered[-1:], *answered[:-1]], strict=True))
    places: list[int] = []
    sizes, starts, begin = [], [], 0
    spans = {n: range(begins[n], sum(lengths[: n + 1])) for n in answered}
    for n, length in enumerate(lengths):
        answer = spans[giver[n]] if n in giver else range(0)
        prompt = range(begin, spans[n].start if n in giver else begin + length)
        starts.append(len(places) + len(prompt))
        sizes.append(len(prompt) + len(answer))
        places += [*prompt, *answer]
        begin += length
    return places, tuple(sizes), tuple(starts)
