"""Launch targets without a scheduler: this machine (`local`) and machines reached by ssh.

Listed in `targets.py`. Both use the same bash script. It starts the supervisor in a new session,
with the log in the run's folder, and prints the process id. `local` runs the script with bash,
`ssh` with `ssh HOST bash -s`. Secrets are sent on standard input, so they appear in no file and in
no process list.

With several machines, each has a supervisor that starts the processes of its machine with torchrun.
The rendezvous is on the first machine (`distributed/rendezvous.py`). If the processes of one
machine end, those of the others fail, and their supervisors restart them too.
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
"""Python program that runs a command with the default SIGINT action in a new session. Bash makes
background processes ignore SIGINT, which requests a stop."""
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
"""Python program that prefixes each line with the time. The lines of several machines are merged
by it."""
_STARTED = re.compile(r"^llmfoundry started (\d+) ?(.*)$", re.MULTILINE)
_PROCESS = re.compile(r"(?:(.+):)?(\d+)@(\d+)")
_PS = "TZ=UTC0 LC_ALL=C ps -ww"
_LSTART = "%a %b %d %H:%M:%S %Y"  # as ps prints a start
_SLACK = 2  # seconds; ps may report slightly different start times for the same process
_ASKED = "asked"
"""Suffix of an empty file next to a machine's log: a stop of its supervisor was requested."""
_KILLED = "it was killed, or its machine has restarted"
_STATE_SECONDS, _STOP_SECONDS, _SETUP_SECONDS = 40.0, 60.0, 3600.0


def render(job: Job) -> str:
    """Return the scripts of all machines, as one text."""
    hosts = job.config.hosts or [""]
    parts = [(f"# on {host}\n" if host else "") + script(job, n) for n, host in enumerate(hosts)]
    return "\n".join(parts)


def script(job: Job, node: int) -> str:
    """Return the bash script that starts the supervisor of machine `node` in the background."""
    config, folder = job.config, _folder(job)
    recipe = f"{folder}/{RECIPE}"
    log, status, asked = (f"{folder}/{LOGS}/node-{node}.{end}" for end in ("log", "exit", _ASKED))

    # the supervisor's command; its exit status goes to a file, its output to the log
    first_host = _address(config.hosts[0]) if config.hosts else ""
    words = [*job.torchrun(first_host), *job.own_processes()]
    command = shlex.join(job.command(recipe, *words))
    inner = f"trap : INT; {command}; echo $? > {shlex.quote(status)}"
    if job.nodes > 1:
        inner = f"exec > >(exec {shlex.join([job.python, '-c', _TIMES])}) 2>&1; {inner}"

    # working folder, environment, log folder, recipe
    lines = [f"# {job.note}", "set -e", job.enter(_workdir(job))]
    lines += job.environment("through standard input" if config.hosts else "this shell's")
    lines += [f"mkdir -p {shlex.quote(f'{folder}/{LOGS}')}"]
    lines += [f"rm -f {shlex.quote(status)} {shlex.quote(asked)}"]
    if config.target == "ssh":
        lines += job.write_recipe(recipe)

    # setup commands, checks, and the start
    lines += [
        *config.setup,
        *(["echo; sleep 1; echo  # ends if the launcher was killed"] if config.setup else []),
        *_tools(job),
        f"{shlex.quote(job.python)} -c '{_SESSION}' bash -c {shlex.quote(inner)}"
        f" >> {shlex.quote(log)} 2>&1 < /dev/null &",
        f'echo "llmfoundry started $! $({_PS} -o lstart= -p $! 2> /dev/null)"',
    ]
    # In braces, bash reads the complete script first. A setup command could read the rest of it.
    return "\n".join(["{", *lines, "exit 0", "}", ""])


def _tools(job: Job) -> list[str]:
    """Return lines of bash that fail on a machine without a required program."""
    python = shlex.quote(job.python)
    instead = "write launch.environment=FOLDER, which has bin/python"
    lacks = shlex.quote(f"{job.python} is not there; {instead}")
    lines = [f"command -v {python} > /dev/null || {{ echo {lacks} >&2; exit 2; }}"]
    if job.config.target == "ssh" or job.python != sys.executable:  # maybe another version
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
    """Return the run's folder on the training machine, for its log."""
    if job.config.target == "local":
        return str(job.folder.absolute())
    return str(PurePosixPath(_workdir(job)) / "runs" / job.name)


def _address(host: str) -> str:
    """Return the name of a host without the user."""
    return host.rpartition("@")[2]


