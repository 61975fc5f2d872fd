"""Scripts in forks of one process that has imported what they import: 4 s of CPU less for each.

`tests.tiny.run` starts scripts here. Each is a process with its own arguments, folder and streams,
which ends as an interpreter does; ranks get what torchrun says to them. That a script starts from
nothing, and by torchrun itself, is what `tests.tiny.command` is for. Run as a program, this file is
the process that is forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
IMPORTED = (
    *(f"llmfoundry.commands.{name}" for name in ("train", "evaluate", "convert", "generate")),
    "llmfoundry.recipe.front.script",
    "llmfoundry.recipe.front.compose",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",
    "tqdm.auto",
)


class WarmScripts:
    """The process that is forked, started with the first script and ended with this one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, script: str, arguments: Sequence[str], *, cwd: Path, processes: int, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` with captured streams gives; 1 if one of several ranks fails.

        Raises:
            TimeoutExpired: it was killed after `timeout` seconds.
        """
        words = [str(SCRIPTS / script), *arguments]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            server = self._started()
            assert server.stdin and server.stdout
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            request = json.dumps([words, str(cwd.resolve()), *files, processes])
            print(request, file=server.stdin, flush=True)
            if not select.select([server.stdout], [], [], timeout)[0]:
                os.killpg(server.pid, signal.SIGKILL)
                self._server = None
                raise subprocess.TimeoutExpired(words, timeout, _text(out), _text(err))
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(words, status, _text(out), _text(err))

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return self._server


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _serve() -> list[str]:
    """Fork for each line of standard input and write how the fork ended; returns in the fork."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        words, cwd, out, err, processes = json.loads(line)
        pid = os.fork()
        if not pid:
            requests.close()
            answers.close()
            for number, name in enumerate((os.devnull, out, err)):
                file = os.open(name, os.O_RDWR | os.O_APPEND)
                os.dup2(file, number)
                os.close(file)
            os.chdir(cwd)
            if processes > 1:
                _start_ranks(processes)
            return list(words)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    sys.exit()


def _start_ranks(processes: int) -> None:
    """Fork the ranks of a run and be their torchrun, with the store; returns in the ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = set()
    for rank in range(processes):
        pid = os.fork()
        if not pid:
            listener.close()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        ranks.add(pid)
    # After the forks: it has a thread. Only the older backend takes a socket that listens.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    del store
    os._exit(failed)


if __name__ == "__main__":
    sys.path[0] = str(SCRIPTS)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    sys.argv = _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
