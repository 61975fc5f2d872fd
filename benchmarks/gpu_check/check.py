"""`scripts/gpu_check.py key=value …`: runs the plan, writes one JSON and one page.

It needs only Python: what computes runs in processes of its own, with the wheels on their path, so
that a machine that lacks a package, or a driver that hangs, still gets its page. The time that is
left is shared among the steps that are left by their shares; inside a step items run in order. JSON
and page are written after every item. An item that did not run has a state and a reason too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_check import plan
from benchmarks.gpu_check.page import (
    DEFECTS,
    FAILED,
    JSON_NAME,
    MEMORY,
    NO_TIME,
    NOT_CHOSEN,
    NOT_HERE,
    OK,
    PAGE_NAME,
    TOO_LONG,
    WRONG,
    ItemResult,
    Results,
    StepResult,
    as_html,
    below,
    headline,
    judge,
    not_run,
    status,
    wrong,
)  # fmt: skip
from benchmarks.gpu_check.plan import (
    COMPILED,
    CORPUS,
    CUDA,
    DEVICE,
    FACTS,
    PATIENCE,
    SEVERAL,
    Item,
    Step,
)
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import LockedFile, atomic_write, try_lock
from llmfoundry.loggers.console import duration
from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.front.script import allocator_settings
from llmfoundry.recipe.values.checks import nearest, not_a_choice

KEYS = ("minutes", "device", "output", "wheels", "steps", "resume")
STEPS = [step.name for step in plan.steps("cpu")]
LEAST = {CUDA: 12.0, "cpu": 3.0}  # seconds below which no item is started
OF_LIMIT = 4  # times that an item's limit is longer than its shortest time, as a guess
GRACE, REAPED = 3.0, 10.0  # seconds to end by itself after SIGTERM, and after SIGKILL
TAIL, LINES, LONGEST = 12_000, 30, 300  # bytes and lines of a log; characters of a reason
ENDS_WITH = "LLMFOUNDRY_END_WITH"  # what llmfoundry.processes reads in every script
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|ran out of memory")
_LAUNCHED = re.compile(
    r"(SLURM_|TORCHELASTIC_|GROUP_|ROLE_|PMI).*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


@dataclass(frozen=True)
class Options:
    """The keys of the command; `wheels` None: all packages are installed; `steps` None: all."""

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
    for key, choices in (("device", [CUDA, "cpu"]), ("resume", ["true", "false"])):
        if given.get(key, choices[0]) not in choices:
            raise UserError(f"{key}: {not_a_choice(given[key], choices)}")
    names = [
        name for name in given.get("steps", "").strip("[]").replace(" ", "").split(",") if name
    ]
    for name in names:
        if name not in STEPS:
            raise UserError(f"steps: {not_a_choice(name, STEPS)}")
    if "steps" in given and not names:
        raise UserError(f"steps: is empty; write some of {', '.join(STEPS)}")
    return Options(
        minutes=_minutes(given.get("minutes", "25")),
        device=given.get("device", CUDA),
        output=Path(given.get("output", "gpu-check")).expanduser(),
        wheels=Path(given["wheels"]).expanduser() if "wheels" in given else None,
        steps=tuple(names) or None,
        resume=given.get("resume") == "true",
    )


def _minutes(value: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(value)) <= 24 * 60:
            return minutes
    raise UserError(f"minutes: {value} is not a time; write a number above 0, at most 1440")


def check(given: Options) -> int:
    """Run what was chosen, print the outcome, and return the exit status.

    Raises:
        UserError: nothing can be run, or nothing written.
    """
    folder = given.output.absolute()
    with _alone(folder):
        kept = read_results(folder / JSON_NAME) if given.resume else None
        if kept is not None and kept.device != given.device:
            kept = None
        started = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
        results = Results(given.device, given.minutes, started)
        paths = unpack(given.wheels.absolute(), folder / "wheels") if given.wheels else []
        runner = Runner(results, plan.steps(given.device), folder, paths, given.steps, kept)
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
    """The folder's lock, released when this process exits.

    Raises:
        UserError: another check works there, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").write_bytes(b"x")
        (folder / ".probe").unlink()
        lock = try_lock(folder / ".lock", mode=0o644)
    except OSError as error:
        why = f"{folder} cannot be written: {one_line(error)}; write another folder"
        raise UserError(f"output: {why}") from error
    if lock is None:
        raise UserError(f"output: another check is at work in {folder}; write another, or wait")
    return lock


