"""`run_bounded`: functions of untrusted input, run in a child process with bounds.

A chat template is a program, and a regular expression can take for ever: inspecting them does not
show how long. The one idea: they run in a process of their own, which the kernel ends when an item
takes too much CPU time or memory, and which can open nothing: no file, no connection, no other
process. Its environment is empty. It answers with data of a few known types. Called wherever
untrusted files are evaluated; the modules that functions need are imported before files can no
longer be opened.

The child is kept until this process ends, and replaced when it was stopped. On macOS, which limits
no address space, its memory is read ten times a second instead.
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
"""For an item, and more for each MB of it: a slow tokenizer takes one second for that."""
MEMORY = 3 << 29
"""Bytes of address space, on macOS resident: a vocabulary of 262,144 pieces takes two thirds."""
WALL_SECONDS = 60.0
"""For an item on a busy machine; what takes CPU time is ended long before."""

_LARGEST = 1 << 27  # bytes of an answer
_HEADER = struct.Struct("<Q")
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from llmfoundry.bounded import serve_calls
serve_calls(sys.argv[2:])"""
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # of the environment
_ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",  # others take address space
}
# Modules of Python that others import when they run.
_LATER = ("_strptime", "encodings.unicode_escape", "html.entities", "textwrap", "unicodedata")
_inside = False


class OutOfBounds(UserError):
    """A file made the child fail, or do more than it may; `index` is the item at which it did."""

    index = 0


def run_bounded(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    file: str,
    imports: str = "",
    seconds: float | None = None,
) -> list[Any]:
    """`function` of each item, computed in the child; in the child itself, directly.

    Args:
        function: of a module's top level, or a partial of one.
        items: what can be pickled.
        file: whose contents it evaluates, for messages; a recipe key may be before it.
        imports: a module that the function imports only when it runs.
        seconds: of CPU time for an item; unset: CPU_SECONDS.

    Returns:
        Its results: numbers, texts, containers and dataclasses of ours.

    Raises:
        OutOfBounds: an item took too much time or memory, or failed otherwise.
        UserError, ValueError, RecursionError: as the function raised it.
    """
    if _inside:
        return [function(item) for item in items]
    modules = {imports} if imports else set[str]()
    seconds = CPU_SECONDS if seconds is None else seconds
    called, *sent = [_pickled(value, modules) for value in (function, *items)]
    with _lock:
        child = _child_with(modules)
        try:
            child.send(called, sent, seconds)
            found = [child.receive(file, index) for index in range(len(sent))]
        except BaseException:  # Ctrl-C too: what it would answer is for no one
            _end()
            raise
    return [_value(outcome, file, index) for index, outcome in enumerate(found)]


