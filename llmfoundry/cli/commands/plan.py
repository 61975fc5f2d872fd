"""Command of `scripts/plan.py`: memory, time and cost of a run, estimated without its GPUs.

Entry point: `plan`. `plan/layouts.py` enumerates parallel layouts, and `plan/seconds.py` estimates
their step times. `--dry-run` and the start of a run print the estimate for the recipe's own layout.
Speeds come from the data sheet of the GPU or from a report of `make gpu-check`
(`benchmarks/gpu_check/`).
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

import torch

from llmfoundry.cli.inference_plan import memory_lines
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
    Cluster,
    ParallelLayout,
    Ranking,
    own_layout,
    rank,
    too_large,
    why,
)
from llmfoundry.plan.memory import GIB
from llmfoundry.plan.microbatch_sizes import USABLE, memory_of_gpu
from llmfoundry.plan.seconds import Speeds, in_seconds, speed_line, speeds, step_line, unmeasured
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
"""Seconds from a failure until training continues: detection, replacement, start, loading.

The work since the last checkpoint, which is repeated, comes on top."""


@dataclass(frozen=True)
class RunCost:
    """Time and cost of a complete run.

    Attributes:
        tokens: training tokens; None: unknown.
        seconds: training time without failures; None: unknown.
        goodput: fraction of the time that is not lost to failures.
        gpus: number of GPUs.
        price: price of a GPU-hour; None: not known.
        watts: power limit of a GPU; 0: not known.
    """

    tokens: float | None
    seconds: float | None
    goodput: float
    gpus: int
    price: float | None
    watts: float = 0.0

    @property
    def gpu_hours(self) -> float | None:
        """Return the GPU-hours of the run, including time lost to failures."""
        if self.seconds is None:
            return None
        return self.seconds / self.goodput * self.gpus / 3600

    @property
    def money(self) -> float | None:
        """Return the cost of the run in the currency of `price`."""
        hours = self.gpu_hours
        return None if hours is None or self.price is None else hours * self.price

    @property
    def kwh(self) -> float | None:
        """Return the energy of the GPUs at their power limit; None: not known."""
        hours = self.gpu_hours
        return None if hours is None or not self.watts else hours * self.watts / 1000


def plan(recipe: ResolvedTrainRecipe) -> None:
    """Print the estimates for a checked recipe.

    Raises:
        UserError: no layout fits, or the recipe fine-tunes.
    """
    # hardware, and the speeds that it reaches
    if isinstance(recipe, ResolvedFinetuneRecipe):
        raise UserError(
            "model.pretrained: fine-tuning is not timed; write --dry-run=8x80gb behind"
            " scripts/finetune.py for its memory"
        )
    user_recipe = recipe.user_recipe
    assert isinstance(user_recipe, PlanRecipe)
    hardware = Hardware.parse(user_recipe.hardware, "hardware")
    recipe = with_guessed_vocabulary(recipe)
    if user_recipe.inference:
        return _print_inference(recipe, hardware)
    check_fp8(recipe, hardware)
    reached, source = measured_speeds(hardware, recipe, user_recipe.gpu_check)
    setting = Cluster(hardware.gpus, reached, memory_of_gpu(hardware))

    # the recipe's own layout, and the fastest ones
    recipe_layout, refusals = _recipe_layout(recipe, setting)
    ranking = Ranking([], None, 0, 0)
    if user_recipe.layouts:
        ranking = rank(recipe, setting, user_recipe.layouts)
    layout = recipe_layout or next(iter(ranking.best), None)
    if layout is None:
        raise UserError(*(refusals or ["hardware: no layout fits"]), *_nearest(ranking))

    # print
    if user_recipe.format == "json":
        facts = _as_json(user_recipe, recipe, recipe_layout, ranking, setting)
        print(json.dumps(facts | {"refused": refusals, "speeds": source}, indent=1))
        return
    rows = [("model", _model(recipe)), ("hardware", f"{hardware}; {source}")]
    if recipe_layout is None:
        rows += [("the recipe's own", line) for line in refusals]
    label = "layout" if recipe_layout else "the fastest"
    rows += [(label, layout.name()), *describe(layout, setting)]
    rows += _run(layout, user_recipe, setting)
    if ranking.best:
        rows += _ranked(user_recipe, recipe_layout, ranking)
    console = Console()
    console.banner([(label, public(text)) for label, text in rows])
    if ranking.best:
        console.table("\n".join(_table(ranking.best, setting)))


def check_fp8(recipe: ResolvedTrainRecipe, hardware: Hardware) -> None:
    """Check that GPUs whose data sheet is known have the fp8 that a recipe uses.

    Raises:
        UserError: they have none.
    """
    if hardware.gpu.fp8_tflops or not hardware.gpu.tflops:
        return
    if recipe.fp8_recipe is not None and not recipe.fp8_emulate:
        raise UserError(f"precision: amp_fp8, but {hardware.name} has no fp8; write amp_bf16")
    if recipe.parallel.activation_compression == "fp8":
        key = "parallel.activation_compression"
        raise UserError(f"{key}: fp8, but {hardware.name} has no fp8; write int8")


def _recipe_layout(
    recipe: ResolvedTrainRecipe, setting: Cluster
) -> tuple[ParallelLayout | None, list[str]]:
    """Return the recipe's own layout, or None and why it is not possible."""
    try:
        return own_layout(recipe, setting), []
    except UserError as error:
        return None, error.lines()


