"""`scripts/scaling.py`: run a grid of small runs, fit the law of their loss, test it, predict.

The idea: a point is an ordinary run in a folder of its own. That says whether it is done, so
that the same command skips it, resumes it, or refuses it where its recipe is another one now. What
is held out is predicted, and the prediction written, before its run begins.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry.cli.commands.plan import costs, measured_speeds
from llmfoundry.cli.commands.scaling_grid import GridPoint, grid, point_of, shape_near
from llmfoundry.cli.commands.scaling_runs import is_done, refuse_changed, run_all, with_result
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write, one_at_a_time, read_json_if_there, write_json
from llmfoundry.loggers.console import Console, duration, short_count
from llmfoundry.loggers.pages.scaling_page import told, write_scaling_page
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.layouts import TAKEN, Cluster, own_layout, rank
from llmfoundry.recipe.before_training import PlanRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.scaling.analysis import (
    FAR,
    FamilyFit,
    fit_families,
    refuse_far,
    refuse_few,
    summary,
)
from llmfoundry.scaling.points import Point, by_family, finite, read_points, to_csv
from llmfoundry.terminal import columns

PREDICTED = "held_out.json"
_TRIES = 12  # to find the FLOPs of a budget in hours
_CLOSE = 0.01  # share by which these hours may be missed


def scaling(written: ScalingRecipe) -> None:
    """Run what is not done, and write scaling.json, points.csv and scaling.html.

    Raises:
        UserError: a point's recipe is another than its folder's, or there is no law.
        RunFailure: runs failed; the same command resumes them.
    """
    recipe, console = copy.deepcopy(written), Console()
    recipe.fill()
    if recipe.fit is not None:
        return report(recipe, read_points(find_file(recipe.fit, "fit")), {}, console)
    made = grid(recipe)
    with one_at_a_time(
        Path(recipe.output).expanduser() / "scaling.lock",
        key="output",
        busy="another process is at work there; wait, or write another",
        instead="write another folder",
    ):
        refuse_changed(made)
        print_plan(recipe, made, console)
        tests = _run(recipe, made, console)
        report(recipe, [with_result(one) for one in made], tests, console)


def print_plan(recipe: ScalingRecipe, made: Sequence[GridPoint], console: Console) -> None:
    """The table of all points before any is run, and their sums.

    Raises:
        UserError: they are too few for a law, or do not fit on the hardware.
    """
    points = [with_result(one) for one in made]
    for family, runs in by_family([point for point in points if not point.held_out]).items():
        refuse_few([(run.parameters, run.tokens) for run in runs], f"sizes: {family or 'its'} runs")
    rows, flops, seconds = [], list[float](), list[float | None]()
    for one, point in zip(made, points, strict=True):
        takes = _seconds(recipe, one, points)
        state = "begun" if (one.folder / "recipe.yaml").exists() else ""
        if is_done(one.folder):
            state = "done"
        else:
            flops.append(point.flops)
            seconds.append(takes)
        counts = (point.total, point.active, point.non_embedding, point.tokens)
        rows.append(
            [
                point.name + " (held out)" * point.held_out,
                *map(short_count, counts),
                f"{point.tokens / point.parameters:.3g}",
                short_count(point.batch_tokens),
                f"{point.tokens / point.batch_tokens:,.0f}",
                f"{point.lr:.3g}",
                f"{point.flops:.3g}",
                "" if takes is None else duration(takes),
                state,
            ]
        )
    head = ["point", "N total", "N active", "N no emb.", "D", "D/N", "tokens a step", "steps"]
    head += ["lr", "FLOPs", "time", ""]
    console.table("\n".join(columns(head, rows, left=(0, 11))))
    text = f"to run: {len(flops)} of {len(made)} runs, {sum(flops):.3g} FLOPs"
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        text += "; of unknown time: write flops_per_second, or hardware"
    elif known:
        together = 1 if recipe.hardware else recipe.workers or 1
        text += f", about {_cost(recipe, sum(known) / together)}"
    console.note(text)


def _cost(recipe: ScalingRecipe, seconds: float) -> str:
    """Time, GPU-hours where GPUs are named, and money."""
    gpus = 1 if recipe.hardware is None else Hardware.parse(recipe.hardware, "hardware").gpus
    hours, text = seconds / 3600 * gpus, duration(seconds)
    if recipe.hardware is not None:
        text += f" on {recipe.hardware}, {short_count(hours)} GPU-hours"
    if recipe.price is not None:
        text += f", {hours * recipe.price:,.2f} at {recipe.price:g} an hour"
    return text


def _seconds(recipe: ScalingRecipe, one: GridPoint, done: Sequence[Point]) -> float | None:
    """Of a run: planned for the hardware, or at the speed of the done run of the nearest size."""
    if recipe.hardware is not None:
        return _planned(recipe, one)
    mine = one.point
    near = min(
        (other for other in done if other.seconds > 0),
        key=lambda p: (p.name != mine.name, abs(math.log(p.parameters / mine.parameters))),
        default=None,
    )
    if near is not None:
        return mine.flops / near.flops * near.seconds
    return None if recipe.flops_per_second is None else mine.flops / recipe.flops_per_second


def _planned(recipe: ScalingRecipe, one: GridPoint) -> float | None:
    """Seconds of a run on the recipe's hardware: in its own layout, or the fastest that fits.

    Raises:
        UserError: none fits.
    """
    written = checked(PlanRecipe, recipe.base, [*one.words, f"hardware={recipe.hardware}"])
    hardware = Hardware.parse(written.hardware, "hardware")
    filled = with_guessed_vocabulary(written.resolve())
    reached, _ = measured_speeds(hardware, filled, None)
    setting = Cluster(hardware.gpus, reached, hardware.memory - TAKEN)
    try:
        layout = own_layout(filled, setting)
    except UserError:
        best = rank(filled, setting, 1).best
        if not best:
            size = short_count(one.point.total)
            raise UserError(
                f"hardware: no layout of {recipe.hardware} holds {one.point.name}, {size}"
                " parameters; write more GPUs, or a smaller budget"
            ) from None
        layout = best[0]
    return costs(layout, written, setting).seconds


def _run(recipe: ScalingRecipe, made: Sequence[GridPoint], console: Console) -> dict[str, Any]:
    """All runs, those that are held out after the law and what it says of them is written."""
    run_all(recipe, [one for one in made if not one.point.held_out], console)
    held = {one.point.family: one for one in made if one.point.held_out}
    if not held:
        return {}
    fits = fit_families([with_result(one) for one in made], recipe.bootstrap)
    tests = predicted(fits, held, Path(recipe.output).expanduser() / PREDICTED)
    for family, test in tests.items():
        low, high = test["interval"] or (math.nan, math.nan)
        late = "" if test["before"] else ", after its run"
        console.note(
            f"{family or 'held out'}: loss {test['predicted']:.4f} ({low:.4f} to {high:.4f})"
            f" predicted of {test['name']}{late}"
        )
    run_all(recipe, list(held.values()), console)
    return tests


def predicted(
    fits: Sequence[FamilyFit], held: dict[str, GridPoint], path: Path
) -> dict[str, dict[str, Any]]:
    """What was predicted of each family's held-out point before its run; now, where nothing was.

    A prediction that was written stays as long as the same runs were fitted, so that nobody can
    come back to it with what the held-out run has shown.
    """
    try:
        written = read_json_if_there(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}; delete it") from error
    tests: dict[str, dict[str, Any]] = {}
    for fit in fits:
        one = held[fit.family]
        now = fit.held_out(one.point)
        before = written.get(fit.family) if isinstance(written, dict) else None
        names = ("name", "fitted", "predicted")
        if not isinstance(before, dict) or any(before.get(key) != now[key] for key in names):
            before = {**now, "before": not is_done(one.folder), "written": time.time()}
        tests[fit.family] = before
    write_json(path, finite(tests))
    return tests


def report(
    recipe: ScalingRecipe, points: Sequence[Point], tests: dict[str, Any], console: Console
) -> None:
    """Fit, predict, write the files and print what they hold."""
    output = Path(recipe.output).expanduser()
    key = "sizes" if recipe.fit is None else f"fit: {recipe.fit}"
    fits = fit_families(points, recipe.bootstrap, key=key)
    found = summary(points, fits, tests) | {"parameters": recipe.parameters}
    if recipe.budget is not None:
        for fit in fits:
            found["families"][fit.family]["prediction"] = _budget(recipe, fit, points)
    found = finite(found)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "scaling.json", found)
        atomic_write(output / "points.csv", to_csv(points))
        write_scaling_page(output / "scaling.html", found)
    except OSError as error:
        raise UserError(f"output: {output}: {one_line(error)}; write another folder") from error
    console.banner([*told(found), ("page", str(output / "scaling.html"))])


def _budget(recipe: ScalingRecipe, fit: FamilyFit, points: Sequence[Point]) -> dict[str, Any]:
    """The best model for the budget, its time and cost; `words` make it a run.

    FLOPs of hours are searched from those of the largest run on: a larger model is no slower.

    Raises:
        UserError: it is too far from what was run, or fits on no layout of the hardware.
    """
    hours = recipe.budget_hours
    flops = fit.most_flops if hours else recipe.budget_flops
    for _ in range(_TRIES):
        refuse_far(fit, flops, allowed=recipe.extrapolate)
        best = fit.predict(flops) | {"is_far": flops > FAR * fit.most_flops}
        if recipe.base is None or "undetermined" in best:
            return best
        shape = shape_near(recipe, fit.family, best["parameters"])
        one = point_of(recipe, shape, flops / shape.flops, (1.0, 1.0), shape.recipe.seed)
        seconds = _seconds(recipe, one, points)
        if not hours or not seconds:
            break
        gpus = Hardware.parse(str(recipe.hardware), "hardware").gpus
        more = hours * 3600 / gpus / seconds
        if abs(more - 1) < _CLOSE:
            break
        flops *= more
    best |= {"seconds": seconds, "cost": "" if seconds is None else _cost(recipe, seconds)}
    model = one.words[: -len(("run_name", "save_folder"))]
    return best | {"words": model, "base": recipe.base}