def _pickled(value: Any, modules: set[str]) -> bytes:
    """A value; the modules that it needs are added to `modules`."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.modules = modules
    pickler.dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    modules: set[str]

    def reducer_override(self, value: Any) -> Any:
        """Called for all but Python's own types of data."""
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
    """The process, and what is said to it and by it."""

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
        """Whether somebody ended it meanwhile."""
        return self._process.poll() is not None

    def send(self, function: bytes, items: Sequence[bytes], seconds: float) -> None:
        """A function and its items; the end of a child is noticed by `receive`."""
        self._seconds = [seconds + CPU_SECONDS_PER_MB * len(item) / 1e6 for item in items]
        with suppress(BrokenPipeError):
            _write(self._in.fileno(), pickle.dumps((function, items, self._seconds)))

    def receive(self, file: str, index: int) -> tuple[str, Any]:
        """What became of an item."""
        try:
            answer = self._frame(WALL_SECONDS + self._seconds[index])
        except TimeoutError as error:
            raise _out(file, index, str(error)) from None
        except EOFError:
            raise _out(file, index, self._reason(self._seconds[index])) from None
        try:
            return _Answer(io.BytesIO(answer)).load()
        except Exception as error:  # of a child that was taken over, anything
            raise _out(file, index, "made its process answer with no data") from error

    def end(self) -> None:
        """Now, whatever it is at."""
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes, upon which it ends if it has nothing to do."""
        for pipe in (self._in, self._out, self._err):
            pipe.close()

    def _frame(self, seconds: float) -> bytes:
        limit = time.monotonic() + seconds
        (size,) = _HEADER.unpack(self._read(_HEADER.size, limit))
        if size > _LARGEST:
            raise TimeoutError(f"made more than {_LARGEST >> 20} MiB")
        return self._read(size, limit)

    def _read(self, size: int, limit: float) -> bytes:
        found = self._buffer
        while len(found) < size:
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError("took too long")
            self._check_memory()
            if self._poll.poll(100 if self._watched else 1000 * left):
                part = os.read(self._out.fileno(), 1 << 16)
                if not part:
                    raise EOFError
                found += part
        wanted = bytes(found[:size])
        del found[:size]
        return wanted

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
        """Why it ended by itself."""
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
    """Reads data alone: dataclasses of ours and errors, and no function."""

    def find_class(self, module: str, name: str) -> Any:
        """Of the few that there may be."""
        return _data_class(module, name)


@cache
def _data_class(module: str, name: str) -> type:
    if module == "builtins" and name in ("ValueError", "RecursionError"):
        return getattr(builtins, name)
    if module.startswith("llmfoundry."):
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) and (
            hasattr(found, "__dataclass_fields__") or issubclass(found, UserError | ValueError)
        ):
            return found
    raise pickle.UnpicklingError(f"{module}.{name} is not data")


def first_to_match(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """By name the first expression that matches its end from a dot or the beginning on, if any.

    For the child, as `match_all` is; here, so that it need not import PyTorch.
    """
    compiled = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    found = {name: next((p for p, c in compiled.items() if c.match(name)), None) for name in names}
    return {name: pattern for name, pattern in found.items() if pattern is not None}


def match_all(expressions: Sequence[str], names: Sequence[str]) -> None:
    """Match every name with every regular expression, to see that it ends."""
    for expression in expressions:
        for name in names:
            re.match(expression, name)


_lock = threading.RLock()
_child: _Child | None = None


def _child_with(modules: set[str]) -> _Child:
    """The child, or another if it ended or lacks a module, as it can open no more files."""
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
    """In a copy of this process: the child is the original's."""
    global _lock, _child
    _lock = threading.RLock()
    if _child is not None:
        _child.forget()
        _child = None


os.register_at_fork(after_in_child=_after_fork)


def serve_calls(modules: Sequence[str]) -> None:
    """What the child does: read a function and items, and write what became of each."""
    global _inside
    _inside = True
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its parent's to answer; it ends with that
    for module in (*_LATER, *modules):
        with suppress(ImportError):  # who needs it says so
            importlib.import_module(module)
    time.localtime()  # reads the time zone's file
    is_bounded = _lock_down()
    requests = os.fdopen(0, "rb")
    _write(1, b"" if is_bounded else b"watch")
    while header := requests.read(_HEADER.size):
        size = _HEADER.unpack(header)[0]
        function, items, limits = pickle.loads(_exactly(requests, size))
        loaded = cache(partial(pickle.loads, function))  # which may compute too
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
    except BaseException as error:  # of libraries in Rust
        outcome = "failed", f"{type(error).__name__}: {error}"[:300]
    try:
        return pickle.dumps(outcome)
    except MemoryError:
        return pickle.dumps(("memory", None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _lock_down() -> bool:
    """Give up all that is not computing; whether the address space is bounded."""
    for limit in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"):
        _limit(limit, 0)  # nothing written, started, opened or connected
    if os.geteuid() == 0:
        with suppress(OSError):  # in a container that knows root alone
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)  # nobody
    return _limit("RLIMIT_AS", MEMORY)


def _limit(name: str, value: int) -> bool:
    try:
        resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, ValueError, OSError):
        return False
    return sys.platform != "darwin"  # which takes a limit and keeps none


def _write(file: int, content: bytes) -> None:
    view = memoryview(_HEADER.pack(len(content)) + content)
    while view:
        view = view[os.write(file, view) :]


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise SystemExit  # the parent ended meanwhile
    return content
