"""The process between a user's command and its torchrun: `python -m` with this module's name.

`distributed/process_group.py` becomes it where a run wants several processes of this machine. It
starts torchrun, waits, and ends as that ends. The one idea: where processes have ended for lack of
memory (`errors.RestartNeeded`), it starts them once more, as they then use less of it; torchrun's
own restarts would keep a store that still holds the dead processes' addresses. It imports no
PyTorch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

from llmfoundry.exit_status import ENDS_FOLDER, MEMORY, STOPS, on_stops, read_ends
from llmfoundry.processes import keep_children

MOST = 24
"""Starts for lack of memory: a microbatch of a million rows, halved to one, takes 20."""
_PASSED_ON = {number: signal.SIGTERM for number in STOPS if number.name == "SIGUSR1"}
"""For a signal that would end torchrun before its processes have saved, one that it passes on."""
AGAIN = "--again"
"""Before words that are added to the command from the second start on."""


def main() -> None:
    """Run torchrun with the words of the command line, as often as memory asks for it.

    Raises:
        SystemExit: with torchrun's status.
    """
    place = sys.argv.index(AGAIN) if AGAIN in sys.argv else len(sys.argv)
    words, again = sys.argv[1:place], sys.argv[place + 1 :]
    keep_children()
    folder = Path(tempfile.mkdtemp(prefix="llmfoundry-ends-"))
    try:
        status = _run_until_it_fits(words, again, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status < 0:  # for the shell, this process is in the place of what a signal has ended
        with suppress(OSError):  # SIGKILL has no other
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _run_until_it_fits(words: list[str], again: list[str], folder: Path) -> int:
    """Start torchrun, pass signals on, and start it again where memory was lacking; its status."""
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(_PASSED_ON.get(number, number))

    on_stops(pass_on)
    for n in range(MOST):
        ends = folder / str(n)
        ends.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *(again if n else [])],
            env={**os.environ, ENDS_FOLDER: str(ends)},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from here
        )
        if received:  # while it was being started
            pass_on(received[-1], None)
        status = process.wait()
        if received or not any(end["kind"] == MEMORY for end in read_ends(ends)):
            break
        print("starting the processes again ...", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    main()
