"""`scripts/gpu_check.py key=value …`: runs the plan, writes one JSON and one page.

`wheels.py` starts it. What computes runs in processes of its own, so that a package that is not
there, or a driver that hangs, still gets its page. The time that is
left is shared among the steps that are left by their shares; inside a step items run in order. JSON
and page are written after every item. An item that did not run has a state and a reason too.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import WANTED
from benchmarks.gpu_check.page import as_html, below, headline, judge, not_run, status, wrong
from benchmarks.gpu_check.plan import (
    CORPUS,
    CUDA,
    DEVICE,
    DONE,
    FACTS,
    FAILED,
    NO_TIME,
    NOT_HERE,
    OK,
    PATIENCE,
    REASON,
    WAITING,
    Item,
    Results,
    Step,
    read,
    steps,
)
from llmfoundry.cli.script import allocator_settings
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import LockedFile, atomic_write, try_lock
from llmfoundry.loggers.console import duration
from llmfoundry.processes import keep_children
from llmfoundry.recipe.checks import nearest, not_a_choice
from llmfoundry.recipe.paths import ROOT

KEYS = ("minutes", "device", "output", "wheels", "steps", "resume")
STEPS = [step.name for step in steps("cpu")]
JSON_NAME, PAGE_NAME = "gpu-check.json", "gpu-check.html"
OF_LIMIT = 4  # times that an item's limit is longer than its shortest time, as a guess
GRACE = 3.0  # seconds to end after SIGTERM
LINES = 30  # of a log
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|ran out of memory")
_LAUNCHED = re.compile(
    r"(SLURM_|TORCHELASTIC_|GROUP_|ROLE_|PMI).*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


@dataclass(frozen=True)
class Options:
    """The keys of the command but `wheels`, which `wheels.py` reads; `steps` empty: all."""

    minutes: float = 25.0
    device: str = CUDA
    output: Path = Path("gpu-check")
    steps: tuple[str, ...] = ()
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
        if not value.strip("[], "):
            raise UserError(f"{key}: is empty; write {key}=VALUE, or leave it out")
        given[key] = value
    names = re.findall(r"[^\[\], ]+", given.get("steps", ""))
    for key, found, choices in (
        ("device", [given.get("device", CUDA)], [CUDA, "cpu"]),
        ("resume", [given.get("resume", "false")], ["true", "false"]),
        ("steps", names, STEPS),
    ):
        for value in found:
            if value not in choices:
                raise UserError(f"{key}: {not_a_choice(value, choices)}")
    return Options(
        minutes=_minutes(given.get("minutes", "25")),
        device=given.get("device", CUDA),
        output=Path(given.get("output", "gpu-check")).expanduser(),
        steps=tuple(names),
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
        started = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
        results = Results(given.device, given.minutes, started, steps(given.device))
        kept = read_results(folder / JSON_NAME, given.device) if given.resume else {}
        runner = Runner(results, folder, given.steps, kept)
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
        lock = try_lock(folder / ".lock", mode=0o644)
    except OSError as error:
        why = f"{folder} cannot be written: {one_line(error)}; write another folder"
        raise UserError(f"output: {why}") from error
    if lock is None:
        raise UserError(f"output: another check is at work in {folder}; write another, or wait")
    return lock


def read_results(path: Path, device: str) -> dict[str, Any]:
    """What an earlier check of that device left; empty: nothing of this form."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("version") == VERSION:
            _ = content["facts"], content["steps"]
            return content if content["device"] == device else {}
    return {}


VERSION = 2  # of the file's form


def _end(results: Results, folder: Path) -> Iterator[str]:
    yield ""
    yield f"{results.status}: {folder / PAGE_NAME}"
    yield from (f"  wrong         {line}" for line in wrong(results))
    yield from (f"  below target  {what}: {found}" for what, found, _ in below(results))
    if left := not_run(results):
        yield f"  not run       {len(left)}, each with its reason on the page"