def _print_inference(recipe: ResolvedTrainRecipe, hardware: Hardware) -> None:
    """Print what fits of an evaluation or a server on this hardware."""
    room = int(USABLE * memory_of_gpu(hardware))
    lines = memory_lines(recipe, hardware.gpus, room, torch.device("cuda"))
    rows = [("model", _model(recipe)), ("hardware", str(hardware)), *lines]
    Console().banner([(label, public(text)) for label, text in rows])


def _model(recipe: ResolvedTrainRecipe) -> str:
    """Return the model's name, its numbers of parameters, and its FLOPs per token."""
    total, active = parameter_count(recipe.model), active_parameter_count(recipe.model)
    text = f"{recipe.model.name}, {short_count(total)} parameters"
    if active != total:
        text += f", {short_count(active)} active"
    flops = flops_per_token(recipe.model, recipe.max_seq_len)
    return f"{text}, {short_count(flops)}FLOPs a token at {recipe.max_seq_len:,} tokens a row"


def describe(layout: ParallelLayout, setting: Cluster) -> Rows:
    """Yield lines about memory, communication and speed of a layout."""
    # memory of a process with its microbatch (sequences)
    rows, gpu = layout.microbatch, setting.reached.gpu
    room = f"{layout.room / GIB:.1f} GiB may be used"
    parts = parts_text(layout.need, rows)
    yield "memory", f"about {format_gib(layout.bytes / GIB)} a GPU: {parts}; {room}"

    # bytes communicated per GPU and step
    sent_bytes, between_nodes = Counter[str](), 0
    for transfer in communication(layout.recipe, setting.gpus, rows, gpu.node):
        sent_bytes[transfer.what] += transfer.sent
        between_nodes += transfer.between
    if sent_bytes.total():
        kinds = ", ".join(f"{kind} {format_gib(n / GIB)}" for kind, n in sent_bytes.most_common())
        within_node = format_gib((sent_bytes.total() - between_nodes) / GIB)
        text = f"{within_node} a GPU and step inside a node"
        if between_nodes:
            text += f", {format_gib(between_nodes / GIB)} between nodes"
        yield "sends", f"{text}: {kinds}"

    # speed
    yield "step", step_line(layout.step)
    yield "speed", speed_line(layout.step, layout.recipe, setting.gpus, gpu)
    for line in unmeasured(layout.recipe):
        yield "not measured", line


def costs(layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster) -> RunCost:
    """Estimate time and cost of the complete run."""
    # tokens, by the recipe's length if `tokens` is not set; and training time
    recipe = layout.recipe
    step_tokens = recipe.global_train_batch_size * recipe.max_seq_len
    tokens, length = user_recipe.tokens, Duration.parse(recipe.max_duration)
    if tokens is None and length.unit != "ep":
        clock = Clock(recipe.global_train_batch_size, step_tokens, 1.0, length)
        tokens = float(clock.total * step_tokens)
    seconds = None
    if tokens is not None:
        seconds = math.ceil(tokens / step_tokens) * layout.step.total

    # each failure costs a restart, and on average half of a checkpoint interval
    goodput = 1.0
    if user_recipe.failures is not None:
        seconds_between = user_recipe.failures / setting.gpus * 3600
        lost_seconds = RESTART + _interval(recipe, layout) / 2
        goodput = seconds_between / (seconds_between + lost_seconds)
    gpu = setting.reached.gpu
    price = user_recipe.price or gpu.price or None
    return RunCost(tokens, seconds, goodput, setting.gpus, price, gpu.watts * gpu.power)


