"""Generation of text by a loaded model: a continued prompt, or a conversation.

`Model.generate`, `scripts/generate.py` and `scripts/chat.py` call `continue_prompt` and
`open_conversation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmfoundry.builders.model_layout import ModelLayout
from llmfoundry.builders.open_model import LoadedModel, OpenedModel, open_model
from llmfoundry.builders.registry import find_address
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import enough_memory
from llmfoundry.inference.engine import SlotEngine, check_length, stream
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.inference.text import Conversation, stream_text
from llmfoundry.recipe.after_training import ChatRecipe, GenerateRecipe, SamplingRecipe, ServeRecipe
from llmfoundry.terminal import ignore_line, to_stderr


def open_drawn(
    recipe: SamplingRecipe | ServeRecipe, world: World, layout: ModelLayout
) -> OpenedModel:
    """Open the model of a recipe, without its weights; rank 0 prints notes to stderr."""
    assert recipe.checkpoint is not None
    uri, note = recipe.registry.uri, _note(world)
    name = find_address(recipe.checkpoint, "checkpoint", world, uri=uri, note=note)
    return open_model(
        name, world, note=note, precision=recipe.precision, layout=layout, weights=recipe.weights
    )


def chosen_template(recipe: GenerateRecipe | ChatRecipe, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a recipe.

    Raises:
        UserError: the model has no chat template, or not the requested one.
    """
    choice = recipe.chat_template
    return tokenizer.chat if choice is None else tokenizer.chat_by(choice, key="chat_template")


def open_conversation(
    recipe: GenerateRecipe | ChatRecipe,
    opened: OpenedModel,
    model: LoadedModel,
    template: ChatTemplate | None,
) -> Conversation:
    """Return an empty conversation with a model."""
    return Conversation(
        opened.tokenizer,
        Drawer(recipe, model).draw,
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
            return model.stream_without_cache(request)
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
            way = None if self._recipe.kv_cache else "anew"
            self._engine = model.engine(slots=1, length=length, way=way)
        return self._engine


def continue_prompt(
    recipe: GenerateRecipe, opened: OpenedModel, model: LoadedModel
) -> Iterator[str]:
    """Yield the prompt of a recipe, and then its continuation in pieces."""
    ids = opened.prompt_ids(recipe.prompt)
    tokens = Drawer(recipe, model).draw(ids, recipe.max_new_tokens)
    yield recipe.prompt
    yield from stream_text(tokens, opened.tokenizer.decode, prompt=ids)


def load_drawn(opened: OpenedModel, world: World) -> LoadedModel:
    """Load the weights of a model; rank 0 prints notes to stderr."""
    loaded = opened.load()
    note = _note(world)
    for line in loaded.notes:
        note(line)
    return loaded


def _note(world: World) -> Callable[[str], None]:
    return to_stderr if world.is_main else ignore_line