class Runner:
    """A check under way; `unwritten`: why the last results are not on the disk, empty: they are."""

    def __init__(
        self,
        results: Results,
        folder: Path,
        chosen: Sequence[str] = (),
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Of `results`, which it fills.

        Args:
            results: the plan.
            folder: of results, logs and work.
            chosen: names of steps; the others are not run. Empty: all.
            kept: an earlier check, of which what was finished is not measured again.
        """
        self.results, self.unwritten, self.kept = results, "", kept or {}
        self._folder, self._chosen = folder, chosen
        self._work = folder / "work"
        self._began = time.monotonic()
        self._ends = self._began + 60 * results.minutes

    def run_all(self) -> None:
        """Run every step that was chosen; the results are on the disk after each item.

        Raises:
            UserError: the chosen device is not there, or packages are missing.
        """
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        (self._folder / "logs").mkdir(exist_ok=True)
        try:
            for number, step in enumerate(self.results.steps):
                self._step(step, time.monotonic() + self._share(number))
            for step in self.results.steps:
                self._step(step, self._ends)  # what had no time, in what others left
            self.results.status = "finished"
        except KeyboardInterrupt:
            self.results.status = "stopped"
            raise
        finally:
            if self.results.facts:  # else nothing was measured, and what is in the folder stays
                self.write()
            shutil.rmtree(self._work, ignore_errors=True)

    def _share(self, number: int) -> float:
        """Seconds for a step, of all that are left; what all others need has all of the time."""
        left, later = self._ends - time.monotonic(), self.results.steps[number:]
        shares = sum(step.share for step in later if self._runs(step))
        return left * (later[0].share / shares if number and shares else 1)

    def _runs(self, step: Step) -> bool:
        return not self._chosen or step.name in (*self._chosen, DEVICE)

    def _step(self, step: Step, ends: float) -> None:
        """Run its items that have no result yet."""
        for item in step.items:
            if item.state not in (WAITING, NO_TIME):
                continue
            before = item.state
            self._item(step, item, ends)
            if item.name == FACTS:
                self._take_facts(item)
            judge(self.results, step, item)
            self.write()
            if item.seconds or item.state == NO_TIME != before:
                at = duration(time.monotonic() - self._began)
                print(f"{at:>7}  {step.name} · {headline(item)}", flush=True)

    def _item(self, step: Step, item: Item, ends: float) -> None:
        """Run one item, or write why not."""
        left = ends - time.monotonic() if item.name != FACTS else item.limit
        needs = item.limit / OF_LIMIT / (1 if self.results.device == CUDA else PATIENCE)
        if kept := self._kept(step, item):
            vars(item).update(kept)
        elif not self._runs(step):
            item.state, item.reason = NOT_HERE, "steps= leaves it out"
        elif lacking := self._lacking(item):
            item.state, item.reason = NOT_HERE, lacking
        elif left < needs:
            reason = f"{max(left, 0):.0f} s were left of its step's time"
            item.state, item.reason = NO_TIME, f"{reason}; it takes {needs:.0f} s or more"
        else:
            self._measure(item, f"{step.name}-{item.name}", min(item.limit, left))

    def _measure(self, item: Item, name: str, limit: float) -> None:
        name = re.sub(r"[^\w.-]+", "-", name).strip("-")
        file, device = self._work / f"{name}.rows", item.device or self.results.device
        file.unlink(missing_ok=True)  # of its first try
        started = time.monotonic()
        env = environment(device, all_gpus=item.all_gpus)
        ended, log = run(command(item, file, device), self._folder / "logs" / f"{name}.txt",
                         folder=self._work, env=env, limit=limit)  # fmt: skip
        item.seconds, item.rows = time.monotonic() - started, read(file)
        item.state, item.reason = outcome(ended, log)
        if ended is None and limit < item.limit:
            item.state, item.reason = NO_TIME, f"the time was up after {limit:.0f} s of it"
        elif ended is None:
            item.reason = f"too long: ended after {limit:.0f} s"
        bad = [row for row in item.rows if "wrong" in row]
        if item.state == OK and bad:
            reason = f"{len(bad)} of {len(item.rows)} rows: {bad[0].get('test', '')}: "
            item.state, item.reason = FAILED, (reason + bad[0]["wrong"])[:REASON]
        item.log = log if item.state == FAILED else ""
        shutil.rmtree(file.with_suffix(".run"), ignore_errors=True)

    def _kept(self, step: Step, item: Item) -> dict[str, Any]:
        """What an earlier check found, where it is not to be measured again."""
        if step.name in (DEVICE, *self._chosen):
            return {}
        before = (
            one for s in self.kept.get("steps", ()) if s["name"] == step.name for one in s["items"]
        )
        found = (one for one in before if one["name"] == item.name and one["state"] in DONE)
        return next(found, {})

    def _lacking(self, item: Item) -> str:
        """What an item needs that is not here."""
        corpus = [i.state for _, i in self.results.items() if i.name == CORPUS]
        if item.measure == "train" and corpus not in ([], [OK]):
            return "needs the corpus, which was not written"
        for need in item.needs:
            if need == CUDA and self.results.device != CUDA:
                return "needs CUDA"
            if need != CUDA and need not in self.results.facts.get("modules", []):
                return f"needs the package {need}, which is not installed"
        return ""

    def _take_facts(self, item: Item) -> None:
        """The first item's row; without it nothing else can run."""
        if item.state != OK or not item.rows:
            raise UserError(f"device: {self.results.device} does not work here: {item.reason}")
        facts = item.rows[0]
        if self.kept and (other := differs(self.kept["facts"], facts)):
            print(f"resume: the earlier check was of another {other}; nothing of it is kept")
            self.kept = {}
        if lacking := facts.get("lacking"):
            raise UserError(f"wheels: {', '.join(lacking)} cannot be imported; {WANTED}")
        self.results.facts = facts

    def write(self) -> None:
        """JSON and page, atomically; a full disk is reported once, and tried again."""
        self.results.seconds = time.monotonic() - self._began
        content = json.dumps({"version": VERSION, **asdict(self.results)}, indent=1, default=str)
        try:
            atomic_write(self._folder / JSON_NAME, content + "\n")
            atomic_write(self._folder / PAGE_NAME, as_html(self.results))
            self.unwritten = ""
        except OSError as error:
            if not self.unwritten:
                print(f"output: {one_line(error)}", file=sys.stderr)
            self.unwritten = one_line(error)


def differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What makes two checks' numbers incomparable; empty: nothing."""
    both = [{**facts, **facts.get("libraries", {})} for facts in (before, now)]
    names = ("gpu", "processor", "torch", "git commit")
    return next((name for name in names if both[0].get(name) != both[1].get(name)), "")


def environment(device: str, *, all_gpus: bool = False) -> dict[str, str]:
    """Of an item: this package, its GPUs or none, no launcher's variables.

    On `cuda` the first GPU that is visible, or all of them.
    """
    found = {key: value for key, value in os.environ.items() if not _LAUNCHED.fullmatch(key)}
    given = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *given])
    first = found.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if device != CUDA or not all_gpus:
        found["CUDA_VISIBLE_DEVICES"] = first if device == CUDA else ""
    found |= {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    keep_children(found)
    return {**found, **allocator_settings(found)}


def command(item: Item, file: Path, device: str) -> list[str]:
    """What an item starts."""
    module, settings = "benchmarks.gpu_check.measure", json.dumps(item.settings)
    return [sys.executable, "-m", module, item.measure, str(file), device, settings]


def run(
    words: Sequence[str], log: Path, *, folder: Path, env: Mapping[str, str], limit: float
) -> tuple[int | None, str]:
    """Run a command: its exit status, None after its limit, and the last lines of its log.

    Whatever it does (crash, hang, run out of memory, leave children), this returns in time: it runs
    in a group of its own, which is ended with it.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(words, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL,
                                   stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    try:
        ended: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        ended = None
    finally:  # also where the check itself is interrupted
        _end_group(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return ended, "\n".join(lines[-LINES:])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has left behind, by SIGKILL where SIGTERM does not help."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it
            process.wait(GRACE)


def outcome(status: int | None, log: str) -> tuple[str, str]:
    """State and reason by an exit status and the last lines."""
    if status == 0:
        return OK, ""
    lines = [line.strip()[:REASON] for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {status}"
    if "GiB are free" in log and status == 2:
        return NOT_HERE, last
    if memory := [line for line in lines if _OUT_OF_MEMORY.search(line)]:
        return FAILED, memory[0]
    if status is not None and status < 0:
        return FAILED, f"killed by {signal.Signals(-status).name}"
    return FAILED, last
