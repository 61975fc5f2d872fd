"""Command of `scripts/scaling.py`: fit a scaling law to a grid of small runs, test it, predict.

Entry point: `scaling`. Each point is an ordinary run in its own folder. From the content of the
folder, the same command knows whether to skip the run, resume it, or reject it because its recipe
has changed. The loss of a held-out run is predicted, and the prediction written to a file, before
the run starts.
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
from llmfoundry.plan.layouts import Cluster, own_layout, rank
from llmfoundry.plan.microbatch_sizes import memory_of_gpu
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
_TRIES = 12  # iterations that search the FLOPs of a budget in hours
_CLOSE = 0.01  # relative tolerance of these hours


def scaling(user_recipe: ScalingRecipe) -> None:
    """Run all points that are not finished; write scaling.json, points.csv and scaling.html.

    Raises:
        UserError: the recipe of a point differs from that in its folder, or no law can be fitted.
        RunFailure: runs failed; the same command resumes them.
    """
    recipe, console = copy.deepcopy(user_recipe), Console()
    recipe.fill()
    if recipe.fit is not None:
        return report(recipe, read_points(find_file(recipe.fit, "fit")), {}, console)
    grid_points = grid(recipe)
    with one_at_a_time(
        Path(recipe.output).expanduser() / "scaling.lock",
        key="output",
        busy="another process is at work there; wait, or write another",
        instead="write another folder",
    ):
        refuse_changed(grid_points)
        print_plan(recipe, grid_points, console)
        tests = _run(recipe, grid_points, console)
        report(recipe, [with_result(point) for point in grid_points], tests, console)


def print_plan(recipe: ScalingRecipe, grid_points: Sequence[GridPoint], console: Console) -> None:
    """Print a table of all points before any runs, and the total cost of the remaining ones.

    Raises:
        UserError: there are too few points for a law, or one does not fit on the hardware.
    """
    # there must be enough points for a law
    points = [with_result(grid_point) for grid_point in grid_points]
    for family, runs in by_family([point for point in points if not point.held_out]).items():
        refuse_few([(run.parameters, run.tokens) for run in runs], f"sizes: {family or 'its'} runs")

    # the table; FLOPs and seconds of points that are not finished
    rows, flops, seconds = [], list[float](), list[float | None]()
    for grid_point, point in zip(grid_points, points, strict=True):
        point_seconds = _seconds(recipe, grid_point, points)
        state = "begun" if (grid_point.folder / "recipe.yaml").exists() else ""
        if is_done(grid_point.folder):
            state = "done"
        else:
            flops.append(point.flops)
            seconds.append(point_seconds)
        counts = (point.total, point.active, point.non_embedding, point.tokens)
        rows.append(
            [
                f"{point.name} (held out)" if point.held_out else point.name,
                *map(short_count, counts),
                f"{point.tokens / point.parameters:.3g}",
                short_count(point.batch_tokens),
                f"{point.tokens / point.batch_tokens:,.0f}",
                f"{point.lr:.3g}",
                f"{point.flops:.3g}",
                "" if point_seconds is None else duration(point_seconds),
                state,
            ]
        )
    head = ["point", "N total", "N active", "N no emb.", "D", "D/N", "tokens a step", "steps"]
    head += ["lr", "FLOPs", "time", ""]
    console.table("\n".join(columns(head, rows, left=(0, 11))))

    # totals
    text = f"to run: {len(flops)} of {len(grid_points)} runs, {sum(flops):.3g} FLOPs"
    known_seconds = [value for value in seconds if value is not None]
    if len(known_seconds) < len(seconds):
        text += "; of unknown time: write flops_per_second, or hardware"
    elif known_seconds:
        n_concurrent = 1 if recipe.hardware else recipe.workers or 1
        text += f", about {_cost(recipe, sum(known_seconds) / n_concurrent)}"
    console.note(text)


def _cost(recipe: ScalingRecipe, seconds: float) -> str:
    """Return a text with time, GPU-hours if there are GPUs, and money if there is a price."""
    gpus = 1 if recipe.hardware is None else Hardware.parse(recipe.hardware, "hardware").gpus
    hours, text = seconds / 3600 * gpus, duration(seconds)
    if recipe.hardware is not None:
        text += f" on {recipe.hardware}, {short_count(hours)} GPU-hours"
    if recipe.price is not None:
        text += f", {hours * recipe.price:,.2f} at {recipe.price:g} an hour"
    return text


def _seconds(recipe: ScalingRecipe, one: GridPoint, done: Sequence[Point]) -> float | None:
    """Estimate the seconds of a run.

    They are planned for the recipe's hardware, or scaled from the finished run of the nearest size,
    or follow from `flops_per_second`. None: unknown.
    """
    if recipe.hardware is not None:
        return _planned(recipe, one)
    point = one.point
    nearest = min(
        (other for other in done if other.seconds > 0),
        key=lambda p: (p.name != point.name, abs(math.log(p.parameters / point.parameters))),
        default=None,
    )
    if nearest is not None:
        return point.flops / nearest.flops * nearest.seconds
    return None if recipe.flops_per_second is None else point.flops / recipe.flops_per_second


def _planned(recipe: ScalingRecipe, one: GridPoint) -> float | None:
    """Plan the seconds of a run on the recipe's hardware.

    The layout is that of the recipe, or the fastest one that fits.

    Raises:
        UserError: no layout fits.
    """
    user_recipe = checked(PlanRecipe, recipe.base, [*one.words, f"hardware={recipe.hardware}"])
    hardware = Hardware.parse(user_recipe.hardware, "hardware")
    resolved = with_guessed_vocabulary(user_recipe.resolve())
    reached, _ = measured_speeds(hardware, resolved, None)
    setting = Cluster(hardware.gpus, reached, memory_of_gpu(hardware))
    try:
        layout = own_layout(resolved, setting)
    except UserError:
        best = rank(resolved, setting, 1).best
        if not best:
            size = short_count(one.point.total)
            raise UserError(
                f"hardware: no layout of {recipe.hardware} holds {one.point.name}, {size}"
                " parameters; write more GPUs, or a smaller budget"
            ) from None
        layout = best[0]
    return costs(layout, user_recipe, setting).seconds


def _run(
    recipe: ScalingRecipe, grid_points: Sequence[GridPoint], console: Console
) -> dict[str, Any]:
    """Run all points; held-out points run last, after the predictions of their loss are written.

    Returns:
        The predictions by family.
    """
    # the runs to fit
    run_all(recipe, [one for one in grid_points if not one.point.held_out], console)
    held_out = {one.point.family: one for one in grid_points if one.point.held_out}
    if not held_out:
        return {}

    # predict the held-out runs, then run them
    fits = fit_families([with_result(one) for one in grid_points], recipe.bootstrap)
    tests = predicted(fits, held_out, Path(recipe.output).expanduser() / PREDICTED)
    for family, test in tests.items():
        low, high = test["interval"] or (math.nan, math.nan)
        late = "" if test["before"] else ", after its run"
        console.note(
            f"{family or 'held out'}: loss {test['predicted']:.4f} ({low:.4f} to {high:.4f})"
            f" predicted of {test['name']}{late}"
        )
    run_all(recipe, list(held_out.values()), console)
    return tests


def predicted(
    fits: Sequence[FamilyFit], held: dict[str, GridPoint], path: Path
) -> dict[str, dict[str, Any]]:
    """Return the predicted loss of each family's held-out point, and write it to `path`.

    A prediction in the file is used again if it was fitted to the same runs, so that the result of
    the held-out run cannot change it afterwards.

    Args:
        fits: fitted law of each family.
        held: held-out point of each family.
        path: file of the predictions.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        earlier = read_json_if_there(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}; delete it") from error
    tests: dict[str, dict[str, Any]] = {}
    for fit in fits:
        point = held[fit.family]
        prediction = fit.held_out(point.point)
        test = earlier.get(fit.family) if isinstance(earlier, dict) else None
        names = ("name", "fitted", "predicted")
        if not isinstance(test, dict) or any(test.get(key) != prediction[key] for key in names):
            test = {**prediction, "before": not is_done(point.folder), "written": time.time()}
        tests[fit.family] = test
    write_json(path, finite(tests))
    return tests


