"""Subprocesses of a target's client (ssh, sbatch, kubectl).

Used by the modules of the targets. A missing client is a one-line error. Secrets are masked in
error messages.
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

SECONDS = 60.0  # default timeout of a client
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+)Z ")
SILENCE = ("", "")
"""Yielded by `merged_lines` after a second without a line, so that a reader can do other work."""


class NoAnswerError(UserError):
    """A client did not answer in time. Its request may still take effect."""


def ask(words: Sequence[str], *, text: str = "", seconds: float = SECONDS) -> str:
    """Run a client and return its standard output.

    Args:
        words: the command.
        text: standard input.
        seconds: timeout.

    Raises:
        NoAnswerError: the client did not answer in time.
        UserError: the client is not installed or failed; contains its last line of output.
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
        output = (done.stderr or done.stdout).splitlines()
        messages = [line.strip() for line in output if line.strip()]
        why = public(messages[-1]) if messages else f"exit status {done.returncode}"
        raise UserError(f"{words[0]}: {why.removeprefix(f'{words[0]}: ')}")
    return done.stdout


def secrets_here(names: Sequence[str]) -> dict[str, str]:
    """Return the values of secrets from this shell's environment.

    Raises:
        UserError: a variable is not set.
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
    """Return the error for a client that is not installed or cannot be started."""
    if isinstance(error, FileNotFoundError):
        why = "is not installed here; launch from a machine that has it, or dry_run=true"
    else:
        why = f"cannot be started: {error.strerror}"
    return UserError(f"{client}: {why}")


def in_order(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Sort the lines of several machines by their timestamps, and remove the timestamps.

    A line without a timestamp sorts with the previous line of the same machine.
    """
    times, stamped = dict[str, str](), list[tuple[str, str, str]]()
    for name, line in lines:
        when, text = timed(line)
        times[name] = when or times.get(name, "")
        stamped.append((times[name], name, text))
    stamped.sort(key=lambda line: line[0])
    return ((name, text) for _, name, text in stamped)


def timed(line: str) -> tuple[str, str]:
    """Split a line into its UTC timestamp (empty: none) and its text."""
    match = _TIME.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def merged_lines(sources: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Run several commands; yield (source, line) as lines arrive, and SILENCE in between.

    Ends when all commands have ended. Closing the generator kills the commands.

    Args:
        sources: commands by the name of their source.
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
        # one process and one reader thread per source, all with the same queue
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

        # a reader puts None when its process has ended
        running = len(processes)
        while running:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                line = SILENCE
            if line is None:
                running -= 1
            else:
                yield line
    finally:
        for process in processes:
            process.kill()
            process.wait()
        with suppress(queue.Empty):
            while True:  # unblock readers that wait for space in the queue
                lines.get_nowait()