def read_results(path: Path) -> Results | None:
    """What an earlier check left; None: nothing of this form."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            return None
        steps = [
            StepResult(s["name"], s["title"], [ItemResult(**item) for item in s["items"]])
            for s in content.pop("steps")
        ]
        return Results(**content, steps=steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


VERSION = 1  # of the file's form


def unpack(folder: Path, into: Path) -> list[Path]:
    """Install the wheels of a folder, for a machine without a network; what goes on Python's path.

    Raises:
        UserError: there is none, or pip refuses one.
    """
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        raise UserError(f"wheels: {folder} holds no .whl file; --help says which to put there")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    shutil.rmtree(into, ignore_errors=True)
    words = [*pip, "--target", str(into), *map(str, wheels)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"wheels: {(reasons or [done.stderr.strip()])[0].removeprefix('ERROR: ')}")
    return [into]


def _end(results: Results, folder: Path) -> Iterator[str]:
    yield ""
    yield f"{results.status}: {folder / PAGE_NAME}"
    yield from (f"  wrong         {line}" for line in wrong(results))
    yield from (f"  below target  {what}: {found}" for what, found, _ in below(results))
    if left := not_run(results):
        yield f"  not run       {len(left)}, each with its reason on the page"


@dataclass
class Runner:
    """A check under way.

    Attributes:
        results: what it fills.
        steps: what it does.
        folder: of results, logs and work.
        paths: of wheels.
        chosen: names of steps; the others are not run. None: all.
        kept: an earlier check, of which what was finished is not measured again.
        unwritten: why the last results are not on the disk; empty: they are.
    """

    results: Results
    steps: Sequence[Step]
    folder: Path
    paths: Sequence[Path] = ()
    chosen: Sequence[str] | None = None
    kept: Results | None = None
    unwritten: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._ends = self._began + 60 * self.results.minutes
        self._work = self.folder / "work"
        self.results.steps = [
            StepResult(step.name, step.title, [ItemResult(item.name) for item in step.items])
            for step in self.steps
        ]

    def run_all(self) -> None:
        """Run every step that was chosen; the results are on the disk after each item.

        Raises:
            UserError: the chosen device is not there, or packages are missing.
        """
        shutil.rmtree(self._work, ignore_errors=True)
        (self._work / "runs").mkdir(parents=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        pairs = list(zip(self.steps, self.results.steps, strict=True))
        try:
            for number, (step, result) in enumerate(pairs):
                now, runs = time.monotonic(), [s for s in self.steps[number:] if self._runs(s)]
                share = time_of(runs, self._ends - now) if step in runs else 0.0
                # what all others need has all of the time
                self._step(step, result, self._ends if step.name == DEVICE else now + share)
            for step, result in pairs:
                self._step(step, result, self._ends, again=True)  # in what time others left
            self.results.status = "finished"
        except KeyboardInterrupt:
            self.results.status = "stopped"
            raise
        finally:
            if self.results.facts:  # else nothing was measured, and what is in the folder stays
                self.write()
            shutil.rmtree(self._work, ignore_errors=True)

    def _runs(self, step: Step) -> bool:
        return self.chosen is None or step.name in self.chosen or step.name == DEVICE

    def _step(self, step: Step, result: StepResult, ends: float, *, again: bool = False) -> None:
        """Run its items; `again`: those that had no time, while there is some."""
        for item, found in zip(step.items, result.items, strict=True):
            if again and (found.state != NO_TIME or self._needs(item) > ends - time.monotonic()):
                continue
            self._item(step, item, found, ends)
            if item.name == FACTS:
                self._take_facts(found)
            judge(self.results, step.name, found)
            self.write()
            if found.seconds or found.state == NO_TIME:
                at = duration(time.monotonic() - self._began)
                print(f"{at:>7}  {step.name} · {headline(found)}", flush=True)

    def _item(self, step: Step, item: Item, found: ItemResult, ends: float) -> None:
        """Run one item, or say why not."""
        if (kept := self._kept(step, item)) is not None:
            vars(found).update(vars(kept))
            return
        left, needs, is_first = ends - time.monotonic(), self._needs(item), item.name == FACTS
        if not self._runs(step):
            found.state, found.reason = NOT_CHOSEN, "steps= leaves it out"
        elif lacking := self._lacking(item):
            found.state, found.reason = NOT_HERE, lacking
        elif not is_first and left < needs:
            reason = f"{max(left, 0):.0f} s were left of its step's time"
            found.state, found.reason = NO_TIME, f"{reason}; it takes {needs:.0f} s or more"
        else:
            limit = item.limit if is_first else min(item.limit, left)
            self._measure(item, f"{step.name}-{item.name}", found, limit)

    def _measure(self, item: Item, name: str, found: ItemResult, limit: float) -> None:
        name = re.sub(r"[^\w.-]+", "-", name).strip("-")
        file, run_folder = self._work / f"{name}.rows", self._work / "runs" / name
        file.unlink(missing_ok=True)  # of its first try
        device = item.on or self.results.device
        started = time.monotonic()
        found.state, found.reason, found.log = run(
            command(item, file, device, run_folder),
            self.folder / "logs" / f"{name}.txt",
            folder=self._work,
            env=environment(self.paths, device, all_gpus=item.all_gpus),
            limit=limit,
            own_limit=limit == item.limit,
        )
        found.seconds = time.monotonic() - started
        found.rows = test_rows(file) if item.measure == "tests" else _read(file)
        if item.measure == "tests" and found.rows and found.state == FAILED:
            found.state = OK  # pytest's status 1: some tests failed
        bad = [row for row in found.rows if "wrong" in row]
        if found.state == OK and bad:
            which = bad[0].get("test") or bad[0].get("contender") or bad[0].get("chunk") or ""
            reason = f"{len(bad)} of {len(found.rows)} rows: {which}: {bad[0]['wrong']}"
            found.state, found.reason = WRONG, reason[:LONGEST]
        shutil.rmtree(run_folder, ignore_errors=True)

    def _needs(self, item: Item) -> float:
        """Seconds that an item takes at least: as those like it took, or by its limit."""

        def kind(one: Item) -> tuple[str, str, bool]:
            return one.measure, one.recipe, {*COMPILED} <= {*one.overrides}

        took = [
            found.seconds
            for step, result in zip(self.steps, self.results.steps, strict=True)
            for one, found in zip(step.items, result.items, strict=True)
            if found.state == OK and kind(one) == kind(item)
        ]
        patience = 1 if self.results.device == CUDA else PATIENCE
        return max(LEAST[self.results.device], min(took, default=item.limit / OF_LIMIT / patience))

    def _kept(self, step: Step, item: Item) -> ItemResult | None:
        """What an earlier check found, where it is not to be measured again."""
        if self.kept is None or step.name == DEVICE or step.name in (self.chosen or ()):
            return None
        done, items = (OK, *DEFECTS), self.kept.step(step.name).items
        return next((one for one in items if one.name == item.name and one.state in done), None)

    def _lacking(self, item: Item) -> str:
        """What an item needs that is not here."""
        facts = self.results.facts
        corpus = [item.state for item in self.results.step(DEVICE).items if item.name == CORPUS]
        if item.recipe and corpus not in ([], [OK]):
            return "needs the corpus, which was not written"
        for need in item.needs:
            if need == CUDA and self.results.device != CUDA:
                return "needs CUDA"
            if need == SEVERAL and facts.get("gpus", 0) < 2:
                return f"needs 2 GPUs, {facts.get('gpus', 0)} here"
            if need not in (CUDA, SEVERAL) and need not in facts.get("modules", []):
                return f"needs the package {need}, which is not installed"
        return ""

    def _take_facts(self, found: ItemResult) -> None:
        """The first item's row; without it nothing else can run."""
        if found.state != OK or not found.rows:
            raise UserError(f"device: {self.results.device} does not work here: {found.reason}")
        facts = found.rows[0]
        if self.kept is not None and (other := differs(self.kept.facts, facts)):
            print(f"resume: the earlier check was of another {other}; nothing of it is kept")
            self.kept = None
        if lacking := facts.get("lacking"):
            raise UserError(
                f"wheels: {', '.join(lacking)} cannot be imported; put their wheels into a folder"
                " and write wheels=FOLDER (--help says how)"
            )
        self.results.facts = facts

    def write(self) -> None:
        """JSON and page, atomically; a full disk is reported once, and tried again."""
        self.results.seconds = time.monotonic() - self._began
        content = json.dumps({"version": VERSION, **asdict(self.results)}, indent=1, default=str)
        try:
            atomic_write(self.folder / JSON_NAME, content + "\n")
            atomic_write(self.folder / PAGE_NAME, as_html(self.results))
            self.unwritten = ""
        except OSError as error:
            if not self.unwritten:
                room = "; make room there" * (error.errno == errno.ENOSPC)
                print(f"output: {one_line(error)}{room}", file=sys.stderr)
            self.unwritten = one_line(error)


