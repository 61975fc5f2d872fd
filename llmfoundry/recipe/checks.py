"""Small checks that every section uses, and durations.

Each check yields lines `key: why; what to write instead`. A duration is `10ba`, `2e9tok`, `1ep`,
`500sp` or `0.1dur`; a `Clock` converts it. Every optimizer step of a run has the same number of
sequences and tokens, so a duration in any unit is a (possibly fractional) number of batches.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from llmfoundry.recipe.not_supported import NOT_SUPPORTED

LONGEST_NAME = 100  # characters of a text that is compared with names

VALUES = {
    "bf16-mixed": "amp_bf16",
    "amp": "amp_bf16",
    "mixed": "amp_bf16",
    "bf16-true": "bf16",
    "bfloat16": "bf16",
    "32-true": "fp32",
    "float32": "fp32",
    "float16": "fp16 amp_bf16",
    "fp16": "amp_bf16",
    "16-mixed": "amp_bf16",
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "torch.optim.adamw": "adamw",
    "lion": "decoupled_lionw",
    "cosine": "cosine_with_warmup",
    "linear": "linear_decay_with_warmup",
    "constant": "constant_with_warmup",
    "inverse_sqrt": "inv_sqrt_with_warmup",
    "wsd": "warmup_stable_decay",
    "flash_attention_2": "flash",
    "flash_attn": "flash",
    "flash_attention_3": "flash3",
    "fa3": "flash3",
    "flex_attention": "flex",
    "eager": "torch",
    "swiglu": "mptglu",
    "glu": "mptglu",
    "mlp": "mptmlp",
    "moe": "dmoe",
    "layer_norm": "layernorm",
    "rms_norm": "rmsnorm",
    "fp4": "nf4",
    "int4": "nf4",
    "adaptive_clip": "adaptive",
    "safetensors": "hf",
    "huggingface": "hf",
    "jsonl": "files",
    "json": "files",
    "hf": "huggingface",
    "streaming": "shards",
    "mds": "shards",
    "messages": "chat",
    "instruction": "prompt_response",
    "sft": "prompt_response",
    "none": "off",
    "off": "none",
    "false": "off none",
    "no": "off none",
}
"""Values of other tools, with our values of the same meaning; the first valid one is suggested."""


def nearest(name: str, options: Iterable[str]) -> str:
    """Return the clause `; did you mean 'x'?` for a similar option, or an empty string.

    An option is similar if it differs by at most two typing errors, or one in a short name.
    Otherwise the only option that contains the name as whole words counts, as max_seq_len contains
    seq_len and gpt2-124m contains gpt2.
    """
    option = nearest_option(name, options)
    return f"; did you mean '{option}'?" if option is not None else ""


def choice_hint(value: str, options: Iterable[str]) -> str:
    """Return the clause for a value that is no choice: not supported, or a similar option."""
    reason = NOT_SUPPORTED.get(value.lower())
    return f"; {reason}" if reason is not None else nearest(value, options)


def nearest_option(name: str, options: Iterable[str]) -> str | None:
    """Return the option that `nearest` names."""
    options = list(options)
    for meant in VALUES.get(name.lower(), "").split():
        if meant in options:
            return meant
    slips = {option: _slips(name, option) for option in options}
    close = [n for n in options if slips[n] <= min(2, max(len(n), len(name)) // 3)]
    if close:
        return min(close, key=lambda option: slips[option])
    words = f"_{name}_".replace("-", "_")
    holding = [option for option in options if words in f"_{option}_".replace("-", "_")]
    return holding[0] if len(holding) == 1 and len(name) > 2 else None


def _slips(left: str, right: str) -> int:
    """Return the number of inserted, deleted, replaced or swapped letters (Damerau, 1964)."""
    if abs(len(left) - len(right)) > 2 or len(left) > LONGEST_NAME:
        return LONGEST_NAME
    before, row = [], list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, above, row = row, before, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def one_of(key: str, value: str, options: Iterable[str]) -> Iterator[str]:
    """Check that `value` is one of `options`."""
    options = list(options)
    if value not in options:
        yield f"{key}: {not_a_choice(value, options)}"


def not_a_choice(value: Any, options: list[str], *, other: str = "") -> str:
    """Return why `value` is not one of `options`; `other` describes further valid values."""
    listed = ", ".join(options) + (f", or {other}" if other else "")
    return f"{value!r} is not a choice{choice_hint(str(value), options)} (choices: {listed})"


def at_least(key: str, value: float | None, low: float) -> Iterator[str]:
    """Check that `value`, if it is set, is not below `low`."""
    if value is not None and value < low:
        yield f"{key}: {value} is too small; write {low} or more"


def above(key: str, value: float | None, low: float) -> Iterator[str]:
    """Check that `value`, if it is set, is greater than `low`."""
    if value is not None and not value > low:
        yield f"{key}: {value} must be greater than {low}"


def fraction(key: str, value: float | None) -> Iterator[str]:
    """Check that `value`, if it is set, is in [0, 1)."""
    if value is not None and not 0 <= value < 1:
        yield f"{key}: {value} is not a fraction; write a number from 0 up to, not including, 1"


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[str]:
    """Check that `part` divides `whole`."""
    if part < 1 or whole % part:
        close = min(divisors(whole), key=lambda n: abs(n - part), default=1)
        why = f"{part} does not divide {whole_key} ({whole})"
        yield f"{key}: {why}; the nearest that does is {close}"


def divisors(whole: int) -> list[int]:
    """Return all divisors of `whole` in ascending order, in time O(sqrt(whole))."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return sorted({*small, *(whole // n for n in small)})


