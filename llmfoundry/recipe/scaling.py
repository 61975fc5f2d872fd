"""`ScalingRecipe`: a grid of small runs of one training recipe, and a prediction from them.

`scripts/scaling.py` reads one. A point of the grid is the base recipe with a width and a number of
tokens; depth, heads, batch size and learning rate follow from these two by explicit rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.launch import LaunchConfig
from llmfoundry.recipe.overrides import key_and_text
from llmfoundry.recipe.schema import (
    PATH,
    POSITIVE,
    WIDTH,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)

QUANTITIES = ("compute", "parameters", "tokens", "width")
COUNTED = ("active", "total", "non_embedding")
DECIDED = {
    **dict.fromkeys(("save_folder", "save_local_folder", "run_name"), "output"),
    "max_duration": "tokens",
    "model.d_model": "sizes",
    **dict.fromkeys(("model.n_layers", "model.n_heads", "model.head_dim"), "rules"),
}
"""Keys of the base recipe that a scaling recipe decides, and the key that decides each."""
MOST_RUNS = 1000
_BUDGET = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)(h?)", re.IGNORECASE)


@dataclass
class PowerRule:
    """A number that is a power of another one: value * (x / at) ** exponent."""

    value: Annotated[float | None, POSITIVE] = None
    """The number at x = `at`; unset: the base recipe's number."""
    by: Annotated[str, choice(QUANTITIES)] = "compute"
    """The quantity x: compute (FLOPs of the run), parameters (active), tokens, or width."""
    at: Annotated[float | None, POSITIVE] = None
    """The x at which the number is `value`; unset: the smallest x of the grid."""
    exponent: Annotated[float | None, Range(-4, 4)] = None
    """The exponent; 0: a constant."""

    def number(self, x: float) -> float:
        """Return the rule's number at x; the defaults must be resolved."""
        assert self.value is not None and self.at is not None and self.exponent is not None
        return float(self.value * (x / self.at) ** self.exponent)


