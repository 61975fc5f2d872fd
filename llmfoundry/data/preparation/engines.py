"""Where tasks run: the processes of this machine; `ray_engine` is the other choice.

An engine is a context manager that gives `run(function, tasks)`, an iterator of the results as they
end. Called by `prepare`.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from llmfoundry.data.preparation.ray_engine import ray_engine
from llmfoundry.errors import UserError
from llmfoundry.processes import cores, end_with_parent
from llmfoundry.recipe.plugins import import_plugins, imported

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]

# What a worker imports before the first task. Torch is not among it.
_PRELOAD = ["llmfoundry.data.preparation.write_part"]


@contextmanager
def local_engine(workers: int | None) -> Iterator[Run]:
    """Processes of this machine; a single task, or a single worker, runs in this one.

    Raises:
        UserError: what a task raised, or a process was killed.
    """
    yield lambda work, tasks: _run(work, tasks, min(workers or cores(), len(tasks)))


ENGINES: dict[str, Callable[[int | None], AbstractContextManager[Run]]] = {
    "local": local_engine,
    "ray": ray_engine,
}


def _run(work: Callable[[Any], Any], tasks: Sequence[Any], workers: int) -> Iterator[Any]:
    if workers <= 1:
        yield from map(work, tasks)
        return
    # Fresh processes: this one may have threads, a GPU and gigabytes that they do not need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(imported(), work))
    try:
        running = {pool.submit(_call, task) for task in tasks}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "data.num_workers: a process that prepares was killed, for lack of memory perhaps;"
                " write fewer; parts that are finished stay"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[Any], Any] | None = None  # of this process, set once, with the tokenizer in it


def _begin(plugins: list[str], work: Callable[[Any], Any]) -> None:
    global _work
    end_with_parent()
    import_plugins(plugins)
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer


def _call(task: Any) -> Any:
    assert _work is not None
    return _work(task)
