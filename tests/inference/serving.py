"""A server on a port of loopback, and an engine that writes what it is told to."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn

from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.inference.requests import SequenceRequest, TokenLogprob, TokenOutput
from llmfoundry.inference.serve.app import Limits, Server
from llmfoundry.inference.serve.request_fields import ServedModel
from llmfoundry.inference.serve.worker import EngineWorker

EOS = 256  # of the tokenizer of bytes


@dataclass
class _Running:
    request: SequenceRequest
    text: list[int]
    drawn: int = 0


class ScriptedEngine:
    """Writes the bytes of what stands behind `say:` in a prompt, then the end of text."""

    def __init__(self, *, slots: int = 4, length: int = 4096, delay: float = 0.0) -> None:
        self.slots, self.length, self.delay = slots, length, delay
        self.fails: Exception | None = None
        self._numbers = 0
        self._open: dict[int, _Running] = {}  # the first `slots` have a slot

    @property
    def running(self) -> int:
        return min(len(self._open), self.slots)

    @property
    def waiting(self) -> int:
        return len(self._open) - self.running

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def add(self, request: SequenceRequest) -> int:
        prompt = bytes(i for i in request.prompt if i < EOS)
        if b"refuse" in prompt:
            raise UserError("prompt: asks to be refused")
        self._numbers += 1
        self._open[self._numbers] = _Running(request, [*prompt.rpartition(b"say:")[2], EOS])
        return self._numbers

    def cancel(self, number: int) -> None:
        self._open.pop(number, None)

    def step(self) -> list[TokenOutput]:
        time.sleep(self.delay)
        if self.fails is not None:
            raise self.fails
        news = [self._next(number, self._open[number]) for number in [*self._open][: self.slots]]
        for one in news:
            if one.finish is not None:
                del self._open[one.request]
        return news

    def _next(self, number: int, running: _Running) -> TokenOutput:
        request, token = running.request, running.text[min(running.drawn, len(running.text) - 1)]
        judged = None
        if request.prompt_logprobs and running.drawn == 0:
            judged = tuple(_judged(n, token) for n, token in enumerate(request.prompt))
        if token in request.stop_ids or request.max_new_tokens == 0:
            finish = "stop" if token in request.stop_ids else "length"
            return TokenOutput(number, None, finish, prompt_logprobs=judged)
        running.drawn += 1
        is_last = running.drawn == request.max_new_tokens
        top = ((token, -0.5), (ord("z"), -1.5))[: request.logprobs or 0]
        return TokenOutput(number, token, "length" if is_last else None, -0.5, top, judged)


def _judged(place: int, token: int) -> TokenLogprob:
    """Of a prompt's token: minus its id, so that a shifted list is seen."""
    return (
        TokenLogprob(token, -float(token), ((token, -float(token)),))
        if place
        else TokenLogprob(token, None)
    )


TEMPLATE = """{% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no kings') }}\
{% endif %}{{ m.role }}: {{ m.content }}</turn>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def served_bytes(engine: Any, **settings: Any) -> ServedModel:
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
    template = ChatTemplate(TEMPLATE, {}, is_trusted=True)
    known = ServedModel(
        "m",
        tokenizer,
        template,
        prompt_ids=partial(prompt_ids, tokenizer),
        n_tokens=tokenizer.vocab_size,
        length=engine.length,
        most_tokens=engine.length,
        most_sequences=64,
        end_ids=frozenset({EOS}),
    )
    return replace(known, **settings)


def prompt_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    return tokenizer.encode_prompt(text) if add_special_tokens else tokenizer.encode_chat(text)


@dataclass
class Running:
    """A server that answers, and how to ask it."""

    url: str
    server: Server
    worker: EngineWorker
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def loop(self) -> Any:
        """The event loop's."""
        return self.worker._loop

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status, and the JSON of the reply or its text."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self.headers, **headers}
        sent = {name.replace("_", "-"): value for name, value in sent.items()}
        request = urllib.request.Request(self.url + path, data, sent)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, content = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        status, reply = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, reply
        return reply

    def events(self, path: str, body: Any) -> list[Any]:
        """What a stream sends; its end is checked."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        lines = text.split("\n\n")
        assert lines.pop() == "" and lines.pop() == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextmanager
def running(
    engine: Any,
    *,
    served: ServedModel | None = None,
    key: str | None = None,
    body: int = 100_000,
    waiting: int = 64,
    seconds: float = 60.0,
    log_level: str = "error",
    **bounds: Any,
) -> Iterator[Running]:
    """A server on a port that the system gives, in a thread."""
    worker = EngineWorker(engine)
    limits = Limits(body, waiting, seconds, **bounds)
    server = Server(served or served_bytes(engine), worker, limits, key=key, only_local=key is None)
    config = uvicorn.Config(
        server.app,
        port=0,
        http=server.connections,
        ws="none",
        log_level=log_level,
        timeout_graceful_shutdown=5,
    )
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = web.servers[0].sockets[0].getsockname()[1]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        yield Running(f"http://127.0.0.1:{port}", server, worker, headers)
    finally:
        web.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def until(condition: Any, seconds: float = 120.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.01)
