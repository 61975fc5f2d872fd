"""What preference tuning minimizes: dpo (sigmoid, ipo, hinge), kto, orpo and simpo.

`builders/preference.py` makes an objective by `build_preference`, `train_step` minimizes it, the
evaluation measures by it. The idea: every method is a sum over pairs, or over single answers, of a
function of log-probabilities (`AnswerMeasures`), divided by their number in the global batch. So
nothing depends on microbatches, accumulation or processes, and two numbers for each document are
all that an evaluation has to keep.

"tokens" below are an answer's learned tokens, and a mean over them is the same whatever the prompt.
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
ALMOST_CERTAIN = -1e-6  # largest mean log-probability that odds are taken of; beyond they overflow


@dataclass(frozen=True)
class AnswerMeasures:
    """What the documents of some rows are compared by, each (B, D) but for the last.

    Attributes:
        side: 1 chosen or desirable, -1 rejected or undesirable, 0 no answer.
        log_probs: fp32, of each answer: the sum over its tokens.
        tokens: fp32, their number.
        reference: fp32, what the reference model gives for `log_probs`; None: there is none.
        baseline: (B,) fp32, as in `AnswerDocuments`.
    """

    side: Tensor
    log_probs: Tensor
    tokens: Tensor
    reference: Tensor | None = None
    baseline: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """Logarithm of policy over reference."""
        assert self.reference is not None, "the method needs a reference"
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """Log-probability of a token."""
        return self.log_probs / self.tokens.clamp(min=1)


def compare(model: Decoder, hidden: Tensor, batch: Batch) -> AnswerMeasures:
    """What the documents of a batch are compared by, given its hidden states (B, T, D)."""
    answers, layout = batch.answers, batch.layout
    of_tokens = model.log_probs(hidden, batch.labels)
    if answers is None or layout is None:  # a batch that could not be had
        nothing = of_tokens.sum(1, keepdim=True)
        return AnswerMeasures(
            torch.zeros_like(nothing).long(), nothing, nothing, nothing, nothing[:, 0]
        )
    documents = layout.documents.long()
    empty = of_tokens.new_zeros(answers.side.shape)
    learned = (batch.labels != IGNORE).to(empty.dtype)
    return AnswerMeasures(
        answers.side,
        empty.scatter_add(1, documents, of_tokens),
        empty.scatter_add(1, documents, learned),
        answers.reference,
        answers.baseline,
    )


def answer_log_probs(batch: Batch) -> Callable[[Decoder, Tensor], Tensor]:
    """A function of model and hidden states: (B, D), of each answer of the batch."""
    return lambda model, hidden: compare(model, hidden, batch).log_probs


PairLoss = Callable[[AnswerMeasures, AnswerMeasures], Tensor]
"""Of chosen and rejected answers, all (B, D - 1), what each pair adds."""


def dpo_loss(config: ResolvedPreferenceConfig) -> PairLoss:
    """DPO and its variants, functions of the margin of log-ratios, h.

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
    """Beta times -log sigmoid(log odds(chosen) / odds(rejected)).

    odds = P / (1 - P), log P the mean over tokens (Hong et al., 2024, arXiv 2403.07691, eqs. 1, 3,
    4 and 7, with beta for its lambda); the cross-entropy of its eq. 6 is `Pairs.sft_weight`. Of an
    answer that is all but certain, log P counts as -1e-6.
    """
    beta = config.beta

    def log_odds(side: AnswerMeasures) -> Tensor:
        mean = torch.where(side.tokens > 0, side.mean, -1.0).clamp(max=ALMOST_CERTAIN)
        return mean - torch.log(-torch.expm1(mean))

    return lambda chosen, rejected: -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo_loss(config: ResolvedPreferenceConfig) -> PairLoss:
    """-log sigmoid(beta (mean of chosen - mean of rejected) - gamma).

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
    """Methods of pairs: a chosen and a rejected answer to one prompt.

    Their loss, and `sft_weight` times the chosen answer's cross-entropy: its mean over tokens, as
    in ORPO (eqs. 2 and 6) and RPO (Pang et al., 2024, arXiv 2404.19733, eq. 1), so that it is a sum
    over pairs too. (TRL takes the mean over the tokens of a microbatch.)
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
        """With the reference's log-probabilities."""
        return with_reference(batch, look, self.switched_off)

    def count(self, batch: Batch) -> Tensor:
        """(): pairs."""
        if batch.answers is None:
            return batch.labels.new_zeros(())
        return is_pair(batch.answers.side).sum()

    def of(self, batch: Batch) -> Finish:
        """The sums of a microbatch."""
        return lambda model, hidden: self.sums(compare(model, hidden, batch))

    def sums(self, compared: AnswerMeasures) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss over all pairs, and what is reported of them."""
        pair = is_pair(compared.side)
        chosen, rejected = (
            _part(compared, slice(None, -1), pair),
            _part(compared, slice(1, None), pair),
        )
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
        """Beta times the log-ratio; without a reference, times the mean log-probability."""
        return self.beta * (side.ratio if self.by_sum else side.mean)

    def metrics(self, sums: dict[str, float], split: str = "train") -> dict[str, float]:
        """Means over pairs: rewards, and log-probabilities (of a token, without a reference)."""
        if not sums or not sums["pairs"]:
            return {}
        mean = {name: value / sums["pairs"] for name, value in sums.items()}
        named = {
            f"rewards/{split}/chosen": mean["chosen"],
            f"rewards/{split}/rejected": mean["rejected"],
            f"rewards/{split}/margins": mean["chosen"] - mean["rejected"],
            f"rewards/{split}/accuracies": mean["right"],
            f"logps/{split}/chosen": mean["log_probs_chosen"],
            f"logps/{split}/rejected": mean["log_probs_rejected"],
        }
        return named | ({f"loss/{split}/sft": mean["sft"]} if "sft" in mean else {})


class KTO:
    """Single answers, each desirable or not (Ethayarajh et al., 2024, arXiv 2402.01306).

    w (1 - sigmoid(s beta (r - z))), eq. 7: r the answer's log-ratio, s its side, w its side's
    weight, and z = max(0, m), where m is the mean log-ratio of prompts with the answers of others,
    which no gradient goes through. That mean is over the global batch: a forward pass before the
    first microbatch finds it (`mismatched`). (TRL takes each process' microbatch.)
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
        """With the reference's log-probabilities, and the baseline of the global batch."""
        batch = with_reference(batch, look, self.switched_off)
        if batch.answers is None:  # a batch that could not be had
            sum_over_processes(torch.zeros(2, device=batch.tokens.device), data_group)
            return batch
        ratios, others = self.moved(batch, look)
        sums = torch.stack([ratios.sum(), others.sum().to(ratios)])
        sums = sum_over_processes(sums, data_group)
        baseline = baseline_of(*sums.unbind()).expand(len(batch.tokens))
        return replace(batch, answers=replace(batch.answers, baseline=baseline))

    def knows_reference(self, batch: Batch) -> bool:
        """Whether the batch brings it, or the adapter's absence gives it."""
        assert batch.answers is not None
        return batch.answers.mismatched is not None or self.switched_off is not None

    def moved(self, batch: Batch, look: Look) -> tuple[Tensor, Tensor]:
        """(B, D) fp32: log-ratios of prompts with others' answers, 0 without; (B, D) bool: with."""
        assert batch.answers is not None
        changed, others = mismatched(batch)
        found, reference = look(changed, answer_log_probs), batch.answers.mismatched
        if reference is None:
            assert self.switched_off is not None, "the method needs a reference"
            with self.switched_off():
                reference = look(changed, answer_log_probs)
        return torch.where(others, found - reference, 0), others

    def count(self, batch: Batch) -> Tensor:
        """(): answers."""
        return (
            batch.labels.new_zeros(())
            if batch.answers is None
            else (batch.answers.side.ne(0).sum())
        )

    def of(self, batch: Batch) -> Finish:
        """The sums of a microbatch."""
        return lambda model, hidden: self.sums(compare(model, hidden, batch))

    def sums(self, compared: AnswerMeasures) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss over all answers, and what is reported of them."""
        side, ratio, baseline = compared.side, compared.ratio, compared.baseline
        assert baseline is not None, "prepare finds it"
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
        """Means over the answers of each side, and the estimated divergence."""
        found = {}
        for side in ("chosen", "rejected"):
            if sums.get(f"n_{side}"):
                found[f"rewards/{split}/{side}"] = sums[side] / sums[f"n_{side}"]
                found[f"logps/{split}/{side}"] = sums[f"log_probs_{side}"] / sums[f"n_{side}"]
        if sums.get("n_chosen") and sums.get("n_rejected"):
            margin = found[f"rewards/{split}/chosen"] - found[f"rewards/{split}/rejected"]
            found[f"rewards/{split}/margins"] = margin
        if sums.get("answers"):
            found[f"rewards/{split}/kl"] = sums["kl"] / sums["answers"]
        return found


Preference = Pairs | KTO


def build_preference(
    config: ResolvedPreferenceConfig, switched_off: Context | None = None
) -> Preference | None:
    """The objective of a filled section; None where it is `none`.

    Args:
        config: the recipe's section.
        switched_off: makes the model its own reference; None: rows bring what that one gives.
    """
    if config.name == "none":
        return None
    return KTO(config, switched_off) if config.name == "kto" else Pairs(config, switched_off)


def is_pair(side: Tensor) -> Tensor:
    """(B, D - 1) bool: which documents (B, D) are chosen and followed by the one rejected."""
    return (side[:, :-1] == 1) & (side[:, 1:] == -1)


def pair_accuracy(margin: Tensor) -> Tensor:
    """1 where a margin is positive, a half where it is 0: before the first step all are."""
    return (margin.sign() + 1) / 2


def baseline_of(ratios: Tensor, number: Tensor) -> Tensor:
    """(): KTO's baseline, from the sum and the number of log-ratios of mismatched answers."""
    return (ratios / number.clamp(min=1)).clamp(min=0)


def with_reference(batch: Batch, look: Look, switched_off: Context | None) -> Batch:
    """The batch with what the model gives switched off; as it is without `switched_off`."""
    if switched_off is None or batch.answers is None:
        return batch
    with switched_off():
        reference = look(batch, answer_log_probs)
    return replace(batch, answers=replace(batch.answers, reference=reference))


def _part(compared: AnswerMeasures, part: slice, pair: Tensor) -> AnswerMeasures:
    """One side of the pairs, (B, D - 1); where there is no pair, numbers that do no harm."""
    reference = compared.reference
    return AnswerMeasures(
        compared.side[:, part],
        torch.where(pair, compared.log_probs[:, part], -1.0),
        torch.where(pair, compared.tokens[:, part], 1.0),
        None if reference is None else torch.where(pair, reference[:, part], -1.0),
    )


def mismatched(batch: Batch) -> tuple[Batch, Tensor]:
    """The batch with answers changed round, and (B, D) bool: which documents have another's.

    A row with one answer alone has none to give it; a document on neither side counts for none.
    """
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
    device = batch.tokens.device
    order = torch.tensor(places).to(device, non_blocking=True)
    own = torch.full_like(batch.labels, IGNORE)  # each token's label at the token itself
    own[:, 1:] = batch.labels[:, :-1]
    labels = torch.full_like(own, IGNORE)
    labels[:, :-1] = own.gather(1, order)[:, 1:]
    moved = PackedLayout.from_lengths(lengths, layout.padding).to(device, non_blocking=True)
    sides = AnswerDocuments(answers.side, begins)
    tokens = batch.tokens.gather(1, order)
    is_compared = changed.to(device, non_blocking=True) & (answers.side != 0)
    return Batch(tokens, labels, moved, answers=sides), is_compared


def _answered(lengths: tuple[int, ...], begins: tuple[int, ...]) -> list[int]:
    """The documents that have an answer."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [n for n, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end]


def _change_row(
    lengths: tuple[int, ...], begins: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """The place that each token of a row comes from; lengths and begins of its new documents."""
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
