"""`run_bounded`: run functions of untrusted input in a child process with limits.

A chat template is a program, and a regular expression can run forever. Inspection does not show how
long they take. They are therefore evaluated in a child process. The kernel kills the child if an
item needs too much CPU time or memory. The child cannot open files, connections or processes, has
an empty environment, and returns data of a few known types. The modules that functions need are
imported before the limits are set.

The child is reused until this process ends, and replaced if it was killed. macOS does not limit the
address space; there, the child's memory is checked ten times a second.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import json
import os
import pickle
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from llmfoundry.errors import UserError

CPU_SECONDS, CPU_SECONDS_PER_MB = 2.0, 10.0
"""CPU time limit of an item: a constant, plus a time per MB. A slow tokenizer takes 1 s per MB."""
MEMORY = 3 << 29
"""Limit in bytes of the address space, on macOS of resident memory. A vocabulary of 262,144 pieces
takes two thirds of it."""
WALL_SECONDS = 60.0
"""Wall-clock limit of an item, for busy machines; the CPU limit is reached long before."""

_LARGEST = 1 << 27  # maximum bytes of an answer
_HEADER = struct.Struct("<Q")
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from llmfoundry.bounded import serve_calls
serve_calls(sys.argv[2:])"""
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # inherited environment variables
_ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",  # more arenas would use address space
}
# modules of the standard library that other modules import late
_LATER = ("_strptime", "encodings.unicode_escape", "html.entities", "textwrap", "unicodedata")
_inside = False


class OutOfBounds(UserError):
    """A file made the child fail or exceed a limit; `index` is the item."""

    index = 0


def run_bounded(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    file: str,
    imports: str = "",
    seconds: float | None = None,
) -> list[Any]:
    """Apply a function to each item in the child process; directly if this is the child.

    Args:
        function: of a module's top level, or a partial of one.
        items: arguments, which must be picklable.
        file: the untrusted file, for messages; a recipe key may precede it.
        imports: a module that the function imports only when it runs.
        seconds: CPU time limit of an item; None: CPU_SECONDS.

    Returns:
        The results: numbers, strings, containers and dataclasses of this project.

    Raises:
        OutOfBounds: an item exceeded a limit, or failed in another way.
        UserError, ValueError, RecursionError: raised by the function.
    """
    if _inside:
        return [function(item) for item in items]
    modules = {imports} if imports else set[str]()
    seconds = CPU_SECONDS if seconds is None else seconds
    pickled_function = _pickled(function, modules)
    pickled_items = [_pickled(item, modules) for item in items]
    with _lock:
        child = _child_with(modules)
        try:
            child.send(pickled_function, pickled_items, seconds)
            outcomes = [child.receive(file, index) for index in range(len(pickled_items))]
        except BaseException:  # also Ctrl-C: the child would still send answers
            _end()
            raise
    return [_value(outcome, file, index) for index, outcome in enumerate(outcomes)]


def _pickled(value: Any, modules: set[str]) -> bytes:
    """Pickle a value, and add the modules that it needs to `modules`."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.modules = modules
    pickler.dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    modules: set[str]

    def reducer_override(self, value: Any) -> Any:
        """Record the module of a value; called for all types that are not built in."""
        self.modules.add(getattr(value, "__module__", None) or type(value).__module__)
        return NotImplemented


def _value(outcome: tuple[str, Any], file: str, index: int) -> Any:
    kind, value = outcome
    if kind == "raised":
        raise value
    if kind == "memory":
        raise _out(file, index, f"needed more than {MEMORY / 2**30:.2g} GiB of memory")
    if kind == "failed":
        raise _out(file, index, f"failed ({value})")
    return value


def _out(file: str, index: int, what: str) -> OutOfBounds:
    error = OutOfBounds(f"{file}: {what} and was stopped; correct it, or use another file")
    error.index = index
    return error


class _Child:
    """The child process, and the messages to and from it."""

    def __init__(self, modules: frozenset[str]) -> None:
        self.modules = modules
        path = [str(Path(__file__).parent.parent), *sys.path]
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM, json.dumps(path), *sorted(modules)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | _ONE_THREAD,
            bufsize=0,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        self._buffer = bytearray()  # read from it
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._watched = False
        try:
            self._watched = self._frame(WALL_SECONDS) == b"watch"
        except (EOFError, TimeoutError) as error:
            raise RuntimeError(f"the bounded child did not start: {self._last_words()}") from error

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended."""
        return self._process.poll() is not None

    def send(self, function: bytes, items: Sequence[bytes], seconds: float) -> None:
        """Send a function and its items; `receive` detects a child that has ended."""
        self._seconds = [seconds + CPU_SECONDS_PER_MB * len(item) / 1e6 for item in items]
        with suppress(BrokenPipeError):
            _write(self._in.fileno(), pickle.dumps((function, items, self._seconds)))

    def receive(self, file: str, index: int) -> tuple[str, Any]:
        """Return the outcome of an item."""
        try:
            answer = self._frame(WALL_SECONDS + self._seconds[index])
        except TimeoutError as error:
            raise _out(file, index, str(error)) from None
        except EOFError:
            raise _out(file, index, self._reason(self._seconds[index])) from None
        try:
            return _Answer(io.BytesIO(answer)).load()
        except Exception as error:  # a compromised child may send anything
            raise _out(file, index, "made its process answer with no data") from error

    def end(self) -> None:
        """Kill the child."""
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes; an idle child then ends."""
        for pipe in (self._in, self._out, self._err):
            pipe.close()

    def _frame(self, seconds: float) -> bytes:
        """Read one message.

        Raises:
            TimeoutError: the child took too long, or exceeded the memory limit or message size.
            EOFError: the child has ended.
        """
        deadline = time.monotonic() + seconds
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if size > _LARGEST:
            raise TimeoutError(f"made more than {_LARGEST >> 20} MiB")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("took too long")
            self._check_memory()
            if self._poll.poll(100 if self._watched else 1000 * left):
                part = os.read(self._out.fileno(), 1 << 16)
                if not part:
                    raise EOFError
                buffer += part
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    def _check_memory(self) -> None:
        if self._watched:
            import psutil

            try:
                used = psutil.Process(self._process.pid).memory_info().rss
            except psutil.Error:
                return
            if used > MEMORY:
                raise TimeoutError(f"needed more than {MEMORY / 2**30:.2g} GiB of memory")

    def _reason(self, seconds: float) -> str:
        """Return why the child has ended."""
        status = self._process.wait()
        words = self._last_words()
        if status == -signal.SIGPROF:
            return f"took more than {seconds:.2g} s of CPU time"
        if "memory allocation of" in words or "MemoryError" in words:
            return f"needed more than {MEMORY / 2**30:.2g} GiB of memory"
        if status < 0:
            return f"made its process end by {signal.Signals(-status).name}"
        return f"made its process end with status {status} ({words or 'no message'})"

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        os.set_blocking(self._err.fileno(), False)
        return " ".join((self._err.read() or b"").decode(errors="replace").split())[-300:]


class _Answer(pickle.Unpickler):
    """Unpickler of data: only dataclasses of this project and some errors, no functions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class."""
        return _data_class(module, name)


@cache
def _data_class(module: str, name: str) -> type:
    if module == "builtins" and name in ("ValueError", "RecursionError"):
        return getattr(builtins, name)
    if module.startswith("llmfoundry."):
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, type) and (
            hasattr(value, "__dataclass_fields__") or issubclass(value, UserError | ValueError)
        ):
            return value
    raise pickle.UnpicklingError(f"{module}.{name} is not data")


def first_to_match(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return, for each name that matches, the first regular expression that matches its end.

    A match begins at the beginning of the name or after a dot. Run in the child, like `match_all`;
    defined here, so that the child does not import PyTorch.
    """
    compiled = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    matches = dict[str, str]()
    for name in names:
        for pattern, expression in compiled.items():
            if expression.match(name):
                matches[name] = pattern
                break
    return matches


