"""HTTP server with OpenAI's API; `cli/commands/serve.py` runs it.

Starlette and uvicorn handle HTTP, and msgspec validates fields. A request is read, validated and
admitted before any part of the reply is sent, so that each error has an HTTP status. However a
request ends (a client that disconnects, a timeout), its slots are released.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from anyio import move_on_after, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmfoundry.errors import UserError
from llmfoundry.inference.serve.connections import Bounds, bounded_connections, most_pending
from llmfoundry.inference.serve.request_fields import (
    ChatFields,
    CompletionFields,
    CompletionRequest,
    RequestError,
    RequestFields,
    ServedModel,
    make_chat_request,
    make_completion_request,
    read_fields,
)
from llmfoundry.inference.serve.responses import AnswerDelta, ReplyWriter, added
from llmfoundry.inference.serve.worker import EngineWorker, Feed, News, ServerMetrics
from llmfoundry.loopback import REFUSAL, names_loopback

_LEFT = 499  # nginx's status for a client that has disconnected; only metrics show it
_DISCARDED = 1 << 26  # maximal bytes of a rejected request's body that are read and discarded
_DISCARD_SECONDS = 10.0
_OVER = "the server was stopped before the answer was written; ask again later, or another server"
_SEND_GRACE = 5.0  # seconds after the timeout to send what is written
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """Limits on clients.

    Attributes:
        body: maximal size of a body in bytes.
        waiting: maximal number of answers of all clients that wait for a slot.
        seconds: timeout from a request's first byte to the last byte of its reply.
        head_seconds: timeout of a request's head, from the start of the connection or last reply.
        pending: maximal number of connections without a complete request. A new connection closes
            the oldest one.
    """

    body: int
    waiting: int
    seconds: float
    head_seconds: float = 10.0
    pending: int = field(default_factory=most_pending)


class Server:
    """Routes and shared state of the server.

    Attributes:
        app: application for uvicorn.
        connections: connection class for uvicorn (`http`).
    """

    def __init__(
        self,
        served: ServedModel,
        worker: EngineWorker,
        limits: Limits,
        *,
        key: str | None,
        only_local: bool,
    ) -> None:
        """Create the application; nothing is served yet.

        Args:
            served: the model.
            worker: worker of the engine; started and stopped with the application.
            limits: limits on clients.
            key: API key that clients must send; None: no key.
            only_local: reject requests with a foreign Host header (against DNS rebinding).
        """
        self._served, self._worker, self._limits = served, worker, limits
        self._key = None if key is None else _digest(key.encode())
        self._only_local, self._is_over = only_local, False
        self._metrics = ServerMetrics(served.name, worker.engine)
        self._created = int(time.time())
        routes = [
            ("/v1/completions", "POST", self._complete),
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/models", "GET", self._list_models),
            ("/v1/models/{name:path}", "GET", self._show_model),
            ("/metrics", "GET", self._show_metrics),
            ("/health", "GET", self._health),
        ]
        self.app = Starlette(
            routes=[
                Route(path, self._guarded(path, function), methods=[method])
                for path, method, function in routes
            ],
            middleware=[Middleware(_ReadToTheEnd)],
            exception_handlers={HTTPException: _other_error, Exception: _defect},
            lifespan=self._lifespan,
        )
        bounds = Bounds(
            head_seconds=limits.head_seconds,
            request_seconds=limits.seconds + _DISCARD_SECONDS + _SEND_GRACE,
            most=limits.pending,
            count_closed=self._metrics.closed,
        )
        self.connections = bounded_connections(bounds)

    def drain(self, seconds: float) -> None:
        """Cancel unfinished answers after so many seconds; called when no new requests arrive."""

        def give_up() -> None:
            self._is_over = True
            self._worker.fail_all(RequestError(503, _OVER))

        asyncio.get_running_loop().call_later(seconds, give_up)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Start and stop the engine with the application."""
        self._worker.start()
        try:
            yield
        finally:
            await to_thread.run_sync(self._worker.stop)

    def _guarded(self, path: str, function: Handler) -> Handler:
        """Return a handler that checks the client first and converts errors to OpenAI's format."""

        async def handle(request: Request) -> Response:
            try:
                self._check_client(request, is_open=path == "/health")
                response = await function(request)
            except RequestError as error:
                response = _reply(error.body(), error.status)
                if error.status in (429, 503):
                    response.headers["Retry-After"] = "1"
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
            except ClientDisconnect:
                response = Response(status_code=_LEFT)
            if not isinstance(response, _Stream):
                self._metrics.replied(path, response.status_code)
            return response

        return handle

    def _check_client(self, request: Request, *, is_open: bool) -> None:
        """Raise a RequestError for a foreign Host header or a wrong API key."""
        # the header as it was sent: Starlette replaces an invalid one by the socket's address
        hosts = request.headers.getlist("host")
        if self._only_local and not (len(hosts) == 1 and names_loopback(hosts[0])):
            raise RequestError(403, REFUSAL)
        if self._key is None or is_open:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._key)
        if kind.lower() != "bearer" or not is_right:
            say = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise RequestError(401, say, code="invalid_api_key")

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionFields, make_completion_request)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatFields, make_chat_request)

    async def _answer(
        self,
        request: Request,
        kind: type[Any],
        ask: Callable[[ServedModel, Any], CompletionRequest],
    ) -> Response:
        """Read, validate and admit a request; return a complete or streamed reply."""
        began = time.monotonic()
        body = await self._read(request)
        fields: RequestFields = read_fields(body, kind)
        self._check_model(fields.model)
        try:
            completion = await to_thread.run_sync(ask, self._served, fields)
        except UserError as error:
            raise RequestError(422, str(error)) from error
        reply = Reply(self, completion, self._admit(completion), began)
        if not fields.stream:
            return await _unless_gone(request, reply.whole())
        try:
            await _unless_gone(request, reply.begin())
        except BaseException:
            reply.close()
            raise
        path = request.url.path
        return _Stream(reply, lambda status: self._metrics.replied(path, status))

    def _admit(self, asked: CompletionRequest) -> Feed:
        """Submit all answers of a request to the engine.

        Raises:
            RequestError: there are not enough places, or the server stops.
        """
        if self._worker.failure is not None:
            raise RequestError(503, "the engine has failed; ask again later, or another server")
        if self._is_over:
            raise RequestError(503, _OVER)
        places = self._worker.engine.slots + self._limits.waiting
        if len(asked.requests) > places:
            say = f"n: {len(asked.requests)} answers in one request; this server holds {places}"
            raise RequestError(400, say, param="n")
        if self._worker.open + len(asked.requests) > places:
            say = (
                f"{self._worker.open} answers are being written or waiting, and this request asks"
                f" for {len(asked.requests)} more, of {places} at most; ask again later"
            )
            raise RequestError(429, say, code="queue_full")
        self._metrics.prompt_tokens.inc(asked.prompt_tokens)
        for prompt in asked.prompts:
            self._metrics.prompt_length.observe(len(prompt.ids))
        return self._worker.submit(asked.requests)

    async def _read(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            RequestError: the body is too large, too slow, or not JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of another origin cannot send this type
            say = f"the body's Content-Type is {kind!r:.80}; send application/json"
            raise RequestError(415, say)
        try:
            return await asyncio.wait_for(self._read_body(request), self._limits.seconds)
        except asyncio.TimeoutError:
            raise RequestError(408, "the request's body did not come in time") from None

    async def _read_body(self, request: Request) -> bytes:
        """Return the body, up to the size limit."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._limits.body:
                most = f"{self._limits.body:,} bytes at most; send fewer prompts or a shorter one"
                raise RequestError(413, f"the body is too large: {most}", code="body_too_large")
            parts.append(part)
        return b"".join(parts)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            say = f"model: {name[:200]!r} is not served here; write {self._served.name!r}"
            raise RequestError(404, say, param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        """Return the description of the model."""
        facts = {"id": self._served.name, "object": "model", "created": self._created}
        return {**facts, "owned_by": "llmfoundry", "max_model_len": self._served.length}

    async def _list_models(self, request: Request) -> Response:
        return _reply({"object": "list", "data": [self._model()]})

    async def _show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _reply(self._model())

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        if self._worker.failure is not None:
            return _reply({"status": "failed"}, 503)
        return _reply({"status": "ok"})


class Reply:
    """Reply to one request while the engine writes its answers."""

    def __init__(self, server: Server, asked: CompletionRequest, feed: Feed, began: float) -> None:
        """Nothing has come yet; `began`: when the request arrived, on the monotonic clock."""
        self._feed, self._metrics = feed, server._metrics
        self._writer = ReplyWriter(server._served, asked)
        self._options = asked.fields
        self._began, self._seconds = began, server._limits.seconds
        late = (
            f"the answer took longer than {self._seconds:g} seconds, with the time that it waited;"
            " ask again later, or for fewer tokens"
        )
        error = RequestError(504, late, code="timeout")
        self._timer = asyncio.get_running_loop().call_later(self.left, feed.fail, error)
        self._first: tuple[int, News] | None = None
        self._last_token: dict[int, float] = {}

    @property
    def left(self) -> float:
        """Return the seconds until the timeout."""
        return max(self._began + self._seconds - time.monotonic(), 0)

    async def whole(self) -> Response:
        """Return all answers in one reply."""
        parts: dict[int, list[AnswerDelta]] = {n: [] for n in range(len(self._writer.choices))}
        try:
            while self._feed.is_open:
                index, part = self._take(*await self._feed.next())
                parts[index].append(part)
        finally:
            self.close()
        return _reply(self._writer.whole({index: added(said) for index, said in parts.items()}))

    async def begin(self) -> None:
        """Wait for the first output, so that an error before it gets an HTTP status."""
        self._first = await self._feed.next()
        if isinstance(self._first[1], Exception):
            self._take(*self._first)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream (text/event-stream)."""
        try:
            for index in range(len(self._writer.choices)):
                if (head := self._writer.first(index)) is not None:
                    yield _event(head)
            news = self._first
            while news is not None:
                index, part = self._take(*news)
                if part:
                    yield _event(self._writer.part(index, part))
                news = await self._feed.next() if self._feed.is_open else None
            if (usage := self._writer.last()) is not None:
                yield _event(usage)
        except RequestError as error:  # its status is sent
            yield _event(error.body())
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        """Release the slots that are still in use."""
        self._timer.cancel()
        self._feed.end_all()

    def _take(self, index: int, news: News) -> tuple[int, AnswerDelta]:
        """Return the index and the new part of an answer; raise a RequestError for an exception."""
        if isinstance(news, RequestError):
            raise news
        if isinstance(news, UserError):
            raise RequestError(400, str(news))
        if isinstance(news, Exception):
            raise RequestError(500, str(news))
        choice = self._writer.choices[index]
        if news.token is not None:
            self._time(index)
        part = choice.take(news)
        if choice.is_done:
            self._feed.end(index)  # the engine does not know stop strings and would continue
            self._metrics.ended(str(part.finish))
            self._metrics.answer_length.observe(choice.n_tokens)
            if not self._feed.is_open:
                self._metrics.latency.observe(time.monotonic() - self._began)
        return index, part

    def _time(self, index: int) -> None:
        """Measure the time to the first token and between tokens."""
        now, before = time.monotonic(), self._last_token.get(index)
        self._metrics.tokens.inc()
        if before is not None:
            self._metrics.between_tokens.observe(now - before)
        elif not self._last_token:
            self._metrics.first_token.observe(now - self._began)
        self._last_token[index] = now


class _ReadToTheEnd:
    """Middleware that reads the rest of a rejected request before the reply is sent.

    A client that is still sending when the connection closes gets a network error, not the reply.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] != "http"

        async def receive_noted() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        async def send_after(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                size = 0
                with move_on_after(_DISCARD_SECONDS):
                    while not is_read and size < _DISCARDED:
                        size += len((await receive_noted()).get("body", b""))
            await send(message)

        await self._app(scope, receive_noted, send_after)


class _Stream(StreamingResponse):
    """Streamed reply that releases its slots however it ends."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, count: Callable[[int], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reply.events(), headers=headers)
        self._reply, self._count = reply, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def send_noticed(message: Any) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        sending = super().__call__(scope, receive, send_noticed)
        try:  # the timeout applies also to a client that does not read its reply
            await asyncio.wait_for(sending, self._reply.left + _SEND_GRACE)
        except (asyncio.TimeoutError, ClientDisconnect):
            pass
        finally:
            self._reply.close()
            self._count(200 if is_whole else _LEFT)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client has disconnected.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _other_error(request: Request, error: Exception) -> Response:
    """Return the reply to errors of Starlette: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    say = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        say += "; there are /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics"
    return _reply(RequestError(error.status_code, say).body(), error.status_code)


async def _defect(request: Request, error: Exception) -> Response:
    """Return the reply to an internal error; uvicorn logs the traceback."""
    return _reply(RequestError(500, "a defect of the server; its log has more").body(), 500)


def _reply(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _digest(key: bytes) -> bytes:
    """Return a digest of fixed length, so that comparison takes the same time for any key."""
    return hashlib.sha256(key).digest()
