"""Evaluated model behind a server with OpenAI's protocol (vLLM, llama.cpp, OpenAI …).

Entry point: `Endpoint`. It generates text. If the server echoes texts with log-probabilities
(vLLM and other servers of the completions protocol), it also scores answers: a text is sent with
`echo` and `logprobs`, and `models/echo.py` reads the score from the reply. An error about one
question (too long, not allowed) fails that question. An error about the address, the key or the
model ends the evaluation.
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
MAX_STOPS = 4  # limit of OpenAI; texts are cut here at the other stops
OF_ONE_QUESTION = (400, 413, 422)  # statuses that concern one question: too long or not allowed
_HOPELESS = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)

Spell = Callable[[Sequence[int]], str]
Item = TypeVar("Item")
Output = TypeVar("Output")


class _Refused(Exception):
    """The server refuses a question. The text is that of the Refusal."""


class Endpoint:
    """EvaluatedModel on a server, at temperature 0.

    Attributes:
        url: address up to and including the version, such as https://api.openai.com/v1.
        model: name of the model on the server.
        first_delay: seconds before the second attempt; each later delay is twice as long.
        tokens_computed: input tokens counted by the server; 0 if it does not report them.
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
        """Initialize without sending a request.

        Args:
            url: address of the server.
            model: name of the model.
            api_key_env: environment variable of the key; if it is unset, no key is sent.
            concurrency: concurrent requests of all ranks together.
            chat: send prompts as user messages to /chat/completions, not to /completions.
            timeout: timeout of a request, seconds.
            spell: decodes the tokens of a request, without special tokens; None: no scores.

        Raises:
            UserError: the address is not valid.
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
        self._count_lock = threading.Lock()

    @property
    def can_score(self) -> bool:
        """Return whether the server echoes texts with log-probabilities. The first call tries it.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        if not self._was_tried:
            (self._why_no_scores,) = self._share([("a", " b")], self._try_echo)
            self._was_tried = True
        return self._why_no_scores is None

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        """Return the score of each request, computed over the server's own tokens.

        The requests are distributed over all ranks, and each rank returns all scores.

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
        """Return the greedy continuation of each prompt, cut before its first stop text.

        The prompts are distributed over all ranks, and each rank returns all texts.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        return self._share(prompts, self._continue)

    def _share(
        self, items: Sequence[Item], send: Callable[[Item, threading.Event], Output]
    ) -> list[Output]:
        """Distribute items over all ranks, send them, and gather all outputs on each rank.

        They are distributed over all ranks of any mesh, not over data ranks, so that no item is
        sent twice.

        Raises:
            UserError: a rank failed; raised on every rank.
        """
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._send_all(items, send, self._concurrency)

        # send this rank's items
        rank, size = dist.get_rank(), dist.get_world_size()
        outputs: list[Output] = []
        problems: tuple[str, ...] = ()
        before = self.tokens_computed
        try:
            outputs = self._send_all(items[rank::size], send, max(1, self._concurrency // size))
        except UserError as error:
            problems = error.problems  # raised below, on every rank

        # gather
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, (outputs, problems, self.tokens_computed - before))
        all_problems = dict.fromkeys(line for _, lines, _ in parts for line in lines)
        if all_problems:
            raise UserError(*all_problems)
        self.tokens_computed = before + sum(tokens for _, _, tokens in parts)
        return [parts[i % size][0][i // size] for i in range(len(items))]

    def _send_all(
        self,
        items: Sequence[Item],
        send: Callable[[Item, threading.Event], Output],
        concurrency: int,
    ) -> list[Output]:
        """Send items concurrently; return their outputs in order."""
        given_up = threading.Event()
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(send, item, given_up) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:  # also Ctrl-C; otherwise the pool would wait for every prompt
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _texts(self, request: ScoreRequest) -> tuple[str, str]:
        """Return the texts of context and answer of a request."""
        assert self._spell is not None
        tokens = (*request.tokens, *request.targets[-1:])
        border = len(tokens) - len(request.targets)
        context = self._spell(tokens[:border])
        return context, self._spell(tokens)[len(context) :]

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
        """Return why the server cannot score texts; None if it can."""
        body = {"model": self.model, "temperature": 0, "prompt": "".join(texts), **ECHO}
        try:
            read_score(self._post("/completions", body, given_up), *texts)
        except _Refused as error:
            return str(error)
        except (KeyError, IndexError, TypeError, ValueError):
            return "it does not echo a text with logprobs"
        return None

    def _continue(self, prompt: GenerationPrompt, given_up: threading.Event) -> str | Refusal:
        """Request the continuation of one prompt."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        body["max_tokens"] = prompt.max_new_tokens
        if prompt.stops:
            body["stop"] = list(prompt.stops[:MAX_STOPS])
        if self.chat:
            user_message = {"role": "user", "content": prompt.text}
            body["messages"] = [dict(m) for m in prompt.messages] or [user_message]
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
        """Return the continuation in a reply; "" if a message has no content."""
        with suppress(KeyError, IndexError, TypeError):
            choice = reply["choices"][0]
            if self.chat and "tool_calls" in choice["message"] and choice["message"]["tool_calls"]:
                return json.dumps(choice["message"]["tool_calls"][0]["function"])
            text = choice["message"]["content"] if self.chat else choice["text"]
            if text is None or isinstance(text, str):
                return text or ""
        raise self._other_protocol(reply)

    def _other_protocol(self, reply: Any) -> UserError:
        """Return the error for a reply that does not follow the protocol."""
        shown = json.dumps(reply)[:200]
        return UserError(
            f"{self.url}: does not answer as OpenAI's protocol has it: {shown}; write the address"
            " of a server that speaks it, up to and including /v1"
        )

    def _post(self, path: str, body: Mapping[str, Any], given_up: threading.Event) -> Any:
        """Return the reply to a request, retried if the server is busy, fails or disconnects.

        Args:
            path: path below the address.
            body: body of the request.
            given_up: set if another request has failed for good.

        Raises:
            UserError: no reply, for a reason that concerns every question.
            _Refused: the server refuses this question.
        """

        def attempt() -> Any:
            reply = self._send(path, body)
            self._has_answered = True
            self._count(reply)
            return reply

        def again(error: Exception, failures: int) -> float:
            retry_after = 0.0
            # reason of the failure; permanent errors are raised
            if isinstance(error, urllib.error.HTTPError):
                self._has_answered = True
                why = self._failed(error)
                retry_after = _seconds(error.headers.get("Retry-After"))
            elif isinstance(error, OSError | http.client.HTTPException):
                reason = getattr(error, "reason", error)
                if isinstance(reason, _HOPELESS) and not self._has_answered:
                    raise UserError(self._unreachable(reason)) from error
                why = str(reason) or type(reason).__name__
            else:
                raise error

            # delay of the next attempt
            if failures == ATTEMPTS or given_up.is_set():
                raise UserError(
                    f"{self.url}: gave no answer in {failures} attempts: {why}; try later, or lower"
                    f" the endpoint's concurrency ({self._concurrency})"
                )
            delay = backoff(failures, first=self.first_delay, longest=LONGEST_DELAY, jitter=_JITTER)
            return min(max(retry_after, delay), LONGEST_DELAY)

        return retry(attempt, again=again, wait=given_up.wait)

    def _count(self, reply: Any) -> None:
        with suppress(KeyError, TypeError), self._count_lock:
            self.tokens_computed += int(reply["usage"]["prompt_tokens"])

    def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Send a POST request, or GET without a body; return the parsed JSON of the reply."""
        headers = {"Content-Type": "application/json", "User-Agent": "llmfoundry"}
        if key := os.environ.get(self._key_env):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            content = response.read()
        try:
            return parse_json(content)
        except ValueError:  # such as an HTML page, for which `_text` raises an error
            return content.decode(errors="replace").strip()

    def _failed(self, error: urllib.error.HTTPError) -> str:
        """Return the reason of a transient error; raise a permanent one.

        Raises:
            _Refused: the error concerns this question.
            UserError: it concerns all questions.
        """
        message, code = _message(error)
        reason = f"{error.code} {error.reason}" + (f": {message}" if message else "")
        if error.code >= 500 or (error.code == 429 and code != "insufficient_quota"):
            return reason
        if error.code in OF_ONE_QUESTION:
            raise _Refused(reason) from error
        raise UserError(f"{self.url}: {reason}; {self._remedy(error.code)}") from error

    def _remedy(self, status: int) -> str:
        """Return what the user can do about a permanent error status."""
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
        """Return up to 20 names of the server's models; none if it does not list them."""
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
    """Return message and code of an error reply, in any of the forms that servers use."""
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
    """Return the seconds of a Retry-After header; 0 if it is missing or a date."""
    value = (retry_after or "").strip()
    return float(value) if value.replace(".", "", 1).isdecimal() else 0.0
