"""Targets without a scheduler: this machine, and machines that ssh reaches.

`targets.py` lists both. The idea: they are one. A script of bash starts the supervisor as a session
of its own, with its log in the run's folder, and prints its process's number; here bash runs it,
and elsewhere `ssh HOST bash -s`. What is sent through standard input stands in no file and no list
of processes, so that secrets go that way.

Of several machines each has a supervisor, which starts that machine's processes by torchrun; they
meet at the first (`distributed/rendezvous.py`). Where one ends, the others miss it, and start again
as well.
"""

from __future__ import annotations

import calendar
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from llmfoundry.errors import UserError
from llmfoundry.launch.client import ask, merged_lines, secrets_here
from llmfoundry.launch.job import LOGS, RECIPE, Job
from llmfoundry.launch.record import (
    ENDED,
    RUNNING,
    UNKNOWN,
    LaunchRecord,
    TargetState,
    write,
)
from llmfoundry.processes import is_alive

_SESSION = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.setsid();"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Bash lets what it starts in the background ignore SIGINT, by which a run is asked to stop."""
_TIMES = """
import datetime, os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
for line in sys.stdin.buffer:
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ")
    try:
        os.write(1, now.encode() + line)
    except OSError:
        pass
"""
"""Writes the time before each line of one of several machines, by which they are merged later."""
_STARTED = re.compile(r"^llmfoundry started (\d+) ?(.*)$", re.MULTILINE)
_PROCESS = re.compile(r"(?:(.+):)?(\d+)@(\d+)")
_PS = "TZ=UTC0 LC_ALL=C ps -ww"
_LSTART = "%a %b %d %H:%M:%S %Y"  # as ps prints a start
_SLACK = 2  # seconds by which ps may tell a start otherwise when it is asked again
_ASKED = "asked"
"""The ending of an empty file beside a machine's log: its supervisor was asked to save and end."""
_KILLED = "it was killed, or its machine has restarted"
_STATE_SECONDS, _STOP_SECONDS, _SETUP_SECONDS = 40.0, 60.0, 3600.0


def render(job: Job) -> str:
    """The script of each machine."""
    hosts = job.config.hosts or [""]
    parts = [(f"# on {host}\n" if host else "") + script(job, n) for n, host in enumerate(hosts)]
    return "\n".join(parts)


def script(job: Job, node: int) -> str:
    """The bash script that starts machine number `node`'s supervisor in the background."""
    config, folder = job.config, _folder(job)
    recipe = f"{folder}/{RECIPE}"
    log, status, asked = (f"{folder}/{LOGS}/node-{node}.{end}" for end in ("log", "exit", _ASKED))
    words = [*job.torchrun(_address(config.hosts[0]) if config.hosts else ""), *job.own_processes()]
    command = shlex.join(job.command(recipe, *words))
    inner = f"trap : INT; {command}; echo $? > {shlex.quote(status)}"
    if job.nodes > 1:
        inner = f"exec > >(exec {shlex.join([job.python, '-c', _TIMES])}) 2>&1; {inner}"
    lines = [f"# {job.note}", "set -e", job.enter(_workdir(job))]
    lines += job.environment("through standard input" if config.hosts else "this shell's")
    lines += [f"mkdir -p {shlex.quote(f'{folder}/{LOGS}')}"]
    lines += [f"rm -f {shlex.quote(status)} {shlex.quote(asked)}"]
    if config.target == "ssh":
        lines += job.write_recipe(recipe)
    lines += [
        *config.setup,
        *(["echo; sleep 1; echo  # ends if the launcher was killed"] if config.setup else []),
        *_tools(job),
        f"{shlex.quote(job.python)} -c '{_SESSION}' bash -c {shlex.quote(inner)}"
        f" >> {shlex.quote(log)} 2>&1 < /dev/null &",
        f'echo "llmfoundry started $! $({_PS} -o lstart= -p $! 2> /dev/null)"',
    ]
    # In braces bash reads all of it before a line of setup could read the rest.
    return "\n".join(["{", *lines, "exit 0", "}", ""])


def _tools(job: Job) -> list[str]:
    """Lines of bash that refuse a machine that lacks a program which is needed."""
    python = shlex.quote(job.python)
    instead = "write launch.environment=FOLDER, which has bin/python"
    lacks = shlex.quote(f"{job.python} is not there; {instead}")
    lines = [f"command -v {python} > /dev/null || {{ echo {lacks} >&2; exit 2; }}"]
    if job.config.target == "ssh" or job.python != sys.executable:  # of another version, perhaps
        before, after = shlex.quote(f"{job.python} cannot start llmfoundry ("), f"); {instead}"
        last = "\"${why##*$'\\n'}\""
        lines += [
            f"why=$({python} -m llmfoundry supervise --help 2>&1) ||"
            f" {{ echo {before}{last}{shlex.quote(after)} >&2; exit 2; }}"
        ]
    if job.config.target == "ssh":
        lacks = "ps is not there, by which a run is found again; install procps"
        lines += [f"command -v ps > /dev/null || {{ echo {shlex.quote(lacks)} >&2; exit 2; }}"]
    return lines


