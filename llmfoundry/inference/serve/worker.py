"""The engine in a thread of its own, and the event loop's side of it.

`app` submits requests and reads a `Feed` of what becomes of them. The one idea: only the thread
touches the engine; what the loop wants waits in an inbox, and a step's news crosses back in one
call, so that 200 answers cost one wake-up a step.

`ServerMetrics` is what Prometheus gets: vLLM's names where they mean the same, so that a dashboard
made for vLLM reads this server too.
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
"""Of one sequence; an exception is its end."""
LOST = RuntimeError("the engine has failed")


class Feed:
    """The sequences of one HTTP request, on the loop's side."""

    def __init__(self, worker: EngineWorker, n: int) -> None:
        """For `n` sequences."""
        self._worker, self._queue = worker, asyncio.Queue[tuple[int, News]]()
        self._open = {index: _Ticket(self, index) for index in range(n)}

    @property
    def is_open(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._open)

    async def next(self) -> tuple[int, News]:
        """A sequence's index and its news; nothing more comes of a sequence that was ended."""
        while True:
            index, news = await self._queue.get()
            if index in self._open:
                if isinstance(news, Exception):
                    self.end(index)
                elif news.finish is not None:
                    self._close(index)
                return index, news

    def end(self, index: int) -> None:
        """Give up a sequence: its slot is free before the next step."""
        if index in self._open:
            self._worker.forget(self._close(index))

    def end_all(self) -> None:
        """Give up what is still open."""
        for index in [*self._open]:
            self.end(index)

    def fail(self, error: Exception) -> None:
        """End every sequence that is open with an error."""
        for index in self._open:
            self.put(index, error)

    def put(self, index: int, news: News) -> None:
        """News from the engine; on the loop's thread."""
        self._queue.put_nowait((index, news))

    def _close(self, index: int) -> _Ticket:
        self._worker.open -= 1
        return self._open.pop(index)


@dataclass(eq=False)
class _Ticket:
    """One sequence of a feed; the engine's number for it is the thread's to know."""

    feed: Feed
    index: int


class EngineWorker:
    """A thread that steps an engine while there is something to do.

    Attributes:
        open: sequences that were submitted and have not ended; the loop's own count.
        failure: what ended the thread before its time.
    """

    def __init__(self, engine: Engine, *, on_failure: Callable[[], None] = lambda: None) -> None:
        """Nothing runs yet.

        Args:
            engine: from now on this object's alone.
            on_failure: called on the loop when the engine has raised what is no request's fault.
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
        """Begin; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is in."""
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
        with self._wake:
            self._inbox.extend(orders)
            self._wake.notify()
            if self.failure is None:
                return
        _put_all([(ticket, LOST) for ticket, request in orders if request is not None])

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                if self.engine.busy:
                    self._deliver([(self._tickets.get(e.request), e) for e in self.engine.step()])
        except BaseException as error:  # of a step: nobody's request, and the engine is lost
            self._fail(error)

    def _wait(self) -> bool:
        """Until there is something to do; False: end."""
        with self._wake:
            while not (self._ending or self._inbox or self.engine.busy):
                self._wake.wait()
            return not self._ending

    def _obey(self) -> None:
        """Do what came in: add requests, cancel some."""
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
        """Hand a step's news to the loop; forget what has ended."""
        addressed = [(ticket, item) for ticket, item in news if ticket is not None]
        for ticket, item in addressed:
            if isinstance(item, TokenOutput) and item.finish is not None:
                self._tickets.pop(self._numbers.pop(ticket), None)
        if addressed:
            self._call(_put_all, addressed)

    def _fail(self, error: BaseException) -> None:
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
    """Counts and times of one server; each has the label model_name."""

    def __init__(self, model: str, engine: Engine) -> None:
        """All are 0."""
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
        """Count an answer that has its finish_reason."""
        self._ended.labels(self._model, reason).inc()

    def replied(self, path: str, status: int) -> None:
        """Count a request."""
        self._replies.labels(self._model, path, str(status)).inc()

    def closed(self, reason: str) -> None:
        """Count a connection that was closed before its request or its reply was complete."""
        self._closed.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)

    def _family(self, kind: Any, name: str, meaning: str, **settings: Any) -> Any:
        family = kind(name, meaning, ["model_name"], registry=self.registry, **settings)
        return family.labels(self._model)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._family(Gauge, name, meaning).set_function(value)
