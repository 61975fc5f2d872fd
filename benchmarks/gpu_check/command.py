"""The command line of a check: `scripts/gpu_check.py key=value …`.

It needs only Python: what computes runs in processes of its own, with the wheels on their path. So
a machine that lacks a package, or a driver that hangs, still gets its page.
"""

from __future__ import annotations

import datetime
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check import plan
from benchmarks.gpu_check.plan import CUDA
from benchmarks.gpu_check.results import JSON_NAME, PAGE_NAME, Results
from benchmarks.gpu_check.runner import Runner
from benchmarks.gpu_check.verdict import below, not_run, status, wrong
from benchmarks.gpu_check.wheels import unpack
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import LockedFile, try_lock
from llmfoundry.recipe.values.checks import nearest, not_a_choice

KEYS = ("minutes", "device", "output", "wheels", "steps", "resume")
LONGEST = 24 * 60.0  # minutes
STEPS = [step.name for step in plan.steps("cpu")]


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        minutes: the budget.
        device: `cuda` or `cpu`.
        output: the folder of JSON, page and logs.
        wheels: a folder of packages; None: all are installed.
        steps: names of those to run; None: all.
        resume: keep what an earlier check in `output` finished.
    """

    minutes: float = 25.0
    device: str = CUDA
    output: Path = Path("gpu-check")
    wheels: Path | None = None
    steps: tuple[str, ...] | None = None
    resume: bool = False


def main(words: Sequence[str], help: str) -> int:
    """Run a check; its exit status: 0 all ran and is right, 1 not so, 2 a user's mistake."""
    if {"-h", "--help"} & {*words}:
        print(help.strip())
        return 0
    try:
        return check(options(words))
    except UserError as error:
        print(*error.lines(), sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def options(words: Sequence[str]) -> Options:
    """Read `key=value` words.

    Raises:
        UserError: a word is none, or a value cannot be.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            what = "unknown key" if equals else "not key=value:"
            raise UserError(f"{what} '{key}'{nearest(key, KEYS)} (keys: {', '.join(KEYS)})")
        if key in given:
            raise UserError(f"{key}: is given twice; remove one of the two")
        if not value:
            raise UserError(f"{key}: is empty; write {key}=VALUE, or leave it out")
        given[key] = value
    found = Options()
    device = given.get("device", found.device)
    if device not in (CUDA, "cpu"):
        raise UserError(f"device: {not_a_choice(device, [CUDA, 'cpu'])}")
    resume = given.get("resume", "false")
    if resume not in ("true", "false"):
        raise UserError(f"resume: {not_a_choice(resume, ['true', 'false'])}")
    return Options(
        minutes=_minutes(given["minutes"]) if "minutes" in given else found.minutes,
        device=device,
        output=Path(given.get("output", found.output)).expanduser(),
        wheels=Path(given["wheels"]).expanduser() if "wheels" in given else None,
        steps=_steps(given["steps"]) if "steps" in given else None,
        resume=resume == "true",
    )


def _minutes(value: str) -> float:
    try:
        minutes = float(value)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= LONGEST:
        raise UserError(f"minutes: {value} is not a time; write a number above 0, at most 1440")
    return minutes


def _steps(value: str) -> tuple[str, ...]:
    names = [name for name in value.strip("[]").replace(" ", "").split(",") if name]
    for name in names:
        if name not in STEPS:
            raise UserError(f"steps: {not_a_choice(name, STEPS)}")
    if not names:
        raise UserError(f"steps: is empty; write some of {', '.join(STEPS)}")
    return tuple(names)


def check(given: Options) -> int:
    """Run what was asked for, tell the end, and return the exit status.

    Raises:
        UserError: nothing can be run, or nothing written.
    """
    folder = given.output.absolute()
    with _alone(folder):
        kept = Results.read(folder / JSON_NAME) if given.resume else None
        if kept is not None and kept.device != given.device:
            kept = None
        started = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
        results = Results(given.device, given.minutes, started)
        paths = unpack(given.wheels.absolute(), folder / "wheels") if given.wheels else []
        steps = plan.steps(given.device)
        runner = Runner(results, steps, folder, paths, given.steps, kept)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the item under way too
        try:
            runner.run_all()
        finally:
            if results.facts:
                print(*_end(results, folder), sep="\n")
    if runner.unwritten:
        print(f"output: {runner.unwritten}; the last results were not written", file=sys.stderr)
    return 1 if runner.unwritten else status(results)


def _alone(folder: Path) -> LockedFile:
    """The folder's lock, which ends with this process.

    Raises:
        UserError: another check works there, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").write_bytes(b"x")
        (folder / ".probe").unlink()
        lock = try_lock(folder / ".lock", mode=0o644)
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written: {one_line(error)}; write another folder"
        ) from error
    if lock is None:
        raise UserError(f"output: another check is at work in {folder}; write another, or wait")
    return lock


def _end(results: Results, folder: Path) -> list[str]:
    """The last words."""
    lines = ["", f"{results.status}: {folder / PAGE_NAME}"]
    lines += [f"  wrong         {line}" for line in wrong(results)]
    lines += [f"  below target  {what}: {found}" for what, found, _ in below(results)]
    left = not_run(results)
    if left:
        lines.append(f"  not run       {len(left)}, each with its reason on the page")
    return lines
