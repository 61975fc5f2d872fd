"""A target's own client (ssh, sbatch, kubectl), asked as a process; whoever lacks it hears so.

The targets' files call it. Nothing of what a client prints goes on with a secret in it.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from llmfoundry.errors import UserError
from llmfoundry.redaction import public

SECONDS = 60.0  # for an answer
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+)Z ")
SILENCE = ("", "")
"""Among the lines of `merged_lines`: a second has brought none, so that a reader may look up."""


class NoAnswerError(UserError):
    """A client has not answered in time; what it was asked to do may be done all the same."""


def ask(words: Sequence[str], *, text: str = "", seconds: float = SECONDS) -> str:
    """What a client prints, given `text` as standard input.

    Raises:
        NoAnswerError: it has not answered in time.
        UserError: there is no such client, or it refuses; its own last line says why.
    """
    try:
        done = subprocess.run(
            list(words),
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{words[0]}: no answer within {seconds:.0f} s; try again") from error
    except OSError as error:
        raise _not_started(words[0], error) from error
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        why = public(said[-1].strip()) if said else f"exit status {done.returncode}"
        raise UserError(f"{words[0]}: {why.removeprefix(f'{words[0]}: ')}")
    return done.stdout


def secrets_here(names: Sequence[str]) -> dict[str, str]:
    """The secrets of this shell.

    Raises:
        UserError: one is not set.
    """
    lines = [
        f"launch.secrets: {name} is not set in this shell; set it"
        for name in names
        if not os.environ.get(name)
    ]
    if lines:
        raise UserError(*lines)
    return {name: os.environ[name] for name in names}


def _not_started(client: str, error: OSError) -> UserError:
    """The line for a client that is not there, or that this machine cannot run."""
    if isinstance(error, FileNotFoundError):
        why = "is not installed here; launch from a machine that has it, or dry_run=true"
    else:
        why = f"cannot be started: {error.strerror}"
    return UserError(f"{client}: {why}")


def in_order(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Lines of several machines by the times that stand before them, which are left out.

    One without a time has that of the line before it from the same machine.
    """
    times, found = dict[str, str](), list[tuple[str, str, str]]()
    for name, line in lines:
        when, text = timed(line)
        times[name] = when or times.get(name, "")
        found.append((times[name], name, text))
    found.sort(key=lambda line: line[0])
    return ((name, text) for _, name, text in found)


def timed(line: str) -> tuple[str, str]:
    """The time in UTC that a target has written before a line, or nothing; and the line."""
    found = _TIME.match(line)
    return (found[1], line[found.end() :]) if found else ("", line)


def merged_lines(sources: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Lines of several commands as they come, each with the name of its source, and SILENCE.

    Ends once all of them have; the commands end where the caller goes no further.
    """
    lines: queue.Queue[tuple[str, str] | None] = queue.Queue(maxsize=10_000)
    processes = list[subprocess.Popen[str]]()

    def read(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with suppress(ValueError, OSError):
            for line in process.stdout:
                lines.put((name, line.rstrip("\n")))
        lines.put(None)

    try:
        for name, words in sources.items():
            try:
                process = subprocess.Popen(
                    list(words),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                raise _not_started(words[0], error) from error
            processes.append(process)
            threading.Thread(target=read, args=(name, process), daemon=True).start()
        left = len(processes)
        while left:
            try:
                found = lines.get(timeout=1.0)
            except queue.Empty:
                found = SILENCE
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()
        with suppress(queue.Empty):
            while True:  # readers that wait for room end, too
                lines.get_nowait()
