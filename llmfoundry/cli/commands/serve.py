"""`scripts/serve.py`: a model behind an OpenAI-compatible server, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import copy
import signal
import socket
from contextlib import AbstractContextManager, nullcontext

from llmfoundry.api.generation import load_drawn, open_drawn
from llmfoundry.builders.model_layout import join_layout
from llmfoundry.builders.open_model import LoadedModel, OpenedModel, lead
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.local_ranks import with_local_ranks
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, enough_memory, import_optional
from llmfoundry.inference.serve.request_fields import ServedModel
from llmfoundry.inference.serve.worker import EngineWorker
from llmfoundry.recipe.after_training import ServeRecipe
from llmfoundry.redaction import OPTIONS, hide, public
from llmfoundry.terminal import to_stderr

_CLOSING = 10  # seconds, once all is written or given up, for clients to read it


def serve(recipe: ServeRecipe) -> None:
    """Open the model and answer until a signal; what was begun by then is written to its end."""
    for package in ("uvicorn", "starlette"):  # before the model, which takes minutes
        import_optional(package, "scripts/serve.py", extra="serve")
    key = recipe.read_key()
    if key is not None:
        hide({OPTIONS: {"key": key}})
    with (
        with_local_ranks(recipe.parallel),
        join_layout(recipe.parallel) as (world, layout),
        _listener(recipe, world) as listener,
    ):
        if world.size > 1 and not layout.is_sharded:
            raise UserError(
                f"parallel: each of {world.size} processes would hold the full model; write"
                " parallel=fsdp, or start one process"
            )
        opened = open_drawn(recipe, world, layout)
        assert recipe.checkpoint is not None
        template, why = chat_template(recipe, opened.tokenizer)
        _length(recipe, opened, opened.longest)
        loaded = load_drawn(opened, world)
        served = ServedModel(
            recipe.model_name or public(recipe.checkpoint),
            opened.tokenizer,
            template,
            prompt_ids=opened.prompt_ids,
            n_tokens=loaded.n_tokens,
            length=_length(recipe, opened, loaded.longest),
            most_tokens=recipe.max_new_tokens,
            most_sequences=recipe.max_answers,
            end_ids=loaded.end_ids,
            no_template=why,
        )

        def answer(model: LoadedModel) -> None:
            with enough_memory(
                f"slots: keys and values of {recipe.slots} x {served.length} tokens do not fit;"
                " write fewer slots, or a smaller max_seq_len"
            ):
                engine = model.engine(slots=recipe.slots, length=served.length)
            assert listener is not None, "of rank 0"
            run_server(recipe, served, EngineWorker(engine), listener, key)

        lead(loaded, world, answer)


def chat_template(recipe: ServeRecipe, tokenizer: Tokenizer) -> tuple[ChatTemplate | None, str]:
    """Return the chat template, or None and the reason why the model cannot chat.

    Raises:
        UserError: the tokenizer does not support the template of the recipe.
    """
    if recipe.chat_template is not None:
        template = tokenizer.chat_by(recipe.chat_template, key="chat_template")
        template.end_of_turn  # noqa: B018 - raises a UserError if there is none
        return template, ""
    if not tokenizer.has_chat:
        return None, "the model has no chat template"
    try:
        tokenizer.chat.end_of_turn  # noqa: B018 - raises a UserError if there is none
    except UserError as error:
        return None, str(error)
    return tokenizer.chat, ""


def _length(recipe: ServeRecipe, opened: OpenedModel, longest: int | None) -> int:
    """Return the maximum number of tokens of a prompt and its answer together.

    Args:
        recipe: recipe of the server.
        opened: the model.
        longest: number of learned positions; None: the model has none.

    Raises:
        UserError: max_seq_len exceeds the learned positions of the model.
    """
    length = recipe.max_seq_len or opened.window
    if longest is not None and length > longest:
        raise UserError(
            f"max_seq_len: {length}, but the model's learned positions end at {longest};"
            " write that at most"
        )
    return length


def run_server(
    recipe: ServeRecipe,
    served: ServedModel,
    worker: EngineWorker,
    listener: socket.socket,
    key: str | None,
) -> None:
    """Answer requests at an open socket until SIGINT or SIGTERM.

    Raises:
        BaseException: the error of the engine, after the server has ended.
    """
    # the application
    import uvicorn

    from llmfoundry.inference.serve.app import Limits, Server
    from llmfoundry.inference.serve.connections import raise_open_files

    raise_open_files()
    limits = Limits(int(recipe.max_body_mib * 2**20), recipe.max_waiting, recipe.timeout)
    server = Server(served, worker, limits, key=key, only_local=key is None)

    # uvicorn
    logging = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logging["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config = uvicorn.Config(
        server.app,
        log_config=logging,
        http=server.connections,
        backlog=limits.pending // 4,  # also the number of connections that asyncio accepts at once
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_level="info" if recipe.access_log else "warning",
        access_log=recipe.access_log,
        server_header=False,
        timeout_graceful_shutdown=round(recipe.drain_timeout) + _CLOSING,
    )

    class Web(uvicorn.Server):
        """uvicorn's server, which lets the application finish its requests before it ends."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Finish the requests for at most `drain_timeout`, then end."""
            server.drain(recipe.drain_timeout)
            await super().shutdown(sockets)

    # end if the engine fails; uvicorn raises a received signal again after the server has ended,
    # when these empty handlers ignore it
    web = Web(config)
    worker.on_failure = lambda: setattr(web, "should_exit", True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    # serve
    host, port = listener.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    to_stderr(f"serving {served.name} at http://{place}/v1; Ctrl-C or SIGTERM ends it")
    web.run(sockets=[listener])
    if worker.failure is not None:
        raise worker.failure


def _listener(recipe: ServeRecipe, world: World) -> AbstractContextManager[socket.socket | None]:
    """Return the open socket of rank 0; None on all other ranks."""
    return _listen(recipe.host, recipe.port) if world.is_main else nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UserError: the address is in use or not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"port: {port} of {host}: {reason}; write another port, 0 for any, or another host"
        ) from error
