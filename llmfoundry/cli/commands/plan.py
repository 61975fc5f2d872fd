"""`scripts/plan.py`: memory, seconds, days and money of a run on GPUs that need not be here.

`plan/layouts.py` finds the layouts, `plan/seconds.py` times them. `--dry-run` and the start of a
run show the seconds of the recipe's own. Speeds are those of a GPU's data sheet, or those that
`make gpu-check` (`benchmarks/gpu_check/`) measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.files import read_json
from llmfoundry.loggers.console import Console, duration, format_gib, percent, short_count
from llmfoundry.models.counts import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
)
from llmfoundry.plan.communication import communication
from llmfoundry.plan.fit import parts_text, with_guessed_vocabulary
from llmfoundry.plan.layouts import (
    TAKEN,
    Cluster,
    ParallelLayout,
    Ranking,
    own_layout,
    rank,
    too_large,
    why,
)
from llmfoundry.plan.memory import GIB
from llmfoundry.plan.seconds import Speeds, in_seconds, speed_line, speeds, step_line
from llmfoundry.recipe.before_training import PlanRecipe
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.hardware import GPUS, Hardware, known_gpu, short_name
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public
from llmfoundry.terminal import columns

Rows = Iterator[tuple[str, str]]
RESTART = 600.0
"""Seconds from a failure until training continues, what was computed since the last save left out:
detected, replaced, started, loaded."""


@dataclass(frozen=True)
class RunCost:
    """What a whole run takes.

    Attributes:
        tokens: that it trains on; None: not known.
        seconds: without failures.
        goodput: share of the time that is not lost to failures.
        gpus: that it has.
        price: of one of them an hour; None: not given.
    """

    tokens: float | None
    seconds: float | None
    goodput: float
    gpus: int
    price: float | None

    @property
    def gpu_hours(self) -> float | None:
        """Of all GPUs, with what failures cost."""
        if self.seconds is None:
            return None
        return self.seconds / self.goodput * self.gpus / 3600

    @property
    def money(self) -> float | None:
        """Of all GPUs, in the price's currency."""
        hours = self.gpu_hours
        return None if hours is None or self.price is None else hours * self.price


def plan(recipe: ResolvedTrainRecipe) -> None:
    """Print what a checked recipe would take.

    Raises:
        UserError: no layout fits, or the recipe fine-tunes.
    """
    if isinstance(recipe, ResolvedFinetuneRecipe):
        raise UserError(
            "model.pretrained: fine-tuning is not timed; write --dry-run=8x80gb behind"
            " scripts/finetune.py for its memory"
        )
    user_recipe = recipe.user_recipe
    assert isinstance(user_recipe, PlanRecipe)
    hardware = Hardware.parse(user_recipe.hardware, "hardware")
    recipe = with_guessed_vocabulary(recipe)
    if recipe.fp8_recipe is not None and not hardware.gpu.fp8_tflops:
        raise UserError(f"precision: amp_fp8, but {hardware.name} has no fp8; write amp_bf16")
    reached, source = measured_speeds(hardware, recipe, user_recipe.gpu_check)
    setting = Cluster(hardware.gpus, reached, hardware.memory - TAKEN)
    own, refused = _own(recipe, setting)
    ranking = (
        rank(recipe, setting, user_recipe.layouts)
        if user_recipe.layouts
        else Ranking([], None, 0, 0)
    )
    shown = own or next(iter(ranking.best), None)
    if shown is None:
        raise UserError(*(refused or ["hardware: no layout fits"]), *_nearest(ranking))
    if user_recipe.format == "json":
        found = _as_json(user_recipe, recipe, own, ranking, setting)
        print(json.dumps(found | {"refused": refused, "speeds": source}, indent=1))
        return
    rows = [("model", _model(recipe)), ("hardware", f"{hardware}; {source}")]
    if own is None:
        rows += [("the recipe's own", line) for line in refused]
    rows += [("layout" if own else "the fastest", shown.name()), *describe(shown, setting)]
    rows += _run(shown, user_recipe, setting)
    if ranking.best:
        rows += _ranked(user_recipe, own, ranking)
    console = Console()
    console.banner([(label, public(text)) for label, text in rows])
    if ranking.best:
        console.table("\n".join(_table(ranking.best, setting)))


def _own(recipe: ResolvedTrainRecipe, setting: Cluster) -> tuple[ParallelLayout | None, list[str]]:
    """The recipe's own layout, or why it cannot be."""
    try:
        return own_layout(recipe, setting), []
    except UserError as error:
        return None, error.lines()


def _model(recipe: ResolvedTrainRecipe) -> str:
    total, active = parameter_count(recipe.model), active_parameter_count(recipe.model)
    text = f"{recipe.model.name}, {short_count(total)} parameters"
    if active != total:
        text += f", {short_count(active)} active"
    flops = flops_per_token(recipe.model, recipe.max_seq_len)
    return f"{text}, {short_count(flops)}FLOPs a token at {recipe.max_seq_len:,} tokens a row"