def _workdir(job: Job) -> str:
    return job.config.workdir or os.getcwd()


def _folder(job: Job) -> str:
    """The run's folder on the machine that trains, for its log."""
    if job.config.target == "local":
        return str(job.folder.absolute())
    return str(PurePosixPath(_workdir(job)) / "runs" / job.name)


def _address(host: str) -> str:
    """A host's name without its user: by which other machines reach it."""
    return host.rpartition("@")[2]


def submit(job: Job) -> LaunchRecord:
    """Start the supervisor on each machine; those that have started are stopped where one fails.

    Raises:
        UserError: a machine cannot be reached, or its script fails.
    """
    config = job.config
    secrets = secrets_here(config.secrets)
    where = {"options": "\n".join(config.options), "log": f"{_folder(job)}/{LOGS}/node-*.log"}
    where |= job.record.where
    record = dataclasses.replace(job.record, where=where, submitted_at=time.time())
    for node, host in enumerate(config.hosts or [""]):
        sent = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in secrets.items() if host)
        try:
            answer = ask(
                _shell(record, host), text=sent + script(job, node), seconds=_SETUP_SECONDS
            )
            mark = _started(host, answer)
            if not mark:
                raise UserError(f"bash: has started nothing that lasts; see {where['log']}")
        except BaseException as error:
            _end_all(record)
            if not isinstance(error, UserError):
                raise
            place = f"launch.hosts[{node}]: {host}: " if host else "launch: "
            raise UserError(f"{place}{error}") from error
        record = dataclasses.replace(record, job=",".join(filter(None, [record.job, mark])))
        if job.nodes > 1:
            with suppress(OSError):  # a launcher that is killed now leaves none that nobody finds
                write(job.folder, record)
    return record


def _started(host: str, answer: str) -> str:
    """A machine's part of a record's job, from its script's output; empty: it started none."""
    found = _STARTED.search(answer)
    if found is None:
        return ""
    if host:
        began = _epoch(found[2])
        return "" if began is None else f"{host}:{found[1]}@{began}"
    with suppress(psutil.Error):  # ps may be missing here
        return f"{found[1]}@{psutil.Process(int(found[1])).create_time():.0f}"
    return ""


def _epoch(start: str) -> int | None:
    """Seconds since 1970 of a start in UTC, as ps prints it; None: it is none."""
    with suppress(ValueError):
        return calendar.timegm(time.strptime(start.strip(), _LSTART))
    return None


def _end_all(record: LaunchRecord) -> None:
    """End the supervisors that have started, as far as their machines answer."""
    for host, pid, _ in _processes(record):
        with suppress(UserError):
            _run(record, host, _stop_script(pid), _STOP_SECONDS)


def state(record: LaunchRecord) -> TargetState:
    """Whether its supervisors run; with several machines, whether any does."""
    if not record.job:
        return TargetState(UNKNOWN, "was not started")
    found = list[TargetState]()
    for node, (host, pid, began) in enumerate(_processes(record)):
        try:
            found.append(_state_of(record, node, host, pid, began))
        except UserError as error:
            found.append(TargetState(UNKNOWN, f"{host or 'here'}: {error}"))
    order = {RUNNING: 0, UNKNOWN: 1, ENDED: 2}  # of those that have ended, the one that failed
    return min(found, key=lambda each: (order[each.state], each.reason == "exit status 0"))


def _state_of(record: LaunchRecord, node: int, host: str, pid: int, began: int) -> TargetState:
    file = _file(record, node, "exit")
    if not host:
        return _state_here(file, pid, began)
    words = f"{_PS} -o stat= -o lstart= -o args= -p {pid} || true; echo"
    lines = _run(
        record, host, f"{words}; cat {shlex.quote(file)} 2>/dev/null || true", _STATE_SECONDS
    ).split("\n")
    if _is_same(lines[0], file, began):
        return TargetState(RUNNING, f"process {pid} of {host}")
    ended = next((line for line in lines[1:] if line.strip().isdecimal()), None)
    return TargetState(ENDED, _KILLED) if ended is None else _ended(ended)


