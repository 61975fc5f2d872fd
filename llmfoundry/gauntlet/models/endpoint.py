"""`Endpoint`: a model behind a server that speaks OpenAI's protocol (vLLM, llama.cpp, OpenAI …).

The gauntlet asks it as it asks a model of ours: it continues texts, and where it can echo a text
with its log-probabilities (vLLM, and others of the completions protocol), it scores them too. What
is wrong with one question (it is too long, it is not allowed) fails that question; what is wrong
with the address, the key or the model ends the evaluation.

A text is sent with `echo` and `logprobs`; `echo` reads the answer's score from the reply.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from llmfoundry.errors import UserError
from llmfoundry.files import parse_json
from llmfoundry.gauntlet.answer_metrics import until_stop
from llmfoundry.gauntlet.models.echo import ECHO, read_score
from llmfoundry.gauntlet.questions import GenerationPrompt, Refusal, Score, ScoreRequest
from llmfoundry.retry import backoff, retry

ATTEMPTS = 8
LONGEST_DELAY = 60.0  # seconds between two attempts
_JITTER = (0.5, 1.5)
MAX_STOPS = 4  # OpenAI's limit; the rest is cut here
OF_ONE_QUESTION = (400, 413, 422)  # too long, or not allowed: other questions may be taken
_HOPELESS = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)

Spell = Callable[[Sequence[int]], str]
Item = TypeVar("Item")
Said = TypeVar("Said")


class _Refused(Exception):
    """The server will not take this question; the words of a Refusal."""


class Endpoint:
    """Texts continued by a server, at temperature 0; a `EvaluatedModel`.

    Attributes:
        url: the address up to and including its version, such as https://api.openai.com/v1.
        model: the name that the server gives the model.
        first_delay: seconds before the second attempt; each later one waits twice as long.
        tokens_computed: of all inputs, as the server counted them; 0 where it does not report them.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 8,
        *,
        chat: bool = False,
        timeout: float = 300.0,
        spell: Spell | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: see above.
            model: see above.
            api_key_env: environment variable with the key; where it is not set, none is sent.
            concurrency: requests under way at the same time, over all processes.
            chat: send each prompt as a user's message to /chat/completions, not to /completions.
            timeout: seconds that the server may be silent.
            spell: the text of a request's tokens, with none for special ones; None: no scores.

        Raises:
            UserError: the address is none.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: is no address; write one such as http://localhost:8000/v1")
        self.url, self.model, self.chat = url.rstrip("/"), model, chat
        self.first_delay = 1.0
        self.tokens_computed = 0
        self._key_env, self._concurrency, self._timeout = api_key_env, concurrency, timeout
        self._has_answered = False
        self._spell = spell
        self._why_no_scores: str | None = None if spell and not chat else "it is asked by chat"
        self._was_tried = self._why_no_scores is not None
        self._counting = threading.Lock()

    @property
    def can_score(self) -> bool:
        """Whether the server echoes a text with its log-probabilities; it is asked once.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        if not self._was_tried:
            (self._why_no_scores,) = self._share([("a", " b")], self._try_echo)
            self._was_tried = True
        return self._why_no_scores is None

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        """A score for each request, in order, of the server's own tokens.

        Several processes deal the requests among themselves, and all get all scores.

        Raises:
            UserError: the server cannot be reached, refuses, or cannot score.
        """
        if not self.can_score:
            raise UserError(
                f"{self.url}: gives no log-probabilities of given texts ({self._why_no_scores}),"
                " which language_modeling, multiple_choice and schema need; keep to tasks of type"
                " generation_task_with_answers, or name a checkpoint or a Hugging Face model"
            )
        return self._share([self._texts(request) for request in requests], self._score)

    def generate(self, prompts: Sequence[GenerationPrompt]) -> list[str | Refusal]:
        """The greedy continuation of each prompt, in order, cut before its first stop.

        Several processes deal the prompts among themselves, and all get all texts.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        return self._share(prompts, self._continue)

    def _share(
        self, items: Sequence[Item], ask: Callable[[Item, threading.Event], Said]
    ) -> list[Said]:
        """What the server says of each, dealt over the processes; all of them get all.

        Over all of them, whatever the mesh, not over data ranks: nothing is asked twice.
        """
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._ask_all(items, ask, self._concurrency)
        rank, size = dist.get_rank(), dist.get_world_size()
        said: list[Said] = []
        problems: tuple[str, ...] = ()
        before = self.tokens_computed
        try:
            said = self._ask_all(items[rank::size], ask, max(1, self._concurrency // size))
        except UserError as error:
            problems = error.problems  # raised below, where all processes raise it
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, (said, problems, self.tokens_computed - before))
        if lines := dict.fromkeys(line for _, lines, _ in parts for line in lines):
            raise UserError(*lines)
        self.tokens_computed = before + sum(tokens for _, _, tokens in parts)
        return [parts[i % size][0][i // size] for i in range(len(items))]

    def _ask_all(
        self,
        items: Sequence[Item],
        ask: Callable[[Item, threading.Event], Said],
        concurrency: int,
    ) -> list[Said]:
        given_up = threading.Event()
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(ask, item, given_up) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:  # Ctrl-C too: without this the pool would wait for every prompt
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _texts(self, request: ScoreRequest) -> tuple[str, str]:
        """Context and target of a request."""
        assert self._spell is not None
        whole = (*request.tokens, *request.targets[-1:])
        border = len(whole) - len(request.targets)
        context = self._spell(whole[:border])
        return context, self._spell(whole)[len(context) :]

    def _score(self, texts: tuple[str, str], given_up: threading.Event) -> Score | Refusal:
        context, target = texts
        body = {"model": self.model, "temperature": 0, "prompt": context + target, **ECHO}
        try:
            reply = self._post("/completions", body, given_up)
            return read_score(reply, context, target)
        except _Refused as error:
            return Refusal(str(error))
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._other_protocol(reply) from None

    def _try_echo(self, texts: tuple[str, str], given_up: threading.Event) -> str | None:
        """Why the server does not score texts; None: it does."""
        body = {"model": self.model, "temperature": 0, "prompt": "".join(texts), **ECHO}
        try:
            read_score(self._post("/completions", body, given_up), *texts)
        except _Refused as error:
            return str(error)
        except (KeyError, IndexError, TypeError, ValueError):
            return "it does not echo a text with logprobs"
        return None

    def _continue(self, prompt: GenerationPrompt, given_up: threading.Event) -> str | Refusal:
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        body["max_tokens"] = prompt.max_new_tokens
        if prompt.stops:
            body["stop"] = list(prompt.stops[:MAX_STOPS])
        if self.chat:
            plain = [{"role": "user", "content": prompt.text}]
            body["messages"] = [dict(m) for m in prompt.messages] or plain
            if prompt.tools:
                body["tools"] = [dict(tool) for tool in prompt.tools]
        else:
            body["prompt"] = prompt.text
        path = "/chat/completions" if self.chat else "/completions"
        try:
            return until_stop(self._text(self._post(path, body, given_up)), prompt.stops)
        except _Refused as error:
            return Refusal(str(error))

    def _text(self, reply: Any) -> str:
        """The continuation in a reply; what a model may leave out, a message's content, is ''."""
        with suppress(KeyError, IndexError, TypeError):
            choice = reply["choices"][0]
            if self.chat and "tool_calls" in choice["message"] and choice["message"]["tool_calls"]:
                return json.dumps(choice["message"]["tool_calls"][0]["function"])
            text = choice["message"]["content"] if self.chat else choice["text"]
            if text is None or isinstance(text, str):
                return text or ""
        raise self._other_protocol(reply)

    def _other_protocol(self, reply: Any) -> UserError:
        shown = json.dumps(reply)[:200]
        return UserError(
            f"{self.url}: does not answer as OpenAI's protocol has it: {shown}; write the address"
            " of a server that speaks it, up to and including /v1"
        )

    def _post(self, path: str, body: Mapping[str, Any], given_up: threading.Event) -> Any:
        """The reply; tried again where the server is busy, fails, or breaks off.

        Raises:
            UserError: there is none, and so it would be for any question.
            _Refused: the server will not take this question.
        """

        def ask() -> Any:
            reply = self._send(path, body)
            self._has_answered = True
            self._count(reply)
            return reply

        def again(error: Exception, failures: int) -> float:
            asked = 0.0
            if isinstance(error, urllib.error.HTTPError):
                self._has_answered = True
                why, asked = self._failed(error), _seconds(error.headers.get("Retry-After"))
            elif isinstance(error, OSError | http.client.HTTPException):
                reason = getattr(error, "reason", error)
                if isinstance(reason, _HOPELESS) and not self._has_answered:
                    raise UserError(self._unreachable(reason)) from error
                why = str(reason) or type(reason).__name__
            else:
                raise error
            if failures == ATTEMPTS or given_up.is_set():
                raise UserError(
                    f"{self.url}: gave no answer in {failures} attempts: {why}; try later, or lower"
                    f" the endpoint's concurrency ({self._concurrency})"
                )
            delay = backoff(failures, first=self.first_delay, longest=LONGEST_DELAY, jitter=_JITTER)
            return min(max(asked, delay), LONGEST_DELAY)

        return retry(ask, again=again, wait=given_up.wait)

    def _count(self, reply: Any) -> None:
        with suppress(KeyError, TypeError), self._counting:
            self.tokens_computed += int(reply["usage"]["prompt_tokens"])

    def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """POST of a body, GET without; what the server's JSON holds."""
        headers = {"Content-Type": "application/json", "User-Agent": "llmfoundry"}
        if key := os.environ.get(self._key_env):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            content = response.read()
        try:
            return parse_json(content)
        except ValueError:  # a page: `_text` says so
            return content.decode(errors="replace").strip()

    def _failed(self, error: urllib.error.HTTPError) -> str:
        """What a failed request says; raised at once where another attempt would not help."""
        message, code = _message(error)
        said = f"{error.code} {error.reason}" + (f": {message}" if message else "")
        if error.code >= 500 or (error.code == 429 and code != "insufficient_quota"):
            return said
        if error.code in OF_ONE_QUESTION:
            raise _Refused(said) from error
        raise UserError(f"{self.url}: {said}; {self._remedy(error.code)}") from error

    def _remedy(self, status: int) -> str:
        """What to write after a status that no other attempt would change."""
        if status in (401, 403):
            if os.environ.get(self._key_env):
                return f"put a key that it accepts into the variable {self._key_env}"
            return f"the variable {self._key_env} is not set; write: export {self._key_env}=..."
        if status == 429:
            return "the account has no credit left; add some, or use another key"
        if status != 404:
            return "correct the address, up to and including /v1, or the name of the model"
        names = self._models()
        if names and self.model not in names:
            return f"it has no model {self.model!r}; write one of: {', '.join(names)}"
        kind = "leave out chat: true" if self.chat else "write chat: true for a chat model"
        return f"write its address up to and including /v1, the name of its model; or {kind}"

    def _models(self) -> list[str]:
        """Names of the server's models, 20 at most; none where it does not list them."""
        try:
            return [str(model["id"]) for model in self._send("/models", None)["data"]][:20]
        except (OSError, http.client.HTTPException, KeyError, TypeError):
            return []

    def _unreachable(self, reason: Exception) -> str:
        if isinstance(reason, ssl.SSLError):
            return f"{self.url}: {reason}; write the address that its certificate is for"
        if isinstance(reason, socket.gaierror):
            return f"{self.url}: its name is not known here ({reason}); correct the address"
        return f"{self.url}: refuses the connection; start the server, or correct the address"


def _message(error: urllib.error.HTTPError) -> tuple[str, str]:
    """The server's words on one line, and its code, in the forms that servers have."""
    content = error.read(10_000).decode(errors="replace")
    try:
        reply = parse_json(content)
    except ValueError:
        return " ".join(content.split())[:200], ""
    reply = reply.get("error", reply) if isinstance(reply, dict) else reply
    if not isinstance(reply, dict):
        return " ".join(str(reply).split())[:500], ""
    words = reply.get("message") or reply.get("detail") or reply
    return " ".join(str(words).split())[:500], str(reply.get("code", ""))


def _seconds(retry_after: str | None) -> float:
    """How long the server asks to wait; 0 where it does not say, or names a date."""
    value = (retry_after or "").strip()
    return float(value) if value.replace(".", "", 1).isdecimal() else 0.0
