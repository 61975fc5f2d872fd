"""Titles and groups of metrics.

The report calls `title` for each metric; the metric name is the tooltip. A metric that matches no
pattern keeps its name and belongs to the last group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOSS, ANSWERS, OPTIMIZER, SPEED = "Loss", "Answers", "Optimizer", "Speed and memory"
EXPERTS, DATA, TASKS, OTHERS = "Experts", "Data", "Tasks", "Other metrics"
GROUPS = (LOSS, ANSWERS, OPTIMIZER, SPEED, EXPERTS, DATA, TASKS, OTHERS)

_SPLITS = {"train": "training", "eval": "validation"}
_LEARNT = {"grad": "gradient", "param": "weights", "moment": "first moment"}
_SPLIT = r"(?P<split>train|eval)"

# pattern of the full name, title with {groups} of the pattern, group of the report
_TITLES = (
    (rf"loss/{_SPLIT}/total", "{split} loss", LOSS),
    (rf"loss/{_SPLIT}/loss", "{split} loss of the language model alone", LOSS),
    (rf"loss/{_SPLIT}/lbl", "{split} loss that balances experts", LOSS),
    (rf"loss/{_SPLIT}/z", "{split} loss of the routers' logits", LOSS),
    (rf"loss/{_SPLIT}/z_loss", "{split} z-loss of the logits", LOSS),
    (rf"loss/{_SPLIT}/sft", "{split} loss of chosen answers", LOSS),
    (rf"metrics/{_SPLIT}/LanguageCrossEntropy", "{split} loss", LOSS),
    (rf"metrics/{_SPLIT}/LanguagePerplexity", "{split} perplexity", LOSS),
    (rf"metrics/{_SPLIT}/bits_per_byte", "{split} bits per byte", LOSS),
    (r"metrics/eval/PairAccuracy", "pairs of likelier chosen answers", ANSWERS),
    (r"metrics/eval/PairAccuracyPerToken", "pairs of likelier chosen answers, by token", ANSWERS),
    (rf"rewards/{_SPLIT}/accuracies", "pairs distinguished by reward, {split}", ANSWERS),
    (rf"rewards/{_SPLIT}/margins", "reward margin, {split}", ANSWERS),
    (rf"rewards/{_SPLIT}/kl", "distance to the reference, {split}", ANSWERS),
    (rf"rewards/{_SPLIT}/(?P<side>\w+)", "reward of {side} answers, {split}", ANSWERS),
    (rf"logps/{_SPLIT}/(?P<side>\w+)", "log-probability of {side} answers, {split}", ANSWERS),
    (r"lr-(?P<group>.+)", "learning rate, {group}", OPTIMIZER),
    (r"l2_norm/(?P<of>\w+)/global", "norm of the {of}", OPTIMIZER),
    (r"l2_norm/(?P<of>\w+)/(?P<name>.+)", "norm of the {of}, {name}", OPTIMIZER),
    (r"throughput/tokens_per_sec", "tokens per second", SPEED),
    (r"throughput/samples_per_sec", "rows per second", SPEED),
    (r"throughput/batches_per_sec", "batches per second", SPEED),
    (r"throughput/device/tokens_per_sec", "tokens per second of a device", SPEED),
    (r"throughput/device/flops_per_sec", "FLOPs per second of a device", SPEED),
    (r"throughput/device/mfu", "model FLOPs utilisation", SPEED),
    (r"memory/peak_allocated_mem", "peak memory", SPEED),
    (r"memory/alloc_retries", "allocations tried again", SPEED),
    (r"memory/(?P<name>\w+)", "memory: {name}", SPEED),
    (r"gpu/energy_kwh", "energy in kilowatt-hours", SPEED),
    (r"cpu/energy_kwh", "energy of the processors in kilowatt-hours", SPEED),
    (r"time/data_wait", "seconds of waiting for data", SPEED),
    (r"time/checkpoint_blocking", "seconds that a checkpoint held training up", SPEED),
    (r"time/checkpoint_wait", "seconds of waiting for the checkpoint before", SPEED),
    (r"time/step/(?P<name>\w+)", "seconds of a step: {name}", SPEED),
    (r"time/train", "seconds of training", SPEED),
    (r"time/val", "seconds of evaluation", SPEED),
    (r"moe/dropped_tokens", "choices of experts that were dropped", EXPERTS),
    (r"moe/load_max", "load of the busiest expert, over the mean", EXPERTS),
    (r"moe/load_min", "load of the idlest expert, over the mean", EXPERTS),
    (r"moe/load_std", "spread of experts' loads", EXPERTS),
    (r"moe/router_entropy", "entropy of the routers", EXPERTS),
    (r"data/tokens_padded", "tokens of padding", DATA),
    (r"data/tokens_dropped", "tokens left out", DATA),
    (r"icl/metrics/eval_gauntlet/(?P<name>.+)", "{name}", TASKS),
    (r"metrics/(?P<name>[^/]+)/(?P<n>\d+)-shot/(?P<what>.+)", "{name}, {n}-shot: {what}", TASKS),
)
# pattern of the last part of a task's metric, title
_OF_TASKS = (
    (r".*ExpectedCalibrationError", "calibration error, as LLM Foundry has it"),
    (r"expected_calibration_error", "calibration error"),
    (r"gold_bits_per_byte", "bits per byte of the right answer"),
    (r"TeacherForced\w*Accuracy", "accuracy by token, not generated"),
    (r"InContextLearning\w*Accuracy", "accuracy"),
    (r"acc", "accuracy by sums"),
    (r"acc_token", "accuracy by means of tokens"),
    (r"acc_norm", "accuracy by means of characters"),
    (r"acc_byte", "accuracy by means of bytes"),
)


@dataclass(frozen=True)
class Title:
    """Title of a metric.

    Attributes:
        text: title.
        group: name in GROUPS.
    """

    text: str
    group: str


def title(name: str) -> Title:
    """Return the title and the group of a metric."""
    for pattern, text, group in _TITLES:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return Title(text.format(**_words(match.groupdict())), group)
    return Title(name, OTHERS)


def _words(parts: dict[str, str]) -> dict[str, str]:
    """Replace the parts of a metric name, by group of the pattern, by words."""
    words = dict(parts)
    if "split" in words:
        words["split"] = _SPLITS[words["split"]]
    if "of" in words:
        words["of"] = _LEARNT.get(words["of"], words["of"])
    if "what" in words:
        *category, metric = words["what"].split("/")
        titles = [text for pattern, text in _OF_TASKS if re.fullmatch(pattern, metric)]
        words["what"] = ", ".join([*category, titles[0] if titles else metric])
    return words
