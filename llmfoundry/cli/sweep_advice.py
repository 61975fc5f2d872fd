"""What to do after a sweep: values beyond the edge of its grid, and the winner in full length.

Entry point: `advice`, whose lines `sweep_runs.py` prints below the table of the runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmfoundry.cli.sweep_points import PLACES, SweepPoint
from llmfoundry.command_text import command_line
from llmfoundry.errors import UserError
from llmfoundry.loggers.pages.comparison import ComparedRun, verdict
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.overrides import key_and_text
from llmfoundry.redaction import public

_SHORTER = ("max_duration", "pause_at")
"""Keys by which a sweep makes its runs shorter than the recipe's."""
_NO_ORDER = re.compile(r"(.*\.)?seed")  # numbers of which none is larger in effect than another


def advice(
    points: Sequence[SweepPoint],
    runs: Sequence[ComparedRun],
    recipe_type: type,
    command: Sequence[str],
) -> Iterator[str]:
    """Yield lines about the best run of a sweep; none if no run or several are the best.

    Args:
        points: points of the sweep.
        runs: their results.
        recipe_type: dataclass of the recipe.
        command: command before the overrides: interpreter, script and, if there is one, recipe.
    """
    result = verdict(runs)
    if result is None or len(result.best) != 1:
        return
    best, recipe = points[result.best[0]], next(iter(command[2:]), None)
    for key, value, end, beyond in _edges(points, best):
        wider = [f"{key}={beyond:g}" if key_and_text(w)[0] == key else w for w in best.overrides]
        if _is_valid(recipe_type, recipe, wider):
            yield (
                f"{key}: the best value, {value:g}, is the {end} of the sweep, so the best may lie"
                f" beyond it; run the same command with {beyond:g} among its values"
            )
    if words := _in_full(best):
        line = command_line(Path(command[1]).stem, *command[2:], *words)
        yield f"train the best in full: {public(line)}"


def _edges(
    points: Sequence[SweepPoint], best: SweepPoint
) -> Iterator[tuple[str, float, str, float]]:
    """Yield numeric keys whose best value is the smallest or largest of several.

    A value whose run failed counts as well: it may have diverged, or not have fit.

    Yields:
        The key, its best value, the end at which it lies, and the next value beyond: at the same
        ratio as the two values at this end, or, next to 0 or a negative value, the same distance.
    """
    for key in best.swept:
        numbers = [_number(point.swept.get(key)) for point in points]
        values = sorted({number for number in numbers if number is not None})
        value = _number(best.swept[key])
        if value is None or len(values) < 2 or None in numbers or _NO_ORDER.fullmatch(key):
            continue
        for end, (edge, inner) in (("smallest", values[:2]), ("largest", values[:-3:-1])):
            if value == edge:
                beyond = edge * edge / inner if edge > 0 and inner > 0 else 2 * edge - inner
                whole = edge.is_integer() and inner.is_integer()
                yield key, value, end, round(beyond) if whole and beyond > 1 else beyond


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _is_valid(recipe_type: type, recipe: str | None, overrides: Sequence[str]) -> bool:
    """Return whether a recipe with these overrides is valid: a value may be out of range."""
    try:
        checked(recipe_type, recipe, overrides)
    except UserError:
        return False
    return True


def _in_full(best: SweepPoint) -> list[str]:
    """Return the overrides of a run as long as the recipe's; none if the sweep's is that long."""
    keys = [key_and_text(word)[0] for word in best.overrides]
    shorter = [key for key in _SHORTER if key in keys and key not in best.swept]
    if not shorter:
        return []
    left_out = {*shorter, *PLACES}
    words = [w for w, key in zip(best.overrides, keys, strict=True) if key not in left_out]
    if keys.count("save_folder") > 1:  # once by the user, once for the point
        words.append(f"save_folder={best.home}-best")
    return [*words, f"run_name={best.run_name}-best"]