@dataclass
class RulesConfig:
    """How the settings of a point follow from its width and tokens."""

    aspect_ratio: Annotated[float | None, POSITIVE] = None
    """Width divided by the number of layers; unset: the base recipe's. The loss hardly depends on
    it between 20 and 100 (Kaplan et al., 2020, figure 5)."""
    head_dim: Annotated[int | None, Range(1, 4096)] = None
    """Width of a head, of which sizes must be multiples; unset: the base recipe's. Key-value heads
    and the feed-forward layer keep the ratios of the base recipe."""
    lr: PowerRule = field(default_factory=PowerRule)
    """Rule of optimizer.lr; by default compute ** -0.125 (DeepSeek LLM, 2024, arXiv 2401.02954,
    section 3.1). Under muP write {by: width, exponent: -1}."""
    batch_tokens: PowerRule = field(default_factory=PowerRule)
    """Rule of the tokens per step, rounded to full sequences; by default compute ** 0.3271 (same
    source)."""

    def check(self, key: str = "rules.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)
        yield from check_fields(f"{key}lr.", self.lr)
        yield from check_fields(f"{key}batch_tokens.", self.batch_tokens)


@dataclass
class HeldOutConfig:
    """A larger point that is predicted before it is run, and is not part of the fit."""

    size: Annotated[int, WIDTH] = 0
    """Width of the point; required."""
    tokens: Annotated[float, Range(1, 1e15)] = 0.0
    """Tokens of the point; required."""


@dataclass
class ScalingRecipe:
    """Model sizes and token counts of one recipe, the law of their loss, and its predictions."""

    FOLDER: ClassVar[str] = "scaling"

    base: Annotated[str | None, PATH] = None
    """The training recipe: a file, or the name of a shipped recipe."""
    overrides: Annotated[list[str], Unless("fit")] = field(default_factory=list)
    """Settings of the base recipe for all points, as on its command line: [tokenizer=bytes,
    logger=none]."""
    families: Annotated[dict[str, list[str]], Unless("fit")] = field(default_factory=dict)
    """Kinds of model to compare, each with its settings: {dense: [model=dbrx-tiny-dense], moe:
    [model=dbrx-tiny]}. Each has the whole grid and a separate law. Unset: one family."""
    sizes: Annotated[list[int], WIDTH, Unless("fit")] = field(default_factory=list)
    """Widths (model.d_model)."""
    tokens: Annotated[list[float], Range(1, 1e15), Unless("fit")] = field(default_factory=list)
    """Numbers of tokens for which each size is trained. Each is a separate run with a full
    schedule, rounded to whole steps."""
    compute: Annotated[list[float], Range(1, 1e30), Unless("fit")] = field(default_factory=list)
    """FLOPs of each run, in place of tokens, so that sizes compare at equal compute (isoFLOP)."""
    lr_factors: Annotated[list[float], POSITIVE] = field(default_factory=lambda: [1.0])
    """Learning rates of each point, as factors of the rule's. The fit uses the best one, and its
    trend."""
    batch_factors: Annotated[list[float], POSITIVE] = field(default_factory=lambda: [1.0])
    """Batch sizes of each point, as factors of the rule's. The fit uses the best one, and its
    trend."""
    seeds: Annotated[list[int], Range(0), Unless("fit")] = field(default_factory=list)
    """Seeds of each point, a run for each; unset: the base recipe's."""
    held_out: Annotated[HeldOutConfig | None, Unless("fit")] = None
    """A larger run that tests the law."""
    rules: RulesConfig = field(default_factory=RulesConfig)
    """How depth, heads, batch size and learning rate follow from width and tokens."""
    output: Annotated[str, PATH] = "runs/scaling"
    """The folder of the experiment: points/ with a run's folder for each point, scaling.json,
    points.csv and scaling.html."""
    workers: Annotated[int | None, Range(1, MOST_RUNS), Unless("fit")] = None
    """Number of runs at a time, which share the cores of this machine. Unset: 1, or all if they are
    launched on slurm or kubernetes, which queue them."""
    launch: Annotated[LaunchConfig | None, Unless("fit")] = None
    """Launch each point as a run of its own (launch=slurm) instead of a process on this machine,
    with the keys of a training recipe's launch section. This machine and the training machines need
    a shared file system, with `output` at the same path. Ctrl-C does not stop the runs."""
    fit: Annotated[str | None, PATH] = None
    """A CSV file of existing runs, in place of base, with columns parameters (N), tokens (D) or
    flops (C), loss, and optionally family and held_out."""
    parameters: Annotated[str, choice(COUNTED)] = "active"
    """Parameters that count as the law's N: active (parameters that process a token, with the
    selected experts only), total, or non_embedding (active, without embeddings and an untied
    head)."""
    bootstrap: Annotated[int, Range(20, 10_000)] = 200
    """Number of bootstrap samples of the runs for the confidence intervals (80 %)."""
    budget: str | None = None
    """Compute budget for which the best model is predicted: FLOPs, 1e21, or hours of a GPU of
    `hardware`, 1000h."""
    extrapolate: Annotated[bool, Only("budget")] = False
    """Predict at more than 100 times the compute of the largest fitted run. The prediction is
    marked."""
    hardware: Annotated[str | None, Unless("fit")] = None
    """GPUs for which the time of points and of the budget is planned, such as 8xh100, as in
    scripts/plan.py; unset: times are those of finished runs."""
    price: Annotated[float | None, POSITIVE, Unless("fit")] = None
    """Price per hour of a GPU, or without `hardware` of this machine, in any currency."""
    flops_per_second: Annotated[float | None, POSITIVE, Unless("fit")] = None
    """Speed of this machine, for the plan before a run is finished; `hardware` has speeds of its
    own."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that are imported before anything is checked."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        if (yield from check_fields("", self)):
            return
        if (self.base is None) == (self.fit is None):
            yield "base: write base=RECIPE, whose runs to fit, or fit=points.csv" + (
                ", not both" if self.base else ""
            )
        yield from self.rules.check()
        yield from self._check_grid()
        yield from self._check_words()
        yield from self._check_launch()
        yield from self._check_prediction()

    def _check_grid(self) -> Iterator[str]:
        if self.fit is not None:
            return
        if self.held_out is not None:
            yield from check_fields("held_out.", self.held_out)
        if bool(self.tokens) == bool(self.compute):
            yield "tokens: write tokens=[…], or compute=[…] in FLOPs" + (
                ", not both" if self.tokens else ""
            )
        for key in ("sizes", "tokens", "compute", "lr_factors", "batch_factors", "seeds"):
            values = getattr(self, key)
            if len({*values}) < len(values):
                yield f"{key}: has a value twice; remove one"
        if not self.sizes or not self.lr_factors or not self.batch_factors:
            yield "sizes, lr_factors, batch_factors: each needs a value; write sizes=[64,96,128]"
        lists = (self.sizes, self.tokens or self.compute, self.lr_factors, self.batch_factors)
        count = max(1, len(self.families)) * max(1, len(self.seeds))
        for values in lists:
            count *= len(values)
        if count > MOST_RUNS:
            yield f"sizes: {count:,} runs; write fewer values, {MOST_RUNS} runs or less"

    def _check_words(self) -> Iterator[str]:
        for name in self.families:
            if not re.fullmatch(r"[\w.-]{1,64}", name) or name.startswith("."):
                yield f"families: {name!r} cannot name a folder; write letters, digits, - and _"
        listed = {"overrides": self.overrides}
        listed |= {f"families.{name}": words for name, words in self.families.items()}
        for key, words in listed.items():
            for word in words:
                try:
                    named, _ = key_and_text(word)
                except UserError as error:
                    yield from (f"{key}: {line}" for line in error.problems)
                    continue
                if named in DECIDED or (named == "seed" and self.seeds):
                    yield f"{key}: {named} is decided by {DECIDED.get(named, 'seeds')}; remove it"

    def _check_launch(self) -> Iterator[str]:
        if self.launch is None:
            return
        yield from self.launch.check()
        yield from self.launch.check_launch()
        if self.launch.target == "skypilot":
            yield "launch.target: skypilot is only printed; write slurm, kubernetes, ssh or local"
        if self.launch.in_containers(f"{self.output}/points"):
            yield (
                f"output: {self.output} goes with the container that writes it; write a folder on a"
                " volume that this machine has too: launch.mounts=[runs:/runs] output=/runs/scaling"
            )

    def _check_prediction(self) -> Iterator[str]:
        if self.budget is not None:
            match = _BUDGET.fullmatch(self.budget.strip())
            if match is None or not 0 < float(match[1]) < 1e40:
                yield f"budget: {self.budget!r}; write FLOPs, 1e21, or hours of a GPU, 1000h"
            elif match[2] and (self.fit is not None or self.hardware is None):
                yield "budget: hours are of a base's GPUs; write hardware=8xh100, or FLOPs, 1e21"
        if self.hardware is not None:
            try:
                if not Hardware.parse(self.hardware, "hardware").is_timed:
                    yield f"hardware: {self.hardware} has no speed to plan with; write 8xh100"
            except UserError as error:
                yield from error.lines()

    @property
    def target(self) -> str:
        """Launch target of the points; empty: processes on this machine."""
        return "" if self.launch is None else self.launch.target

    @property
    def budget_flops(self) -> float:
        """The budget in FLOPs; it must not be in hours."""
        return float(self.budget or 0)

    @property
    def budget_hours(self) -> float:
        """GPU hours of the budget; 0 if the budget is in FLOPs."""
        text = (self.budget or "").strip().lower()
        return float(text[:-1]) if text.endswith("h") else 0.0

    def fill(self) -> None:
        """Resolve defaults in place."""
        for rule, exponent in ((self.rules.lr, -0.125), (self.rules.batch_tokens, 0.3271)):
            if rule.exponent is None:
                rule.exponent = exponent