def describe(layout: ParallelLayout, setting: Cluster) -> Rows:
    """Memory, messages and seconds of a layout."""
    rows, gpu = layout.microbatch, setting.reached.gpu
    room = f"{layout.room / GIB:.1f} GiB may be used"
    parts = parts_text(layout.need, rows)
    yield "memory", f"about {format_gib(layout.bytes / GIB)} a GPU: {parts}; {room}"
    sent, between = Counter[str](), 0
    for each in communication(layout.recipe, setting.gpus, rows, gpu.node):
        sent[each.what] += each.sent
        between += each.between
    if sent.total():
        kinds = ", ".join(f"{what} {format_gib(n / GIB)}" for what, n in sent.most_common())
        inside = format_gib((sent.total() - between) / GIB)
        outside = f", {format_gib(between / GIB)} between nodes" * bool(between)
        yield "sends", f"{inside} a GPU and step inside a node{outside}: {kinds}"
    yield "step", step_line(layout.step)
    yield "speed", speed_line(layout.step, layout.recipe, setting.gpus, gpu)


def costs(layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster) -> RunCost:
    """Of the whole run."""
    recipe = layout.recipe
    step = recipe.global_train_batch_size * recipe.max_seq_len
    tokens, length = user_recipe.tokens, Duration.parse(recipe.max_duration)
    if tokens is None and length.unit != "ep":
        clock = Clock(recipe.global_train_batch_size, step, 1.0, length)
        tokens = float(clock.total * step)
    seconds = None if tokens is None else math.ceil(tokens / step) * layout.step.total
    goodput = 1.0
    if user_recipe.failures is not None:
        between = user_recipe.failures / setting.gpus * 3600
        goodput = between / (between + RESTART + _interval(recipe, layout) / 2)
    return RunCost(tokens, seconds, goodput, setting.gpus, user_recipe.price)


def _interval(recipe: ResolvedTrainRecipe, layout: ParallelLayout) -> float:
    """Seconds between saves; 0 where that is not known."""
    rows = recipe.global_train_batch_size
    every = Duration.parse(recipe.save_interval)
    if every.unit in ("ep", "dur"):
        return 0.0
    return Clock(rows, rows * recipe.max_seq_len, 1.0, every).total * layout.step.total


def _run(layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster) -> Rows:
    """Days, GPU-hours, money; what a checkpoint holds."""
    found = costs(layout, user_recipe, setting)
    if found.seconds is None or found.gpu_hours is None or found.tokens is None:
        yield "run", f"{user_recipe.max_duration} of a text of unknown length; write tokens=1e12"
    else:
        days = f"{duration(found.seconds / found.goodput)} for {short_count(found.tokens)} tokens"
        hours = f"{short_count(found.gpu_hours)} GPU-hours"
        money = (
            "" if found.money is None else f", {found.money:,.0f} at {user_recipe.price:g} an hour"
        )
        lost = f"; goodput {percent(found.goodput)}" if found.goodput < 1 else ""
        yield "run", f"{days}, {hours}{money}{lost}"
    yield "checkpoint", f"about {format_gib(checkpoint_bytes(layout) / GIB)}"


def checkpoint_bytes(layout: ParallelLayout) -> int:
    """Of weights and moments."""
    recipe = layout.recipe
    width = 2 if recipe.precision == "bf16" else 4
    return round((width + recipe.optimizer.moment_bytes(width)) * layout.need.parameters)


def _ranked(user_recipe: PlanRecipe, own: ParallelLayout | None, ranking: Ranking) -> Rows:
    """The fastest, and why it is."""
    first, *others = ranking.best
    words = first.overrides(user_recipe)
    if not words:
        yield "fastest", "the recipe as it is written"
    else:
        yield "fastest", " ".join(words)
    if others:
        gap = others[0].step.total / first.step.total - 1
        yield "why", f"{percent(gap)} faster than {others[0].name()}: {why(first, others[0])}"
    if own is not None and own.step.total > first.step.total:
        gap = own.step.total / first.step.total - 1
        yield "", f"{percent(gap)} faster than the recipe's own: {why(first, own)}"
    yield from (("does not fit", line) for line in _nearest(ranking))
    yield "looked at", f"{ranking.looked_at:,} layouts, memory of {ranking.estimated:,}"


def _nearest(ranking: Ranking) -> Iterator[str]:
    if ranking.nearest is not None:
        near = ranking.nearest
        seconds = in_seconds(near.step.total)
        yield f"the fastest of those: {near.name()}, {seconds}: {too_large(near)}"