def time_of(steps: Sequence[Step], left: float) -> float:
    """Seconds for the first of the steps that are left, of so many in all."""
    shares = sum(step.share for step in steps)
    return steps[0].share / shares * max(0.0, left) if shares else 0.0


def differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What makes two checks' numbers incomparable; empty: nothing."""
    old, new = before.get("libraries", {}), now.get("libraries", {})
    names = {name: (before.get(name), now.get(name)) for name in ("gpu", "processor")}
    names |= {name: (old.get(name), new.get(name)) for name in ("torch", "git commit")}
    return next((name for name, (one, other) in names.items() if one != other), "")


def environment(paths: Sequence[Path], device: str, *, all_gpus: bool = False) -> dict[str, str]:
    """Of an item: this package and the wheels, its GPUs or none, no launcher's variables.

    On `cuda` the first GPU that is visible, or all of them.
    """
    found = {key: value for key, value in os.environ.items() if not _LAUNCHED.fullmatch(key)}
    given = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths), *given])
    first = found.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if device != CUDA or not all_gpus:
        found["CUDA_VISIBLE_DEVICES"] = first if device == CUDA else ""
    quiet = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return {**found, **allocator_settings(found), **quiet, ENDS_WITH: str(os.getpid())}


def command(item: Item, file: Path, device: str, run: Path) -> list[str]:
    """What an item starts; `run`: folder of a training run, two below the corpus'."""
    if item.measure == "tests":
        only = ["-m", "gpu", "-q", "-k", item.settings.get("keyword", ""), item.settings["file"]]
        where = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", f"--junitxml={file}"]
        return [sys.executable, "-m", "pytest", *where, *only]
    if item.measure:
        settings = json.dumps(dict(item.settings))
        module = "benchmarks.gpu_check.measure"
        return [sys.executable, "-m", module, item.measure, str(file), device, settings]
    timing = {"file": str(file), **item.timing}
    overrides = [
        f"run_name={run.name}",
        f"save_folder={run}",
        "data=mds",
        "data.remote=null",
        f"data.local={run.parent.parent / 'corpus'}",
        "data.split=null",
        "data.validation=null",
        "tokenizer=bytes",
        "logger=none",
        "eval=off",
        "plugins=[benchmarks.gpu_check.timing]",
        *(f"callbacks.plugins.gpu_check.{k}={_written(v)}" for k, v in timing.items()),
        *item.overrides,
    ]
    if not any(override.startswith("save_interval=") for override in overrides):
        overrides.append("save_interval=0ba")
    return [sys.executable, str(ROOT / "scripts" / "train.py"), item.recipe, *overrides]


