"""`scripts/scaling.py`: run a grid of small runs, fit the law of their loss, test it, predict.

The idea: a point is an ordinary run in a folder of its own. That says whether it is done, so
that the same command skips it, resumes it, or refuses it where its recipe is another one now. What
is held out is predicted, and the prediction written, before its run begins.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmfoundry.builders.model import with_defaults
from llmfoundry.commands.plan import Costs, costs, measured_speeds
from llmfoundry.commands.scaling_grid import GridPoint, grid, point_of, shape_near
from llmfoundry.commands.scaling_runs import is_done, refuse_changed, run_all, with_result
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write, one_at_a_time, read_json_if_there, write_json
from llmfoundry.loggers.console import Console, duration, percent, short_count
from llmfoundry.loggers.pages.scaling import write_scaling_page
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.layouts import TAKEN, Setting, own_layout, rank
from llmfoundry.recipe.before_training import PlanRecipe
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.scaling.analysis import FamilyFit, fit_families, refuse_far, summary
from llmfoundry.scaling.points import Point, finite, read_points, to_csv
from llmfoundry.terminal import columns

PREDICTED = "held_out.json"


def scaling(written: ScalingRecipe) -> None:
    """Run what is not done, and write scaling.json, points.csv and scaling.html.

    Raises:
        UserError: a point's recipe is another than its folder's, or there is no law.
        RunFailure: runs failed; the same command resumes them.
    """
    recipe, console = copy.deepcopy(written), Console()
    recipe.fill()
    output = Path(recipe.output).expanduser()
    if recipe.fit is not None:
        return report(recipe, read_points(find_file(recipe.fit, "fit")), {}, console)
    made = grid(recipe)
    with one_at_a_time(
        output / "scaling.lock",
        key="output",
        busy="another process is at work there; wait, or write another",
        instead="write another folder",
    ):
        refuse_changed(made)
        print_plan(recipe, made, console)
        tests = _run(recipe, made, console)
        report(recipe, [with_result(one) for one in made], tests, console)


def print_plan(recipe: ScalingRecipe, made: Sequence[GridPoint], console: Console) -> None:
    """The table of all points before any is run, and their sums."""
    points = [with_result(one) for one in made]
    times = [_seconds(recipe, one, points) for one in made]
    rows = []
    for one, point, seconds in zip(made, points, times, strict=True):
        state = "begun" if (one.folder / "recipe.yaml").exists() else ""
        state = "done" if is_done(one.folder) else state
        rows.append(
            [
                point.name + (" (held out)" if point.held_out else ""),
                *map(short_count, (point.total, point.active, point.non_embedding, point.tokens)),
                f"{point.tokens / point.parameters:.3g}",
                f"{one.rows}",
                f"{one.steps:,}",
                f"{point.lr:.3g}",
                f"{point.flops:.3g}",
                "" if seconds is None else duration(seconds),
                state,
            ]
        )
    head = ("point", "N total", "N active", "N no emb.", "D", "D/N", "rows", "steps", "lr",
            "FLOPs", "time", "")  # fmt: skip
    console.table("\n".join(columns(head, rows, left=(0, 11))))
    left = [seconds for seconds, row in zip(times, rows, strict=True) if row[-1] != "done"]
    flops = sum(p.flops for p, row in zip(points, rows, strict=True) if row[-1] != "done")
    text = f"{len(left)} of {len(made)} runs, {flops:.3g} FLOPs"
    if None in left:
        text += "; of unknown time: write flops_per_second, or hardware"
    else:
        together = sum(filter(None, left))
        text += f", about {duration(together / (1 if recipe.hardware else recipe.workers or 1))}"
        text += _money(recipe, together / 3600 * _gpus(recipe))
    console.note(f"to run: {text}")


def _gpus(recipe: ScalingRecipe) -> int:
    return 1 if recipe.hardware is None else Hardware.parse(recipe.hardware, "hardware").gpus


def _money(recipe: ScalingRecipe, hours: float) -> str:
    return (
        "" if recipe.price is None else f", {hours * recipe.price:,.2f} at {recipe.price:g} an hour"
    )


def _seconds(recipe: ScalingRecipe, one: GridPoint, done: Sequence[Point]) -> float | None:
    """Of a run: measured, planned, or at the speed of the done run of the nearest size."""
    if recipe.hardware is not None:
        return _planned(recipe, one.words).seconds
    return _at_measured_speed(recipe, one.point, done)


def _at_measured_speed(recipe: ScalingRecipe, point: Point, done: Sequence[Point]) -> float | None:
    timed = [other for other in done if other.seconds > 0]
    if timed:
        near = min(
            timed,
            key=lambda p: (p.name != point.name, abs(math.log(p.parameters / point.parameters))),
        )
        return point.flops / near.flops * near.seconds
    return None if recipe.flops_per_second is None else point.flops / recipe.flops_per_second


def _planned(recipe: ScalingRecipe, words: Sequence[str]) -> Costs:
    """What a run takes on the recipe's hardware: in its own layout, or the fastest that fits.

    Raises:
        UserError: none fits.
    """
    written = checked(PlanRecipe, recipe.base, [*words, f"hardware={recipe.hardware}"])
    written.price = recipe.price
    hardware = Hardware.parse(written.hardware, "hardware")
    filled = with_guessed_vocabulary(with_defaults(written))
    reached, _ = measured_speeds(hardware, filled, None)
    setting = Setting(hardware.gpus, reached, hardware.memory - TAKEN)
    try:
        layout = own_layout(filled, setting)
    except UserError:
        ranked = rank(filled, setting, 1).best
        if not ranked:
            raise
        layout = ranked[0]
    return costs(layout, written, setting)


def _run(recipe: ScalingRecipe, made: Sequence[GridPoint], console: Console) -> dict[str, Any]:
    """All runs, those that are held out after the law and what it says of them is written."""
    output = Path(recipe.output).expanduser()
    run_all(recipe, [one for one in made if not one.point.held_out], console)
    held = [one for one in made if one.point.held_out]
    if not held:
        return {}
    fits = fit_families([with_result(one) for one in made], recipe.bootstrap)
    tests = predicted(fits, held, output)
    for family, test in tests.items():
        low, high = test["interval"] or (math.nan, math.nan)
        told = "" if test["before"] else ", after its run"
        console.note(
            f"{family or 'held out'}: loss {test['predicted']:.4f} ({low:.4f} to {high:.4f})"
            f" predicted of {test['name']}{told}"
        )
    run_all(recipe, held, console)
    return tests


def predicted(
    fits: Sequence[FamilyFit], held: Sequence[GridPoint], output: Path
) -> dict[str, dict[str, Any]]:
    """What was predicted of each family's held-out point before its run; now, where nothing was.

    A prediction that was written stays as long as the same runs were fitted, so that nobody can
    come back to it with what the held-out run has shown.
    """
    path, by_name = output / PREDICTED, {one.point.family: one for one in held}
    try:
        written = read_json_if_there(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}; delete it") from error
    tests: dict[str, dict[str, Any]] = {}
    for fit in fits:
        one = by_name[fit.family]
        told = fit.held_out(one.point)
        before = written.get(fit.family) if isinstance(written, dict) else None
        same = isinstance(before, dict) and all(
            before.get(key) == told[key] for key in ("name", "fitted", "predicted")
        )
        tests[fit.family] = before if same else {**told, "before": not is_done(one.folder)}  # type: ignore[assignment]
        tests[fit.family].setdefault("written", time.time())
    write_json(path, finite(tests))
    return tests


def report(
    recipe: ScalingRecipe, points: Sequence[Point], tests: dict[str, Any], console: Console
) -> None:
    """Fit, predict, write the files and print what they hold."""
    output = Path(recipe.output).expanduser()
    fits = fit_families(points, recipe.bootstrap)
    found = summary(points, fits, tests) | {"parameters": recipe.parameters}
    if recipe.budget is not None:
        for fit in fits:
            told = _budget(recipe, fit, points)
            found["families"][fit.family]["prediction"] = told
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "scaling.json", finite(found))
        atomic_write(output / "points.csv", to_csv(points))
        write_scaling_page(output / "scaling.html", finite(found))
    except OSError as error:
        raise UserError(f"output: {output}: {one_line(error)}; write another folder") from error
    console.banner([*result_rows(found), ("page", str(output / "scaling.html"))])


def _budget(recipe: ScalingRecipe, fit: FamilyFit, points: Sequence[Point]) -> dict[str, Any]:
    """The best model for the budget, its time and cost; `words` make it a run.

    Raises:
        UserError: it is too far from what was run, or fits on no layout of the hardware.
    """
    number, is_hours = recipe.budget_number
    rate = _first_rate(recipe) if is_hours else 1.0
    flops = number * 3600 / _gpus(recipe) * rate if is_hours else number
    for _ in range(5 if is_hours else 1):
        refuse_far([fit], flops, allowed=recipe.extrapolate)
        told = fit.predict(flops)
        told["is_far"] = flops > 100 * fit.most_flops
        if recipe.base is None or "undetermined" in told:
            return told
        shape = shape_near(recipe, fit.family, told["parameters"])
        one = point_of(recipe, shape, flops / shape.flops, (1.0, 1.0), shape.recipe.seed)
        seconds = _seconds(recipe, one, points)
        if is_hours and seconds:
            flops = number * 3600 / _gpus(recipe) * one.point.flops / seconds
    hours = None if seconds is None else seconds / 3600 * _gpus(recipe)
    model = one.words[: -len(("run_name", "save_folder"))]
    told |= {"seconds": seconds, "hours": hours, "words": model, "base": recipe.base}
    told["money"] = None if hours is None or recipe.price is None else hours * recipe.price
    return told


def _first_rate(recipe: ScalingRecipe) -> float:
    """FLOP/s to begin with: two fifths of the GPUs' peak."""
    gpu = Hardware.parse(str(recipe.hardware), "hardware")
    return 0.4 * gpu.gpus * gpu.gpu.tflops * 1e12