def match_all(expressions: Sequence[str], names: Sequence[str]) -> None:
    """Match every name with every regular expression, to check that matching ends."""
    for expression in expressions:
        for name in names:
            re.match(expression, name)


_lock = threading.RLock()
_child: _Child | None = None


def _child_with(modules: set[str]) -> _Child:
    """Return the child; start a new one if it has ended or lacks a module, which it cannot load."""
    global _child
    before = frozenset[str]() if _child is None else _child.modules
    if _child is None or _child.has_ended or not modules <= before:
        _end()
        _child = _Child(before | modules)
    return _child


@atexit.register
def _end() -> None:
    global _child
    if _child is not None:
        _child.end()
        _child = None


def _after_fork() -> None:
    """Forget the child in a forked process, because it belongs to the parent."""
    global _lock, _child
    _lock = threading.RLock()
    if _child is not None:
        _child.forget()
        _child = None


os.register_at_fork(after_in_child=_after_fork)


def serve_calls(modules: Sequence[str]) -> None:
    """Run the child: read functions and items, and write the outcome of each item."""
    # import modules while files can be opened
    global _inside
    _inside = True
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # handled by the parent, with which the child ends
    for module in (*_LATER, *modules):
        with suppress(ImportError):  # the function that needs the module reports it
            importlib.import_module(module)
    time.localtime()  # loads the time zone

    # set the limits; without a memory limit, the parent watches the memory
    is_bounded = _lock_down()
    requests = os.fdopen(0, "rb")
    _write(1, b"" if is_bounded else b"watch")
    while header := requests.read(_HEADER.size):
        size = _HEADER.unpack(header)[0]
        function, items, limits = pickle.loads(_exactly(requests, size))
        loaded = cache(partial(pickle.loads, function))  # loaded under the limits, once
        for item, seconds in zip(items, limits, strict=True):
            _write(1, _outcome(loaded, item, seconds))


def _outcome(function: Callable[[], Callable[[Any], Any]], item: bytes, seconds: float) -> bytes:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    outcome: tuple[str, Any]
    try:
        outcome = "value", function()(pickle.loads(item))
    except (UserError, ValueError, RecursionError) as error:
        outcome = "raised", error.with_traceback(None)
        error.__cause__ = error.__context__ = None
    except MemoryError:
        outcome = "memory", None
    except BaseException as error:  # panics of Rust libraries are no Exception
        outcome = "failed", f"{type(error).__name__}: {error}"[:300]
    try:
        return pickle.dumps(outcome)
    except MemoryError:
        return pickle.dumps(("memory", None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _lock_down() -> bool:
    """Drop all permissions but computing; return whether the address space is limited."""
    for limit in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"):
        _limit(limit, 0)  # no core dumps, writes, processes, files or connections
    if os.geteuid() == 0:
        with suppress(OSError):  # fails in a container without other users
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)  # nobody
    return _limit("RLIMIT_AS", MEMORY)


def _limit(name: str, value: int) -> bool:
    try:
        resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, ValueError, OSError):
        return False
    return sys.platform != "darwin"  # macOS accepts limits, but does not enforce them


def _write(file: int, content: bytes) -> None:
    view = memoryview(_HEADER.pack(len(content)) + content)
    while view:
        view = view[os.write(file, view) :]


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise SystemExit  # the parent has ended
    return content