def report(
    recipe: ScalingRecipe, points: Sequence[Point], tests: dict[str, Any], console: Console
) -> None:
    """Fit the law, predict, write the result files and print a summary."""
    output = Path(recipe.output).expanduser()
    key = "sizes" if recipe.fit is None else f"fit: {recipe.fit}"
    fits = fit_families(points, recipe.bootstrap, key=key)
    results = summary(points, fits, tests) | {"parameters": recipe.parameters}
    if recipe.budget is not None:
        for fit in fits:
            results["families"][fit.family]["prediction"] = _budget(recipe, fit, points)
    results = finite(results)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "scaling.json", results)
        atomic_write(output / "points.csv", to_csv(points))
        write_scaling_page(output / "scaling.html", results)
    except OSError as error:
        raise UserError(f"output: {output}: {one_line(error)}; write another folder") from error
    console.banner([*told(results), ("page", str(output / "scaling.html"))])


def _budget(recipe: ScalingRecipe, fit: FamilyFit, points: Sequence[Point]) -> dict[str, Any]:
    """Return the best model for the budget, with its time, cost and command-line overrides.

    The FLOPs of a budget in hours are searched upwards from those of the largest run: a larger
    model reaches at least the same FLOP/s.

    Raises:
        UserError: the budget is too far from the runs, or no layout of the hardware fits.
    """
    # search the FLOPs; a single iteration if the budget has FLOPs
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
        ratio = hours * 3600 / gpus / seconds
        if abs(ratio - 1) < _CLOSE:
            break
        flops *= ratio

    # overrides without the name and the folder of the run
    best |= {"seconds": seconds, "cost": "" if seconds is None else _cost(recipe, seconds)}
    model = one.words[: -len(("run_name", "save_folder"))]
    return best | {"words": model, "base": recipe.base}
