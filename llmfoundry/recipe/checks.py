"""Small checks that every section uses; each yields lines `key: why; what to write instead`.

And durations such as `10ba`, `2e9tok`, `1ep`, `500sp`, `0.1dur`, with the clock that counts them:
every optimizer step of a run sees the same number of rows and tokens, so a duration in any unit is
a (possibly fractional) number of batches.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

LONGEST_NAME = 100  # of what is compared with names

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
}
"""What other tools write as a value, and what means the same here; the first that is a choice is
named."""


def nearest(name: str, options: Iterable[str]) -> str:
    """The clause `; did you mean 'x'?` for an option that is really near, or an empty string.

    Near is what at most two slips of the finger make of the name, one of a short name; else the
    only option that holds the name as whole words, as max_seq_len holds seq_len.
    """
    found = nearest_option(name, options)
    return f"; did you mean '{found}'?" if found is not None else ""


def nearest_option(name: str, options: Iterable[str]) -> str | None:
    """What `nearest` names."""
    options = list(options)
    for meant in VALUES.get(name.lower(), "").split():
        if meant in options:
            return meant
    slips = {option: _slips(name, option) for option in options}
    close = [n for n in options if slips[n] <= min(2, max(len(n), len(name)) // 3)]
    if close:
        return min(close, key=lambda option: slips[option])
    holding = [option for option in options if f"_{name}_" in f"_{option}_"]
    return holding[0] if len(holding) == 1 and len(name) > 2 else None


def _slips(left: str, right: str) -> int:
    """Letters inserted, left out, replaced or swapped with the next (Damerau, 1964)."""
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
    """`value` must be one of `options`."""
    options = list(options)
    if value not in options:
        yield f"{key}: {not_a_choice(value, options)}"


def not_a_choice(value: Any, options: list[str], *, other: str = "") -> str:
    """Why `value` is not one of `options`, and what they are; `other`: what else may be written."""
    listed = ", ".join(options) + (f", or {other}" if other else "")
    return f"{value!r} is not a choice{nearest(str(value), options)} (choices: {listed})"


def at_least(key: str, value: float | None, low: float) -> Iterator[str]:
    """`value`, where given, must not be below `low`."""
    if value is not None and value < low:
        yield f"{key}: {value} is too small; write {low} or more"


def above(key: str, value: float | None, low: float) -> Iterator[str]:
    """`value`, where given, must be greater than `low`."""
    if value is not None and not value > low:
        yield f"{key}: {value} must be greater than {low}"


def fraction(key: str, value: float | None) -> Iterator[str]:
    """`value`, where given, must lie in [0, 1)."""
    if value is not None and not 0 <= value < 1:
        yield f"{key}: {value} is not a fraction; write a number from 0 up to, not including, 1"


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[str]:
    """`part` must divide `whole`."""
    if part < 1 or whole % part:
        close = min(divisors(whole), key=lambda n: abs(n - part), default=1)
        why = f"{part} does not divide {whole_key} ({whole})"
        yield f"{key}: {why}; the nearest that does is {close}"


def divisors(whole: int) -> list[int]:
    """All divisors of `whole`, ascending, in time of its square root."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return sorted({*small, *(whole // n for n in small)})


def inert(key: str, section: Any, fields: Iterable[str], why: str) -> Iterator[str]:
    """Fields that were set although they have no effect; unset is None.

    `why` completes the sentence "... has no effect", for instance "without alibi: true".
    """
    for field in fields:
        if getattr(section, field) is not None:
            yield f"{key}{field}: has no effect {why}; remove it"


def inert_change(key: str, section: Any, fields: Iterable[str], why: str) -> Iterator[str]:
    """The same of fields that are never None: those that are not at their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for field in fields:
        if getattr(section, field) != defaults[field]:
            yield f"{key}{field}: has no effect {why}; remove it"


def set_defaults(section: Any, **defaults: Any) -> None:
    """Give fields that are still None the value that a run uses."""
    for field, value in defaults.items():
        if getattr(section, field) is None:
            setattr(section, field, value)


UNITS = {
    "ba": "batches (optimizer steps)",
    "sp": "samples (rows of max_seq_len)",
    "tok": "tokens",
    "ep": "epochs (passes over the training rows)",
    "dur": "fraction of max_duration",
}
LONGEST = 1e18
"""In any unit; counts stay far from what 64 bits hold."""
_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)(ba|sp|tok|ep|dur)")


@dataclass(frozen=True)
class Duration:
    """A length of training: `value` in `unit` (see UNITS)."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read `10ba`; raises ValueError that shows what a duration looks like."""
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
    """Lines for a text that is not a duration, is one relative to itself, or is zero."""
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
    """Turns durations into batches.

    Attributes:
        samples_per_batch: rows in one global batch.
        tokens_per_batch: tokens in one global batch.
        batches_per_epoch: rows of the training set / samples_per_batch; may be fractional.
        max_duration: the length of the run.
    """

    samples_per_batch: int
    tokens_per_batch: int
    batches_per_epoch: float
    max_duration: Duration

    @cached_property
    def total(self) -> int:
        """Batches of the run."""
        return max(1, math.ceil(self.batches(self.max_duration) - 1e-9))

    @cache  # noqa: B019  a run has one clock
    def batches(self, duration: Duration | str) -> float:
        """The length of `duration` in batches, not rounded."""
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
