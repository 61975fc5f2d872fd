"""`scripts/generate.py`: continue a prompt or answer a message, printing as it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from llmfoundry.builders.job import build_autocast
from llmfoundry.builders.resume import Loaded, load_checkpoint
from llmfoundry.distributed.launch import World, join
from llmfoundry.inference.chat import Conversation, Draw
from llmfoundry.inference.generate import stream_text, stream_tokens
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.scripts.after_training import ChatRecipe, DrawRecipe, GenerateRecipe
from llmfoundry.terminal import shown_on


def generate(recipe: GenerateRecipe) -> None:
    """Print prompt and continuation, or the answer to a message, on stdout."""
    recipe.fill()
    with join(ParallelConfig()) as world:
        loaded = open_model(recipe, world)
        if recipe.message is not None:
            pieces = open_conversation(recipe, loaded, world).ask(recipe.message)
        else:
            pieces = _continue(recipe, loaded, world)
        for piece in pieces:
            print(shown_on(sys.stdout, piece), end="", flush=True)
        print()


def open_model(recipe: DrawRecipe, world: World) -> Loaded:
    """The model that a recipe asks; what it has to say goes to stderr."""
    assert recipe.checkpoint is not None
    return load_checkpoint(recipe.checkpoint, world, note=_to_stderr, precision=recipe.precision)


def open_conversation(
    recipe: GenerateRecipe | ChatRecipe, loaded: Loaded, world: World
) -> Conversation:
    """A conversation with the model, in which nothing was said.

    Raises:
        UserError: the model has no chat template, or not the one that is asked for.
    """
    tokenizer, choice = loaded.tokenizer, recipe.chat_template
    window = loaded.recipe.model.max_seq_len
    assert window is not None, "the recipe was filled"
    return Conversation(
        tokenizer,
        draw_from(recipe, loaded, world),
        window=window,
        max_new_tokens=recipe.max_new_tokens,
        template=None if choice is None else tokenizer.chat_by(choice, key="chat_template"),
        system=recipe.system,
    )


def draw_from(recipe: DrawRecipe, loaded: Loaded, world: World) -> Draw:
    """A function from a prompt's ids to the tokens that the model draws after them."""

    def draw(prompt_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        return stream_tokens(
            loaded.root,
            loaded.tokenizer.eos_id,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            seed=recipe.seed,
            device=world.device,
            autocast=build_autocast(loaded.recipe.precision, world.device),
            kv_cache=recipe.kv_cache,
            n_tokens=loaded.tokenizer.vocab_size,
        )

    return draw


def _continue(recipe: GenerateRecipe, loaded: Loaded, world: World) -> Iterator[str]:
    tokenizer = loaded.tokenizer
    draw = draw_from(recipe, loaded, world)
    tokens = draw(tokenizer.encode_prompt(recipe.prompt), recipe.max_new_tokens)
    yield recipe.prompt
    yield from stream_text(tokens, tokenizer.decode)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