def _table(found: list[ParallelLayout], setting: Cluster) -> list[str]:
    """Layouts, a line each."""
    gpu = setting.reached.gpu
    rows = [
        (
            str(number),
            one.name(),
            f"{one.step.total:.3g}",
            percent(one.step.mfu(gpu)),
            f"{one.bytes / GIB:.1f}",
            f"{sum(one.step.waiting.values()):.2g}",
        )
        for number, one in enumerate(found, 1)
    ]
    head = ("", "layout", "s a step", "MFU", "GiB", "s waiting")
    return columns(head, rows, left=(0, 1))


def _as_json(
    user_recipe: PlanRecipe,
    recipe: ResolvedTrainRecipe,
    own: ParallelLayout | None,
    ranking: Ranking,
    setting: Cluster,
) -> dict[str, Any]:
    near = ranking.nearest
    return {
        "hardware": user_recipe.hardware,
        "gpus": setting.gpus,
        "parameters": parameter_count(recipe.model),
        "active_parameters": active_parameter_count(recipe.model),
        "flops_per_token": flops_per_token(recipe.model, recipe.max_seq_len),
        "own": None if own is None else _layout_json(own, user_recipe, setting),
        "best": [_layout_json(one, user_recipe, setting) for one in ranking.best],
        "nearest": None if near is None else _layout_json(near, user_recipe, setting),
        "looked_at": ranking.looked_at,
    }


def _layout_json(
    layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster
) -> dict[str, Any]:
    recipe, step, gpu = layout.recipe, layout.step, setting.reached.gpu
    found = costs(layout, user_recipe, setting)
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / step.total / setting.gpus
    messages = communication(recipe, setting.gpus, layout.microbatch, gpu.node)
    return {
        "layout": layout.name(),
        "overrides": layout.overrides(user_recipe),
        "microbatch": layout.microbatch,
        "bytes": layout.bytes,
        "bytes_by_kind": layout.need.parts(layout.microbatch),
        "room": layout.room,
        "sends": [sent._asdict() for sent in messages],
        "fits": layout.fits,
        "seconds": step.total,
        "parts": step.split(),
        "tokens_per_second_per_gpu": tokens,
        "mfu": step.mfu(gpu),
        "hfu": step.hfu(gpu),
        "run_tokens": found.tokens,
        "run_seconds": found.seconds,
        "goodput": found.goodput,
        "gpu_hours": found.gpu_hours,
        "money": found.money,
        "checkpoint_bytes": checkpoint_bytes(layout),
    }


GPU_CHECK = Path("gpu-check/gpu-check.json")


def measured_speeds(
    hardware: Hardware, recipe: ResolvedTrainRecipe, path: str | None
) -> tuple[Speeds, str]:
    """What such a GPU reaches, and where that is from, for people.

    Args:
        hardware: the GPUs; of a file of the user's, whatever was measured counts.
        recipe: filled.
        path: the value of gpu_check; None: GPU_CHECK, where it is there and of such a GPU.

    Raises:
        UserError: the file that is asked for cannot be read, or measured another device.
    """
    by_sheet = speeds(hardware.gpu, recipe), "speeds by the data sheet"
    if path is None and not GPU_CHECK.is_file():
        return by_sheet
    file = GPU_CHECK if path is None else find_file(path, "gpu_check")
    try:
        device, products, copies = _read_rates(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if path is None:
            return by_sheet
        raise UserError(
            f"gpu_check: {file} is no report of make gpu-check; write another"
        ) from error
    if not _is_same(device, hardware):
        if path is None:
            return by_sheet
        raise UserError(
            f"gpu_check: {file} measured {device or 'no GPU'}, but hardware is {hardware.name};"
            " write the report of such a GPU, or remove it"
        )
    gpu = dataclasses.replace(hardware.gpu, reached=min(1.0, products / hardware.gpu.tflops))
    found = dataclasses.replace(speeds(gpu, recipe), memory=copies * 1e9)
    return found, f"products {products:.0f} TFLOP/s, memory {copies:.0f} GB/s by {file}"


def _is_same(device: str, hardware: Hardware) -> bool:
    key = known_gpu(device)
    if key is None:
        return bool(device) and hardware.name not in _NAMES
    return short_name(key) == hardware.name or hardware.name not in _NAMES


_NAMES = {short_name(key) for key in GPUS}


def _read_rates(file: Path) -> tuple[str, float, float]:
    """The device's name, best TFLOP/s of products, GB/s of copies."""
    content = read_json(file)
    rows = [row for row in _measured_rows(content) if "product" in row]
    products = max(float(row["TFLOP/s"]) for row in rows if "TFLOP/s" in row)
    copies = max(float(row["GB/s"]) for row in rows if "GB/s" in row)
    if not (0 < products < 1e6 and 0 < copies < 1e6):
        raise ValueError("no rates")
    return str(content["facts"].get("gpu", "")), products, copies


def _measured_rows(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in content["steps"]:
        for item in step["items"]:
            yield from item["rows"]
