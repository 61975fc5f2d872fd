"""The server: requests over HTTP in, answers of the engine out; `cli/commands/serve.py` runs it.

Starlette and uvicorn are the web's side; msgspec, which is installed anyway, checks the fields, so
that FastAPI would add a second language for errors and nothing else. The one idea: a request is
read, checked and admitted before anything of a reply is sent, so that what is wrong with it has a
status of its own; and whatever ends it, a client that leaves or a limit, gives its slots back.
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

_LEFT = 499  # nginx's status for a client that has left; nobody reads it
_DISCARDED = 1 << 26  # bytes of a refused request's body that are read all the same
_DISCARD_SECONDS = 10.0
_OVER = "the server was stopped before the answer was written; ask again later, or another server"
_SEND_GRACE = 5.0  # seconds to send what is written when the time is over
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server.

    Attributes:
        body: bytes.
        waiting: answers that wait for a slot, of all clients.
        seconds: from a request's first byte to the last of its reply.
        head_seconds: for a request's head, from the connection's beginning or the reply before.
        pending: connections that have not sent a whole request; the oldest makes room for a new.
    """

    body: int
    waiting: int
    seconds: float
    head_seconds: float = 10.0
    pending: int = field(default_factory=most_pending)


class Server:
    """The routes, and what they share.

    Attributes:
        app: for uvicorn.
        connections: uvicorn's `http`.
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
        """Nothing is served yet.

        Args:
            served: the model.
            worker: the engine; started and stopped with the application.
            limits: see above.
            key: what clients must send; None: nothing.
            only_local: refuse requests that name another host, as a browser's page would that has
                its name point here.
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
        """Give up in so many seconds what is not written then; called when no requests come in."""

        def give_up() -> None:
            self._is_over = True
            self._worker.fail_all(RequestError(503, _OVER))

        asyncio.get_running_loop().call_later(seconds, give_up)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        try:
            yield
        finally:
            await to_thread.run_sync(self._worker.stop)

    def _guarded(self, path: str, function: Handler) -> Handler:
        """A handler whose client is checked first, and whose errors have OpenAI's form."""

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
        # As it was sent: Starlette puts the socket's address in place of what it cannot parse.
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
        """Read, check, admit; then the reply, whole or as a stream."""
        began = time.monotonic()
        body = await self._read(request)
        fields: RequestFields = read_fields(body, kind)
        self._check_model(fields.model)
        try:
            asked = await to_thread.run_sync(ask, self._served, fields)
        except UserError as error:
            raise RequestError(422, str(error)) from error
        reply = Reply(self, asked, self._admit(asked), began)
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
        """A place for each of the answers, all or none.

        Raises:
            RequestError: there are none, or none are given any more.
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
        """The body.

        Raises:
            RequestError: it is too large, too slow, or of another kind.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also what a page of a browser cannot send unasked
            say = f"the body's Content-Type is {kind!r:.80}; send application/json"
            raise RequestError(415, say)
        try:
            return await asyncio.wait_for(self._read_body(request), self._limits.seconds)
        except asyncio.TimeoutError:
            raise RequestError(408, "the request's body did not come in time") from None

    async def _read_body(self, request: Request) -> bytes:
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
    """One request's answers as the engine writes them."""

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
        """Seconds until its time is over."""
        return max(self._began + self._seconds - time.monotonic(), 0)

    async def whole(self) -> Response:
        """All answers in one reply."""
        parts: dict[int, list[AnswerDelta]] = {n: [] for n in range(len(self._writer.choices))}
        try:
            while self._feed.is_open:
                index, part = self._take(*await self._feed.next())
                parts[index].append(part)
        finally:
            self.close()
        return _reply(self._writer.whole({index: added(said) for index, said in parts.items()}))

    async def begin(self) -> None:
        """Wait for the first news, so that what fails before it has a status of its own."""
        self._first = await self._feed.next()
        if isinstance(self._first[1], Exception):
            self._take(*self._first)

    async def events(self) -> AsyncIterator[bytes]:
        """A stream's events (text/event-stream)."""
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
        """Give back the slots that are still taken."""
        self._timer.cancel()
        self._feed.end_all()

    def _take(self, index: int, news: News) -> tuple[int, AnswerDelta]:
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
            self._feed.end(index)  # at a stop string the engine would go on
            self._metrics.ended(str(part.finish))
            self._metrics.answer_length.observe(choice.n_tokens)
            if not self._feed.is_open:
                self._metrics.latency.observe(time.monotonic() - self._began)
        return index, part

    def _time(self, index: int) -> None:
        now, before = time.monotonic(), self._last_token.get(index)
        self._metrics.tokens.inc()
        if before is not None:
            self._metrics.between_tokens.observe(now - before)
        elif not self._last_token:
            self._metrics.first_token.observe(now - self._began)
        self._last_token[index] = now


class _ReadToTheEnd:
    """Middleware: reads what a refused request still sends, so that its client hears why.

    Who is sending when the connection closes gets an error of the network in place of the reply.
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
    """A reply in events; however it ends, its slots are free after it."""

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
        try:  # a client that does not read what it is sent has no more time than others
            await asyncio.wait_for(sending, self._reply.left + _SEND_GRACE)
        except (asyncio.TimeoutError, ClientDisconnect):
            pass
        finally:
            self._reply.close()
            self._count(200 if is_whole else _LEFT)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is given up when the client leaves.

    Raises:
        ClientDisconnect: it has left.
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
    """What Starlette refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    say = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        say += "; there are /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics"
    return _reply(RequestError(error.status_code, say).body(), error.status_code)


async def _defect(request: Request, error: Exception) -> Response:
    """What is no fault of the client's; uvicorn writes the traceback."""
    return _reply(RequestError(500, "a defect of the server; its log has more").body(), 500)


def _reply(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing takes the same time for any key."""
    return hashlib.sha256(key).digest()
