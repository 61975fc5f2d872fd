"""`scripts/chat.py`: talk with a model; its answers stream.

On a terminal it asks for each message. Where standard input is a file or a pipe, each line is a
message, and each answer goes to stdout; what else there is to say goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from llmfoundry.api.generation import (
    chosen_template,
    load_drawn,
    open_conversation,
    open_drawn,
)
from llmfoundry.builders.model_layout import join_layout
from llmfoundry.builders.open_model import LoadedModel, lead
from llmfoundry.distributed.local_ranks import with_local_ranks
from llmfoundry.errors import UserError
from llmfoundry.inference.text import Conversation
from llmfoundry.recipe.after_training import ChatRecipe
from llmfoundry.recipe.checks import nearest
from llmfoundry.terminal import shown_on

HELP = """/reset        start over, with the same system message
/system TEXT  start over with this system message; without TEXT with none
/history      what was said so far
/help         these lines
/exit         end; so does Ctrl-D, and Ctrl-C between two answers"""


def chat(recipe: ChatRecipe) -> None:
    """Answer messages until there are no more."""
    recipe.fill()
    with with_local_ranks(recipe.parallel), join_layout(recipe.parallel) as (world, layout):
        opened = open_drawn(recipe, world, layout)
        template = chosen_template(recipe, opened.tokenizer)

        def speak(model: LoadedModel) -> None:
            converse(recipe, open_conversation(recipe, opened, model, template))

        lead(load_drawn(opened, world), world, speak)


def converse(recipe: ChatRecipe, conversation: Conversation) -> None:
    """Answer the lines of standard input until there are no more."""
    if sys.stdin.isatty():
        _print(f"{recipe.checkpoint}; /help shows commands, Ctrl-C ends an answer")
    for line in _lines():
        if line.startswith("/"):
            if not _command(line, conversation):
                return
        elif line.strip():
            _answer(line, conversation)


def _lines() -> Iterator[str]:
    """Messages without their line ends; on a terminal asked for."""
    while True:
        try:
            if sys.stdin.isatty():
                yield input("> ")
                continue
            line = sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: is not UTF-8 text ({error}); convert it") from error
        if not line:
            return
        yield line.rstrip("\r\n")


def _answer(line: str, conversation: Conversation) -> None:
    """Print an answer as it comes; Ctrl-C breaks it off."""
    try:
        pieces = conversation.ask(line)
    except UserError as error:
        _print(str(error))
        return
    try:
        for piece in pieces:
            print(shown_on(sys.stdout, piece), end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print(" …", end="")
    print(flush=True)


def _command(line: str, conversation: Conversation) -> bool:
    """Do what a line that begins with / says; whether to continue after it."""
    name, _, text = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name not in COMMANDS:
        names = (*COMMANDS, "/exit")
        _print(f"{name} is not a command{nearest(name, names)} ({', '.join(names)})")
        return True
    _print(COMMANDS[name](conversation, text.strip()))
    return True


def _reset(conversation: Conversation, text: str) -> str:
    conversation.reset(conversation.system)
    return "a new conversation"


def _system(conversation: Conversation, text: str) -> str:
    conversation.reset(text or None)
    return "a new conversation, " + ("with this system message" if text else "without one")


def _history(conversation: Conversation, text: str) -> str:
    said = [f"{message['role']}: {message['content']}" for message in conversation.messages]
    return "\n".join(said) or "nothing was said"


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/system": _system,
    "/history": _history,
    "/help": lambda conversation, text: HELP,
}


def _print(text: str) -> None:
    print(shown_on(sys.stderr, text), file=sys.stderr, flush=True)