def _state_here(status: str, pid: int, began: int) -> TargetState:
    """Of this machine's process, without others being started for each of hundreds of runs."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - began) <= _SLACK or _names(process.cmdline(), status)
        if is_same and is_alive(process):
            return TargetState(RUNNING, f"process {pid}")
    with suppress(OSError):
        path = Path(status)
        text = path.read_text(errors="replace").strip() if path.is_file() else ""
        if text.isdecimal():
            return _ended(text)
    return TargetState(ENDED, _KILLED)


def _file(record: LaunchRecord, node: int, ending: str) -> str:
    """A machine's file beside its log."""
    return record.where.get("log", "").replace("node-*.log", f"node-{node}.{ending}")


def _names(words: list[str], status: str) -> bool:
    """Whether a command is a supervisor's, which names where its exit status goes.

    A start is told by the clock and by a time zone, and both may be set meanwhile.
    """
    return bool(status) and any(f"> {shlex.quote(status)}" in word for word in words)


def _ended(text: str) -> TargetState:
    """A supervisor that has left its exit status."""
    status = int(text.strip()[:9])
    return TargetState(ENDED, f"exit status {status}", status)


def _is_same(line: str, status: str, began: int) -> bool:
    """Whether ps shows the process that was started, and not a later one of its number."""
    if not line.strip() or line.lstrip().startswith("Z"):  # it is gone, or nobody waits for it
        return False
    _, *words = line.split(maxsplit=6)  # five of them are its start
    start = _epoch(" ".join(words[:5]))
    is_then = start is not None and abs(start - began) <= _SLACK
    return is_then or _names(words[5:], status)


def stop(record: LaunchRecord, *, now: bool) -> str:
    """Ask its supervisors to save and end; `now`: end them at once. What came of it, in words.

    Raises:
        UserError: of the machines that cannot be asked; the others were.
    """
    done, problems = list[str](), list[str]()
    for node, (host, pid, began) in enumerate(_processes(record)):
        place = f" on {host}" * bool(host)
        mark = "" if now else _file(record, node, _ASKED)
        try:
            if _state_of(record, node, host, pid, began).state != RUNNING:
                done.append(f"had ended{place}")
                continue
            _run(record, host, _stop_script(pid, mark), _STOP_SECONDS)
            done.append(f"{'ended' if now else 'asked to save and end'}{place}")
        except UserError as error:
            problems.append(f"{host or 'here'}: {error}" + f"; {', '.join(done)}" * bool(done))
    if problems:
        raise UserError(*problems)
    return ", ".join(done) or "was not started"


def _stop_script(pid: int, asked: str = "") -> str:
    """Signals for a supervisor's session: the second one ends its run at once.

    Args:
        pid: of the session's first process.
        asked: a file that is made as the first signal is sent, so that whoever asks next, from
            whatever machine, sends none; empty: end the run at once.
    """
    first = f"kill -INT -- -{pid}"
    if asked:
        mark = shlex.quote(asked)
        is_first = f"(set -C; : > {mark}) 2> /dev/null || [ ! -e {mark} ]"  # a disk may be full
        return f"if {is_first}; then {first} || {{ rm -f {mark}; exit 1; }}; fi"
    wait = f"for i in $(seq 40); do kill -0 -- -{pid} || exit 0; sleep 0.25; done"
    return f"{first}; sleep 1; {{ {first}; {wait}; kill -KILL -- -{pid}; }} 2>/dev/null || true"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """What its supervisors and processes print, with the number of the machine."""
    sources = dict[str, list[str]]()
    for node, (host, _, _) in enumerate(_processes(record)):
        log = _file(record, node, "log")
        words = ["tail", "-n", "+1", *(["-F"] if follow else []), "--", log]
        if host:
            words = [*_ssh(record), host, f"exec {shlex.join(words)}"]
        sources[str(node)] = words
    return merged_lines(sources)


def _processes(record: LaunchRecord) -> list[tuple[str, int, int]]:
    """Host (empty: this one), process and its start in seconds since 1970, of each machine."""
    marks = (_PROCESS.fullmatch(mark) for mark in record.job.split(",") if mark)
    return [(mark[1] or "", int(mark[2]), int(mark[3])) for mark in marks if mark]


def _run(record: LaunchRecord, host: str, text: str, seconds: float) -> str:
    return ask(_shell(record, host), text=f"{text}\n", seconds=seconds)


def _shell(record: LaunchRecord, host: str) -> list[str]:
    """Bash here, or on a host; no options of this record can start a program (`ssh_problems`)."""
    return [*_ssh(record), host, "exec bash -s"] if host else ["bash", "-s"]


def _ssh(record: LaunchRecord) -> list[str]:
    options = record.where.get("options", "")
    own = [
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=20",
    ]  # the first of two counts
    return ["ssh", "-T", *(options.split("\n") if options else []), *own]
