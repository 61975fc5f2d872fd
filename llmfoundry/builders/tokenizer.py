"""Tokenizer of a run, and the rows of the embedding for its tokens.

`check_run` (`preflight.py`) and the Python API call both functions before data is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llmfoundry.builders.adapter import train_new_rows
from llmfoundry.builders.data import learning_corpus
from llmfoundry.builders.new_rows import settle_new_rows
from llmfoundry.builders.pretrained import PretrainedModel, fit_vocabulary
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import PRETRAINED
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.source import under_key
from llmfoundry.recipe.train import ResolvedTrainRecipe


def make_tokenizer(
    recipe: ResolvedTrainRecipe, world: World, pretrained: PretrainedModel | None = None
) -> Tokenizer:
    """Return the recipe's tokenizer; `train` is trained on the recipe's corpora."""
    if recipe.tokenizer.name == PRETRAINED:
        assert pretrained is not None, "checked by the recipe"
        tokenizer, rows = pretrained.tokenizer, pretrained.config.vocab_size
        tokenizer.split_special_tokens = recipe.tokenizer.split_special_tokens
        limit = None if pretrained.may_grow else rows
        tokenizer.add_tokens(recipe.tokenizer.add_tokens, room=_room(limit, tokenizer))
        if recipe.tokenizer.chat_template is not None:
            room = _room(limit, tokenizer)
            choice, trusted = recipe.tokenizer.chat_template, recipe.tokenizer.trust_chat_template
            tokenizer.use_chat_template(choice, room=room, is_trusted=trusted)
        if variables := recipe.data.chat_template_kwargs:
            tokenizer.set_chat_variables(variables, key="data.chat_template_kwargs")
        return tokenizer
    learns = recipe.tokenizer.name == "train"
    data = learning_corpus(recipe.data) if learns else recipe.data
    build = partial(build_tokenizer, recipe.tokenizer, data, progress=True)
    with under_key("data.streams.NAME" if recipe.data.streams else "data"):
        return on_rank0(world, build, patient=True)


def _room(rows: int | None, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens that may be added to a model of `rows` rows."""
    return None if rows is None else rows - tokenizer.vocab_size


def settle_vocabulary(
    recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, note: Callable[[str], None]
) -> None:
    """Set vocab_size to the tokenizer's number of tokens, or check the recipe's value."""
    if isinstance(recipe, ResolvedFinetuneRecipe):
        rows = recipe.model.vocab_size
        fit_vocabulary(recipe.model, tokenizer, recipe.base)
        new_ids = set(range(rows, tokenizer.vocab_size)) | set(tokenizer.new_ids)
        _check_adapter_tokens(recipe, tokenizer)
        train_new_rows(recipe, sorted(new_ids), note)
        settle_new_rows(recipe, tokenizer.pieces)
    recipe.model.fill(vocab_size=tokenizer.vocab_size)
    size = recipe.model.vocab_size
    if size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size: {size} is less than the tokenizer's {tokenizer.vocab_size};"
            " write at least that, or remove it"
        )


def _check_adapter_tokens(recipe: ResolvedFinetuneRecipe, tokenizer: Tokenizer) -> None:
    """Check that added tokens have the ids of a pretrained adapter, if it has its tokenizer.

    Raises:
        UserError: a token has another id there, so that its row would be that of another token.
    """
    if recipe.adapter.pretrained is None or not tokenizer.new_tokens:
        return
    folder = find_file(recipe.adapter.pretrained, "adapter.pretrained")
    places = (folder, folder / "base", folder.parent / "tokenizer")
    place = next((place for place in places if (place / "tokenizer.json").is_file()), None)
    if place is None:
        return
    theirs = Tokenizer.load(place)
    for token in tokenizer.new_tokens:
        here, there = tokenizer.id_of(token), theirs.id_of(token)
        is_taken = there is None and here is not None and here < theirs.vocab_size
        if is_taken or there not in (None, here):
            what = "another token has it" if is_taken else f"it has the id {there}"
            raise UserError(
                f"tokenizer.add_tokens: {token} gets the id {here}, but {what} in"
                f" adapter.pretrained ({place}); write the tokens of its run in their order"
            )