def inert(key: str, section: Any, fields: Iterable[str], why: str) -> Iterator[str]:
    """Yield an error line for each field that is set (not None) although it has no effect.

    `why` completes the sentence "... has no effect", for instance "on text". Prefer an `Only` rule
    in the type of the field.
    """
    for field in fields:
        if getattr(section, field) is not None:
            yield f"{key}{field}: has no effect {why}; remove it"


def inert_change(key: str, section: Any, fields: Iterable[str], why: str) -> Iterator[str]:
    """Yield an error line for each field that differs from its default without effect."""
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for field in fields:
        if getattr(section, field) != defaults[field]:
            yield f"{key}{field}: has no effect {why}; remove it"


def set_defaults(section: Any, **defaults: Any) -> None:
    """Set the fields that are None to these values."""
    for field, value in defaults.items():
        if getattr(section, field) is None:
            setattr(section, field, value)


UNITS = {
    "ba": "batches (optimizer steps)",
    "sp": "samples (sequences of max_seq_len)",
    "tok": "tokens",
    "ep": "epochs (passes over the training data)",
    "dur": "fraction of max_duration",
}
LONGEST = 1e18
"""Longest duration in any unit; counts stay within 64 bits."""
_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)(ba|sp|tok|ep|dur)")


@dataclass(frozen=True)
class Duration:
    """A length of training: `value` in `unit` (see UNITS)."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse `10ba`; raise a ValueError that shows the form of a duration."""
        match = _FORM.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a duration; write a number and a unit: 10ba, 2e9tok, 1ep, 500sp"
                " or 0.1dur"
            )
        value, unit = float(match[1]), match[2]
        if value > LONGEST:
            raise ValueError(f"{text!r} is too long; write {LONGEST:.0e} or less")
        if unit in ("ba", "sp", "tok") and not value.is_integer():
            raise ValueError(f"{text!r} is not a whole number of {UNITS[unit].split()[0]}")
        return cls(value, unit)

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{self.unit}"


def check_duration(
    key: str, text: str, *, allow_dur: bool = True, allow_zero: bool = True
) -> Iterator[str]:
    """Check that a text is a duration, not relative to itself, and not zero."""
    try:
        duration = Duration.parse(text)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if duration.unit == "dur" and not allow_dur:
        yield f"{key}: '{text}' is a fraction of itself; write ba, sp, tok or ep"
    if duration.value == 0 and not allow_zero:
        yield f"{key}: '{text}' is zero; write at least 1ba"


@dataclass(frozen=True)
class Clock:
    """Converts durations into batches.

    Attributes:
        samples_per_batch: sequences in a global batch.
        tokens_per_batch: tokens in a global batch.
        batches_per_epoch: sequences of the training set / samples_per_batch; may be fractional.
        max_duration: length of the run.
    """

    samples_per_batch: int
    tokens_per_batch: int
    batches_per_epoch: float
    max_duration: Duration

    @cached_property
    def total(self) -> int:
        """Number of batches of the run."""
        return max(1, math.ceil(self.batches(self.max_duration) - 1e-9))

    @cache  # noqa: B019  a run has one clock
    def batches(self, duration: Duration | str) -> float:
        """Return the length of `duration` in batches, not rounded."""
        if isinstance(duration, str):
            duration = Duration.parse(duration)
        scale = {
            "ba": 1.0,
            "sp": 1 / self.samples_per_batch,
            "tok": 1 / self.tokens_per_batch,
            "ep": self.batches_per_epoch,
        }
        if duration.unit == "dur":
            return duration.value * self.batches(self.max_duration)
        return duration.value * scale[duration.unit]
