"""Engine in a separate thread, and its interface for the event loop.

`app` submits requests and reads their outputs from a `Feed`. Only the thread calls the engine.
Requests wait in an inbox, and all outputs of a step are passed to the event loop in one call, so
that 200 answers cost one wake-up per step.

`ServerMetrics` has the metrics for Prometheus. Metrics with the same meaning as in vLLM have vLLM's
names, so that dashboards for vLLM work.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmfoundry.errors import UserError
from llmfoundry.inference.requests import Engine, SequenceRequest, TokenOutput

News = TokenOutput | Exception
"""Output of one sequence; an exception ends it."""
LOST = RuntimeError("the engine has failed")


class Feed:
    """Outputs of the sequences of one HTTP request, on the event loop."""

    def __init__(self, worker: EngineWorker, n: int) -> None:
        """Create a feed for `n` sequences."""
        self._worker, self._queue = worker, asyncio.Queue[tuple[int, News]]()
        self._open = {index: _Ticket(self, index) for index in range(n)}

    @property
    def is_open(self) -> bool:
        """Return whether any sequence is unfinished."""
        return bool(self._open)

    async def next(self) -> tuple[int, News]:
        """Wait for the next output; return the index of its sequence and the output.

        Outputs of cancelled sequences are skipped.
        """
        while True:
            index, news = await self._queue.get()
            if index in self._open:
                if isinstance(news, Exception):
                    self.end(index)
                elif news.finish is not None:
                    self._close(index)
                return index, news

    def end(self, index: int) -> None:
        """Cancel a sequence; its slot is released before the next step."""
        if index in self._open:
            self._worker.forget(self._close(index))

    def end_all(self) -> None:
        """Cancel all unfinished sequences."""
        for index in [*self._open]:
            self.end(index)

    def fail(self, error: Exception) -> None:
        """End all unfinished sequences with an error."""
        for index in self._open:
            self.put(index, error)

    def put(self, index: int, news: News) -> None:
        """Add an output of the engine; called on the event loop."""
        self._queue.put_nowait((index, news))

    def _close(self, index: int) -> _Ticket:
        """Remove a sequence from the unfinished ones."""
        self._worker.open -= 1
        return self._open.pop(index)


@dataclass(eq=False)
class _Ticket:
    """Handle of one sequence of a feed; only the thread knows the engine's id of it."""

    feed: Feed
    index: int


