"""`scripts/generate.py`: continue a prompt or answer a message, printing as it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from llmfoundry.builders.open_model import LoadedModel, OpenedModel, open_model
from llmfoundry.builders.registry import find_address
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import enough_memory
from llmfoundry.inference.decoder_slots import first_process, stream_tokens
from llmfoundry.inference.engine import SlotEngine, check_length, stream
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.inference.text import Conversation, stream_text
from llmfoundry.recipe.after_training import ChatRecipe, GenerateRecipe, SamplingRecipe
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.terminal import shown_on


def generate(recipe: GenerateRecipe) -> None:
    """Print prompt and continuation, or the answer to a message, on stdout."""
    recipe.fill()
    with join(ParallelConfig()) as world:
        opened = open_drawn(recipe, world)
        if recipe.message is not None:
            pieces = open_conversation(recipe, opened).ask(recipe.message)
        else:
            pieces = _continue(recipe, opened)
        for piece in pieces:
            print(shown_on(sys.stdout, piece), end="", flush=True)
        print()


def open_drawn(recipe: SamplingRecipe, world: World) -> OpenedModel:
    """The model that a recipe asks; what it has to say goes to stderr."""
    assert recipe.checkpoint is not None
    uri = recipe.registry.uri
    name = find_address(recipe.checkpoint, "checkpoint", world, uri=uri, note=_to_stderr)
    return open_model(name, world, note=_to_stderr, precision=recipe.precision)


def open_conversation(recipe: GenerateRecipe | ChatRecipe, opened: OpenedModel) -> Conversation:
    """A conversation with the model, in which nothing was said.

    Raises:
        UserError: the model has no chat template, or not the one that is asked for.
    """
    tokenizer, choice = opened.tokenizer, recipe.chat_template
    template = tokenizer.chat if choice is None else tokenizer.chat_by(choice, key="chat_template")
    drawer = Drawer(recipe, _loaded(opened))
    return Conversation(
        tokenizer,
        drawer.draw,
        window=opened.window,
        max_new_tokens=recipe.max_new_tokens,
        template=template,
        system=recipe.system,
    )


class Drawer:
    """Draws tokens after prompts, one prompt at a time."""

    def __init__(self, recipe: SamplingRecipe, model: LoadedModel) -> None:
        self._recipe, self._model = recipe, model
        self._engine: SlotEngine | None = None

    def draw(self, prompt_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        """The tokens that the model draws after a prompt.

        Raises:
            UserError: it is longer than the model reads.
        """
        recipe, model = self._recipe, self._model
        check_length(model.longest, len(prompt_ids), max_new_tokens)
        how = Sampling(recipe.temperature, recipe.top_k, recipe.top_p, seed=recipe.seed)
        request = SequenceRequest(tuple(prompt_ids), max_new_tokens, how, model.end_ids)
        if not recipe.kv_cache and model.root is not None:
            return stream_tokens(
                model.root,
                request,
                device=model.device,
                autocast=model.autocast,
                n_tokens=model.n_tokens,
            )
        length = len(prompt_ids) + max_new_tokens
        with enough_memory(
            f"max_new_tokens: keys and values of {length} tokens do not fit; write fewer"
        ):
            engine = self._with_room(length)
        return stream(engine, request)

    def _with_room(self, length: int) -> SlotEngine:
        """An engine of one slot; it keeps what it has read for the next prompt that begins so."""
        model = self._model
        if self._engine is None or self._engine.length < length:
            length = max(length, 2 * (self._engine.length if self._engine else 0))
            self._engine = None  # before the next takes memory
            if self._recipe.kv_cache:
                self._engine = model.engine(slots=1, length=length)
            else:
                rows = model.slot_model(slots=1, length=length, way="anew")
                self._engine = SlotEngine(rows, agree=first_process(model.device))
        return self._engine


def _continue(recipe: GenerateRecipe, opened: OpenedModel) -> Iterator[str]:
    tokenizer, loaded = opened.tokenizer, _loaded(opened)
    ids = opened.prompt_ids(recipe.prompt)
    tokens = Drawer(recipe, loaded).draw(ids, recipe.max_new_tokens)
    yield recipe.prompt
    yield from stream_text(tokens, tokenizer.decode, prompt=ids)


def _loaded(opened: OpenedModel) -> LoadedModel:
    loaded = opened.load()
    for line in loaded.notes:
        _to_stderr(line)
    return loaded


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