def result_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What the law of each family is, and what it says."""
    rows = []
    for family, fit in found["families"].items():
        law, ends = fit["law"], fit["intervals"]
        constants = (f"{name} {_with(law[name], ends[name])}" for name in law)
        rows.append((family or "law", ", ".join(constants)))
        power = _with(fit["size_exponent"], fit["size_exponent_interval"])
        rms = percent(fit["rms_residual"])
        rows.append(("", f"residuals {rms}; the best size grows as compute ** {power}"))
        for test in fit.get("held_out", ()):
            told = "before its run" if test["before"] else "after its run"
            text = f"{_with(test['predicted'], test['interval'])} predicted {told}"
            measured = f"{test['measured']:.4f} measured: {100 * test['error']:+.2f} %"
            rows.append(("held out", f"{text}, {measured}"))
        if "prediction" in fit:
            rows += _prediction_rows(fit["prediction"])
    for gain in found["gains"]:
        rows.append(("gain", f"{gain['family']} needs {_with(gain['gain'], gain['interval'])} times"
                    f" less compute than {gain['over']} for loss {gain['loss']:.3f}"))  # fmt: skip
    for trend in found["trends"]:
        power = trend.get("exponent")
        text = f"best {trend['key']} at {len(trend['best'])} points"
        rows.append(
            (trend["family"] or "trend", text + (f": compute ** {power:.3f}" if power else ""))
        )
    return rows


def _prediction_rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    if "undetermined" in told:
        return [("budget", f"nothing to predict: {told['undetermined']}")]
    ends = told["intervals"]
    text = (
        f"{told['flops']:.3g} FLOPs: {_with(told['parameters'], ends['parameters'])} parameters,"
        f" {_with(told['tokens'], ends['tokens'])} tokens,"
        f" {_with(told['tokens_per_parameter'], ends['tokens_per_parameter'])} a parameter,"
        f" loss {_with(told['loss'], ends['loss'])};"
        f" half that size: {told['loss_at_half_size']:.4f}"
    )
    if told["is_far"]:
        text = f"EXTRAPOLATED {told['times_largest']:,.0f} times beyond what was run. {text}"
    rows = [("budget", text)]
    if told.get("seconds"):
        money = "" if told["money"] is None else f", {told['money']:,.0f}"
        rows.append(
            ("takes", f"{duration(told['seconds'])}, {short_count(told['hours'])} hours{money}")
        )
    return rows


def _with(value: float, ends: Sequence[float] | None) -> str:
    """A number with its interval."""
    form: Callable[[float], str] = (
        (lambda v: short_count(v)) if abs(value) >= 1e4 else (lambda v: f"{v:.4g}")
    )
    return form(value) + (f" ({form(ends[0])} to {form(ends[1])})" if ends else "")