class EngineWorker:
    """Thread that steps an engine while it has requests.

    Attributes:
        open: number of unfinished sequences, as counted on the event loop.
        failure: exception that ended the thread; None: it works.
    """

    def __init__(self, engine: Engine, *, on_failure: Callable[[], None] = lambda: None) -> None:
        """Create a worker that is not started.

        Args:
            engine: engine that only this worker uses from now on.
            on_failure: called on the event loop when the engine raises an unexpected exception.
        """
        self.engine, self.on_failure = engine, on_failure
        self.open = 0
        self._feeds: WeakSet[Feed] = WeakSet()
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[tuple[_Ticket, SequenceRequest | None]] = deque()
        self._wake = threading.Condition()
        self._ending = False
        self._numbers: dict[_Ticket, int] = {}  # the thread's
        self._tickets: dict[int, _Ticket] = {}  # the thread's

    def start(self) -> None:
        """Start the thread; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(self, requests: Sequence[SequenceRequest]) -> Feed:
        """Queue the sequences of one HTTP request."""
        feed = Feed(self, len(requests))
        self._feeds.add(feed)
        self.open += len(requests)
        self._post([(ticket, requests[index]) for index, ticket in feed._open.items()])
        return feed

    def fail_all(self, error: Exception) -> None:
        """End every sequence of every feed with an error."""
        for feed in [*self._feeds]:
            feed.fail(error)

    def forget(self, ticket: _Ticket) -> None:
        """Cancel a sequence."""
        self._post([(ticket, None)])

    def _post(self, orders: Sequence[tuple[_Ticket, SequenceRequest | None]]) -> None:
        """Put requests or cancellations into the inbox; if the engine has failed, end them."""
        with self._wake:
            self._inbox.extend(orders)
            self._wake.notify()
            if self.failure is None:
                return
        _put_all([(ticket, LOST) for ticket, request in orders if request is not None])

    def _run(self) -> None:
        """Run the thread: step the engine and deliver its outputs."""
        try:
            while self._wait():
                self._obey()
                if self.engine.busy:
                    self._deliver([(self._tickets.get(e.request), e) for e in self.engine.step()])
        except BaseException as error:  # no fault of a single request: the engine is unusable
            self._fail(error)

    def _wait(self) -> bool:
        """Wait until there is work; return False when the thread must stop."""
        with self._wake:
            while not (self._ending or self._inbox or self.engine.busy):
                self._wake.wait()
            return not self._ending

    def _obey(self) -> None:
        """Process the inbox: add requests and cancel sequences."""
        refused: list[tuple[_Ticket | None, News]] = []
        while self._inbox:
            ticket, request = self._inbox.popleft()
            if request is None:
                number = self._numbers.pop(ticket, None)
                if number is not None:
                    self._tickets.pop(number, None)
                    self.engine.cancel(number)
                continue
            try:
                number = self.engine.add(request)
            except UserError as error:
                refused.append((ticket, error))
                continue
            self._numbers[ticket], self._tickets[number] = number, ticket
        self._deliver(refused)

    def _deliver(self, news: Sequence[tuple[_Ticket | None, News]]) -> None:
        """Pass outputs to the event loop, and forget finished sequences."""
        addressed = [(ticket, item) for ticket, item in news if ticket is not None]
        for ticket, item in addressed:
            if isinstance(item, TokenOutput) and item.finish is not None:
                self._tickets.pop(self._numbers.pop(ticket), None)
        if addressed:
            self._call(_put_all, addressed)

    def _fail(self, error: BaseException) -> None:
        """Record the failure, and end all sequences."""
        with self._wake:
            self.failure = error
            left = [*self._numbers, *(ticket for ticket, request in self._inbox if request)]
        self._call(_put_all, [(ticket, LOST) for ticket in left])
        self._call(self.on_failure)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _put_all(news: Sequence[tuple[_Ticket, News]]) -> None:
    for ticket, item in news:
        ticket.feed.put(ticket.index, item)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class ServerMetrics:
    """Metrics of one server, with the label model_name."""

    def __init__(self, model: str, engine: Engine) -> None:
        """Create all metrics at 0."""
        self.registry, self._model = CollectorRegistry(), model
        vllm = self._family
        self.prompt_tokens = vllm(Counter, "vllm:prompt_tokens", "Tokens of prompts.")
        self.tokens = vllm(Counter, "vllm:generation_tokens", "Tokens written.")
        self.first_token = vllm(
            Histogram,
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
        )
        self.between_tokens = vllm(
            Histogram,
            "vllm:inter_token_latency_seconds",
            "Between two tokens of an answer.",
            buckets=_GAPS,
        )
        self.latency = vllm(
            Histogram,
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            buckets=_SECONDS,
        )
        self.prompt_length = vllm(
            Histogram, "vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS
        )
        self.answer_length = vllm(
            Histogram, "vllm:request_generation_tokens", "Tokens of an answer.", buckets=_TOKENS
        )
        self._ended = Counter(
            "vllm:request_success",
            "Answers that were written to their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._replies = Counter(
            "llmfoundry_http_requests",
            "Requests by path and status; 499: the client left.",
            ["model_name", "path", "status"],
            registry=self.registry,
        )
        self._closed = Counter(
            "llmfoundry_connections_closed",
            "Connections closed by the server: late, or crowded: one too many without a request.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._gauge("vllm:num_requests_running", "Answers being written.", lambda: engine.running)
        self._gauge("vllm:num_requests_waiting", "Answers without a slot.", lambda: engine.waiting)
        self._gauge("llmfoundry_slots", "Answers at a time at most.", lambda: engine.slots)

    def ended(self, reason: str) -> None:
        """Count a finished answer by its finish reason."""
        self._ended.labels(self._model, reason).inc()

    def replied(self, path: str, status: int) -> None:
        """Count a request by its path and status."""
        self._replies.labels(self._model, path, str(status)).inc()

    def closed(self, reason: str) -> None:
        """Count a connection that was closed before its request or its reply was complete."""
        self._closed.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _family(self, kind: Any, name: str, meaning: str, **settings: Any) -> Any:
        family = kind(name, meaning, ["model_name"], registry=self.registry, **settings)
        return family.labels(self._model)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._family(Gauge, name, meaning).set_function(value)