def _interval(recipe: ResolvedTrainRecipe, layout: ParallelLayout) -> float:
    """Return the seconds between checkpoints; 0 if they are unknown."""
    rows = recipe.global_train_batch_size
    every = Duration.parse(recipe.save_interval)
    if every.unit in ("ep", "dur"):
        return 0.0
    return Clock(rows, rows * recipe.max_seq_len, 1.0, every).total * layout.step.total


def _run(layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster) -> Rows:
    """Yield lines about time, cost and checkpoints of the run."""
    run = costs(layout, user_recipe, setting)
    if run.seconds is None or run.gpu_hours is None or run.tokens is None:
        yield "run", f"{user_recipe.max_duration} of a text of unknown length; write tokens=1e12"
    else:
        text = f"{duration(run.seconds / run.goodput)} for {short_count(run.tokens)} tokens"
        text += f", {short_count(run.gpu_hours)} GPU-hours"
        if run.money is not None:
            what = "at" if user_recipe.price else "US dollars at a typical"
            text += f", {run.money:,.0f} {what} {run.price:g} an hour"
        if run.kwh is not None:
            text += f", at most {run.kwh:,.0f} kWh at {run.watts:g} W a GPU"
        if run.goodput < 1:
            text += f"; goodput {percent(run.goodput)}"
        yield "run", text
    yield "checkpoint", f"about {format_gib(checkpoint_bytes(layout) / GIB)}"


def checkpoint_bytes(layout: ParallelLayout) -> int:
    """Return the size of a checkpoint: weights and optimizer state."""
    recipe = layout.recipe
    width = 2 if recipe.precision == "bf16" else 4
    return round((width + recipe.state_bytes(width)) * layout.need.parameters)


def _ranked(
    user_recipe: PlanRecipe, recipe_layout: ParallelLayout | None, ranking: Ranking
) -> Rows:
    """Yield lines about the fastest layout and why it is the fastest."""
    first, *others = ranking.best
    words = first.overrides(user_recipe)
    if not words:
        yield "fastest", "the recipe as it is written"
    else:
        yield "fastest", " ".join(words)
    if others:
        gap = others[0].step.total / first.step.total - 1
        yield "why", f"{percent(gap)} faster than {others[0].name()}: {why(first, others[0])}"
    if recipe_layout is not None and recipe_layout.step.total > first.step.total:
        gap = recipe_layout.step.total / first.step.total - 1
        yield "", f"{percent(gap)} faster than the recipe's own: {why(first, recipe_layout)}"
    yield from (("does not fit", line) for line in _nearest(ranking))
    yield "looked at", f"{ranking.looked_at:,} layouts, memory of {ranking.estimated:,}"


def _nearest(ranking: Ranking) -> Iterator[str]:
    """Yield a line about the fastest layout that does not fit into memory, if there is one."""
    if ranking.nearest is not None:
        near = ranking.nearest
        seconds = in_seconds(near.step.total)
        yield f"the fastest of those: {near.name()}, {seconds}: {too_large(near)}"


def _table(layouts: list[ParallelLayout], setting: Cluster) -> list[str]:
    """Return a table of layouts."""
    gpu = setting.reached.gpu
    rows = [
        (
            str(number),
            layout.name(),
            f"{layout.step.total:.3g}",
            percent(layout.step.mfu(gpu)),
            f"{layout.bytes / GIB:.1f}",
            f"{sum(layout.step.waiting.values()):.2g}",
        )
        for number, layout in enumerate(layouts, 1)
    ]
    head = ("", "layout", "s a step", "MFU", "GiB", "s waiting")
    return columns(head, rows, left=(0, 1))


def _as_json(
    user_recipe: PlanRecipe,
    recipe: ResolvedTrainRecipe,
    recipe_layout: ParallelLayout | None,
    ranking: Ranking,
    setting: Cluster,
) -> dict[str, Any]:
    near = ranking.nearest
    own = None
    if recipe_layout is not None:
        own = _layout_json(recipe_layout, user_recipe, setting)
    return {
        "hardware": user_recipe.hardware,
        "gpus": setting.gpus,
        "parameters": parameter_count(recipe.model),
        "active_parameters": active_parameter_count(recipe.model),
        "flops_per_token": flops_per_token(recipe.model, recipe.max_seq_len),
        "own": own,
        "best": [_layout_json(layout, user_recipe, setting) for layout in ranking.best],
        "nearest": None if near is None else _layout_json(near, user_recipe, setting),
        "looked_at": ranking.looked_at,
    }