def _written(value: object) -> str:
    """A value as the command line of a recipe takes it."""
    return json.dumps(value) if not isinstance(value, str) else f"'{value}'"


def test_rows(file: Path) -> list[dict[str, Any]]:
    """A row for each test of pytest's JUnit XML; what a test records is in its row."""
    if not file.exists():
        return []
    rows = []
    for case in ElementTree.parse(file).iter("testcase"):
        row: dict[str, Any] = {"test": case.get("name"), "outcome": "passed"}
        row["s"] = float(case.get("time") or 0)
        row |= {p.get("name", ""): _number(p.get("value") or "") for p in case.iter("property")}
        for kind in ("failure", "error", "skipped"):
            for why in case.iter(kind):
                row["outcome"] = "skipped" if kind == "skipped" else "failed"
                text = why.get("message") or why.text or ""
                row["reason" if kind == "skipped" else "wrong"] = text[-LONGEST:].strip()
        rows.append(row)
    return rows


def _number(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _read(file: Path) -> list[dict[str, Any]]:
    from benchmarks.gpu_check.measure import read

    return read(file)


def run(
    words: Sequence[str],
    log: Path,
    *,
    folder: Path,
    env: Mapping[str, str],
    limit: float,
    own_limit: bool,
) -> tuple[str, str, str]:
    """Run a command to its end or its limit: state, reason, last lines of the log.

    Whatever it does (crash, hang, run out of memory, leave children), this returns in time: it runs
    in a group of its own, which is ended with it. `own_limit`: the limit is the item's, else the
    budget's.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        _end_group(process)
        if own_limit:
            return TOO_LONG, f"ended after {limit:.0f} s", _tail(log)
        return NO_TIME, f"the time was up after {limit:.0f} s of it", ""
    except BaseException:
        _end_group(process)
        raise
    _kill_group(process.pid, signal.SIGKILL)  # what it left behind
    return _ending(status, _tail(log))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group, by SIGKILL where SIGTERM does not help."""
    _kill_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    _kill_group(process.pid, signal.SIGKILL)
    try:
        process.wait(REAPED)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} was killed and does not end", file=sys.stderr)


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _ending(status: int, log: str) -> tuple[str, str, str]:
    """State, reason and log by an exit status and the last lines."""
    if status == 0:
        return OK, "", ""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1][:LONGEST] if lines else f"exit status {status}"
    if "GiB are free" in log and status == 2:
        return NOT_HERE, last, ""
    for line in lines:
        if _OUT_OF_MEMORY.search(line):
            return MEMORY, line[:LONGEST], log
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may have been out of memory" if name == "SIGKILL" else ""
        return FAILED, f"killed by {name}{hint}", log
    return FAILED, last, log


def _tail(log: Path) -> str:
    """The last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LINES:])