def submit(job: Job) -> LaunchRecord:
    """Start the supervisor on each machine. If one machine fails, stop the others.

    Raises:
        UserError: a machine cannot be reached, or its script fails.
    """
    config = job.config
    secrets = secrets_here(config.secrets)
    where = {"options": "\n".join(config.options), "log": f"{_folder(job)}/{LOGS}/node-*.log"}
    where |= job.record.where
    record = dataclasses.replace(job.record, where=where, submitted_at=time.time())
    for node, host in enumerate(config.hosts or [""]):
        exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in secrets.items() if host)
        try:
            answer = ask(
                _shell(record, host), text=exports + script(job, node), seconds=_SETUP_SECONDS
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
            with suppress(OSError):  # if the launcher is killed now, the started machines are known
                write(job.folder, record)
    return record


def _started(host: str, answer: str) -> str:
    """Return a machine's part of the job id from its script's output; empty: nothing started."""
    match = _STARTED.search(answer)
    if match is None:
        return ""
    if host:
        began = _epoch(match[2])
        return "" if began is None else f"{host}:{match[1]}@{began}"
    with suppress(psutil.Error):  # ps may not be installed on this machine
        return f"{match[1]}@{psutil.Process(int(match[1])).create_time():.0f}"
    return ""


def _epoch(start: str) -> int | None:
    """Return the seconds since 1970 of a UTC start time printed by ps; None: not a time."""
    with suppress(ValueError):
        return calendar.timegm(time.strptime(start.strip(), _LSTART))
    return None


def _end_all(record: LaunchRecord) -> None:
    """Kill the started supervisors; ignore machines that do not answer."""
    for host, pid, _ in _processes(record):
        with suppress(UserError):
            _run(record, host, _stop_script(pid), _STOP_SECONDS)


def state(record: LaunchRecord) -> TargetState:
    """Return the state of the supervisors: running if one runs; if all ended, prefer a failure."""
    if not record.job:
        return TargetState(UNKNOWN, "was not started")
    states = list[TargetState]()
    for node, (host, pid, began) in enumerate(_processes(record)):
        try:
            states.append(_state_of(record, node, host, pid, began))
        except UserError as error:
            states.append(TargetState(UNKNOWN, f"{host or 'here'}: {error}"))
    order = {RUNNING: 0, UNKNOWN: 1, ENDED: 2}
    return min(states, key=lambda state: (order[state.state], state.reason == "exit status 0"))


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
    """Return the state of a process on this machine, without a subprocess per run."""
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
    """Return the path of a machine's file next to its log."""
    return record.where.get("log", "").replace("node-*.log", f"node-{node}.{ending}")


def _names(words: list[str], status: str) -> bool:
    """Return whether a command is the supervisor's, which contains the path of its exit status.

    The start time alone is not enough: the clock or the time zone may have been set meanwhile.
    """
    return bool(status) and any(f"> {shlex.quote(status)}" in word for word in words)


def _ended(text: str) -> TargetState:
    """Return the state of a supervisor that has written its exit status."""
    status = int(text.strip()[:9])
    return TargetState(ENDED, f"exit status {status}", status)


def _is_same(line: str, status: str, began: int) -> bool:
    """Return whether ps shows the started process, and not a later one with the same id."""
    if not line.strip() or line.lstrip().startswith("Z"):  # ended, or a zombie
        return False
    _, *words = line.split(maxsplit=6)  # state, five words of the start time, command
    start = _epoch(" ".join(words[:5]))
    is_then = start is not None and abs(start - began) <= _SLACK
    return is_then or _names(words[5:], status)


def stop(record: LaunchRecord, *, now: bool) -> str:
    """Stop the supervisors of a job, and return a description of what was done.

    Args:
        record: of the launch.
        now: kill at once; otherwise request that the run saves and ends.

    Raises:
        UserError: some machines could not be reached; the other machines were stopped.
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
    """Return a bash script that signals a supervisor's session. A second signal kills the run.

    Args:
        pid: of the session's first process.
        asked: file that is created before the first signal. Later requests, also from other
            machines, send no signal if it exists. Empty: kill the run at once.
    """
    first = f"kill -INT -- -{pid}"
    if asked:
        mark = shlex.quote(asked)
        is_first = f"(set -C; : > {mark}) 2> /dev/null || [ ! -e {mark} ]"  # a disk may be full
        return f"if {is_first}; then {first} || {{ rm -f {mark}; exit 1; }}; fi"
    wait = f"for i in $(seq 40); do kill -0 -- -{pid} || exit 0; sleep 0.25; done"
    return f"{first}; sleep 1; {{ {first}; {wait}; kill -KILL -- -{pid}; }} 2>/dev/null || true"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Yield (number of the machine, line) of the output of supervisors and training processes."""
    sources = dict[str, list[str]]()
    for node, (host, _, _) in enumerate(_processes(record)):
        log = _file(record, node, "log")
        words = ["tail", "-n", "+1", *(["-F"] if follow else []), "--", log]
        if host:
            words = [*_ssh(record), host, f"exec {shlex.join(words)}"]
        sources[str(node)] = words
    return merged_lines(sources)


def _processes(record: LaunchRecord) -> list[tuple[str, int, int]]:
    """Return host (empty: this one), process id and start time of each machine.

    Start times are in seconds since 1970.
    """
    matches = (_PROCESS.fullmatch(mark) for mark in record.job.split(",") if mark)
    return [(match[1] or "", int(match[2]), int(match[3])) for match in matches if match]


def _run(record: LaunchRecord, host: str, text: str, seconds: float) -> str:
    return ask(_shell(record, host), text=f"{text}\n", seconds=seconds)


def _shell(record: LaunchRecord, host: str) -> list[str]:
    """Return the command for bash on this machine or on a host.

    The ssh options of a record were checked: none of them starts a program (`ssh_problems`).
    """
    return [*_ssh(record), host, "exec bash -s"] if host else ["bash", "-s"]


def _ssh(record: LaunchRecord) -> list[str]:
    options = record.where.get("options", "")
    defaults = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]  # ssh uses the first of two
    return ["ssh", "-T", *(options.split("\n") if options else []), *defaults]
