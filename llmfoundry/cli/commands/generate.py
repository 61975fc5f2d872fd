"""`scripts/generate.py`: continue a prompt or answer a message, printing as it goes."""

from __future__ import annotations

import sys

from llmfoundry.api.generation import (
    chosen_template,
    continue_prompt,
    load_drawn,
    open_conversation,
    open_drawn,
)
from llmfoundry.builders.model_layout import join_layout
from llmfoundry.builders.open_model import LoadedModel, lead
from llmfoundry.distributed.local_ranks import with_local_ranks
from llmfoundry.inference.engine import check_length
from llmfoundry.recipe.after_training import GenerateRecipe
from llmfoundry.terminal import shown_on


def generate(recipe: GenerateRecipe) -> None:
    """Print prompt and continuation, or the answer to a message, on stdout."""
    recipe.fill()
    with with_local_ranks(recipe.parallel), join_layout(recipe.parallel) as (world, layout):
        opened = open_drawn(recipe, world, layout)
        template = None
        if recipe.message is not None:
            template = chosen_template(recipe, opened.tokenizer)
        else:  # before the weights are read, if the limit is known then
            n_prompt = len(opened.prompt_ids(recipe.prompt))
            check_length(opened.longest, n_prompt, recipe.max_new_tokens)

        def speak(model: LoadedModel) -> None:
            if recipe.message is not None:
                pieces = open_conversation(recipe, opened, model, template).ask(recipe.message)
            else:
                pieces = continue_prompt(recipe, opened, model)
            for piece in pieces:
                print(shown_on(sys.stdout, piece), end="", flush=True)
            print()

        lead(load_drawn(opened, world), world, speak)
