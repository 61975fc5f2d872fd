"""`scripts/generate.py`: continue a prompt, printing as it goes."""

from __future__ import annotations

import sys

from llmfoundry.build.job import build_autocast
from llmfoundry.build.start import load_checkpoint
from llmfoundry.parallel.launch import join
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.tasks import GenerateRecipe
from llmfoundry.serve.generate import stream_text, stream_tokens


def generate(recipe: GenerateRecipe) -> None:
    """Print prompt and continuation on stdout."""
    assert recipe.checkpoint is not None
    with join(ParallelConfig()) as world:
        loaded = load_checkpoint(
            recipe.checkpoint, world, note=_to_stderr, precision=recipe.precision
        )
        tokenizer = loaded.tokenizer
        tokens = stream_tokens(
            loaded.root,
            tokenizer.eos_id,
            tokenizer.encode_prompt(recipe.prompt),
            max_new_tokens=recipe.max_new_tokens,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            seed=recipe.seed,
            device=world.device,
            autocast=build_autocast(loaded.recipe.precision, world.device),
            kv_cache=recipe.kv_cache,
            n_tokens=tokenizer.vocab_size,
        )
        print(recipe.prompt, end="", flush=True)
        for text in stream_text(tokens, tokenizer.decode):
            print(text, end="", flush=True)
        print()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
