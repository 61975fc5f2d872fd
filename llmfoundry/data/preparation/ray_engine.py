"""`ray_engine`: the preparation's tasks on a Ray cluster, or on this machine's cores by Ray.

Called by the preparation for `prepare.engine: ray`. The one idea: Ray only decides where a task
runs. Tasks are the same functions that the local pool calls; what they make are files on storage
that all machines share, written atomically, so a lost machine costs its running tasks, and
the output cannot depend on the engine.

Ray's tasks rather than Ray Data or Spark: Ray Data moves rows between operators, and nothing moves
here; Spark would add a JVM and its own serialization between the same Python functions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from llmfoundry.errors import UserError, import_optional, one_line
from llmfoundry.recipe.plugins import import_plugins, imported

# Tasks handed to Ray ahead of a free core: an autoscaler sees what is waiting, and one call to
# ray.wait, which is linear in them, stays at about a millisecond.
_AHEAD = 1000
_TIMEOUT_S = 10.0
_OOM_RETRIES = "3"  # Ray's own choice is to try for ever a task that never fits
_OBJECT_BYTES = 1 << 28  # of shared memory: only the function and small results go through it

_Work = Callable[[Any], Any]
_Run = Callable[[_Work, Sequence[Any]], Iterator[Any]]


@contextmanager
def ray_engine(workers: int | None) -> Iterator[_Run]:
    """Connect to the cluster that RAY_ADDRESS names, or start Ray here where it is unset.

    What is yielded calls a function on each of many tasks and yields the results as they end. The
    function, the tasks and the results must pickle. Leaving the block ends what still runs.

    Args:
        workers: tasks at a time; None: as many as there are cores.
    """
    ray = import_optional("ray", "prepare.engine: ray", extra="ray")
    _connect(ray, workers)
    try:
        yield lambda work, tasks: _run(ray, work, tasks, workers)
    finally:
        ray.shutdown()


def _connect(ray: Any, workers: int | None) -> None:
    address = os.environ.get("RAY_ADDRESS") or "local"
    os.environ.setdefault("RAY_task_oom_retries", _OOM_RETRIES)  # read by ray.init
    quiet = {"log_to_driver": False, "logging_level": "error"}
    here = {
        "num_cpus": workers,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_BYTES,
    }
    try:
        _knock(address)
        ray.init(address=address, **quiet, **(here if address == "local" else {}))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: other versions there
        raise UserError(
            f"RAY_ADDRESS: cannot connect to Ray at {address}: {one_line(error)};"
            " start it (ray start --head), write its address, or unset the variable"
        ) from error


def _knock(address: str) -> None:
    """Ray itself asks a machine that does not answer for five minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()


def _run(ray: Any, work: _Work, tasks: Sequence[Any], workers: int | None) -> Iterator[Any]:
    call = ray.remote(num_cpus=1)(_call)
    shared = ray.put((imported(), work))  # once for each machine, with the tokenizer in it
    at_a_time = workers or max(_AHEAD, 2 * int(ray.cluster_resources().get("CPU", 0)))
    left = iter(tasks)
    running = [call.remote(shared, task) for task in islice(left, at_a_time)]
    while running:
        done, running = ray.wait(running)
        running += [call.remote(shared, task) for task in islice(left, len(done))]
        for result in done:
            yield _result(ray, result)


def _call(shared: tuple[list[str], _Work], task: Any) -> Any:
    plugins, work = shared
    import_plugins(plugins)
    return work(task)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(*error.cause.problems) from error
        raise
    except ray.exceptions.RayError as error:
        raise UserError(
            f"prepare.engine: Ray gave a task up: {one_line(error)};"
            " start again, parts that are finished stay"
        ) from error