def _layout_json(
    layout: ParallelLayout, user_recipe: PlanRecipe, setting: Cluster
) -> dict[str, Any]:
    recipe, step, gpu = layout.recipe, layout.step, setting.reached.gpu
    run = costs(layout, user_recipe, setting)
    tokens = recipe.global_train_batch_size * recipe.max_seq_len / step.total / setting.gpus
    transfers = communication(recipe, setting.gpus, layout.microbatch, gpu.node)
    return {
        "layout": layout.name(),
        "overrides": layout.overrides(user_recipe),
        "microbatch": layout.microbatch,
        "bytes": layout.bytes,
        "bytes_by_kind": layout.need.parts(layout.microbatch),
        "room": layout.room,
        "sends": [transfer._asdict() for transfer in transfers],
        "fits": layout.fits,
        "seconds": step.total,
        "parts": step.split(),
        "tokens_per_second_per_gpu": tokens,
        "mfu": step.mfu(gpu),
        "hfu": step.hfu(gpu),
        "run_tokens": run.tokens,
        "run_seconds": run.seconds,
        "goodput": run.goodput,
        "gpu_hours": run.gpu_hours,
        "money": run.money,
        "kwh": run.kwh,
        "checkpoint_bytes": checkpoint_bytes(layout),
    }


GPU_CHECK = Path("gpu-check/gpu-check.json")


def measured_speeds(
    hardware: Hardware, recipe: ResolvedTrainRecipe, path: str | None
) -> tuple[Speeds, str]:
    """Return the speeds of a GPU and a text about their source.

    Args:
        hardware: the GPUs. For GPUs that this project does not know, any report is accepted.
        recipe: resolved recipe.
        path: report of `make gpu-check`; None: GPU_CHECK, if it exists and measured such a GPU.

    Raises:
        UserError: the file at `path` cannot be read or measured another device.
    """
    # without a report, speeds of the data sheet
    data_sheet = speeds(hardware.gpu, recipe), "speeds by the data sheet"
    if path is None and not GPU_CHECK.is_file():
        return data_sheet
    file = GPU_CHECK if path is None else find_file(path, "gpu_check")
    try:
        device, tflops, copy_rate = _read_rates(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if path is None:
            return data_sheet
        raise UserError(
            f"gpu_check: {file} is no report of make gpu-check; write another"
        ) from error
    if not _is_same(device, hardware):
        if path is None:
            return data_sheet
        raise UserError(
            f"gpu_check: {file} measured {device or 'no GPU'}, but hardware is {hardware.name};"
            " write the report of such a GPU, or remove it"
        )

    # measured speeds
    gpu = dataclasses.replace(hardware.gpu, reached=min(1.0, tflops / hardware.gpu.tflops))
    measured = dataclasses.replace(speeds(gpu, recipe), memory=copy_rate * 1e9)
    return measured, f"products {tflops:.0f} TFLOP/s, memory {copy_rate:.0f} GB/s by {file}"


def _is_same(device: str, hardware: Hardware) -> bool:
    """Return whether a report of `device` applies to the hardware.

    Any named device applies to hardware that is written by its numbers instead of a known name.
    """
    key = known_gpu(device)
    if key is None:
        return bool(device) and hardware.name not in _KNOWN_NAMES
    return short_name(key) == hardware.name or hardware.name not in _KNOWN_NAMES


_KNOWN_NAMES = {short_name(key) for key in GPUS}


def _read_rates(file: Path) -> tuple[str, float, float]:
    """Return device name, best TFLOP/s of matmuls and best GB/s of copies in a report."""
    content = read_json(file)
    rows = [row for row in _measured_rows(content) if "product" in row]
    tflops = max(float(row["TFLOP/s"]) for row in rows if "TFLOP/s" in row)
    copy_rate = max(float(row["GB/s"]) for row in rows if "GB/s" in row)
    if not (0 < tflops < 1e6 and 0 < copy_rate < 1e6):
        raise ValueError("no rates")
    return str(content["facts"].get("gpu", "")), tflops, copy_rate


def _measured_rows(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of all tables of a report."""
    for step in content["steps"]:
        for item in step["items"]:
            yield from item["rows"]
