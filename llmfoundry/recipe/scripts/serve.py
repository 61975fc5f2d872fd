"""The recipe of scripts/serve.py."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.errors import UserError
from llmfoundry.recipe.scripts.train import PRECISIONS
from llmfoundry.recipe.values.bounds import (
    CHAT_TEMPLATE,
    NEW_TOKENS,
    PATH,
    TOKENS,
    Range,
    choice,
    out_of_bounds,
)

_PORTS = Range(0, 65535, "there are no more ports")
_WAITING = Range(0, 2**20, "each holds its prompt in memory")
_SLOTS = Range(1, 2**14, "keys and values of each are kept in memory")
_SHORTEST_KEY = 16  # characters
_SECONDS = Range(above=0, most=86_400, why="it is a day")


@dataclass
class ServeRecipe:
    """Serve a model over HTTP, as OpenAI's clients ask."""

    FOLDER_KEY: ClassVar[str] = "checkpoint"

    checkpoint: Annotated[str | None, PATH] = None
    """A run's folder, or one checkpoint's, or the URL of one; an adapter's folder, as peft saves
    it; a folder that transformers saved, or hf:OWNER/NAME on the hub."""
    host: str = "127.0.0.1"
    """The address to listen at: this machine alone may ask. 0.0.0.0, or any other that is not of
    this machine alone, needs api_key_env."""
    port: Annotated[int, _PORTS] = 8000
    """The port to listen at; 0: any that is free, which is printed."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that clients must send (Authorization: Bearer
    KEY), at least 16 characters; unset: none is asked for."""
    model_name: str | None = None
    """What clients call the model; unset: the checkpoint as it was written."""
    slots: Annotated[int, _SLOTS] = 16
    """Answers written at the same time; keys and values of slots x max_seq_len tokens are kept."""
    max_seq_len: Annotated[int | None, TOKENS] = None
    """Tokens of a prompt and its answer together; unset: the model's own."""
    max_new_tokens: Annotated[int | None, NEW_TOKENS] = None
    """Tokens that one answer may have; unset: as many as max_seq_len leaves."""
    max_answers: Annotated[int, Range(1, 2**14, "each waits in the queue")] = 128
    """Answers to one request: its prompts times n."""
    max_waiting: Annotated[int, _WAITING] = 256
    """Answers that may wait for a slot, of all clients; more are refused (429)."""
    max_body_mib: Annotated[float, Range(above=0, most=1024, why="it is held in memory")] = 4.0
    """MiB that a request's body may have; larger ones are refused (413)."""
    timeout: Annotated[float, _SECONDS] = 600.0
    """Seconds that a request may take, with the time that it waits (504)."""
    drain_timeout: Annotated[float, _SECONDS] = 30.0
    """Seconds that requests under way may still take after SIGTERM or Ctrl-C."""
    precision: Annotated[str | None, choice(PRECISIONS)] = None
    """fp32, amp_bf16 or bf16; unset: the run's own, for others fp32."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """chatml, llama3, zephyr, mpt or a Jinja file; unset: the tokenizer's own."""
    access_log: bool = False
    """A line on stderr for each request: client, path and status."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that what is opened here needs; its own recipe's are not imported."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        if self.checkpoint is None:
            yield "checkpoint: is required; write checkpoint=runs/NAME, a run's folder"
        if not self.host or self.host != self.host.strip():
            yield "host: is no address; write 127.0.0.1 or 0.0.0.0"
        if self.model_name is not None and not self.model_name.strip():
            yield "model_name: is empty; write a name"
        if self.api_key_env is None and not self.is_local:
            yield (
                f"host: {self.host} can be reached from other machines; write"
                " api_key_env=VARIABLE, the environment variable with the key that clients must"
                " send, or host=127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    def read_key(self) -> str | None:
        """What clients must send; None: nothing.

        Raises:
            UserError: the variable is not set, or holds no key.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UserError(
                f"api_key_env: the variable {self.api_key_env} is not set; write"
                f" export {self.api_key_env}=$(openssl rand -hex 32)"
            )
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(
                f"api_key_env: what the variable {self.api_key_env} holds is no key of"
                f" {_SHORTEST_KEY} or more printable ASCII characters without spaces; openssl rand"
                " -hex 32 makes one"
            )
        return key

    def fill(self) -> None:
        """Nothing is derived before the checkpoint is read."""


def is_loopback(host: str) -> bool:
    """Whether a host is localhost, or an address of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
