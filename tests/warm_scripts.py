"""Scripts, and functions on ranks, in forks of one process that has imported what they import.

`tests.tiny.run` starts scripts here and tests with ranks their work: 5 s of CPU less for each
process. It has its own arguments, folder and streams; ranks get what torchrun says to them. At its
end threads are waited for, what was registered for it is called and all is written, as an
interpreter does, but modules are not taken apart. That a script starts from nothing, and by
torchrun itself, is what `tests.tiny.command` is for. Run as a program, this file is the process
that is forked.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

from torch.distributed import TCPStore

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
ENV["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, CUDA does not begin in a fork
IMPORTED = (
    "llmfoundry.cli.commands.train",
    "llmfoundry.cli.commands.evaluate",
    "llmfoundry.cli.commands.generate",
    *(f"llmfoundry.api.{name}" for name in ("examine", "conversion", "generation")),
    "llmfoundry.cli.script",
    "llmfoundry.recipe.compose",
    "transformers.models.auto.modeling_auto",
    "llmfoundry.resilience.watch.watch",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "tqdm.auto",
    "pytest",  # of the modules whose functions ranks call
)
GRACE = 5
"""Seconds in which the other ranks may end by themselves once one has failed."""
_server: subprocess.Popen[str] | None = None  # of this process, from its first script to its end


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    cwd: Path,
    processes: int = 1,
    timeout: float = 240,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` with captured streams gives; 1 if one of several ranks fails.

    `variables` are in its environment beside those of this process.

    Raises:
        TimeoutExpired: it was killed after `timeout` seconds.
    """
    words = [str(SCRIPTS / script), *arguments]
    request = {"words": words, "cwd": str(cwd.resolve()), "variables": {**variables}}
    return _ask(request, processes, timeout)


def on_ranks(work: Callable[..., object], arguments: Sequence[Any], processes: int) -> None:
    """Call `work(rank, *arguments)` in so many processes; fails where one of them fails."""
    call = {"module": work.__module__, "function": work.__name__, "path": sys.path}
    packed = pickle.dumps(tuple(arguments)).hex()
    request = {**call, "arguments": packed, "cwd": str(Path.cwd())}
    done = _ask(request, processes, timeout=None)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _ask(
    request: dict[str, Any], processes: int, timeout: float | None
) -> subprocess.CompletedProcess[str]:
    global _server
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        if _server is None or _server.poll() is not None:
            _server = subprocess.Popen(
                [sys.executable, __file__],
                env=ENV,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert _server.stdin and _server.stdout
        streams = {"streams": [out.name, err.name], "processes": processes}
        line = json.dumps(request | streams)
        print(line, file=_server.stdin, flush=True)
        name = request.get("words") or request["function"]
        try:
            if not select.select([_server.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(name, timeout or 0, _text(out), _text(err))
            status = int(_server.stdout.readline())
        except BaseException:  # the test's own limit too
            os.killpg(_server.pid, signal.SIGKILL)
            _server = None
            raise
        return subprocess.CompletedProcess(name, status, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _serve() -> dict[str, Any]:
    """Fork for each line of standard input and write how the fork ended; returns in the fork."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    warm_mlflow = cache(_warm_mlflow)
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        if any("mlflow" in word or "models:/" in word for word in request.get("words", ())):
            warm_mlflow()
        pid = os.fork()
        if not pid:
            requests.close()
            answers.close()
            for number, name in enumerate((os.devnull, *request["streams"])):
                file = os.open(name, os.O_RDWR | os.O_APPEND)
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["cwd"])
            os.environ |= request.get("variables", {})
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    sys.exit()


def _start_ranks(processes: int, listener: socket.socket | None) -> int:
    """Fork the ranks of a run and be their torchrun, with the store; returns in the ranks."""
    ranks: set[int] = set()
    for rank in range(processes):
        pid = os.fork()
        if not pid:
            return rank
        ranks.add(pid)
    if listener:  # after the forks: a store has a thread
        _store = _host(listener)
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(r, signal.SIGKILL) for r in ranks])
            signal.alarm(GRACE)
    os._exit(failed)


def _announce(processes: int) -> socket.socket:
    """Write what torchrun says to all ranks into the environment; the store's socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return listener


def _host(listener: socket.socket) -> TCPStore:
    """The agent's store; only the older backend takes a socket that listens."""
    address, port = listener.getsockname()
    number = listener.detach()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=number,
        use_libuv=False,
    )


def _main() -> None:
    sys.path[0] = str(SCRIPTS)
    for name in IMPORTED:
        importlib.import_module(name)
    _warm()
    os.fsync = os.fstat  # type: ignore[assignment]  # as in tests/disk.py
    sys.path.append(str(SCRIPTS.parent))
    importlib.import_module("tests.counts").share_counts()
    sys.path.pop()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as in tests/conftest.py
    request = _serve()
    if "words" in request:
        _end_with(lambda: _run_script(request["words"], request["processes"]))
    _end_with(lambda: _run_ranks(request))


def _warm() -> None:
    """What takes each process a second when it is the first: to read a recipe, to draw a page.

    A thread would not be in the forks, and what it holds would stay held there: where there are
    GPUs a backward pass leaves some, so that no run is sized.
    """
    import psutil
    import torch

    from llmfoundry.loggers.pages.page import page, table
    from llmfoundry.plan.fit import choose_microbatch, with_guessed_vocabulary
    from llmfoundry.recipe.load import checked
    from llmfoundry.recipe.train import TrainRecipe

    recipe = str(SCRIPTS.parent / "yamls/quickstart.yaml")
    shape = ("model.d_model=32", "model.n_layers=2", "model.n_heads=2", "max_seq_len=64")
    ready = with_guessed_vocabulary(checked(TrainRecipe, recipe, shape).resolve())
    shown = table(("",), [("",)])
    page(title="", status="none", reached="", tiles=(), sections=[("", shown)], has_charts=True)
    if not torch.cuda.device_count():
        cpu = torch.device("cpu")
        choose_microbatch(ready, world_size=1, available=1 << 40, device=cpu)
        assert psutil.Process().num_threads() == 1


def _warm_mlflow() -> None:
    """What a run with MLflow needs 2 s for: its modules, and SQLAlchemy's view of its tables.

    They come without pandas, as in an installation of mlflow-skinny: PyArrow begins a thread.
    """
    import psutil
    from pytest import MonkeyPatch

    from llmfoundry.loggers.mlflow_logger import open_client

    with MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("pandas", "pyarrow"):
            patch.setitem(sys.modules, name, None)
        open_client(f"sqlite:///{folder}/mlflow.db").search_experiments()
    gc.freeze()
    assert psutil.Process().num_threads() == 1


def _run_script(words: list[str], processes: int) -> None:
    if processes > 1:
        listener = _announce(processes)
        rank = str(_start_ranks(processes, listener))
        listener.close()
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _run_ranks(request: dict[str, Any]) -> None:
    rank = _start_ranks(request["processes"], None)
    sys.path[:] = request["path"]
    work = getattr(importlib.import_module(request["module"]), request["function"])
    work(rank, *pickle.loads(bytes.fromhex(request["arguments"])))


def _end_with(work: Callable[[], object]) -> NoReturn:
    """Do it and end this process: to take modules apart costs a fork 0.4 s of CPU."""
    status = 0
    try:
        work()
    except KeyboardInterrupt:
        raise  # ends by its signal
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _main()
